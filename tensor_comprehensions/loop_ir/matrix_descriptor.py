"""Descriptors with which `wgmma` addresses swizzled matrices in shared memory, in groups of eight rows."""

from __future__ import annotations

from dataclasses import dataclass

from . import build
from .linear_forms import linear_terms
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


_ZERO: Expr = build.const(0)


@dataclass(frozen=True, slots=True)
class MatrixAddress:
    """The address of a matrix as a base, which other matrices of its buffer share, plus an offset.

    Attributes:
        base: the indices of the element that the base counts from. rows: from there to the base, in units of 16 bytes.
        bytes, units: the constant part of the offset, and the other part in units of 16 bytes.
    """

    base: tuple[Expr, ...]
    rows: Expr = _ZERO
    bytes: int = 0
    units: Expr = _ZERO


def split_matrix_address(b: Buffer, where: tuple[Expr, ...]) -> MatrixAddress:
    """Split the address of a matrix, so that the descriptors of all steps and stages are one descriptor plus a number.

    Products along K walk over constant columns, and pipelines over outer dimensions. Rows that vary belong to the base:
    each warpgroup has its own. They are no subscript there, because warpgroups without products have none.
    """
    size = b.type.dtype.size
    core = CORE_ROWS * row_bytes_of(b)
    if not core:
        return MatrixAddress(where)
    base, rows, behind, units = list(where), _ZERO, 0, _ZERO
    for n, index in enumerate(where):
        known, stride, level = build.integer(index), b.strides[n] * size, n - len(where)
        if known is not None and known * stride % (core if level < -1 else DESCRIPTOR_UNIT) == 0:
            base[n], behind = _ZERO, behind + known * stride
        elif known is None and level < -2 and stride % core == 0:
            base[n], units = _ZERO, build.add(units, build.mul(index, stride // DESCRIPTOR_UNIT))
        elif known is None and level == -2 and _is_multiple(index, CORE_ROWS):
            base[n], rows = _ZERO, build.mul(index, stride // DESCRIPTOR_UNIT)
    return MatrixAddress(tuple(base), rows, behind, units)


def _is_multiple(e: Expr, divisor: int) -> bool:
    terms, constant = linear_terms(e)
    return all(c % divisor == 0 for c in (*terms.values(), constant))
