"""Index arithmetic: sums of products with constants, and the interval an index lies in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import build
from .nodes import Binary, Broadcast, Const, Expr, Ramp, Select, Var

Terms = dict[Expr, int]


def linear(e: Expr) -> tuple[Terms, int]:
    """The scalar integer `e` as (coefficient of each atom in order of appearance, constant)."""
    terms: Terms = {}
    constant = _collect(e, 1, terms)
    return {atom: c for atom, c in terms.items() if c != 0}, constant


def _collect(e: Expr, factor: int, terms: Terms) -> int:
    """Add `factor * e` to `terms`; returns the constant part."""
    match e:
        case Const(value):
            return factor * int(value)
        case Binary("add", left, right):
            return _collect(left, factor, terms) + _collect(right, factor, terms)
        case Binary("sub", left, right):
            return _collect(left, factor, terms) + _collect(right, -factor, terms)
        case Binary("mul", left, Const(value)):
            return _collect(left, factor * int(value), terms)
        case Binary("mul", Const(value), right):
            return _collect(right, factor * int(value), terms)
    terms[e] = terms.get(e, 0) + factor
    return 0


def expression(terms: Terms, constant: int) -> Expr:
    """The canonical expression of `sum coefficient * atom + constant`, terms in the order of the mapping."""
    e: Expr | None = None
    for atom, c in terms.items():
        if e is None:
            e = build.mul(atom, c)
        elif c < 0:
            e = build.sub(e, build.mul(atom, -c))
        else:
            e = build.add(e, build.mul(atom, c))
    return build.const(constant) if e is None else build.add(e, constant)


def difference(a: Expr, b: Expr) -> int | None:
    """`a - b` where it is the same whatever the variables are, else None. Both are scalar integers."""
    if a is b:
        return 0
    terms, constant = linear(a)
    for atom, c in linear(b)[0].items():
        terms[atom] = terms.get(atom, 0) - c
    return None if any(terms.values()) else constant - linear(b)[1]


def subtract(a: Expr, b: Expr) -> Expr:
    """`a - b` with common terms cancelled."""
    terms, constant = linear(a)
    others, other = linear(b)
    for atom, c in others.items():
        terms[atom] = terms.get(atom, 0) - c
    return expression({atom: c for atom, c in terms.items() if c != 0}, constant - other)


@dataclass(frozen=True, slots=True)
class Interval:
    """The integers from `low` to `high`, both included; None where there is no bound."""

    low: int | None = None
    high: int | None = None

    def __add__(self, other: Interval) -> Interval:
        low = None if self.low is None or other.low is None else self.low + other.low
        high = None if self.high is None or other.high is None else self.high + other.high
        return Interval(low, high)

    def scaled(self, factor: int) -> Interval:
        if factor == 0:
            return Interval(0, 0)
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Interval(low, high) if factor > 0 else Interval(high, low)

    def floor_divided(self, divisor: int) -> Interval:
        """By a positive constant."""
        return Interval(
            None if self.low is None else self.low // divisor, None if self.high is None else self.high // divisor
        )

    def hull(self, other: Interval) -> Interval:
        low = None if self.low is None or other.low is None else min(self.low, other.low)
        high = None if self.high is None or other.high is None else max(self.high, other.high)
        return Interval(low, high)


ANYTHING = Interval()
Ranges = Mapping[str, Interval]


def interval(e: Expr, ranges: Ranges) -> Interval:
    """An interval that holds every lane of the integer `e` when each variable lies in its range."""
    match e:
        case Const(value):
            return Interval(int(value), int(value))
        case Var(name):
            return ranges.get(name, ANYTHING)
        case Binary("add" | "sub" | "mul", _, _) if e.type.lanes == 1:
            terms, constant = linear(e)
            total = Interval(constant, constant)
            for atom, c in terms.items():
                # A product of variables is its own atom: do not linearise it again.
                total = total + (ANYTHING if _is_product(atom) else interval(atom, ranges)).scaled(c)
            return total
        case Binary("add", left, right):
            return interval(left, ranges) + interval(right, ranges)
        case Binary("sub", left, right):
            return interval(left, ranges) + interval(right, ranges).scaled(-1)
        case Binary("div", left, Const(value)) if int(value) > 0:
            return interval(left, ranges).floor_divided(int(value))
        case Binary("mod", left, Const(value)) if int(value) > 0:
            inner = interval(left, ranges)
            if inner.low is not None and inner.high is not None and inner.low // int(value) == inner.high // int(value):
                return Interval(inner.low % int(value), inner.high % int(value))
            return Interval(0, int(value) - 1)
        case Binary("min", left, right):
            return _min(interval(left, ranges), interval(right, ranges))
        case Binary("max", left, right):
            return _min(interval(left, ranges).scaled(-1), interval(right, ranges).scaled(-1)).scaled(-1)
        case Ramp(base, stride, lanes):
            spread = stride * (lanes - 1)
            return interval(base, ranges) + Interval(min(0, spread), max(0, spread))
        case Broadcast(operand):
            return interval(operand, ranges)
        case Select(_, then, otherwise):
            return interval(then, ranges).hull(interval(otherwise, ranges))
    return ANYTHING


def _is_product(e: Expr) -> bool:
    return type(e) is Binary and e.op == "mul"


def _min(a: Interval, b: Interval) -> Interval:
    lows = (a.low, b.low)
    low = None if None in lows else min(x for x in lows if x is not None)
    highs = [x for x in (a.high, b.high) if x is not None]
    return Interval(low, min(highs) if highs else None)
