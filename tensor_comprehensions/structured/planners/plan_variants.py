"""Variants of `BlockingHeuristic`: with some decisions forced, or for special loop orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from operator import mul

from ...target import CpuTarget
from ...thresholds import ADDED_SUM_STEPS, BALANCED_CHUNKS, FEW_CHUNKS, PANELS_IN_L2
from ..analysis.contraction_info import ContractionInfo
from ..cost.tile_cost import RegisterTile
from ..lower.tile import balanced_block, num_tiles
from ..op import Iterator as Dimension
from ..plan import PackStep, Plan, Side, TileLoop
from .blocking import Blocking, BlockingHeuristic


@dataclass(frozen=True, slots=True)
class ForcedBlocking(BlockingHeuristic):
    """`BlockingHeuristic` with some decisions forced; None leaves a decision to the heuristic."""

    pack_vector_operand: bool | None = None
    pack_broadcast_operand: bool | None = None
    rows_stationary: bool | None = None

    def packs_vector_operand(self) -> bool:
        return (
            BlockingHeuristic.packs_vector_operand(self)
            if self.pack_vector_operand is None
            else self.pack_vector_operand
        )

    def packs_broadcast_operand(self, rows_outside: bool) -> bool:
        if not self.info.exclusive_iterators(self.info.broadcast_operand):
            return False
        return (
            BlockingHeuristic.packs_broadcast_operand(self, rows_outside)
            if self.pack_broadcast_operand is None
            else self.pack_broadcast_operand
        )

    def row_stationary(self) -> bool:
        return BlockingHeuristic.row_stationary(self) if self.rows_stationary is None else self.rows_stationary


def enumerate_packings(
    facts: ContractionInfo,
    target: CpuTarget,
    tile: RegisterTile,
    parallel: bool,
    packs_moving: Sequence[bool] = (True, False),
) -> Iterator[Plan]:
    """Plans that differ in the packed factors and in the stationary factor.

    packs_moving: which choices of packing the vector operand to try.
    """
    for moving, still, outside in product(packs_moving, (True, False), (True, False)):
        if (moving and outside) or (tile.vectors_per_register > 1 and not moving):
            continue
        try:
            yield ForcedBlocking(facts, target, tile, parallel, moving, still, outside).plan()
        except ValueError:  # no iterator allows packing a block
            continue


@dataclass(frozen=True, slots=True)
class PackBothBlocking(BlockingHeuristic):
    """Packs both factors first, and loops over the output in memory order.

    One panel along the lanes stays in L1 while the rows that are nearest in the output stream past.
    """

    def plan(self) -> Plan:
        known, apart = self.info, dict(self.info.output_strides)

        def order(i: Dimension) -> int:
            return -apart.get(i.name, 0)

        lanes, nearest = (
            known.op.iterator(known.vector),
            max(known.exclusive_iterators(known.broadcast_operand), key=order),
        )
        outside = sorted((i for i in known.parallel if i not in (lanes, nearest)), key=order)
        levels = [TileLoop(i.name, self.tile.size(i.name)) for i in (*outside, lanes, nearest)]
        counts = accumulate((num_tiles(known.extent(level.iterator), level.size) for level in levels), mul)
        outer = next((d for d, count in enumerate(counts, 1) if count >= BALANCED_CHUNKS), len(levels))
        nest = Blocking(levels, outer, [PackStep(Side.LEFT, 0), PackStep(Side.RIGHT, 0)])
        return self._finish_plan(nest, self._order_reductions(known.reductions, nest))


@dataclass(frozen=True, slots=True)
class LaneSumBlocking(BlockingHeuristic):
    """Blocking for lanes that keep separate partial sums: both factors depend on the lanes.

    The outermost reduction is blocked around all register tiles, so that the operands of a block stay in cache. The
    factor with more rows is outside, so that the smaller one is reused.
    """

    def plan(self) -> Plan:
        known, reductions = self.info, self.info.reductions
        short, long = sorted(
            (known.exclusive_iterators(f) for f in known.factors), key=lambda side: prod(i.extent for i in side)
        )
        shares = self._make_chunk_levels(long, FEW_CHUNKS, 1) if self.parallel else []
        levels = [*self._make_levels(known.batch), *shares]
        outer, extent = len(levels), known.extent(reductions[0])
        inner = known.k_size // extent
        rows = sum(prod(i.extent for i in known.exclusive_iterators(f)) * f.bytes for f in known.factors)
        near = PANELS_IN_L2 * self.target.cache[0] // (rows * known.extent(known.vector) * inner)
        block = max(near, num_tiles(ADDED_SUM_STEPS, inner))
        exact = known.op.output.buffer.type.dtype == known.op.dtype and not self._reads_output()
        if block < extent and exact:  # sums of a block are kept in the output
            levels.append(TileLoop(reductions[0], balanced_block(extent, block)))
        nest = Blocking([*levels, *self._make_levels(long), *self._make_levels(short)], outer, [])
        return self._finish_plan(nest, self._order_reductions(reductions, nest))


def fits_both_packed_in_l2(facts: ContractionInfo, target: CpuTarget) -> bool:
    """Whether both factors can be packed completely, and L2 holds both copies."""
    copied = sum(prod(facts.extent(name) for name in f.iterators) for f in facts.factors) * facts.op.dtype.size
    rows = (
        not facts.transposes_output
        and facts.vector not in facts.broadcast_operand.iterators
        and facts.exclusive_iterators(facts.broadcast_operand)
    )
    return bool(rows) and copied <= target.cache[1]
