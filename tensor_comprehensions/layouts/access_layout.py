"""An affine read with constant coefficients as a layout over its iterators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..core.errors import InternalError
from .layout import Layout


class AccessStride(Enum):
    """The kind of stride of an access along one iterator."""

    BROADCAST = "broadcast"
    CONTIGUOUS = "contiguous"
    REVERSED = "reversed"
    STRIDED = "strided"

    @staticmethod
    def of(step: int) -> AccessStride:
        """The kind of a stride of `step` elements per iteration."""
        return {0: AccessStride.BROADCAST, 1: AccessStride.CONTIGUOUS, -1: AccessStride.REVERSED}.get(
            step, AccessStride.STRIDED
        )


@dataclass(frozen=True, slots=True)
class LayoutRead:
    """An access as a layout with one mode per iterator, the innermost first.

    Attributes:
        iterators: the name of each mode.
        layout: a flat layout; its strides are the elements that the address moves per iteration.
        origin: the offset if all iterators are zero.
    """

    iterators: tuple[str, ...]
    layout: Layout
    origin: int = 0

    @staticmethod
    def of(
        extents: Mapping[str, int],
        subscripts: Sequence[Mapping[str, int]],
        strides: Sequence[int],
        constants: Sequence[int] | None = None,
    ) -> LayoutRead:
        """The read of a tensor with `strides` at affine subscripts.

        Args:
            extents: extents of all iterators, the innermost first.
            subscripts: for each dimension, the coefficient of each iterator that occurs.
            constants: for each dimension, the constant term; default zero.
        """
        pairs = list(zip(subscripts, strides, strict=True))
        steps = (sum(factors.get(name, 0) * stride for factors, stride in pairs) for name in extents)
        origin = sum(c * d for c, d in zip(constants or [0] * len(strides), strides, strict=True))
        return LayoutRead(tuple(extents), Layout(tuple(extents.values()), tuple(steps)), origin)

    def __post_init__(self) -> None:
        if len(self.iterators) != len(self.layout.flat) or isinstance(self.layout.shape, int):
            raise InternalError(f"a read of {self.layout} along {', '.join(self.iterators) or 'nothing'}")

    def step(self, iterator: str) -> int:
        """Elements that the address moves per iteration of an iterator."""
        return self.layout.flat[self.iterators.index(iterator)][1]

    def movement(self, iterator: str) -> AccessStride:
        """The kind of stride of the read along an iterator."""
        return AccessStride.of(self.step(iterator))


def can_merge(reads: Iterable[LayoutRead], inner: str, outer: str) -> bool:
    """Whether two iterators can be merged into one in all reads: the outer continues where the inner ends."""
    return all(_are_modes_contiguous(r, r.iterators.index(inner), r.iterators.index(outer)) for r in reads)


def coalesce_together(reads: Sequence[LayoutRead]) -> tuple[tuple[str, ...], ...]:
    """Group iterators that can be merged into one in all reads, each group innermost first, in as few as possible.

    Iterators may be grouped in any order. The GETT paper calls this the fusion of indices to superindices.
    """
    if not reads:
        return ()
    groups: list[tuple[str, ...]] = [(name,) for name in reads[0].iterators]
    while (pair := _find_mergeable_pair(reads, groups)) is not None:
        inner, outer = pair
        groups = [inner + outer if g == inner else g for g in groups if g != outer]
    return tuple(groups)


def _find_mergeable_pair(
    reads: Sequence[LayoutRead], groups: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Two groups such that the second continues where the first ends, or None."""
    for inner in groups:
        for outer in groups:
            if inner != outer and can_merge(reads, inner[-1], outer[0]):
                return inner, outer
    return None


def _are_modes_contiguous(read: LayoutRead, inner: int, outer: int) -> bool:
    (size, stride), (_, other) = read.layout.flat[inner], read.layout.flat[outer]
    return other == size * stride
