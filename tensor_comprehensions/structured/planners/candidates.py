"""The schedules worth measuring for an op, in the order of the cost model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice

from ...core.errors import CannotLower
from ...target import CpuTarget
from ...thresholds import COMPARED_TILES
from ..cost.plan_cost import expected_cycles, plan_cycles
from ..cost.register_tiles import RegisterTileRanking
from ..cost.tile_cost import RegisterTile
from ..language.apply_primitives import plan_of_schedule
from ..language.plan_to_schedule import plan_to_schedule
from ..language.primitives import Schedule
from ..match.drop_unit_dims import drop_unit_dims
from ..op import StructuredOp
from ..plan import Plan
from . import transposed_output
from .experts import loop_over_gemm, ttgt
from .plan_variants import enumerate_packings
from .select import best_of, register_tile_rankings


@dataclass(frozen=True, slots=True)
class PricedSchedule:
    """A schedule and the cycles of one core that the cost model predicts for it."""

    schedule: Schedule
    cycles: float


def schedule_candidates(
    op: StructuredOp, target: CpuTarget, count: int, *, parallel: bool = True
) -> tuple[PricedSchedule, ...]:
    """At most `count` different schedules for `op`: the default, then others, roughly in the order of the cost model.

    Each kind of schedule and each register tile contributes in turn. Raises CannotLower if no register tile computes
    the op.
    """
    op = drop_unit_dims(op)
    views = register_tile_rankings(op, target)
    default = best_of(views, target, parallel=parallel)
    cycles = {default: plan_cycles(op, default, target)}
    kinds: dict[Plan, Hashable] = {}
    for view in views:
        found: dict[Plan, RegisterTile] = {}
        for tile, plan in _list_plan_variants(view, target, parallel):
            if plan not in cycles:
                found.setdefault(plan, tile)
        kinds |= found
        cycles |= zip(found, expected_cycles(view.info, [*found], target), strict=True)
    for kind, plan in _enumerate_other_plans(op, views[0], target, parallel):
        if plan not in cycles:
            cycles[plan], kinds[plan] = plan_cycles(op, plan, target), kind
    ranked = sorted(kinds, key=cycles.__getitem__)
    possible = (plan for plan in _interleave_kinds(ranked, kinds) if _is_expressible_plan(op, plan, target))
    chosen = [default, *islice(possible, count - 1)]
    return tuple(PricedSchedule(plan_to_schedule(plan, op), cycles[plan]) for plan in chosen)


def _enumerate_other_plans(
    op: StructuredOp, view: RegisterTileRanking, target: CpuTarget, parallel: bool
) -> Iterator[tuple[Hashable, Plan]]:
    """Plans with output panels, or by `ttgt` and `loop_over_gemm`, each with its kind."""
    yield from (
        ("crossed", plan) for plan in transposed_output.transposed_output_plans(view.info, target, parallel=parallel)
    )
    for expert in (ttgt, loop_over_gemm):
        try:
            yield from (
                (expert, plan_of_schedule(p, op, target, parallel=parallel)) for p in expert(op, target).alternatives()
            )
        except CannotLower:
            continue


def _interleave_kinds(ranked: list[Plan], kinds: dict[Plan, Hashable]) -> list[Plan]:
    """`ranked` in rounds: the two best plans of each kind (each register tile is one), then the next two, ..."""
    seen: dict[Hashable, int] = {}
    rounds: list[tuple[int, Plan]] = []
    for plan in ranked:
        kind = kinds[plan]
        rounds.append((seen.get(kind, 0) // 2, plan))
        seen[kind] = seen.get(kind, 0) + 1
    return [plan for _, plan in sorted(rounds, key=lambda r: r[0])]


def _is_expressible_plan(op: StructuredOp, plan: Plan, target: CpuTarget) -> bool:
    try:
        return plan_of_schedule(plan_to_schedule(plan, op), op, target) == plan
    except CannotLower:
        return False


def _list_plan_variants(
    view: RegisterTileRanking, target: CpuTarget, parallel: bool
) -> Iterator[tuple[RegisterTile, Plan]]:
    """Plans that differ in the register tile, in the packed factors, and in which factor's panel is stationary."""
    for tile in view.best_tiles(COMPARED_TILES):
        for plan in enumerate_packings(view.info, target, tile, parallel):
            yield tile, plan
