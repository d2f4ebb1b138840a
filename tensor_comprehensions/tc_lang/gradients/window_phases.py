"""Gradients of windows that are longer than their stride, without divisions in sums.

A statement that reads `X(s*p + t)` with `L > s` taps contributes to the gradient of element `e = s*q + r` from the
points `p = q - a` through the taps `t = r + s*a`. For each residue `r < s`, a *phase*, this is a sum over contiguous
points, with `ceil((L - r) / s)` terms. In a dimension that is not split into phases, `q` and `r` are the quotient and
the remainder of `e`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ...core.dtypes import BOOL, INT64
from ..affine import Affine, Variable, to_affine
from ..binding.ranges import Bounds
from ..ir import Binary, Const, Expr, Index, Select
from ..semantics.to_syntax import affine_to_expr, polynomial_to_expr
from ..size_polynomial import Value, constant_value, to_polynomial
from .adjoint_access import GatherForm, SolvedIndex, range_guards, solve_gather
from .ssa import range_extent

MOST_PHASES = 9
"""Maximum phases of a read over all dimensions: 3 x 3. Each is a statement."""


@dataclass(frozen=True, slots=True)
class LongWindow:
    """A subscript that may be a window longer than its stride: `stride * index + tap + offset`, with taps from 0.

    first: the first tap. length: the number of taps. extent: the extent of dimension `dim`.
    """

    dim: int
    index: str
    tap: str
    stride: int
    offset: int
    first: Value
    length: Value
    extent: Value

    @property
    def shift(self) -> int:
        """The number of elements by which the first phase starts before element 0."""
        return -self.offset % self.stride

    @property
    def blocks(self) -> Bounds:
        """The range of `q`."""
        return 0, (to_polynomial(self.extent) + self.shift + self.stride - 1) // self.stride

    def turns(self, residue: int = 0) -> Bounds:
        """The range of `a` in a phase; the widest is that of phase 0."""
        return 0, (to_polynomial(self.length) - residue + self.stride - 1) // self.stride


def find_long_windows(
    subscripts: Sequence[Expr], bounds: Sequence[Bounds], ranges: Mapping[str, Bounds], sizes: Mapping[str, Value]
) -> tuple[LongWindow, ...]:
    """The dimensions of a read that are windows with a stride that they may exceed."""
    forms = [to_affine(e, sizes) for e in subscripts]
    found = []
    for d, form in enumerate(forms):
        others = {v for n, f in enumerate(forms) if n != d for v, _ in f.terms}
        factors = {atom: constant_value(c) for atom, c in form.terms}
        if len(factors) != 2 or factors.keys() & others:
            continue
        (tap, one), (index, stride) = sorted(factors.items(), key=lambda t: t[1] or 0)
        if one != 1 or stride is None or stride < 2 or not (isinstance(tap, Variable) and isinstance(index, Variable)):
            continue
        first, length = ranges[tap.name][0], range_extent(ranges[tap.name])
        offset = constant_value(form.constant + first - bounds[d][0])
        if offset is not None and (constant_value(length) or stride + 1) > stride:
            extent = range_extent(bounds[d])
            found.append(LongWindow(d, index.name, tap.name, stride, offset, first, length, extent))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WindowPhase:
    """One phase: the residue of each window, and the gather form of its elements."""

    residues: tuple[int, ...]
    form: GatherForm


@dataclass(frozen=True, slots=True)
class PhasedGather:
    """The inverse of a read with long windows, as one gather for each phase.

    windows: all long windows of the read. split: the windows that are split into phases. rest: the gather form along
    the other dimensions, `other_dims`.
    """

    windows: tuple[LongWindow, ...]
    split: tuple[LongWindow, ...]
    rest: GatherForm
    other_dims: tuple[int, ...]
    ranges: Mapping[str, Bounds]
    sizes: Mapping[str, Value]

    @property
    def unsolved(self) -> dict[str, Bounds]:
        """The indices of an element, counted from 0, with their ranges."""
        return self._order({w.dim: (w.index, (0, w.extent)) for w in self.windows})

    @property
    def phases(self) -> tuple[WindowPhase, ...]:
        """One phase for each combination of residues of the split windows."""
        residues = product(*(range(w.stride) for w in self.split))
        return tuple(WindowPhase(r, self._solve_phase(dict(zip(self.split, r, strict=True)))) for r in residues)

    @property
    def sums_products(self) -> bool:
        """Whether each phase sums over other indices than taps."""
        taken = {name for w in self.windows for name in (w.index, w.tap)}
        return any(i not in taken and i not in self.rest.solutions for i in self.ranges)

    def select_phase(self, reads: Sequence[Expr]) -> Expr:
        """The read, from `reads` with one for each phase, of the phase to which the element belongs."""
        value = tuple(reads)
        for w in reversed(self.split):
            place = Binary("%", _shift_index(w), Const(w.stride, INT64), INT64)
            conditions = [Binary("==", place, Const(r, INT64), BOOL) for r in range(w.stride)]
            value = tuple(_choose(conditions, value[n : n + w.stride]) for n in range(0, len(value), w.stride))
        return value[0]

    @property
    def phase_subscripts(self) -> tuple[Expr, ...]:
        """The subscripts of an element in the tensor of its phase."""
        places = {w.index: Binary("/", _shift_index(w), Const(w.stride, INT64), INT64) for w in self.split}
        return tuple(places.get(name, Index(name, INT64)) for name in self.unsolved)

    def element_guards(self, phase: WindowPhase) -> tuple[Expr, ...]:
        """The conditions under which an element of a phase exists."""
        guards = list[Expr]()
        for w, r in zip(self.split, phase.residues, strict=True):
            element = Affine(r - w.shift, ((Variable(w.index), w.stride),))
            guards += range_guards(affine_to_expr(element), (0, w.extent), phase.form.unsolved, self.sizes)
        return tuple(guards)

    def _order(self, windows: Mapping[int, tuple[str, Bounds]]) -> dict[str, Bounds]:
        others = dict(zip(self.other_dims, self.rest.unsolved.items(), strict=True))
        return dict(entry for _, entry in sorted({**windows, **others}.items()))

    def _solve_phase(self, residues: Mapping[LongWindow, int]) -> GatherForm:
        left = {w.dim: (w.index, w.blocks if w in residues else (0, w.extent)) for w in self.windows}
        unsolved = self._order(left)
        solutions = dict(self.rest.solutions)
        turns = dict[str, Bounds]()
        for w in self.windows:
            turns[w.tap] = w.turns(residues.get(w, 0))
            box = {**unsolved, w.tap: w.turns()}
            solve = self._solve_residue if w in residues else self._solve_quotient
            solutions |= solve(w, residues.get(w, 0), box)
        return GatherForm(unsolved, solutions, turns, {w.tap: w.turns() for w in self.windows})

    def _solve_residue(self, w: LongWindow, residue: int, box: Mapping[str, Bounds]) -> dict[str, SolvedIndex]:
        blocks = Affine((-w.offset - w.shift) // w.stride, ((Variable(w.index), 1), (Variable(w.tap), -1)))
        index = affine_to_expr(blocks)
        tap = affine_to_expr(Affine(w.first + residue, ((Variable(w.tap), w.stride),)))
        guards = tuple(range_guards(index, self.ranges[w.index], box, self.sizes))
        return {w.index: SolvedIndex(index, 1, guards), w.tap: SolvedIndex(tap, 1, ())}

    def _solve_quotient(self, w: LongWindow, _: int, box: Mapping[str, Bounds]) -> dict[str, SolvedIndex]:
        start = Affine(-w.offset, ((Variable(w.index), 1), (Variable(w.tap), -w.stride)))
        element = affine_to_expr(Affine(-w.offset, ((Variable(w.index), 1),)))
        stride, turn = Const(w.stride, INT64), Index(w.tap, INT64)
        place = Binary("+", Binary("%", element, stride, INT64), Binary("*", stride, turn, INT64), INT64)
        lower, upper = self.ranges[w.index]
        guards = range_guards(affine_to_expr(start), (lower * w.stride, upper * w.stride), box, self.sizes)
        inside = Binary("<", place, polynomial_to_expr(w.length), BOOL)
        index = Binary("-", Binary("/", element, stride, INT64), turn, INT64)
        first = polynomial_to_expr(w.first)
        tap = place if constant_value(w.first) == 0 else Binary("+", place, first, INT64)
        return {
            w.index: SolvedIndex(index, 1, tuple(guards), rounds=True),
            w.tap: SolvedIndex(tap, 1, (inside,)),
        }


def solve_phases(
    subscripts: Sequence[Expr],
    bounds: Sequence[Bounds],
    ranges: Mapping[str, Bounds],
    free: Sequence[str],
    sizes: Mapping[str, Value],
) -> PhasedGather | None:
    """The gather of a read with all of its long windows split into phases; None if there are none or it is unsolvable.

    The arguments are those of `solve_gather`.
    """
    windows = find_long_windows(subscripts, bounds, ranges, sizes)
    if not windows:
        return None
    other_dims = tuple(d for d in range(len(subscripts)) if d not in {w.dim for w in windows})
    taken = {name for w in windows for name in (w.index, w.tap)}
    rest = solve_gather(
        [subscripts[d] for d in other_dims],
        [bounds[d] for d in other_dims],
        {i: b for i, b in ranges.items() if i not in taken},
        [i for i in free if i not in taken],
        sizes,
    )
    if rest is None or rest.has_disjoint_windows:
        return None
    return PhasedGather(windows, windows, rest, other_dims, ranges, sizes)


def count_phases(windows: Sequence[LongWindow]) -> int:
    """The number of combinations of residues."""
    total = 1
    for w in windows:
        total *= w.stride
    return total


def _shift_index(w: LongWindow) -> Expr:
    return affine_to_expr(Affine(w.shift, ((Variable(w.index), 1),)))


def _choose(conditions: Sequence[Expr], values: Sequence[Expr]) -> Expr:
    """Select the value whose condition holds; exactly one of them does."""
    chosen = values[-1]
    for condition, value in zip(reversed(conditions[:-1]), reversed(values[:-1]), strict=True):
        chosen = Select(condition, value, chosen, value.dtype)
    return chosen
