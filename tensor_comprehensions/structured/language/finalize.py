"""The plan of a `ScheduleState` after all primitives; checks every condition of the lowering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from ...core.errors import CannotLower
from ...thresholds import MAX_ACCUMULATOR_MULTIPLE, MIN_LANES, THREAD_FMAS
from ..amx.tile_plans import tile_layout
from ..analysis.access_strides import access_strides
from ..lower.panel_prefetch import why_no_prefetch
from ..lower.tile import num_tiles
from ..match.drop_unit_dims import drop_unit_dims
from ..op import StructuredOp, loads_in, variable_names
from ..plan import Edge, PackStep, Plan, Side, TileLoop
from .schedule_state import ScheduleState, StateLoop, contiguous_along, padded_iterators


def finalize(nest: ScheduleState) -> Plan:
    """The plan of a complete nest. Raises CannotLower if the lowering cannot generate code for it."""
    vector = nest.vector or ""
    last = [loop for loop in nest.loops if loop.iterator == vector][-1]
    widest = nest.target.lanes(nest.op.dtype.bits)
    if not last.number:
        one = replace(last, size=min(nest.lanes or widest, nest.op.extent(vector)))
        nest, last = _replace_loop(nest, last, one), one
    if last.size < 2:
        raise CannotLower(
            f"vectorize: the tiles of {nest.iterator_display_name(vector)} have one point to run along the lanes"
        )
    lanes = nest.lanes or _fitting_lanes(widest, min(last.size, nest.op.extent(vector)))
    kept = nest.remaining_points
    sums = tuple(s for s in nest.sums if nest.op.extent(s) > 1)
    unrolled, steps_at_once = _unroll_counts(nest, sums)
    collapsed = [loop for loop in nest.shared if nest.op.extent(loop.iterator) > 1]
    count = prod(num_tiles(nest.op.extent(loop.iterator), loop.size) for loop in collapsed)
    grain = (nest.grain or default_grain_size(nest.op, count)) if collapsed else 1
    plan = Plan(
        vector,
        lanes,
        tuple(_make_tile_levels(nest, kept, len(collapsed))),
        sums,
        unrolled,
        tuple(_make_pack_steps(nest, kept, len(collapsed))),
        len(collapsed),
        grain,
        steps_at_once,
        nest.nontemporal,
        nest.instruction,
        prefetches=tuple(PackStep(side, _count_enclosing_loops(nest, kept, loop)) for side, loop in nest.prefetches),
        output_panel_depth=None
        if nest.output_panel_loop is None
        else _count_enclosing_loops(nest, kept, nest.output_panel_loop),
        vectors_per_register=nest.vectors_per_register,
    )
    _check_plan(nest, plan)
    return plan


def _make_tile_levels(nest: ScheduleState, kept: Sequence[StateLoop], collapsed: int) -> Iterator[TileLoop]:
    """The loops as levels; `edge` is set only where it differs from the default."""
    ragged = with_remainder(nest.op, [TileLoop(loop.iterator, loop.size) for loop in kept])
    padded = padded_iterators(nest)
    for depth, loop in enumerate(kept):
        innermost = all(later.iterator != loop.iterator for later in kept[depth + 1 :])
        rest = nest.op.extent(loop.iterator) % loop.size or depth in ragged
        edge: Edge | None = None
        if innermost and loop.iterator in padded and rest:
            if loop in nest.peeled:
                raise CannotLower(f"peel: the last tile of {nest.name(loop)} is padded")
            edge = Edge.PADDED
        elif depth in ragged:
            edge = Edge.PEELED if loop in nest.peeled else Edge.BRANCH
            usual = Edge.BRANCH if depth < collapsed else Edge.PEELED
            edge = None if edge is usual else edge
        yield TileLoop(loop.iterator, loop.size, edge)


def with_remainder(op: StructuredOp, levels: Sequence[TileLoop]) -> frozenset[int]:
    """The depths of the levels that have full tiles followed by a remainder tile, in any tile of the outer levels."""
    extents: dict[str, set[int]] = {}
    found = set()
    for depth, level in enumerate(levels):
        parts = extents.get(level.iterator, {op.extent(level.iterator)})
        if any(part > level.size and part % level.size for part in parts):
            found.add(depth)
        extents[level.iterator] = {
            size for part in parts for size in (min(level.size, part), part % level.size) if size
        }
    return frozenset(found)


def _replace_loop(nest: ScheduleState, old: StateLoop, new: StateLoop) -> ScheduleState:
    def swap(loop: StateLoop) -> StateLoop:
        return new if loop == old else loop

    packs = tuple((side, None if loop is None else swap(loop)) for side, loop in nest.packs)
    ahead = tuple((side, swap(loop)) for side, loop in nest.prefetches)
    loops, shared, peeled = (tuple(map(swap, loops)) for loops in (nest.loops, nest.shared, nest.peeled))
    unpacked = None if nest.output_panel_loop is None else swap(nest.output_panel_loop)
    return replace(
        nest, loops=loops, shared=shared, packs=packs, peeled=peeled, prefetches=ahead, output_panel_loop=unpacked
    )


def _fitting_lanes(widest: int, size: int) -> int:
    """The most lanes, at most `widest`, of which a tile of `size` points fills more than half."""
    lanes = widest
    while lanes > MIN_LANES and lanes >= 2 * size:
        lanes //= 2
    return lanes


def _unroll_counts(nest: ScheduleState, sums: Sequence[str]) -> tuple[int, int]:
    """The number of innermost reductions that are unrolled completely, and the unroll factor of the next one."""
    factors = {name: factor for name, factor in nest.unrolled if name in sums}
    complete, partial = 0, 1
    for name in reversed(sums):
        factor = factors.pop(name, None)
        if factor is None:
            break
        size = min([nest.op.extent(name), *(loop.size for loop in nest.loops if loop.iterator == name)])
        if 0 < factor < size:
            partial = factor
            break
        complete += 1
    if factors:
        name = nest.iterator_display_name(next(iter(factors)))
        raise CannotLower(f"unroll: inside the loop over {name} another one is left; interchange them, or unroll both")
    return complete, partial


def _make_pack_steps(nest: ScheduleState, kept: Sequence[StateLoop], collapsed: int) -> Iterator[PackStep]:
    for side, loop in nest.packs:
        yield PackStep(side, 0 if loop is None else _count_enclosing_loops(nest, kept, loop))


def _count_enclosing_loops(nest: ScheduleState, kept: Sequence[StateLoop], loop: StateLoop) -> int:
    """How many of the loops `kept` enclose the body of `loop`."""
    return sum(1 for k in nest.loops[: nest.loops.index(loop) + 1] if k in kept)


def default_grain_size(op: StructuredOp, iterations: int) -> int:
    """The grain size for a parallel loop of so many iterations: enough of them for `THREAD_FMAS` multiply-adds."""
    return max(1, THREAD_FMAS * iterations // max(1, op.multiplications))


def num_accumulators(op: StructuredOp, plan: Plan) -> int:
    """Registers with accumulators in a register tile."""
    vectors = plan.vectors * prod(plan.tile(i.name) for i in drop_unit_dims(op).parallel if i.name != plan.vector)
    return num_tiles(vectors, plan.vectors_per_register)


def _check_plan(nest: ScheduleState, plan: Plan) -> None:
    """Check that the lowering can generate code for a plan. Raises CannotLower."""
    op, registers = nest.op, num_accumulators(nest.op, plan)
    if registers > MAX_ACCUMULATOR_MULTIPLE * nest.target.vector_registers:
        raise CannotLower(
            f"the register tile has {registers} vectors of {plan.lanes} for {nest.target.vector_registers} registers; "
            "tile once more, with smaller sizes"
        )
    partial = [level for level in plan.levels if not op.iterator(level.iterator).is_parallel]
    if plan.output_panel_depth is not None:
        _check_unpacked(nest, plan, plan.output_panel_depth)
    elif any(level.size < op.extent(level.iterator) for level in partial):
        shown = nest.iterator_display_name(partial[0].iterator)
        if plan.nontemporal:
            raise CannotLower(f"nontemporal_stores: partial sums of blocks of {shown} are read again soon")
        if op.output.buffer.type.dtype != op.dtype:
            raise CannotLower(f"tile({shown}=...): the output is too narrow for partial sums of {op.dtype}")
        if plan.vector not in {i.name for i in contiguous_along(op)}:
            raise CannotLower(f"tile({shown}=...): sums that are stored transposed must be complete")
        if op.epilogue is not None and any(a.buffer.name == op.output.buffer.name for a in loads_in(op.epilogue)):
            raise CannotLower(
                f"tile({shown}=...): the epilogue depends on the old output, which partial sums would overwrite"
            )
    if plan.instruction:
        tile_layout(drop_unit_dims(op), plan)
        if plan.unrolled or plan.unroll_steps > 1:
            raise CannotLower("unroll: a matrix instruction is many steps of the sum already")
    if plan.vectors_per_register > 1:
        _check_shared_registers(nest, plan)
    for step in plan.packs:
        _check_pack(nest, plan, step)
    for step in plan.prefetches:
        if reason := why_no_prefetch(drop_unit_dims(op), plan, step):
            raise CannotLower(f"prefetch: the {step.side.name.lower()} factor {reason}")
    for side in nest.padded:
        if all(step.side is not side for step in plan.packs):
            raise CannotLower(f"pad: the {side.name.lower()} factor is not packed, and only panels are padded")


def _check_shared_registers(nest: ScheduleState, plan: Plan) -> None:
    if plan.instruction:
        raise CannotLower("vectorize: matrix instructions have their own registers, which vectors cannot share")
    packed = {step.side for step in plan.packs}
    if any(plan.vector in variable_names(nest.op.factors[side.value]) and side not in packed for side in Side):
        raise CannotLower(
            f"vectorize: vectors_per_register={plan.vectors_per_register} needs the vectors of a panel; pack the factor"
        )
    if plan.lanes == 1:
        raise CannotLower(
            f"vectorize: lanes=1 are no vectors, so {plan.vectors_per_register} of them cannot share a register"
        )
    if plan.lanes * plan.vectors_per_register > nest.target.lanes(nest.op.dtype.bits):
        raise CannotLower(f"vectorize: {plan.vectors_per_register} vectors of {plan.lanes} are more than a register")


def _check_unpacked(nest: ScheduleState, plan: Plan, depth: int) -> None:
    if plan.instruction or any(level.edge is Edge.PADDED for level in plan.levels):
        raise CannotLower("pack_output: results of matrix instructions and of padded tiles are stored at once")
    if depth < plan.parallel_depth:
        raise CannotLower("pack_output: many threads would fill the panel; keep results inside the parallel loops")
    outside = [level.iterator for level in plan.levels[:depth]]
    for sum in nest.sums:
        if sum in outside:
            raise CannotLower(
                f"pack_output: the results of one block of {nest.iterator_display_name(sum)} are not complete"
            )
    inside = {level.iterator for level in plan.levels[depth:]}
    unit = [i.name for i in contiguous_along(nest.op)]
    if plan.vector in unit or not inside & set(unit):
        raise CannotLower("pack_output: the panel has no runs of the output across the lanes")
    if access_strides(nest.op.output, [i.name for i in nest.op.iterators]) is None:
        raise CannotLower("pack_output: the output's subscripts are not affine")


def _check_pack(nest: ScheduleState, plan: Plan, step: PackStep) -> None:
    what = f"pack: the panel of the {step.side.name.lower()} factor"
    if reason := why_no_panel(nest, step.side, [level.iterator for level in plan.levels], step.depth):
        raise CannotLower(f"{what} {reason}")
    if 0 < step.depth < plan.parallel_depth:
        raise CannotLower(
            f"{what} is made between loops that the threads share; pack inside them, or the whole factor first"
        )


def why_no_panel(nest: ScheduleState, side: Side, loops: Sequence[str], depth: int) -> str | None:
    """Why no panel of a factor can be packed inside the first `depth` loops; None if it can.

    loops: the iterators of all loops, outermost first.
    """
    used = variable_names(nest.op.factors[side.value])
    inside = [iterator for iterator in loops[depth:] if iterator in used]
    for iterator in inside:
        shown = nest.iterator_display_name(iterator)
        if inside.count(iterator) > 1:
            return f"would hold two levels of tiles of {shown}; pack inside the outer one"
        if not nest.op.iterator(iterator).is_parallel and iterator in loops[:depth]:
            return f"is between two tiles of the reduction {shown}"
    return None
