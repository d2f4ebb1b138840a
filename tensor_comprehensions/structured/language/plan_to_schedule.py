"""Convert a plan to a schedule: the inverse of `plan_of_schedule`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ..lower.tile import num_tiles
from ..op import StructuredOp, loads_in, variable_names
from ..plan import Edge, Plan, Side
from . import primitives as written
from .finalize import default_grain_size, with_remainder
from .primitives import Primitive, Schedule
from .schedule_state import NOWHERE, ScheduleState, StateLoop, reduction_loop_name, start_state


def plan_to_schedule(plan: Plan, op: StructuredOp) -> Schedule:
    """The schedule for which `plan_of_schedule` returns `plan`, for a normalized op."""
    nest = replace(start_state(op, NOWHERE), loops=_number_loops(plan))
    pieces: list[Primitive] = list(_make_tile_primitives(nest))
    original = tuple(i.name for i in op.reductions)
    if plan.reductions != original:
        pieces.append(written.Interchange(tuple(reduction_loop_name(nest, s)[0] for s in plan.reductions)))
    for step in plan.packs:
        pieces.append(written.Pack(((factor_name(op, step.side), _loop_name(nest, step.depth)),)))
    pieces += _make_edge_primitives(nest, plan)
    if plan.parallel_depth:
        count = prod(num_tiles(op.extent(level.iterator), level.size) for level in plan.levels[: plan.parallel_depth])
        grain = 0 if plan.grain == default_grain_size(op, count) else plan.grain
        pieces.append(written.Parallel(tuple(map(nest.name, nest.loops[: plan.parallel_depth])), grain))
    pieces.append(written.Vectorize(nest.iterator_display_name(plan.vector), plan.lanes, plan.vectors_per_register))
    if unrolled := _unroll_pairs(nest, plan):
        pieces.append(written.Unroll(unrolled))
    if plan.nontemporal:
        pieces.append(written.NontemporalStores())
    if plan.instruction:
        pieces.append(written.MatrixInstruction(plan.instruction))
    if plan.output_panel_depth is not None:
        pieces.append(written.PackOutput(nest.name(nest.loops[plan.output_panel_depth - 1])))
    for step in plan.prefetches:
        loop = nest.name(nest.loops[step.depth - 1])
        pieces.append(written.Prefetch(((factor_name(op, step.side), loop),)))
    return Schedule(tuple(pieces))


def _make_edge_primitives(nest: ScheduleState, plan: Plan) -> Iterator[Primitive]:
    """The primitives for remainder tiles: `pad` and `peel`."""
    padded = {level.iterator for level in plan.levels if level.edge is Edge.PADDED}
    sides = [step.side for step in plan.packs if padded & set(variable_names(nest.op.factors[step.side.value]))]
    if sides:
        yield written.Pad(tuple(factor_name(nest.op, side) for side in sides))
    usual = [Edge.BRANCH if depth < plan.parallel_depth else Edge.PEELED for depth in range(len(plan.levels))]
    ends = [level.edge or edge for level, edge in zip(plan.levels, usual, strict=True)]
    peeled = [depth for depth in sorted(with_remainder(nest.op, plan.levels)) if ends[depth] is Edge.PEELED]
    if peeled:
        yield written.Peel(tuple(nest.name(nest.loops[depth]) for depth in peeled))


def _number_loops(plan: Plan) -> tuple[StateLoop, ...]:
    """The levels of a plan as the loops of a nest."""
    seen: dict[str, int] = {}
    loops = []
    for level in plan.levels:
        seen[level.iterator] = seen.get(level.iterator, 0) + 1
        loops.append(StateLoop(level.iterator, seen[level.iterator], level.size))
    return tuple(loops)


def _make_tile_primitives(nest: ScheduleState) -> Iterator[written.Tile]:
    """The tilings of the loops: consecutive loops over different iterators are one `tile`."""
    sizes: dict[str, int] = {}
    for loop in nest.loops:
        name = nest.iterator_display_name(loop.iterator)
        if name in sizes:
            yield written.Tile(tuple(sizes.items()))
            sizes = {}
        sizes[name] = loop.size
    if sizes:
        yield written.Tile(tuple(sizes.items()))


def factor_name(op: StructuredOp, side: Side) -> str:
    """The name of a factor in primitives: the first tensor that only it reads; `left` or `right` if there is none."""
    other = Side.RIGHT if side is Side.LEFT else Side.LEFT
    theirs = {a.buffer.name for a in loads_in(op.factors[other.value])}
    mine = [a.buffer.name for a in loads_in(op.factors[side.value]) if a.buffer.name not in theirs]
    return mine[0] if mine else side.name.lower()


def _loop_name(nest: ScheduleState, depth: int) -> str | None:
    return nest.name(nest.loops[depth - 1]) if depth else None


def _unroll_pairs(nest: ScheduleState, plan: Plan) -> tuple[tuple[str, int], ...]:
    first = len(plan.reductions) - plan.unrolled
    whole = tuple((nest.iterator_display_name(name), 0) for name in plan.reductions[first:])
    if plan.unroll_steps > 1 and first:
        return (*whole, (nest.iterator_display_name(plan.reductions[first - 1]), plan.unroll_steps))
    return whole
