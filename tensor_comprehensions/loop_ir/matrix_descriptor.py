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


@dataclass(frozen=True, slots=True)
class MatrixAddress:
    """The address of a matrix as an offset from an element that other matrices of its buffer share.

    base: the indices of that element. bytes: the constant part of the offset. units: the other part, in units of 16
    bytes.
    """

    base: tuple[Expr, ...]
    bytes: int
    units: Expr


def matrix_offset(b: Buffer, base: tuple[Expr, ...]) -> Expr | None:
    """The offset of the element `base` from the beginning of `b`, in units of 16 bytes.

    None if it may be inside the eight rows of a core matrix, which a swizzle permutes.
    """
    units: Expr = build.const(0)
    for n, index in enumerate(base):
        terms, constant = linear_terms(index)
        stride = b.strides[n] * b.type.dtype.size
        unit = DESCRIPTOR_UNIT if n == len(base) - 1 else CORE_ROWS * row_bytes_of(b)
        if any(c * stride % unit for c in (*terms.values(), constant)):
            return None
        for term, c in terms.items():
            units = build.add(units, build.mul(term, c * stride // DESCRIPTOR_UNIT))
        units = build.add(units, constant * stride // DESCRIPTOR_UNIT)
    return units


def split_matrix_address(b: Buffer, where: tuple[Expr, ...]) -> MatrixAddress:
    """Split the address of a matrix, so that descriptors of all steps and stages are one descriptor plus a number.

    Products along K walk over constant columns, and pipelines over outer dimensions. Rows that vary stay in the base,
    as each warpgroup has its own.
    """
    size, zero = b.type.dtype.size, build.const(0)
    core = CORE_ROWS * row_bytes_of(b)
    if not core:
        return MatrixAddress(where, 0, zero)
    base, behind = list(where), 0
    units: Expr = zero
    for n, index in enumerate(where):
        known, stride = build.integer(index), b.strides[n] * size
        if known is not None and known * stride % (core if n < len(where) - 1 else DESCRIPTOR_UNIT) == 0:
            base[n], behind = zero, behind + known * stride
        elif known is None and n < len(where) - 2 and stride % core == 0:
            base[n], units = zero, build.add(units, build.mul(index, stride // DESCRIPTOR_UNIT))
    return MatrixAddress(tuple(base), behind, units)
