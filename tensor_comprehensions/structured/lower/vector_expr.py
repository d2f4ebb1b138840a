"""Scalar expressions evaluated at a point of the iteration domain, or in all lanes of a vector of points."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import assert_never

from ...loop_ir import build
from ...loop_ir.instructions import DOT_BFLOAT16
from ...loop_ir.nodes import (
    Binary,
    Broadcast,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Ramp,
    ReduceLanes,
    Select,
    Shuffle,
    Unary,
    Var,
)

Point = Mapping[str, Expr]
"""The value of each iterator: a scalar, or a ramp for the one that runs along the lanes."""


def substitute_vectorized(e: Expr, at: Point, mask: Expr | None = None) -> Expr:
    """`e` with variables replaced by `at`; the result is a vector if it depends on a ramp.

    mask: the active lanes at the end of a range, applied to loads that become vectors; None: all.
    """
    match e:
        case Const():
            return e
        case Var(name):
            return at.get(name, e)
        case Load(buffer, indices, guard):
            where = tuple([substitute_vectorized(i, at, mask) for i in indices])
            condition = None if guard is None else substitute_vectorized(guard, at, mask)
            if mask is None and condition is None:
                return Load(buffer, where)
            lanes = max((i.type.lanes for i in where), default=1)
            if mask is not None and lanes > 1:
                condition = build.and_masks(condition, mask)
            if condition is not None:
                lanes = max(lanes, condition.type.lanes)
                where = tuple(build.broadcast(i, lanes) for i in where) if _has_scalar_indices(where) else where
            return build.load(buffer, *where, mask=condition)
        case Binary(op, left, right):
            return build.binary(op, substitute_vectorized(left, at, mask), substitute_vectorized(right, at, mask))
        case Unary(op, operand):
            return build.unary(op, substitute_vectorized(operand, at, mask))
        case Cast(operand, dtype):
            return build.cast(substitute_vectorized(operand, at, mask), dtype)
        case Select(condition, then, otherwise):
            return build.select(*(substitute_vectorized(x, at, mask) for x in (condition, then, otherwise)))
        case Call(function, arguments):
            return build.call(function, *(substitute_vectorized(a, at, mask) for a in arguments))
        case Ramp() | Broadcast() | Shuffle() | ReduceLanes():
            return e
        case _:
            assert_never(e)


def _has_scalar_indices(indices: tuple[Expr, ...]) -> bool:
    return all(i.type.lanes == 1 for i in indices)


def first_lanes_mask(count: int, lanes: int) -> Expr | None:
    """The mask that is true in the first `count` of `lanes` lanes; None if that is all of them."""
    return None if count >= lanes else build.lt(build.ramp(0, 1, lanes), count)


def multiply_add(a: Expr, b: Expr, c: Expr) -> Expr:
    """`a * b + c`, rounded once for floats; `a` and `b` may be pairs of bfloat16."""
    if a.type != c.type:
        return build.call(DOT_BFLOAT16, c, a, b)
    if c.type.dtype.is_float:
        return build.call("fma", a, b, c)
    return build.add(build.mul(a, b), c)
