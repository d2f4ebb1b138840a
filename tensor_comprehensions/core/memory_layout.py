"""The layout of a tensor in memory: its strides and the extent of its storage, counted in elements."""

from __future__ import annotations

from collections.abc import Sequence


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch counts them (extents of 0 count as 1)."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def storage_extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements of memory from the first to the last element of a tensor, inclusive; 0 if it is empty."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
