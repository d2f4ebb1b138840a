"""Which index arithmetic is known to fit into 32 bits, for dialects that have a type for it."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.dtypes import INT64
from ...loop_ir import intervals
from ...loop_ir import nodes as ir
from ...loop_ir.intervals import Interval

LIMIT = 1 << 31
_ARITHMETIC = ("add", "sub", "mul", "min", "max", "div", "mod")


KnownIntervals = dict[int, tuple[ir.Expr, Interval | None]]
"""Cached intervals of expressions in the same variables, by id; the expression is kept so that its id stays unique."""


def int32_interval(e: ir.Expr, variables: Mapping[str, Interval], known: KnownIntervals) -> Interval | None:
    """The interval of the int64 expression `e` if it and all its parts fit into 32 bits, else None.

    Args:
        variables: the intervals of the variables that have a type of 32 bits.
        known: cached intervals of other expressions in the same variables; that of `e` is added.
    """
    if (found := known.get(id(e))) is not None:
        return found[1]
    where = _compute_int32_interval(e, variables, known)
    known[id(e)] = e, where
    return where


def _compute_int32_interval(e: ir.Expr, variables: Mapping[str, Interval], known: KnownIntervals) -> Interval | None:
    match e:
        case ir.Const(int(value), type) if type.dtype == INT64:
            return _int32_or_none(Interval(value, value))
        case ir.Var(name):
            return variables.get(name)
        case ir.Binary(op, left, right) if op in _ARITHMETIC and e.type.dtype == INT64:
            if int32_interval(left, variables, known) is None or int32_interval(right, variables, known) is None:
                return None
            return _int32_or_none(intervals.index_interval(e, variables))
        case ir.Ramp(base, stride, lanes) if (first := int32_interval(base, variables, known)) is not None:
            steps = Interval(min(0, stride * (lanes - 1)), max(0, stride * (lanes - 1)))
            return _int32_or_none(first + steps)
        case ir.Broadcast(operand):
            return int32_interval(operand, variables, known)
    return None


def int32_loop_interval(loop: ir.Loop, variables: Mapping[str, Interval]) -> Interval | None:
    """The interval of the variable of `loop` if it fits into 32 bits even after the last increment, else None."""
    start, stop = (int32_interval(e, variables, {}) for e in (loop.start, loop.stop))
    if start is None or stop is None or start.low is None or stop.high is None:
        return None
    if _int32_or_none(Interval(start.low, stop.high + loop.step)) is None:
        return None
    return Interval(start.low, max(start.low, stop.high - 1))


def _int32_or_none(where: Interval) -> Interval | None:
    inside = where.low is not None and where.high is not None and where.low > -LIMIT and where.high < LIMIT
    return where if inside else None
