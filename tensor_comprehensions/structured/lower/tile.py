"""Tiling: loops over the tiles of an iterator, with separate code for the remainder tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.build import FALSE, TRUE
from ...loop_ir.nodes import Const, Expr, Let, Loop, LoopKind, Stmt, Type, Var
from ..plan import Edge, TileLoop


@dataclass(frozen=True, slots=True)
class IterRange:
    """The part of an iterator that code covers: `size` points from `origin` on.

    Attributes:
        number: the number of this tile in the surrounding range.
        first, last: whether it is the first and the last tile of the iterator: bool expressions, constant if known.
        rest, short: a padded tile has only `rest` valid points if the bool expression `short` holds; `rest` is 0 if
            all points are always valid.
        before: how many tiles of the next inner level precede this range.
    """

    origin: Expr
    size: int
    number: Expr
    first: Expr = TRUE
    last: Expr = TRUE
    rest: int = 0
    short: Expr = FALSE
    before: int = 0


Region = Mapping[str, IterRange]


def full_region(extents: Mapping[str, int]) -> Region:
    """The complete iteration domain."""
    return {name: IterRange(build.const(0), extent, build.const(0)) for name, extent in extents.items()}


def num_tiles(extent: int, size: int) -> int:
    """How many tiles of `size` points cover `extent` points."""
    return -(-extent // size)


def balanced_block(extent: int, most: int) -> int:
    """A block size near `most` that divides `extent` if possible, so that no remainder needs code of its own."""
    parts = -(-extent // most)
    for count in range(parts, 2 * parts + 1):
        for equal in (count, 2 * parts - count):
            if equal > parts // 2 and extent % equal == 0:
                return extent // equal
    return -(-extent // parts)


def _make_tile_region(region: Region, level: TileLoop, number: Expr, size: int, *, final: bool | None) -> Region:
    """Tile `number` of `level` in `region`, of `size` points; final: whether it is the last one, None if unknown."""
    old = region[level.iterator]
    count = num_tiles(old.size, level.size)
    last = build.eq(number, count - 1) if final is None else (TRUE if final else FALSE)
    origin = build.add(old.origin, build.mul(number, level.size))
    first = build.logical_and(old.first, build.eq(number, 0))
    new = IterRange(origin, size, build.add(number, old.before), first, build.logical_and(old.last, last))
    if level.edge is Edge.PADDED and old.size % level.size:
        new = replace(new, rest=old.size % level.size, short=last)
    return {**region, level.iterator: new}


def specialize_padded_extents(region: Region, body: Body) -> Stmt:
    """`body` for every combination of full and partial sizes that the padded tiles of `region` may have."""
    padded = next((name for name, part in region.items() if part.rest), None)
    if padded is None:
        return body(region)
    part = region[padded]
    exact = ({**region, padded: replace(part, size=size, rest=0)} for size in (part.rest, part.size))
    return build.when(part.short, *(specialize_padded_extents(r, body) for r in exact))


Body = Callable[[Region], Stmt]


def tile_loop(region: Region, level: TileLoop, name: str, body: Body) -> Stmt:
    """A serial loop over the full tiles of `level`, then the remainder tile; `level.edge` may change that."""
    extent = region[level.iterator].size
    full, rest = divmod(extent, level.size)
    if rest and full and level.edge is Edge.BRANCH:
        return Loop(
            name, build.const(0), build.const(full + 1), _emit_tile_or_remainder(Var(name), region, level, body)
        )
    if rest and level.edge is Edge.PADDED:
        rest, full = 0, full + 1
    parts: list[Stmt] = []
    if full == 1:
        parts.append(body(_make_tile_region(region, level, build.const(0), level.size, final=not rest)))
    elif full:
        final = None if not rest else False
        tile = _make_tile_region(region, level, Var(name), level.size, final=final)
        parts.append(Loop(name, build.const(0), build.const(full), body(tile)))
    if rest:
        parts.append(body(_make_tile_region(region, level, build.const(full), rest, final=True)))
    return build.block(*parts)


def tile_nest(region: Region, levels: Sequence[TileLoop], prefix: str, body: Body) -> Stmt:
    """Serial loops over the tiles of all `levels`, outermost first."""
    if not levels:
        return body(region)
    name = internal_name(prefix, levels[0].iterator, f"t{len(levels)}")
    return tile_loop(region, levels[0], name, lambda r: tile_nest(r, levels[1:], prefix, body))


def parallel_tile_nest(region: Region, levels: Sequence[TileLoop], prefix: str, grain: int, body: Body) -> Loop:
    """One parallel loop over the tiles of all `levels` (distinct iterators), the last level varying fastest."""
    counts = [num_tiles(region[level.iterator].size, level.size) for level in levels]
    counter = internal_name(prefix, "tile")
    total = 1
    for count in counts:
        total *= count
    inner = _decode_tile_numbers(Var(counter), region, list(levels), counts, prefix, body)
    return Loop(counter, build.const(0), build.const(total), inner, LoopKind.PARALLEL, grain=min(grain, total))


def peel_region(region: Region, levels: Sequence[TileLoop]) -> list[Region]:
    """`region` in parts, in each of which the peeled ones of `levels` have only full tiles or only the remainder."""
    parts = [region]
    for level in levels:
        old = region[level.iterator]
        rest = old.size % level.size
        if level.edge is Edge.PEELED and level.size < old.size and rest:
            ends = ((0, old.size - rest), (old.size - rest, rest))
            cut = [
                replace(old, origin=build.add(old.origin, start), size=size, before=start // level.size)
                for start, size in ends
            ]
            parts = [{**part, level.iterator: new} for part in parts for new in cut]
    return parts


def _decode_tile_numbers(
    flat: Expr, region: Region, levels: list[TileLoop], counts: list[int], prefix: str, body: Body
) -> Stmt:
    """Decode the tile number of the last level from `flat`, then those of the outer levels, around `body`."""
    if not levels:
        return body(region)
    *outer, level = levels
    *outer_counts, count = counts
    digit = build.mod(flat, count) if outer else flat
    rest = build.div(flat, count)
    if count == 1:
        return _emit_tile_or_remainder(
            build.const(0), region, level, lambda r: _decode_tile_numbers(rest, r, outer, outer_counts, prefix, body)
        )
    name, rest_name = internal_name(prefix, level.iterator, "t"), internal_name(prefix, f"rest{len(outer)}")
    if not outer:
        return _emit_tile_or_remainder(flat, region, level, body)
    inner = _emit_tile_or_remainder(
        Var(name), region, level, lambda r: _decode_tile_numbers(Var(rest_name), r, outer, outer_counts, prefix, body)
    )
    return Let(name, digit, Let(rest_name, rest, inner))


def _emit_tile_or_remainder(number: Expr, region: Region, level: TileLoop, body: Body) -> Stmt:
    """`body` for tile `number`, with a branch to separate code for the remainder tile."""
    full, rest = divmod(region[level.iterator].size, level.size)
    if not full and level.edge is not Edge.PADDED:
        return body(_make_tile_region(region, level, build.const(0), rest, final=True))
    if not rest or level.edge is Edge.PADDED:
        return body(_make_tile_region(region, level, number, level.size, final=None))
    then = body(_make_tile_region(region, level, number, level.size, final=False))
    return build.when(
        build.lt(number, full), then, body(_make_tile_region(region, level, build.const(full), rest, final=True))
    )


def region_origin(region: Region) -> dict[str, Expr]:
    """The values at the first point of `region` of each iterator, its `local_var` and its `tile_number_var`."""
    values: dict[str, Expr] = {}
    for name, part in region.items():
        values[name] = part.origin
        values[local_var(name)] = Const(0, Type(part.origin.type.dtype))
        values[tile_number_var(name)] = part.number
    return values


def local_var(iterator: str) -> str:
    """The variable for an iterator's value counted from the start of its tile; panels are indexed by it."""
    return internal_name(iterator, "local")


def tile_number_var(iterator: str) -> str:
    """The variable for the number of an iterator's tile; panels are indexed by it."""
    return internal_name(iterator, "number")
