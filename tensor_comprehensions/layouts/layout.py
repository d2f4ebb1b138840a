"""A layout: nested sizes with a stride each, as a function from coordinates to offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, Union

from ..core.errors import InternalError
from ..core.memory_layout import contiguous_strides, storage_extent

IntTuple: TypeAlias = Union[int, "tuple[IntTuple, ...]"]
"""An integer or a nested tuple of integers: a shape, a stride or a coordinate."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`shape : stride`, two nested tuples of one structure; prints as `(4, 8) : (1, 4)`.

    A coordinate has the structure of the shape. An integer can replace any part of it; it counts through that part with
    the first mode fastest. So `layout(5)`, `layout((1, 1))` and `layout(1, 1)` are the same offset of
    `(4, 8) : (1, 4)`.

    Attributes:
        shape: sizes, 1 or more each.
        stride: elements between neighbors along each mode; zero and negative ones are allowed.
    """

    shape: IntTuple
    stride: IntTuple

    def __post_init__(self) -> None:
        if not are_congruent(self.shape, self.stride):
            raise InternalError(
                f"a layout of shape {format_tuple(self.shape)} with strides {format_tuple(self.stride)}"
            )
        if min(flatten_tuple(self.shape), default=1) < 1:
            raise InternalError(f"a layout of shape {format_tuple(self.shape)}, which has a size below 1")

    @staticmethod
    def column_major(shape: IntTuple) -> Layout:
        """The contiguous layout with the first mode fastest."""
        return Layout(shape, _running_strides(shape, 1)[0])

    @staticmethod
    def row_major(shape: Sequence[int]) -> Layout:
        """The contiguous layout with the last mode fastest, as in PyTorch."""
        return Layout(tuple(shape), contiguous_strides(shape))

    def __str__(self) -> str:
        return f"{format_tuple(self.shape)} : {format_tuple(self.stride)}"

    def __call__(self, *coordinate: IntTuple) -> int:
        """The offset at a coordinate: one argument per mode, or a single one for the whole."""
        at: IntTuple = coordinate[0] if len(coordinate) == 1 else coordinate
        return _compute_offset(at, self.shape, self.stride)

    def __len__(self) -> int:
        """The number of modes."""
        return len(self.shape) if isinstance(self.shape, tuple) else 1

    def __getitem__(self, mode: int) -> Layout:
        """One mode as a layout."""
        if isinstance(self.shape, tuple) and isinstance(self.stride, tuple):
            return Layout(self.shape[mode], self.stride[mode])
        return self.modes[mode]

    @property
    def modes(self) -> tuple[Layout, ...]:
        """The modes as layouts; a layout whose shape is an integer is its own only mode."""
        if isinstance(self.shape, tuple) and isinstance(self.stride, tuple):
            return tuple(Layout(s, d) for s, d in zip(self.shape, self.stride, strict=True))
        return (self,)

    @property
    def flat(self) -> tuple[tuple[int, int], ...]:
        """Size and stride of every leaf, in order."""
        return tuple(zip(flatten_tuple(self.shape), flatten_tuple(self.stride), strict=True))

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return prod(flatten_tuple(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the distance between the least and the greatest offset."""
        return storage_extent(flatten_tuple(self.shape), tuple(map(abs, flatten_tuple(self.stride))))

    def offsets(self) -> Iterator[int]:
        """The offsets of all coordinates, the first mode fastest."""
        found = [0]
        for size, stride in self.flat:
            found = [base + n * stride for n in range(size) for base in found]
        return iter(found)


def concatenate(*modes: Layout) -> Layout:
    """The layout with these modes."""
    return Layout(tuple(m.shape for m in modes), tuple(m.stride for m in modes))


def flatten_tuple(t: IntTuple) -> tuple[int, ...]:
    """The integers of a nested tuple, in order."""
    if isinstance(t, int):
        return (t,)
    found: list[int] = []
    for part in t:
        if isinstance(part, int):
            found.append(part)
        else:
            found.extend(flatten_tuple(part))
    return tuple(found)


def format_tuple(t: IntTuple) -> str:
    """A nested tuple as text; a tuple of one has no comma."""
    return str(t) if isinstance(t, int) else f"({', '.join(map(format_tuple, t))})"


def are_congruent(a: IntTuple, b: IntTuple) -> bool:
    """Whether two nested tuples have the same structure."""
    if isinstance(a, int):
        return isinstance(b, int)
    return not isinstance(b, int) and len(a) == len(b) and all(map(are_congruent, a, b))


def _running_strides(shape: IntTuple, step: int) -> tuple[IntTuple, int]:
    """Column-major strides of `shape`, starting at `step`, and the stride that would follow."""
    if isinstance(shape, int):
        return step, step * shape
    strides: list[IntTuple] = []
    for part in shape:
        stride, step = _running_strides(part, step)
        strides.append(stride)
    return tuple(strides), step


def _compute_offset(at: IntTuple, shape: IntTuple, stride: IntTuple) -> int:
    if isinstance(shape, tuple) and isinstance(stride, tuple):
        if isinstance(at, int):
            at = _unravel_coordinate(at, shape)
        if len(at) != len(shape):
            raise InternalError(f"the coordinate {format_tuple(at)} in a layout of shape {format_tuple(shape)}")
        return sum(map(_compute_offset, at, shape, stride))
    if isinstance(at, tuple) or isinstance(shape, tuple) or isinstance(stride, tuple) or not 0 <= at < shape:
        raise InternalError(f"the coordinate {format_tuple(at)} in a layout of shape {format_tuple(shape)}")
    return at * stride


def _unravel_coordinate(number: int, shape: tuple[IntTuple, ...]) -> tuple[IntTuple, ...]:
    """Split the linear index `number` into one coordinate per mode. The last may be too large; the caller checks it."""
    digits: list[IntTuple] = []
    for part in shape[:-1]:
        number, digit = divmod(number, prod(flatten_tuple(part)))
        digits.append(digit)
    if not shape and number:
        raise InternalError(f"the coordinate {number} in a layout without modes")
    return (*digits, number) if shape else ()
