"""Small changes to pipelines: the size of a tile, a loop more around it, unrolling, lanes, what threads share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import ArgumentError, CannotLower
from ..structured import pipeline as written
from ..structured.apply import outermost
from ..structured.normalise import normalise
from ..structured.op import Iterator, StructuredOp
from ..structured.pipeline import Piece, Pipeline

MOST_SIZES = 24
UNROLLS = (1, 2, 4, 8)
LANES = (4, 8, 16, 32)
SERIAL = -1
SHARED = (1, 2, 3, SERIAL)
"""Outermost loops that the threads share; `SERIAL`: they share none."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A number of a pipeline that can be changed. values: what it can become; 0 leaves it.

    kind: "inner" (the last tile of an iterator), "outer" (the one around that), "unroll", and without an iterator
        "lanes" and "threads".
    """

    kind: str
    iterator: str
    values: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.iterator}.{self.kind}" if self.iterator else self.kind


def edits(op: StructuredOp) -> tuple[Edit, ...]:
    """What can be changed in pipelines for an op."""
    found = []
    for i in normalise(op).iterators:
        values = _sizes(i)
        found.append(Edit("inner", _shown(op, i), values))
        if i.is_parallel and len(values) > 2:
            found.append(Edit("outer", _shown(op, i), values[:-1]))
    sums = normalise(op).reductions
    if sums:
        found.append(Edit("unroll", _shown(op, sums[-1]), UNROLLS))
    return (*found, Edit("lanes", "", LANES), Edit("threads", "", SHARED))


def _shown(op: StructuredOp, i: Iterator) -> str:
    return i.name.removeprefix(f"{op.name}_")


def _sizes(i: Iterator) -> tuple[int, ...]:
    powers = {1 << k for k in range(i.extent.bit_length()) if 1 << k <= i.extent}
    parts = {-(-i.extent // k) for k in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)}
    small = {n for n in (3, 5, 6, 7, 12, 14, 24, 28, 48) if n <= i.extent}
    every = sorted(powers | parts | small)
    if len(every) <= MOST_SIZES:
        return tuple(every)
    return tuple(every[k * len(every) // MOST_SIZES] for k in range(MOST_SIZES))


def edit(pipeline: Pipeline, chosen: Mapping[Edit, int], op: StructuredOp) -> Pipeline:
    """`pipeline` with the numbers chosen; whether anybody can follow it, `plan_of` tells."""
    pieces = list(pipeline.pieces)
    for e, value in chosen.items():
        match e.kind:
            case _ if not value:
                pass
            case "unroll":
                pieces = _unrolled(pieces, e.iterator, value)
            case "lanes":
                pieces = [replace(p, lanes=value) if isinstance(p, written.Vectorize) else p for p in pieces]
            case "threads":
                pieces = _shared(pieces, value, op)
            case _:
                pieces = _tiled(pieces, e.iterator, value, level=0 if e.kind == "inner" else 1)
    return Pipeline(tuple(pieces))


def _shared(pieces: list[Piece], count: int, op: StructuredOp) -> list[Piece]:
    """With so many of the outermost loops shared among the threads, however little work there is in one."""
    serial: list[Piece] = [p for p in pieces if not isinstance(p, written.Parallel)]
    if count == SERIAL:
        return serial
    try:
        loops = outermost(Pipeline(tuple(serial)), op, count)
    except (CannotLower, ArgumentError):  # nobody can follow it, shared or not
        return serial
    return [*serial, written.Parallel(loops, grain=1)] if loops else serial


def _tiled(pieces: list[Piece], iterator: str, value: int, level: int) -> list[Piece]:
    """With another size for the tile at a level of an iterator, counted from the inside.

    A tile that is not there is made: around all others where it encloses one, else inside the first loop.
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


def _unrolled(pieces: list[Piece], iterator: str, value: int) -> list[Piece]:
    kept: list[Piece] = []
    for p in pieces:
        if isinstance(p, written.Unroll):
            factors = tuple(x for x in p.factors if x[0] != iterator)
            if factors:
                kept.append(replace(p, factors=factors))
        else:
            kept.append(p)
    return kept if value == 1 else [*kept, written.Unroll(((iterator, value),))]
