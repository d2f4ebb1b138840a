"""The micro-kernel with matrix tiles: sums stay in tile registers over all reduction loops, then pass through L1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...core.dtypes import DType
from ...core.errors import InternalError
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.intrinsics import FRAGMENT_LOAD, FRAGMENT_STORE, FRAGMENT_ZERO
from ...loop_ir.nodes import Allocate, Buffer, Expr, Invoke, Load, Space, Stmt, Var
from ...loop_ir.rewrite import substitute
from ..lower.microkernel import Operand, reduction_values, store_rows, tile_accumulators
from ..lower.tile import Region, local_var, num_tiles, region_origin, specialize_padded_extents
from ..lower.vector_expr import substitute_vectorized
from ..op import ACCUMULATOR, StructuredOp, accumulator_var
from ..plan import Plan
from .tile_plans import TileLayout, find_in_place_broadcast, tile_layout

Counts = tuple[int, int]
"""Rows and columns of the matrix tiles of sums in a register tile."""


def with_tile_buffers(op: StructuredOp, plan: Plan, body: Stmt) -> Stmt:
    """`body` with the tile registers (fragment buffers) that its micro-kernels use allocated around it."""
    return Allocate(_make_fragment_buffers(op, tile_layout(op, plan))[::-1], body) if plan.instruction else body


def matrix_tile_kernel(op: StructuredOp, plan: Plan, region: Region, operands: Sequence[Operand]) -> Stmt:
    """`op` on the register tile `region`, with the factors read as given by `operands`."""
    found = tile_layout(op, plan)
    below, beside = (num_tiles(region[name].size, found.unit[name]) for name in (found.rows, found.columns))
    counts = below, beside
    shape = tuple(
        found.padded_size(name, size) for name, size in zip((found.rows, found.columns), found.sizes, strict=True)
    )
    sums = build.buffer(internal_name(op.name, "sums"), op.dtype, shape, Space.SCRATCH)
    total = _make_fragment_buffers(op, found)[0]
    body = build.block(
        *(Invoke(FRAGMENT_ZERO, (_make_fragment_view(total, n),)) for n in range(counts[0] * counts[1])),
        _emit_reduction_loops(op, found, region, operands, counts),
        *_emit_fragment_stores(found, counts, total, sums),
        specialize_padded_extents(region, lambda part: _emit_tile_epilogue(op, plan, part, sums)),
    )
    return Allocate((sums,), body)


def _make_fragment_buffers(op: StructuredOp, found: TileLayout) -> tuple[Buffer, Buffer, Buffer]:
    """The tile registers of the sums, of the broadcast operand and of the vector operand."""
    i, (below, beside) = found.instruction, found.counts

    def of(name: str, dtype: DType, *shape: int) -> Buffer:
        return build.buffer(internal_name(op.name, name), dtype, shape, Space.FRAGMENT)

    return (
        of("acc", i.total, below * beside, i.rows, i.columns),
        of("rows", i.factor, below, i.rows, i.steps),
        of("columns", i.factor, beside, i.steps, i.columns),
    )


def _make_fragment_view(buffer: Buffer, number: int) -> tuple[Buffer, tuple[Expr, ...]]:
    return buffer, (build.const(number), build.const(0), build.const(0))


def _emit_reduction_loops(
    op: StructuredOp, found: TileLayout, region: Region, operands: Sequence[Operand], counts: Counts
) -> Stmt:
    """The reduction loops around one step: every matrix tile is loaded before the first product that needs it."""
    total, rows, columns = _make_fragment_buffers(op, found)
    inner = Var(internal_name(found.along, "r"))
    outer = [i.name for i in op.reductions if i.name != found.along]
    at = region_origin(region) | reduction_values(region, found.along, build.mul(inner, found.instruction.steps))
    for name in outer:
        at |= reduction_values(region, name, Var(internal_name(name, "r")))
    still, moving = found.broadcast_operand.value, 1 - found.broadcast_operand.value
    parts: list[Stmt] = []
    for below in range(counts[0]):
        parts.append(
            _emit_fragment_load(op, found, operands[still], _make_fragment_view(rows, below), found.rows, below, at)
        )
        for beside in range(counts[1]):
            if not below:
                parts.append(
                    _emit_fragment_load(
                        op, found, operands[moving], _make_fragment_view(columns, beside), found.columns, beside, at
                    )
                )
            views = (
                _make_fragment_view(total, below * counts[1] + beside),
                _make_fragment_view(rows, below),
                _make_fragment_view(columns, beside),
            )
            parts.append(Invoke(found.instruction.name, views))
    steps = num_tiles(region[found.along].size, found.instruction.steps)
    loops = [*((internal_name(name, "r"), region[name].size) for name in outer), (inner.name, steps)]
    return build.loops(loops, build.block(*parts))


def _emit_fragment_load(
    op: StructuredOp,
    found: TileLayout,
    operand: Operand,
    fragment: tuple[Buffer, tuple[Expr, ...]],
    iterator: str,
    number: int,
    at: Mapping[str, Expr],
) -> Invoke:
    """Load matrix tile `number` along `iterator` of an operand of the micro-kernel."""
    offset = number * found.unit[iterator]
    here = {
        **at,
        iterator: build.add(at[iterator], offset),
        local_var(iterator): build.add(at[local_var(iterator)], offset),
    }
    lying = find_in_place_broadcast(op, found) if operand.value is op.factors[found.broadcast_operand.value] else None
    access, dimension = lying or (operand.value, -2)
    if not isinstance(access, Load):
        raise InternalError(f"{op.name}: a factor in fragments that is neither packed nor in place")
    where = tuple(substitute_vectorized(i, here) for i in access.indices)
    return Invoke(FRAGMENT_LOAD, (fragment, (access.buffer, where)), (dimension % len(where),))


def _emit_fragment_stores(found: TileLayout, counts: Counts, total: Buffer, sums: Buffer) -> Iterator[Stmt]:
    for below in range(counts[0]):
        for beside in range(counts[1]):
            where = (build.const(below * found.instruction.rows), build.const(beside * found.instruction.columns))
            yield Invoke(FRAGMENT_STORE, ((sums, where), _make_fragment_view(total, below * counts[1] + beside)), (0,))


def _emit_tile_epilogue(op: StructuredOp, plan: Plan, region: Region, sums: Buffer) -> Stmt:
    """Add the initial value of the output, and store the sums through the epilogue."""
    if op.initial is not None:
        whole = {ACCUMULATOR: build.add(op.initial, accumulator_var(op.dtype))}
        epilogue = accumulator_var(op.dtype) if op.epilogue is None else op.epilogue
        op = replace(op, initial=None, epilogue=substitute(epilogue, whole))
    cells = tile_accumulators(op, plan, region)
    return store_rows(sums, op, plan, region, cells[: -(-region[plan.vector].size // plan.lanes)])
