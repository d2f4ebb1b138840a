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
from .assemble import inside_chunks
from .emit import GATHERED_BYTES, StatementEmitter
from .graph import Nest, needs_row_workspace
from .operand_buffers import Assembled
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
            yield "values", inside_chunks(self.parallelize_outer_loop(body), self._with_row)
        else:
            yield "values", self._with_row(body)

    def vectorization_candidates(self) -> Iterator[tuple[int, int]]:
        """None: the coordinates in a vector may be equal."""
        yield from ()

    @property
    def copies(self) -> int:
        return REFILLED_PRODUCTS

    @property
    def _row_depth(self) -> int:
        """The depth of the loops at which all indices of the result but the last are bound."""
        return len(self.result.format.levels) - 1

    @property
    def _row(self) -> Buffer:
        return build.dynamic_buffer(f"{self.s.target}.row", self.values.type.dtype.accumulator, space=Space.SCRATCH)

    def _with_row(self, body: Stmt) -> Stmt:
        extent = self.shared.extents(self.s.target)[self.result.format.order[-1]]
        return Allocate((self._row,), body, (build.maximum(extent, 1),))

    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        if depth != self._row_depth:
            return then(state)
        row, dtype = self._row, self.values.type.dtype

        def clear(_: Expr, at: Expr) -> Stmt:
            return Store(row, (at,), build.cast(self.neutral, row.type.dtype))

        def read(position: Expr, at: Expr) -> Stmt:
            return Store(self.values, (position,), build.cast(Load(row, (at,)), dtype))

        gathers = self.gathers_fast and {row.type.dtype.size, dtype.size} <= GATHERED_BYTES
        return build.block(
            self._each_place(state, clear), then(state), self._each_place(state, read, self.lanes if gathers else 1)
        )

    def _each_place(self, state: State, do: Callable[[Expr, Expr], Stmt], lanes: int = 1) -> Stmt:
        """A loop over the stored elements of the row at the indices in `state`."""
        pos, crd = self.result.pos[-1], self.result.crd[-1]
        assert pos is not None
        assert crd is not None
        parent: Expr = build.const(0)
        extents, starts = self.shared.extents(self.s.target), self.starts
        names = [e.name for e in self.s.subscripts if isinstance(e, Index)]
        for d in self.result.format.order[:-1]:
            parent = build.add(build.mul(parent, extents[d]), build.sub(state.indices[names[d]], starts[d]))
        name = self.names.fresh(internal_name("place"))
        position = build.var(name)
        first, last = (build.cast(build.load(pos, p), INT64) for p in (parent, build.add(parent, 1)))
        body = do(position, build.cast(build.load(crd, position), INT64))
        if lanes == 1:
            return Loop(name, first, last, body)
        return Loop(name, first, last, body, LoopKind.VECTOR, vector_factors=(lanes, 0))

    def combine(self, state: State, value: Expr) -> Stmt:
        return Store(self._row, (self._coordinate(state),), build.cast(value, self._row.type.dtype), self.s.reduction)

    def _coordinate(self, state: State) -> Expr:
        d = self.result.format.order[-1]
        (last,) = (e.name for e in (self.s.subscripts[d],) if isinstance(e, Index))
        return build.sub(state.indices[last], self.starts[d])
