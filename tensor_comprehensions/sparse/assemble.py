"""Sparse results that are written level by level, in storage order (TACO, section 6.3).

The loops over the indices of the result come first and in the order of its levels, so that every element is appended
after the previous ones. If a reduced loop is outside of the last of these, a dense row accumulates the results, and its
touched elements are appended when the row is complete (see `row_workspace`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..core.dtypes import BOOL, INT64
from ..core.errors import CannotLower
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.nodes import (
    Allocate,
    Buffer,
    Expr,
    If,
    Let,
    Load,
    Loop,
    LoopKind,
    Stmt,
    Store,
    While,
)
from ..loop_ir.passes.vectorize import vectorize_loops
from ..tc_lang.formats import Format, LevelKind
from ..tc_lang.ir import Index
from ..thresholds import ADDED_PRODUCTS, APPENDED_ELEMENTS, ROW_CHUNK_MULTIPLE
from .chunks import CHUNKS, WORK, parallelize_outer_loop
from .emit import StatementEmitter
from .graph import needs_row_workspace
from .hashed_row import HashedRow, RowMeasurer
from .operand_buffers import Assembled
from .results import IN_REGISTER, add_to, with_register_sum
from .row_workspace import DenseRow, MarkedRow, Row, RowWorkspace
from .staged_rows import StagedRows
from .state import Appended, Body, State


def inside_chunks(s: Stmt, around: Callable[[Stmt], Stmt]) -> Stmt:
    """`s` with `around` applied to the body of its parallel loop, or to all of `s` if there is none."""
    if isinstance(s, Loop) and s.kind is LoopKind.PARALLEL:
        return replace(s, body=around(s.body))
    if isinstance(s, Let):
        return replace(s, body=inside_chunks(s.body, around))
    return around(s)


def body_of_chunk(s: Stmt) -> Stmt:
    """The body of the parallel loop of `s`, with the values bound outside of it, or all of `s` if there is none.

    The values from which chunks follow are not bound again: `s` makes the chunks in which the body is to be.
    """
    if isinstance(s, Loop) and s.kind is LoopKind.PARALLEL:
        return s.body
    if isinstance(s, Let):
        body = body_of_chunk(s.body)
        return body if s.name in (CHUNKS, WORK) else replace(s, body=body)
    return s


@dataclass(frozen=True, slots=True)
class _AssemblyRegisters:
    """Registers for each level: the entries so far, the parents whose start is written, and the last entry."""

    counts: tuple[Buffer, ...]
    started: tuple[Buffer, ...]
    parents: tuple[Buffer, ...]
    coordinates: tuple[Buffer, ...]

    @staticmethod
    def of(depth: int) -> _AssemblyRegisters:
        return _AssemblyRegisters(*(tuple(build.register(f"{what}.{n}") for n in range(depth)) for what in _WHAT))

    @property
    def all(self) -> tuple[Buffer, ...]:
        return (*self.counts, *self.started, *self.parents, *self.coordinates)


_WHAT = ("count", "started", "parent", "coordinate")


@dataclass(frozen=True, slots=True)
class AssemblingEmitter(StatementEmitter):
    """Emits kernels that write the levels and the values of a sparse result.

    counts: whether the loops only count the entries of each level.
    """

    result: Assembled
    totals: Buffer
    first: int
    counts: bool = False

    @property
    def reads_values(self) -> bool:
        return not self.counts

    @property
    def values(self) -> Buffer:
        return self.result.values

    @property
    def format(self) -> Format:
        return self.result.format

    def kernels(self) -> Iterator[tuple[str, Stmt]]:
        if self.result.stages_rows:
            yield "assemble", self.staged_rows()
            return
        if self.counts_rows:
            yield "count", build.block(self._no_entries(), replace(self, counts=True).rows(), self._scan_row_counts())
            yield "assemble", self.rows()
            return
        if not self.result.bound:
            yield "count", replace(self, counts=True).assembly()
        yield "assemble", self.assembly()

    # --- row by row, in parallel ---------------------------------------------------------------------------------

    @property
    def counts_rows(self) -> bool:
        """Whether a first pass counts the entries of each row, so that threads can share the rows."""
        return self.result.counts_rows

    def rows(self) -> Stmt:
        """The loops in chunks of rows: they count the entries of each row, or write them from the start of the row."""
        cells = _AssemblyRegisters.of(self.format.depth)
        body = self.walk()
        whole = self.parallelize_outer_loop(body)
        return inside_chunks(
            whole, lambda inner: Allocate(cells.all, self._with_workspace(inner, lambda: self._measure_rows(True)))
        )

    def staged_rows(self) -> Stmt:
        """The loops in rounds, of which each thread writes a part."""
        cells = _AssemblyRegisters.of(self.format.depth)
        starts = [pos for a in self.result.bound if (pos := self.shared.operands[a].pos[-1]) is not None]
        rows = StagedRows(
            self.result, starts, cells.counts[-1], cells.all, self.names, self.shared.problem.threads,
            self.options.chunk_positions, self.shared.target.vector_bits,
        )  # fmt: skip
        staged = replace(self, result=rows.staging).walk()
        return rows.emit(self.walk(), staged, lambda n: Store(self.totals, (build.const(self.first + 1),), n))

    @property
    def _row_count(self) -> Expr:
        return self.shared.extents(self.s.target)[self.format.order[0]]

    def _no_entries(self) -> Stmt:
        """Set the entry counts of all rows to 0, because the loops skip rows that an operand lacks."""
        name, pos = internal_name("row"), self._row_starts
        after = build.add(build.var(name), 1)
        lanes = max(1, self.shared.target.vector_bits // 8 // self.result.index.size)
        clear = Store(pos, (after,), self._index(build.const(0)))
        return Loop(name, build.const(0), self._row_count, clear, LoopKind.VECTOR, vector_factors=(lanes, 1))

    def _scan_row_counts(self) -> Stmt:
        """Turn the entry counts of rows into row starts by a prefix sum, and store the total number of entries."""
        pos, name = self._row_starts, internal_name("row")
        count, extent = build.register(internal_name("sum")), self._row_count
        after = build.add(build.var(name), 1)
        add = Store(count, (), build.cast(build.load(pos, after), INT64), "+")
        loop = Loop(name, build.const(0), extent, build.block(add, Store(pos, (after,), self._index(Load(count, ())))))
        first = (Store(count, (), build.const(0)), Store(pos, (build.const(0),), self._index(build.const(0))))
        last = Store(self.totals, (build.const(self.first + 1),), Load(count, ()))
        return Allocate((count,), build.block(*first, loop, last))

    @property
    def _row_starts(self) -> Buffer:
        pos = self.result.pos[-1]
        assert pos is not None
        return pos

    def _independent_row(self, row: Expr, body: Stmt) -> Stmt:
        """`body` for one row: count its entries, write them from the start of the row, or append them to a buffer."""
        count = _AssemblyRegisters.of(self.format.depth).counts[-1]
        last = Store(self._row_starts, (build.add(row, 1),), self._index(Load(count, ())))
        if self.result.stages_rows:
            return build.block(body, last)
        if self.counts:
            return build.block(Store(count, (), build.const(0)), body, last)
        start = build.cast(build.load(self._row_starts, row), INT64)
        return build.block(Store(count, (), start), body)

    def assembly(self) -> Stmt:
        """All loops on one thread, with the entry counts starting at 0."""
        cells = _AssemblyRegisters.of(self.format.depth)
        start: list[Stmt] = [Store(c, (), build.const(0)) for c in (*cells.counts, *cells.started)]
        start += [Store(c, (), build.const(-1)) for c in (*cells.parents, *cells.coordinates)]
        if not self.counts:
            start += [
                Store(pos, (build.const(0),), self._index(build.const(0))) for pos in self.result.pos if pos is not None
            ]
        ends = [Store(self.totals, (build.const(self.first + n),), Load(c, ())) for n, c in enumerate(cells.counts)]
        rows = self._with_workspace(self.walk(), lambda: self._measure_rows(False))
        return Allocate(cells.all, build.block(*start, rows, self._finish(cells), *ends))

    def _with_workspace(self, body: Stmt, measure: Callable[[], Stmt]) -> Stmt:
        """`body`, which handles some rows, inside the allocation of their workspace, if they need one."""
        return body if self.workspace is None else self.workspace.allocate_around(body, measure)

    def _measure_rows(self, in_chunk: bool) -> Stmt:
        """Find the most terms that one row combines: of the rows of a chunk, or of all rows."""
        measurer = RowMeasurer(self.shared, self.nest, self.order, self._row_depth, names=self.names, part=self.part)
        body = measurer.walk()
        return body_of_chunk(self.parallelize_outer_loop(body)) if in_chunk else body

    def vectorization_candidates(self) -> Iterator[tuple[int, int]]:
        """None: elements come one at a time because each moves the end of a level."""
        yield from ()

    def _index(self, e: Expr) -> Expr:
        return build.cast(e, self.result.index)

    # --- appending -----------------------------------------------------------------------------------------------

    def append(self, coordinates: Mapping[str, Expr], then: Stmt | None, position: str) -> Stmt:
        """Append an element; `then` runs with the name `position` bound to its position among the values."""
        cells = _AssemblyRegisters.of(self.format.depth)
        names = [e.name for e in self.s.subscripts if isinstance(e, Index)]
        starts = self.starts
        by_level = [build.sub(coordinates[names[d]], starts[d]) for d in self.format.order]
        return self._enter(0, build.const(0), by_level, cells, then or build.NOTHING, position)

    def _enter(
        self, n: int, parent: Expr, coordinates: list[Expr], cells: _AssemblyRegisters, then: Stmt, position: str
    ) -> Stmt:
        if n == len(self.format.levels):
            return Let(position, parent, then)
        level, c = self.format.levels[n], coordinates[n]
        if level.is_dense:
            extent = self.shared.extents(self.s.target)[self.format.order[n]]
            below = build.add(build.mul(parent, extent), c)
            return self._enter(n + 1, below, coordinates, cells, then, position)
        crd = self.result.crd[n]
        assert crd is not None
        if level.kind is LevelKind.SINGLETON:
            store = build.NOTHING if self.counts else Store(crd, (parent,), self._index(c))
            return build.block(store, self._enter(n + 1, parent, coordinates, cells, then, position))
        name = self.names.fresh(f"{self.s.target}.parent")
        held, count = build.var(name), Load(cells.counts[n], ())
        entry: list[Stmt] = [] if self.counts else [Store(crd, (count,), self._index(c))]
        begin = [] if self._starts_rows else self._start(n, held, cells)
        entry = [*begin, *entry, Store(cells.counts[n], (), build.const(1), "+")]
        if level.unique and n + 1 < len(self.format.levels):  # the next element may have the same entry
            same = build.logical_and(
                build.eq(Load(cells.parents[n], ()), held), build.eq(Load(cells.coordinates[n], ()), c)
            )
            entry += [Store(cells.parents[n], (), held), Store(cells.coordinates[n], (), c)]
            enter: Stmt = If(build.logical_not(same), build.block(*entry))
        else:
            enter = build.block(*entry)
        place = self.names.fresh(f"{self.s.target}.place")
        inner = self._enter(n + 1, build.var(place), coordinates, cells, then, position)
        return Let(name, parent, build.block(enter, Let(place, build.sub(count, 1), inner)))

    def _start(self, n: int, parent: Expr, cells: _AssemblyRegisters) -> list[Stmt]:
        """Write the start of the entries of all parents up to this one."""
        pos, started, count = self.result.pos[n], cells.started[n], Load(cells.counts[n], ())
        if self.counts or pos is None:
            return []
        step = build.block(
            Store(started, (), build.const(1), "+"), Store(pos, (Load(started, ()),), self._index(count))
        )
        return [While(build.lt(Load(started, ()), parent), step)]

    def _finish(self, cells: _AssemblyRegisters) -> Stmt:
        """Write the start and the end of the entries of the remaining parents."""
        parts: list[Stmt] = []
        parents: Expr = build.const(1)
        extents = self.shared.extents(self.s.target)
        for n in range(self.format.depth):
            level = self.format.levels[n]
            if level.is_dense:
                parents = build.mul(parents, extents[self.format.order[n]])
            elif level.kind is LevelKind.COMPRESSED:
                parts += self._start(n, parents, cells)
                parents = Load(cells.counts[n], ())
        return build.block(*parts)

    # --- values --------------------------------------------------------------------------------------------------

    @property
    def _starts_rows(self) -> bool:
        """Whether only the last level is compressed, so that a row is started once, not by each of its elements."""
        above = self.format.levels[:-1]
        return all(level.is_dense for level in above) and self.format.levels[-1].kind is LevelKind.COMPRESSED

    def _row(self, state: State) -> list[Stmt]:
        """Start the row at the indices in `state`."""
        parent: Expr = build.const(0)
        extents = self.shared.extents(self.s.target)
        names = [e.name for e in self.s.subscripts if isinstance(e, Index)]
        for d in self.format.order[:-1]:
            parent = build.add(build.mul(parent, extents[d]), build.sub(state.indices[names[d]], self.starts[d]))
        return self._start(len(self.format.levels) - 1, parent, _AssemblyRegisters.of(self.format.depth))

    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        if (self.counts_rows or self.result.stages_rows) and depth == self._row_depth:
            (row,) = (e.name for d in self.format.order[:1] for e in (self.s.subscripts[d],) if isinstance(e, Index))
            index = build.sub(state.indices[row], self.starts[self.format.order[0]])
            return self._independent_row(index, self._wrap_loops(depth, state, then))
        if self._starts_rows and depth == self._row_depth:
            return build.block(*self._row(state), self._wrap_loops(depth, state, then))
        return self._wrap_loops(depth, state, then)

    def _wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        workspace = self.workspace
        if workspace is not None and depth == self._row_depth:
            return build.block(workspace.begin(), then(state), self._append_row(workspace, state))
        if depth != self.final_depth or depth == len(self.order):
            return then(state)
        total, found = self.total(), build.register(f"{self.s.target}.found", BOOL)
        held = build.TRUE if self.nest.keeps_places else build.FALSE
        first = (Store(total, (), build.cast(self.neutral, total.type.dtype)), Store(found, (), held))
        append = self._append(state, build.cast(Load(total, ()), self.values.type.dtype))
        return Allocate(
            (total, found),
            build.block(*first, then(with_register_sum(self.enter_reduction(state))), If(Load(found, ()), append)),
        )

    def combine(self, state: State, value: Expr) -> Stmt:
        if self.workspace is not None:
            at = build.sub(state.indices[self._last_index], self.starts[self.format.order[-1]])
            return self.workspace.combine(at, value)
        if IN_REGISTER in state.indices:
            found = Store(build.register(f"{self.s.target}.found", BOOL), (), build.TRUE)
            return found if self.counts else build.block(add_to(self.total(), value, self.s.reduction), found)
        cast = build.cast(value, self.values.type.dtype)
        if self.nest.paths or self.nest.keeps_places:
            return self._append(state, cast)
        name = self.names.fresh("value")
        held = build.var(name, cast.type.dtype)
        return Let(name, cast, If(build.ne(held, build.const(0, cast.type.dtype)), self._append(state, held)))

    def _append(self, state: State, value: Expr) -> Stmt:
        position = self.names.fresh(f"{self.s.target}.position")
        store = None if self.counts else Store(self.values, (build.var(position),), value)
        return self.append(state.indices, store, position)

    @property
    def copies(self) -> int:
        return ADDED_PRODUCTS if self.is_scattered and not self._is_wide else 1

    def parallelize_outer_loop(self, body: Stmt) -> Stmt:
        size = self.options.chunk_positions * (ROW_CHUNK_MULTIPLE if self.is_scattered else 1)
        return (
            parallelize_outer_loop(body, self.nest, self.order, self.shared.operands, self.names, size)
            if size
            else body
        )

    @property
    def append_run(self) -> Appended | None:
        appends = self._starts_rows and all(x.is_free for x in self.nest.loops.values())  # else it sums
        return self._append_run if appends and not self.counts else None

    def _append_run(self, state_of: Callable[[Expr], State], count: Expr) -> Stmt:
        """Append the elements of `state_of(0)` to `state_of(count - 1)`, in vectors if the value can be vectorized."""
        name, end = self.names.fresh("run"), _AssemblyRegisters.of(self.format.depth).counts[-1]
        crd, dtype = self.result.crd[-1], self.values.type.dtype
        assert crd is not None
        ahead, state = build.var(name), state_of(build.var(name))
        (last,) = (e.name for d in self.format.order[-1:] for e in (self.s.subscripts[d],) if isinstance(e, Index))
        coordinate = build.sub(state.indices[last], self.starts[self.format.order[-1]])
        position = build.add(Load(end, ()), ahead)
        entry = Store(crd, (position,), self._index(coordinate))
        element = Store(self.values, (position,), build.cast(self.value(state, {}), dtype))
        loop = Loop(
            name,
            build.const(0),
            count,
            build.block(entry, element),
            LoopKind.VECTOR,
            vector_factors=(APPENDED_ELEMENTS, 0),
        )
        return build.block(self._in_vectors(loop), Store(end, (), count, "+"))

    @staticmethod
    def _in_vectors(loop: Loop) -> Stmt:
        try:
            vectorize_loops(loop)
        except CannotLower:
            return replace(loop, kind=LoopKind.SERIAL)
        return loop

    # --- a row as a workspace ------------------------------------------------------------------------------------

    @property
    def is_scattered(self) -> bool:
        """Whether a reduced loop is outside of the last index of the result."""
        return needs_row_workspace(self.nest, self.order, self.format)

    @property
    def _row_depth(self) -> int:
        """The depth of the loops at which all indices of the result but the last are bound."""
        return len(self.format.levels) - 1

    @property
    def workspace(self) -> RowWorkspace | None:
        """The workspace for a row; None if the elements of a row come in order."""
        row = Row(
            self.s.target, self.values.type.dtype.accumulator, self.neutral, self.s.reduction,
            self.shared.extents(self.s.target)[self.format.order[-1]], self.shared.target.vector_bits, self.names,
            self.counts,
        )  # fmt: skip
        if self.is_unordered:
            return MarkedRow(row, _AssemblyRegisters.of(self.format.depth).counts[-1])
        if not self.is_scattered:
            return None
        return HashedRow(row) if self._is_wide else DenseRow(row)

    @property
    def _is_wide(self) -> bool:
        """Whether the row is too wide for an array with an element for each coordinate."""
        return self.s.target in self.shared.problem.wide

    @property
    def is_unordered(self) -> bool:
        return self.counts and self.counts_rows and not self._is_wide and self.is_scattered

    @property
    def _last_index(self) -> str:
        """The index of the last level of the result."""
        (last,) = (e.name for d in self.format.order[-1:] for e in (self.s.subscripts[d],) if isinstance(e, Index))
        return last

    def _append_row(self, workspace: RowWorkspace, state: State) -> Stmt:
        """Append the elements of the row in a workspace."""
        start, dtype = self.starts[self.format.order[-1]], self.values.type.dtype
        position = self.names.fresh(f"{self.s.target}.position")

        def append(at: Expr, value: Expr) -> Stmt:
            store = None if self.counts else Store(self.values, (build.var(position),), build.cast(value, dtype))
            return self.append({**state.indices, self._last_index: build.add(at, start)}, store, position)

        return workspace.append(append)
