"""What a type checker sees of the package: `make lint` checks this file strictly, and a test runs it."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_type

import tensor_comprehensions as tc

SOURCE = "def scale(float(N) x, float a) -> (y) { y(i) = a * x(i) }"


@tc.op
def doubled(x: torch.Tensor) -> torch.Tensor:
    """def doubled(float(N) x) -> (y) { y(i) = 2 * x(i) }"""
    raise NotImplementedError


@tc.op(backward="def backward(float(N) x, float(N) d_y) -> (d_x) { d_x(i) = 2 * d_y(i) }")
def with_gradient(x: torch.Tensor) -> torch.Tensor:
    """def with_gradient(float(N) x) -> (y) { y(i) = 2 * x(i) }"""
    raise NotImplementedError


class Layer(torch.nn.Module):
    """A user's layer, in a strictly checked program."""

    def __init__(self, ops: tc.Library) -> None:
        super().__init__()
        self.scale: tc.Op = ops.scale
        self.inner = tc.Module(SOURCE, {"a": 2.0})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.scale(x, 2.0)
        z: torch.Tensor = self.inner(y)
        return z


def main() -> None:
    ops = tc.define(SOURCE)
    assert_type(ops, tc.Library)
    assert_type(ops.scale, tc.Op)
    assert_type(ops["scale"], tc.Op)
    assert_type(list(ops), list[tc.Op])
    assert_type(doubled, tc.Op)
    assert_type(with_gradient, tc.Op)
    assert_type(tc.from_expression("y(i) = 2 * x(i)"), tc.Op)
    assert_type(tc.from_notation("y = a(i)", formats={"a": "s"}), tc.Op)
    x = torch.ones(3)
    assert_type(ops.scale(x, 2.0), Any)  # a tensor, an array as they went in, or a tuple of them
    assert_type(ops.scale.overload, torch._ops.OpOverload[..., Any])
    assert_type(ops.scale.backward_source(), str)
    assert_type(ops.scale.infer(x, 2.0), tuple[int, ...] | tuple[tuple[int, ...], ...])
    assert Layer(ops)(x).eq(4).all()
    assert with_gradient(doubled(x)).eq(4).all()
    try:
        ops.scale(x)
    except tc.ArgumentError as error:
        assert_type(error.message, str)
        assert_type(error.line, int | None)
