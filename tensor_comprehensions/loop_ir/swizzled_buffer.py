"""Swizzled shared memory: the columns of a row are permuted depending on the row, to avoid bank conflicts.

Buffers may only have swizzles in which the length of a row is a power of two and aligned groups of columns move.
"""

from __future__ import annotations

from dataclasses import dataclass

from .nodes import Buffer, Space


@dataclass(frozen=True, slots=True)
class ColumnKey:
    """The column of an element becomes `column ^ (row // divisor % count) * factor`."""

    divisor: int
    count: int
    factor: int


def swizzle_offset(offset: int, swizzle: tuple[int, int, int]) -> int:
    """The position of the element at `offset`; also the inverse, since swizzles are involutions."""
    bits, base, shift = swizzle
    return offset ^ ((offset >> shift) & (((1 << bits) - 1) << base))


def column_key(b: Buffer) -> ColumnKey:
    """The swizzle of a buffer as a function of row and column; `swizzle_fault` must accept the buffer."""
    assert b.swizzle is not None
    bits, base, shift = b.swizzle
    return ColumnKey(1 << (base + shift) >> _get_row_stride(b).bit_length() - 1, 1 << bits, 1 << base)


def contiguous_elements(b: Buffer) -> int | None:
    """The size of the aligned groups of elements that stay contiguous in a row; None if `b` is not swizzled."""
    return None if b.swizzle is None else 1 << b.swizzle[1]


def swizzle_fault(b: Buffer) -> str | None:
    """Why the swizzle of `b` is not supported, or None."""
    if b.swizzle is None:
        return None
    bits, base, shift = b.swizzle
    if b.space is not Space.SHARED or len(b.shape) < 2 or b.strides[-1] != 1:
        return "only rows of shared memory are swizzled"
    if min(bits, base) < 0 or shift < bits:
        return f"{b.swizzle} is no swizzle: its bits overlap"
    width = _get_row_stride(b)
    if width & (width - 1) or not 1 << (base + bits) <= width <= 1 << (base + shift):
        return f"{b.swizzle} leaves rows of {width} elements"
    if any(stride % (1 << (base + shift + bits)) for stride in b.strides[:-2]):
        return f"{b.swizzle} goes on from one matrix to the next"
    return None


def _get_row_stride(b: Buffer) -> int:
    """The number of elements from one row to the next."""
    return b.strides[-2]
