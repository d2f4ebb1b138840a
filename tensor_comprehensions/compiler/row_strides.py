"""Strides of tensors in kernels for any number of rows.

The distance between rows of x(N,D) is a number where N alone is dynamic. Where D is dynamic, it is a variable:
`PACKED` if it follows from the extent and the stride of the next dimension, or `GIVEN` by the call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

PACKED, GIVEN = -1, -2
"""A stride that follows from the next dimension, and one that a call gives. No tensor of torch has negative strides."""
StrideClasses = Mapping[str, tuple[int, ...]]
"""For each tensor with rows: numbers, `PACKED` and `GIVEN`."""
TYPICAL_EXTENT = 1040
"""An extent of dynamic dimensions, larger than those of blocks, for strides that stand for variables."""


def classify_strides(
    shape: Sequence[int], strides: Sequence[int], dynamic: Collection[int], packed: Collection[int]
) -> tuple[int, ...] | None:
    """The classes of the strides of a tensor; None if one of the dimensions `packed` is not.

    Args:
        dynamic: its dimensions without a fixed extent.
    """
    found = list(strides)
    for d in range(len(shape)):
        if d not in packed and not any(_is_inside(e, d, shape, strides) for e in dynamic):
            continue
        follows = 0 in shape or (d + 1 < len(shape) and strides[d] == strides[d + 1] * shape[d + 1])
        if d in packed and not follows and shape[d] > 1:
            return None
        found[d] = PACKED if follows or d in packed else GIVEN
    return tuple(found)


def _is_inside(e: int, d: int, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements along the dimension `e` lie between those along `d`, so that the stride of `d` follows."""
    if 0 in shape:  # as if it were contiguous
        return e > d
    return e != d and (-strides[e], e) > (-strides[d], d) and strides[e] > 0


def open_strides(
    shape: Sequence[int], strides: Sequence[int], open_dimensions: Collection[int], dynamic: Collection[int]
) -> tuple[int, ...]:
    """`strides` with numbers for those that are variables, which no two dimensions make one, whatever their extents.

    All of these are different from each other, and the same for all extents of the dimensions `dynamic`.
    """
    found, extents = list(strides), [TYPICAL_EXTENT if d in dynamic else max(n, 1) for d, n in enumerate(shape)]
    span = max((found[d] * n for d, n in enumerate(extents) if d not in open_dimensions), default=1)
    for d in sorted(open_dimensions, reverse=True):
        found[d] = span + 1
        span = found[d] * extents[d]
    return tuple(found)
