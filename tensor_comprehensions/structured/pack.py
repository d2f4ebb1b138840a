"""Packing: copy what the loops below a level read of a factor into a panel, in the order they read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..dtypes import DType
from ..errors import InternalError
from ..loop_ir import build
from ..loop_ir.nodes import Buffer, Expr, Loop, Space, Stmt, Var
from .affine import common_steps
from .microkernel import Operand
from .op import StructuredOp, loads, names
from .plan import Level, Plan
from .tile import Region, local, nest, number, point, tiles
from .vector import evaluate, first_lanes

TRANSPOSE_BLOCK = 16
"""Points of a contiguous reduction that a transposing copy takes at a time: one cache line of float32."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A packed factor: its memory, the code that fills it, and how the micro-kernel reads it.

    The panel's dimensions are the numbers of the tiles it holds, the reduction iterators, and the points of one
    tile; the lane iterator comes last and is padded to whole vectors.
    """

    buffer: Buffer
    fill: Stmt
    operand: Operand


@dataclass(frozen=True, slots=True)
class _Shape:
    """The dimensions of a panel, as names of iterators and extents."""

    numbers: tuple[tuple[str, int], ...]
    reductions: tuple[tuple[str, int], ...]
    points: tuple[tuple[str, int], ...]

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(extent for _, extent in (*self.numbers, *self.reductions, *self.points))

    @property
    def indices(self) -> tuple[Expr, ...]:
        """The panel's index expressions, over tile numbers and local values."""
        parts = [number(name) for name, _ in self.numbers]
        parts += [local(name) for name, _ in (*self.reductions, *self.points)]
        return tuple(Var(name) for name in parts)


def pack(op: StructuredOp, plan: Plan, factor: Expr, region: Region, depth: int, name: str) -> Panel:
    """The panel `name` for what `factor` reads in `region`, inside `plan.levels[depth:]`."""
    used = frozenset(names(factor))
    inner = [
        level for level in plan.levels[depth:] if level.iterator in used and op.iterator(level.iterator).is_parallel
    ]
    if len({level.iterator for level in inner}) < len(inner):
        raise InternalError(f"{name}: packed outside two levels of one iterator")
    if any(not op.iterator(level.iterator).is_parallel for level in plan.levels[depth:]):
        raise InternalError(f"{name}: packed outside the block of a reduction")
    shape = _shape(op, plan, region, inner, used)
    buffer = build.buffer(name, factor.type.dtype, shape.extents, Space.SCRATCH)
    fill = nest(region, inner, name, lambda r: _copy(op, plan, factor, r, buffer, shape))
    return Panel(buffer, fill, Operand(build.load(buffer, *shape.indices), padded=True))


def panel_bytes(op: StructuredOp, plan: Plan, factor: Expr, sizes: Mapping[str, int], depth: int) -> int:
    """Bytes of the panel that `pack` would make where each iterator covers `sizes` points."""
    used = frozenset(names(factor))
    total = factor.type.dtype.size
    for i in op.iterators:
        inside = any(level.iterator == i.name for level in plan.levels[depth:])
        if i.name not in used:
            continue
        total *= sizes[i.name] if inside or not i.is_parallel else plan.tile(i.name)
    return total


def _shape(op: StructuredOp, plan: Plan, region: Region, inner: Sequence[Level], used: frozenset[str]) -> _Shape:
    numbers, points = [], []
    for i in op.parallel:
        if i.name not in used:
            continue
        size = plan.tile(i.name)
        count = tiles(region[i.name].size, size) if any(level.iterator == i.name for level in inner) else 1
        if count > 1:
            numbers.append((i.name, count))
        size = min(size, region[i.name].size)
        if i.name == plan.vector:
            size = tiles(size, plan.lanes) * plan.lanes
        if size > 1:
            points.append((i.name, size))
    points.sort(key=lambda p: p[0] == plan.vector)
    reductions = [(n, region[n].size) for n in plan.reductions if n in used]
    return _Shape(tuple(numbers), tuple(reductions), tuple(points))


# --- copying one tile --------------------------------------------------------------------------------------------


def _copy(op: StructuredOp, plan: Plan, factor: Expr, region: Region, buffer: Buffer, shape: _Shape) -> Stmt:
    """Fill the part of the panel that belongs to one register tile."""
    at = point(region)
    if not shape.points:
        return _over(
            region, [n for n, _ in shape.reductions], at, buffer.name, lambda p: _move(factor, buffer, shape, p)
        )
    *rows, (across, width) = shape.points
    moved = common_steps(loads(factor), [i.name for i in op.iterators])
    along = next((n for n, _ in reversed(shape.reductions) if moved.get(n) == 1), None)
    row_names = [n for n, _ in rows]
    if moved.get(across) != 1 and along is not None:
        return _transposing(factor, region, buffer, shape, (across, width), row_names, along, at)
    loops = [n for n, _ in shape.reductions] + row_names
    if moved.get(across) == 1:
        lanes = min(plan.lanes, _power_of_two(width))
        return _over(
            region, loops, at, buffer.name, lambda p: _vectors(factor, region, buffer, shape, across, width, lanes, p)
        )
    return _over(region, loops, at, buffer.name, lambda p: _scalars(factor, region, buffer, shape, across, width, p))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def _at(region: Region, name: str, offset: Expr) -> dict[str, Expr]:
    return {name: build.add(offset, region[name].origin), local(name): offset}


def _over(region: Region, loops: Sequence[str], at: dict[str, Expr], prefix: str, body: object) -> Stmt:
    """Serial loops over the points of the named iterators."""
    assert callable(body)
    here = dict(at)
    for name in loops:
        here |= _at(region, name, Var(f"{prefix}_{name}_c"))
    result: Stmt = body(here)
    for name in reversed(loops):
        result = Loop(f"{prefix}_{name}_c", build.const(0), build.const(region[name].size), result)
    return result


def _move(factor: Expr, buffer: Buffer, shape: _Shape, at: dict[str, Expr], mask: Expr | None = None) -> Stmt:
    """Copy the element, or the lanes, at `at`."""
    where = tuple(evaluate(i, at) for i in shape.indices)
    return build.store(buffer, where, evaluate(factor, at, mask))


def _vectors(
    factor: Expr,
    region: Region,
    buffer: Buffer,
    shape: _Shape,
    across: str,
    width: int,
    lanes: int,
    at: dict[str, Expr],
) -> Stmt:
    """Copy a run that is contiguous in both memories, with zeros beyond its end."""
    size = region[across].size
    moves: list[Stmt] = []
    for first in range(0, size, lanes):
        run = build.ramp(first, 1, lanes)
        here = at | {across: build.add(run, region[across].origin), local(across): run}
        where = tuple(evaluate(i, here) for i in shape.indices)
        loaded = evaluate(factor, here, first_lanes(size - first, lanes))
        moves.append(build.store(buffer, where, loaded, mask=first_lanes(width - first, lanes)))
    return build.block(*moves)


def _scalars(
    factor: Expr, region: Region, buffer: Buffer, shape: _Shape, across: str, width: int, at: dict[str, Expr]
) -> Stmt:
    """Copy element by element, with zeros beyond the end."""
    name = f"{buffer.name}_{across}_c"
    size = region[across].size
    copy = _move(factor, buffer, shape, at | _at(region, across, Var(name)))
    loop = Loop(name, build.const(0), build.const(size), copy)
    return build.block(loop, _zeros(buffer, shape, across, size, width, at, factor.type.dtype))


def _zeros(
    buffer: Buffer, shape: _Shape, across: str, size: int, width: int, at: dict[str, Expr], dtype: DType
) -> Stmt:
    """Clear the padding of one row of the panel."""
    if size == width:
        return build.NOTHING
    name = f"{buffer.name}_{across}_pad"
    where = tuple(evaluate(i, at | {local(across): Var(name)}) for i in shape.indices)
    return Loop(name, build.const(size), build.const(width), build.store(buffer, where, build.const(0, dtype)))


def _transposing(
    factor: Expr, region: Region, buffer: Buffer, shape: _Shape, lane: tuple[str, int], rows: Sequence[str], along: str,
    at: dict[str, Expr],
) -> Stmt:  # fmt: skip
    """Copy with the contiguous dimension `along` turned across, in blocks that fit the first cache."""
    across, width = lane
    total, prefix = region[along].size, buffer.name
    block, element = Var(f"{prefix}_{along}_block"), Var(f"{prefix}_{along}_c")
    loops = [n for n, _ in shape.reductions if n != along] + list(rows)

    def body(here: dict[str, Expr]) -> Stmt:
        lane_value = Var(f"{prefix}_{across}_c")
        one = here | _at(region, across, lane_value) | _at(region, along, element)
        stop = build.minimum(build.add(block, TRANSPOSE_BLOCK), total)
        if total % TRANSPOSE_BLOCK == 0:
            stop = build.add(block, TRANSPOSE_BLOCK)
        inner: Stmt = Loop(element.name, block, stop, _move(factor, buffer, shape, one))
        inner = Loop(lane_value.name, build.const(0), build.const(region[across].size), inner)
        pad = _zeros(
            buffer, shape, across, region[across].size, width, here | _at(region, along, element), factor.type.dtype
        )
        if pad is not build.NOTHING:
            inner = build.block(inner, Loop(element.name, block, stop, pad))
        return Loop(block.name, build.const(0), build.const(total), inner, step=TRANSPOSE_BLOCK)

    return _over(region, loops, at, prefix, body)
