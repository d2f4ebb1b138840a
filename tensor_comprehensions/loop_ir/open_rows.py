"""Generalize a module for a fixed number of rows to any number, by making the ends of loops over rows variable.

The alternative, `row_blocks`, needs code for each size of a block. If every row is accessed by the variable of a loop
over all rows, one module suffices. Rows may lie along several axes, whose loops may be fused to one flat loop over
tiles.

A constant that merely depends on the number of rows would be wrong for other numbers. So `open_same_rows` generalizes
modules for two numbers of rows, which must give the same module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..core.dtypes import INT64
from ..core.errors import CannotLower
from ..core.internal_names import internal_name
from . import build
from .intrinsics import is_hint
from .linear_forms import linear_terms
from .nodes import (
    Allocate,
    Binary,
    Buffer,
    Check,
    Const,
    Expr,
    Invoke,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Space,
    Stmt,
    Store,
    Type,
    Var,
    While,
    Window,
)
from .rewrite import children, list_accesses, map_expr, map_stmt, substitute, used_values, walk_stmts
from .row_blocks import rows_variable

CHUNK_ROWS = 8
"""Rows per allocation of a thread's memory: an allocation takes as long as a short row."""
PART = -1
"""Marks a variable that does not take all values from 0 up to an extent."""
TYPICAL_EXTENT = 1040
"""The extent that is assumed for dynamic dimensions in the static strides of allocated memory."""


@dataclass(frozen=True, slots=True)
class OpenBuffer:
    """An argument for any number of rows.

    Attributes:
        buffer: the argument, with dynamic dimensions.
        kept: the dimensions of the module's argument that `buffer` has; the others have a single element.
        axes: for each dimension with rows, its axis. steps: the elements from row to row, if that is not one.
    """

    buffer: Buffer
    kept: tuple[int, ...]
    axes: Mapping[int, int]
    steps: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class OpenProgram:
    """The arguments for any number of rows, by name, and the expressions that replace scalar arguments."""

    buffers: Mapping[str, OpenBuffer]
    scalars: Mapping[str, Expr]


def open_same_rows(program: OpenProgram, modules: Iterable[Module], counts: Sequence[Sequence[int]]) -> Module:
    """The module for any numbers of rows, from `modules` for fixed ones; `counts` has those along each axis.

    Raises:
        CannotLower: the modules are not loops over all rows, or differ in more than the numbers of rows.
    """
    first, *others = (_open_rows(program, m, count) for m, count in zip(modules, counts, strict=True))
    if any(_without_grains(other) != _without_grains(first) for other in others):
        raise CannotLower("other numbers of rows are computed in other loops")
    return first


def _open_rows(program: OpenProgram, module: Module, counts: Sequence[int]) -> Module:
    if module.sites:
        raise CannotLower("subscripts are checked")
    body = _rename_apart(build.block(*(k.body for k in module.kernels)))
    temporaries = tuple(replace(b, space=Space.SCRATCH) for b in module.temporaries)
    local = _find_memory((*temporaries, *_allocated_buffers(body)))
    found = _Finder(program, tuple(counts), {b.name for b in module.arguments}, _count_values(body), {}, {})
    found.find(body)
    _check_register_tiles(body, found.variables)
    opened = {name: _open_local(local[name], places) for name, places in found.places.items()}
    reached = {b.name: b for b in temporaries} | opened
    body = _Opener(program, found.variables, reached, found.places).stmt(Allocate(temporaries, body))
    arguments = tuple(
        program.buffers[b.name].buffer if b.name in program.buffers else b
        for b in module.arguments
        if b.name not in program.scalars
    )
    kernel = Kernel(internal_name(module.name, "rows"), body)
    return Module(module.name, arguments, (), (kernel,), (), module.written, module.partial)


def _rename_apart(body: Stmt) -> Stmt:
    """`body` with distinct variables in all loops."""
    used: Counter[str] = Counter()

    def rename(s: Stmt, own: Mapping[str, Expr]) -> Stmt:
        inner, name = own, s.var if isinstance(s, Loop) else s.name if isinstance(s, Let) else ""
        fresh = internal_name(name, used[name]) if used[name] else name
        if name:
            used[name] += 1
            inner = {**own, name: Var(fresh, s.value.type if isinstance(s, Let) else Type(INT64))}
        new = map_stmt(s, lambda e: substitute(e, own), lambda c: rename(c, inner))
        match new:
            case Loop():
                return replace(new, var=fresh)
            case Let():
                return replace(new, name=fresh)
        return new

    return rename(body, {})


def _allocated_buffers(body: Stmt) -> Iterator[Buffer]:
    for s in walk_stmts(body):
        if isinstance(s, Allocate):
            if s.lengths:
                raise CannotLower("memory is allocated for a number that is not known")
            yield from s.buffers


def _find_memory(buffers: Iterable[Buffer]) -> dict[str, Buffer]:
    found: dict[str, Buffer] = {}
    for b in buffers:
        if found.setdefault(b.name, b) != b:
            raise CannotLower(f"{b.name} is memory of several shapes")
    return found


def _check_register_tiles(body: Stmt, rows: Collection[str]) -> None:
    """Refuse register tiles that sum over all rows: blocks of rows are faster, since their operands stay in cache."""
    for s in walk_stmts(body):
        is_tile = isinstance(s, Allocate) and any(b.space is Space.REGISTER and b.type.lanes > 1 for b in s.buffers)
        if is_tile and any(isinstance(inner, Loop) and inner.var in rows for inner in walk_stmts(s)):
            raise CannotLower("a register tile sums all rows")


def _without_grains(m: Module) -> Module:
    """`m` with all grain sizes set to 1: they may differ, because they follow from the time that a row takes."""

    def change(s: Stmt) -> Stmt:
        new = map_stmt(s, lambda e: e, change)
        return replace(new, grain=1) if isinstance(new, Loop) else new

    return replace(m, kernels=tuple(replace(k, body=change(k.body)) for k in m.kernels))


# --- loops -------------------------------------------------------------------------------------------------------


Digits = tuple[tuple[str, int], ...]
"""The variables that are digits of the variable of a flat loop, outermost first, each with its extent."""


def _count_values(body: Stmt) -> dict[str, int]:
    """The extent of each loop variable (or of its digits); `PART` for loops that do not count from 0 in steps of 1."""
    counts: dict[str, int] = {}
    for s in (s for s in walk_stmts(body) if isinstance(s, Loop)):
        counts |= dict(_find_digits(s) or ((s.var, _count_trips(s)),))
    return counts


def _count_trips(s: Loop) -> int:
    return int(s.stop.value) if isinstance(s.stop, Const) and s.start == build.const(0) and s.step == 1 else PART


def _find_digits(loop: Loop) -> Digits:
    """The digits of a flat loop whose variable is only used to compute them; () for other loops."""
    trips = _count_trips(loop)
    strides: list[tuple[int, str, int]] = []
    body = loop.body
    while isinstance(body, Let) and (digit := _parse_digit(body.value, loop.var)) is not None:
        strides.append((digit[0], body.name, digit[1]))
        body = body.body
    if trips == PART or not strides or any(isinstance(e, Var) and e.name == loop.var for e in used_values(body)):
        return ()
    strides.sort(reverse=True)
    ends = list(pairwise([trips, *(stride for stride, _, _ in strides)]))
    if strides[-1][0] != 1 or any(end % stride for end, stride in ends):
        return ()
    counts = [end // stride for end, stride in ends]
    moduli = [modulus for _, _, modulus in strides]
    if moduli[1:] != counts[1:] or moduli[0] not in (0, counts[0]):
        return ()
    return tuple((name, n) for n, (_, name, _) in zip(counts, strides, strict=True))


def _parse_digit(e: Expr, flat: str) -> tuple[int, int] | None:
    """(stride, modulus) if `e` is a digit of the variable `flat`, with 0 for no modulus, else None."""
    match e:
        case Binary("mod", inner, Const(modulus)) if (digit := _parse_digit(inner, flat)) is not None:
            return (digit[0], int(modulus)) if not digit[1] else None
        case Binary("div", Var(name), Const(stride)) if name == flat:
            return int(stride), 0
        case Var(name) if name == flat:
            return 1, 0
    return None


# --- which variables are rows ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the variables that index rows, and the dimensions of the module's memory that they index.

    values: the extent of each variable. variables: the axis of each variable that indexes rows.
    places: for memory of the module, the axis of each dimension that rows index.
    """

    program: OpenProgram
    counts: tuple[int, ...]
    arguments: Collection[str]
    values: Mapping[str, int]
    variables: dict[str, int]
    places: dict[str, dict[int, int]]

    def find(self, body: Stmt) -> None:
        _check_statements(body)
        accesses = list(list_accesses(body))
        for b, indices in accesses:
            opened = self.program.buffers.get(b.name)
            for d, axis in (opened.axes if opened is not None else {}).items():
                assert opened is not None
                self._add(self._row_of(indices[d], opened.steps.get(d, 0), axis), axis)
        before = -1
        while before != (before := len(self.variables) + sum(map(len, self.places.values()))):
            for b, indices in accesses:
                self._follow(b, indices)
        for b, indices in accesses:
            self._check(b, indices)

    def _add(self, name: str, axis: int) -> None:
        if self.values.get(name) != self.counts[axis]:
            raise CannotLower("a loop runs over a part of the rows")
        if self.variables.setdefault(name, axis) != axis:
            raise CannotLower("one loop is over the rows of two axes")

    def _row_of(self, index: Expr, step: int, axis: int) -> str:
        """The variable that selects the row in `index`; with `step`, the one whose coefficient is `step`."""
        if isinstance(index, Var):
            return index.name
        if not step:
            raise CannotLower("a row is not the variable of a loop")
        found = [
            atom.name
            for atom, c in linear_terms(index)[0].items()
            if isinstance(atom, Var) and c == step and self.values.get(atom.name) == self.counts[axis]
        ]
        if len(found) != 1:
            raise CannotLower("a window does not begin at the variable of a loop")
        return found[0]

    def _follow(self, b: Buffer, indices: Sequence[Expr]) -> None:
        """Find dimensions of the module's memory that row variables index, and other variables that index these."""
        if b.name in self.arguments:
            return
        for d, e in enumerate(indices):
            known = self.places.get(b.name, {}).get(d)
            if known is not None:
                if not isinstance(e, Var):
                    raise CannotLower("a row is not the variable of a loop")
                self._add(e.name, known)
            for name in _find_variables(e) & self.variables.keys():
                if not isinstance(e, Var) or b.shape[d] != self.counts[self.variables[name]]:
                    raise CannotLower("memory for rows has room for another number of them")
                self.places.setdefault(b.name, {})[d] = self.variables[name]

    def _check(self, b: Buffer, indices: Sequence[Expr]) -> None:
        """Refuse row variables in other dimensions than those of their axis."""
        opened = self.program.buffers.get(b.name)
        places = opened.axes if opened is not None else self.places.get(b.name, {})
        for d, e in enumerate(indices):
            axes = [self.variables[name] for name in _find_variables(e) if name in self.variables]
            if axes != ([places[d]] if d in places else []):
                raise CannotLower(f"rows index another dimension of {b.name}")
            if opened is not None and d not in opened.kept and e != build.const(0):
                raise CannotLower(f"{b.name} has several elements where it has one row")


def _check_statements(body: Stmt) -> None:
    """Refuse statements that cannot be generalized to any number of rows."""
    for s in walk_stmts(body):
        if isinstance(s, Invoke) and not is_hint(s):
            raise CannotLower(f"{s.name} computes a fixed number of rows")
        if isinstance(s, (Window, While, Check)):
            raise CannotLower(f"a {type(s).__name__} is no loop over rows")


def _find_variables(e: Expr) -> set[str]:
    """The variables in an index, except in subscripts of its loads."""
    if isinstance(e, Var):
        return {e.name}
    return set[str]() if isinstance(e, Load) else {name for c in children(e) for name in _find_variables(c)}


# --- opened loops and memory -------------------------------------------------------------------------------------


def _open_local(b: Buffer, places: Mapping[int, int]) -> Buffer:
    """Memory of the module with dynamic dimensions for rows, in the same order of dimensions."""
    if b.space is not Space.SCRATCH:
        raise CannotLower(f"{b.name} holds rows in registers")
    strides, held = [0] * len(b.shape), [""] * len(b.shape)
    elements, typical, is_open = 1, 1, False
    for d in _inner_dimensions_first(b):
        if b.shape[d] != 1 and b.strides[d] != elements:
            raise CannotLower(f"{b.name} has gaps between rows")
        strides[d], held[d] = typical, internal_name(b.name, "stride", d) if is_open else ""
        elements *= b.shape[d]
        typical *= TYPICAL_EXTENT if d in places else b.shape[d]
        is_open |= d in places
    shape = tuple(0 if d in places else n for d, n in enumerate(b.shape))
    variables = tuple(name or None for name in held) if any(held) else ()
    return replace(b, shape=shape, strides=tuple(strides), dynamic=tuple(sorted(places)), stride_variables=variables)


def _inner_dimensions_first(b: Buffer) -> list[int]:
    return sorted(range(len(b.shape)), key=lambda d: (b.strides[d], -d))


def _allocate(b: Buffer, places: Mapping[int, int], body: Stmt) -> Stmt:
    """`body` inside an allocation of `b` for all rows, with strides computed from the numbers of rows."""
    extents = {d: build.var(rows_variable(axis)) for d, axis in places.items()}
    body = Allocate((b,), body, tuple(extents[d] for d in b.dynamic))
    stride: Expr = build.const(1)
    steps: list[tuple[str, Expr]] = []
    for d in _inner_dimensions_first(b):
        held = b.stride_variable(d)
        if held is not None:
            steps.append((held, stride))
            stride = build.var(held)
        stride = build.mul(stride, extents.get(d, b.shape[d]))
    for name, value in reversed(steps):
        body = Let(name, value, body)
    return body


@dataclass(frozen=True, slots=True)
class _Opener:
    """Makes loops over rows end at the last row. variables, places: as in `_Finder`. local: opened memory by name."""

    program: OpenProgram
    variables: Mapping[str, int]
    local: Mapping[str, Buffer]
    places: Mapping[str, Mapping[int, int]]

    def expr(self, e: Expr) -> Expr:
        if isinstance(e, Load) and e.buffer.name in self.program.scalars:
            return self.program.scalars[e.buffer.name]
        new = map_expr(e, self.expr)
        if isinstance(new, Load):
            buffer, indices = self.reach(new.buffer, new.indices)
            return new if buffer is new.buffer else replace(new, buffer=buffer, indices=indices)
        return new

    def reach(self, b: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]]:
        opened = self.program.buffers.get(b.name)
        if opened is not None:
            return opened.buffer, tuple(indices[d] for d in opened.kept)
        return self.local.get(b.name, b), indices

    def stmt(self, s: Stmt) -> Stmt:
        match s:
            case Loop():
                digits = _find_digits(s)
                return self.share_memory(self.flat_loop(s, digits) if digits else self.loop(s))
            case Allocate(buffers, body):
                inner = build.allocate([b for b in buffers if b.name not in self.places], self.stmt(body))
                return self.allocate({b.name: self.local[b.name] for b in buffers if b.name in self.places}, inner)
        new = map_stmt(s, self.expr, self.stmt)
        match new:
            case Store(buffer, indices):
                buffer, indices = self.reach(buffer, indices)
                return replace(new, buffer=buffer, indices=indices)
            case Invoke(_, operands):
                return replace(new, operands=tuple(self.reach(b, where) for b, where in operands))
        return new

    def loop(self, s: Loop) -> Loop:
        """The loop `s`, ending at the last row if it is over rows."""
        stop = s.stop
        if s.var in self.variables:
            if s.kind is LoopKind.UNROLLED:
                raise CannotLower("a loop over rows is unrolled")
            stop = build.var(rows_variable(self.variables[s.var]))
        return replace(s, start=self.expr(s.start), stop=self.expr(stop), body=self.stmt(s.body))

    def flat_loop(self, s: Loop, digits: Digits) -> Loop:
        """The flat loop `s` over all combinations of its digits, with variable extents for those that are rows."""
        body: Stmt = s.body
        for _ in digits:
            assert isinstance(body, Let)
            body = body.body
        body = self.stmt(body)
        rest: Expr = build.var(s.var)
        total: Expr = build.const(1)
        lets: list[tuple[str, Expr]] = []
        for name, count in reversed(digits):
            axis = self.variables.get(name)
            extent: Expr = build.const(count) if axis is None else build.var(rows_variable(axis))
            lets.append((name, rest if name == digits[0][0] else build.mod(rest, extent)))
            rest, total = build.div(rest, extent), build.mul(total, extent)
        for name, value in lets:
            body = Let(name, value, body)
        return replace(s, stop=total, body=body)

    def share_memory(self, s: Loop) -> Stmt:
        """Hoist allocations for rows out of the loop `s`: once for all iterations, or per chunk of a parallel loop."""
        taken: dict[str, Buffer] = {}
        body = _take_allocations(s.body, taken)
        if not taken:
            return s
        if s.kind is not LoopKind.PARALLEL:
            return self.allocate(taken, replace(s, body=body))
        chunk = internal_name(s.var, "chunk")
        first = build.mul(build.var(chunk), CHUNK_ROWS)
        rows = Loop(s.var, first, build.minimum(build.add(first, CHUNK_ROWS), s.stop), body)
        chunks = build.div(build.add(s.stop, CHUNK_ROWS - 1), CHUNK_ROWS)
        inner = self.allocate(taken, rows)
        return Loop(chunk, build.const(0), chunks, inner, LoopKind.PARALLEL, grain=-(-s.grain // CHUNK_ROWS))

    def allocate(self, buffers: Mapping[str, Buffer], body: Stmt) -> Stmt:
        """`body` inside allocations of `buffers`."""
        for name, b in buffers.items():
            body = _allocate(b, self.places[name], body)
        return body


def _take_allocations(s: Stmt, taken: dict[str, Buffer]) -> Stmt:
    """`s` without allocations for rows and the bindings of their strides; the buffers are added to `taken`."""
    if isinstance(s, Allocate) and s.lengths:
        taken |= {b.name: b for b in s.buffers}
        return _take_allocations(s.body, taken)
    new = map_stmt(s, lambda e: e, lambda inner: _take_allocations(inner, taken))
    return new.body if isinstance(new, Let) and any(new.name in b.stride_variables for b in taken.values()) else new
