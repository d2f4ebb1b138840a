"""Invert reads: solve for the points of a statement that read a given element of a tensor.

A statement that reads `X(h+kh)` contributes to the gradient of element `x` at the points with `h = x - kh`, if that `h`
is in range. So the gradient of `X` gathers, and no two points write the same element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.dtypes import BOOL, INT64
from ..affine import Affine, Variable, affine_variables, to_affine
from ..binding.ranges import Bounds
from ..ir import Access, Binary, Const, Expr, Index, operands_of, with_operands
from ..semantics.to_syntax import affine_to_expr, polynomial_to_expr
from ..size_polynomial import Value, constant_value


@dataclass(frozen=True, slots=True)
class SolvedIndex:
    """An index as a function of the element that is read: `numerator / divisor`.

    guards: the conditions under which that is an integer in the range of the index. rounds: whether the quotient is
    rounded down and only the range is checked, because the remainder determines another index, the tap of a window.
    """

    numerator: Expr
    divisor: int
    guards: tuple[Expr, ...]
    rounds: bool = False

    @property
    def value(self) -> Expr:
        if self.divisor == 1:
            return self.numerator
        return Binary("/", self.numerator, Const(self.divisor, INT64), INT64)


@dataclass(frozen=True, slots=True)
class GatherForm:
    """The inverse of a read: the indices of the statement as functions of the element that is read.

    unsolved: the indices of the element, counted from 0, with their ranges.
    solutions: the solved indices of the statement, as expressions.
    turns: for windows longer than their stride, the indices that count strides back from an element, by the name of
        the tap, with their ranges. widest: their widest ranges, if several gathers share a tensor.
    """

    unsolved: dict[str, Bounds]
    solutions: dict[str, SolvedIndex]
    turns: dict[str, Bounds] = field(default_factory=dict)
    widest: dict[str, Bounds] = field(default_factory=dict)

    @property
    def substitute_in(self) -> dict[str, Expr]:
        return {name: s.value for name, s in self.solutions.items()}

    @property
    def guards(self) -> tuple[Expr, ...]:
        """The conditions under which some point reads the element."""
        return tuple(g for s in self.solutions.values() for g in s.guards)

    @property
    def has_disjoint_windows(self) -> bool:
        """Whether strided windows do not overlap in some dimension, so that an element is in at most one window."""
        return any(s.rounds for s in self.solutions.values())

    def free_ranges(self, ranges: Mapping[str, Bounds]) -> dict[str, Bounds]:
        """The indices of the statement that the element does not determine, with their ranges: to be summed over."""
        return {i: self.turns.get(i, b) for i, b in ranges.items() if i in self.turns or i not in self.solutions}


def solve_gather(
    subscripts: Sequence[Expr],
    bounds: Sequence[Bounds],
    ranges: Mapping[str, Bounds],
    free: Sequence[str],
    sizes: Mapping[str, Value],
) -> GatherForm | None:
    """The gather form of a read `X(subscripts)`; None if the subscripts cannot be solved for indices.

    Args:
        bounds: the bounds of the dimensions of X. ranges: the ranges of the indices of the statement.
        free: the indices on the left. sizes: formulas for the names of sizes.
    """
    forms = [to_affine(e, sizes) for e in subscripts]
    if not all(isinstance(atom, Variable) and constant_value(c) is not None for f in forms for atom, c in f.terms):
        return None
    chosen = _choose_solved_indices(forms, free)
    if chosen is None:
        return None
    left: dict[str, Bounds] = {chosen[d]: (0, upper - lower) for d, (lower, upper) in enumerate(bounds)}
    renamed = {name: f"{name}'" for name in left}
    box = {**ranges, **{f"{name}'": b for name, b in left.items()}}
    solutions: dict[str, SolvedIndex] = {}
    replaced: dict[str, Expr] = {}
    while len(replaced) < len(chosen):
        d = _next_solvable(chosen, forms, replaced)
        if d is None:
            return None
        name = chosen[d]
        numerator, divisor = _solve_for_index(forms[d], name, renamed[name], bounds[d][0], replaced, sizes)
        others = {v for f in (*forms[:d], *forms[d + 1 :]) for v in affine_variables(f)}
        taps = {i: b for i, b in ranges.items() if i not in others and i not in chosen.values()}
        found = _solve_window(name, numerator, divisor, ranges[name], taps, box, sizes)
        if not found:
            alone = SolvedIndex(numerator, divisor, ())
            guards = (*divisibility_guards(alone), *range_guards(alone.value, ranges[name], box, sizes))
            found = {name: replace(alone, guards=guards)}
        replaced[name] = found[name].value
        back = {new: Index(old, INT64) for old, new in renamed.items()}
        for i, s in found.items():
            back_guards = tuple(substitute_indices(g, back, sizes) for g in s.guards)
            solutions[i] = replace(s, numerator=substitute_indices(s.numerator, back, sizes), guards=back_guards)
    return GatherForm(left, solutions)


def _solve_window(
    name: str, numerator: Expr, divisor: int, range_: Bounds, taps: Mapping[str, Bounds], box: Mapping[str, Bounds],
    sizes: Mapping[str, Value],
) -> dict[str, SolvedIndex]:  # fmt: skip
    """The solutions for `name` and the tap of a window that is no longer than its stride `divisor`; else empty.

    An element `e = divisor * name + tap` is in at most one window: `name` is `e / divisor`, and `tap` the remainder.
    """
    form = to_affine(numerator, sizes)
    if divisor == 1 or not all(isinstance(atom, Variable) for atom, _ in form.terms):
        return {}
    for atom, factor in form.terms:
        if not isinstance(atom, Variable) or atom.name not in taps or constant_value(factor) != -1:
            continue
        first, count = taps[atom.name][0], constant_value(taps[atom.name][1] - taps[atom.name][0])
        if count is None or not 0 < count <= divisor:
            continue
        start = (form - Affine(0, ((atom, -1),))).shift(-first)
        element = affine_to_expr(start)
        remainder = Binary("%", element, Const(divisor, INT64), INT64)
        tap = remainder if constant_value(first) == 0 else Binary("+", remainder, polynomial_to_expr(first), INT64)
        inside = () if count == divisor else (Binary("<", remainder, Const(count, INT64), BOOL),)
        windows = range_guards(element, (range_[0] * divisor, range_[1] * divisor), box, sizes)
        return {
            name: SolvedIndex(element, divisor, tuple(windows), rounds=True),
            atom.name: SolvedIndex(tap, 1, inside),
        }
    return {}


def _choose_solved_indices(forms: Sequence[Affine], free: Sequence[str]) -> dict[int, str] | None:
    """Choose an index to solve each subscript for, preferably one on the left. None if a subscript has none left."""
    chosen: dict[int, str] = {}
    order = sorted(range(len(forms)), key=lambda d: len(forms[d].terms))
    for d in order:
        terms = [(a.name, abs(constant_value(c) or 0)) for a, c in forms[d].terms if isinstance(a, Variable)]
        candidates = [(name, c) for name, c in terms if name not in chosen.values()]
        if not candidates:
            return None
        chosen[d] = min(candidates, key=lambda t: (t[0] not in free, t[1]))[0]
    return dict(sorted(chosen.items()))


def _next_solvable(chosen: Mapping[int, str], forms: Sequence[Affine], replaced: Mapping[str, Expr]) -> int | None:
    """The number of an unsolved subscript whose other chosen indices are all solved, or None."""
    for d, name in chosen.items():
        others = {v for v in affine_variables(forms[d]) if v != name and v in chosen.values()}
        if name not in replaced and others <= replaced.keys():
            return d
    return None


def _solve_for_index(
    form: Affine, name: str, element: str, start: Value, replaced: Mapping[str, Expr], sizes: Mapping[str, Value]
) -> tuple[Expr, int]:
    """Solve `form = element + start` for `name`. Return the numerator and the divisor."""
    factor = next(constant_value(c) or 0 for a, c in form.terms if isinstance(a, Variable) and a.name == name)
    rest = Affine(form.constant, tuple(t for t in form.terms if t[0] != Variable(name)))
    difference = Affine(start, ((Variable(element), 1),)) - rest
    total = difference if factor > 0 else difference.scale(-1)
    return substitute_indices(affine_to_expr(total), replaced, sizes), abs(factor)


def divisibility_guards(s: SolvedIndex) -> list[Expr]:
    """The condition that a solution is an integer; none if it always is."""
    if s.divisor == 1:
        return []
    return [Binary("==", Binary("%", s.numerator, Const(s.divisor, INT64), INT64), Const(0, INT64), BOOL)]


def range_guards(e: Expr, range_: Bounds, box: Mapping[str, Bounds], sizes: Mapping[str, Value]) -> list[Expr]:
    """The conditions `lower <= e < upper`, except those that always hold."""
    lower, upper = range_
    form = to_affine(e, sizes)
    ends = affine_extremes(form, box)
    low = None if ends is None else constant_value(ends[0] - lower)
    high = None if ends is None else constant_value(upper - 1 - ends[1])
    if all(isinstance(atom, Variable) for atom, _ in form.terms) and form.terms:  # `h < H`, not `h + 1 < H + 1`
        lower, upper = lower - form.constant, upper - form.constant
        e = affine_to_expr(Affine(0, form.terms))
    conditions: list[Expr] = []
    if low is None or low < 0:
        conditions.append(Binary(">=", e, polynomial_to_expr(lower), BOOL))
    if high is None or high < 0:
        conditions.append(Binary("<", e, polynomial_to_expr(upper), BOOL))
    return conditions


def affine_extremes(form: Affine, box: Mapping[str, Bounds]) -> Bounds | None:
    """The least and the greatest value of a sum of indices; None for any other form."""
    low = high = form.constant
    for atom, c in form.terms:
        n = constant_value(c)
        if not isinstance(atom, Variable) or n is None or atom.name not in box:
            return None
        first, last = box[atom.name][0], box[atom.name][1] - 1
        first, last = (first, last) if n > 0 else (last, first)
        low, high = low + first * n, high + last * n
    return low, high


def substitute_indices(e: Expr, indices: Mapping[str, Expr], sizes: Mapping[str, Value]) -> Expr:
    """`e` with expressions substituted for indices; subscripts that are sums of indices are simplified."""
    if isinstance(e, Index):
        return indices.get(e.name, e)
    parts = [substitute_indices(x, indices, sizes) for x in operands_of(e)]
    changed = any(a is not b for a, b in zip(parts, operands_of(e), strict=True))
    e = with_operands(e, parts)
    if isinstance(e, Access) and changed:
        return replace(e, subscripts=tuple(simplify_subscript(x, sizes) for x in e.subscripts))
    return e


def substitute_access(a: Access, indices: Mapping[str, Expr], sizes: Mapping[str, Value]) -> Access:
    """An access with expressions substituted for indices."""
    moved = substitute_indices(a, indices, sizes)
    assert isinstance(moved, Access)
    return moved


def simplify_subscript(e: Expr, sizes: Mapping[str, Value]) -> Expr:
    """Simplify a subscript if it is a sum of indices and sizes."""
    if isinstance(e, Index | Const):
        return e
    form = to_affine(e, sizes).join_remainders()
    return affine_to_expr(form) if all(isinstance(atom, Variable) for atom, _ in form.terms) else e


def uses_index(name: str, *expressions: Expr) -> bool:
    """Whether the index occurs in one of the expressions."""
    return any(_index_occurs(name, e) for e in expressions)


def _index_occurs(name: str, e: Expr) -> bool:
    return (isinstance(e, Index) and e.name == name) or any(_index_occurs(name, x) for x in operands_of(e))
