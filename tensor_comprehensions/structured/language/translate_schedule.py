"""Translate a schedule to an op with other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.internal_names import SEPARATOR
from ..op import StructuredOp, loads_in
from . import primitives as p
from .primitives import Primitive, Schedule


def translate_schedule(pipeline: Schedule, op: StructuredOp, other: StructuredOp) -> Schedule:
    """`pipeline`, a schedule for `op`, with the names of `other`, which differs from `op` only in names."""
    iterators = {
        op.display_name(i.name): other.display_name(j.name) for i, j in zip(op.iterators, other.iterators, strict=True)
    }
    pairs = zip(_list_factor_tensors(op), _list_factor_tensors(other), strict=True)
    return _Translation(iterators, dict(pairs)).pipeline(pipeline)


def _list_factor_tensors(op: StructuredOp) -> tuple[str, ...]:
    return tuple(load.buffer.name for factor in op.factors for load in loads_in(factor))


@dataclass(frozen=True, slots=True)
class _Translation:
    """Maps from old to new names. factors: of the tensors that the factors read."""

    iterators: Mapping[str, str]
    factors: Mapping[str, str]

    def pipeline(self, pipeline: Schedule) -> Schedule:
        return Schedule(tuple(map(self.piece, pipeline.primitives)))

    def piece(self, piece: Primitive) -> Primitive:
        match piece:
            case p.Tile(sizes):
                return p.Tile(tuple((self.loop(name), size) for name, size in sizes))
            case p.Interchange(loops):
                return p.Interchange(tuple(map(self.loop, loops)))
            case p.Pack(factors):
                return p.Pack(tuple((self.factor(x), None if loop is None else self.loop(loop)) for x, loop in factors))
            case p.Pad(padded):
                return p.Pad(tuple(map(self.factor, padded)))
            case p.Peel(loops):
                return p.Peel(tuple(map(self.loop, loops)))
            case p.Vectorize(iterator, lanes, joined):
                return p.Vectorize(None if iterator is None else self.loop(iterator), lanes, joined)
            case p.Unroll(counts):
                return p.Unroll(tuple((self.loop(name), count) for name, count in counts))
            case p.Parallel(loops, grain):
                return p.Parallel(tuple(map(self.loop, loops)), grain)
            case p.Prefetch(fetched):
                return p.Prefetch(tuple((self.factor(x), self.loop(loop)) for x, loop in fetched))
            case p.PackOutput(loop):
                return p.PackOutput(self.loop(loop))
            case p.Choice(options):
                return p.Choice(tuple(map(self.pipeline, options)))
        return piece

    def factor(self, name: str) -> str:
        return self.factors.get(name, name)

    def loop(self, name: str) -> str:
        """The new name of an iterator, or of a tile loop; a dot separates its number from the iterator's own digits."""
        if name in self.iterators:
            return self.iterators[name]
        stems = [s for s in self.iterators if name.startswith(s) and name[len(s) :].lstrip(SEPARATOR).isdigit()]
        if not stems:
            return name
        stem = max(stems, key=len)
        return f"{self.iterators[stem]}{SEPARATOR}{name[len(stem) :].lstrip(SEPARATOR)}"
