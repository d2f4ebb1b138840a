"""Vectorize the loads and stores of a thread's values at neighboring elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.linear_forms import difference
from ...loop_ir.rewrite import map_expr, walk_expr
from .memory_moves import VECTOR_BYTES, is_multiple

MAX_LANES = {1: 4, 2: 8, 4: 4, 8: 2}
"""The maximum vector lanes that the CUDA printer supports, by the bytes of an element."""


@dataclass(slots=True)
class VectorLoads:
    """Vector loads into staging buffers, from whose elements values are then computed."""

    prefix: str
    buffers: list[ir.Buffer] = field(default_factory=list)
    statements: list[ir.Stmt] = field(default_factory=list)
    found: dict[ir.Load, ir.Load] = field(default_factory=dict)

    def join(self, values: Sequence[ir.Expr]) -> list[ir.Expr]:
        """`values` with vector loads where consecutive values read consecutive elements of a buffer."""
        columns = [[x for x in walk_expr(v) if isinstance(x, ir.Load)] for v in values]
        if len({len(c) for c in columns}) == 1:
            for loads in zip(*columns, strict=True):
                self._vectors(loads)
        return [self._replace_loads(v) for v in values]

    def _vectors(self, loads: Sequence[ir.Load]) -> None:
        if loads[0] in self.found:
            return
        lanes = vector_lanes([(x.buffer, x.indices) for x in loads if x.mask is None], len(loads))
        if lanes == 1:
            return
        for first in range(0, len(loads), lanes):
            buffer, at = loads[first].buffer, loads[first].indices
            staging = ir.Buffer(
                f"{self.prefix}_{len(self.buffers)}", buffer.type, (lanes,), (1,), ir.Space.SCRATCH
            )  # fmt: skip
            self.buffers.append(staging)
            vector = build.load(buffer, *at[:-1], build.ramp(at[-1], 1, lanes))
            self.statements.append(build.store(staging, (build.ramp(0, 1, lanes),), vector))
            for lane in range(lanes):
                self.found[loads[first + lane]] = build.load(staging, lane)

    def _replace_loads(self, e: ir.Expr) -> ir.Expr:
        if isinstance(e, ir.Load) and e in self.found:
            return self.found[e]
        return map_expr(e, self._replace_loads)


def vector_lanes(places: Sequence[tuple[ir.Buffer, tuple[ir.Expr, ...]]], count: int) -> int:
    """The lanes of a vector access to `places`; 1 if they are not `count` contiguous, aligned elements."""
    if len(places) != count or count == 1:
        return 1
    (buffer, first), *others = places
    lanes = min(count, VECTOR_BYTES // buffer.type.dtype.size, MAX_LANES[buffer.type.dtype.size])
    if not first or buffer.space is not ir.Space.GLOBAL or buffer.strides[-1] != 1 or buffer.type.dtype.is_bool:
        return 1
    for n, (other, at) in enumerate(others, 1):
        steps = [difference(b, a) for a, b in zip(first, at, strict=True)] if other == buffer else []
        if steps != [0] * (len(first) - 1) + [n]:
            return 1
    while lanes > 1 and not (count % lanes == 0 and _is_aligned(buffer, first, lanes)):
        lanes //= 2
    return lanes


def _is_aligned(buffer: ir.Buffer, at: tuple[ir.Expr, ...], lanes: int) -> bool:
    """Whether the offset of an element is a multiple of `lanes` for all values of the indices."""
    outer = zip(at[:-1], buffer.strides[:-1], strict=True)
    return is_multiple(at[-1], lanes) and all(stride % lanes == 0 or is_multiple(i, lanes) for i, stride in outer)


def store_neighbors(
    buffer: ir.Buffer, places: Sequence[tuple[ir.Expr, ...]], values: Sequence[ir.Expr], prefix: str
) -> ir.Stmt:
    """Store `values` at the indices `places`, with vector loads and stores of contiguous elements."""
    loads = VectorLoads(f"{prefix}_in")
    values = loads.join(values)
    lanes = (
        vector_lanes([(buffer, at) for at in places], len(places))
        if buffer.space is ir.Space.GLOBAL
        else _shared_lanes(buffer, len(places))
    )
    stores: list[ir.Stmt] = []
    buffers = list(loads.buffers)
    if lanes == 1:
        stores += [build.store(buffer, at, v) for at, v in zip(places, values, strict=True)]
    else:
        for first in range(0, len(places), lanes):
            staging = ir.Buffer(f"{prefix}_out_{first}", buffer.type, (lanes,), (1,), ir.Space.SCRATCH)
            buffers.append(staging)
            stores += [build.store(staging, (n,), values[first + n]) for n in range(lanes)]
            at = places[first]
            vector = build.load(staging, build.ramp(0, 1, lanes))
            stores.append(build.store(buffer, (*at[:-1], build.ramp(at[-1], 1, lanes)), vector))
    body = build.block(*loads.statements, *stores)
    return build.allocate(buffers, body) if buffers else body


def _shared_lanes(buffer: ir.Buffer, count: int) -> int:
    """The lanes of a vector store to a shared tile, whose rows are filled in aligned groups of `count`."""
    lanes = min(count, MAX_LANES[buffer.type.dtype.size])
    return lanes if count % lanes == 0 else 1
