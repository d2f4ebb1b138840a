"""Transposition in vector registers: reads that are contiguous along one axis feed statements vectorized along another.

A block of L x L elements is loaded as L vectors along the first axis, transposed by shuffles of pairs of registers,
and used as L vectors along the second. Nothing goes through memory in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.dtypes import BOOL, UINT8, DType
from ...core.internal_names import internal_name
from ...loop_ir import build, linear_forms
from ...loop_ir.intrinsics import PREFETCH
from ...loop_ir.nodes import Const, Expr, If, Invoke, Let, Load, Loop, Space, Stmt, Store, Var
from ...loop_ir.rewrite import map_expr
from ...machine import CACHE_LINE_BYTES, SHUFFLE_BYTES
from .vector_expr import first_lanes_mask, substitute_vectorized


def begin_lines(strides: Sequence[int], size: int) -> bool:
    """Whether every row of a tensor, with elements of `size` bytes, begins a line if the tensor does."""
    return all(step == 1 or step * size % CACHE_LINE_BYTES == 0 for step in strides)


Pair = Callable[[Expr, Expr, tuple[int, ...]], Expr]
"""How two vectors and the choice of lanes become one: `build.shuffle`, or that bound to a name."""

Part = Callable[[int, int, int], Expr]
"""The lanes of a row of a matrix: (row, first column, how many)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop: its variable runs from `start` up to `stop`."""

    name: str
    start: Expr
    stop: Expr

    @property
    def end(self) -> Expr:
        """`stop`, by a name if it is not a constant."""
        return self.stop if isinstance(self.stop, Const) else build.var(internal_name(self.name, "stop"))

    @property
    def length(self) -> int | None:
        """The number of values, if known."""
        return linear_forms.difference(self.stop, self.start)

    def splits(self, side: int) -> bool:
        """Whether the range is known to be whole blocks of `side`."""
        return self.length is not None and self.length % side == 0

    def cut(self, side: int) -> tuple[Axis, Axis]:
        """The whole blocks of `side`, and the rest; the length must be known."""
        assert self.length is not None
        middle = build.add(self.start, self.length // side * side)
        return replace(self, stop=middle), replace(self, start=middle)

    def widen_to_block(self, before: Axis, side: int) -> Axis:
        """The range as a block of `side`, extended to the left into the range `before` it, if that exists."""
        return replace(self, start=build.sub(self.stop, side)) if self.length and before.length else self


def transpose_vectors(vectors: Sequence[Expr], pair: Pair = build.shuffle) -> list[Expr]:
    """The columns of the square matrix whose rows are `vectors`: as many as they have lanes, a power of two.

    Pieces are transposed first, by interleaving halves; then the pieces change places, even ones and odd ones apart.
    """
    side = len(vectors)
    piece = min(side, SHUFFLE_BYTES // vectors[0].type.dtype.size)
    groups = [_transpose_pieces(vectors[k : k + piece], piece, pair) for k in range(0, side, piece)]
    across = [_gather_pieces([g[p] for g in groups], piece, pair) for p in range(piece)]
    return [across[lane % piece][lane // piece] for lane in range(side)]


def gather_transposed(
    part: Part, shape: tuple[int, int], side: int, element: DType, pair: Pair = build.shuffle
) -> list[Expr]:
    """The columns of a matrix in memory, in vectors of `side` lanes.

    Pieces of rows meet in the order of the columns as they are loaded, which most processors do outside of the unit
    that shuffles; only the pieces are left to be transposed. Where the last ones would go past the end they begin
    before it, at a negative column if need be.

    Args:
        part: loads so many lanes of a row from a column on.
        shape: rows, `side` at most, and columns of the matrix; what lanes beyond the rows hold is not defined.
    """
    rows, columns = shape
    piece = min(side, SHUFFLE_BYTES // element.size)

    def join_vectors(first: int, apart: int, count: int, column: int) -> Expr:
        if first >= rows:
            return build.const(0, element, piece * count)
        if count == 1:
            return part(first, column, piece)
        half = count // 2
        left, right = (join_vectors(k, apart, half, column) for k in (first, first + half * apart))
        return pair(left, right, tuple(range(piece * count)))

    found: list[Expr] = []
    for start in range(0, columns, piece):
        column = min(start, columns - piece)
        lines = [join_vectors(k, piece, side // piece, column) for k in range(piece)]
        found += _transpose_pieces(lines, piece, pair)[start - column :]
    return found


def _transpose_pieces(rows: Sequence[Expr], piece: int, pair: Pair) -> list[Expr]:
    """Each piece of `rows` (as many as a piece has lanes), transposed by itself."""
    lanes = rows[0].type.lanes
    low, high = (
        tuple(lane for q in range(0, lanes, piece) for k in half for lane in (q + k, lanes + q + k))
        for half in (range(piece // 2), range(piece // 2, piece))
    )
    current = list(rows)
    for _ in range(piece.bit_length() - 1):
        half = piece // 2
        current = [pair(current[k], current[k + half], order) for k in range(half) for order in (low, high)]
    return current


def _gather_pieces(rows: Sequence[Expr], piece: int, pair: Pair) -> list[Expr]:
    """Vector q of the result has piece q of every row."""
    if len(rows) == 1:
        return list(rows)
    lanes = rows[0].type.lanes
    chosen = []
    for parity in (0, 1):
        starts = [side + q for side in (0, lanes) for q in range(parity * piece, lanes, 2 * piece)]
        order = tuple(start + k for start in starts for k in range(piece))
        halves = [pair(rows[k], rows[k + 1], order) for k in range(0, len(rows), 2)]
        chosen.append(_gather_pieces(halves, piece, pair))
    return [vector for both in zip(*chosen, strict=True) for vector in both]


def transpose_loops(
    stores: Sequence[Store],
    reads: Sequence[Load],
    row: Axis,
    lane: Axis,
    side: int,
    *,
    ahead: int = 0,
    along_reads: bool = False,
    near: bool = False,
) -> Stmt:
    """The loops over `row` and `lane` around `stores`, which run one after another at each point.

    Args:
        stores: plain, scalar stores in the variables of the axes, independent over both; contiguous along `lane`.
            Those to REGISTER buffers without dimensions name values that later ones load.
        reads: loads of theirs, unmasked and contiguous along `row`, of buffers that they do not write.
        row: the axis of the vectors that are loaded.
        lane: the axis of the vectors that are stored.
        side: rows and columns of a block, a power of two.
        ahead: distance of prefetches in steps along `lane`; 0 leaves prefetching to the processor, which cannot
            predict the next line if a page has few of them.
        along_reads: take all rows before the next lanes, a few long runs of the input at a time. The stores fill a
            buffer, and may do so twice: blocks at the ends overlap.
        near: lines are read in pieces, for the first cache has them. Both axes must have known lengths then, and `row`
            a piece of every read.
    """
    if side == 1:
        return _point_by_point(stores, row, lane)
    if near:
        return _emit_gathered_blocks(stores, reads, row, lane, side)
    partial = [a for a in (row, lane) if not a.splits(side)]
    if partial and row.length is not None and lane.length is not None:
        return _in_pieces(stores, reads, row, lane, side, ahead, along_reads)
    block = _Block(tuple(stores), tuple(dict.fromkeys(reads)), row, lane, side)
    body = block.emit(build.TRUE, build.TRUE)
    if partial:
        inside = [build.le(build.add(build.var(a.name), side), a.end) for a in partial]
        masks = (_lane_mask(a, side) if a in partial else build.TRUE for a in (row, lane))
        body = If(inside[0] if len(inside) == 1 else build.logical_and(*inside), body, block.emit(*masks))
    line = max(CACHE_LINE_BYTES // r.buffer.type.dtype.size for r in reads)
    row, lane = (replace(a, stop=a.end) if a in partial else a for a in (row, lane))
    by_lines = not along_reads and line == 2 * side and (row.splits(line) or row.name in {a.name for a in partial})
    start = replace(row, name=internal_name(row.name, "line")) if by_lines else row
    hints = _emit_prefetch_hints(reads, row, start, lane, side, ahead) if ahead else build.NOTHING
    if along_reads:
        inner = Loop(row.name, row.start, row.stop, body, step=side)
        body = Loop(lane.name, lane.start, lane.stop, inner, step=side)
    else:
        body = _emit_block_loops(row, lane, side, line if by_lines else side, hints, body)
    for axis in partial:
        if isinstance(axis.end, Var):
            body = Let(axis.end.name, axis.stop, body)
    return body


def _in_pieces(
    stores: Sequence[Store], reads: Sequence[Load], row: Axis, lane: Axis, side: int, ahead: int, along_reads: bool
) -> Stmt:
    """The whole blocks of `side`, then smaller ones for the remainders along both axes, so nothing has to be masked."""
    (rows, last_rows), (lanes, last_lanes) = row.cut(side), lane.cut(side)
    if along_reads:
        last_rows, last_lanes = last_rows.widen_to_block(rows, side), last_lanes.widen_to_block(lanes, side)
    pieces = ((rows, lanes, side), (row, last_lanes, side // 2), (last_rows, lanes, side // 2))
    return build.block(
        *(
            transpose_loops(stores, reads, r, c, s, ahead=ahead, along_reads=along_reads)
            for r, c, s in pieces
            if r.length and c.length
        )
    )


def _emit_gathered_blocks(stores: Sequence[Store], reads: Sequence[Load], row: Axis, lane: Axis, side: int) -> Stmt:
    """The blocks whose rows are loaded in pieces; those at the ends have less than `side` rows or columns."""
    parts: list[Stmt] = []
    for rows in row.cut(side):
        for lanes in lane.cut(side):
            if rows.length and lanes.length:
                width = min(side, lanes.length)
                block = _Block(tuple(stores), tuple(dict.fromkeys(reads)), rows, lanes, _padded_vector_lanes(width))
                body = block.gather_block(min(side, rows.length), width)
                inner = Loop(lane.name, lanes.start, lanes.stop, body, step=side)
                parts.append(Loop(row.name, rows.start, rows.stop, inner, step=side))
    return build.block(*parts)


def _padded_vector_lanes(lanes: int) -> int:
    """Lanes of the vector that holds this many."""
    return max(2, 1 << (lanes - 1).bit_length())


def with_registers(stores: Sequence[Store], body: Stmt) -> Stmt:
    """`body` with the registers to which `stores` go, some more than once, allocated around it."""
    registers = dict.fromkeys(s.buffer for s in stores if s.buffer.space is Space.REGISTER)
    return build.allocate(tuple(registers), body)


def _point_by_point(stores: Sequence[Store], row: Axis, lane: Axis) -> Stmt:
    point = with_registers(stores, build.block(*stores))
    return Loop(row.name, row.start, row.stop, Loop(lane.name, lane.start, lane.stop, point))


def _emit_prefetch_hints(reads: Sequence[Load], row: Axis, start: Axis, lane: Axis, side: int, ahead: int) -> Stmt:
    """Ask for the lines that the blocks `prefetches` on from here begin with; `start` has the row that they begin
    at."""
    there = build.add(build.var(lane.name), ahead)
    hints: list[Stmt] = []
    for read in reads:
        for k in range(side):
            at = {lane.name: build.add(there, k), row.name: build.var(start.name)}
            hints.append(
                Invoke(PREFETCH, ((read.buffer, tuple(substitute_vectorized(i, at) for i in read.indices)),), (0,))
            )
    return build.when(build.le(build.add(there, side), lane.stop), build.block(*hints))


def _emit_block_loops(row: Axis, lane: Axis, side: int, line: int, hints: Stmt, body: Stmt) -> Stmt:
    """The blocks in order: all those in `line` rows before the next lanes, so that no line of memory is read twice."""
    if line == side:
        inner = Loop(lane.name, lane.start, lane.stop, build.block(hints, body), step=side)
        return Loop(row.name, row.start, row.stop, inner, step=side)
    start = build.var(internal_name(row.name, "line"))
    stop = build.add(start, line)
    inner = Loop(row.name, start, stop if row.splits(line) else build.minimum(stop, row.stop), body, step=side)
    lines = Loop(lane.name, lane.start, lane.stop, build.block(hints, inner), step=side)
    return Loop(start.name, row.start, row.stop, lines, step=line)


def _lane_mask(axis: Axis, side: int) -> Expr:
    """Which of `side` values from the axis's own on are inside it."""
    return build.lt(build.ramp(build.var(axis.name), 1, side), axis.end)


@dataclass(slots=True)
class _Names:
    """Values bound to names, to be put around a statement."""

    prefix: str
    bound: list[tuple[str, Expr]] = field(default_factory=list)

    def bind(self, e: Expr) -> Var:
        name = internal_name(self.prefix, len(self.bound))
        self.bound.append((name, e))
        return Var(name, e.type)

    def wrap_body(self, body: Stmt) -> Stmt:
        for name, e in reversed(self.bound):
            body = Let(name, e, body)
        return body


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of `transpose_loops`, at the values of the variables of its axes."""

    stores: tuple[Store, ...]
    reads: tuple[Load, ...]
    row: Axis
    lane: Axis
    side: int

    def emit(self, row_mask: Expr, lane_mask: Expr) -> Stmt:
        """The block where the masks (true: everywhere) say that rows and lanes are within the axes."""
        names = _Names(internal_name(self.row.name, self.lane.name))
        row_mask, lane_mask = (m if build.is_true(m) else names.bind(m) for m in (row_mask, lane_mask))
        columns = [self._columns(read, row_mask, lane_mask, names) for read in self.reads]
        parts = []
        for k in range(self.side):
            at = build.add(build.var(self.row.name), k)
            values = {read: column[k] for read, column in zip(self.reads, columns, strict=True)}
            part = self._statements(at, values, lane_mask, internal_name(names.prefix, k))
            parts.append(part if build.is_true(row_mask) else build.when(build.lt(at, self.row.end), part))
        return names.wrap_body(build.block(*parts))

    def gather_block(self, rows: int, lanes: int) -> Stmt:
        """The block with these numbers of values of the axes, with reads loaded in pieces."""
        names = _Names(internal_name(self.row.name, self.lane.name))
        mask = first_lanes_mask(lanes, self.side) or build.TRUE
        columns = [self._pieces(read, rows, lanes, names) for read in self.reads]
        parts = []
        for k in range(rows):
            values = {read: column[k] for read, column in zip(self.reads, columns, strict=True)}
            at = build.add(build.var(self.row.name), k)
            parts.append(self._statements(at, values, mask, internal_name(names.prefix, k)))
        return names.wrap_body(build.block(*parts))

    def _pieces(self, read: Load, rows: int, lanes: int, names: _Names) -> list[Expr]:
        """The values of `read` along the lanes, for each row."""
        dtype = UINT8 if read.type.dtype == BOOL else read.type.dtype

        def part(lane: int, first: int, count: int) -> Expr:
            along = build.ramp(build.add(build.var(self.row.name), first), 1, count)
            at = {self.row.name: along, self.lane.name: build.add(build.var(self.lane.name), lane)}
            return names.bind(build.cast(substitute_vectorized(read, at), dtype))

        def pair(a: Expr, b: Expr, order: tuple[int, ...]) -> Expr:
            return names.bind(build.shuffle(a, b, order))

        columns = gather_transposed(part, (lanes, rows), self.side, dtype, pair)
        return [build.cast(c, read.type.dtype) for c in columns]

    def _columns(self, read: Load, row_mask: Expr, lane_mask: Expr, names: _Names) -> list[Expr]:
        """The values of `read` along the lanes, for each row; lanes beyond the end repeat the last."""
        along = build.ramp(build.var(self.row.name), 1, self.side)
        rows = []
        for k in range(self.side):
            at = build.add(build.var(self.lane.name), k)
            if not build.is_true(lane_mask):
                at = build.minimum(at, build.sub(self.lane.end, 1))
            value = substitute_vectorized(read, {self.row.name: along, self.lane.name: at}, _drop_true_mask(row_mask))
            # A bool is a bit in registers: shuffle bytes.
            rows.append(names.bind(build.cast(value, UINT8) if value.type.dtype == BOOL else value))
        columns = transpose_vectors(rows, lambda a, b, order: names.bind(build.shuffle(a, b, order)))
        return [build.cast(c, read.type.dtype) for c in columns]

    def _statements(self, at: Expr, values: Mapping[Load, Expr], lane_mask: Expr, prefix: str) -> Stmt:
        """The stores of row `at`, in all lanes."""
        along = build.ramp(build.var(self.lane.name), 1, self.side)
        mask = _drop_true_mask(lane_mask)
        point = {self.row.name: at, self.lane.name: along}
        names = _Names(prefix)
        held: dict[str, Expr] = {}

        def lookup(e: Expr) -> Expr:
            if isinstance(e, Load):
                if e in values:
                    return values[e]
                if e.buffer.name in held:
                    return held[e.buffer.name]
            return map_expr(e, lookup)

        done: list[Store] = []
        for s in self.stores:
            value = build.broadcast(substitute_vectorized(lookup(s.value), point, mask), self.side)
            if s.buffer.space is Space.REGISTER:
                held[s.buffer.name] = names.bind(value)
            else:
                where = tuple(substitute_vectorized(i, point) for i in s.indices)
                past_caches = s.nontemporal and self._fills_lines(s)
                done.append(Store(s.buffer, where, value, s.op, mask, past_caches, origin=s.origin))
        return names.wrap_body(build.block(*done))

    def _fills_lines(self, s: Store) -> bool:
        """Whether a vector covers a cache line. Partial lines, with other rows in between, need a cache."""
        return self.side * s.buffer.type.dtype.size % CACHE_LINE_BYTES == 0


def _drop_true_mask(condition: Expr) -> Expr | None:
    return None if build.is_true(condition) else condition
