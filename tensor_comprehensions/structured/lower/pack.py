"""Packing: copy the part of a factor that the loops inside a level read into a panel, in the order of the reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...core.errors import InternalError
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.buffer_view import BufferDim, buffer_shape
from ...loop_ir.nodes import Buffer, Expr, Space, Stmt, Var
from ...thresholds import COPY_THREAD_ELEMENTS
from ..amx.tile_plans import TileLayout, tile_layout
from ..op import StructuredOp, variable_names
from ..plan import Edge, Plan, TileLoop
from .microkernel import Operand
from .pack_copy import PackCopy, PanelShape, pack_tile
from .tile import Region, num_tiles, parallel_tile_nest, specialize_padded_extents, tile_nest


@dataclass(frozen=True, slots=True)
class PackedPanel:
    """A packed factor: its memory, the code that fills it, and how the micro-kernel reads it.

    The panel's dimensions are tile numbers, reduction steps, and points of one tile. The lanes' iterator comes last and
    is padded to whole vectors.
    """

    buffer: Buffer
    fill: Stmt
    operand: Operand


def make_panel(op: StructuredOp, plan: Plan, factor: Expr, region: Region, depth: int, name: str) -> PackedPanel:
    """The panel `name` for the reads of `factor` by `plan.levels[depth:]` in `region`."""
    used = frozenset(variable_names(factor))
    inner = [
        level for level in plan.levels[depth:] if level.iterator in used and op.iterator(level.iterator).is_parallel
    ]
    if len({level.iterator for level in inner}) < len(inner):
        raise InternalError(f"{name}: packed outside two levels of one iterator")
    blocks = [level for level in plan.levels[depth:] if not op.iterator(level.iterator).is_parallel]
    if len({level.iterator for level in blocks}) < len(blocks):
        raise InternalError(f"{name}: packed outside two blocks of one reduction")
    shape = _make_panel_shape(op, plan, region, inner, blocks, used)
    buffer = build.buffer(name, factor.type.dtype, buffer_shape(shape.digits), Space.SCRATCH)
    tiled = [replace(level, edge=None) for level in inner if level.size > 1]

    def tile(region: Region) -> Stmt:
        return pack_tile(PackCopy(op, factor, region, buffer, shape, plan.lanes))

    def copy(region: Region) -> Stmt:
        if depth or not plan.parallel_depth or not tiled:
            return tile_nest(region, tiled, name, tile)
        # The whole factor is packed before the parallel loop, by a parallel loop of its own.
        first = max(tiled, key=lambda level: num_tiles(region[level.iterator].size, level.size))
        rest = [level for level in tiled if level is not first]
        count = num_tiles(region[first.iterator].size, first.size)
        grain = max(1, COPY_THREAD_ELEMENTS * count // prod(buffer.shape))
        return parallel_tile_nest(region, (first,), name, grain, lambda r: tile_nest(r, rest, name, tile))

    fill = specialize_padded_extents(region, copy)
    uneven = plan.instruction and any(region[d.axis].size % d.extent for d in shape.points[:-1])
    if uneven or any(
        d.axis in _padded_iterators(plan) for d in shape.points[:-1]
    ):  # copies fill up the last dimension only
        fill = build.block(_emit_panel_zero_fill(buffer, plan.lanes), fill)
    return PackedPanel(buffer, fill, Operand(build.load(buffer, *shape.indices), padded=True))


def _make_panel_shape(
    op: StructuredOp,
    plan: Plan,
    region: Region,
    inner: Sequence[TileLoop],
    blocks: Sequence[TileLoop],
    used: frozenset[str],
) -> PanelShape:
    numbers, points = [], []
    for i in op.parallel:
        if i.name not in used:
            continue
        size = plan.tile(i.name)
        count = num_tiles(region[i.name].size, size) if any(level.iterator == i.name for level in inner) else 1
        if count > 1:
            numbers.append(BufferDim(i.name, size, count))
        size = size if i.name in _padded_iterators(plan) else min(size, region[i.name].size)
        if i.name == plan.vector:
            size = num_tiles(size, plan.lanes) * plan.lanes
        if size > 1:
            points.append(BufferDim(i.name, 1, size))
    points.sort(key=lambda p: p.axis == plan.vector)
    reductions = [BufferDim(n, 1, region[n].size) for n in plan.reductions if n in used]
    whole = tuple((level.iterator, level.size) for level in blocks if level.iterator in used)
    if plan.instruction:
        return _make_fragment_shape(
            tile_layout(op, plan), numbers, {d.axis: d.extent for d in (*reductions, *points)}, used
        )
    return PanelShape(tuple(numbers), tuple(reductions), tuple(points), whole)


def _make_fragment_shape(
    found: TileLayout, numbers: Sequence[BufferDim[str]], sizes: Mapping[str, int], used: frozenset[str]
) -> PanelShape:
    """The shape of a panel of whole matrix tiles, whose rows and columns are the last two dimensions."""
    matrix = (
        BufferDim(n, 1, found.padded_size(n, sizes.get(n, 1)))
        for n in (found.rows, found.along, found.columns)
        if n in used
    )
    others = (BufferDim(n, 1, size) for n, size in sizes.items() if n not in found.unit)
    return PanelShape(tuple(numbers), tuple(others), tuple(matrix))


def _padded_iterators(plan: Plan) -> frozenset[str]:
    """The iterators whose remainder tile is padded."""
    return frozenset(level.iterator for level in plan.levels if level.edge is Edge.PADDED)


def _emit_panel_zero_fill(buffer: Buffer, lanes: int) -> Stmt:
    """Fill a panel with zeros; its last dimension need not be whole vectors."""
    names = [internal_name(buffer.name, f"z{d}") for d in range(len(buffer.shape))]
    lanes = lanes if buffer.shape[-1] % lanes == 0 else 1
    last = build.mul(Var(names[-1]), lanes)
    where = (*map(Var, names[:-1]), build.ramp(last, 1, lanes) if lanes > 1 else last)
    zero = build.broadcast(build.const(0, buffer.type.dtype), lanes)
    extents = (*buffer.shape[:-1], buffer.shape[-1] // lanes)
    return build.loops(list(zip(names, extents, strict=True)), build.store(buffer, where, zero))
