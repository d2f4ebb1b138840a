"""A plan as the pipeline that makes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from . import pipeline as written
from .finish import uneven, usual_grain
from .nest import NOWHERE, Nest, TileLoop, start, sum_names
from .op import StructuredOp, loads, names
from .pipeline import Piece, Pipeline
from .plan import Edge, Plan, Side
from .tile import tiles


def pipeline_of(plan: Plan, op: StructuredOp) -> Pipeline:
    """The pipeline from which `plan_of` makes `plan`, for a normalised op."""
    nest = replace(start(op, NOWHERE), loops=_numbered(plan))
    pieces: list[Piece] = list(_tiles(nest))
    original = tuple(i.name for i in op.reductions)
    if plan.reductions != original:
        pieces.append(written.Interchange(tuple(sum_names(nest, s)[0] for s in plan.reductions)))
    for step in plan.packs:
        pieces.append(written.Pack(((factor_name(op, step.side), _loop_name(nest, step.depth)),)))
    pieces += _edges(nest, plan)
    if plan.collapsed:
        count = prod(tiles(op.extent(level.iterator), level.size) for level in plan.levels[: plan.collapsed])
        grain = 0 if plan.grain == usual_grain(op, count) else plan.grain
        pieces.append(written.Parallel(tuple(map(nest.name, nest.loops[: plan.collapsed])), grain))
    pieces.append(written.Vectorize(nest.shown(plan.vector), plan.lanes, plan.joined))
    if unrolled := _unrolled(nest, plan):
        pieces.append(written.Unroll(unrolled))
    if plan.streaming:
        pieces.append(written.Stream())
    if plan.instruction:
        pieces.append(written.Fragments(plan.instruction))
    if plan.unpacked is not None:
        pieces.append(written.Unpack(nest.name(nest.loops[plan.unpacked - 1])))
    for step in plan.ahead:
        loop = nest.name(nest.loops[step.depth - 1])
        pieces.append(written.Prefetch(((factor_name(op, step.side), loop),)))
    return Pipeline(tuple(pieces))


def _edges(nest: Nest, plan: Plan) -> Iterator[Piece]:
    """What says how the last tiles end."""
    padded = {level.iterator for level in plan.levels if level.edge is Edge.PADDED}
    sides = [step.side for step in plan.packs if padded & set(names(nest.op.factors[step.side.value]))]
    if sides:
        yield written.Pad(tuple(factor_name(nest.op, side) for side in sides))
    usual = [Edge.BRANCH if depth < plan.collapsed else Edge.PEELED for depth in range(len(plan.levels))]
    ends = [level.edge or edge for level, edge in zip(plan.levels, usual, strict=True)]
    peeled = [depth for depth in sorted(uneven(nest.op, plan.levels)) if ends[depth] is Edge.PEELED]
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


def factor_name(op: StructuredOp, side: Side) -> str:
    """What pieces call a factor: the first tensor that only this factor reads; its place where there is none."""
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
