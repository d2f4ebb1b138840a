"""Transposed stores of a register tile whose lanes run along another iterator than the output's contiguous one.

If the output's contiguous runs are short, like the rows of a small image, vectors along another iterator (the channels)
use all lanes. The sums pass through a scratch buffer in L1 and are transposed in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.nodes import Buffer, Expr, Let, Loop, Stmt, Var
from ...thresholds import TRANSPOSE_BITS
from ..analysis.access_strides import access_strides
from ..op import ACCUMULATOR, StructuredOp
from ..plan import Plan
from .tile import Region, local_var
from .transpose import transpose_vectors
from .vector_expr import first_lanes_mask, substitute_vectorized


def transposed_iterator(op: StructuredOp, plan: Plan, region: Region) -> str | None:
    """The iterator of a register tile along which the output is contiguous; None if that is the lanes'."""
    found = access_strides(op.output, [i.name for i in op.iterators]) or {}
    if found.get(plan.vector) == 1:
        return None
    return next((i.name for i in op.parallel if found.get(i.name) == 1 and region[i.name].size > 1), None)


def store_transposed(
    op: StructuredOp, plan: Plan, region: Region, rows: Sequence[str], buffer: Buffer, at: Mapping[str, Expr]
) -> Stmt:
    """Store the sums of a register tile from `buffer` through the epilogue, in vectors along `transposed_iterator`.

    rows: the iterators other than the lanes'; the last varies fastest from row to row of the buffer.
    at: the first point of the tile.
    """
    unit = transposed_iterator(op, plan, region)
    assert unit is not None
    side = min(TRANSPOSE_BITS // op.dtype.bits, plan.lanes)
    tile = _Tile(op, region, buffer, side, unit, plan.vector, dict(at), tuple(rows))
    return tile.rows_loop(tile.columns)


def flat_row_index(rows: Sequence[str], region: Region, offsets: Mapping[str, Expr]) -> Expr:
    """The number of a buffer's row, for a buffer with a row per point of `rows`, the last varying fastest."""
    flat: Expr = build.const(0)
    for name in rows:
        if region[name].size > 1:
            flat = build.add(build.mul(flat, region[name].size), offsets[name])
    return flat


Point = dict[str, Expr]


@dataclass(frozen=True, slots=True)
class _Tile:
    """A register tile in `buffer`, with a row per point of `rows`, that is stored in vectors along `unit`.

    Attributes:
        side: rows and columns that are transposed at once, at most the lanes of a vector.
        across: the iterator of the lanes.
        at: the first point of the tile.
    """

    op: StructuredOp
    region: Region
    buffer: Buffer
    side: int
    unit: str
    across: str
    at: Point
    rows: tuple[str, ...]

    def rows_loop(self, body: Callable[[Point], Stmt]) -> Stmt:
        """Loops over `rows` without `unit`; `body` gets their offsets in the tile."""
        others = [name for name in self.rows if name != self.unit and self.region[name].size > 1]
        loops = [(internal_name(name, "row"), self.region[name].size) for name in others]
        return build.loops(loops, body({name: Var(internal_name(name, "row")) for name in others}))

    def columns(self, offsets: Point) -> Stmt:
        """All columns, `side` at a time."""
        full, rest = divmod(self.region[self.across].size, self.side)
        group = Var(internal_name(self.across, "group"))
        parts: list[Stmt] = []
        if full:
            body = self._blocks(offsets, build.mul(group, self.side), self.side)
            parts.append(Loop(group.name, build.const(0), build.const(full), body))
        if rest:
            parts.append(self._blocks(offsets, build.const(full * self.side), rest))
        return build.block(*parts)

    def _blocks(self, offsets: Point, first: Expr, count: int) -> Stmt:
        starts = range(0, self.region[self.unit].size, self.side)
        return build.block(*(self._block(offsets, start, first, count) for start in starts))

    def _block(self, offsets: Point, start: int, first: Expr, count: int) -> Stmt:
        """The square block of `side` rows from `start` and `count` columns from `first` on."""
        rows = min(self.side, self.region[self.unit].size - start)
        bound: list[tuple[Var, Expr]] = []

        def bind(value: Expr) -> Expr:
            bound.append((Var(internal_name(self.op.name, f"s{start}", len(bound)), value.type), value))
            return bound[-1][0]

        lines: list[Expr] = [build.const(0, self.op.dtype, self.side)] * self.side
        for k in range(rows):
            row = flat_row_index(self.rows, self.region, {**offsets, self.unit: build.const(start + k)})
            lines[k] = bind(build.load(self.buffer, row, build.ramp(first, 1, self.side)))
        turned = transpose_vectors(lines, lambda a, b, order: bind(build.shuffle(a, b, order)))
        body = build.block(*(self._store_column(offsets, start, build.add(first, k), turned[k]) for k in range(count)))
        for name, value in reversed(bound):
            body = Let(name.name, value, body)
        return body

    def _store_column(self, offsets: Point, start: int, column: Expr, total: Expr) -> Stmt:
        """Store the vector `total` of one column."""
        here = {**self.at, ACCUMULATOR: total}
        along_unit = build.ramp(start, 1, self.side)
        for name, offset in {**offsets, self.unit: along_unit, self.across: column}.items():
            here |= {name: build.add(offset, self.region[name].origin), local_var(name): offset}
        mask = first_lanes_mask(self.region[self.unit].size - start, self.side)
        value = build.broadcast(substitute_vectorized(self.op.stored_value, here, mask), self.side)
        where = tuple(substitute_vectorized(i, here) for i in self.op.output.indices)
        return build.store(self.op.output.buffer, where, value, mask=mask)
