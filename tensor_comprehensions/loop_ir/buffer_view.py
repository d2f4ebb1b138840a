"""Views for promotion: a buffer that holds the footprint of a part of the program, and the indices into it.

A footprint is a box in a space with named axes: the dimensions of a tensor, the coordinates of a gather, or the
iterators of an op. Along each axis it starts at an offset and continues in constant steps, counted by digits of a mixed
radix. A buffer for it has a dimension per digit, in any order: for example, the tiles of a panel before the points of
one tile.

The callers decide the rest: how to find the footprint, the value to copy at each point, the memory, and the order of
the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ..core.dtypes import DType
from ..core.memory_layout import contiguous_strides
from . import build
from .nodes import Buffer, Expr, Space

A = TypeVar("A", int, str)
N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class BufferDim(Generic[A]):
    """A dimension of a buffer: `extent` points along `axis` of a footprint, `stride` apart."""

    axis: A
    stride: int
    extent: int


def buffer_shape(digits: Sequence[BufferDim[Any]]) -> tuple[int, ...]:
    """The shape of a buffer with these dimensions."""
    return tuple(d.extent for d in digits)


def footprint_offsets(digits: Sequence[BufferDim[A]], indices: Sequence[Expr]) -> dict[A, Expr]:
    """The offset of the point at `indices` of a buffer from the first point, along each axis that has digits."""
    found: dict[A, Expr] = {}
    for digit, index in zip(digits, indices, strict=True):
        step = build.mul(index, digit.stride)
        found[digit.axis] = build.add(found[digit.axis], step) if digit.axis in found else step
    return found


def buffer_indices(
    digits: Sequence[BufferDim[A]], distance: Mapping[A, N], div: Callable[[N, int], N], mod: Callable[[N, int], N]
) -> tuple[N, ...]:
    """The indices of the point at `distance` from the first point: the inverse of `footprint_offsets`.

    div, mod: floor division by a stride, and its remainder. The digits of an axis are ordered by descending stride.
    """
    rest, found = dict(distance), []
    for digit in digits:
        here = rest[digit.axis]
        found.append(div(here, digit.stride))
        rest[digit.axis] = mod(here, digit.stride)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class BufferView(Generic[A]):
    """The footprint that `buffer` holds. first: its first point, along the axes that have digits.

    Along an axis without digits it has a single point, whose coordinate is not needed.
    """

    buffer: Buffer
    digits: tuple[BufferDim[A], ...]
    first: Mapping[A, Expr]

    def indices(self, point: Mapping[A, Expr]) -> tuple[Expr, ...]:
        """The indices of `point` in the buffer."""
        distance = {axis: build.sub(point[axis], first) for axis, first in self.first.items()}
        return buffer_indices(self.digits, distance, build.div, build.mod)


def private_view(
    name: str, dtype: DType, digits: tuple[BufferDim[A], ...] = (), first: Mapping[A, Expr] | None = None
) -> BufferView[A]:
    """A footprint in a new private buffer: in scratch memory, or without digits in a register."""
    space = Space.SCRATCH if digits else Space.REGISTER
    return BufferView(build.buffer(name, dtype, buffer_shape(digits), space), digits, first or {})


def with_row_pitch(buffer: Buffer, row: int) -> Buffer:
    """`buffer` with rows padded to `row` elements."""
    return replace(buffer, strides=contiguous_strides((*buffer.shape[:-1], row)))
