"""The plans worth measuring for an op, best first by the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ..errors import CannotLower
from ..target import Target
from . import crossed
from .apply import plan_of
from .cost import RegisterTile
from .describe import pipeline_of
from .estimate import estimate, expected
from .expert import TILES, prefer, rankings
from .insistent import all_ways
from .normalise import normalise
from .op import StructuredOp
from .pipeline import Pipeline
from .plan import Plan
from .ranking import Ranking


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
    views = rankings(op, target)
    default = prefer(views, target, parallel=parallel)
    cycles = {default: estimate(op, default, target)}
    tiles: dict[Plan, RegisterTile] = {}
    for view in views:
        found: dict[Plan, RegisterTile] = {}
        for tile, plan in _variants(view, target, parallel):
            if plan not in cycles:
                found.setdefault(plan, tile)
        tiles |= found
        cycles |= zip(found, expected(view.facts, [*found], target), strict=True)
    for plan in crossed.plans(views[0].facts, target, parallel=parallel):
        if plan != default:
            cycles[plan], tiles[plan] = estimate(op, plan, target), RegisterTile(plan.lanes, ())
    ranked = sorted(tiles, key=cycles.__getitem__)
    possible = (plan for plan in _varied(ranked, tiles) if _possible(op, plan, target))
    chosen = [default, *islice(possible, count - 1)]
    return tuple(Candidate(pipeline_of(plan, op), cycles[plan]) for plan in chosen)


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


def _variants(view: Ranking, target: Target, parallel: bool) -> Iterator[tuple[RegisterTile, Plan]]:
    """Plans that differ in the register tile, in what is packed, and in which factor's panel stands still."""
    for tile in view.several(TILES):
        for plan in all_ways(view.facts, target, tile, parallel):
            yield tile, plan
