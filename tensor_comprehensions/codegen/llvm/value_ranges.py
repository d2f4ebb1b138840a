"""Value ranges of integer expressions, used to emit cheaper divisions and to drop loop tests."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...loop_ir.linear_forms import difference
from ...loop_ir.nodes import Binary, Broadcast, Cast, Const, Expr, Load, Loop, Ramp, Select, Type, Unary, Var

Interval = tuple[float, float]  # inclusive; an end may be infinite
ANY: Interval = (-math.inf, math.inf)


def type_interval(type: Type) -> Interval:
    """The values a type can hold."""
    dtype = type.dtype
    if dtype.is_bool:
        return (0, 1)
    if not dtype.is_integer:
        return ANY
    low = -(1 << (dtype.bits - 1)) if dtype.is_signed else 0
    return (low, low + (1 << dtype.bits) - 1)


def value_interval(e: Expr, known: Mapping[str, Interval]) -> Interval:
    """Bounds on every lane of `e`, given bounds on variables; the range of its type if an operation may wrap around."""
    whole = type_interval(e.type)
    if whole == ANY:
        return ANY
    low, high = _exact_interval(e, known)
    return (low, high) if whole[0] <= low and high <= whole[1] else whole


def _exact_interval(e: Expr, known: Mapping[str, Interval]) -> Interval:
    match e:
        case Const(value=value):
            return (int(value), int(value))
        case Var(name=name):
            return known.get(name, type_interval(e.type))
        case Ramp(base=base, stride=stride, lanes=lanes):
            low, high = value_interval(base, known)
            reach = stride * (lanes - 1)
            return (low + min(0, reach), high + max(0, reach))
        case Broadcast(operand=operand):
            return value_interval(operand, known)
        case Cast(operand=operand):
            return value_interval(operand, known)
        case Load():
            return type_interval(e.type)
        case Unary(op="neg", operand=operand):
            low, high = value_interval(operand, known)
            return (-high, -low)
        case Select(then=then, otherwise=otherwise):
            (a, b), (c, d) = value_interval(then, known), value_interval(otherwise, known)
            return (min(a, c), max(b, d))
        case Binary(op=op, left=left, right=right):
            return _compute_binary_range(
                op, value_interval(left, known), value_interval(right, known)
            ) or type_interval(e.type)
        case _:
            return type_interval(e.type)


def _compute_binary_range(op: str, left: Interval, right: Interval) -> Interval | None:
    (a, b), (c, d) = left, right
    if op == "add":
        return (a + c, b + d)
    if op == "sub":
        return (a - d, b - c)
    if op == "min":
        return (min(a, c), min(b, d))
    if op == "max":
        return (max(a, c), max(b, d))
    if not all(map(math.isfinite, (a, b, c, d))):
        return None
    if op == "mul":
        corners = (a * c, a * d, b * c, b * d)
        return (min(corners), max(corners))
    if op == "div" and c > 0:
        quotients = (a // c, a // d, b // c, b // d)
        return (min(quotients), max(quotients))
    if op == "mod" and c > 0:
        return (a, b) if a >= 0 and b < c else (0, d - 1)
    return None


def loop_interval(loop: Loop, known: Mapping[str, Interval]) -> Interval:
    """The values of a loop's variable."""
    low, high = value_interval(loop.start, known)[0], value_interval(loop.stop, known)[1] - 1
    return (low, max(low, high))


def trip_count(loop: Loop) -> int | None:
    """The number of iterations of `loop` if its bounds differ by a constant, else None."""
    extent = difference(loop.stop, loop.start)
    return None if extent is None else max(0, -(-extent // loop.step))
