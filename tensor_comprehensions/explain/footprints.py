"""Footprints of loop iterations, from subscripts: boxes around the touched elements of each buffer.

The numbers are upper bounds, and exact if all subscripts are sums of loop variables times constants and nothing is
masked.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from ..loop_ir import build
from ..loop_ir.linear_forms import linear_terms
from ..loop_ir.nodes import (
    Broadcast,
    Buffer,
    Cast,
    Const,
    Expr,
    If,
    Let,
    Load,
    Loop,
    Ramp,
    Space,
    Stmt,
    Store,
    Var,
)
from ..loop_ir.rewrite import stmt_expressions, substatements, walk_expr
from ..loop_ir.show import Line
from ..target import CpuTarget
from .kernel_report import Footprint


@dataclass(frozen=True, slots=True)
class _Form:
    """A subscript: coefficients of the moving variables, and its constant part."""

    moving: tuple[tuple[str, int], ...]
    fixed: frozenset[tuple[Hashable, int]]
    constant: int
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class _Access:
    """A buffer with its subscripts; may not happen where it is under a condition."""

    buffer: Buffer
    forms: tuple[_Form, ...]
    is_certain: bool


@dataclass(frozen=True, slots=True)
class _Term:
    """A part of a subscript, times a constant.

    Attributes:
        variable: its name if it is one, or else "". names: of all variables in it.
        is_opaque: whether data decides it.
    """

    part: Expr
    factor: int
    variable: str
    names: tuple[str, ...]
    is_opaque: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """Facts about parts of the program, by their ids: loads of statements, and linear terms of subscripts."""

    loads: dict[int, tuple[Load, ...]] = field(default_factory=dict)
    terms: dict[int, tuple[tuple[_Term, ...], int]] = field(default_factory=dict)

    def loads_of(self, s: Stmt) -> tuple[Load, ...]:
        """The loads of a statement itself, without those of statements inside it."""
        if id(s) not in self.loads:
            found = (x for e in stmt_expressions(s) for x in walk_expr(e))
            self.loads[id(s)] = tuple(x for x in found if isinstance(x, Load))
        return self.loads[id(s)]

    def terms_of(self, e: Expr) -> tuple[tuple[_Term, ...], int]:
        """The terms of an integer expression, and its constant."""
        if id(e) not in self.terms:
            terms, constant = linear_terms(_without_vectors(e))
            self.terms[id(e)] = tuple(_make_linear_term(part, factor) for part, factor in terms.items()), constant
        return self.terms[id(e)]


def _make_linear_term(part: Expr, factor: int) -> _Term:
    if isinstance(part, Var):
        return _Term(part, factor, part.name, (part.name,), is_opaque=False)
    inner = list(walk_expr(part))
    names = tuple(x.name for x in inner if isinstance(x, Var))
    return _Term(part, factor, "", names, any(map(_is_data, inner)))


def _is_data(e: Expr) -> bool:
    """Whether data decides an expression, as far as it alone shows: scopes know integer variables only."""
    return isinstance(e, Load | Ramp) or (isinstance(e, Var) and not e.type.dtype.is_integer)


@dataclass(frozen=True, slots=True)
class _IterationScope:
    """The variables bound inside an iteration: the form of each, and its number of values.

    known: facts about the whole program. is_certain: whether the statement runs in each iteration. found: the forms of
    expressions, by their ids.
    """

    forms: Mapping[str, _Form]
    trips: Mapping[str, int]
    known: _Known = field(default_factory=_Known)
    is_certain: bool = True
    found: dict[int, _Form] = field(default_factory=dict)

    def with_loop(self, loop: Loop) -> _IterationScope:
        start, trips = self.form(loop.start), _trip_count(loop)
        own = f"{loop.var} counts"
        moving = dict(start.moving)
        moving[own] = loop.step
        form = _Form(tuple(moving.items()), start.fixed, start.constant, start.is_known and trips is not None)
        exact = trips is not None and trips > 0 and isinstance(build.sub(loop.stop, loop.start), Const)
        count = max(1, trips or 1)
        return _IterationScope(
            {**self.forms, loop.var: form}, {**self.trips, own: count}, self.known, self.is_certain and exact
        )

    def with_let(self, let: Let) -> _IterationScope:
        if not let.value.type.dtype.is_integer:
            return self
        forms = {**self.forms, let.name: self.form(let.value)}
        return _IterationScope(forms, self.trips, self.known, self.is_certain)

    def under_condition(self) -> _IterationScope:
        return replace(self, is_certain=False, found={})

    def form(self, e: Expr) -> _Form:
        """The form of an integer expression."""
        if id(e) not in self.found:
            self.found[id(e)] = self._find_form(e)
        return self.found[id(e)]

    def _find_form(self, e: Expr) -> _Form:
        terms, constant = self.known.terms_of(e)
        if not terms:
            return _Form((), frozenset(), constant)
        moving: dict[str, int] = {}
        fixed: dict[Hashable, int] = {}
        known = True
        for term in terms:
            own = self.forms.get(term.variable)
            if own is not None:
                for name, c in own.moving:
                    moving[name] = moving.get(name, 0) + term.factor * c
                for key, c in own.fixed:
                    fixed[key] = fixed.get(key, 0) + term.factor * c
                constant += term.factor * own.constant
                known = known and own.is_known
            elif term.variable.startswith(_LANE):
                moving[term.variable] = moving.get(term.variable, 0) + term.factor
            elif term.is_opaque or any(map(self._moves, term.names)):
                known = False
            else:
                fixed[term.part] = fixed.get(term.part, 0) + term.factor
        ordered = sorted((item for item in moving.items() if item[1]), key=lambda item: item[0])
        return _Form(tuple(ordered), frozenset(fixed.items()), constant, known)

    def _moves(self, name: str) -> bool:
        form = self.forms.get(name)
        return form is not None and (bool(form.moving) or not form.is_known)

    def values(self, name: str) -> int:
        """How many values a moving variable takes."""
        return int(name.removeprefix(_LANE)) if name.startswith(_LANE) else self.trips[name]


_LANE = "lane of "


def _without_vectors(e: Expr) -> Expr:
    """The element of a lane, which is a variable."""
    match e:
        case Ramp(base, stride, lanes):
            return build.add(base, build.mul(Var(f"{_LANE}{lanes}"), stride))
        case Broadcast(operand) | Cast(operand):
            return _without_vectors(operand)
    return e


def _trip_count(loop: Loop) -> int | None:
    """Maximum number of iterations of a loop; None if it is only known at run time."""
    length = build.sub(loop.stop, loop.start)
    found = _constant_upper_bound(length)
    return None if found is None else max(0, -(-found // loop.step))


def _constant_upper_bound(e: Expr) -> int | None:
    """A value that `e` does not exceed: a constant, or the least of several where one is."""
    terms, constant = linear_terms(e)
    if not terms:
        return constant
    bounds = [
        _constant_upper_bound(build.add(build.sub(e, atom), side))
        for atom, factor in terms.items()
        if factor == 1 and getattr(atom, "op", "") == "min"
        for side in (atom.left, atom.right)  # type: ignore[union-attr]
    ]
    known = [b for b in bounds if b is not None]
    return min(known, default=None)


def loop_footprints(
    lines: Sequence[Line], readable: Sequence[Line], target: CpuTarget, names: Mapping[str, str]
) -> tuple[Footprint, ...]:
    """The footprint of each loop among `lines`.

    readable: the same lines in the program's names. names: of the buffers, for people.
    """
    found: list[Footprint] = []
    known = _Known()
    for number, ((_, s), (_, own)) in enumerate(zip(lines, readable, strict=True), 1):
        if isinstance(s, Loop) and isinstance(own, Loop):
            sizes = footprint_of(s.body, known)
            trips = _trip_count(s)
            found.append(
                Footprint(
                    number,
                    own.var,
                    -1 if trips is None else trips,
                    tuple((names.get(name, name), size) for name, (size, _) in sizes.items()),
                    all(exact for _, exact in sizes.values()),
                    _cache_for(sum(size for size, _ in sizes.values()), target),
                )
            )
    return tuple(found)


def _cache_for(size: int, target: CpuTarget) -> str:
    return next((f"L{n}" for n, capacity in enumerate(target.cache, 1) if size <= capacity), "memory")


def footprint_of(s: Stmt, known: _Known | None = None) -> dict[str, tuple[int, bool]]:
    """The bytes of each buffer that one run of `s` touches, with whether it touches that many for certain.

    Buffers that are made in `s` count, too; registers do not. known: for several parts of a program.
    """
    accesses: dict[str, list[tuple[_Access, _IterationScope]]] = {}
    for access, inner in _list_accesses(s, _IterationScope({}, {}, known or _Known())):
        accesses.setdefault(access.buffer.name, []).append((access, inner))
    return {name: _sum_touched_bytes(found) for name, found in accesses.items()}


def _list_accesses(s: Stmt, inner: _IterationScope) -> list[tuple[_Access, _IterationScope]]:
    found: list[tuple[_Access, _IterationScope]] = []
    _collect_accesses(s, inner, found)
    return found


def _collect_accesses(s: Stmt, inner: _IterationScope, found: list[tuple[_Access, _IterationScope]]) -> None:
    for x in inner.known.loads_of(s):
        if x.buffer.space is not Space.REGISTER:
            certain = inner.is_certain and x.mask is None
            found.append((_Access(x.buffer, tuple(map(inner.form, x.indices)), certain), inner))
    match s:
        case Store(buffer, indices, _, _, mask):
            if buffer.space is not Space.REGISTER:
                certain = inner.is_certain and mask is None
                found.append((_Access(buffer, tuple(map(inner.form, indices)), certain), inner))
        case Loop():
            inner = inner.with_loop(s)
        case Let():
            inner = inner.with_let(s)
        case If():
            inner = inner.under_condition()
    for c in substatements(s):
        _collect_accesses(c, inner, found)


def _sum_touched_bytes(found: list[tuple[_Access, _IterationScope]]) -> tuple[int, bool]:
    """Bytes of a buffer that accesses touch together, and whether that is exact."""
    buffer = found[0][0].buffer
    whole = prod(buffer.shape) if not buffer.dynamic else 0
    size = buffer.type.dtype.size * buffer.type.lanes
    shapes: dict[Hashable, list[tuple[_Access, _IterationScope]]] = {}
    for access, inner in found:
        key = tuple((f.moving, f.fixed, f.is_known) for f in access.forms)
        shapes.setdefault((key, tuple(sorted(inner.trips.items()))), []).append((access, inner))
    counts = [_count_touched_elements(same) for same in shapes.values()]
    total = sum(n for n, _ in counts)
    exact = all(e for _, e in counts)
    if len(counts) > 1:  # boxes that may overlap: the largest alone, or all together
        exact = exact and total <= max(n for n, _ in counts)
    if whole and total >= whole:
        return whole * size, exact or any(n >= whole and e for n, e in counts)
    return total * size, exact


def _count_touched_elements(same: list[tuple[_Access, _IterationScope]]) -> tuple[int, bool]:
    """Elements of accesses whose subscripts differ in constants only."""
    access, inner = same[0]
    exact = all(a.is_certain for a, _ in same)
    names = [name for f in access.forms for name, _ in f.moving]
    exact = exact and len(names) == len(set(names)) and all(f.is_known for f in access.forms)
    total = 1
    apart = 0
    for d, form in enumerate(access.forms):
        offsets = sorted({a.forms[d].constant for a, _ in same})
        apart += len(offsets) > 1
        extent = access.buffer.shape[d] or 1 << 40
        count, certain = _count_subscript_values(form, inner, offsets) if form.is_known else (extent, False)
        total *= min(count, extent)
        exact = exact and certain
    return total, exact and apart <= 1


def _count_subscript_values(form: _Form, inner: _IterationScope, offsets: list[int]) -> tuple[int, bool]:
    """How many different values a subscript takes with any of these constants, and whether that is exact."""
    steps = sorted((abs(c), inner.values(name)) for name, c in form.moving)
    if len(offsets) > 1 and len({b - a for a, b in pairwise(offsets)}) == 1:
        steps = sorted([*steps, (offsets[1] - offsets[0], len(offsets))])
        offsets = offsets[:1]
    span, count, dense = 0, 1, True
    for step, values in steps:
        if step > span + 1:
            dense = False
        elif not dense and step <= span:
            return min(span + step * (values - 1) + 1, count * values) * len(offsets), False
        count = span + step * (values - 1) + 1 if dense else count * values
        span += step * (values - 1)
    return count * len(offsets), len(offsets) == 1
