"""Plans with transposed output panels, for a large factor that is contiguous along another iterator than the output.

The lanes run along the factor's contiguous iterator, and the results are transposed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator as Generator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from ...machine import (
    CACHE_LINE_BYTES,
    MESH_PREFETCHED_RUN_BYTES,
    MESH_RUN_CYCLES,
    MESH_STALL_CYCLES,
    NONTEMPORAL_RUN_CYCLES,
)
from ...target import CpuTarget
from ...thresholds import MAX_UNROLLED_STEPS
from ..analysis.contraction_info import ContractionInfo, analyze_contraction
from ..cost.tile_cost import RegisterTile, fills_whole_lines, is_beyond_private_caches
from ..language.finalize import default_grain_size
from ..lower.output_panel import with_panel_output
from ..lower.tile import balanced_block, num_tiles
from ..op import Iterator, loads_in
from ..plan import PackStep, Plan, TileLoop

MAX_WHOLE_RUN_VECTORS, PARTIAL_RUN_VECTORS = 6, 4
"""Vectors of a register tile along the factor's runs: a whole run up to the first number, else the second."""


def transposed_output_plans(known: ContractionInfo, target: CpuTarget, *, parallel: bool) -> Generator[Plan]:
    """A plan with an output panel, and one that also packs the factor, each with the cheapest block sizes.

    known: the facts with the lanes along the output. No plans if the factor is not beyond the private caches, or if the
    output is not smaller than the factor.
    """
    moving = known.vector_operand
    run = next(
        (i for i in known.exclusive_iterators(moving) if moving.step(i.name) == 1 and i.name != known.output_unit_iter),
        None,
    )
    uses = prod(i.extent for i in known.exclusive_iterators(known.broadcast_operand))
    if (
        run is None
        or known.transposes_output
        or known.vector in known.broadcast_operand.iterators
        or uses < 2
        or uses >= known.k_size
    ):
        return
    lanes = target.lanes(known.bits)
    if (
        not moving.is_plain_load
        or not is_beyond_private_caches(moving.stored * moving.bytes, target)
        or min(run.extent, known.extent(known.output_unit_iter)) < lanes
        or known.op.pairs
    ):
        return
    if known.op.initial is not None and loads_in(known.op.initial):
        return
    crossed = _TransposedOutputPlanner(
        known, analyze_contraction(with_panel_output(known.op, run.name), run.name), target, run, parallel
    )
    for packed in (False, True):
        blocks = min(crossed.blocks(), key=lambda blocks: crossed.run_start_cycles(blocks, packed), default=None)
        if blocks is not None:
            yield crossed.plan(blocks, packed)


@dataclass(frozen=True, slots=True)
class _TransposedOutputPlanner:
    """Makes the plans for one op.

    Attributes:
        known: the facts with the lanes along the output.
        inner: the facts with the panel as the output and the lanes along `run`.
        run: the iterator along which the vector operand is contiguous.
    """

    known: ContractionInfo
    inner: ContractionInfo
    target: CpuTarget
    run: Iterator
    parallel: bool

    @property
    def tile(self) -> RegisterTile:
        """The register tile: short runs of the factor as a whole, and as many rows as fit into registers."""
        lanes = self.target.lanes(self.known.bits)
        vectors = num_tiles(self.run.extent, lanes)
        vectors = vectors if vectors <= MAX_WHOLE_RUN_VECTORS else PARTIAL_RUN_VECTORS
        row = max(self.known.exclusive_iterators(self.known.broadcast_operand), key=lambda i: i.extent)
        most = max(1, (self.target.vector_registers - 2) // vectors - 1)
        return RegisterTile(lanes, ((self.run.name, vectors * lanes), (row.name, balanced_block(row.extent, most))))

    def blocks(self) -> Generator[dict[str, int]]:
        """Block sizes of the factor's own iterators whose output panel fits 5/8 of L2."""
        others = [i for i in self.known.exclusive_iterators(self.known.vector_operand) if i.name != self.run.name]
        line = CACHE_LINE_BYTES // self.known.output_bytes
        rows = prod(i.extent for i in self.known.exclusive_iterators(self.known.broadcast_operand)) * self.run.extent
        room = self.target.cache[1] * 5 // 8 // (rows * self.known.bits // 8)
        for sizes in product(
            *(_list_block_sizes(i.extent, line if i.name == self.known.output_unit_iter else 1) for i in others)
        ):
            if prod(sizes) <= room:
                yield {i.name: size for i, size in zip(others, sizes, strict=True)}

    def run_start_cycles(self, blocks: Mapping[str, int], packed: bool) -> float:
        """Cycles to start the runs of memory that blocks of these sizes read and write."""
        known, moving, points = self.known, self.known.vector_operand, {**self.known.extents, **blocks}
        read, written = _count_run_elements(moving.nearest, points), _count_run_elements(known.output_strides, points)
        wait = (
            MESH_STALL_CYCLES
            if not packed
            else MESH_RUN_CYCLES
            if read * moving.bytes < MESH_PREFETCHED_RUN_BYTES
            else 0.0
        )
        return wait * moving.stored / read + NONTEMPORAL_RUN_CYCLES * prod(i.extent for i in known.parallel) / written

    def plan(self, blocks: dict[str, int], packed: bool) -> Plan:
        known, tile, side = self.known, self.tile, self.known.vector_operand.side
        by_step = sorted(blocks, key=lambda name: -abs(known.vector_operand.step(name) or 0))
        outer = [TileLoop(i.name) for i in known.batch] + [TileLoop(name, blocks[name]) for name in by_step]
        points = [TileLoop(name) for name in by_step if blocks[name] > 1]
        width = tile.size(self.run.name)
        # The prefetched data is the next part of a run or, if tiles have whole runs, the next run.
        runs = [TileLoop(self.run.name, width)]
        around = [*points, *runs] if packed or width < self.run.extent else [*runs, *points]
        inner = [*around, *(TileLoop(i.name, tile.size(i.name)) for i in self.rows)]
        count = prod(num_tiles(known.extent(level.iterator), level.size) for level in outer)
        collapsed = len(outer) if self.parallel and count > 1 else 0
        ahead: tuple[PackStep, ...] = ()
        if not packed and (points or width < self.run.extent) and len(known.reductions) == 1:
            ahead = (PackStep(side, len(outer) + len(around)),)
        stored = {name: np.array(float(size)) for name, size in blocks.items()}
        touched = known.output_size + sum(f.stored * f.bytes for f in known.factors)
        return Plan(
            self.run.name,
            tile.lanes,
            (*outer, *inner),
            self.inner.reductions,
            packs=(PackStep(side, len(outer) + min(1, len(points))),) if packed else (),
            parallel_depth=collapsed,
            grain=default_grain_size(known.op, count) if collapsed else 1,
            unroll_steps=self._steps if ahead else 1,
            nontemporal=touched > self.target.reuse_limit_bytes and bool(fills_whole_lines(known, self.target, stored)),
            prefetches=ahead,
            output_panel_depth=len(outer),
        )

    @property
    def _steps(self) -> int:
        """Unroll factor of the reduction: an iteration prefetches a row; the tiles that use a panel share the rows."""
        count = prod(num_tiles(i.extent, self.tile.size(i.name)) for i in self.rows)
        return min(MAX_UNROLLED_STEPS, 1 << (count.bit_length() - 1))

    @property
    def rows(self) -> list[Iterator]:
        """The loops over the other factor, the register tile's innermost."""
        return sorted(
            self.known.exclusive_iterators(self.known.broadcast_operand), key=lambda i: self.tile.size(i.name)
        )


def _count_run_elements(steps: Sequence[tuple[str, int]], points: Mapping[str, int]) -> int:
    """Length in elements of the contiguous runs that a box of `points` covers."""
    run = 1
    for name, step in steps:
        run *= points[name] if step == run else 1
    return run


def _list_block_sizes(extent: int, unit: int) -> list[int]:
    """The multiples of `unit` that divide `extent`, and `extent` itself."""
    return [*(n for n in range(unit, extent, unit) if extent % n == 0), extent]
