"""Unroll factors of the reductions in register tiles."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

from ...target import CpuTarget
from ...thresholds import MANY_STEPS, MAX_UNROLLED_PANEL_STEPS, MAX_UNROLLED_STEPS, UNROLLED_REDUCTION
from ..analysis.contraction_info import ContractionInfo
from ..analysis.window_reuse import scalars_in_registers
from ..plan import PackStep, TileLoop
from .tile_cost import RegisterTile


def count_unrolled_reductions(
    known: ContractionInfo, target: CpuTarget, tile: RegisterTile, reductions: Sequence[str]
) -> int:
    """How many of the innermost `reductions` are unrolled completely: 0 or 1."""
    if not reductions or known.extent(reductions[-1]) > UNROLLED_REDUCTION:
        return 0
    points = {name: np.array([float(size)]) for name, size in tile.sizes}
    return int(
        not known.transposes_output or scalars_in_registers(known, target, reductions[-1], tile.width, points)[0] > 0
    )


def steps_per_iteration(
    known: ContractionInfo,
    target: CpuTarget,
    reductions: Sequence[str],
    levels: Sequence[TileLoop],
    packs: Sequence[PackStep],
) -> int:
    """The unroll factor of the innermost reduction that keeps a loop.

    The hardware prefetcher follows each load instruction from one iteration to the next. With more steps per iteration
    it runs further ahead, which helps if the scalars of a long reduction are read in place from a distant cache.
    """
    still = known.broadcast_operand
    touched = known.output_size + sum(f.stored * f.bytes for f in known.factors)
    if (
        touched <= target.writeback_limit_bytes
        or known.transposes_output
        or len(reductions) != 1
        or still.step(reductions[0]) != 1
    ):
        return 1
    if known.k_size < MANY_STEPS or any(pack.side is still.side for pack in packs):
        return 1
    most = MAX_UNROLLED_PANEL_STEPS if packs else MAX_UNROLLED_STEPS
    return gcd(most, known.k_size, *(level.size for level in levels if level.iterator == reductions[0]))
