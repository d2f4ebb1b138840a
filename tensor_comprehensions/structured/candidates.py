"""The plans worth measuring for an op, best first by the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..errors import CannotLower
from ..target import Target
from .apply import pipeline_of, plan_of
from .cost import RegisterTile, register_tiles
from .estimate import estimate
from .expert import Chooser, choose
from .facts import Facts, facts
from .normalise import normalise
from .op import StructuredOp
from .pipeline import Pipeline
from .plan import Plan

TILES = 6
"""Register tiles that are tried."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline and what the model thinks of it. cycles: of one core."""

    pipeline: Pipeline
    cycles: float


def candidates(op: StructuredOp, target: Target, count: int, *, parallel: bool = True) -> tuple[Candidate, ...]:
    """At most `count` different pipelines for `op`; the first is what runs untuned, the others follow by the model.

    Raises CannotLower where no register tile computes the op.
    """
    op = normalise(op)
    default = choose(op, target, parallel=parallel)
    known: dict[Plan, float] = {default: estimate(op, default, target)}
    tiles: dict[Plan, RegisterTile] = {}
    for tile, plan in _variants(op, target, parallel):
        if plan not in known and _possible(op, plan, target):
            known[plan], tiles[plan] = estimate(op, plan, target), tile
    ranked = sorted(tiles, key=lambda plan: known[plan])
    chosen = [default, *_varied(ranked, tiles)]
    return tuple(Candidate(pipeline_of(plan, op), known[plan]) for plan in chosen[:count])


def _varied(ranked: list[Plan], tiles: dict[Plan, RegisterTile]) -> list[Plan]:
    """`ranked` in rounds: the best plan of each register tile, then the second best of each, and so on."""
    seen: dict[RegisterTile, int] = {}
    rounds: list[tuple[int, Plan]] = []
    for plan in ranked:
        tile = tiles[plan]
        rounds.append((seen.get(tile, 0) // 2, plan))
        seen[tile] = seen.get(tile, 0) + 1
    return [plan for _, plan in sorted(rounds, key=lambda r: r[0])]


def _possible(op: StructuredOp, plan: Plan, target: Target) -> bool:
    try:
        return plan_of(pipeline_of(plan, op), op, target) == plan
    except CannotLower:
        return False


def _variants(op: StructuredOp, target: Target, parallel: bool) -> Iterator[tuple[RegisterTile, Plan]]:
    """Plans that differ in the register tile, in what is packed, and in which factor's panel stands still."""
    answers = (None, True, False)
    for known in _lanes(op, target):
        for tile in register_tiles(known, target, TILES):
            for moving, still, outside in product(answers, answers, answers):
                chooser = Insistent(known, target, tile, parallel, moving, still, outside)
                try:
                    yield tile, chooser.plan()
                except ValueError:  # there is no iterator to pack a block of
                    continue


def _lanes(op: StructuredOp, target: Target) -> Iterator[Facts]:
    """Lanes along the output's contiguous iterator, and along the longest of the other factor."""
    known = facts(op)
    yield known
    rows = [i for i in known.only(known.still) if 2 * i.extent >= target.lanes(known.bits)]
    if rows and known.vector not in known.still.used:
        yield facts(op, max(rows, key=lambda i: i.extent).name)


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
