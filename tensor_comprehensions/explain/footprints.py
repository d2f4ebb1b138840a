"""Footprints of loop iterations: the bytes of each buffer that one iteration touches, from its subscripts.

The numbers are upper bounds. They are exact if all subscripts are sums of loop variables times constants and nothing is
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
    """A subscript as an affine form.

    Attributes:
        moving: (variable, coefficient) of variables that vary within the iteration.
        fixed: (part, coefficient) of parts that do not vary.
        constant: the constant term.
        is_known: whether this describes the whole subscript; data may decide it.
    """

    moving: tuple[tuple[str, int], ...]
    fixed: frozenset[tuple[Hashable, int]]
    constant: int
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class _Access:
    """An access: the buffer, the subscripts, and whether it happens for certain, under no condition."""

    buffer: Buffer
    forms: tuple[_Form, ...]
    is_certain: bool


@dataclass(frozen=True, slots=True)
class _Term:
    """A term of a subscript: `factor * part`.

    Attributes:
        variable: the name if `part` is a variable, else "".
        names: the names of all variables in `part`.
        is_opaque: whether its value depends on data.
    """

    part: Expr
    factor: int
    variable: str
    names: tuple[str, ...]
    is_opaque: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """Cached facts about parts of the program, by `id`: loads of statements, and linear terms of subscripts."""

    loads: dict[int, tuple[Load, ...]] = field(default_factory=dict)
    terms: dict[int, tuple[tuple[_Term, ...], int]] = field(default_factory=dict)

    def loads_of(self, s: Stmt) -> tuple[Load, ...]:
        """The loads of a statement, without those of nested statements."""
        if id(s) not in self.loads:
            found = (x for e in stmt_expressions(s) for x in walk_expr(e))
            self.loads[id(s)] = tuple(x for x in found if isinstance(x, Load))
        return self.loads[id(s)]

    def terms_of(self, e: Expr) -> tuple[tuple[_Term, ...], int]:
        """The terms of an integer expression, and its constant term."""
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
    """Whether an expression node depends on data. Non-integer variables count as data, since scopes ignore them."""
    return isinstance(e, Load | Ramp) or (isinstance(e, Var) and not e.type.dtype.is_integer)


@dataclass(frozen=True, slots=True)
class _IterationScope:
    """The variables bound inside an iteration.

    Attributes:
        forms: the form of each variable.
        trips: the number of values of each moving variable.
        known: facts about the whole program.
        is_certain: whether the current statement runs in every iteration.
        found: the forms of expressions, by `id`.
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
            elif term.is_opaque or any(map(self._is_moving, term.names)):
                known = False
            else:
                fixed[term.part] = fixed.get(term.part, 0) + term.factor
        ordered = sorted((item for item in moving.items() if item[1]), key=lambda item: item[0])
        return _Form(tuple(ordered), frozenset(fixed.items()), constant, known)

    def _is_moving(self, name: str) -> bool:
        form = self.forms.get(name)
        return form is not None and (bool(form.moving) or not form.is_known)

    def values(self, name: str) -> int:
        """The number of values that a moving variable takes."""
        return int(name.removeprefix(_LANE)) if name.startswith(_LANE) else self.trips[name]


_LANE = "lane of "


def _without_vectors(e: Expr) -> Expr:
    """A vector expression as a scalar expression with a variable for the lane."""
    match e:
        case Ramp(base, stride, lanes):
            return build.add(base, build.mul(Var(f"{_LANE}{lanes}"), stride))
        case Broadcast(operand) | Cast(operand):
            return _without_vectors(operand)
    return e


def _trip_count(loop: Loop) -> int | None:
    """An upper bound on the iterations of a loop; None if it is known only at run time."""
    length = build.sub(loop.stop, loop.start)
    found = _constant_upper_bound(length)
    return None if found is None else max(0, -(-found // loop.step))


def _constant_upper_bound(e: Expr) -> int | None:
    """A constant upper bound of `e`: `e` is constant, or a minimum with a constant side; None if there is none."""
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
    """The footprint of each loop in `lines`.

    readable: the same lines with the names of the def. names: names of buffers for users.
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
    """(upper bound on the bytes that one execution of `s` touches, whether it is exact) of each buffer.

    Buffers allocated in `s` count, too; registers do not. known: shared by calls for parts of one program.
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
    """An upper bound on the bytes of a buffer that accesses touch together, and whether it is exact."""
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
    """Elements touched by accesses whose subscripts differ only in constants, and whether that is exact."""
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
    """How many distinct values a subscript takes with these constant terms, and whether that is exact."""
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
