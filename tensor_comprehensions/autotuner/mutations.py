"""Small changes to schedules: tile sizes, loop order, packing, lanes, parallel loops, and so on."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace

from ..core.errors import ArgumentError, CannotLower
from ..loop_ir.nodes import Expr, Load
from ..structured.language import primitives as written
from ..structured.language.apply_primitives import loop_state_of
from ..structured.language.finalize import why_no_panel, with_remainder
from ..structured.language.plan_to_schedule import factor_name
from ..structured.language.primitives import Primitive, Schedule
from ..structured.language.schedule_state import ScheduleState
from ..structured.match.drop_unit_dims import drop_unit_dims
from ..structured.op import Iterator, StructuredOp, loads_in, variable_names
from ..structured.plan import Side, TileLoop
from ..target import CpuTarget

MAX_SIZES = 24
UNROLLS = (1, 2, 4, 8)
LANES = (4, 8, 16, 32)
OFF = -1
"""Drops the primitive: no parallel loop; a factor is read in place."""
PARALLEL_LOOPS = (1, 2, 3, OFF)
"""The number of outermost loops that are parallel."""
PACK_LOOPS = (1, 2, 3, OFF)
"""The loop inside which a factor is packed, counted from the outside among its loops; 1 is outside of all loops."""
SWAPS = (1, 2, 3)
"""The loop to swap with the next one, counted from the outside."""
PEELED, PLAIN, PADDED = ENDS = (1, 2, 3)
"""Remainder tiles: with separate code; by default; padded with zeros if they are packed."""
ON_OFF = (1, OFF)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A parameter of a schedule that can be changed. values: the choices; 0 leaves it unchanged.

    kind: "inner" (the last tile of an iterator), "outer" (the one around that), "unroll"; "pack" and "ahead" for a
        factor; and without an iterator or factor "order", "ends", "stream", "lanes" and "threads".
    about: the iterator or the factor; empty for the last kinds.
    """

    kind: str
    about: str
    values: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.about}.{self.kind}" if self.about else self.kind


def list_mutations(op: StructuredOp, target: CpuTarget) -> tuple[Mutation, ...]:
    """The mutations of schedules for an op, in the order in which they apply."""
    found, op = [], drop_unit_dims(op)
    for i in op.iterators:
        values = _list_candidate_sizes(i)
        found.append(Mutation("inner", _display_name(op, i), values))
        if i.is_parallel and len(values) > 2:
            found.append(Mutation("outer", _display_name(op, i), values[:-1]))
    if len(op.iterators) > 2:
        found.append(Mutation("order", "", SWAPS))
    found += [Mutation("pack", factor_name(op, side), PACK_LOOPS) for side in Side]
    if op.reductions:
        found.append(Mutation("unroll", _display_name(op, op.reductions[-1]), UNROLLS))
    found += [
        Mutation("ahead", factor_name(op, side), ON_OFF)
        for side in Side
        if _exceeds_l2_cache(op.factors[side.value], target)
    ]
    if _get_buffer_bytes(op.output) > target.cache[1]:
        found.append(Mutation("stream", "", ON_OFF))
    return (*found, Mutation("ends", "", ENDS), Mutation("lanes", "", LANES), Mutation("threads", "", PARALLEL_LOOPS))


def _exceeds_l2_cache(factor: Expr, target: CpuTarget) -> bool:
    """Whether a factor exceeds L2."""
    return any(_get_buffer_bytes(read) > target.cache[1] for read in loads_in(factor))


def _get_buffer_bytes(access: Load) -> int:
    return access.buffer.bytes


def _display_name(op: StructuredOp, i: Iterator) -> str:
    return op.display_name(i.name)


def _list_candidate_sizes(i: Iterator) -> tuple[int, ...]:
    powers = {1 << k for k in range(i.extent.bit_length()) if 1 << k <= i.extent}
    parts = {-(-i.extent // k) for k in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)}
    small = {n for n in (3, 5, 6, 7, 12, 14, 24, 28, 48) if n <= i.extent}
    every = sorted(powers | parts | small)
    if len(every) <= MAX_SIZES:
        return tuple(every)
    return tuple(every[k * len(every) // MAX_SIZES] for k in range(MAX_SIZES))


def mutate(pipeline: Schedule, chosen: Mapping[Mutation, int], op: StructuredOp) -> Schedule:
    """Apply mutations to `pipeline`. The result may be illegal: `plan_of_schedule` checks it.

    Mutations without effect, such as packing at a loop that does not move the factor, leave the schedule unchanged. If
    other loops become the outermost ones, these become parallel.
    """
    pieces, op = list(pipeline.primitives), drop_unit_dims(op)
    shared = next((p for p in pieces if isinstance(p, written.Parallel)), None)
    with contextlib.suppress(CannotLower, ArgumentError):  # the schedule is illegal, changed or not
        for e, value in chosen.items():
            pieces = _apply_mutation(pieces, e, value, op) if value else pieces
        if (
            shared is not None
            and shared in pieces
            and loop_state_of(pieces, op).loops != loop_state_of(pipeline.primitives, op).loops
        ):
            pieces = _share_outer_loops(pieces, len(shared.loops), op, shared.grain_size)
    return Schedule(tuple(pieces))


def _apply_mutation(pieces: list[Primitive], e: Mutation, value: int, op: StructuredOp) -> list[Primitive]:
    match e.kind:
        case "unroll":
            return _set_unroll(pieces, e.about, value)
        case "lanes":
            return [replace(p, lanes=value) if isinstance(p, written.Vectorize) else p for p in pieces]
        case "threads":
            return _share_outer_loops(pieces, value, op)
        case "order":
            return _swap_loops(pieces, value, op)
        case "pack":
            return _move_pack(pieces, e.about, value, op)
        case "ahead":
            return _set_prefetch(pieces, e.about, value, op)
        case "ends":
            return _set_tail(pieces, value, op)
        case "stream":
            rest: list[Primitive] = _drop_primitives(pieces, written.NontemporalStores)
            return rest if value == OFF else [*rest, written.NontemporalStores()]
    tiled = _set_tile_size(pieces, e.about, value, level=0 if e.kind == "inner" else 1)
    return (
        [_rename_tiled_loop(p, e.about) for p in tiled]
        if any(_display_name(op, i) == e.about for i in op.reductions)
        else tiled
    )


def _rename_tiled_loop(piece: Primitive, iterator: str) -> Primitive:
    """Rename a tiled reduction in an interchange: its outer loop is named `{iterator}0`."""
    if not isinstance(piece, written.Interchange):
        return piece
    return written.Interchange(tuple(f"{iterator}0" if name == iterator else name for name in piece.loops))


def _drop_primitives(pieces: list[Primitive], *kinds: type[Primitive]) -> list[Primitive]:
    return [p for p in pieces if not isinstance(p, kinds)]


def _share_outer_loops(pieces: list[Primitive], count: int, op: StructuredOp, grain: int = 1) -> list[Primitive]:
    """Make up to `count` outermost loops parallel, however little work an iteration has."""
    serial = _drop_primitives(pieces, written.Parallel)
    if count == OFF:
        return serial
    nest = loop_state_of(serial, op)
    loops = nest.remaining_points[:count]
    while any(not op.iterator(x.iterator).is_parallel for x in loops) or len({x.iterator for x in loops}) < len(loops):
        loops = loops[:-1]  # dependent iterations, or two loops of one iterator
    return [*serial, written.Parallel(tuple(map(nest.name, loops)), grain)] if loops else serial


def _swap_loops(pieces: list[Primitive], place: int, op: StructuredOp) -> list[Primitive]:
    """Swap the loop that `place` counts from the outside, starting at 1, with the next one."""
    nest = loop_state_of(pieces, op)
    first, second = nest.remaining_points[place - 1 : place + 1] if place < len(nest.remaining_points) else (None, None)
    if first is None or second is None or first.iterator == second.iterator:
        return pieces
    last = max((k for k, p in enumerate(pieces, 1) if isinstance(p, written.Tile | written.Interchange)), default=0)
    swap = written.Interchange((nest.name(second), nest.name(first)))
    return [*pieces[:last], swap, *pieces[last:]]


def _move_pack(pieces: list[Primitive], factor: str, place: int, op: StructuredOp) -> list[Primitive]:
    """Pack a factor at the loop that `place` counts among its loops; `OFF`: neither pack nor pad it."""
    nest = loop_state_of(pieces, op)
    side = nest.side(factor)
    kept: list[Primitive] = []
    for p in pieces:
        match p:
            case written.Pack(factors):
                others = tuple(f for f in factors if nest.side(f[0]) is not side)
                kept += [written.Pack(others)] if others else []
            case written.Pad(factors) if place == OFF:
                padded = tuple(name for name in factors if nest.side(name) is not side)
                kept += [written.Pad(padded)] if padded else []
            case _:
                kept.append(p)
    if place == OFF:
        return kept
    places = [*_packing_loops(nest, side)]
    if place > len(places):
        return pieces
    last = max((k for k, p in enumerate(kept, 1) if isinstance(p, written.Tile | written.Interchange)), default=0)
    return [*kept[:last], written.Pack(((factor, places[place - 1]),)), *kept[last:]]


def _packing_loops(nest: ScheduleState, side: Side) -> Generator[str | None]:
    """Yield the loops at which a factor may be packed, outermost first: those that index it; None is outside of all."""
    moved = variable_names(nest.op.factors[side.value])
    iterators = [loop.iterator for loop in nest.remaining_points]
    for depth in range(len(iterators) + 1):
        mine = not depth or iterators[depth - 1] in moved
        if mine and any(i in moved for i in iterators[depth:]) and why_no_panel(nest, side, iterators, depth) is None:
            yield nest.name(nest.remaining_points[depth - 1]) if depth else None


def _set_prefetch(pieces: list[Primitive], factor: str, value: int, op: StructuredOp) -> list[Primitive]:
    """Prefetch a factor for the next iteration of the innermost loop that indexes it, or not if `value` is `OFF`."""
    nest = loop_state_of(pieces, op)
    side = nest.side(factor)
    kept: list[Primitive] = []
    for p in pieces:
        if isinstance(p, written.Prefetch):
            others = tuple(f for f in p.operand_loops if nest.side(f[0]) is not side)
            kept += [written.Prefetch(others)] if others else []
        else:
            kept.append(p)
    mine = [loop for loop in nest.remaining_points if loop.iterator in variable_names(op.factors[side.value])]
    return kept if value == OFF or not mine else [*kept, written.Prefetch(((factor, nest.name(mine[-1])),))]


def _set_tail(pieces: list[Primitive], how: int, op: StructuredOp) -> list[Primitive]:
    """Replace the handling of remainder tiles; see `ENDS`."""
    nest, kept = loop_state_of(pieces, op), _drop_primitives(pieces, written.Peel, written.Pad)
    if how == PADDED:
        packed = tuple(name for p in pieces if isinstance(p, written.Pack) for name, _ in p.operand_loops)
        return [*kept, written.Pad(packed)] if packed else pieces
    ragged = (
        with_remainder(op, [TileLoop(loop.iterator, loop.size) for loop in nest.remaining_points])
        if how == PEELED
        else ()
    )
    peeled = tuple(nest.name(nest.remaining_points[depth]) for depth in sorted(ragged))
    return [*kept, written.Peel(peeled)] if peeled else kept


def _set_tile_size(pieces: list[Primitive], iterator: str, value: int, level: int) -> list[Primitive]:
    """Set the tile size of an iterator at a level, counted from the inside.

    A missing tile is added: around all others at level 1, else inside the first loop of the innermost tiling.
    """
    places = [k for k, p in enumerate(pieces) if isinstance(p, written.Tile) and iterator in dict(p.sizes)]
    if level < len(places):
        k = places[-1 - level]
        piece = pieces[k]
        assert isinstance(piece, written.Tile)
        sizes = tuple((name, value if name == iterator else size) for name, size in piece.sizes)
        return [*pieces[:k], written.Tile(sizes), *pieces[k + 1 :]]
    if level:
        return [written.Tile(((iterator, value),)), *pieces]
    tiles = [k for k, p in enumerate(pieces) if isinstance(p, written.Tile)]
    if not tiles:
        return [written.Tile(((iterator, value),)), *pieces]
    piece = pieces[tiles[-1]]
    assert isinstance(piece, written.Tile)
    sizes = (*piece.sizes[:1], (iterator, value), *piece.sizes[1:])
    return [*pieces[: tiles[-1]], replace(piece, sizes=sizes), *pieces[tiles[-1] + 1 :]]


def _set_unroll(pieces: list[Primitive], iterator: str, value: int) -> list[Primitive]:
    kept: list[Primitive] = []
    for p in pieces:
        if isinstance(p, written.Unroll):
            factors = tuple(x for x in p.factors if x[0] != iterator)
            if factors:
                kept.append(replace(p, factors=factors))
        else:
            kept.append(p)
    return kept if value == 1 else [*kept, written.Unroll(((iterator, value),))]
