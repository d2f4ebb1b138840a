"""The choices around a register tile with some of them made already, and all ways to make these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ..target import Target
from .chooser import Chooser
from .cost import RegisterTile
from .facts import Facts
from .plan import Plan


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
