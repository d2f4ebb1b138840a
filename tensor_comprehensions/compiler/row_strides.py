"""Strides of tensors in range kernels, in elements.

The stride of the rows of x(N,D) is a number if only N is dynamic. If D is dynamic, it is a variable: `PACKED` if it
follows from the extent and the stride of the next dimension, `GIVEN` if each call passes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

PACKED, GIVEN = -1, -2
"""A stride that follows from the next dimension, and one that a call passes. torch has no negative strides."""
StrideClasses = Mapping[str, tuple[int, ...]]
"""For each tensor with rows, by name, the class of each stride: a number, `PACKED` or `GIVEN`."""
TYPICAL_EXTENT = 1040
"""The extent that dynamic dimensions are assumed to have in `open_strides`: larger than in any block."""


def classify_strides(
    shape: Sequence[int], strides: Sequence[int], dynamic: Collection[int], packed: Collection[int]
) -> tuple[int, ...] | None:
    """The classes of the strides of a tensor; None if a dimension in `packed` has another stride than a packed one.

    Args:
        dynamic: the dimensions without a fixed extent.
        packed: the dimensions whose strides must be packed.
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
    """Whether dimension `e` is inside dimension `d` in memory, so that the stride of `d` depends on its extent."""
    if 0 in shape:  # as if it were contiguous
        return e > d
    return e != d and (-strides[e], e) > (-strides[d], d) and strides[e] > 0


def open_strides(
    shape: Sequence[int], strides: Sequence[int], open_dimensions: Collection[int], dynamic: Collection[int]
) -> tuple[int, ...]:
    """`strides` with numbers that stand for the variable strides of `open_dimensions`.

    The numbers differ from each other, do not depend on the extents of the dimensions `dynamic`, and let no two
    dimensions be fused into one.
    """
    found, extents = list(strides), [TYPICAL_EXTENT if d in dynamic else max(n, 1) for d, n in enumerate(shape)]
    span = max((found[d] * n for d, n in enumerate(extents) if d not in open_dimensions), default=1)
    for d in sorted(open_dimensions, reverse=True):
        found[d] = span + 1
        span = found[d] * extents[d]
    return tuple(found)
