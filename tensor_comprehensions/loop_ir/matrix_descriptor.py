"""How products of warpgroups find matrices in shared memory: rows that are as long as the swizzle, eight by eight."""

from __future__ import annotations

from dataclasses import dataclass

from .nodes import Buffer

CORE_ROWS = 8
_MODES = {128: 1, 64: 2, 32: 3}


@dataclass(frozen=True, slots=True)
class MatrixPlacement:
    """The constant part of a descriptor. Both offsets are in units of 16 bytes.

    leading: from one group of columns, as wide as the swizzle, to the next, where rows lie along K. stride: from eight
    rows to the next eight. mode: by which the instruction calls the swizzle.
    """

    leading: int
    stride: int
    mode: int


def swizzle_of(row_bytes: int, size: int) -> tuple[int, int, int]:
    """`Buffer.swizzle` for elements of `size` bytes in rows of 128, 64 or 32 bytes, as boxes are swizzled."""
    chunk = (16 // size).bit_length() - 1
    return (row_bytes // 16).bit_length() - 1, chunk, 3


def row_bytes_of(b: Buffer) -> int:
    """The bytes of a row of `b`, by which its swizzle goes; 0 if it has none."""
    return b.strides[-2] * b.type.dtype.size if b.swizzle is not None else 0


def matrix_placement(b: Buffer, *, across: bool) -> MatrixPlacement | str:
    """The placement of matrices in the last two dimensions of `b`, or why the instruction cannot address them.

    across: rows go along K, and matrices wider than a row continue along the third dimension from the end.
    """
    width = row_bytes_of(b)
    if width not in _MODES:
        return f"its rows of {width} bytes are not swizzled by 128, 64 or 32"
    if b.swizzle != swizzle_of(width, b.type.dtype.size):
        return f"the swizzle {b.swizzle} is not that of rows of {width} bytes"
    leading = b.strides[-3] * b.type.dtype.size // 16 if across and len(b.shape) > 2 else 1
    return MatrixPlacement(leading, CORE_ROWS * width // 16, _MODES[width])
