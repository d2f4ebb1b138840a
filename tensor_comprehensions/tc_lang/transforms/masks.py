"""Find regions outside of which an expression is constant, from the conditions of its `Select`s.

`j <= i ? x : 0` is 0 outside `i - j >= 0`. A region is a conjunction of inequalities; the one found may be larger than
the exact one, but never smaller. Values are exactly those of the program: `0 * x` is not constant, since x may be
infinite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, isinf
from typing import Any

import numpy as np

from ...core.dtypes import DType
from ..affine import Affine, Interval, Quotient, Variable
from ..binding.bounds_proof import conjuncts, inequalities, is_nonnegative
from ..ir import (
    Access,
    Binary,
    BoundStatement,
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Inequality,
    Select,
    operands_of,
    walk_expr,
    with_operands,
)
from ..reference.numpy_expression import Array, NumpyExpressionEvaluator

Region = tuple[Inequality, ...]
"""The points at which all of the inequalities hold."""
Box = Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class ConstantOrNan:
    """`value`, or NaN, but NaN only if the expression is also NaN at a point inside that differs only in `along`.

    An example is `x - m`, where x is -inf outside and m is its maximum along these indices. It is -inf unless m is -inf
    or NaN, and then the same difference is also NaN inside.
    """

    value: float
    along: frozenset[str]


Outside = Const | ConstantOrNan
"""The value outside a region."""


@dataclass(frozen=True, slots=True)
class Masked:
    """The value of a tensor outside a region; dimensions are named by `region_dimension_name`."""

    region: Region
    value: Outside


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """Facts from earlier statements: masked tensors, and the statements of tensors that are maxima."""

    masked: Mapping[str, Masked]
    largest: Mapping[str, BoundStatement]


def region_dimension_name(d: int) -> str:
    """The name of a dimension in a region of a tensor."""
    return f"#{d}"


# --- regions -------------------------------------------------------------------------------------------------------


def as_form(g: Inequality) -> Affine:
    """The affine form that the inequality requires to be non-negative."""
    return Affine(g.constant, tuple((Variable(name), c) for name, c in g.terms))


def is_implied(g: Inequality, by: Sequence[Inequality], box: Box) -> bool:
    """Whether `g` holds wherever all of `by` hold."""
    return g in by or is_nonnegative(as_form(g), [as_form(h) for h in by], box)


def includes(outer: Region, inner: Region, box: Box) -> bool:
    """Whether every point of `inner` is in `outer`."""
    return all(is_implied(g, inner, box) for g in outer)


def region_where(condition: Expr, holds: bool, box: Box) -> Region:
    """A region that contains all points where `condition` has the value `holds`; non-affine conditions are dropped."""
    found = []
    for e, value in conjuncts(condition, holds):
        for form in inequalities(e, value, box):
            g = _make_inequality(form)
            if g is not None and not is_implied(g, (), box):
                found.append(g)
    return tuple(dict.fromkeys(found))


def _make_inequality(form: Affine) -> Inequality | None:
    """`form >= 0` as an inequality, or a weaker one if it has quotients; None if that is impossible."""
    d = 1
    for atom, _ in form.terms:
        if isinstance(atom, Quotient):
            if not isinstance(atom.divisor, int) or atom.divisor <= 0 or d not in (1, atom.divisor):
                return None
            d = atom.divisor
    total = Affine(0)
    for atom, c in form.terms:
        if isinstance(atom, Variable):
            total += Affine(0, ((atom, c),)).scale(d)
        elif isinstance(atom, Quotient) and isinstance(c, int):  # x/d - 1 < floor(x/d) <= x/d
            total += atom.inner.scale(c) if c > 0 else atom.inner.shift(1 - d).scale(c)
        else:
            return None
    total += Affine(form.constant).scale(d)
    terms = [(a.name, c) for a, c in total.terms if isinstance(a, Variable) and isinstance(c, int)]
    if not terms or len(terms) < len(total.terms) or not isinstance(total.constant, int):
        return None
    factor = gcd(*(c for _, c in terms))
    return Inequality(tuple(sorted((n, c // factor) for n, c in terms)), total.constant // factor)


def index_subscripts(access: Access) -> tuple[str, ...] | None:
    """The names of the subscripts if they are distinct indices, else None."""
    names = tuple(e.name for e in access.subscripts if isinstance(e, Index))
    return names if len(names) == len(access.subscripts) == len(set(names)) else None


# --- values outside ------------------------------------------------------------------------------------------------


def find_masked_regions(e: Expr, facts: MaskFacts, box: Box) -> tuple[Region, ...]:
    """The regions of the conditions and of the masked tensors in `e`."""
    return tuple(dict.fromkeys(r for x in walk_expr(e) for r in _own_regions(x, facts, box) if r))


def _own_regions(e: Expr, facts: MaskFacts, box: Box) -> Iterator[Region]:
    if isinstance(e, Select):
        yield region_where(e.condition, True, box)
        yield region_where(e.condition, False, box)
    elif isinstance(e, Access) and (found := _find_element_facts(e, facts)) is not None:
        yield found.region


def _find_element_facts(e: Access, facts: MaskFacts) -> Masked | None:
    """The facts about an element that is read, in terms of the indices of the reading statement."""
    known, names = facts.masked.get(e.tensor), index_subscripts(e)
    if known is None or names is None:
        return None
    place = {region_dimension_name(d): name for d, name in enumerate(names)}
    value = known.value
    if isinstance(value, ConstantOrNan):
        value = replace(value, along=frozenset(place[d] for d in value.along))
    return Masked(tuple(g.rename_indices(place) for g in known.region), value)


def value_outside(e: Expr, region: Region, facts: MaskFacts, box: Box) -> Outside | None:
    """The value of `e` at every point outside `region`; None if none is known."""

    def visit(e: Expr) -> Outside | None:
        match e:
            case Const():
                return e
            case Select(condition=condition, then=then, otherwise=otherwise):
                if includes(region, region_where(condition, True, box), box):
                    return visit(otherwise)
                if includes(region, region_where(condition, False, box), box):
                    return visit(then)
                a, b = visit(then), visit(otherwise)
                return a if a is not None and a == b else None
            case Access():
                found = _find_element_facts(e, facts)
                return found.value if found is not None and includes(region, found.region, box) else None
        parts = [visit(x) for x in operands_of(e)]
        constants = [p for p in parts if isinstance(p, Const)]
        if parts and len(constants) == len(parts):
            return _fold_constant(with_operands(e, constants))
        return _softmax_step(e, parts, region, facts)

    return visit(e)


def _fold_constant(e: Expr) -> Const | None:
    try:
        with np.errstate(all="ignore"):
            value = NumpyExpressionEvaluator({}, _no_memory)(e)
    except (ArithmeticError, ValueError):
        return None
    return Const(np.asarray(value).item(), e.dtype)


def _no_memory(access: Access, subscripts: object, where: object) -> Array:
    raise ValueError(f"{access.tensor} is no constant")


def _softmax_step(e: Expr, parts: Sequence[Outside | None], region: Region, facts: MaskFacts) -> ConstantOrNan | None:
    """The outside value for the steps of a softmax: x - max(x), a positive multiple of it, its exponential."""
    match e, parts:
        case Binary(op="-", left=left, right=Access() as right), [Const(value=value), None] if _is_low(value):
            along = _max_reduced_indices(left, right, region, facts)
            return None if along is None else ConstantOrNan(-np.inf, along)
        case Binary(op="*" | "/", dtype=dtype), [ConstantOrNan() as sunk, Const(value=scale)] if _is_positive(
            scale, dtype
        ):
            return sunk
        case Binary(op="*", dtype=dtype), [Const(value=scale), ConstantOrNan() as sunk] if _is_positive(scale, dtype):
            return sunk
        case Call(function="exp" | "exp2"), [ConstantOrNan(value=value) as sunk] if value < 0:
            return replace(sunk, value=0.0)
        case Cast(dtype=dtype), [ConstantOrNan() as sunk] if dtype.is_float:
            return sunk
    return None


def _is_low(value: Any) -> bool:
    return isinstance(value, float) and isinf(value) and value < 0


def _is_positive(scale: Any, dtype: DType) -> bool:
    return dtype.is_float and isinstance(scale, float) and 0 < scale < np.inf


def _max_reduced_indices(masked: Expr, largest: Access, region: Region, facts: MaskFacts) -> frozenset[str] | None:
    """The indices along which `largest` is the maximum of `masked` over `region`; None if it is not."""
    s, names = facts.largest.get(largest.tensor), index_subscripts(largest)
    if s is None or names is None:
        return None
    written = index_subscripts(Access(s.target, s.subscripts, s.value.dtype)) or ()
    place = dict(zip(written, names, strict=True))
    if not _match_pattern(s.value, masked, place) or any(i.name not in place for i in s.reduction_indices):
        return None
    same = {g.rename_indices(place) for g in s.terms} == set(region)
    return frozenset(place[i.name] for i in s.reduction_indices) if same else None


def _match_pattern(pattern: Expr, e: Expr, place: dict[str, str]) -> bool:
    """Whether `e` is `pattern` with indices renamed by `place`, which is extended in place."""
    if isinstance(pattern, Index):
        return isinstance(e, Index) and place.setdefault(pattern.name, e.name) == e.name
    mine, theirs = operands_of(pattern), operands_of(e)
    if type(pattern) is not type(e) or len(mine) != len(theirs):
        return False
    return (
        all(_match_pattern(a, b, place) for a, b in zip(mine, theirs, strict=True))
        and with_operands(pattern, theirs) == e
    )
