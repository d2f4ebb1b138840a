"""Plan selection for contractions: the plan that the cost model prefers, and whether a micro-kernel pays at all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf, prod

from ...core.decisions import is_recording
from ...core.errors import CannotLower
from ...machine import DOT_PRODUCT_CYCLES, THREAD_START_CYCLES
from ...target import CpuTarget
from ...thresholds import (
    ALWAYS_SHARED_FMAS,
    BETTER_TILE,
    BETTER_TILE_IN_L2,
    COMPARED_TILES,
    PACKED_BLOCK_STEPS,
    PACKED_USES,
    PRICED_TILES,
    SHORT_OUTPUT_RUN,
    SHORT_STRIDED_RUN,
    SHORT_SUM_TERMS,
    THREAD_FMAS,
    TRANSPOSED_STORE_STEPS,
    TWO_THREADS_GAIN,
)
from ..amx import tile_plans
from ..analysis.contraction_info import ContractionInfo, analyze_contraction
from ..cost.plan_cost import busy_cycles, completes_pages, expected_cycles, packs_short_runs, plan_cycles
from ..cost.register_tiles import RegisterTileRanking
from ..cost.tile_cost import is_in_mesh_llc
from ..lower.tile import num_tiles
from ..op import StructuredOp, loads_in
from ..plan import Plan
from . import depthwise, transposed_output
from .blocking import BlockingHeuristic
from .l1_blocks import block_sum_for_l1
from .plan_record import record_plan
from .plan_variants import LaneSumBlocking, PackBothBlocking, enumerate_packings, fits_both_packed_in_l2

PLAN_CACHE_SIZE = 64
"""Cached plans; an op is planned several times: to decide fusion, to lower it, and to display it."""


def select_plan(op: StructuredOp, target: CpuTarget, *, parallel: bool) -> Plan:
    """The plan that the cost model prefers for a normalized op, even if `why_not_microkernel` advises against one.

    Raises:
        CannotLower: `analyze_contraction` finds no iterator for the lanes.
    """
    plan, rivals, views = _select_plan(op, target, parallel=parallel)
    if is_recording():
        tiles = [(view, tile) for view in views for tile in view.best_tiles(PRICED_TILES)]
        priced = [p for view, tile in tiles for p in enumerate_packings(view.info, target, tile, parallel)]
        record_plan(op, plan, rivals, priced, target)
    return plan


@lru_cache(PLAN_CACHE_SIZE)
def _select_plan(
    op: StructuredOp, target: CpuTarget, *, parallel: bool
) -> tuple[Plan, tuple[Plan, ...], tuple[RegisterTileRanking, ...]]:
    """The chosen plan, all plans that it was compared with, and the rankings of register tiles that they came from."""
    views = register_tile_rankings(op, target)
    shared, rivals = rank_plans(views, target, parallel=parallel)
    if shared.parallel_depth and op.multiplications < ALWAYS_SHARED_FMAS:
        serial, others = rank_plans(views, target, parallel=False)
        if _shared_cycles(op, shared, target) >= TWO_THREADS_GAIN * plan_cycles(op, serial, target):
            shared, rivals = serial, others
    return shared, rivals, views


def _shared_cycles(op: StructuredOp, plan: Plan, target: CpuTarget) -> float:
    """Cycles until two threads have finished `plan`, including the start of a thread."""
    count = prod(num_tiles(op.extent(level.iterator), level.size) for level in plan.levels[: plan.parallel_depth])
    return plan_cycles(op, plan, target) * num_tiles(count, 2) / count + THREAD_START_CYCLES


def register_tile_rankings(op: StructuredOp, target: CpuTarget) -> tuple[RegisterTileRanking, ...]:
    """The ranking of register tiles for each choice of the lanes' iterator.

    The first has the lanes along the output's contiguous iterator. A second one, if the broadcast operand has a long
    enough iterator, has them along that. Raises CannotLower as `select_plan`.
    """
    known = analyze_contraction(op)
    rows = [i for i in known.exclusive_iterators(known.broadcast_operand) if 2 * i.extent >= target.lanes(known.bits)]
    if not rows or known.vector in known.broadcast_operand.iterators:
        return (RegisterTileRanking(known, target),)
    across = analyze_contraction(op, max(rows, key=lambda i: i.extent).name)
    return RegisterTileRanking(known, target), RegisterTileRanking(across, target)


def best_of(views: tuple[RegisterTileRanking, ...], target: CpuTarget, *, parallel: bool) -> Plan:
    """The plan that the cost model prefers. views: from `register_tile_rankings`."""
    return rank_plans(views, target, parallel=parallel)[0]


def rank_plans(
    views: tuple[RegisterTileRanking, ...], target: CpuTarget, *, parallel: bool
) -> tuple[Plan, tuple[Plan, ...]]:
    """The plan that the cost model prefers, and all plans that it was compared with."""
    default, *turned = views
    if depthwise.is_depthwise(default.info):
        return depthwise.depthwise_plan(default.info, target, parallel=parallel), ()
    # Too little work for two threads: splitting it would only pack more panels.
    parallel = parallel and default.info.op.multiplications >= 2 * THREAD_FMAS
    near, consider = fits_l2_without_windows(default.info, target), _enumerate_tile_plans
    if default.info.keeps_lanes_of_sum:
        consider = _enumerate_lane_sum_plans
    elif near:
        consider = _enumerate_near_plans
    views = views if turned and (near or _is_transposed_store_profitable(default.info, target)) else (default,)
    chosen, least, clearly = Plan("", 0, (), ()), inf, BETTER_TILE_IN_L2 if near else BETTER_TILE
    compared: list[Plan] = []
    for view in views:
        plans = list(dict.fromkeys(consider(view, target, parallel)))
        compared += plans
        for plan, cycles in zip(plans, expected_cycles(view.info, plans, target), strict=True):
            if cycles < least * clearly:
                chosen, least = plan, cycles
    if not near and _may_turn_results(default.info, chosen, target):
        for plan in transposed_output.transposed_output_plans(default.info, target, parallel=parallel):
            cycles = plan_cycles(default.info.op, plan, target)
            compared.append(plan)
            if cycles < least * BETTER_TILE:
                chosen, least = plan, cycles
    for plan in tile_plans.matrix_tile_plans(default.info, target, parallel=parallel):
        compared.append(plan)
        if busy_cycles(default.info.op, plan, target) < busy_cycles(default.info.op, chosen, target) * BETTER_TILE:
            chosen = plan
    for view in views:
        if view.info.vector == chosen.vector:
            chosen = block_sum_for_l1(view.info, chosen, target)
    return chosen, tuple(compared)


def fits_l2_without_windows(known: ContractionInfo, target: CpuTarget) -> bool:
    """Whether L2 holds all operands of an op without windows, so that the packing decides which plan is fastest."""
    windows = any(prod(known.extents[name] for name in f.iterators) > f.stored for f in known.factors)
    touched = known.output_size + sum(f.stored * f.bytes for f in known.factors)
    return not windows and touched <= target.cache[1]


def _enumerate_lane_sum_plans(view: RegisterTileRanking, target: CpuTarget, parallel: bool) -> Iterator[Plan]:
    """The plans to compare if lanes keep separate partial sums."""
    for tile in view.best_tiles(COMPARED_TILES):
        yield LaneSumBlocking(view.info, target, tile, parallel).plan()


def _enumerate_near_plans(view: RegisterTileRanking, target: CpuTarget, parallel: bool) -> Iterator[Plan]:
    """The plans to compare if all data is in L2: all packings and loop orders around several register tiles."""
    for tile in view.best_tiles(COMPARED_TILES):
        expert = BlockingHeuristic(view.info, target, tile, parallel)
        yield expert.plan()
        if not view.info.transposes_output:
            yield from enumerate_packings(view.info, target, tile, parallel, (expert.packs_vector_operand(),))


def _enumerate_tile_plans(view: RegisterTileRanking, target: CpuTarget, parallel: bool) -> Iterator[Plan]:
    """The plans to compare: one for each of a few register tiles; all packings if the output's traffic dominates."""
    expert = BlockingHeuristic(view.info, target, view.best, parallel)
    if _is_output_traffic_bound(view.info, target):
        shapes = view.shapes(COMPARED_TILES)
        if fits_both_packed_in_l2(view.info, target):
            copied = (PackBothBlocking(view.info, target, tile, parallel).plan() for tile in shapes)
            yield from (plan for plan in copied if completes_pages(view.info, plan, target))
        yield expert.plan()
        gathered = view.info.vector_operand.step(view.info.vector) != 1
        for tile in shapes:
            yield from enumerate_packings(view.info, target, tile, parallel, (True,) if gathered else (True, False))
    else:
        several = (
            expert.has_extended_panels()
            or view.info.transposes_output
            or (target.has_mesh_llc and _streams_in_place(expert.plan()))
        )
        for tile in view.best_tiles(COMPARED_TILES if several else 1):
            yield BlockingHeuristic(view.info, target, tile, parallel).plan()


def _may_turn_results(known: ContractionInfo, chosen: Plan, target: CpuTarget) -> bool:
    """Whether lanes along the runs of the larger factor may be better, with results turned afterwards.

    A mesh delivers long runs of memory in time, so that there only panels filled from short runs are worth replacing.
    """
    if not target.has_mesh_llc:
        return True
    return chosen.vector == known.vector and packs_short_runs(known, chosen, target)


def _is_transposed_store_profitable(known: ContractionInfo, target: CpuTarget) -> bool:
    """Whether register tiles that are stored transposed may be faster.

    They may be if the output's contiguous runs are short, unless the operand that is read again and again is in a
    distant cache. They also may be if packing would transpose an operand for few rows; then it stays in place.
    """
    moving, turns = known.vector_operand, known.vector_operand.step(known.vector) != 1
    if turns and prod(i.extent for i in known.exclusive_iterators(known.broadcast_operand)) <= PACKED_USES:
        longest = inf
    elif is_in_mesh_llc(known.k_size * known.extent(known.vector) * moving.bytes, target):
        return False
    else:
        longest = SHORT_STRIDED_RUN if turns and known.k_size <= PACKED_BLOCK_STEPS else SHORT_OUTPUT_RUN
    # Scalars are read in place, and must not be pairs of distant elements. The factor along the lanes is packed anyway.
    loaded = moving if known.op.pairs else known.broadcast_operand
    return (
        loaded.is_plain_load
        and known.k_size >= TRANSPOSED_STORE_STEPS
        and 4 <= known.extent(known.output_unit_iter) < longest
    )


def _streams_in_place(plan: Plan) -> bool:
    """Whether a plan reads both factors in place and stores non-temporally; wide register tiles then wait for L2."""
    return plan.nontemporal and not plan.packs


def _is_output_traffic_bound(known: ContractionInfo, target: CpuTarget) -> bool:
    """Whether the output is beyond the private caches, and its stores take longer than the short sums before them."""
    return known.k_size <= SHORT_SUM_TERMS and is_in_mesh_llc(known.output_size, target)


def why_not_microkernel(op: StructuredOp, target: CpuTarget) -> str | None:
    """Why a micro-kernel would be slow for a normalized op on `target`; None if it is fast."""
    try:
        known = analyze_contraction(op)
    except CannotLower as reason:
        return str(reason)
    columns, lanes = known.extent(known.vector), target.lanes(known.bits)
    if 4 * columns < lanes and known.k_size >= columns * (2 * known.k_size // lanes + 2 * DOT_PRODUCT_CYCLES):
        return f"only {columns} contiguous output elements"
    rows = prod(i.extent for i in known.exclusive_iterators(known.broadcast_operand))
    moving = known.vector_operand
    if rows < 2:
        if moving.step(known.vector) != 1:
            return f"one row to turn the {moving.side.name.lower()} factor for"
        access = loads_in(op.factors[moving.side.value])[0]
        if prod(access.buffer.shape) * 2 > op.multiplications:
            return f"every element of the {moving.side.name.lower()} factor is used once"
    return None
