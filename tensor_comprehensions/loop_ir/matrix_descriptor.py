"""Descriptors with which `wgmma` addresses swizzled matrices in shared memory, in groups of eight rows."""

from __future__ import annotations

from dataclasses import dataclass

from . import build
from .nodes import Buffer, Expr

CORE_ROWS = 8
DESCRIPTOR_UNIT = 16
"""The unit of addresses and offsets in a descriptor, in bytes."""
_MODES = {128: 1, 64: 2, 32: 3}


@dataclass(frozen=True, slots=True)
class MatrixPlacement:
    """The constant part of a descriptor. Both offsets are in units of 16 bytes.

    leading: the offset between groups of columns as wide as the swizzle; used if the matrix is not K-major.
    stride: the offset between groups of eight rows. mode: the hardware's code of the swizzle.
    """

    leading: int
    stride: int
    mode: int


def swizzle_of(row_bytes: int, size: int) -> tuple[int, int, int]:
    """The `Buffer.swizzle` that TMA applies to elements of `size` bytes in rows of 128, 64 or 32 bytes."""
    chunk = (16 // size).bit_length() - 1
    return (row_bytes // 16).bit_length() - 1, chunk, 3


def row_bytes_of(b: Buffer) -> int:
    """The bytes of a row of a swizzled buffer; 0 if `b` is not swizzled."""
    return b.strides[-2] * b.type.dtype.size if b.swizzle is not None else 0


def matrix_placement(b: Buffer, *, across: bool) -> MatrixPlacement | str:
    """The placement of matrices in the last two dimensions of `b`, or why a descriptor cannot address them.

    across: whether rows lie along K (not K-major); matrices wider than a row then continue along the third dimension
    from the end.
    """
    width = row_bytes_of(b)
    if width not in _MODES:
        return f"its rows of {width} bytes are not swizzled by 128, 64 or 32"
    if b.swizzle != swizzle_of(width, b.type.dtype.size):
        return f"the swizzle {b.swizzle} is not that of rows of {width} bytes"
    leading = b.strides[-3] * b.type.dtype.size // 16 if across and len(b.shape) > 2 else 1
    return MatrixPlacement(leading, CORE_ROWS * width // 16, _MODES[width])


def split_constant_offset(b: Buffer, where: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], int]:
    """`where` with 0 for those of the last two indices that are constant, and the bytes from there to `where`.

    The products of an unrolled loop along K then share an address, and their descriptors differ by these bytes only.
    """
    *outer, row, column = where
    rows, columns = build.integer(row) or 0, build.integer(column) or 0
    behind = (rows * b.strides[-2] + columns * b.strides[-1]) * b.type.dtype.size
    if rows % CORE_ROWS or behind % DESCRIPTOR_UNIT:
        return where, 0  # rows within a core matrix are swizzled
    zero = build.const(0)
    return (*outer, *(i if build.integer(i) is None else zero for i in (row, column))), behind
