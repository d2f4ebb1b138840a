"""The choices around one register tile: the loop order, the copies and the parallel loop."""

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
    """Levels of a plan, how many of them a parallel loop may collapse, and the copies among them.

    rows: least number per thread, besides the grain size. ahead: as in a plan.
    """

    loops: list[TileLoop]
    outer: int
    packs: list[PackStep]
    rows: int = 1
    prefetches: tuple[PackStep, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockingHeuristic:
    """The choices around one register tile."""

    info: ContractionInfo
    target: CpuTarget
    tile: RegisterTile
    parallel: bool

    def plan(self) -> Plan:
        """Shared iterators outside, then those of one factor, whose panel stands still, then the other's."""
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
        """The order of reductions in the register tile: in panels of both factors the longest may be innermost."""
        if len(nest.packs) < len(self.info.factors):
            return reductions
        blocks = {level.iterator: level.size for level in nest.loops}
        return tuple(sorted(reductions, key=lambda name: blocks.get(name, self.info.extent(name))))

    def _finish_plan(self, nest: Blocking, reductions: tuple[str, ...]) -> Plan:
        collapsed, grain = self._parallel(nest.loops[: nest.outer])
        grain = max(grain, num_tiles(nest.rows, nest.loops[nest.outer - 1].size)) if collapsed else grain
        return Plan(
            self.info.vector,
            self.tile.lanes,
            tuple(nest.loops),
            reductions,
            unroll_factors.completely_unrolled(self.info, self.target, self.tile, reductions),
            tuple(nest.packs),
            collapsed,
            grain,
            unroll_steps=self._at_once(nest, reductions),
            nontemporal=self.is_nontemporal(nest.loops),
            prefetches=nest.prefetches,
            vectors_per_register=self.tile.vectors_per_register,
        )

    def _stationary_panel(self, reductions: tuple[str, ...], rows_outside: bool, packed: bool) -> Blocking:
        """A panel of one factor, packed or in place, for all of the other factor in turn."""
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
        levels = self._levels(known.batch)
        rest = tuple(i for i in known.exclusive_iterators(standing) if i not in swept)
        levels += self._as_read(rest, standing) if swept else self._levels(rest, standing if packed else None)
        panels = [levels.pop()] if together > 1 else []
        levels += [TileLoop(p.iterator, together * p.size) for p in panels] or self._sweep.blocks(swept)
        panel = PackStep(standing.side, len(levels))
        count = prod(num_tiles(known.extent(level.iterator), level.size) for level in levels)
        turned = standing.step(known.vector) != 1
        once = not packed or (count == 1 and not blocks and not swept)  # all shares have one panel
        if self.parallel and count < (BALANCED_CHUNKS if once else BALANCED_CHUNKS // 2) and not panels:
            uses = 1 if once else (PACKED_TRANSPOSED_USES if turned else PACKED_USES)
            levels += self._share(known.exclusive_iterators(passing), -(-BALANCED_CHUNKS // count), uses)
        outer = len(levels)
        levels += blocks
        packs = [PackStep(standing.side, len(levels))] if packed else []
        rows = 1 if not packed or count > 1 else (OWN_PACKED_TRANSPOSED_USES if turned else OWN_PACKED_USES)
        ahead = standing is known.vector_operand and not (packed or blocks or panels) and self._prefetchable_in_place()
        inner = [*self._levels(swept), *self._levels(known.exclusive_iterators(passing)), *panels]
        return Blocking([*levels, *inner], outer, packs, rows, (panel,) if ahead else ())

    def _panels_kept_together(
        self, passing: Factor, reductions: tuple[str, ...], near: int
    ) -> tuple[int, list[TileLoop]]:
        """How many panels along the lanes stay in cache while the other factor streams past, and their block of a
        reduction.

        If the other factor is far, as many as fit; otherwise about `near`.
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
        """How many panels are copied from long runs of memory where a far cache brings short ones slowly."""
        known, moving = self.info, self.info.vector_operand
        run = self._panel_width() * moving.bytes
        straight = moving.step(known.vector) == 1 and self.target.has_mesh_llc
        return num_tiles(SHORT_RUN_BYTES, run) if straight else 1

    def _block_output_order(self) -> Blocking:
        """Panels of the moving factor, all that fit into L2, for a large part of the still factor.

        The rows of the register tile follow the output; all panels meet one range of them before the next.
        """
        known, tile = self.info, self.tile
        levels = self._levels(known.batch)
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
        stays = panel <= self.target.cache[0] and self._panel_width() < extent  # in the first cache, for all runs
        shares = self.parallel and once and not (stays or rows or levels) and runs >= BALANCED_CHUNKS
        if self.parallel and not shares:
            room = min(room, max(1, num_tiles(extent, self._panel_width()) * count // FEW_CHUNKS))
        if room * self._panel_width() < extent:
            levels.append(TileLoop(known.vector, room * self._panel_width()))
        if shares:
            levels += self._share((known.op.iterator(known.output_unit_iter),), BALANCED_CHUNKS, 1)
        outer = len(levels)
        inner = [*self._loops_around_panels(rows, panel), known.op.iterator(known.output_unit_iter)]
        levels += [TileLoop(i.name, tile.size(i.name)) for i in inner]
        return Blocking(levels, outer, [PackStep(known.vector_operand.side, outer)])

    def _loops_around_panels(self, rows: Sequence[Iterator], panel: int) -> list[Iterator]:
        """The loops over rows around those over panels, unless a panel stays in L1.

        If the last cache is far, such a panel should meet all the rows that L2 holds, so that the output is written in
        few places at a time.
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
        """Whether transposed panels of the moving factor hold all of an iterator, for long runs."""
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
        """A packed block of the still factor in the second cache, for all panels of the moving one."""
        known = self.info
        levels = [*self._levels(known.batch), self._packed_block(pack_moving)]
        blocks = self._reduction_block(reductions, PACKED_BLOCK_STEPS)
        alone = prod(num_tiles(known.extent(level.iterator), level.size) for level in levels) < 2
        if self.parallel and alone:
            levels += self._share(
                known.exclusive_iterators(known.vector_operand), BALANCED_CHUNKS, REPACKED_USES if blocks else 1
            )
        outer = len(levels)
        levels += blocks
        packs = [PackStep(known.broadcast_operand.side, len(levels))]
        levels += self._levels(known.exclusive_iterators(known.vector_operand))
        if pack_moving:
            packs.append(PackStep(known.vector_operand.side, len(levels)))
        rows = OWN_PACKED_USES if alone and not blocks else 1
        return Blocking(
            [*levels, *self._levels(known.exclusive_iterators(known.broadcast_operand))], outer, packs, rows
        )

    # --- loops ---

    def _levels(self, iterators: tuple[Iterator, ...], packed: Factor | None = None) -> list[TileLoop]:
        """The register-tile levels of `iterators`: plain loops, then tiled ones, the lanes last.

        packed: plain loops that move this factor less come inside those that move it more.
        """
        vector = self.info.vector

        def order(i: Iterator) -> tuple[bool, bool, int]:
            return i.name == vector, self.tile.size(i.name) > 1, -abs(packed.step(i.name) or 0) if packed else 0

        ordered = sorted(iterators, key=order)
        return [TileLoop(i.name, self.tile.size(i.name)) for i in ordered]

    def _as_read(self, iterators: tuple[Iterator, ...], packed: Factor) -> list[TileLoop]:
        """The register-tile levels around panels from far memory: consecutive runs are read soon after each other."""
        if not is_in_mesh_llc(packed.stored * packed.bytes, self.target):
            return self._levels(iterators, packed)
        ordered = sorted(iterators, key=lambda i: -abs(packed.step(i.name) or 0))
        return [TileLoop(i.name, self.tile.size(i.name)) for i in ordered]

    def _at_once(self, nest: Blocking, reductions: tuple[str, ...]) -> int:
        """Steps of the sum per iteration: as many as there are register tiles to ask for a share of the rows each."""
        if nest.prefetches:
            return min(MAX_UNROLLED_STEPS, 1 << (self._row_tiles().bit_length() - 1))
        return unroll_factors.steps_per_iteration(self.info, self.target, reductions, nest.loops, nest.packs)

    def row_stationary(self) -> bool:
        """Whether the still factor's panels should stay in cache while the moving factor streams past."""
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

    def _large(self, factor: Factor) -> bool:
        """Whether the operand of one iteration of the shared loops exceeds L2."""
        return self._footprint(factor) > self.target.cache[1] * 3 // 4

    def _footprint(self, factor: Factor) -> int:
        """Bytes of a factor that one iteration of the shared loops reads."""
        shared = {i.name for i in self.info.batch}
        domain = prod(i.extent for i in self.info.op.iterators if i.name in factor.iterators and i.name not in shared)
        access = loads_in(self.info.op.factors[factor.side.value])[0]
        return min(domain, prod(access.buffer.shape)) * factor.bytes

    # --- copies ---

    def packs_vector_operand(self) -> bool:
        """Whether vectors come from a panel: always unless they are contiguous; otherwise if its rows are far apart."""
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
        apart = self._strided_beyond(moving, bound, width) or self._outruns_next_cache(0)
        pays = (row_tiles >= 12 and apart) or (row_tiles >= 4 and self._outruns_next_cache(1))
        return pays and not self._prefetchable_in_place()

    def _outruns_next_cache(self, level: int) -> bool:
        """Whether register tiles with short rows in place leave a cache, and need lines faster than L2 delivers them.

        Rows that begin anywhere in a line touch one more than a panel has.
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
        """Whether rows of the moving factor are read in place, and the next panel's are brought from a far cache."""
        known, moving = self.info, self.info.vector_operand
        if self.target.private_caches == self.target.cache or len(known.reductions) != 1:
            return False
        if not self._large(moving) and not self.is_nontemporal():  # the output would evict it
            return False
        if (
            not moving.is_plain_load
            or moving.step(known.vector) != 1
            or not self._strided_beyond(moving, PACKED_STRIDE_BYTES, self._panel_width())
        ):
            return False
        if any(self.tile.size(i.name) > 1 for i in known.exclusive_iterators(moving) if i.name != known.vector):
            return False
        apart = abs(moving.step(known.reductions[-1]) or 0) * moving.bytes // CACHE_LINE_BYTES
        uses = prod(i.extent for i in known.exclusive_iterators(known.broadcast_operand))
        sets, ways = L1_SETS // gcd(apart, L1_SETS), self.target.cache[0] // (L1_SETS * CACHE_LINE_BYTES)
        return uses <= MAX_USES_IN_PLACE and (sets >= PREFETCHED_ROW_SETS or sets * ways >= known.k_size)

    def packs_broadcast_operand(self, stands: bool) -> bool:
        """Whether scalars come from a panel: if each is converted, or memory would deliver them slowly.

        stands: a panel of them stays in cache for all of the moving factor, and so is read once.
        """
        known, still = self.info, self.info.broadcast_operand
        if known.transposes_output or known.vector in still.iterators or not known.exclusive_iterators(still):
            return False
        width = prod(i.extent for i in known.exclusive_iterators(known.vector_operand))
        if not stands and width >= PACKED_USES and self._reads_short_runs(still):
            return True
        if width < PACKED_SCALARS_PANELS * self._panel_width():
            return False
        return (
            not still.is_plain_load
            or self._conflicts_in_l1()
            or self._strided_beyond(still, PACKED_STRIDE_BYTES_IN_L2, 1)
            or self._meets_once()
        )

    def _meets_once(self) -> bool:
        """Whether blocks of a long sum come from a far cache only once: L2 has room for all results."""
        known = self.info
        far = all(is_in_mesh_llc(self._footprint(f), self.target) for f in known.factors)
        results = known.output_size // prod(i.extent for i in known.batch)
        return far and results <= self.target.cache[1] // 2

    def _conflicts_in_l1(self) -> bool:
        """Whether the rows of a register tile compete for few lines of the first cache."""
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
            if 2 * rows > lines and rows > 8 * self._vectors():
                return True
        return self._refetched_from_l2()

    def _refetched_from_l2(self) -> bool:
        """Whether a register tile refetches from L2 the lines that its neighbors just read: a line has scalars of many.

        The rows of all steps compete for few lines of L1.
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

    def _vectors(self) -> int:
        """Vectors of a register tile that one row meets."""
        columns = prod(self.tile.size(i.name) for i in self.info.exclusive_iterators(self.info.vector_operand))
        return max(1, columns // self.tile.width)

    def _reads_short_runs(self, factor: Factor) -> bool:
        """Whether register tiles read a large factor in runs too short for memory, again for every panel.

        Consecutive rows are one run.
        """
        if not self._large(factor):
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

    def _strided_beyond(self, factor: Factor, distance: int, width: int) -> bool:
        """Whether one step of the innermost long reduction moves the factor at least `distance` bytes."""
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

    def _longest(self, iterators: tuple[Iterator, ...]) -> Iterator:
        """The iterator with the most tiles."""
        return max(iterators, key=lambda i: num_tiles(i.extent, self.tile.size(i.name)))

    def _share(self, iterators: tuple[Iterator, ...], parts: int, uses: int) -> list[TileLoop]:
        """A block of one of `iterators` that makes about `parts` shares, each with `uses` points of them or more."""
        if not iterators:
            return []
        longest = self._longest(iterators)
        size = self.tile.size(longest.name)
        others = prod(i.extent for i in iterators if i is not longest)
        block = max(num_tiles(longest.extent, parts), num_tiles(uses, others))
        block = num_tiles(block, size) * size
        return [TileLoop(longest.name, block)] if block < longest.extent else []

    def _packed_block(self, pack_moving: bool) -> TileLoop:
        """Rows of the still factor that are packed at once."""
        rows = self.info.exclusive_iterators(self.info.broadcast_operand)
        longest = self._longest(rows)
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
        """A block of a reduction of at most `most` steps whose panel fits the second cache; of the outermost if any."""
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
        """Cache lines that a block of a reduction reads for each line that it needs, of all factors together."""
        size = block.size * self.info.op.dtype.size
        unit = sum(f.step(block.iterator) == 1 for f in self.info.factors)
        return unit * (num_tiles(size, CACHE_LINE_BYTES) * CACHE_LINE_BYTES / size - 1)

    def _reads_output(self) -> bool:
        """Whether the epilogue reads the old output, which partial sums would overwrite."""
        op = self.info.op
        return op.epilogue is not None and any(a.buffer.name == op.output.buffer.name for a in loads_in(op.epilogue))

    def is_nontemporal(self, levels: Sequence[TileLoop] = ()) -> bool:
        """Whether to store the output non-temporally: whole, complete lines, and too many to stay in a cache."""
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
        """Whether results that a far cache would take are more than the sums before them hide."""
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

    def _parallel(self, levels: list[TileLoop]) -> tuple[int, int]:
        """How many of `loops` make the parallel loop, and its grain."""
        op = self.info.op
        if not self.parallel or not levels or op.multiplications < 2 * THREAD_FMAS:
            return 0, 1
        count = prod(num_tiles(op.extent(level.iterator), level.size) for level in levels)
        if count < 2:
            return 0, 1
        return len(levels), max(1, THREAD_FMAS * count // op.multiplications)
