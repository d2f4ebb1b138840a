"""Transposition in vector registers: for statements vectorized along one axis that read data contiguous along another.

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


def has_aligned_rows(strides: Sequence[int], size: int) -> bool:
    """Whether every row of a tensor begins at a cache line if the tensor does; `size`: bytes of an element."""
    return all(step == 1 or step * size % CACHE_LINE_BYTES == 0 for step in strides)


Pair = Callable[[Expr, Expr, tuple[int, ...]], Expr]
"""Shuffles two vectors into one by a tuple of lanes: `build.shuffle`, or a function that also names the result."""

Part = Callable[[int, int, int], Expr]
"""Loads a part of a matrix's row: (row, first column, number of columns)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop: its variable runs from `start` up to `stop`."""

    name: str
    start: Expr
    stop: Expr

    @property
    def end(self) -> Expr:
        """`stop` if it is constant, else a variable for it."""
        return self.stop if isinstance(self.stop, Const) else build.var(internal_name(self.name, "stop"))

    @property
    def length(self) -> int | None:
        """The number of values; None if unknown."""
        return linear_forms.difference(self.stop, self.start)

    def splits(self, side: int) -> bool:
        """Whether the length is known to be a multiple of `side`."""
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
    """The columns of the square matrix whose rows are `vectors`; their number and their lanes are one power of two.

    Square pieces of `SHUFFLE_BYTES` per row are transposed first, by interleaving halves; then the pieces are permuted.
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

    Pieces of rows are combined as they are loaded, which most processors do outside of the shuffle unit; only the
    pieces are then transposed. The last pieces begin early rather than read past the end; the first column is negative
    if the matrix is narrower than a piece.

    Args:
        part: loads some lanes of a row.
        shape: rows (at most `side`) and columns of the matrix. Lanes beyond the rows are undefined.
        side: lanes of the result.
        element: the type of the elements.
        pair: shuffles two vectors.
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
    """`rows`, as many as a piece has lanes, with each square piece transposed in place."""
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
    """The transpose of the matrix of pieces: vector q of the result has piece q of every row."""
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
        stores: scalar stores over the variables of the axes, independent along both, contiguous along `lane`. Stores to
            0-d REGISTER buffers define values that later stores load.
        reads: loads in `stores`, unmasked and contiguous along `row`, from buffers that `stores` do not write.
        row: the axis of the vectors that are loaded.
        lane: the axis of the vectors that are stored.
        side: rows and columns of a block, a power of two.
        ahead: distance of prefetches in steps along `lane`; 0 leaves prefetching to the processor, which cannot
            predict the next line if a page has few of them.
        along_reads: loop over all rows inside, to read a few long runs of the input at a time. Blocks at the ends
            overlap, so an element may be stored twice.
        near: load rows in pieces of `SHUFFLE_BYTES`, which is fast if they are in L1. Both axes must have known
            lengths, `row` at least a piece of every read.
    """
    if side == 1:
        return _emit_scalar_loops(stores, row, lane)
    if near:
        return _emit_gathered_blocks(stores, reads, row, lane, side)
    partial = [a for a in (row, lane) if not a.splits(side)]
    if partial and row.length is not None and lane.length is not None:
        return _emit_pieces(stores, reads, row, lane, side, ahead, along_reads)
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


def _emit_pieces(
    stores: Sequence[Store], reads: Sequence[Load], row: Axis, lane: Axis, side: int, ahead: int, along_reads: bool
) -> Stmt:
    """The whole blocks of `side`, then smaller ones for the remainders along both axes, so that no mask is needed."""
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
    """The blocks, with rows loaded in pieces; blocks at the ends have less than `side` rows or columns."""
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
    """Lanes of the smallest vector with at least this many lanes: a power of two from 2 on."""
    return max(2, 1 << (lanes - 1).bit_length())


def with_registers(stores: Sequence[Store], body: Stmt) -> Stmt:
    """`body` with the registers that `stores` write allocated around it."""
    registers = dict.fromkeys(s.buffer for s in stores if s.buffer.space is Space.REGISTER)
    return build.allocate(tuple(registers), body)


def _emit_scalar_loops(stores: Sequence[Store], row: Axis, lane: Axis) -> Stmt:
    point = with_registers(stores, build.block(*stores))
    return Loop(row.name, row.start, row.stop, Loop(lane.name, lane.start, lane.stop, point))


def _emit_prefetch_hints(reads: Sequence[Load], row: Axis, start: Axis, lane: Axis, side: int, ahead: int) -> Stmt:
    """Prefetch the first lines of the blocks `ahead` steps on along `lane`; `start`: the axis of their first row."""
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
    """The loops over blocks: all blocks in `line` rows before the next lanes, so that each cache line is read once."""
    if line == side:
        inner = Loop(lane.name, lane.start, lane.stop, build.block(hints, body), step=side)
        return Loop(row.name, row.start, row.stop, inner, step=side)
    start = build.var(internal_name(row.name, "line"))
    stop = build.add(start, line)
    inner = Loop(row.name, start, stop if row.splits(line) else build.minimum(stop, row.stop), body, step=side)
    lines = Loop(lane.name, lane.start, lane.stop, build.block(hints, inner), step=side)
    return Loop(start.name, row.start, row.stop, lines, step=line)


def _lane_mask(axis: Axis, side: int) -> Expr:
    """A mask: which of the `side` values from the axis's variable on are inside the axis."""
    return build.lt(build.ramp(build.var(axis.name), 1, side), axis.end)


@dataclass(slots=True)
class _Names:
    """Values bound to names, for `Let`s around a statement."""

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
        """The block; masks, true if no mask is needed, select the rows and lanes inside the axes."""
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
        """The block with these numbers of rows and lanes, with reads loaded in pieces."""
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
        """The values of `read` along the lanes, for each row; lanes beyond the end repeat the last value."""
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
        """The stores of row `at`, for all lanes."""
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
        """Whether a vector is whole cache lines. Non-temporal stores of partial lines, rows apart, would be slow."""
        return self.side * s.buffer.type.dtype.size % CACHE_LINE_BYTES == 0


def _drop_true_mask(condition: Expr) -> Expr | None:
    return None if build.is_true(condition) else condition
