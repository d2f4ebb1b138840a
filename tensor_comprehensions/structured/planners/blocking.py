"""Cache blocking around one register tile: the loop order, packing and the parallel loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from ...loop_ir.nodes import Space
from ...machine import (
    CACHE_LINE_BYTES,
    HIDDEN_STORE_CYCLES,
    L1_SETS,
    L1_WAYS,
    L2_LINE_CYCLES,
    L2_STRIDED_BYTES_PER_CYCLE,
)
from ...target import CpuTarget
from ...thresholds import (
    BALANCED_CHUNKS,
    CONVERTED_SCALARS_PANELS,
    FEW_CHUNKS,
    MAX_UNROLLED_STEPS,
    MAX_USES_IN_PLACE,
    NONTEMPORAL_OUTPUT_FACTOR,
    OWN_PACKED_TRANSPOSED_USES,
    OWN_PACKED_USES,
    PACKED_BLOCK_STEPS,
    PACKED_SCALARS_PANELS,
    PACKED_STRIDE_BYTES,
    PACKED_STRIDE_BYTES_IN_L2,
    PACKED_TRANSPOSED_USES,
    PACKED_USES,
    PANELS_IN_L2,
    PREFETCHED_ROW_SETS,
    REPACKED_USES,
    SHORT_RUN_BYTES,
    THREAD_FMAS,
    TRANSPOSED_OPERAND_USES,
    UNROLLED_REDUCTION,
)
from ..analysis.contraction_info import ContractionInfo, Factor
from ..cost import tile_cost, unroll_factors
from ..cost.tile_cost import RegisterTile, is_in_mesh_llc, stream_cycles
from ..lower.tile import balanced_block, num_tiles
from ..op import Iterator, loads_in
from ..plan import PackStep, Plan, TileLoop
from .panel_extension import PanelExtension


@dataclass(frozen=True, slots=True)
class Blocking:
    """The loops of a plan and what they contain.

    Attributes:
        loops: the levels.
        outer: how many of the outermost levels may become the parallel loop.
        packs, prefetches: as in `Plan`.
        rows: least number of points of the innermost parallel level per thread.
    """

    loops: list[TileLoop]
    outer: int
    packs: list[PackStep]
    rows: int = 1
    prefetches: tuple[PackStep, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockingHeuristic:
    """Chooses the loop order, packing and parallel loop around the register tile `tile`."""

    info: ContractionInfo
    target: CpuTarget
    tile: RegisterTile
    parallel: bool

    def plan(self) -> Plan:
        """A plan: batch iterators outside, then those of the factor whose panel is stationary, then the other's."""
        reductions = self.info.reductions
        if self.info.transposes_output:
            return self._finish_plan(self._block_output_order(), reductions)
        pack_moving = self.packs_vector_operand()
        rows_outside = not pack_moving and self.row_stationary()
        pack_still = self.packs_broadcast_operand(rows_outside)
        if pack_still and not rows_outside:
            nest = self._blocked_rows(reductions, pack_moving)
        else:
            nest = self._stationary_panel(reductions, rows_outside, pack_still if rows_outside else pack_moving)
        return self._finish_plan(nest, self._order_reductions(reductions, nest))

    def _order_reductions(self, reductions: tuple[str, ...], nest: Blocking) -> tuple[str, ...]:
        """The order of reductions in the register tile; if both factors are packed, the longest is innermost."""
        if len(nest.packs) < len(self.info.factors):
            return reductions
        blocks = {level.iterator: level.size for level in nest.loops}
        return tuple(sorted(reductions, key=lambda name: blocks.get(name, self.info.extent(name))))

    def _finish_plan(self, nest: Blocking, reductions: tuple[str, ...]) -> Plan:
        collapsed, grain = self._choose_parallel_levels(nest.loops[: nest.outer])
        grain = max(grain, num_tiles(nest.rows, nest.loops[nest.outer - 1].size)) if collapsed else grain
        return Plan(
            self.info.vector,
            self.tile.lanes,
            tuple(nest.loops),
            reductions,
            unroll_factors.count_unrolled_reductions(self.info, self.target, self.tile, reductions),
            tuple(nest.packs),
            collapsed,
            grain,
            unroll_steps=self._choose_unroll_steps(nest, reductions),
            nontemporal=self.is_nontemporal(nest.loops),
            prefetches=nest.prefetches,
            vectors_per_register=self.tile.vectors_per_register,
        )

    def _stationary_panel(self, reductions: tuple[str, ...], rows_outside: bool, packed: bool) -> Blocking:
        """GotoBLAS order: a panel of one factor, packed or in place, stays in cache while the other streams past."""
        known = self.info
        standing, passing = (
            (known.broadcast_operand, known.vector_operand)
            if rows_outside
            else (known.vector_operand, known.broadcast_operand)
        )
        swept = self._swept_iterators(standing) if packed else ()
        beside = packed and not swept
        near = self._run_panels() if beside else 1
        together, blocks = self._panels_kept_together(passing if beside else standing, reductions, near)
        levels = self._make_levels(known.batch)
        rest = tuple(i for i in known.exclusive_iterators(standing) if i not in swept)
        levels += (
            self._make_levels_as_read(rest, standing)
            if swept
            else self._make_levels(rest, standing if packed else None)
        )
        panels = [levels.pop()] if together > 1 else []
        levels += [TileLoop(p.iterator, together * p.size) for p in panels] or self._sweep.blocks(swept)
        panel = PackStep(standing.side, len(levels))
        count = prod(num_tiles(known.extent(level.iterator), level.size) for level in levels)
        turned = standing.step(known.vector) != 1
        once = not packed or (count == 1 and not blocks and not swept)  # all threads use one panel
        if self.parallel and count < (BALANCED_CHUNKS if once else BALANCED_CHUNKS // 2) and not panels:
            uses = 1 if once else (PACKED_TRANSPOSED_USES if turned else PACKED_USES)
            levels += self._make_chunk_levels(known.exclusive_iterators(passing), -(-BALANCED_CHUNKS // count), uses)
        outer = len(levels)
        levels += blocks
        packs = [PackStep(standing.side, len(levels))] if packed else []
        rows = 1 if not packed or count > 1 else (OWN_PACKED_TRANSPOSED_USES if turned else OWN_PACKED_USES)
        ahead = standing is known.vector_operand and not (packed or blocks or panels) and self._prefetchable_in_place()
        inner = [*self._make_levels(swept), *self._make_levels(known.exclusive_iterators(passing)), *panels]
        return Blocking([*levels, *inner], outer, packs, rows, (panel,) if ahead else ())

    def _panels_kept_together(
        self, passing: Factor, reductions: tuple[str, ...], near: int
    ) -> tuple[int, list[TileLoop]]:
        """How many panels along the lanes stay in cache together while `passing` streams past, and the reduction block.

        As many panels as fit if `passing` is beyond the private caches; otherwise about `near`.
        """
        known, half = self.info, self.target.cache[1] // 2
        step = self._panel_width() * known.op.dtype.size
        every = num_tiles(known.extent(known.vector), self._panel_width())
        blocks = self._reduction_block(reductions, known.k_size)
        if passing is not known.broadcast_operand:
            return 1, blocks
        far = is_in_mesh_llc(self._footprint(passing), self.target)
        gathered = self._reduction_block(reductions, half // (PANELS_IN_L2 * step)) if far else blocks
        steps = prod({**known.extents, **{b.iterator: b.size for b in gathered}}[name] for name in reductions)
        most = min(every // (FEW_CHUNKS if self.parallel else 1), half // (steps * step))
        if not far:
            most = balanced_block(every, min(most, near)) if most else 0
        return (most, gathered) if most > 1 else (1, blocks)

    def _run_panels(self) -> int:
        """How many adjacent panels are packed together, so that a distant last-level cache is read in long runs."""
        known, moving = self.info, self.info.vector_operand
        run = self._panel_width() * moving.bytes
        straight = moving.step(known.vector) == 1 and self.target.has_mesh_llc
        return num_tiles(SHORT_RUN_BYTES, run) if straight else 1

    def _block_output_order(self) -> Blocking:
        """The order for transposed stores: as many panels of the vector operand as fit into L2.

        Inside the parallel loop, rows of the register tile follow the output's memory order.
        """
        known, tile = self.info, self.tile
        levels = self._make_levels(known.batch)
        count = prod(i.extent for i in known.batch)
        rows = [i for i in known.exclusive_iterators(known.broadcast_operand) if i.name != known.output_unit_iter]
        left = prod(i.extent for i in known.exclusive_iterators(known.broadcast_operand)) // TRANSPOSED_OPERAND_USES
        for i in rows:
            parts = min(i.extent, left, -(-BALANCED_CHUNKS // count)) if self.parallel else 1
            block = num_tiles(num_tiles(i.extent, max(1, parts)), tile.size(i.name)) * tile.size(i.name)
            if block < i.extent:
                levels.append(TileLoop(i.name, block))
                count, left = count * num_tiles(i.extent, block), left // num_tiles(i.extent, block)
        panel = known.k_size * self._panel_width() * known.vector_operand.bytes
        extent = known.extent(known.vector)
        room = max(1, self.target.cache[1] * 5 // 8 // panel)
        runs = num_tiles(known.extent(known.output_unit_iter), tile.size(known.output_unit_iter))
        once = room * self._panel_width() >= extent
        stays = panel <= self.target.cache[0] and self._panel_width() < extent  # in L1, for all runs
        shares = self.parallel and once and not (stays or rows or levels) and runs >= BALANCED_CHUNKS
        if self.parallel and not shares:
            room = min(room, max(1, num_tiles(extent, self._panel_width()) * count // FEW_CHUNKS))
        if room * self._panel_width() < extent:
            levels.append(TileLoop(known.vector, room * self._panel_width()))
        if shares:
            levels += self._make_chunk_levels((known.op.iterator(known.output_unit_iter),), BALANCED_CHUNKS, 1)
        outer = len(levels)
        inner = [*self._loops_around_panels(rows, panel), known.op.iterator(known.output_unit_iter)]
        levels += [TileLoop(i.name, tile.size(i.name)) for i in inner]
        return Blocking(levels, outer, [PackStep(known.vector_operand.side, outer)])

    def _loops_around_panels(self, rows: Sequence[Iterator], panel: int) -> list[Iterator]:
        """The loops over `rows`, around those over panels of `panel` bytes unless a panel stays in L1.

        With a distant last-level cache, a panel in L1 is multiplied with all rows that L2 holds, so that the output is
        written in few places at a time.
        """
        known, still = self.info, self.info.broadcast_operand
        columns = known.exclusive_iterators(known.vector_operand)
        if self.target.has_mesh_llc and panel <= self.target.cache[0] * 3 // 4:
            ordered = sorted(rows, key=lambda i: -abs(still.step(i.name) or 0))
            for count in range(len(rows)):
                inside = [*known.reductions, known.output_unit_iter, *(i.name for i in ordered[count:])]
                span = sum((known.extent(n) - 1) * abs(still.step(n) or 0) for n in inside) * still.bytes
                if span <= self.target.cache[1] * 3 // 4:
                    return [*ordered[:count], *columns, *ordered[count:]]
        return [*rows, *columns]

    def has_extended_panels(self) -> bool:
        """Whether transposed panels of the vector operand hold all points of an iterator, to be read in long runs."""
        return (
            not self.info.transposes_output
            and self.packs_vector_operand()
            and bool(self._swept_iterators(self.info.vector_operand))
        )

    def _swept_iterators(self, factor: Factor) -> tuple[Iterator, ...]:
        return self._sweep.iterators(factor)

    @property
    def _sweep(self) -> PanelExtension:
        return PanelExtension(self.info, self.target, self.tile, min(self.info.k_size, PACKED_BLOCK_STEPS))

    def _blocked_rows(self, reductions: tuple[str, ...], pack_moving: bool) -> Blocking:
        """A packed block of the broadcast operand stays in L2 for all panels of the vector operand."""
        known = self.info
        levels = [*self._make_levels(known.batch), self._packed_block(pack_moving)]
        blocks = self._reduction_block(reductions, PACKED_BLOCK_STEPS)
        alone = prod(num_tiles(known.extent(level.iterator), level.size) for level in levels) < 2
        if self.parallel and alone:
            levels += self._make_chunk_levels(
                known.exclusive_iterators(known.vector_operand), BALANCED_CHUNKS, REPACKED_USES if blocks else 1
            )
        outer = len(levels)
        levels += blocks
        packs = [PackStep(known.broadcast_operand.side, len(levels))]
        levels += self._make_levels(known.exclusive_iterators(known.vector_operand))
        if pack_moving:
            packs.append(PackStep(known.vector_operand.side, len(levels)))
        rows = OWN_PACKED_USES if alone and not blocks else 1
        return Blocking(
            [*levels, *self._make_levels(known.exclusive_iterators(known.broadcast_operand))], outer, packs, rows
        )

    # --- loops ---

    def _make_levels(self, iterators: tuple[Iterator, ...], packed: Factor | None = None) -> list[TileLoop]:
        """The register-tile levels of `iterators`: untiled loops, then tiled ones, the lanes' last.

        packed: order untiled loops by the strides of this factor, the largest outermost.
        """
        vector = self.info.vector

        def order(i: Iterator) -> tuple[bool, bool, int]:
            return i.name == vector, self.tile.size(i.name) > 1, -abs(packed.step(i.name) or 0) if packed else 0

        ordered = sorted(iterators, key=order)
        return [TileLoop(i.name, self.tile.size(i.name)) for i in ordered]

    def _make_levels_as_read(self, iterators: tuple[Iterator, ...], packed: Factor) -> list[TileLoop]:
        """As `_make_levels`, but if the factor is beyond the private caches, in memory order, so that runs adjoin."""
        if not is_in_mesh_llc(packed.stored * packed.bytes, self.target):
            return self._make_levels(iterators, packed)
        ordered = sorted(iterators, key=lambda i: -abs(packed.step(i.name) or 0))
        return [TileLoop(i.name, self.tile.size(i.name)) for i in ordered]

    def _choose_unroll_steps(self, nest: Blocking, reductions: tuple[str, ...]) -> int:
        """Unroll factor of the reduction. With prefetches, one step per register tile that uses the panel."""
        if nest.prefetches:
            return min(MAX_UNROLLED_STEPS, 1 << (self._row_tiles().bit_length() - 1))
        return unroll_factors.steps_per_iteration(self.info, self.target, reductions, nest.loops, nest.packs)

    def row_stationary(self) -> bool:
        """Whether panels of the broadcast operand should stay in cache while the vector operand streams past."""
        known, tile = self.info, self.tile
        steps = known.k_size
        rows = prod(i.extent for i in known.exclusive_iterators(known.broadcast_operand))
        columns = prod(i.extent for i in known.exclusive_iterators(known.vector_operand))
        row_tile = prod(tile.size(i.name) for i in known.exclusive_iterators(known.broadcast_operand))
        column_tile = prod(tile.size(i.name) for i in known.exclusive_iterators(known.vector_operand))
        still, moving = self._footprint(known.broadcast_operand), self._footprint(known.vector_operand)
        row_panels, column_panels = -(-rows // row_tile), -(-columns // column_tile)
        size = known.vector_operand.bytes
        inside = stream_cycles(moving, still, column_tile * steps * size, column_panels, row_panels, self.target)
        outside = stream_cycles(still, moving, row_tile * steps * size, row_panels, column_panels, self.target)
        return outside < inside

    def _exceeds_l2_share(self, factor: Factor) -> bool:
        """Whether the part of a factor that one batch reads takes more than 3/4 of L2."""
        return self._footprint(factor) > self.target.cache[1] * 3 // 4

    def _footprint(self, factor: Factor) -> int:
        """Bytes of a factor that one batch reads."""
        shared = {i.name for i in self.info.batch}
        domain = prod(i.extent for i in self.info.op.iterators if i.name in factor.iterators and i.name not in shared)
        access = loads_in(self.info.op.factors[factor.side.value])[0]
        return min(domain, prod(access.buffer.shape)) * factor.bytes

    # --- packing ---

    def packs_vector_operand(self) -> bool:
        """Whether to pack the vector operand: always if it is not contiguous, otherwise if its rows are far apart."""
        known, moving = self.info, self.info.vector_operand
        if known.vector in known.broadcast_operand.iterators:
            return False
        if moving.step(known.vector) != 1 or self.tile.vectors_per_register > 1:
            return True
        row_tiles = self._row_tiles()
        if not moving.is_plain_load:
            return row_tiles >= 4
        width = self._panel_width()
        bound = int(tile_cost.packing_row_bytes(known, self._footprint(moving), np.array(width), self.target))
        apart = self._has_stride_beyond(moving, bound, width) or self._outruns_next_cache(0)
        pays = (row_tiles >= 12 and apart) or (row_tiles >= 4 and self._outruns_next_cache(1))
        return pays and not self._prefetchable_in_place()

    def _outruns_next_cache(self, level: int) -> bool:
        """Whether short rows read in place exceed cache `level`, and need lines faster than L2 delivers them.

        Unaligned rows touch one more line than rows of a panel.
        """
        known, moving = self.info, self.info.vector_operand
        if self.target.has_mesh_llc or not known.reductions:
            return False
        row = self._panel_width() * moving.bytes
        apart = abs(moving.step(known.reductions[-1]) or 0) * moving.bytes
        lines = row + CACHE_LINE_BYTES - gcd(CACHE_LINE_BYTES, row, apart)
        multiply_adds = self.tile.cells * tile_cost.multiply_cost(self.tile.width, known, self.target)
        leaves = known.k_size * lines > self.target.cache[level] * 3 // 4
        return apart >= lines and leaves and lines > L2_STRIDED_BYTES_PER_CYCLE * multiply_adds

    def _prefetchable_in_place(self) -> bool:
        """Whether to read rows of the vector operand in place, and prefetch the next panel from a distant cache."""
        known, moving = self.info, self.info.vector_operand
        if self.target.private_caches == self.target.cache or len(known.reductions) != 1:
            return False
        if not self._exceeds_l2_share(moving) and not self.is_nontemporal():  # the output would evict it
            return False
        if (
            not moving.is_plain_load
            or moving.step(known.vector) != 1
            or not self._has_stride_beyond(moving, PACKED_STRIDE_BYTES, self._panel_width())
        ):
            return False
        if any(self.tile.size(i.name) > 1 for i in known.exclusive_iterators(moving) if i.name != known.vector):
            return False
        apart = abs(moving.step(known.reductions[-1]) or 0) * moving.bytes // CACHE_LINE_BYTES
        uses = prod(i.extent for i in known.exclusive_iterators(known.broadcast_operand))
        sets, ways = L1_SETS // gcd(apart, L1_SETS), self.target.cache[0] // (L1_SETS * CACHE_LINE_BYTES)
        return uses <= MAX_USES_IN_PLACE and (sets >= PREFETCHED_ROW_SETS or sets * ways >= known.k_size)

    def packs_broadcast_operand(self, stands: bool) -> bool:
        """Whether to pack the broadcast operand: if its scalars are computed, or if memory would deliver them slowly.

        stands: whether a panel of it stays in cache while the vector operand streams past, and so is read once.
        """
        known, still = self.info, self.info.broadcast_operand
        if known.transposes_output or known.vector in still.iterators or not known.exclusive_iterators(still):
            return False
        width = prod(i.extent for i in known.exclusive_iterators(known.vector_operand))
        if not stands and width >= PACKED_USES and self._reads_short_runs(still):
            return True
        if not still.is_plain_load:
            return width >= CONVERTED_SCALARS_PANELS * self._panel_width()
        if width < PACKED_SCALARS_PANELS * self._panel_width():
            return False
        return (
            self._conflicts_in_l1()
            or self._has_stride_beyond(still, PACKED_STRIDE_BYTES_IN_L2, 1)
            or self._reads_factors_once()
        )

    def _reads_factors_once(self) -> bool:
        """Whether both factors are in a distant cache and are read once, because L2 holds the results of a batch."""
        known = self.info
        far = all(is_in_mesh_llc(self._footprint(f), self.target) for f in known.factors)
        results = known.output_size // prod(i.extent for i in known.batch)
        return far and results <= self.target.cache[1] // 2

    def _conflicts_in_l1(self) -> bool:
        """Whether the rows of a register tile compete for few sets of L1."""
        for i in self.info.exclusive_iterators(self.info.broadcast_operand):
            rows, step = (
                self.tile.size(i.name),
                abs(self.info.broadcast_operand.step(i.name) or 0) * self.info.broadcast_operand.bytes,
            )
            lines = (
                L1_WAYS * L1_SETS // gcd(step // CACHE_LINE_BYTES, L1_SETS)
                if step % CACHE_LINE_BYTES == 0 and step
                else L1_WAYS * L1_SETS
            )
            if 2 * rows > lines and rows > 8 * self._count_row_vectors():
                return True
        return self._refetches_from_l2()

    def _refetches_from_l2(self) -> bool:
        """Whether register tiles refetch lines from L2 that their neighbors just read, because rows alias in L1 sets.

        A line has scalars of several register tiles; the rows of all steps compete for few sets.
        """
        known, still = self.info, self.info.broadcast_operand
        names = [*known.reductions, *(name for name, size in self.tile.sizes if size > 1)]
        sizes = {**known.extents, **dict(self.tile.sizes)}
        steps = {name: abs(still.step(name) or 0) * still.bytes for name in names if name in still.iterators}
        if any(step < CACHE_LINE_BYTES or step % CACHE_LINE_BYTES for step in steps.values()):
            return False
        lines = prod(sizes[name] for name in steps)
        room = L1_WAYS * L1_SETS // gcd(L1_SETS, *(step // CACHE_LINE_BYTES for step in steps.values()))
        multiply_adds = known.k_size * self.tile.cells * tile_cost.multiply_cost(self.tile.width, known, self.target)
        return 2 * lines > room and L2_LINE_CYCLES * lines >= multiply_adds

    def _count_row_vectors(self) -> int:
        """Vectors in a row of a register tile."""
        columns = prod(self.tile.size(i.name) for i in self.info.exclusive_iterators(self.info.vector_operand))
        return max(1, columns // self.tile.width)

    def _reads_short_runs(self, factor: Factor) -> bool:
        """Whether register tiles read a factor that exceeds L2 in runs shorter than `SHORT_RUN_BYTES`.

        Rows that follow each other in memory are one run.
        """
        if not self._exceeds_l2_share(factor):
            return False
        run = 0
        rows = sorted(
            (i.name for i in self.info.exclusive_iterators(factor)), key=lambda name: abs(factor.step(name) or 0)
        )
        for name in (*reversed(self.info.reductions), *rows):
            step = abs(factor.step(name) or 0) * factor.bytes
            if step != run and (run or not 0 < step <= CACHE_LINE_BYTES):
                break
            run = step * self.info.extent(name)
        return run < SHORT_RUN_BYTES

    def _has_stride_beyond(self, factor: Factor, distance: int, width: int) -> bool:
        """Whether the stride of a factor along the innermost long reduction is at least `distance` bytes.

        width: elements that a step reads; the stride must also leave a cache line unread after these.
        """
        long = [n for n in self.info.reductions if self.info.extent(n) > UNROLLED_REDUCTION and n in factor.iterators]
        if not long or self.info.k_size < 64:
            return False
        step = abs(factor.step(long[-1]) or 0) * factor.bytes
        return step >= max(distance, width * factor.bytes + CACHE_LINE_BYTES)

    def _panel_width(self) -> int:
        return self.tile.size(self.info.vector)

    def _row_tiles(self) -> int:
        rows = self.info.exclusive_iterators(self.info.broadcast_operand)
        return prod(-(-i.extent // self.tile.size(i.name)) for i in rows)

    # --- blocks ---

    def _find_longest(self, iterators: tuple[Iterator, ...]) -> Iterator:
        """The iterator with the most tiles."""
        return max(iterators, key=lambda i: num_tiles(i.extent, self.tile.size(i.name)))

    def _make_chunk_levels(self, iterators: tuple[Iterator, ...], parts: int, uses: int) -> list[TileLoop]:
        """A level that divides one of `iterators` into about `parts` parts, each with at least `uses` points in all."""
        if not iterators:
            return []
        longest = self._find_longest(iterators)
        size = self.tile.size(longest.name)
        others = prod(i.extent for i in iterators if i is not longest)
        block = max(num_tiles(longest.extent, parts), num_tiles(uses, others))
        block = num_tiles(block, size) * size
        return [TileLoop(longest.name, block)] if block < longest.extent else []

    def _packed_block(self, pack_moving: bool) -> TileLoop:
        """The level of rows of the broadcast operand that are packed together."""
        rows = self.info.exclusive_iterators(self.info.broadcast_operand)
        longest = self._find_longest(rows)
        size = self.tile.size(longest.name)
        others = prod(i.extent for i in rows if i is not longest)
        steps = min(self.info.k_size, PACKED_BLOCK_STEPS)
        room = self.target.cache[-1] // 8 // (steps * others * self.info.op.dtype.size)
        block = room
        if self.parallel:
            uses = longest.extent * others
            parts = max(uses // (2 * REPACKED_USES), min(4, uses // REPACKED_USES)) if pack_moving else uses // 64
            parts = min(BALANCED_CHUNKS, parts)
            block = min(room, num_tiles(longest.extent, 1 << max(0, parts.bit_length() - 1)))
        count = block // size if block < longest.extent else num_tiles(longest.extent, size)
        return TileLoop(longest.name, size * balanced_block(num_tiles(longest.extent, size), max(1, count)))

    def _reduction_block(self, reductions: tuple[str, ...], most: int) -> list[TileLoop]:
        """At most one level that blocks a reduction, so that a panel has at most `most` steps and fits 3/4 of L2."""
        op, known, steps = self.info.op, self.info, self.info.k_size
        if known.transposes_output or op.output.buffer.type.dtype != op.dtype or self._reads_output():
            return []
        width = self._panel_width() * op.dtype.size
        most = min(most, self.target.cache[1] * 3 // 4 // width)
        if steps <= most:
            return []
        extents = ((name, known.extent(name)) for name in reductions)
        blocks = [TileLoop(n, balanced_block(e, most * e // steps)) for n, e in extents if most * e >= steps]
        return [min(blocks, key=self._split_line_waste)] if blocks else []

    def _split_line_waste(self, block: TileLoop) -> float:
        """The excess of cache lines that a reduction block reads, relative to full lines, summed over the factors."""
        size = block.size * self.info.op.dtype.size
        unit = sum(f.step(block.iterator) == 1 for f in self.info.factors)
        return unit * (num_tiles(size, CACHE_LINE_BYTES) * CACHE_LINE_BYTES / size - 1)

    def _reads_output(self) -> bool:
        """Whether the epilogue reads the old output, which partial sums would overwrite."""
        op = self.info.op
        return op.epilogue is not None and any(a.buffer.name == op.output.buffer.name for a in loads_in(op.epilogue))

    def is_nontemporal(self, levels: Sequence[TileLoop] = ()) -> bool:
        """Whether to store the output non-temporally: tiles write whole lines of an output that exceeds the caches."""
        known, op = self.info, self.info.op
        if op.output.buffer.space is Space.SCRATCH:  # the next statement of a tile reads it
            return False
        if known.transposes_output or any(level.iterator in self.info.reductions for level in levels):
            return False
        if (op.initial is not None and loads_in(op.initial)) or self._reads_output():
            return False
        touched = known.output_size + sum(f.stored * f.bytes for f in known.factors)
        points = {i.name: np.array(float(min(self.tile.size(i.name), i.extent))) for i in known.parallel}
        passes = touched > self.target.reuse_limit_bytes or self._has_exposed_output_stores()
        return passes and bool(tile_cost.fills_whole_lines(known, self.target, points))

    def _has_exposed_output_stores(self) -> bool:
        """Whether ordinary stores to a distant cache would take longer than the sums before them hide."""
        known, target = self.info, self.target
        line = (
            CACHE_LINE_BYTES
            // known.output_bytes
            / self.tile.width
            * tile_cost.multiply_cost(self.tile.width, known, target)
        )
        return (
            known.output_size > NONTEMPORAL_OUTPUT_FACTOR * target.writeback_limit_bytes
            and known.k_size * line < HIDDEN_STORE_CYCLES
        )

    # --- threads ---

    def _choose_parallel_levels(self, levels: list[TileLoop]) -> tuple[int, int]:
        """How many of `levels` become the parallel loop, and its grain."""
        op = self.info.op
        if not self.parallel or not levels or op.multiplications < 2 * THREAD_FMAS:
            return 0, 1
        count = prod(num_tiles(op.extent(level.iterator), level.size) for level in levels)
        if count < 2:
            return 0, 1
        return len(levels), max(1, THREAD_FMAS * count // op.multiplications)
