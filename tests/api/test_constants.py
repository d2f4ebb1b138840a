"""`inf` and `nan`: the same in every evaluator and on every target, and no name of a user's is taken away."""

from __future__ import annotations

import math

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs

TYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
X = [1.0, -2.0, math.inf, -math.inf, math.nan, 0.0]
VALUES = {
    "max(x(i), -inf)": [1.0, -2.0, math.inf, -math.inf, math.nan, 0.0],
    "x(i) > 0 ? x(i) : -inf": [1.0, -math.inf, math.inf, -math.inf, -math.inf, -math.inf],
    "fabs(x(i)) < inf ? x(i) : 7": [1.0, -2.0, 7.0, 7.0, 7.0, 0.0],
    "x(i) == -inf ? 1 : 0": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
    "x(i) < 0 ? nan : x(i)": [1.0, math.nan, math.inf, math.nan, math.nan, 0.0],
    "fmin(inf, fmax(nan, x(i)))": [1.0, -2.0, math.inf, -math.inf, math.inf, 0.0],
    "exp(-inf) + x(i)": X,
}


def same(x: torch.Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(x.float(), torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("value", VALUES)
def test_a_constant_is_the_same_everywhere(value: str, type_: str) -> None:
    op = tc.define(f"def f({type_}(N) x) -> (y) {{ y(i) = {value} }}").f
    x = torch.tensor(X, dtype=TYPES[type_])
    same(op(x), VALUES[value])
    same(op.reference(x), VALUES[value])
    with knobs.override_knobs(interpret=True):
        same(op(x), VALUES[value])
    if type_ == "float":
        same(op.compile(x, target="cuda:sm_90").emulate(x), VALUES[value])


def test_gradients_through_constants() -> None:
    op = tc.define("def f(float(N) x) -> (y) { m max=! (x(i) > 0 ? x(i) : -inf) y(i) = x(i) < inf ? x(i) * m : 0 }").f
    x = torch.tensor([1.0, 3.0, -2.0], requires_grad=True)
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0 + 2.0, 3.0]


NAMED = {
    "def f(float(N) inf) -> (y) { y max=! inf(i) }": 2.0,
    "def f(float(inf) x) -> (y) { y max=! x(i) + inf }": 4.0,
    "def f(float(N) x) -> (inf) { inf max=! x(i) }": 2.0,
    "def f(float(N) x) -> (y) { nan(i) = x(i) y max=! nan(i) }": 2.0,
    "def f(float(N) x) -> (y) { y max=! x(i) * inf where inf = 3 }": 6.0,
    "def f(float(N) x) -> (y) { y max=! x(nan) where nan in 0:N }": 2.0,
    "def g(float(N) x) -> (y) { y max=! min(x(i), inf) } def f(float(N) inf) -> (y) { y = g(inf) }": 2.0,
}


@pytest.mark.parametrize("text", NAMED)
def test_a_name_that_a_program_gives_is_its_own(text: str) -> None:
    """What existing programs call `inf` or `nan` stays what they mean by it, also in their gradients."""
    op, x = tc.define(text).f, torch.tensor([1.0, 2.0], requires_grad=True)
    y = op(x)
    y.backward()
    assert y.item() == NAMED[text]
    assert x.grad is not None
    assert x.grad[0].item() == 0
    assert x.grad[1].item() in (1, 3)
