"""Outputs of defs whose dimensions lie in memory in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.core.dtypes import BFLOAT16, FLOAT32, DType
from tensor_comprehensions.dynamo_backend.def_builder import DefBuilder
from tensor_comprehensions.dynamo_backend.index_views import Value, reshape_value

Outputs = Sequence[tuple[Value, Sequence[int]]]


def double(body: DefBuilder, dtype: DType = FLOAT32) -> Value:
    """A tensor of 4 x 4 elements that a statement makes: twice the parameter."""
    x = body.parameter((4, 4), dtype)
    return body.materialize(Value(x.groups, lambda i: f"(2 * {x.at(i)})", dtype))


def add_one(x: Value) -> Value:
    return Value(x.groups, lambda i: f"({x.at(i)} + 1)", x.dtype)


OUTPUTS: dict[str, tuple[Callable[[Value], Outputs], Callable[[Tensor], Sequence[Tensor]]]] = {
    "one": (lambda t: [(t, (1, 0))], lambda t: [t.T]),
    "one that a later output reads": (lambda t: [(t, (1, 0)), (add_one(t), (0, 1))], lambda t: [t.T, t + 1]),
    "one that an earlier output reads": (lambda t: [(add_one(t), (0, 1)), (t, (1, 0))], lambda t: [t + 1, t.T]),
    "one twice": (lambda t: [(t, (1, 0)), (t, (0, 1))], lambda t: [t.T, t]),
    "one twice in the same order": (lambda t: [(t, (1, 0)), (t, (1, 0))], lambda t: [t.T, t.T]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_outputs_in_another_order(kind: str, dtype: DType) -> None:
    """The sizes are equal, so that no check of sizes finds a wrong order."""
    make_outputs, compute_expected = OUTPUTS[kind]
    body = DefBuilder()
    body.add_outputs(make_outputs(double(body, dtype)))
    x = torch.arange(16.0).reshape(4, 4).to(torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
    found = tc.define(body.text).region(x)
    expected = compute_expected(2 * x)
    for ours, right in zip([found] if isinstance(found, Tensor) else found, expected, strict=True):
        assert torch.equal(ours, right)


def test_a_result_is_written_in_its_order_where_nothing_else_reads_it() -> None:
    body = DefBuilder()
    body.add_outputs([(double(body), (1, 0))])
    assert len(body.text.splitlines()) == 3  # no statement that copies it


def test_factors_of_16_bits_are_stored_as_such() -> None:
    body = DefBuilder()
    x = body.parameter((4, 6), BFLOAT16)
    computed = Value(x.groups, lambda i: f"relu({x.at(i)})", BFLOAT16)
    stored = body.materialize_rounded(computed)
    assert "t0(i0, i1) = bfloat16(relu(float32(x0(i0, i1))))" in body.text
    assert stored.at(("a", "b")) == "float32(t0(a, b))"
    wide = body.materialize(computed)
    assert body.materialize_rounded(wide).at(("a", "b")) == "float32(t2(a, b))"
    before = body.text
    assert body.materialize_rounded(stored) is stored
    assert body.materialize_rounded(x) is x
    single = body.parameter((3,), FLOAT32)
    assert body.materialize_rounded(single) is single
    assert body.text.count("\n") == before.count("\n")


def test_elements_are_rounded_once() -> None:
    body = DefBuilder()
    wide = double(body, BFLOAT16)
    factor = body.materialize_rounded(wide)
    assert body.materialize_rounded(wide).at(("a", "b")) == factor.at(("a", "b")) == "float32(t1(a, b))"
    body.add_outputs([(factor, (0, 1)), (wide, (0, 1)), (wide, (1, 0))])
    assert "-> (t1, t2, t3)" in body.text  # an output is the factor, others have memory of their own
    x = torch.arange(16.0).reshape(4, 4).bfloat16()
    first, second, turned = tc.define(body.text).region(x)
    assert torch.equal(first, 2 * x)
    assert torch.equal(second, 2 * x)
    assert torch.equal(turned, 2 * x.T)


@pytest.mark.parametrize("shape", [(4, 2, 2), (2, 8)])
def test_outputs_in_another_order_with_other_loops_than_their_tensor(shape: tuple[int, ...]) -> None:
    body = DefBuilder()
    order = tuple(reversed(range(len(shape))))
    body.add_outputs([(reshape_value(double(body), shape), order)])
    x = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(tc.define(body.text).region(x).flatten(), (2 * x).view(shape).permute(order).flatten())
