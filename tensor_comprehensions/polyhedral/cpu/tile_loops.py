"""The tiles of a group, the loops over them, and buffers for the part of a tensor that one tile touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.buffer_view import BufferDim, BufferView, private_view
from ...loop_ir.nodes import LoopKind
from ...options import CpuOptions
from ...tc_lang.ir import Tensor
from ..schedule.fusion import FusionGroup
from ..schedule.loop_nest import NestDim
from ..schedule.shared_rows import BandMember
from ..schedule.storage import BufferExtent
from ..scop.scop import ScopStatement


@dataclass(frozen=True, slots=True)
class TileRange:
    """The part of a row in one tile: `size` values from `start` on, as far as they are in the row's range.

    exact: whether all of them are in the range. before: for a shorter last tile, the size of the earlier ones.
    """

    row: BandMember
    start: ir.Expr
    size: int
    exact: bool = False
    before: int = 0

    def bounds(self, dim: NestDim, node: ScopStatement) -> tuple[ir.Expr, ir.Expr]:
        """The range of `dim`, in the index of `node`, inside this tile."""
        _, shift = self.row.index_and_shift(node)
        if self.size >= self.row.extent:
            return build.const(dim.lower), build.const(dim.upper)
        low = build.sub(self.start, shift)
        high = build.add(low, self.size)
        return low, high if self.exact or self.row.extent % self.size == 0 else build.minimum(high, dim.upper)


def tiles_of(group: FusionGroup, sizes: Sequence[int]) -> tuple[tuple[TileRange, ...], tuple[int, ...]]:
    """For each row of a group, a tile of the given size, and the number of tiles."""
    tiles, counts = [], []
    for row, size in zip(group.rows, sizes, strict=True):
        count = -(-row.extent // size)
        name = internal_name(row.places[0][1][0], "tile")
        start = build.const(row.lower) if count == 1 else build.var(name)
        tiles.append(TileRange(row, start, size))
        counts.append(count)
    return tuple(tiles), tuple(counts)


def tile_loops(
    tiles: Sequence[TileRange],
    counts: Sequence[int],
    body: ir.Stmt,
    total: int,
    options: CpuOptions,
    name: str = "tile",
) -> ir.Stmt:
    """One flat loop over all tiles; parallel if `total` operations are enough work to share."""
    moving = [(t, c) for t, c in zip(tiles, counts, strict=True) if c > 1]
    if not moving:
        return body
    trips = prod(c for _, c in moving)
    flat = build.var(internal_name(name))
    inner = trips
    for tile, count in moving:
        inner //= count
        position = build.mod(build.div(flat, inner), count) if len(moving) > 1 else flat
        start = build.add(tile.row.lower, build.mul(position, tile.size))
        assert isinstance(tile.start, ir.Var)
        body = ir.Let(tile.start.name, start, body)
    parallel = options.grain_size > 0 and total > options.grain_size
    grain = max(1, options.grain_size * trips // max(1, total)) if parallel else 1
    kind = LoopKind.PARALLEL if parallel else LoopKind.SERIAL
    return ir.Loop(flat.name, build.const(0), build.const(trips), body, kind, grain=grain)


def with_remainders(
    tiles: tuple[TileRange, ...], body: Callable[[tuple[TileRange, ...]], ir.Stmt], position: int = 0
) -> ir.Stmt:
    """`body` in separate versions for every combination of whole and remainder tiles of rows from `position` on.

    Contractions and transposed blocks need static extents, so a remainder tile cannot be handled by a loop bound.
    """
    for k in range(position, len(tiles)):
        tile = tiles[k]
        rest = tile.row.extent % tile.size
        if rest:
            last = replace(tile, size=rest, exact=True, before=tile.size)
            whole, shorter = ((*tiles[:k], t, *tiles[k + 1 :]) for t in (replace(tile, exact=True), last))
            fits = build.le(build.add(tile.start, tile.size), tile.row.upper)
            return build.when(fits, with_remainders(whole, body, k + 1), with_remainders(shorter, body, k + 1))
    return body(tiles)


def localized_buffer(tensor: Tensor, extents: Sequence[BufferExtent], tiles: Sequence[TileRange]) -> BufferView[int]:
    """A thread-private buffer for the part of `tensor` that one iteration touches, with dimensions in memory order."""
    order = sorted(range(len(extents)), key=lambda d: -tensor.strides[d])
    digits = tuple(BufferDim(d, 1, extents[d].size) for d in order if extents[d].size > 1)
    first = (build.const(0) if e.row is None else build.add(tiles[e.row].start, e.offset) for e in extents)
    return private_view(tensor.name, tensor.dtype, digits, {d: f for d, f in enumerate(first) if extents[d].size > 1})
