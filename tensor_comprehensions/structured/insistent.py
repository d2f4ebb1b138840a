"""The choices around a register tile with some of them made already, and all ways to make these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from operator import mul

from ..target import Target
from .chooser import CHUNKS, Chooser, Nest
from .cost import RegisterTile
from .facts import Facts
from .op import Iterator as Dimension
from .plan import Level, Pack, Plan, Side
from .tile import tiles


@dataclass(frozen=True, slots=True)
class Insistent(Chooser):
    """The expert with some of its decisions made for it; None leaves one to it."""

    moving: bool | None = None
    still: bool | None = None
    outside: bool | None = None

    def packs_moving(self) -> bool:
        return Chooser.packs_moving(self) if self.moving is None else self.moving

    def packs_still(self, rows_outside: bool) -> bool:
        if not self.facts.only(self.facts.still):
            return False
        return Chooser.packs_still(self, rows_outside) if self.still is None else self.still

    def rows_outside(self) -> bool:
        return Chooser.rows_outside(self) if self.outside is None else self.outside


def all_ways(
    facts: Facts, target: Target, tile: RegisterTile, parallel: bool, packs_moving: Sequence[bool] = (True, False)
) -> Iterator[Plan]:
    """Plans that differ in what is packed, the moving factor as told, and in which factor's panel stands still."""
    for moving, still, outside in product(packs_moving, (True, False), (True, False)):
        if (moving and outside) or (tile.joined > 1 and not moving):
            continue
        try:
            yield Insistent(facts, target, tile, parallel, moving, still, outside).plan()
        except ValueError:  # there is no iterator to pack a block of
            continue


@dataclass(frozen=True, slots=True)
class Whole(Chooser):
    """The expert where both factors are copied first, and the output is gone through in the order of memory.

    One panel along the lanes stays in the first cache while the rows that are nearest in the output pass by.
    """

    def plan(self) -> Plan:
        known, apart = self.facts, dict(self.facts.output_steps)

        def order(i: Dimension) -> int:
            return -apart.get(i.name, 0)

        lanes, nearest = known.op.iterator(known.vector), max(known.only(known.still), key=order)
        outside = sorted((i for i in known.parallel if i not in (lanes, nearest)), key=order)
        levels = [Level(i.name, self.tile.size(i.name)) for i in (*outside, lanes, nearest)]
        counts = accumulate((tiles(known.extent(level.iterator), level.size) for level in levels), mul)
        outer = next((d for d, count in enumerate(counts, 1) if count >= CHUNKS), len(levels))
        nest = Nest(levels, outer, [Pack(Side.LEFT, 0), Pack(Side.RIGHT, 0)])
        return self._finished(nest, self._walked(known.reductions, nest))


def whole_pays(facts: Facts, target: Target) -> bool:
    """Whether the second cache holds copies of both factors."""
    copied = sum(prod(facts.extent(name) for name in f.used) for f in facts.factors) * facts.op.dtype.size
    rows = not facts.turned and facts.vector not in facts.still.used and facts.only(facts.still)
    return bool(rows) and copied <= target.cache[1]
