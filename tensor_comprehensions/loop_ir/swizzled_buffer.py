"""Swizzled shared memory: columns of a row change places by the row's number, so that few lanes share a bank.

The rules here cover the swizzles that buffers may have: rows of a power of two, in which whole groups of columns move.
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
    """The place of the element at `offset`, and equally the element at that place."""
    bits, base, shift = swizzle
    return offset ^ ((offset >> shift) & (((1 << bits) - 1) << base))


def column_key(b: Buffer) -> ColumnKey:
    """The rule for the last two dimensions of a swizzled buffer that keeps the rules of `swizzle_fault`."""
    assert b.swizzle is not None
    bits, base, shift = b.swizzle
    return ColumnKey(1 << (base + shift) >> _get_row_stride(b).bit_length() - 1, 1 << bits, 1 << base)


def contiguous_elements(b: Buffer) -> int | None:
    """How many elements of a row stay neighbors, from each multiple of that number on; None: all of them."""
    return None if b.swizzle is None else 1 << b.swizzle[1]


def swizzle_fault(b: Buffer) -> str | None:
    """Why `b` may not be swizzled as it says, if so."""
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
    """Elements from one row to the next."""
    return b.strides[-2]
