"""What the pieces of a pipeline mean for an op: each adds to a nest, which becomes the plan that lowering follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ..errors import ArgumentError, CannotLower
from ..target import Target
from . import pipeline as written
from .affine import steps
from .ahead import objection
from .expert import PARALLEL_WORK
from .fragments import instructions, layout
from .normalise import normalise
from .op import Iterator as Dimension
from .op import StructuredOp, loads, names
from .pipeline import Choice, Piece, Pipeline
from .plan import Edge, Level, Pack, Plan, Side
from .tile import tiles

MOST_REGISTERS = 4
"""Accumulators that a register tile may have, in multiples of the machine's vector registers."""
NOWHERE = Target("cpu", "", "", 512, 32, ())
"""A target for what depends on none."""
NARROWEST = 4
"""Lanes that a vector has at least."""


@dataclass(frozen=True, slots=True)
class TileLoop:
    """A loop around the register tile. number: counts the tiles of an iterator from 1; 0 where it has none."""

    iterator: str
    number: int
    size: int


@dataclass(frozen=True, slots=True)
class Nest:
    """What the pieces so far have made of an op.

    Attributes:
        op: as given; iterators of extent 1 are there and get no loop in the end.
        loops: around the register tile, outermost first.
        sums: the reduction loops inside it, outermost first.
        packs: factors and the loop inside which they are copied; None: outside of all.
        padded: factors along which the last tiles are whole. peeled: loops whose last tile is code of its own.
        shared: how many of the outermost loops the threads share. alone: whether they may.
        streaming: whether the output is written past the caches.
        instruction: by which the register tile is computed; "" for plain vectors.
        ahead: factors and the loop for whose next iteration they are brought near.
    """

    op: StructuredOp
    target: Target
    alone: bool
    loops: tuple[TileLoop, ...]
    sums: tuple[str, ...]
    vector: str | None = None
    lanes: int = 0
    packs: tuple[tuple[Side, TileLoop | None], ...] = ()
    padded: tuple[Side, ...] = ()
    peeled: tuple[TileLoop, ...] = ()
    unrolled: tuple[tuple[str, int], ...] = ()
    shared: tuple[TileLoop, ...] = ()
    grain: int = 0
    streaming: bool = False
    instruction: str = ""
    ahead: tuple[tuple[Side, TileLoop], ...] = ()
    notes: tuple[str, ...] = field(default=())

    # --- names ---

    def shown(self, iterator: str) -> str:
        """The name that an index has in the def: ops of a kernel put their own name before it."""
        return iterator.removeprefix(f"{self.op.name}_")

    def iterator(self, name: str) -> Dimension:
        """Raises ArgumentError that lists the names there are."""
        found = [i for i in self.op.iterators if self.shown(i.name) == name]
        if found:
            return found[0]
        merged = [self.shown(i.name) for i in self.op.iterators if name in self.shown(i.name).split("_")]
        raise ArgumentError(
            f"{self.op.name} has no iterator {name!r}",
            expected=", ".join(self.shown(i.name) for i in self.op.iterators),
            suggestion=f"indices that are always walked together are one iterator: {merged[0]}" if merged else "",
        )

    def name(self, loop: TileLoop) -> str:
        """How a loop is called."""
        iterator = self.shown(loop.iterator)
        if not loop.number:
            return iterator
        plain = f"{iterator}{loop.number}"
        return f"{iterator}.{loop.number}" if any(self.shown(i.name) == plain for i in self.op.iterators) else plain

    def loop(self, name: str) -> TileLoop:
        """The loop called `name`; an iterator's name is that of its innermost loop. Raises ArgumentError."""
        for loop in self.loops:
            if name in (self.name(loop), f"{self.shown(loop.iterator)}.{loop.number}"):
                return loop
        own = [loop for loop in self.loops if self.shown(loop.iterator) == name]
        if own:
            return own[-1]
        loops = ", ".join(map(self.name, self.loops)) or "none"
        sums = [self.shown(s) for s in self.sums]
        raise ArgumentError(
            f"{self.op.name} has no loop {name!r}",
            expected=loops,
            suggestion=f"{name} is summed inside the register tile; tile({name}=...) makes a loop of it"
            if name in sums
            else "",
        )

    def side(self, name: str) -> Side:
        """The factor that reads the tensor `name`. Raises ArgumentError."""
        read = {side: [a.buffer.name for a in loads(self.op.factors[side.value])] for side in Side}
        found = [side for side, tensors in read.items() if name in tensors]
        if not found:
            found = [side for side in Side if side.name.lower() == name]
        if len(found) == 1:
            return found[0]
        raise ArgumentError(
            f"{self.op.name} has {'two factors' if found else 'no factor'} called {name!r}",
            expected=", ".join(dict.fromkeys((*read[Side.LEFT], *read[Side.RIGHT], "left", "right"))),
        )

    def say(self, note: str) -> Nest:
        return replace(self, notes=(*self.notes, note))


def start(op: StructuredOp, target: Target, *, alone: bool = True) -> Nest:
    """The nest before the first piece: every parallel iterator a loop, every reduction inside the register tile."""
    loops = tuple(TileLoop(i.name, 0, 1) for i in op.parallel)
    return Nest(op, target, alone, loops, tuple(i.name for i in op.reductions))


def plan_of(pipeline: Pipeline, op: StructuredOp, target: Target, *, parallel: bool = True) -> Plan:
    """The plan for `normalise(op)` that `pipeline`, which leaves nothing to choose, describes.

    parallel: the op stands alone at the top of a kernel; else loops that are to be parallel stay serial.

    Raises:
        ArgumentError: the pipeline names something that the op does not have.
        CannotLower: no code can be generated for it; the message says why.
    """
    return _finish(_run(pipeline, start(op, target, alone=parallel)))


def explain(pipeline: Pipeline, op: StructuredOp, target: Target, *, parallel: bool = True) -> str:
    """What every piece does to `op`, a line each. Raises as `plan_of`."""
    nest, lines = noted(pipeline, start(op, target, alone=parallel))
    plan = _finish(nest)
    size = " x ".join(f"{nest.shown(i.name)} {plan.tile(i.name)}" for i in normalise(op).parallel)
    lines.append(f"register tile: {size}, {_cells(op, plan)} vectors of {plan.lanes}")
    return "\n".join(lines)


def outermost(pipeline: Pipeline, op: StructuredOp, count: int) -> tuple[str, ...]:
    """The names of the outermost loops that `pipeline` makes, at most so many: those of more than one point.

    Raises as `plan_of`.
    """
    nest = _run(pipeline, start(op, NOWHERE))
    return tuple(nest.name(loop) for loop in nest.loops if op.extent(loop.iterator) > 1)[:count]


def noted(pipeline: Pipeline, nest: Nest) -> tuple[Nest, list[str]]:
    """What the pieces make of `nest`, and what each says that it does."""
    lines: list[str] = []
    for piece in pipeline.pieces:
        before = len(nest.notes)
        nest = _apply(piece, nest)
        lines += [f"{piece}: {note}" for note in nest.notes[before:]]
    return nest, lines


def nest_of(pipeline: Pipeline, op: StructuredOp, target: Target, *, parallel: bool = True) -> Nest:
    """What the pieces of `pipeline` make of `op`. Raises as `plan_of`."""
    return _run(pipeline, start(op, target, alone=parallel))


def _run(pipeline: Pipeline, nest: Nest) -> Nest:
    for piece in pipeline.pieces:
        nest = _apply(piece, nest)
    return nest


def _apply(piece: Piece, nest: Nest) -> Nest:
    if isinstance(piece, Choice):
        raise CannotLower(f"{piece} leaves a choice open")
    return _MEANING[type(piece)](piece, nest)


# --- loops -------------------------------------------------------------------------------------------------------


def _tile(piece: written.Tile, nest: Nest) -> Nest:
    loops, made = list(nest.loops), []
    for name, size in piece.sizes:
        iterator = nest.iterator(name)
        number = 1 + sum(1 for loop in nest.loops if loop.iterator == iterator.name and loop.number)
        loops = [loop for loop in loops if loop.number or loop.iterator != iterator.name]
        made.append(TileLoop(iterator.name, number, size))
    shared = tuple(loop for loop in nest.shared if loop in loops)
    if len(shared) < len(nest.shared):
        raise CannotLower(f"{piece}: a parallel loop cannot be tiled any more; tile first")
    nest = replace(nest, loops=(*loops, *made))
    counts = [f"{nest.name(loop)} of {tiles(nest.op.extent(loop.iterator), loop.size)}" for loop in made]
    return nest.say(f"loops {', '.join(counts)} tiles")


def _interchange(piece: written.Interchange, nest: Nest) -> Nest:
    sums = [next((s for s in nest.sums if name in _sum_names(nest, s)), None) for name in piece.loops]
    if all(s is not None for s in sums):
        order = iter([s for s in sums if s is not None])
        nest = replace(nest, sums=tuple(next(order) if s in sums else s for s in nest.sums))
        return nest.say(f"sums over {', '.join(map(nest.shown, nest.sums))}")
    named = [nest.loop(name) for name in piece.loops]
    if len(set(named)) < len(named):
        raise ArgumentError(f"{piece} names one loop twice", expected=", ".join(map(nest.name, nest.loops)))
    following = iter(named)
    loops = tuple(next(following) if loop in named else loop for loop in nest.loops)
    for iterator in {loop.iterator: 0 for loop in loops}:
        numbers = [loop.number for loop in loops if loop.iterator == iterator]
        if numbers != sorted(numbers):
            raise CannotLower(f"{piece}: an outer tile of {nest.shown(iterator)} cannot be inside an inner one")
    nest = replace(nest, loops=loops)
    return nest.say(f"loops {', '.join(map(nest.name, loops))}")


def _sum_names(nest: Nest, iterator: str) -> tuple[str, ...]:
    """What the loop over a reduction inside the register tile is called: `k` where it is not tiled, else `k0`."""
    shown = nest.shown(iterator)
    tiled = any(loop.iterator == iterator for loop in nest.loops)
    return (f"{shown}0", f"{shown}.0") if tiled else (shown, f"{shown}0", f"{shown}.0")


def _parallel(piece: written.Parallel, nest: Nest) -> Nest:
    named = [loop for loop in map(nest.loop, piece.loops) if nest.op.extent(loop.iterator) > 1]
    if not nest.alone:
        return nest.say("stays serial: the loop around this contraction is parallel, or the options forbid it")
    outer = tuple(loop for loop in nest.loops if nest.op.extent(loop.iterator) > 1)[: len(named)]
    if tuple(named) != outer:
        raise CannotLower(f"{piece}: the outermost loops are {', '.join(map(nest.name, outer))}; interchange first")
    if any(not nest.op.iterator(loop.iterator).is_parallel for loop in named):
        raise CannotLower(f"{piece}: the iterations of a reduction depend on one another")
    if len({loop.iterator for loop in named}) < len(named):
        raise CannotLower(f"{piece}: two of these loops are of one iterator")
    count = prod(tiles(nest.op.extent(loop.iterator), loop.size) for loop in named)
    return replace(nest, shared=outer, grain=piece.grain).say(f"{count} iterations for the threads")


# --- copies ------------------------------------------------------------------------------------------------------


def _pack(piece: written.Pack, nest: Nest) -> Nest:
    for name, place in piece.factors:
        side = nest.side(name)
        if any(side is other for other, _ in nest.packs) and nest.op.is_product:
            raise CannotLower(f"{piece}: {name} is packed already")
        loop = None if place is None else nest.loop(place)
        nest = replace(nest, packs=(*nest.packs, (side, loop)))
        where = "outside of all loops" if loop is None else f"in every iteration of {nest.name(loop)}"
        nest = nest.say(f"{name} is copied {where}")
    return nest


def _prefetch(piece: written.Prefetch, nest: Nest) -> Nest:
    if not nest.op.is_product:
        raise CannotLower(f"{piece}: nothing that is read stays for several register tiles")
    for name, place in piece.factors:
        loop = nest.loop(place)
        nest = replace(nest, ahead=(*nest.ahead, (nest.side(name), loop)))
        nest = nest.say(f"{name} for the next iteration of {nest.name(loop)} is brought near")
    return nest


def _pad(piece: written.Pad, nest: Nest) -> Nest:
    sides = tuple(nest.side(name) for name in piece.factors)
    nest = replace(nest, padded=(*nest.padded, *sides))
    innermost = {loop.iterator: loop for loop in nest.loops}
    ends = [_end(nest, innermost[name]) for name in _padded(nest)]
    return nest.say(f"{', '.join(ends) or 'nothing'}; zeros and unstored results past the end")


def _padded(nest: Nest) -> list[str]:
    """The iterators that move nothing but factors to be padded."""
    others = [f for side, f in zip(Side, nest.op.factors, strict=True) if side not in nest.padded]
    mine = {n for side in nest.padded for n in names(nest.op.factors[side.value])}
    elsewhere = {n for factor in others for n in names(factor)}
    return [i.name for i in nest.op.parallel if i.name in mine and i.name not in elsewhere]


def _end(nest: Nest, loop: TileLoop) -> str:
    """What the last tile of a loop is like."""
    rest = nest.op.extent(loop.iterator) % loop.size
    return f"{nest.name(loop)} ends with {rest} of {loop.size}" if rest else f"{nest.name(loop)} has whole tiles"


def _peel(piece: written.Peel, nest: Nest) -> Nest:
    loops = tuple(nest.loop(name) for name in piece.loops)
    if flat := [loop for loop in loops if not loop.number]:
        raise CannotLower(f"{piece}: {nest.name(flat[0])} is not tiled")
    return replace(nest, peeled=(*nest.peeled, *loops)).say(
        f"{', '.join(_end(nest, loop) for loop in loops)}; the last one is code of its own"
    )


# --- the register tile -------------------------------------------------------------------------------------------


def _vectorize(piece: written.Vectorize, nest: Nest) -> Nest:
    contiguous = _contiguous(nest.op)
    if not contiguous and (piece.iterator is None or nest.op.is_product):
        raise CannotLower(f"{piece}: the output is contiguous along none of the iterators")
    if piece.iterator is None:
        lane_iterator = max(contiguous, key=lambda i: i.extent)
    else:
        lane_iterator = nest.iterator(piece.iterator)
        if not lane_iterator.is_parallel and nest.op.is_product:
            raise CannotLower(f"{piece}: {piece.iterator} is summed")
    shown = nest.shown(lane_iterator.name)
    if lane_iterator.extent < 2:
        raise CannotLower(f"{piece}: {shown} has one value")
    if all(lane_iterator.name not in names(factor) for factor in nest.op.factors):
        raise CannotLower(f"{piece}: no factor depends on {shown}")
    across = "; sums are turned to be stored" if nest.op.is_product and lane_iterator not in contiguous else ""
    return replace(nest, vector=lane_iterator.name, lanes=piece.lanes).say(f"lanes along {shown}{across}")


def _contiguous(op: StructuredOp) -> list[Dimension]:
    written_steps = steps(op.output, [i.name for i in op.iterators]) or {}
    return [i for i in op.parallel if written_steps.get(i.name) == 1 and i.extent > 1]


def _unroll(piece: written.Unroll, nest: Nest) -> Nest:
    for name, _ in piece.factors:
        if nest.iterator(name).is_parallel and nest.op.is_product:
            raise CannotLower(f"{piece}: the register tile of {name} is unrolled anyway")
    pairs = tuple((nest.iterator(name).name, factor) for name, factor in piece.factors)
    text = ", ".join(f"{name} by {factor}" if factor else f"{name} completely" for name, factor in piece.factors)
    return replace(nest, unrolled=(*nest.unrolled, *pairs)).say(text)


def _stream(piece: written.Stream, nest: Nest) -> Nest:
    return replace(nest, streaming=True).say("the output is written past the caches")


def _fragments(piece: written.Fragments, nest: Nest) -> Nest:
    found = [i.name for i in instructions(nest.op, nest.target) if piece.instruction in ("", i.name)]
    if not found:
        raise CannotLower(f"{piece}: the processor has no such instruction for these factors")
    return replace(nest, instruction=found[0]).say(f"register tiles by {found[0]}")


_MEANING: dict[type, Callable[..., Nest]] = {
    written.Tile: _tile,
    written.Interchange: _interchange,
    written.Parallel: _parallel,
    written.Pack: _pack,
    written.Pad: _pad,
    written.Peel: _peel,
    written.Vectorize: _vectorize,
    written.Unroll: _unroll,
    written.Stream: _stream,
    written.Fragments: _fragments,
    written.Prefetch: _prefetch,
}


# --- the plan ----------------------------------------------------------------------------------------------------


def _finish(nest: Nest) -> Plan:
    """The plan of a complete nest, all of whose conditions are checked here."""
    if nest.vector is None:
        nest = _vectorize(written.Vectorize(), nest)
    vector = nest.vector or ""
    last = [loop for loop in nest.loops if loop.iterator == vector][-1]
    widest = nest.target.lanes(nest.op.dtype.bits)
    if not last.number:
        one = replace(last, size=min(nest.lanes or widest, nest.op.extent(vector)))
        nest, last = _replace_loop(nest, last, one), one
    if last.size < 2:
        raise CannotLower(f"vectorize: the tiles of {nest.shown(vector)} have one point to run along the lanes")
    lanes = nest.lanes or _fitting(widest, min(last.size, nest.op.extent(vector)))
    kept = [loop for loop in nest.loops if nest.op.extent(loop.iterator) > 1]
    sums = tuple(s for s in nest.sums if nest.op.extent(s) > 1)
    unrolled, steps_at_once = _unrolling(nest, sums)
    collapsed = [loop for loop in nest.shared if nest.op.extent(loop.iterator) > 1]
    count = prod(tiles(nest.op.extent(loop.iterator), loop.size) for loop in collapsed)
    grain = (nest.grain or _grain(nest.op, count)) if collapsed else 1
    plan = Plan(
        vector,
        lanes,
        tuple(_levels(nest, kept, len(collapsed))),
        sums,
        unrolled,
        tuple(_packs(nest, kept, len(collapsed))),
        len(collapsed),
        grain,
        steps_at_once,
        nest.streaming,
        nest.instruction,
        ahead=tuple(Pack(side, _depth(nest, kept, loop)) for side, loop in nest.ahead),
    )
    _check(nest, plan)
    return plan


def _levels(nest: Nest, kept: Sequence[TileLoop], collapsed: int) -> Iterator[Level]:
    """The loops as levels, with what becomes of the last tiles of those that are not what it usually is."""
    uneven = _uneven(nest.op, [Level(loop.iterator, loop.size) for loop in kept])
    padded = _padded(nest)
    for depth, loop in enumerate(kept):
        innermost = all(later.iterator != loop.iterator for later in kept[depth + 1 :])
        rest = nest.op.extent(loop.iterator) % loop.size or depth in uneven
        edge: Edge | None = None
        if innermost and loop.iterator in padded and rest:
            if loop in nest.peeled:
                raise CannotLower(f"peel: the last tile of {nest.name(loop)} is padded")
            edge = Edge.PADDED
        elif depth in uneven:
            edge = Edge.PEELED if loop in nest.peeled else Edge.BRANCH
            usual = Edge.BRANCH if depth < collapsed else Edge.PEELED
            edge = None if edge is usual else edge
        yield Level(loop.iterator, loop.size, edge)


def _uneven(op: StructuredOp, levels: Sequence[Level]) -> frozenset[int]:
    """The levels that have full tiles and a shorter one after them, wherever they stand."""
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


def _replace_loop(nest: Nest, old: TileLoop, new: TileLoop) -> Nest:
    def swapped(loop: TileLoop) -> TileLoop:
        return new if loop == old else loop

    packs = tuple((side, None if loop is None else swapped(loop)) for side, loop in nest.packs)
    ahead = tuple((side, swapped(loop)) for side, loop in nest.ahead)
    loops, shared, peeled = (tuple(map(swapped, loops)) for loops in (nest.loops, nest.shared, nest.peeled))
    return replace(nest, loops=loops, shared=shared, packs=packs, peeled=peeled, ahead=ahead)


def _fitting(widest: int, size: int) -> int:
    """The widest vectors of which a tile of `size` points fills more than half."""
    lanes = widest
    while lanes > NARROWEST and lanes >= 2 * size:
        lanes //= 2
    return lanes


def _unrolling(nest: Nest, sums: Sequence[str]) -> tuple[int, int]:
    """How many of the innermost reductions are unrolled completely, and how far the one around them is."""
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
        name = nest.shown(next(iter(factors)))
        raise CannotLower(f"unroll: inside the loop over {name} another one is left; interchange them, or unroll both")
    return complete, partial


def _packs(nest: Nest, kept: Sequence[TileLoop], collapsed: int) -> Iterator[Pack]:
    for side, loop in nest.packs:
        yield Pack(side, 0 if loop is None else _depth(nest, kept, loop))


def _depth(nest: Nest, kept: Sequence[TileLoop], loop: TileLoop) -> int:
    """How many of the loops that are kept stand around the inside of `loop`."""
    return sum(1 for k in nest.loops[: nest.loops.index(loop) + 1] if k in kept)


def _grain(op: StructuredOp, iterations: int) -> int:
    """Of so many iterations of the parallel loop, how many are worth a thread."""
    return max(1, PARALLEL_WORK * iterations // max(1, op.multiplications))


def _cells(op: StructuredOp, plan: Plan) -> int:
    """Accumulators of a register tile."""
    return plan.vectors * prod(plan.tile(i.name) for i in normalise(op).parallel if i.name != plan.vector)


def _check(nest: Nest, plan: Plan) -> None:
    """Can the generator do this? Raises CannotLower."""
    op, cells = nest.op, _cells(nest.op, plan)
    if cells > MOST_REGISTERS * nest.target.vector_registers:
        raise CannotLower(
            f"the register tile has {cells} vectors of {plan.lanes} for {nest.target.vector_registers} registers; "
            "tile once more, with smaller sizes"
        )
    partial = [level for level in plan.levels if not op.iterator(level.iterator).is_parallel]
    if any(level.size < op.extent(level.iterator) for level in partial):
        shown = nest.shown(partial[0].iterator)
        if plan.streaming:
            raise CannotLower(f"stream: partial sums of blocks of {shown} are read again soon")
        if op.output.buffer.type.dtype != op.dtype:
            raise CannotLower(f"tile({shown}=...): the output is too narrow for partial sums of {op.dtype}")
        if plan.vector not in {i.name for i in _contiguous(op)}:
            raise CannotLower(f"tile({shown}=...): sums that are turned to be stored must be complete")
        if op.epilogue is not None and any(a.buffer.name == op.output.buffer.name for a in loads(op.epilogue)):
            raise CannotLower(
                f"tile({shown}=...): what is stored in the end depends on the old output, "
                "which partial sums would overwrite"
            )
    if plan.instruction:
        layout(normalise(op), plan)
        if plan.unrolled or plan.steps > 1:
            raise CannotLower("unroll: a step of fragments is many steps of the sum already")
    for step in plan.packs:
        _check_pack(nest, plan, step)
    for step in plan.ahead:
        if reason := objection(normalise(op), plan, step):
            raise CannotLower(f"prefetch: the {step.side.name.lower()} factor {reason}")
    for side in nest.padded:
        if all(step.side is not side for step in plan.packs):
            raise CannotLower(f"pad: the {side.name.lower()} factor is not packed, and only panels are padded")


def _check_pack(nest: Nest, plan: Plan, step: Pack) -> None:
    used = names(nest.op.factors[step.side.value])
    what = f"pack: the panel of the {step.side.name.lower()} factor"
    inside = [level.iterator for level in plan.levels[step.depth :] if level.iterator in used]
    around = [level.iterator for level in plan.levels[: step.depth]]
    for iterator in inside:
        shown = nest.shown(iterator)
        if inside.count(iterator) > 1:
            raise CannotLower(f"{what} would hold two levels of tiles of {shown}; pack inside the outer one")
        if not nest.op.iterator(iterator).is_parallel and iterator in around:
            raise CannotLower(f"{what} is between two tiles of the reduction {shown}")
    if 0 < step.depth < plan.collapsed:
        raise CannotLower(f"{what} is made between loops that the threads share; pack inside them, or all of it first")


# --- and back ----------------------------------------------------------------------------------------------------


def pipeline_of(plan: Plan, op: StructuredOp) -> Pipeline:
    """The pipeline from which `plan_of` makes `plan`, for a normalised op."""
    nest = replace(start(op, NOWHERE), loops=_numbered(plan))
    pieces: list[Piece] = list(_tiles(nest))
    original = tuple(i.name for i in op.reductions)
    if plan.reductions != original:
        pieces.append(written.Interchange(tuple(_sum_names(nest, s)[0] for s in plan.reductions)))
    for step in plan.packs:
        pieces.append(written.Pack(((_factor_name(op, step.side), _loop_name(nest, step.depth)),)))
    pieces += _edges(nest, plan)
    if plan.collapsed:
        count = prod(tiles(op.extent(level.iterator), level.size) for level in plan.levels[: plan.collapsed])
        grain = 0 if plan.grain == _grain(op, count) else plan.grain
        pieces.append(written.Parallel(tuple(map(nest.name, nest.loops[: plan.collapsed])), grain))
    pieces.append(written.Vectorize(nest.shown(plan.vector), plan.lanes))
    if unrolled := _unrolled(nest, plan):
        pieces.append(written.Unroll(unrolled))
    if plan.streaming:
        pieces.append(written.Stream())
    if plan.instruction:
        pieces.append(written.Fragments(plan.instruction))
    for step in plan.ahead:
        loop = nest.name(nest.loops[step.depth - 1])
        pieces.append(written.Prefetch(((_factor_name(op, step.side), loop),)))
    return Pipeline(tuple(pieces))


def _edges(nest: Nest, plan: Plan) -> Iterator[Piece]:
    """What says how the last tiles end."""
    padded = {level.iterator for level in plan.levels if level.edge is Edge.PADDED}
    sides = [step.side for step in plan.packs if padded & set(names(nest.op.factors[step.side.value]))]
    if sides:
        yield written.Pad(tuple(_factor_name(nest.op, side) for side in sides))
    usual = [Edge.BRANCH if depth < plan.collapsed else Edge.PEELED for depth in range(len(plan.levels))]
    ends = [level.edge or edge for level, edge in zip(plan.levels, usual, strict=True)]
    peeled = [depth for depth in sorted(_uneven(nest.op, plan.levels)) if ends[depth] is Edge.PEELED]
    if peeled:
        yield written.Peel(tuple(nest.name(nest.loops[depth]) for depth in peeled))


def _numbered(plan: Plan) -> tuple[TileLoop, ...]:
    """The levels of a plan as the loops of a nest."""
    seen: dict[str, int] = {}
    loops = []
    for level in plan.levels:
        seen[level.iterator] = seen.get(level.iterator, 0) + 1
        loops.append(TileLoop(level.iterator, seen[level.iterator], level.size))
    return tuple(loops)


def _tiles(nest: Nest) -> Iterator[written.Tile]:
    """Consecutive loops of different iterators are one tiling."""
    sizes: dict[str, int] = {}
    for loop in nest.loops:
        name = nest.shown(loop.iterator)
        if name in sizes:
            yield written.Tile(tuple(sizes.items()))
            sizes = {}
        sizes[name] = loop.size
    if sizes:
        yield written.Tile(tuple(sizes.items()))


def _factor_name(op: StructuredOp, side: Side) -> str:
    """The first tensor that only this factor reads; its place where there is none."""
    other = Side.RIGHT if side is Side.LEFT else Side.LEFT
    theirs = {a.buffer.name for a in loads(op.factors[other.value])}
    mine = [a.buffer.name for a in loads(op.factors[side.value]) if a.buffer.name not in theirs]
    return mine[0] if mine else side.name.lower()


def _loop_name(nest: Nest, depth: int) -> str | None:
    return nest.name(nest.loops[depth - 1]) if depth else None


def _unrolled(nest: Nest, plan: Plan) -> tuple[tuple[str, int], ...]:
    first = len(plan.reductions) - plan.unrolled
    whole = tuple((nest.shown(name), 0) for name in plan.reductions[first:])
    if plan.steps > 1 and first:
        return (*whole, (nest.shown(plan.reductions[first - 1]), plan.steps))
    return whole
