"""Copy one register tile's part of a factor into a panel: as vectors, transposed in registers, or by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.buffer_view import BufferDim
from ...loop_ir.nodes import Buffer, Expr, Let, Loop, Stmt, Var
from ...machine import CACHE_LINE_BYTES
from ...thresholds import (
    LOOPED_ROW_VECTORS,
    MAX_INTERLEAVED_STRIDE,
    SHORT_TRANSPOSED_LINE,
    TRANSPOSE_BITS,
    TRANSPOSE_RUN,
)
from ..analysis.access_strides import common_strides
from ..op import StructuredOp, loads_in
from .tile import Region, local_var, tile_number_var
from .transpose import transpose_vectors
from .vector_expr import first_lanes_mask, substitute_vectorized


@dataclass(frozen=True, slots=True)
class PanelShape:
    """The dimensions of a panel, outermost first; the axis of each is an iterator.

    Attributes:
        numbers: tile numbers of the tiles that the panel holds.
        reductions: steps of reductions.
        points: points of one tile.
        blocks: (iterator, block size) of reductions of which the panel holds several blocks.
    """

    numbers: tuple[BufferDim[str], ...]
    reductions: tuple[BufferDim[str], ...]
    points: tuple[BufferDim[str], ...]
    blocks: tuple[tuple[str, int], ...] = ()

    @property
    def digits(self) -> tuple[BufferDim[str], ...]:
        return (*self.numbers, *self.reductions, *self.points)

    @property
    def indices(self) -> tuple[Expr, ...]:
        """The panel's index expressions, over tile numbers and local values."""
        blocks = dict(self.blocks)
        numbers = tuple(Var(tile_number_var(d.axis)) for d in self.numbers)
        inner = tuple(d.axis for d in (*self.reductions, *self.points))
        starts = (build.mul(Var(tile_number_var(name)), blocks.get(name, 0)) for name in inner)
        return (*numbers, *map(build.add, starts, (Var(local_var(name)) for name in inner)))


Offsets = Mapping[str, Expr]
"""Offsets of iterators from the start of a region."""


@dataclass(frozen=True, slots=True)
class PackCopy:
    """A copy of `factor` at the points of `region` to the panel `buffer`.

    The region is one tile along each iterator whose tiles have several points. `steps` are the factor's strides in
    elements, `lanes` those of a vector.
    """

    op: StructuredOp
    factor: Expr
    region: Region
    buffer: Buffer
    shape: PanelShape
    lanes: int

    @property
    def steps(self) -> Mapping[str, int]:
        return common_strides(loads_in(self.factor), [i.name for i in self.op.iterators])

    @property
    def across(self) -> str:
        """The iterator along which the panel is contiguous."""
        return self.shape.points[-1].axis

    @property
    def width(self) -> int:
        """Elements of a tile in the panel along `across`, including padding."""
        return self.shape.points[-1].extent

    @property
    def size(self) -> int:
        """Elements of the factor in the region along `across`."""
        return self.region[self.across].size

    @property
    def other_iterators(self) -> list[str]:
        """The other iterators, ordered by the factor's strides, the largest outermost."""
        names = (d.axis for d in self.shape.digits[: -1 if self.shape.points else None] if d.stride == 1)
        steps = self.steps
        return sorted(names, key=lambda name: -abs(steps.get(name, 0)))

    def variable(self, name: str) -> Var:
        return Var(internal_name(self.buffer.name, name, "c"))

    def over(self, iterators: Sequence[str], body: Callable[[Offsets], Stmt]) -> Stmt:
        """Serial loops over the points of `iterators`."""
        loops = [(self.variable(name).name, self.region[name].size) for name in iterators]
        return build.loops(loops, body({name: self.variable(name) for name in iterators}))

    def move(self, offsets: Offsets) -> Stmt:
        """The store that copies the element, or vector, at these offsets."""
        return build.store(self.buffer, self.panel_indices(offsets), self.value(offsets))

    def value(self, offsets: Offsets, mask: Expr | None = None) -> Expr:
        """The value of the factor at these offsets."""
        origins = {name: part.origin for name, part in self.region.items()}
        moved = {name: build.add(offset, origins[name]) for name, offset in offsets.items()}
        return substitute_vectorized(self.factor, origins | moved, mask)

    def panel_indices(self, offsets: Offsets) -> tuple[Expr, ...]:
        """The panel's indices for these offsets."""
        return tuple(self.region[d.axis].number if d.stride > 1 else offsets[d.axis] for d in self.shape.digits)


Columns = tuple[Expr, int, int]
"""Columns of a panel: (first column, how many the factor fills, how many including padding)."""


def pack_tile(copy: PackCopy) -> Stmt:
    """Fill the panel's part for one register tile, with zeros in the padding."""
    if not copy.shape.points:
        return copy.over(copy.other_iterators, copy.move)
    steps = copy.steps
    if 1 <= steps.get(copy.across, 0) <= MAX_INTERLEAVED_STRIDE:
        return copy.over(copy.other_iterators, lambda offsets: _emit_vector_copy(copy, offsets))
    contiguous = (n for n in copy.other_iterators if steps.get(n) == (2 if n == copy.op.pairs else 1))
    along = max(contiguous, key=lambda n: copy.region[n].size, default=None)
    if along is None or copy.region[along].size < 2:
        return copy.over(copy.other_iterators, lambda offsets: _copy_elements(copy, offsets))
    other_iterators = [n for n in copy.other_iterators if n != along]
    if (run := _find_contiguous_iterators(copy, along)) and copy.region[along].size < SHORT_TRANSPOSED_LINE:
        return copy.over(
            [n for n in other_iterators if n not in run], lambda offsets: _copy_short_runs(copy, along, run, offsets)
        )
    return copy.over(other_iterators, lambda offsets: _copy_transposed(copy, along, offsets))


def _emit_vector_copy(copy: PackCopy, offsets: Offsets) -> Stmt:
    """Copy vectors along `copy.across`, along which the panel is contiguous and the factor is (nearly) contiguous."""
    lanes = min(copy.lanes, _power_of_two(copy.width))
    moves: list[Stmt] = []
    zero = build.const(0, copy.factor.type.dtype, lanes)
    whole = copy.size // lanes if copy.size > LOOPED_ROW_VECTORS * lanes else 0
    if whole:
        vector = Var(internal_name(copy.buffer.name, copy.across, "vector"))
        there = {**offsets, copy.across: build.ramp(build.mul(vector, lanes), 1, lanes)}
        moves.append(Loop(vector.name, build.const(0), build.const(whole), copy.move(there)))
    for first in range(whole * lanes, copy.width, lanes):
        there = {**offsets, copy.across: build.ramp(first, 1, lanes)}
        value = zero if first >= copy.size else copy.value(there, first_lanes_mask(copy.size - first, lanes))
        moves.append(
            build.store(copy.buffer, copy.panel_indices(there), value, mask=first_lanes_mask(copy.width - first, lanes))
        )
    return build.block(*moves)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _copy_elements(copy: PackCopy, offsets: Offsets) -> Stmt:
    """Copy one element after another, then fill the padding with zeros."""
    element = copy.variable(copy.across)
    there = {**offsets, copy.across: element}
    parts: list[Stmt] = [Loop(element.name, build.const(0), build.const(copy.size), copy.move(there))]
    if copy.size < copy.width:
        clear = build.store(copy.buffer, copy.panel_indices(there), build.const(0, copy.factor.type.dtype))
        parts.append(Loop(element.name, build.const(copy.size), build.const(copy.width), clear))
    return build.block(*parts)


# --- transposed copies -------------------------------------------------------------------------------------------


def _copy_transposed(copy: PackCopy, along: str, offsets: Offsets) -> Stmt:
    """Copy square tiles: vectors along `along` in the factor become vectors across it in the panel.

    Two tiles at a time cover a cache line, so that each line is read once even if the factor's lines compete for the
    same cache sets. Runs of tiles follow the factor's memory for `TRANSPOSE_RUN` elements before the next columns.
    """
    lanes = max(4, min(copy.lanes, TRANSPOSE_BITS // copy.factor.type.dtype.bits))
    total = copy.region[along].size
    pairs, rest = divmod(total, 2 * lanes)
    run = min(pairs, TRANSPOSE_RUN // (2 * lanes))
    block, pair = Var(internal_name(copy.buffer.name, along, "run")), copy.variable(along)

    def run_of_tiles(columns: Columns) -> Stmt:
        first = build.mul(block, run)
        stop = build.add(first, run) if pairs % run == 0 else build.minimum(build.add(first, run), pairs)
        tiles = _emit_transposed_tiles(copy, lanes, along, offsets, (build.mul(pair, 2 * lanes), 2 * lanes), columns)
        return Loop(pair.name, first, stop, tiles)

    parts: list[Stmt] = []
    if pairs:
        body = _emit_column_groups(copy, lanes, run_of_tiles)
        parts.append(Loop(block.name, build.const(0), build.const(-(-pairs // run)), body))
    if rest:
        end = (build.const(total - rest), rest)
        parts.append(
            _emit_column_groups(
                copy, lanes, lambda columns: _emit_transposed_tiles(copy, lanes, along, offsets, end, columns)
            )
        )
    return build.block(*parts)


def _find_contiguous_iterators(copy: PackCopy, along: str) -> list[str]:
    """The iterators along which the factor's memory continues where `along` ends, the largest stride first."""
    steps, run = copy.steps, [along]
    other_iterators = [n for n in copy.other_iterators if n != along]
    while name := next((n for n in other_iterators if steps.get(n) == steps[run[0]] * copy.region[run[0]].size), None):
        run.insert(0, name)
        other_iterators.remove(name)
    return run[:-1]


def _copy_short_runs(copy: PackCopy, along: str, run: Sequence[str], offsets: Offsets) -> Stmt:
    """As `_copy_transposed`, for a short `along` (a window of a convolution) that the iterators `run` continue.

    The tiles that fill a line of the panel follow each other, so that the line stays in cache.
    """
    (outer, *inner), dtype = run, copy.factor.type.dtype
    size = copy.region[along].size
    lanes = 4 if size <= 4 else max(4, min(copy.lanes, TRANSPOSE_BITS // dtype.bits))
    whole = (build.const(0), size)

    def group(there: Offsets, columns: Columns) -> Stmt:
        return copy.over(
            inner, lambda within: _emit_transposed_tiles(copy, lanes, along, {**there, **within}, whole, columns)
        )

    def lines(columns: Columns) -> Stmt:
        start, count, width = columns
        parts = [(build.add(start, s), max(0, count - s), width - s) for s in range(0, width, lanes)]
        return copy.over([outer], lambda at: build.block(*(group({**offsets, **at}, part) for part in parts)))

    return _emit_column_groups(copy, max(lanes, 8 * CACHE_LINE_BYTES // dtype.bits), lines)


def _emit_column_groups(copy: PackCopy, lanes: int, body: Callable[[Columns], Stmt]) -> Stmt:
    """`body` for all columns of the panel, `lanes` at a time."""
    full = copy.size // lanes
    group = Var(internal_name(copy.buffer.name, copy.across, "group"))
    parts: list[Stmt] = []
    if full:
        columns = (build.mul(group, lanes), lanes, lanes)
        parts.append(Loop(group.name, build.const(0), build.const(full), body(columns)))
    for start in range(full * lanes, copy.width, lanes):
        parts.append(body((build.const(start), max(0, copy.size - start), copy.width - start)))
    return build.block(*parts)


def _emit_transposed_tiles(
    copy: PackCopy, lanes: int, along: str, offsets: Offsets, run: tuple[Expr, int], columns: Columns
) -> Stmt:
    """Square tiles one after another along the factor's lines; `run` is (first element, number of elements)."""
    first, count = run
    starts = range(0, count, lanes)
    return build.block(
        *(_emit_transposed_tile(copy, lanes, along, offsets, (build.add(first, s), count - s), columns) for s in starts)
    )


def _emit_transposed_tile(
    copy: PackCopy, lanes: int, along: str, offsets: Offsets, run: tuple[Expr, int], columns: Columns
) -> Stmt:
    """One square tile; `run` as in `_emit_transposed_tiles`."""
    (first, count), (start, lines, width) = run, columns
    there = {**offsets, along: build.ramp(first, 1, lanes)}
    zero = build.const(0, copy.factor.type.dtype, lanes)
    values: list[Expr] = [zero] * lanes
    for line in range(min(lines, lanes)):
        at = {**there, copy.across: build.add(start, line)}
        values[line] = copy.value(at, first_lanes_mask(count, lanes))

    def store_rows(turned: list[Expr]) -> Stmt:
        stores: list[Stmt] = []
        for k, value in enumerate(turned[:count]):
            place = {**offsets, along: build.add(first, k), copy.across: build.ramp(start, 1, lanes)}
            stores.append(
                build.store(copy.buffer, copy.panel_indices(place), value, mask=first_lanes_mask(width, lanes))
            )
        return build.block(*stores)

    bound: list[tuple[Var, Expr]] = []

    def bind(value: Expr) -> Expr:
        bound.append((Var(internal_name(copy.buffer.name, f"x{len(bound)}"), value.type), value))
        return bound[-1][0]

    body = store_rows(
        transpose_vectors([bind(v) for v in values], lambda a, b, order: bind(build.shuffle(a, b, order)))
    )
    for name, value in reversed(bound):
        body = Let(name.name, value, body)
    return body
