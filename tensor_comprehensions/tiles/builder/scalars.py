"""Symbolic numbers for pointwise functions of tile kernels: Python operators and a few functions build expressions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.dtypes import FLOAT32
from ...core.errors import ArgumentError
from ...loop_ir import build
from ...loop_ir.nodes import Const, Expr

inf = math.inf


@dataclass(frozen=True, slots=True)
class Scalar:
    """A symbolic number, known only at run time."""

    expr: Expr

    def __add__(self, other: Number) -> Scalar:
        return _make_binary_scalar("add", self, other)

    def __radd__(self, other: Number) -> Scalar:
        return _make_binary_scalar("add", other, self)

    def __sub__(self, other: Number) -> Scalar:
        return _make_binary_scalar("sub", self, other)

    def __rsub__(self, other: Number) -> Scalar:
        return _make_binary_scalar("sub", other, self)

    def __mul__(self, other: Number) -> Scalar:
        return _make_binary_scalar("mul", self, other)

    def __rmul__(self, other: Number) -> Scalar:
        return _make_binary_scalar("mul", other, self)

    def __truediv__(self, other: Number) -> Scalar:
        return _make_binary_scalar("div", self, other)

    def __rtruediv__(self, other: Number) -> Scalar:
        return _make_binary_scalar("div", other, self)

    def __lt__(self, other: Number) -> Scalar:
        return _make_binary_scalar("lt", self, other)

    def __le__(self, other: Number) -> Scalar:
        return _make_binary_scalar("le", self, other)

    def __gt__(self, other: Number) -> Scalar:
        return _make_binary_scalar("gt", self, other)

    def __ge__(self, other: Number) -> Scalar:
        return _make_binary_scalar("ge", self, other)

    def __bool__(self) -> bool:
        raise ArgumentError("a comparison has no value before the run", suggestion="t.where(condition, a, b)")

    def __neg__(self) -> Scalar:
        return Scalar(build.unary("neg", self.expr))


Number = Scalar | int | float


def max(a: Number, b: Number) -> Scalar:
    """The larger of two numbers; NaN if either is NaN."""
    return _make_binary_scalar("max", a, b)


def min(a: Number, b: Number) -> Scalar:
    """The smaller of two numbers; NaN if either is NaN."""
    return _make_binary_scalar("min", a, b)


def where(condition: Scalar, a: Number, b: Number) -> Scalar:
    """`a` if the condition holds, else `b`."""
    if not isinstance(condition, Scalar) or not condition.expr.type.dtype.is_bool:
        raise ArgumentError("where() takes a condition", expected="a comparison of numbers", found=repr(condition))
    return Scalar(build.select(condition.expr, _convert_operand(a, b), _convert_operand(b, a)))


def exp(x: Number) -> Scalar:
    """e to the power of a number."""
    return _make_call_scalar("exp", x)


def exp2(x: Number) -> Scalar:
    """2 to the power of a number."""
    return _make_call_scalar("exp2", x)


def tanh(x: Number) -> Scalar:
    """The hyperbolic tangent."""
    return _make_call_scalar("tanh", x)


def sqrt(x: Number) -> Scalar:
    """The square root."""
    return _make_call_scalar("sqrt", x)


def rsqrt(x: Number) -> Scalar:
    """One over the square root."""
    return _make_call_scalar("rsqrt", x)


def sigmoid(x: Number) -> Scalar:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + exp(-Scalar(to_expr(x))))


def to_expr(x: object) -> Expr:
    """The expression of a number that a pointwise function returned. Raises ArgumentError for anything else."""
    if isinstance(x, Scalar):
        return x.expr
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return Const(float(x), build.const(0.0, FLOAT32).type)
    raise ArgumentError("a pointwise function gives no number", found=repr(x))


def _make_binary_scalar(op: str, a: Number, b: Number) -> Scalar:
    return Scalar(build.binary(op, *(_convert_operand(x, y) for x, y in ((a, b), (b, a)))))


def _convert_operand(x: Number, other: Number) -> Expr:
    """The expression of `x`; a Python number takes the type of `other`."""
    if isinstance(x, Scalar):
        return x.expr
    dtype = other.expr.type.dtype if isinstance(other, Scalar) else FLOAT32
    return build.const(x, dtype)


def _make_call_scalar(function: str, x: Number) -> Scalar:
    return Scalar(build.call(function, to_expr(x)))
