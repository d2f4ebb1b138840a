"""Reads turned round: which points of a statement read a given element of a tensor.

A statement that reads `X(h+kh)` sends its derivative to element `x` from the points with `h = x - kh`, provided that
this `h` is in its range. So the gradient of `X` gathers, and no two points write to one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..dtypes import BOOL, INT64
from .affine import Affine, Variable, affine, variables
from .formula import Value, number
from .function import Access, Binary, Const, Expr, Index, children, rebuild
from .ranges import Bounds
from .unparse import of_affine, of_formula


@dataclass(frozen=True, slots=True)
class Gathering:
    """How one read looks from the element that is read.

    left: the indices of the element, counted from 0, with their ranges.
    replaced: what the indices of the statement that are now determined have become.
    guards: the conditions under which there is such a point.
    """

    left: dict[str, Bounds]
    replaced: dict[str, Expr]
    guards: tuple[Expr, ...]


def gathering(
    subscripts: Sequence[Expr],
    bounds: Sequence[Bounds],
    ranges: Mapping[str, Bounds],
    free: Sequence[str],
    sizes: Mapping[str, Value],
) -> Gathering | None:
    """The gathering for a read `X(subscripts)`; None where the subscripts cannot be solved for indices.

    Args:
        bounds: of the dimensions of X. ranges: of the indices of the statement. free: those of them on the left.
        sizes: formulas for the names in expressions.
    """
    forms = [affine(e, sizes) for e in subscripts]
    if not all(isinstance(atom, Variable) and number(c) is not None for f in forms for atom, c in f.terms):
        return None
    chosen = _choose(forms, free)
    if chosen is None:
        return None
    left: dict[str, Bounds] = {chosen[d]: (0, upper - lower) for d, (lower, upper) in enumerate(bounds)}
    renamed = {name: f"{name}'" for name in left}
    box = {**ranges, **{f"{name}'": b for name, b in left.items()}}
    replaced: dict[str, Expr] = {}
    guards: list[Expr] = []
    while len(replaced) < len(chosen):
        d = _next(chosen, forms, replaced)
        if d is None:
            return None
        name = chosen[d]
        e, conditions = _solve(forms[d], name, renamed[name], bounds[d][0], replaced, sizes)
        replaced[name] = e
        guards += [*conditions, *_inside(e, ranges[name], box, sizes)]
    back = {new: Index(old, INT64) for old, new in renamed.items()}
    return Gathering(
        left,
        {name: substituted(e, back, sizes) for name, e in replaced.items()},
        tuple(substituted(g, back, sizes) for g in guards),
    )


def _choose(forms: Sequence[Affine], free: Sequence[str]) -> dict[int, str] | None:
    """For each subscript an index to solve it for: one alone in it, else one of the statement's left, else any."""
    chosen: dict[int, str] = {}
    order = sorted(range(len(forms)), key=lambda d: len(forms[d].terms))
    for d in order:
        terms = [(a.name, abs(number(c) or 0)) for a, c in forms[d].terms if isinstance(a, Variable)]
        candidates = [(name, c) for name, c in terms if name not in chosen.values()]
        if not candidates:
            return None
        chosen[d] = min(candidates, key=lambda t: (t[0] not in free, t[1]))[0]
    return dict(sorted(chosen.items()))


def _next(chosen: Mapping[int, str], forms: Sequence[Affine], replaced: Mapping[str, Expr]) -> int | None:
    """A subscript not solved yet whose other chosen indices are all determined."""
    for d, name in chosen.items():
        others = {v for v in variables(forms[d]) if v != name and v in chosen.values()}
        if name not in replaced and others <= replaced.keys():
            return d
    return None


def _solve(
    form: Affine, name: str, element: str, start: Value, replaced: Mapping[str, Expr], sizes: Mapping[str, Value]
) -> tuple[Expr, list[Expr]]:
    """`name` from `form = element + start`, and what must hold for there to be one."""
    factor = next(number(c) or 0 for a, c in form.terms if isinstance(a, Variable) and a.name == name)
    rest = Affine(form.constant, tuple(t for t in form.terms if t[0] != Variable(name)))
    difference = Affine(start, ((Variable(element), 1),)) - rest
    total = difference if factor > 0 else difference.scaled(-1)
    e = substituted(of_affine(total), replaced, sizes)
    if abs(factor) == 1:
        return e, []
    divisor = Const(abs(factor), INT64)
    divisible = Binary("==", Binary("%", e, divisor, INT64), Const(0, INT64), BOOL)
    return Binary("/", e, divisor, INT64), [divisible]


def _inside(e: Expr, range_: Bounds, box: Mapping[str, Bounds], sizes: Mapping[str, Value]) -> list[Expr]:
    """The conditions `lower <= e < upper`, but for those that always hold."""
    lower, upper = range_
    form = affine(e, sizes)
    ends = _extremes(form, box)
    low = None if ends is None else number(ends[0] - lower)
    high = None if ends is None else number(upper - 1 - ends[1])
    conditions: list[Expr] = []
    if low is None or low < 0:
        conditions.append(Binary(">=", e, of_formula(lower), BOOL))
    if high is None or high < 0:
        conditions.append(Binary("<", e, of_formula(upper), BOOL))
    return conditions


def _extremes(form: Affine, box: Mapping[str, Bounds]) -> Bounds | None:
    """The least and the greatest value of a sum of indices."""
    low = high = form.constant
    for atom, c in form.terms:
        n = number(c)
        if not isinstance(atom, Variable) or n is None or atom.name not in box:
            return None
        first, last = box[atom.name][0], box[atom.name][1] - 1
        first, last = (first, last) if n > 0 else (last, first)
        low, high = low + first * n, high + last * n
    return low, high


def substituted(e: Expr, indices: Mapping[str, Expr], sizes: Mapping[str, Value]) -> Expr:
    """`e` with expressions for some of its indices; sums of indices are brought to their simplest form."""
    if isinstance(e, Index):
        return indices.get(e.name, e)
    parts = [substituted(x, indices, sizes) for x in children(e)]
    changed = any(a is not b for a, b in zip(parts, children(e), strict=True))
    e = rebuild(e, parts)
    if isinstance(e, Access) and changed:
        return replace(e, subscripts=tuple(simplified(x, sizes) for x in e.subscripts))
    return e


def simplified(e: Expr, sizes: Mapping[str, Value]) -> Expr:
    """A subscript in its simplest form, where it is a sum of indices and sizes."""
    if isinstance(e, Index | Const):
        return e
    form = affine(e, sizes)
    return of_affine(form) if all(isinstance(atom, Variable) for atom, _ in form.terms) else e


def uses(name: str, *expressions: Expr) -> bool:
    """Whether the index occurs in one of the expressions."""
    return any(_occurs(name, e) for e in expressions)


def _occurs(name: str, e: Expr) -> bool:
    return (isinstance(e, Index) and e.name == name) or any(_occurs(name, x) for x in children(e))
