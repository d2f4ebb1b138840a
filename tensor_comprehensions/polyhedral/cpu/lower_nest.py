"""Lower the loop nests of a group inside its tiles, vectorized if possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.decisions import Decision, Rival, is_recording, note_decision
from ...core.errors import ArgumentError, CannotLower
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.buffer_view import BufferView, private_view
from ...loop_ir.intrinsics import PREFETCH_LATER
from ...loop_ir.nodes import Buffer, LoopKind
from ...loop_ir.origins import origin_of
from ...loop_ir.passes.vectorize import vectorize_loops
from ...lower_expr import LoweringScope, lower_access, lower_expr
from ...options import CpuOptions
from ...structured.lower import contraction
from ...structured.lower.transpose import Axis, transpose_loops
from ...structured.match.match_contraction import MatchedContraction
from ...structured.memory_bound.nest_plan import MemoryBoundPlan
from ...target import CpuTarget
from ...tc_lang.ir import BoundFunction, BoundStatement, Inequality, Tensor
from ...thresholds import (
    COLUMN_SUM_ROWS,
    COLUMN_SUM_VECTORS,
    LONG_COLUMN_SUM_VECTORS,
    POINTWISE_VECTORS,
    REDUCTION_VECTORS,
    WHOLE_RUN_VECTORS,
)
from ..schedule.access_cost import (
    access_stride,
    is_column_reduction,
    is_fully_parallel,
    loop_order,
    rank_vector_dims,
    transposed_read_dim,
    vector_dim,
    why_no_vector_dim,
)
from ..schedule.fusion import FusionGroup, reads_memory
from ..schedule.legality import ScheduledGroup
from ..schedule.loop_nest import DimKind, LoopNest, NestDim
from ..schedule.storage import fits_register
from ..schedule.tile_sizes import choose_rows_summed_together, tile_order
from ..scop.scop import ScopStatement, statements_of
from .contraction_bridge import cluster_op, cluster_plan
from .gather_prefetch import prefetch_hints
from .restricted_loops import emit_conjunction, place_inequalities, restrict_bounds, widest_bounds
from .tile_loops import TileRange
from .transpose_nontemporal import transpose_nontemporal
from .transpose_staging import (
    loads_in_pieces,
    prefetch_distance,
    transposable_reads,
    transpose_block_side,
    transpose_staged,
)

# The role of stores that initialize sums.
INITIAL_VALUES = "initial value"


@dataclass(frozen=True, slots=True)
class NestLowering:
    """Lowers the nests of one group; it holds their common context."""

    function: BoundFunction
    group: FusionGroup
    tiles: tuple[TileRange, ...]
    buffers: Mapping[str, Buffer | BufferView[int]]
    options: CpuOptions
    target: CpuTarget
    streams: frozenset[str] = frozenset()  # tensors that are stored non-temporally
    movement: MemoryBoundPlan | None = None  # the plan of the only nest, if a schedule determines it
    staged: bool = False  # whether a pointwise nest transposes through a buffer

    def leaf(self, leaf: LoopNest) -> ir.Stmt:
        """The loops of `leaf`, vectorized if possible."""
        if leaf.nodes[0].cluster is not None:
            return self._contraction(leaf.nodes[0], leaf.nodes[0].cluster)
        if self.movement is not None:
            return self._lower_movement(leaf, self.movement)
        lanes = vector_dim(self.function, leaf, self.target)
        reason: str | None = None
        if lanes is not None:
            for make in (self._lower_transposed_nest, self._nest):
                nest = make(leaf, lanes)
                if nest is not None and (reason := _why_no_vectors(nest)) is None:
                    if is_recording():
                        self._record_lanes(leaf, lanes, make == self._lower_transposed_nest)
                    return nest
        if is_recording():
            why = reason or why_no_vector_dim(leaf)
            note_decision(Decision("vector", statements_of(leaf.nodes), "scalars", why))
        return self._nest(leaf, None)

    def _record_lanes(self, leaf: LoopNest, lanes: NestDim, is_turned: bool) -> None:
        count, vectors = self._factor(leaf, lanes)
        kind = "sums in several vectors" if lanes.kind is DimKind.REDUCTION else "independent iterations"
        why = f"{kind}; reads are transposed in registers" if is_turned else kind
        others = rank_vector_dims(self.function, leaf, self.target)
        numbers = ("lanes", count), ("vectors at once", vectors)
        rivals = tuple(Rival(d.name, cost, "its accesses cost more") for d, cost in others if d is not lanes)
        chosen = f"{count} lanes along {lanes.name}"
        note_decision(Decision("vector", statements_of(leaf.nodes), chosen, why, numbers, rivals))

    def _lower_movement(self, leaf: LoopNest, movement: MemoryBoundPlan) -> ir.Stmt:
        """The nest as the user's schedule requests it. Raises ArgumentError if it cannot be vectorized so."""
        lanes = next((d for d in leaf.dims if d.name == movement.vector), None)
        if lanes is not None and lanes.kind is not DimKind.SERIAL:
            nest = (self._lower_transposed_nest if movement.transposed else self._nest)(leaf, lanes)
            if nest is not None and _why_no_vectors(nest) is None:
                return nest
        raise ArgumentError(
            f"the schedule for '{leaf.nodes[0].writes[0].tensor}' does not apply: no vectors along {movement.vector}",
            expected="an iterator along which a tile has points, and whose iterations are independent or summed",
        )

    def default_plan(self, scheduled: ScheduledGroup) -> MemoryBoundPlan | None:
        """The plan for the default lowering of a group's only statement; None if no schedule can express it."""
        (leaf,) = scheduled.leaves
        lanes = vector_dim(self.function, leaf, self.target)
        if lanes is None:
            return None
        (count, vectors), rows, turned = self._factor(leaf, lanes), 1, False
        if is_column_reduction(leaf, lanes) and self._is_row_blocked_column_sum(leaf, lanes):
            vectors, rows = COLUMN_SUM_VECTORS, COLUMN_SUM_ROWS
        if summed := self._summed_rows(leaf, lanes):
            rows = self._extent(summed)
        row = transposed_read_dim(self.function, leaf, lanes)
        stores = [self._update(leaf, n) for n in leaf.nodes]
        if row is not None and (reads := transposable_reads(stores, row.name, lanes.name)):
            if not is_fully_parallel(leaf):
                return None
            turned, vectors = True, vectors if self.staged else 1
            count = transpose_block_side(stores, reads, [self._extent(d) for d in (row, lanes)], self.target)
        order = tile_order(self.function, self.group, scheduled.leaves, self.target)
        cut = [self.tiles[k] for k in order if self.tiles[k].size < self.tiles[k].row.extent]
        tiles = tuple((t.row.places[0][1][0], t.size) for t in cut)
        shared = self.options.grain_size > 0 and bool(tiles)
        return MemoryBoundPlan(tiles, lanes.name, count, vectors, rows, turned, self.staged, shared, bool(self.streams))

    def _contraction(self, node: ScopStatement, cluster: MatchedContraction) -> ir.Stmt:
        """The micro-kernel code of a contraction on the part of its domain that lies in the tiles."""
        op = cluster_op(node, cluster, self.buffers, self.group, self.tiles, self.target)
        plan = cluster_plan(node, cluster, op, self.group, self.tiles, self.options, self.target)
        return contraction.lower_contraction(op, self.target, plan=plan, parallel=False)

    def initialize_sums(self, leaf: LoopNest) -> ir.Stmt:
        """The loops that initialize the sums of a leaf at all points."""
        node = replace(leaf.nodes[0], statements=leaf.nodes[0].statements[:1])  # without an epilogue
        leaf = replace(leaf, nodes=(node,))
        dims = [d for d in leaf.dims if d.kind is DimKind.PARALLEL]
        lanes = min(dims, key=lambda d: access_stride(self.function, node.writes[0], d.index(node)) or 1 << 40)
        body = build.block(*self._initializations(leaf))
        for dim in reversed([*(d for d in dims if d is not lanes), lanes]):
            body = self._loop(leaf, dim, body, dim is lanes)
        return body

    def _nest(self, leaf: LoopNest, lanes: NestDim | None) -> ir.Stmt:
        order = loop_order(self.function, leaf, lanes)
        registers = tuple(t for t in self._local_tensors(leaf) if fits_register(t, self.group, leaf))
        emitter = self._with_registers(registers)
        hints = self._prefetches(leaf, order, lanes) if lanes is not None else ()
        only = place_inequalities(leaf, order, lanes).chosen
        body = build.block(*hints, *(emitter._update(leaf, n, only) for n in leaf.nodes))
        places = [emitter.buffers[t.name] for t in registers]
        body = build.allocate([p.buffer if isinstance(p, BufferView) else p for p in places], body)
        if leaf.nodes[0].domain:
            return emitter._restricted_nest(leaf, order, lanes, body)
        if lanes is not None and not registers and self._is_row_blocked_column_sum(leaf, lanes):
            return emitter._lower_column_sum_in_row_blocks(leaf, order, lanes, body)
        if lanes is not None and not registers and (rows := self._summed_rows(leaf, lanes)):
            return emitter._lower_interleaved_row_sums(leaf, [d for d in order if d is not rows], rows, body)
        outermost_reduction = next((k for k, d in enumerate(order) if d.kind is DimKind.REDUCTION), len(order))
        for k in reversed(range(len(order))):
            body = emitter._loop(leaf, order[k], body, order[k] is lanes)
            if k == outermost_reduction:
                body = build.block(*emitter._initializations(leaf), body)
        return body

    def _restricted_nest(
        self, leaf: LoopNest, order: Sequence[NestDim], lanes: NestDim | None, body: ir.Stmt
    ) -> ir.Stmt:
        """The nest of a leaf whose domain is smaller than its box; `body` already applies the `chosen` conditions."""
        first = leaf.nodes[0]
        indices = self._scope(leaf, first).indices
        here = place_inequalities(leaf, order, lanes)
        outermost_reduction = next((k for k, d in enumerate(order) if d.kind is DimKind.REDUCTION), len(order))
        for k in reversed(range(len(order))):
            loop = self._loop(leaf, order[k], body, order[k] is lanes)
            ends = restrict_bounds(here.bounds.get(k, ()), order[k].index(first), loop.start, loop.stop, indices)
            if lanes is not None and k in here.widest:
                lane = (lanes.index(first), *self._range(leaf, lanes))
                ends = widest_bounds(here.widest[k], order[k].index(first), ends, lane, indices)
            body = replace(loop, start=ends[0], stop=ends[1])
            if k == outermost_reduction:
                sums = build.when(emit_conjunction(here.begun, indices), body)
                body = build.block(*self._initializations(leaf), sums)
        return build.when(emit_conjunction(here.around, indices), body)

    def _summed_rows(self, leaf: LoopNest, lanes: NestDim) -> NestDim | None:
        """The dimension whose rows a reduction along the rows sums concurrently; None if it sums one row at a time."""
        if lanes.kind is not DimKind.REDUCTION:
            return None
        if self.movement is None:
            together = choose_rows_summed_together(self.function, self.group, [leaf], self.target)
        else:
            together = self.movement.rows
        rows = [d for d in leaf.dims if d.kind is DimKind.PARALLEL and 1 < self._extent(d) == together]
        return rows[0] if rows else None

    def _lower_interleaved_row_sums(
        self, leaf: LoopNest, order: Sequence[NestDim], rows: NestDim, body: ir.Stmt
    ) -> ir.Stmt:
        """The nest of a sum along each row, with the unrolled loop over the tile's `rows` innermost."""

        def loop_rows(body: ir.Stmt) -> ir.Stmt:
            return ir.Loop(rows.name, *self._range(leaf, rows), body, LoopKind.UNROLLED)

        nest = loop_rows(body)
        for dim in reversed(order):
            nest = self._loop(leaf, dim, nest, dim is order[-1])
        return build.block(loop_rows(build.block(*self._initializations(leaf))), nest)

    def _is_row_blocked_column_sum(self, leaf: LoopNest, lanes: NestDim) -> bool:
        """Whether the nest sums columns of a matrix in memory whose rows are longer than the accumulators cover."""
        if self.movement is not None:
            return self.movement.rows > 1 and lanes.kind is DimKind.PARALLEL
        if not is_column_reduction(leaf, lanes) or self.options.interleave:
            return False
        (node,) = leaf.nodes
        steps = [access_stride(self.function, a, d.index(node)) for a in node.reads for d in leaf.dims]
        far = None not in steps and reads_memory(self.function, node, self.target)
        extent, vector = self._extent(lanes), self.target.lanes(32)
        return (
            far
            and extent > LONG_COLUMN_SUM_VECTORS * vector
            and (extent == lanes.extent or extent >= WHOLE_RUN_VECTORS * vector)
        )

    def _lower_column_sum_in_row_blocks(
        self, leaf: LoopNest, order: Sequence[NestDim], lanes: NestDim, body: ir.Stmt
    ) -> ir.Stmt:
        """The nest of a sum of columns in blocks of a few rows, which are read from end to end for memory bandwidth.

        Each column is summed in the same order as without blocks.
        """
        k = order.index(lanes)
        rows, inner = order[k + 1], order[k + 2 :]
        for dim in reversed(inner):
            body = self._loop(leaf, dim, body, False)
        body = build.block(*self._rows_ahead(leaf, rows, lanes), body)
        low, high = self._range(leaf, lanes)
        count, vectors = self._factor(leaf, lanes)
        factor = (count, COLUMN_SUM_VECTORS if self.movement is None else vectors)

        def loop_lanes(start: ir.Expr, count: int, *before: ir.Stmt) -> ir.Stmt:
            added = ir.Loop(rows.name, start, build.add(start, count), body, LoopKind.UNROLLED)
            return ir.Loop(lanes.name, low, high, build.block(*before, added), LoopKind.VECTOR, vector_factors=factor)

        together = self._rows_per_block
        first = rows.extent % together or together
        block = build.var(internal_name(rows.name, "block"))
        begun = loop_lanes(build.const(rows.lower), first, *self._initializations(leaf))
        others = loop_lanes(block, together)
        start, stop = build.const(rows.lower + first), build.const(rows.upper)
        nest = build.block(begun, ir.Loop(block.name, start, stop, others, step=together))
        for dim in reversed(order[:k]):
            nest = self._loop(leaf, dim, nest, False)
        return nest

    @property
    def _rows_per_block(self) -> int:
        return COLUMN_SUM_ROWS if self.movement is None else self.movement.rows

    def _rows_ahead(self, leaf: LoopNest, rows: NestDim, lanes: NestDim) -> Iterator[ir.Stmt]:
        """Prefetches of the same columns in the next block of rows."""
        (node,) = leaf.nodes
        scope = self._scope(leaf, node)
        there = build.add(scope.indices[rows.index(node)], self._rows_per_block)
        ahead = replace(scope, indices={**scope.indices, rows.index(node): there})
        for access in node.reads:
            if access_stride(self.function, access, lanes.index(node)) == 1:
                yield ir.Invoke(PREFETCH_LATER, (lower_access(access.tensor, access.subscripts, ahead),), (0,))

    def _prefetches(self, leaf: LoopNest, order: Sequence[NestDim], lanes: NestDim) -> Iterator[ir.Stmt]:
        fixed = [t.row for k, t in enumerate(self.tiles) if all(d.row != k for d in order)]
        for node in leaf.nodes:
            loops = [d.index(node) for d in reversed(order)] + [row.index_and_shift(node)[0] for row in reversed(fixed)]
            scope = self._scope(leaf, node)
            yield from prefetch_hints(self.function, self.group, node, lanes, loops, scope, self.target)

    def _lower_transposed_nest(self, leaf: LoopNest, lanes: NestDim) -> ir.Stmt | None:
        """The nest with reads that are strided along `lanes` transposed; None if there are no such reads."""
        row = transposed_read_dim(self.function, leaf, lanes)
        if row is None or leaf.nodes[0].domain:
            return None
        emitter = self._with_registers(
            tuple(t for t in self._local_tensors(leaf) if fits_register(t, self.group, leaf))
        )
        stores = [emitter._update(leaf, n) for n in leaf.nodes]
        reads = transposable_reads(stores, row.name, lanes.name)
        if not reads:
            return None
        extents = [self._extent(d) for d in (row, lanes)]
        block = transpose_block_side(stores, reads, extents, self.target, pointwise=is_fully_parallel(leaf))
        if self.movement is not None:
            block = min(self.movement.lanes, max(2, 1 << (min(extents) - 1).bit_length()))
        down, along = (Axis(d.name, *self._range(leaf, d)) for d in (row, lanes))
        factor = self._factor(leaf, lanes)
        if self.staged and any(s.nontemporal for s in stores):
            before = 0 if lanes.row is None else self.tiles[lanes.row].before
            body = transpose_nontemporal(
                stores, reads, down, along, (lanes.lower, lanes.upper), (block, factor[1]), before
            )
        elif is_fully_parallel(leaf) and not self.staged:
            near = loads_in_pieces(stores, reads, down, along, block, self.target)
            ahead = prefetch_distance(reads, self.target)
            body = transpose_loops(stores, reads, down, along, block, ahead=ahead, near=near)
        else:
            body = transpose_staged(stores, emitter._initializations(leaf), reads, down, along, block, factor)
        for dim in reversed(loop_order(self.function, leaf, lanes)):
            if dim is not row and dim is not lanes:
                body = self._loop(leaf, dim, body, False)
        return body

    def _local_tensors(self, leaf: LoopNest) -> tuple[Tensor, ...]:
        names = {t for n in leaf.nodes for t in n.tensors}
        return tuple(
            self.function.tensor(name)
            for name, place in self.buffers.items()
            if name in names and isinstance(place, BufferView)
        )

    def _with_registers(self, tensors: Sequence[Tensor]) -> NestLowering:
        if not tensors:
            return self
        views = {t.name: private_view(t.name, t.dtype) for t in tensors}
        return replace(self, buffers={**self.buffers, **views})

    def _loop(self, leaf: LoopNest, dim: NestDim, body: ir.Stmt, vector: bool) -> ir.Loop:
        start, stop = self._range(leaf, dim)
        if not vector:
            return ir.Loop(dim.name, start, stop, body)
        return ir.Loop(dim.name, start, stop, body, LoopKind.VECTOR, vector_factors=self._factor(leaf, dim))

    def _range(self, leaf: LoopNest, dim: NestDim) -> tuple[ir.Expr, ir.Expr]:
        if dim.row is not None:
            return self.tiles[dim.row].bounds(dim, leaf.nodes[0])
        return build.const(dim.lower), build.const(dim.upper)

    def _extent(self, dim: NestDim) -> int:
        return min(dim.extent, self.tiles[dim.row].size) if dim.row is not None else dim.extent

    def _factor(self, leaf: LoopNest, dim: NestDim) -> tuple[int, int]:
        if self.movement is not None:
            return self.movement.lanes, self.movement.vectors
        widest = max((s.value.dtype.bits for n in leaf.nodes for s in n.statements), default=32)
        extent = self._extent(dim)
        lanes = min(self.target.lanes(max(32, widest)), max(2, 1 << (extent - 1).bit_length()))
        vectors = self.options.interleave or self._vectors(leaf, dim) // (2 if self._summed_rows(leaf, dim) else 1)
        return lanes, max(1, min(vectors, extent // lanes))

    @staticmethod
    def _vectors(leaf: LoopNest, dim: NestDim) -> int:
        if dim.kind is DimKind.REDUCTION:
            return REDUCTION_VECTORS
        if is_column_reduction(leaf, dim):
            return LONG_COLUMN_SUM_VECTORS
        if any(d.kind is DimKind.REDUCTION for d in leaf.dims):
            return COLUMN_SUM_VECTORS
        return POINTWISE_VECTORS

    def _scope(self, leaf: LoopNest, node: ScopStatement) -> LoweringScope:
        indices: dict[str, ir.Expr] = {}
        for tile in self.tiles:
            index, shift = tile.row.index_and_shift(node)
            indices[index] = build.sub(tile.start, shift)
        for dim in leaf.dims:
            indices[dim.index(node)] = build.add(build.var(dim.name), self._shift(dim, leaf.nodes[0], node))
        return LoweringScope(indices, self.buffers)

    def _shift(self, dim: NestDim, first: ScopStatement, node: ScopStatement) -> int:
        if dim.row is None:
            return 0
        row = self.group.rows[dim.row]
        return row.index_and_shift(first)[1] - row.index_and_shift(node)[1]

    def _update(self, leaf: LoopNest, node: ScopStatement, only: Sequence[Inequality] = ()) -> ir.Store:
        """The store of `node`. only: inequalities of the first node's domain; where they fail, terms are neutral."""
        (s,) = node.statements
        scope = self._scope(leaf, node)
        buffer, indices = lower_access(s.target, s.subscripts, scope)
        value = build.cast(lower_expr(s.value, scope), buffer.type.dtype)
        op = s.reduction
        if op is not None and s.initialize and not s.reduction_indices:  # one term: combine it with the neutral element
            value, op = (
                build.binary(build.combiner(op, buffer.type.dtype), build.neutral(op, buffer.type.dtype), value),
                None,
            )
        if op is not None and only:
            holds = emit_conjunction(only, self._scope(leaf, leaf.nodes[0]).indices)
            value = build.select(holds, value, build.neutral(op, buffer.type.dtype))
        streams = op is None and s.target in self.streams
        return ir.Store(buffer, indices, value, op, nontemporal=streams, origin=origin_of((s.name,)))

    def _initializations(self, leaf: LoopNest) -> list[ir.Stmt]:
        return [
            self._initialization(leaf, n, s)
            for n in leaf.nodes
            for s in n.statements
            if s.initialize and s.reduction_indices
        ]

    def _initialization(self, leaf: LoopNest, node: ScopStatement, s: BoundStatement) -> ir.Stmt:
        assert s.reduction is not None
        buffer, indices = lower_access(s.target, s.subscripts, self._scope(leaf, node))
        origin = origin_of((s.name,), INITIAL_VALUES)
        return ir.Store(buffer, indices, build.neutral(s.reduction, buffer.type.dtype), origin=origin)


def _why_no_vectors(nest: ir.Stmt) -> str | None:
    """Why a nest cannot be vectorized, or None if it can."""
    try:
        vectorize_loops(nest)
    except CannotLower as refusal:
        return str(refusal)
    return None
