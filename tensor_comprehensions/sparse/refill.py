"""Compute only the values of a sparse result whose sparsity pattern is known from an earlier call.

Each row is combined in a dense workspace. Only the stored coordinates of the row are cleared before and read after it.
There are no flags, no sorting and no appending, and threads share the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..core.dtypes import INT64
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.nodes import Allocate, Buffer, Expr, Load, Loop, LoopKind, Space, Stmt, Store
from ..tc_lang.formats import Format, LevelKind
from ..tc_lang.ir import Index
from ..thresholds import REFILLED_PRODUCTS
from .assemble import body_of_chunk, inside_chunks
from .emit import GATHERED_BYTES, StatementEmitter
from .graph import Nest, needs_row_workspace
from .hashed_row import HashedRow, RowMeasurer
from .operand_buffers import Assembled
from .row_workspace import Row
from .state import Body, State


def can_refill(nest: Nest, order: tuple[str, ...], format: Format) -> bool:
    """Whether a result is scattered into a row workspace, and all levels above the last are dense."""
    above = format.levels[:-1]
    return needs_row_workspace(nest, order, format) and all(level.kind is LevelKind.DENSE for level in above)


@dataclass(frozen=True, slots=True)
class RefillEmitter(StatementEmitter):
    """Emits a kernel that writes the values of a result whose levels exist already."""

    result: Assembled

    @property
    def values(self) -> Buffer:
        return self.result.values

    def kernels(self) -> Iterator[tuple[str, Stmt]]:
        body = self.walk()
        if self._row_depth:
            body = self.parallelize_outer_loop(body)
            yield "values", inside_chunks(body, lambda x: self._with_row(x, lambda: self._measure_rows(True)))
        else:
            yield "values", self._with_row(body, lambda: self._measure_rows(False))

    def vectorization_candidates(self) -> Iterator[tuple[int, int]]:
        """None: the coordinates in a vector may be equal."""
        yield from ()

    @property
    def copies(self) -> int:
        return 1 if self._hash_row is not None else REFILLED_PRODUCTS

    @property
    def _row_depth(self) -> int:
        """The depth of the loops at which all indices of the result but the last are bound."""
        return len(self.result.format.levels) - 1

    @property
    def _row(self) -> Buffer:
        return build.dynamic_buffer(f"{self.s.target}.row", self.values.type.dtype.accumulator, space=Space.SCRATCH)

    @property
    def _row_extent(self) -> Expr:
        return self.shared.extents(self.s.target)[self.result.format.order[-1]]

    @property
    def _hash_row(self) -> HashedRow | None:
        """The workspace, if rows are too wide for an array with an element for each coordinate."""
        if self.s.target not in self.shared.problem.wide:
            return None
        return HashedRow(
            Row(
                self.s.target, self._row.type.dtype, self.neutral, self.s.reduction, self._row_extent,
                self.shared.target.vector_bits, self.names, counts=False,
            )
        )  # fmt: skip

    def _with_row(self, body: Stmt, measure: Callable[[], Stmt]) -> Stmt:
        if self._hash_row is not None:
            return self._hash_row.allocate_around(body, measure)
        return Allocate((self._row,), body, (build.maximum(self._row_extent, 1),))

    def _measure_rows(self, in_chunk: bool) -> Stmt:
        """Find the most elements of one row: of the rows of a chunk, or of all rows."""

        def length(state: State) -> Expr:
            first, last = self._places(state)
            return build.sub(last, first)

        measurer = RowMeasurer(self.shared, self.nest, self.order, self._row_depth, length, names=self.names)
        body = measurer.walk()
        return body_of_chunk(self.parallelize_outer_loop(body)) if in_chunk else body

    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        if depth != self._row_depth:
            return then(state)
        if self._hash_row is not None:
            return self._refill_hashed(self._hash_row, state, then)
        row, dtype = self._row, self.values.type.dtype

        def clear(_: Expr, at: Expr) -> Stmt:
            return Store(row, (at,), build.cast(self.neutral, row.type.dtype))

        def read(position: Expr, at: Expr) -> Stmt:
            return Store(self.values, (position,), build.cast(Load(row, (at,)), dtype))

        gathers = self.gathers_fast and {row.type.dtype.size, dtype.size} <= GATHERED_BYTES
        return build.block(
            self._each_place(state, clear), then(state), self._each_place(state, read, self.lanes if gathers else 1)
        )

    def _refill_hashed(self, row: HashedRow, state: State, then: Body) -> Stmt:
        first, _ = self._places(state)

        def read(position: Expr, _: Expr) -> Stmt:
            return row.remove(
                build.sub(position, first),
                lambda x: Store(self.values, (position,), build.cast(x, self.values.type.dtype)),
            )

        enter = self._each_place(state, lambda _, at: row.enter(at))
        return build.block(row.begin(), enter, then(state), self._each_place(state, read))

    def _places(self, state: State) -> tuple[Expr, Expr]:
        """The first position of the row at the indices in `state`, and the one after its last position."""
        pos = self.result.pos[-1]
        assert pos is not None
        parent: Expr = build.const(0)
        extents, starts = self.shared.extents(self.s.target), self.starts
        names = [e.name for e in self.s.subscripts if isinstance(e, Index)]
        for d in self.result.format.order[:-1]:
            parent = build.add(build.mul(parent, extents[d]), build.sub(state.indices[names[d]], starts[d]))
        first, last = (build.cast(build.load(pos, p), INT64) for p in (parent, build.add(parent, 1)))
        return first, last

    def _each_place(self, state: State, do: Callable[[Expr, Expr], Stmt], lanes: int = 1) -> Stmt:
        """A loop over the stored elements of the row at the indices in `state`."""
        crd = self.result.crd[-1]
        assert crd is not None
        first, last = self._places(state)
        name = self.names.fresh(internal_name("place"))
        position = build.var(name)
        body = do(position, build.cast(build.load(crd, position), INT64))
        if lanes == 1:
            return Loop(name, first, last, body)
        return Loop(name, first, last, body, LoopKind.VECTOR, vector_factors=(lanes, 0))

    def combine(self, state: State, value: Expr) -> Stmt:
        at = self._coordinate(state)
        if self._hash_row is not None:
            return self._hash_row.update(at, value)
        return Store(self._row, (at,), build.cast(value, self._row.type.dtype), self.s.reduction)

    def _coordinate(self, state: State) -> Expr:
        d = self.result.format.order[-1]
        (last,) = (e.name for e in (self.s.subscripts[d],) if isinstance(e, Index))
        return build.sub(state.indices[last], self.starts[d])
