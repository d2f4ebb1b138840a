"""Interval arithmetic: bounds of an integer expression from the ranges of its variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.dtypes import INT64
from .linear_forms import linear_terms
from .nodes import Binary, Broadcast, Const, Expr, Ramp, Select, Var


@dataclass(frozen=True, slots=True)
class Interval:
    """The integers from `low` to `high`, inclusive; None means unbounded."""

    low: int | None = None
    high: int | None = None

    def __add__(self, other: Interval) -> Interval:
        low = None if self.low is None or other.low is None else self.low + other.low
        high = None if self.high is None or other.high is None else self.high + other.high
        return Interval(low, high)

    def scale(self, factor: int) -> Interval:
        if factor == 0:
            return Interval(0, 0)
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Interval(low, high) if factor > 0 else Interval(high, low)

    def floor_divide(self, divisor: int) -> Interval:
        """The interval of the floor of the quotient by a positive `divisor`."""
        return Interval(
            None if self.low is None else self.low // divisor, None if self.high is None else self.high // divisor
        )

    def hull(self, other: Interval) -> Interval:
        low = None if self.low is None or other.low is None else min(self.low, other.low)
        high = None if self.high is None or other.high is None else max(self.high, other.high)
        return Interval(low, high)


ANYTHING = Interval()
Ranges = Mapping[str, Interval]


def index_interval(e: Expr, ranges: Ranges) -> Interval:
    """An interval that contains every lane of the integer `e`, given the ranges of its variables.

    Arithmetic narrower than 64 bits may wrap around, so its result is taken to be unbounded.
    """
    match e:
        case Const(value):
            return Interval(int(value), int(value))
        case Var(name):
            return ranges.get(name, ANYTHING)
        case Binary("add" | "sub" | "mul"):
            return _sum_interval(e, ranges)
        case Binary("div", left, Const(value)) if int(value) > 0:
            return index_interval(left, ranges).floor_divide(int(value))
        case Binary("mod", left, Const(value)) if int(value) > 0:
            return _remainder(index_interval(left, ranges), int(value))
        case Binary("min", left, right):
            return _min(index_interval(left, ranges), index_interval(right, ranges))
        case Binary("max", left, right):
            return _min(index_interval(left, ranges).scale(-1), index_interval(right, ranges).scale(-1)).scale(-1)
        case Ramp(base, stride, lanes):
            spread = stride * (lanes - 1)
            return index_interval(base, ranges) + Interval(min(0, spread), max(0, spread))
        case Broadcast(operand):
            return index_interval(operand, ranges)
        case Select(_, then, otherwise):
            return index_interval(then, ranges).hull(index_interval(otherwise, ranges))
    return ANYTHING


def _sum_interval(e: Binary, ranges: Ranges) -> Interval:
    t = e.type
    if t.dtype != INT64:
        return ANYTHING
    if t.lanes == 1:
        terms, constant = linear_terms(e)
        total = Interval(constant, constant)
        for atom, c in terms.items():
            # A product of variables is an atom: linearizing it again would not terminate.
            total = total + (ANYTHING if _is_product(atom) else index_interval(atom, ranges)).scale(c)
        return total
    if e.op == "mul":
        return ANYTHING
    other = index_interval(e.right, ranges)
    return index_interval(e.left, ranges) + (other if e.op == "add" else other.scale(-1))


def _remainder(i: Interval, divisor: int) -> Interval:
    if i.low is not None and i.high is not None and i.low // divisor == i.high // divisor:
        return Interval(i.low % divisor, i.high % divisor)
    return Interval(0, divisor - 1)


def _is_product(e: Expr) -> bool:
    return type(e) is Binary and e.op == "mul"


def _min(a: Interval, b: Interval) -> Interval:
    lows = (a.low, b.low)
    low = None if None in lows else min(x for x in lows if x is not None)
    highs = [x for x in (a.high, b.high) if x is not None]
    return Interval(low, min(highs) if highs else None)
