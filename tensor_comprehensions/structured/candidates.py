"""The plans worth measuring for an op, best first by the cost model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
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
from .experts import log, ttgt
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
    kinds: dict[Plan, Hashable] = {}
    for view in views:
        found: dict[Plan, RegisterTile] = {}
        for tile, plan in _variants(view, target, parallel):
            if plan not in cycles:
                found.setdefault(plan, tile)
        kinds |= found
        cycles |= zip(found, expected(view.facts, [*found], target), strict=True)
    for kind, plan in _others(op, views[0], target, parallel):
        if plan not in cycles:
            cycles[plan], kinds[plan] = estimate(op, plan, target), kind
    ranked = sorted(kinds, key=cycles.__getitem__)
    possible = (plan for plan in _varied(ranked, kinds) if _possible(op, plan, target))
    chosen = [default, *islice(possible, count - 1)]
    return tuple(Candidate(pipeline_of(plan, op), cycles[plan]) for plan in chosen)


def _others(op: StructuredOp, view: Ranking, target: Target, parallel: bool) -> Iterator[tuple[Hashable, Plan]]:
    """Plans of other kinds than panels around a register tile, with a name for the kind."""
    yield from (("crossed", plan) for plan in crossed.plans(view.facts, target, parallel=parallel))
    for expert in (ttgt, log):
        try:
            yield from ((expert, plan_of(p, op, target, parallel=parallel)) for p in expert(op, target).alternatives())
        except CannotLower:
            continue


def _varied(ranked: list[Plan], kinds: dict[Plan, Hashable]) -> list[Plan]:
    """`ranked` in rounds: the two best plans of each register tile and of each other kind, then the next two."""
    seen: dict[Hashable, int] = {}
    rounds: list[tuple[int, Plan]] = []
    for plan in ranked:
        kind = kinds[plan]
        rounds.append((seen.get(kind, 0) // 2, plan))
        seen[kind] = seen.get(kind, 0) + 1
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
