"""How far sums in register tiles are unrolled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import gcd, prod

from ..target import Target
from .cost import RegisterTile
from .facts import Facts
from .plan import Level, Pack

UNROLL = 4
"""Innermost reductions up to this long are unrolled."""
STEPS, STEPS_OF_PANELS, MANY_STEPS = 8, 4, 64
"""Most steps of a sum per iteration, and beside packed panels, where more gain little and take long to compile; steps
of a sum from which on several pay."""


def complete(known: Facts, target: Target, tile: RegisterTile, reductions: Sequence[str]) -> int:
    """How many of the innermost `reductions` are unrolled completely."""
    if not reductions or known.extent(reductions[-1]) > UNROLL:
        return 0
    return int(not known.turned or _shares_scalars(known, target, tile, reductions[-1]))


def _shares_scalars(known: Facts, target: Target, tile: RegisterTile, window: str) -> bool:
    """Whether rows at neighbouring taps share scalars, and the register tile leaves registers to keep them in."""
    still = known.still
    rows = [(name, size) for name, size in tile.sizes if name in still.used and size > 1]
    steps = [still.step(name) for name in (window, *(name for name, _ in rows))]
    taps: Counter[int] = Counter()
    for at in product(range(known.extent(window)), *(range(size) for _, size in rows)):
        taps[sum((step or 0) * n for step, n in zip(steps, at, strict=True))] += 1
    kept = sum(count > 1 for count in taps.values())
    vectors = max(1, prod(tile.size(i.name) for i in known.only(known.moving)) // tile.width)
    return None not in steps and kept > 0 and tile.cells + vectors + kept < target.vector_registers


def at_once(
    known: Facts, target: Target, reductions: Sequence[str], levels: Sequence[Level], packs: Sequence[Pack]
) -> int:
    """Steps of the sum over `reductions` per iteration.

    Scalars of a long sum that are read where they are come from a far cache line by line. Prefetching follows each load
    of the code from one iteration to the next: with more steps it is further ahead.
    """
    still = known.still
    touched = known.output_size + sum(f.stored * f.bytes for f in known.factors)
    if touched <= target.far or known.turned or len(reductions) != 1 or still.step(reductions[0]) != 1:
        return 1
    if known.steps < MANY_STEPS or any(pack.side is still.side for pack in packs):
        return 1
    most = STEPS_OF_PANELS if packs else STEPS
    return gcd(most, known.steps, *(level.size for level in levels if level.iterator == reductions[0]))
