"""The meaning of primitives: each transforms a `ScheduleState`, which becomes the plan for the lowering."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod

from ...core.errors import ArgumentError, CannotLower
from ...target import CpuTarget
from ..amx.tile_plans import tile_instructions
from ..lower.tile import num_tiles
from ..match.drop_unit_dims import drop_unit_dims
from ..op import StructuredOp, variable_names
from ..plan import Plan
from . import primitives as written
from .finalize import finalize, num_accumulators
from .primitives import Choice, Primitive, Schedule
from .schedule_state import (
    NOWHERE,
    ScheduleState,
    StateLoop,
    contiguous_along,
    padded_iterators,
    reduction_loop_name,
    start_state,
)


def plan_of_schedule(pipeline: Schedule, op: StructuredOp, target: CpuTarget, *, parallel: bool = True) -> Plan:
    """The plan for `drop_unit_dims(op)` of a schedule without choices.

    parallel: whether the op stands alone at the top of a kernel; otherwise parallel loops become serial.

    Raises:
        ArgumentError: the schedule names a loop, iterator or operand that the op does not have.
        CannotLower: no code can be generated for it; the message says why.
    """
    return _finalize_nest(_apply_schedule(pipeline, start_state(op, target, may_parallelize=parallel)))


def explain_schedule(pipeline: Schedule, op: StructuredOp, target: CpuTarget, *, parallel: bool = True) -> str:
    """A line on the effect of every primitive on `op`, and one on the register tile. Raises as `plan_of_schedule`."""
    nest, lines = apply_with_notes(pipeline, start_state(op, target, may_parallelize=parallel))
    plan = _finalize_nest(nest)
    size = " x ".join(f"{nest.iterator_display_name(i.name)} {plan.tile(i.name)}" for i in drop_unit_dims(op).parallel)
    lines.append(f"register tile: {size}, {num_accumulators(op, plan)} vectors of {plan.lanes}")
    return "\n".join(lines)


def loop_state_of(pieces: Iterable[Primitive], op: StructuredOp) -> ScheduleState:
    """The state after the tilings and interchanges among `pieces`. Raises as `plan_of_schedule`."""
    return _run_cached(tuple(p for p in pieces if isinstance(p, written.Tile | written.Interchange)), op)


@lru_cache(1024)
def _run_cached(pieces: tuple[Primitive, ...], op: StructuredOp) -> ScheduleState:
    """The state after `pieces`, cached because searches ask for the same loops often."""
    return _apply_schedule(Schedule(pieces), start_state(op, NOWHERE))


def apply_with_notes(pipeline: Schedule, nest: ScheduleState) -> tuple[ScheduleState, list[str]]:
    """Apply the primitives to `nest`. Returns the new state, and a line on the effect of each."""
    lines: list[str] = []
    for piece in pipeline.primitives:
        before = len(nest.notes)
        nest = _apply_primitive(piece, nest)
        lines += [f"{piece}: {note}" for note in nest.notes[before:]]
    return nest, lines


def state_of_schedule(
    pipeline: Schedule, op: StructuredOp, target: CpuTarget, *, parallel: bool = True
) -> ScheduleState:
    """The state after the primitives of `pipeline`. Raises as `plan_of_schedule`."""
    return _apply_schedule(pipeline, start_state(op, target, may_parallelize=parallel))


def _apply_schedule(pipeline: Schedule, nest: ScheduleState) -> ScheduleState:
    for piece in pipeline.primitives:
        nest = _apply_primitive(piece, nest)
    return nest


def _finalize_nest(nest: ScheduleState) -> Plan:
    return finalize(_apply_vectorize(written.Vectorize(), nest) if nest.vector is None else nest)


def _apply_primitive(piece: Primitive, nest: ScheduleState) -> ScheduleState:
    if isinstance(piece, Choice):
        raise CannotLower(f"{piece} leaves a choice open")
    return _MEANING[type(piece)](piece, nest)


# --- loops -------------------------------------------------------------------------------------------------------


def _apply_tile(piece: written.Tile, nest: ScheduleState) -> ScheduleState:
    loops, made = list(nest.loops), []
    for name, size in piece.sizes:
        iterator = nest.iterator(name)
        number = 1 + sum(1 for loop in nest.loops if loop.iterator == iterator.name and loop.number)
        loops = [loop for loop in loops if loop.number or loop.iterator != iterator.name]
        made.append(StateLoop(iterator.name, number, size))
    shared = tuple(loop for loop in nest.shared if loop in loops)
    if len(shared) < len(nest.shared):
        raise CannotLower(f"{piece}: a parallel loop cannot be tiled any more; tile first")
    nest = replace(nest, loops=(*loops, *made))
    counts = [f"{nest.name(loop)} of {num_tiles(nest.op.extent(loop.iterator), loop.size)}" for loop in made]
    return nest.with_note(f"loops {', '.join(counts)} tiles")


def _apply_interchange(piece: written.Interchange, nest: ScheduleState) -> ScheduleState:
    sums = [next((s for s in nest.sums if name in reduction_loop_name(nest, s)), None) for name in piece.loops]
    if all(s is not None for s in sums):
        order = iter([s for s in sums if s is not None])
        nest = replace(nest, sums=tuple(next(order) if s in sums else s for s in nest.sums))
        return nest.with_note(f"sums over {', '.join(map(nest.iterator_display_name, nest.sums))}")
    named = [nest.loop(name) for name in piece.loops]
    if len(set(named)) < len(named):
        raise ArgumentError(f"{piece} names one loop twice", expected=", ".join(map(nest.name, nest.loops)))
    following = iter(named)
    loops = tuple(next(following) if loop in named else loop for loop in nest.loops)
    for iterator in {loop.iterator: 0 for loop in loops}:
        numbers = [loop.number for loop in loops if loop.iterator == iterator]
        if numbers != sorted(numbers):
            raise CannotLower(
                f"{piece}: an outer tile of {nest.iterator_display_name(iterator)} cannot be inside an inner one"
            )
    nest = replace(nest, loops=loops)
    return nest.with_note(f"loops {', '.join(map(nest.name, loops))}")


def _apply_parallel(piece: written.Parallel, nest: ScheduleState) -> ScheduleState:
    named = [loop for loop in map(nest.loop, piece.loops) if nest.op.extent(loop.iterator) > 1]
    if not nest.may_parallelize:
        return nest.with_note("stays serial: the loop around this contraction is parallel, or the options forbid it")
    outer = tuple(loop for loop in nest.loops if nest.op.extent(loop.iterator) > 1)[: len(named)]
    if tuple(named) != outer:
        raise CannotLower(f"{piece}: the outermost loops are {', '.join(map(nest.name, outer))}; interchange first")
    if any(not nest.op.iterator(loop.iterator).is_parallel for loop in named):
        raise CannotLower(f"{piece}: the iterations of a reduction depend on each other")
    if len({loop.iterator for loop in named}) < len(named):
        raise CannotLower(f"{piece}: two of these loops are of one iterator")
    count = prod(num_tiles(nest.op.extent(loop.iterator), loop.size) for loop in named)
    return replace(nest, shared=outer, grain=piece.grain_size).with_note(f"{count} iterations for the threads")


# --- copies ------------------------------------------------------------------------------------------------------


def _apply_pack(piece: written.Pack, nest: ScheduleState) -> ScheduleState:
    for name, place in piece.operand_loops:
        side = nest.side(name)
        if any(side is other for other, _ in nest.packs) and nest.op.is_product:
            raise CannotLower(f"{piece}: {name} is packed already")
        loop = None if place is None else nest.loop(place)
        nest = replace(nest, packs=(*nest.packs, (side, loop)))
        where = "outside of all loops" if loop is None else f"in every iteration of {nest.name(loop)}"
        nest = nest.with_note(f"{name} is copied {where}")
    return nest


def _apply_prefetch(piece: written.Prefetch, nest: ScheduleState) -> ScheduleState:
    if not nest.op.is_product:
        raise CannotLower(f"{piece}: no operand is reused by several register tiles")
    for name, place in piece.operand_loops:
        loop = nest.loop(place)
        nest = replace(nest, prefetches=(*nest.prefetches, (nest.side(name), loop)))
        nest = nest.with_note(f"{name} for the next iteration of {nest.name(loop)} is brought near")
    return nest


def _apply_pad(piece: written.Pad, nest: ScheduleState) -> ScheduleState:
    sides = tuple(nest.side(name) for name in piece.operands)
    nest = replace(nest, padded=(*nest.padded, *sides))
    innermost = {loop.iterator: loop for loop in nest.loops}
    ends = [_describe_last_tile(nest, innermost[name]) for name in padded_iterators(nest)]
    return nest.with_note(f"{', '.join(ends) or 'nothing'}; zeros and unstored results past the end")


def _describe_last_tile(nest: ScheduleState, loop: StateLoop) -> str:
    """A description of the last tile of a loop."""
    rest = nest.op.extent(loop.iterator) % loop.size
    return f"{nest.name(loop)} ends with {rest} of {loop.size}" if rest else f"{nest.name(loop)} has whole tiles"


def _apply_peel(piece: written.Peel, nest: ScheduleState) -> ScheduleState:
    loops = tuple(nest.loop(name) for name in piece.loops)
    if flat := [loop for loop in loops if not loop.number]:
        raise CannotLower(f"{piece}: {nest.name(flat[0])} is not tiled")
    return replace(nest, peeled=(*nest.peeled, *loops)).with_note(
        f"{', '.join(_describe_last_tile(nest, loop) for loop in loops)}; the last one is code of its own"
    )


# --- the register tile -------------------------------------------------------------------------------------------


def _apply_vectorize(piece: written.Vectorize, nest: ScheduleState) -> ScheduleState:
    contiguous = contiguous_along(nest.op)
    if not contiguous and (piece.iterator is None or nest.op.is_product):
        raise CannotLower(f"{piece}: the output is contiguous along none of the iterators")
    if piece.iterator is None:
        lane_iterator = max(contiguous, key=lambda i: i.extent)
    else:
        lane_iterator = nest.iterator(piece.iterator)
        if not lane_iterator.is_parallel and nest.op.is_product:
            raise CannotLower(f"{piece}: {piece.iterator} is summed")
    shown = nest.iterator_display_name(lane_iterator.name)
    if piece.vectors_per_register > 1 and not nest.op.is_product:
        raise CannotLower(f"{piece}: there are no sums of products to share registers")
    if lane_iterator.extent < 2:
        raise CannotLower(f"{piece}: {shown} has one value")
    if all(lane_iterator.name not in variable_names(factor) for factor in nest.op.factors):
        raise CannotLower(f"{piece}: no factor depends on {shown}")
    across = "; sums are turned to be stored" if nest.op.is_product and lane_iterator not in contiguous else ""
    beside = (
        f", {piece.vectors_per_register} vectors of a panel to a register" if piece.vectors_per_register > 1 else ""
    )
    nest = replace(nest, vector=lane_iterator.name, lanes=piece.lanes, vectors_per_register=piece.vectors_per_register)
    return nest.with_note(f"lanes along {shown}{beside}{across}")


def _apply_unroll(piece: written.Unroll, nest: ScheduleState) -> ScheduleState:
    for name, _ in piece.factors:
        if nest.iterator(name).is_parallel and nest.op.is_product:
            raise CannotLower(f"{piece}: the register tile of {name} is unrolled anyway")
    pairs = tuple((nest.iterator(name).name, factor) for name, factor in piece.factors)
    text = ", ".join(f"{name} by {factor}" if factor else f"{name} completely" for name, factor in piece.factors)
    return replace(nest, unrolled=(*nest.unrolled, *pairs)).with_note(text)


def _apply_nontemporal_stores(piece: written.NontemporalStores, nest: ScheduleState) -> ScheduleState:
    return replace(nest, nontemporal=True).with_note("the output is written past the caches")


def _apply_matrix_instruction(piece: written.MatrixInstruction, nest: ScheduleState) -> ScheduleState:
    found = [i.name for i in tile_instructions(nest.op, nest.target) if piece.instruction in ("", i.name)]
    if not found:
        raise CannotLower(f"{piece}: the processor has no such instruction for these factors")
    return replace(nest, instruction=found[0]).with_note(f"register tiles by {found[0]}")


def _set_output_panel(piece: written.PackOutput, nest: ScheduleState) -> ScheduleState:
    if not nest.op.is_product:
        raise CannotLower(f"{piece}: there are no sums to keep")
    loop = nest.loop(piece.loop)
    return replace(nest, output_panel_loop=loop).with_note(
        f"results of every iteration of {nest.name(loop)} are kept, and then stored"
    )


_MEANING: dict[type, Callable[..., ScheduleState]] = {
    written.Tile: _apply_tile,
    written.Interchange: _apply_interchange,
    written.Parallel: _apply_parallel,
    written.Pack: _apply_pack,
    written.Pad: _apply_pad,
    written.Peel: _apply_peel,
    written.Vectorize: _apply_vectorize,
    written.Unroll: _apply_unroll,
    written.NontemporalStores: _apply_nontemporal_stores,
    written.MatrixInstruction: _apply_matrix_instruction,
    written.Prefetch: _apply_prefetch,
    written.PackOutput: _set_output_panel,
}
