"""Lay out shared memory for TMA and warpgroup products: in swizzled panels of 128 bytes.

Programs, and the proofs of their decompositions, index rows and columns. Here, buffers become panels of a few columns.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...core.dtypes import DType
from ...core.memory_layout import contiguous_strides
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.matrix_descriptor import CORE_ROWS, swizzle_of
from ...loop_ir.rewrite import map_expr, map_stmt

PANEL_BYTES = (128, 64, 32)
"""The bytes of a row for which there is a swizzle, widest first."""
BOX_ALIGNMENT = 1024
"""The alignment in bytes of shared memory that TMA accesses."""


def panel_columns(columns: int, dtype: DType) -> int | str:
    """The number of columns of a panel, or the reason why rows of `columns` elements have no panels."""
    size = columns * dtype.size
    if size % PANEL_BYTES[0] == 0:
        return PANEL_BYTES[0] // dtype.size
    return columns if size in PANEL_BYTES else f"rows of {size} bytes are no 32, 64 or multiple of 128"


def panel_fault(b: ir.Buffer) -> str | None:
    """Why a buffer in shared memory cannot be laid out in panels, or None if it can."""
    if len(b.shape) < 2 or b.shape[-2] % CORE_ROWS:
        return f"{b.name} has no multiple of {CORE_ROWS} rows"
    width = panel_columns(b.shape[-1], b.type.dtype)
    return width if isinstance(width, str) else None


def panel_buffer(b: ir.Buffer) -> ir.Buffer:
    """The buffer `b` laid out in panels."""
    *outer, rows, columns = b.shape
    width = panel_columns(columns, b.type.dtype)
    assert isinstance(width, int)
    shape = (*outer, rows, columns) if width == columns else (*outer, columns // width, rows, width)
    swizzle = swizzle_of(width * b.type.dtype.size, b.type.dtype.size)
    return replace(b, shape=shape, strides=contiguous_strides(shape), swizzle=swizzle)


def with_panels(s: ir.Stmt, names: Collection[str]) -> ir.Stmt:
    """`s` with the buffers `names` laid out in panels."""

    def place(b: ir.Buffer, where: tuple[ir.Expr, ...]) -> tuple[ir.Buffer, tuple[ir.Expr, ...]]:
        if b.name not in names:
            return b, where
        found = panel_buffer(b)
        if len(found.shape) == len(b.shape):
            return found, where
        *outer, row, column = where
        width = found.shape[-1]
        first = column.base if isinstance(column, ir.Ramp) else column
        inside = build.mod(first, width)
        if isinstance(column, ir.Ramp):
            inside = ir.Ramp(inside, column.stride, column.lanes)
        return found, (*outer, build.div(first, width), row, inside)

    def on_expr(e: ir.Expr) -> ir.Expr:
        e = map_expr(e, on_expr)
        if isinstance(e, ir.Load):
            buffer, where = place(e.buffer, e.indices)
            return replace(e, buffer=buffer, indices=where)
        return e

    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        s = map_stmt(s, on_expr, on_stmt)
        match s:
            case ir.Allocate(buffers):
                return replace(s, buffers=tuple(panel_buffer(b) if b.name in names else b for b in buffers))
            case ir.Store(buffer, indices):
                buffer, indices = place(buffer, indices)
                return replace(s, buffer=buffer, indices=indices)
            case ir.Invoke(_, operands):
                return replace(s, operands=tuple(place(b, where) for b, where in operands))
        return s

    return on_stmt(s) if names else s
