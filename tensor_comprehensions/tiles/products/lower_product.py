"""Lower a product of a def to a tile program: pipelined copies, `ldmatrix` and `mma`, and the epilogue on the sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Any

from ...core.dtypes import FLOAT32, DType
from ...core.internal_names import internal_name
from ...layouts import Layout, compose, concatenate
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import WARP
from ...lower_expr import LoweringScope, lower_access, lower_expr
from ...structured.match.product_matching import replace_element_reads
from ...structured.op import ACCUMULATOR
from ...target import GpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundIndex
from .. import specs
from ..builder.indices import Index, to_index
from ..builder.program_builder import ProgramBuilder
from ..builder.tile_views import THREAD_X, MemoryView, RegisterFragment
from ..builder.warp_role_builder import BLOCK_ID, rows_together
from ..lower.lower_tiles import decompose
from ..lower.memory_moves import VECTOR_BYTES
from ..lower.neighbor_values import MAX_LANES, VectorLoads
from ..lower.pointwise import read_value
from ..lower.tensor_core_products import ROUNDED, accumulator, plan_product
from ..lower.thread_values import (
    element_at,
    exist_together,
    fill_pair,
    guarded_store,
    name_coordinates,
    neighbor_runs,
)
from ..tensors import DataTensor, ThreadTensor
from .lower_chain import ChainedLeft
from .masked_factors import condition_of, mask_of_sums, mask_stage
from .masked_steps import MaskedSteps
from .product_region import FactorPair, ProductFactor, ProductRegion
from .product_tiles import WGMMA, FactorPlace, PairOrder, ProductOrder, ProductTiles
from .recompute_sums import recompute_masked_sums

DEALT = 32
"""The columns of four instructions, which are permuted together (see `column_permutation`)."""


def lower_product(
    region: ProductRegion, order: ProductOrder, tiles: ProductTiles, buffers: Mapping[str, ir.Buffer], name: str,
    target: GpuTarget,
) -> specs.Program:  # fmt: skip
    """The program of a region, decomposed into instructions."""
    k = ProgramBuilder(name, target)
    lowering = ProductLowering(k, region, order, tiles, buffers)
    if tiles.instruction == WGMMA:
        from .lower_group_product import GroupProductLowering

        lowering = GroupProductLowering(k, region, order, tiles, buffers)
    lowering.write()
    arguments = tuple(buffers[n] for n in region.tensors)
    program = specs.Program(
        name, arguments, 1, k.num_blocks, k.num_threads, tuple(k.names), k.body(), cluster=k.cluster
    )
    return decompose(program, target)


@dataclass(frozen=True, slots=True)
class StagedFactor:
    """A factor, the stages of its tiles in shared memory, and its free indices."""

    memory: MemoryView
    factor: ProductFactor
    place: FactorPlace
    own: tuple[BoundIndex, ...]


@dataclass(slots=True)
class ProductLowering:
    """Lowers one region to products of warps."""

    k: ProgramBuilder
    region: ProductRegion
    order: ProductOrder
    tiles: ProductTiles
    buffers: Mapping[str, ir.Buffer]
    memories: dict[tuple[str, bool, DType], MemoryView] = field(default_factory=dict)
    chained: ChainedLeft | None = None
    masked: MaskedSteps | None = None

    def __post_init__(self) -> None:
        if self.region.domain:
            self.masked = MaskedSteps.of(self.region, self.order, self.tiles)

    def write(self) -> None:
        k, (rows, columns, _) = self.k, self.tiles.tile
        self.k.num_blocks = self.num_tiles
        blocks, self.k.names = self._name_tile(BLOCK_ID)
        warps = self.tiles.warps
        warp = k.threads(WARP * warps[0] * warps[1]).tile(WARP).reshape(0, warps)
        pairs = [self._stages(pair, places) for pair, places in zip(self.region.pairs, self.order.pairs, strict=True)]
        if self.region.chain is not None:
            self.chained = ChainedLeft(self, warp)
        plan, total = plan_product((rows, columns), warp), self.region.total
        totals = [k.allocate(accumulator(name, (rows, columns), plan, total)) for name in self.sum_names]
        self._begin(totals)
        for sides, places in zip(pairs, self.order.pairs, strict=True):
            self._multiply(totals, warp, sides, places, blocks)
        if self.chained is not None:
            self.chained.finish(totals, blocks)
        self.recompute_spoiled(totals, blocks)
        self._finish(totals, blocks)

    def _begin(self, totals: Sequence[RegisterFragment]) -> None:
        """Initialize the sums of a tile."""
        for x in totals:
            self.k.init(x, 0)
        if self.chained is not None:
            self.chained.begin()

    @property
    def threads(self) -> ThreadTensor:
        """The threads that hold sums."""
        return self.k.threads(self.k.num_threads)

    @property
    def sum_names(self) -> list[str]:
        """The names of the accumulators, that of the output first."""
        return ["sums", *(f"sums_{n}" for n in range(1, self.region.sums))]

    def _multiply(
        self, totals: Sequence[RegisterFragment], warp: ThreadTensor, sides: Sequence[StagedFactor], pair: PairOrder,
        blocks: Mapping[str, ir.Expr],
    ) -> None:  # fmt: skip
        """Add one product of the region to the sums."""

        first, count = self.pipeline_steps(blocks)

        def fill(stage: Any, step: Any) -> None:
            at = {**blocks, **self._digits(pair.terms, to_index(step + first, "steps"))}
            for side in sides:
                self.fill_side(side.memory[stage], side, pair, at)
            if self.chained is not None:
                self.chained.fill(stage, at)

        def use(stage: Any, step: Any) -> None:
            at = {**blocks, **self._digits(pair.terms, to_index(step + first, "steps"))}
            if self.chained is None:
                self.mask_sides(sides, pair, stage, at)
                self._multiply_stage(totals, sides, stage, warp)
                return
            self.chained.compute(stage, at, totals)
            self.chained.multiply(totals, sides, stage)

        steps = self.tiles.count(pair.terms) if count is None else count
        self.k.ring(steps, self.tiles.stages, fill, use, first=self.first_copies(blocks))

    def pipeline_steps(self, blocks: Mapping[str, ir.Expr]) -> tuple[int | Index, Index | None]:
        """The first step of a tile, and the number of steps; None for all steps."""
        if self.masked is None:
            return 0, None
        first, count = self.masked.bounds(blocks)
        return Index(first), Index(count)

    def mask_sides(self, sides: Sequence[StagedFactor], pair: PairOrder, stage: Any, at: Mapping[str, ir.Expr]) -> None:
        """Zero the masked elements of the tiles of a stage, in steps that are partly masked."""
        if self.masked is None:
            return
        with self.k.when(Index(self.masked.has_partial_terms(at))):
            if mask_stage(self, sides, stage, pair.terms, at):
                self._meet_after_stores()

    def _meet_after_stores(self) -> None:
        """Make stores to shared memory visible to all threads that hold sums."""
        self.k.sync()

    def recompute_spoiled(self, totals: Sequence[RegisterFragment], blocks: Mapping[str, ir.Expr]) -> None:
        """Recompute sums of a masked product that became NaN because of factors in masked terms."""
        if self.masked is not None and self.chained is None and self.region.total.is_float:
            recompute_masked_sums(self, self.masked, totals[0], blocks)

    def first_copies(self, blocks: Mapping[str, ir.Expr]) -> Callable[[], Any] | None:
        """A function that copies the tiles that all steps use; None if there are no such tiles."""
        chained = self.chained
        return None if chained is None else lambda: chained.fill_first(blocks)

    def multiply_left(
        self, totals: Sequence[RegisterFragment], left: RegisterFragment, rights: Sequence[StagedFactor], stage: Any,
        by: ThreadTensor,
    ) -> None:  # fmt: skip
        """Add the products of one stage, with a left factor in registers."""
        for total, side in zip(totals, rights, strict=True):
            b = side.memory[stage].T if side.place.transposed else side.memory[stage]
            self.k.matmul(total, left, b, by=by, products=self.products)

    def _multiply_stage(
        self, totals: Sequence[RegisterFragment], sides: Sequence[StagedFactor], stage: Any, by: ThreadTensor
    ) -> None:
        """Add the products of one stage: of the left factor and the right factor of each sum."""
        a, *rights = (s.memory[stage].T if s.place.transposed else s.memory[stage] for s in sides)
        for total, b in zip(totals, rights, strict=True):
            self.k.matmul(total, a, b, by=by, products=self.products)

    @property
    def products(self) -> str:
        """The `products` option of `k.matmul`: how factors are rounded."""
        return ROUNDED if self.region.pairs[0].left.rounding else ""

    @property
    def num_tiles(self) -> int:
        """The number of tiles over rows, columns and batch."""
        return prod(map(self.tiles.count, (self.order.rows, self.order.columns, self.order.batch)))

    def _name_tile(self, number: ir.Expr) -> tuple[dict[str, ir.Expr], list[tuple[str, ir.Expr]]]:
        """The coordinates, by index, of the tile with index `number`, and the variables in them as (name, value)."""
        order, count = self.order, self.tiles.count
        rows, columns = count(order.rows), count(order.columns)
        inside = build.mod(number, rows * columns) if order.batch else number
        side = rows_together(rows, self.tiles.group, self.tiles.cluster)
        band, within = build.div(inside, side * columns), build.mod(inside, side * columns)
        row, column = build.add(build.mul(band, side), build.mod(within, side)), build.div(within, side)
        if self.masked is not None and self.masked.grow_with_rows:
            row = build.sub(rows - 1, row)  # start the blocks with most steps first
        found = {
            **self._digits(order.batch, build.div(number, rows * columns)),
            **self._digits(order.rows, row),
            **self._digits(order.columns, column),
        }
        names = [(internal_name("tile", name), e) for name, e in found.items() if build.integer(e) is None]
        known = {name for name, _ in names}
        return {
            name: build.var(n) if (n := internal_name("tile", name)) in known else e for name, e in found.items()
        }, names

    def _digits(self, indices: Sequence[BoundIndex], number: ir.Expr | int) -> dict[str, ir.Expr]:
        """The coordinate along each index of the tile with index `number`; the first index varies fastest."""
        found: dict[str, ir.Expr] = {}
        rest: ir.Expr = build.const(number) if isinstance(number, int) else number
        for n, i in enumerate(indices):
            count = self.tiles.count((i,))
            found[i.name] = build.mod(rest, count) if n + 1 < len(indices) else rest
            rest = build.div(rest, count)
        return found

    # --- factors -------------------------------------------------------------------------------------------------

    def _stages(self, pair: FactorPair, order: PairOrder) -> tuple[StagedFactor, ...]:
        """The stages of the factors of a product; products with the same tile layout share memory."""
        rows, columns, terms = self.tiles.tile
        found = [self._stage("left", pair.left, order.left, self.order.rows, (rows, terms))]
        for n, (factor, place) in enumerate(zip(pair.rights, order.rights, strict=True)):
            found.append(
                self._stage(f"right_{n}" if n else "right", factor, place, self.order.columns, (columns, terms))
            )
        return tuple(x for x in found if x is not None)

    def _stage(
        self, name: str, factor: ProductFactor, place: FactorPlace, own: tuple[BoundIndex, ...], shape: tuple[int, int]
    ) -> StagedFactor | None:
        """The stages of a factor; None if it is only in registers."""
        if self.region.chain is not None and factor is self.region.pairs[0].left:
            return None
        return StagedFactor(self._allocate_shared_stages(name, factor, place, shape), factor, place, own)

    def view_side(self, side: StagedFactor, order: PairOrder) -> StagedFactor:
        """`side` with the view that copies use."""
        return side

    def _allocate_shared_stages(
        self, name: str, factor: ProductFactor, place: FactorPlace, shape: tuple[int, int]
    ) -> MemoryView:
        key = (name, place.transposed, factor.dtype)
        if key not in self.memories:
            sizes = shape[::-1] if place.transposed else shape
            self.memories[key] = self.k.shared(name, (self.tiles.stages, *sizes), factor.value.dtype)
        return self.memories[key]

    def fill_side(
        self, to: MemoryView, side: StagedFactor, pair: PairOrder, at: Mapping[str, ir.Expr], *, multicast: bool = False
    ) -> None:
        """Copy, or compute, the tile of a factor. multicast: share the copy with all blocks of the cluster."""
        groups = (pair.terms, side.own) if side.place.transposed else (side.own, pair.terms)
        if side.place.element is not None:
            batch = {i.name: at[i.name] for i in self.order.batch}
            view = side.place.element.view([i for g in groups for i in g], batch)
            tile = self._deal_columns(self._pick_tile(view.tensor, groups, at), groups)
            self.k.move(to, MemoryView(view.buffer, tile), multicast=multicast)
        else:
            self._compute(to, side.factor, groups, at)

    @property
    def column_permutation(self) -> Layout | None:
        """The permutation, product column -> column, by which a thread holds neighbors; None for no permutation.

        An instruction gives each of 4 threads two columns. If the rows of the right factor are permuted in shared
        memory, the columns of four instructions become 8 neighbors of one thread. Each row stays contiguous.
        """
        columns, along = self.tiles.tile[1], self.tiles.warps[1]
        if columns % (DEALT * along) or any(x.transposed for p in self.order.pairs for x in p.rights):
            return None
        rest = columns // DEALT
        return Layout((2, 4, 4, rest), (1, 8, 2, DEALT)) if rest > 1 else Layout((2, 4, 4), (1, 8, 2))

    def _deal_columns(self, tile: DataTensor, groups: Sequence[Sequence[BoundIndex]]) -> DataTensor:
        """The tile with columns, if they are one of its groups, permuted by `column_permutation`."""
        deals, where = self.column_permutation, [n for n, g in enumerate(groups) if g is self.order.columns]
        if deals is None or not where:
            return tile
        level, inner, step = tile.parts[0], [], 1
        for n, mode in enumerate(level.layouts[0].modes):
            own = deals if n in where else Layout(mode.size, 1)
            inner.append(compose(Layout(mode.size, step), own))
            step *= mode.size
        return replace(tile, parts=(level.composed(concatenate(*inner)),))

    def _pick_tile(
        self, tensor: DataTensor, groups: Sequence[Sequence[BoundIndex]], at: Mapping[str, ir.Expr]
    ) -> DataTensor:
        """The tile at the coordinates `at` of a tensor with a dimension per index; the tile has one per group."""
        indices = [i for g in groups for i in g]
        tile = tensor.tile(*(self.tiles.boxes[i.name] for i in indices))[tuple(at[i.name] for i in indices)]
        for n, group in enumerate(groups):
            if len(group) > 1:
                tile = tile.join(*range(n, n + len(group)))
        return tile

    def _points(self, groups: Sequence[Sequence[BoundIndex]], at: Mapping[str, ir.Expr]) -> DataTensor:
        """The tile at `at` of the iteration space: its elements have the values of the indices as coordinates."""
        extents = [i.extent for g in groups for i in g]
        return self._pick_tile(DataTensor.make_addressed_tensor(extents, FLOAT32, ir.Space.GLOBAL), groups, at)

    def tile_points(self, groups: Sequence[Sequence[BoundIndex]], at: Mapping[str, ir.Expr]) -> DataTensor:
        """The points of a tile of the iteration space, with permuted columns."""
        return self._deal_columns(self._points(groups, at), groups)

    def point_scope(
        self, groups: Sequence[Sequence[BoundIndex]], point: DataTensor, at: Mapping[str, ir.Expr]
    ) -> LoweringScope:
        """The values of the indices at a point."""
        indices = [i for g in groups for i in g]
        values = {i.name: build.add(c, i.lower) for i, c in zip(indices, point.coordinates, strict=True)}
        values |= {i.name: build.add(at[i.name], i.lower) for i in self.order.batch}
        return LoweringScope(values, self.buffers)

    def _compute(
        self, to: MemoryView, factor: ProductFactor, groups: Sequence[Sequence[BoundIndex]], at: Mapping[str, ir.Expr]
    ) -> None:
        """Compute the tile of a factor in shared memory; each thread stores vectors of neighbors."""
        k, tile = self.k, self.tile_points(groups, at)
        rows, columns = (x.size for x in tile.levels[0].modes)
        size = factor.dtype.size
        width = gcd(columns, min(VECTOR_BYTES // size, MAX_LANES[size]))
        across, threads = columns // width, k.num_threads
        for first in range(0, rows * across, threads):
            chunk = build.add(THREAD_X, first)
            row, column = build.div(chunk, across), build.mul(build.mod(chunk, across), width)
            points = [tile[row, build.add(column, n)] for n in range(width)]
            places = [to[row, build.add(column, n)].tensor.coordinates for n in range(width)]
            values = [lower_expr(factor.value, self.point_scope(groups, p, at)) for p in points]
            statement = guarded_store(to.buffer, places, values, points, f"{to.buffer.name}_value", zeros=True)
            if first + threads > rows * across:
                statement = build.when(build.lt(chunk, rows * across), statement)
            k.add_leaf(specs.Leaf((to,), (), self.threads, kind="Map", atom="ld, st", statement=statement))

    # --- sums ----------------------------------------------------------------------------------------------------

    def _finish(self, totals: Sequence[RegisterFragment], blocks: Mapping[str, ir.Expr]) -> None:
        """Apply the epilogue and store the results of each thread, in vectors of neighbors."""
        contraction, tensor = self.region.contraction, self.buffers[self.region.contraction.output.tensor]

        def store(run: Sequence[int], points: Sequence[DataTensor], scopes: Sequence[LoweringScope]) -> ir.Stmt:
            stored = [self._stored_value(totals, v, scope) for v, scope in zip(run, scopes, strict=True)]
            stored = [build.cast(x, tensor.type.dtype) for x in stored]
            places = [
                lower_access(contraction.output.tensor, contraction.output.subscripts, scope)[1] for scope in scopes
            ]
            return guarded_store(tensor, places, stored, points, totals[0].name, zeros=False)

        out = MemoryView.of(tensor.name, self.tiles.tile[:2], tensor.type.dtype, ir.Space.GLOBAL)
        self.each_run(totals, blocks, store, out)

    def each_run(
        self, totals: Sequence[RegisterFragment], blocks: Mapping[str, ir.Expr],
        write: Callable[[Sequence[int], Sequence[DataTensor], Sequence[LoweringScope]], ir.Stmt],
        out: MemoryView | RegisterFragment, groups: Sequence[Sequence[BoundIndex]] | None = None,
    ) -> None:  # fmt: skip
        """Emit `write(values, points, scopes)` for each run of neighboring values of a thread.

        groups: the indices of rows and columns; by default those of the region.
        """
        deals = self.column_permutation if groups is None else None
        groups, total = groups or (self.order.rows, self.order.columns), totals[0]
        values = self.tile_points(groups, blocks).partition(total.tv)[total.thread]
        names: list[tuple[str, ir.Expr]] = []
        values = name_coordinates(values, [i.name for g in groups for i in g], names)
        statements: list[ir.Stmt] = []
        for run in neighbor_runs(total, deals):
            points = [element_at(values, v) for v in run]
            statements.append(write(run, points, [self.point_scope(groups, p, blocks) for p in points]))
        body = build.block(*statements)
        for name, value in reversed(names):
            body = ir.Let(name, value, body)
        self.k.add_leaf(specs.Leaf((out,), tuple(totals), self.threads, kind="Map", atom="ld, st", statement=body))

    def _stored_value(self, totals: Sequence[RegisterFragment], v: int, scope: LoweringScope) -> ir.Expr:
        """The value of an output element, computed from the sums at value `v` of a thread."""
        known = dict(scope.indices) | ({} if self.chained is None else self.chained.row_values(v, totals))
        others = list(enumerate(self.region.others, 1))
        for n, one in others[::-1]:  # earlier sums may depend on later ones
            value = self.finish_sum(read_value(totals[n], v), one.initial, one.epilogue, known, scope)
            known[internal_name(ACCUMULATOR, n)] = build.cast(value, one.element.dtype)
        contraction, total = self.region.contraction, read_value(totals[0], v)
        exists = None if self.chained is not None else condition_of(mask_of_sums(self.region))
        if exists is not None:
            total = build.select(lower_expr(exists, scope), total, build.const(0, total.type.dtype))
        return self.finish_sum(total, contraction.initial, contraction.epilogue, known, scope)

    def keep_values(
        self, tile: RegisterFragment, run: Sequence[int], points: Sequence[DataTensor], values: Sequence[ir.Expr],
        beyond: float | None = None,
    ) -> ir.Stmt:  # fmt: skip
        """Replace values of a thread in registers if their points exist; others by `beyond` unless that is None."""
        if not exist_together(points):
            half = len(run) // 2
            parts = [slice(0, half), slice(half, None)]
            return build.block(*(self.keep_values(tile, run[p], points[p], values[p], beyond) for p in parts))
        loads = VectorLoads(f"{tile.name}_in")
        values = [build.cast(x, FLOAT32) for x in loads.join(values)]
        kept = [build.store(tile.buffer, (tile.registers[v],), x) for v, x in zip(run, values, strict=True)]
        body = build.block(*loads.statements, *kept)
        body = build.allocate(loads.buffers, body) if loads.buffers else body
        inside = points[0].predicate
        if inside is None:
            return body
        number = None if beyond is None else build.const(beyond, FLOAT32)
        other = None if number is None else [build.store(tile.buffer, (tile.registers[v],), number) for v in run]
        return build.when(inside, body, None if other is None else build.block(*other))

    def compute_left(
        self, left: RegisterFragment, value: tc.Expr, groups: Sequence[Sequence[BoundIndex]],
        at: Mapping[str, ir.Expr], known: Callable[[int], Mapping[str, ir.Expr]] = lambda v: {},
    ) -> None:  # fmt: skip
        """Compute and round each thread's part of a left factor in registers, which hold two neighbors of a row each.

        known: a function from a value of the thread to variables of the expression `value`.
        """
        packed = f"pair_{left.dtype.name}"
        values = self._points(groups, at).partition(left.tv)[left.thread]
        names: list[tuple[str, ir.Expr]] = []
        values = name_coordinates(values, [i.name for g in groups for i in g], names)
        pair = ir.Buffer(f"{left.name}_pair", ir.Type(left.dtype), (2,), (1,), ir.Space.SCRATCH)
        statements: list[ir.Stmt] = []
        for v in range(0, left.values, 2):
            points = [element_at(values, n) for n in (v, v + 1)]
            scopes = [self.point_scope(groups, p, at) for p in points]
            scopes = [LoweringScope({**s.indices, **known(v + n)}, s.buffers) for n, s in enumerate(scopes)]
            computed = [lower_expr(value, s) for s in scopes]
            both = build.call(packed, *(build.load(pair, n) for n in range(2)))
            fill = fill_pair(pair, points, computed, f"{left.name}_in")
            statements += [fill, build.store(left.buffer, (left.registers[v],), both)]
        body = build.allocate([pair], build.block(*statements))
        for name, e in reversed(names):
            body = ir.Let(name, e, body)
        self.k.add_leaf(specs.Leaf((left,), (), self.threads, kind="Map", atom="ld", statement=body))

    def finish_sum(
        self, total: ir.Expr, initial: tc.Expr | None, epilogue: tc.Expr | None, known: Mapping[str, ir.Expr],
        scope: LoweringScope,
    ) -> ir.Expr:  # fmt: skip
        """The result of a sum, with its initial value and epilogue. known: variables, which include other sums."""
        if initial is not None:
            total = build.add(lower_expr(self._with_sums(initial), LoweringScope(known, scope.buffers)), total)
        if epilogue is None:
            return total
        return lower_expr(self._with_sums(epilogue), LoweringScope({**known, ACCUMULATOR: total}, scope.buffers))

    def _with_sums(self, e: tc.Expr) -> tc.Expr:
        """`e` with reads of the tensors of other sums replaced by the sums' variables."""
        for n, one in enumerate(self.region.others, 1):
            e = replace_element_reads(e, one.element, tc.Index(internal_name(ACCUMULATOR, n), one.element.dtype))
        return e
