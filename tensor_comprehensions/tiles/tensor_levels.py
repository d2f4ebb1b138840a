"""A level of a tensor: hierarchical dimensions with strides in memory, and strides of the position for every guard.

Padding a dimension creates coordinates without elements. A guard tells them apart: it bounds the position in the
dimension, which is one more layout over the same coordinates. Every operation here treats all layouts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeAlias, Union

from ..layouts import Layout, coalesce, complement, compose, compose_together, concatenate, enlarge
from ..layouts.layout import IntTuple, flatten_tuple
from ..loop_ir import build
from ..loop_ir.nodes import Expr

Coordinate: TypeAlias = Union[int, Expr, slice, "tuple[Coordinate, ...]", None]
"""A coordinate in a dimension: an index; None or `:` for all of it; or a coordinate for each of its parts."""
Tiler: TypeAlias = int | Layout | None
"""The tile of a dimension: its size, a layout of positions, or None to keep the dimension whole."""


@dataclass(frozen=True, slots=True)
class TensorLevel:
    """Dimensions, with a layout for the offset of an element and one for each guard's position.

    Attributes:
        layouts: all of the same shape, with a mode for every dimension.
        whole: for each dimension, whether it is the only tile of a dimension that was kept whole and takes no index.
    """

    layouts: tuple[Layout, ...]
    whole: tuple[bool, ...]

    @staticmethod
    def of(layout: Layout) -> TensorLevel:
        """The level without guards whose dimensions are the modes of `layout`."""
        return TensorLevel((layout,), (False,) * len(layout.modes))

    @property
    def shape(self) -> tuple[IntTuple, ...]:
        """The sizes of each dimension."""
        return tuple(mode.shape for mode in self.layouts[0].modes)

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return self.layouts[0].size

    def dimension(self, n: int) -> tuple[Layout, ...]:
        """Dimension `n` in every layout."""
        return tuple(layout[n] for layout in self.layouts)

    def select(self, dimensions: Sequence[int]) -> TensorLevel:
        """The level with only these dimensions, in this order."""
        layouts = tuple(concatenate(*(layout[n] for n in dimensions)) for layout in self.layouts)
        return TensorLevel(layouts, tuple(self.whole[n] for n in dimensions))

    def with_layouts(self, change: Callable[[Layout], Layout]) -> TensorLevel:
        """The level with `change` applied to every layout."""
        return TensorLevel(tuple(map(change, self.layouts)), self.whole)

    def without_layouts(self, dropped: set[int]) -> TensorLevel:
        """The level without the layouts at the indices `dropped`."""
        return TensorLevel(tuple(x for n, x in enumerate(self.layouts) if n not in dropped), self.whole)

    def with_guard(self, dimension: int | None = None) -> TensorLevel:
        """The level with one more layout: the position in `dimension`, or zero everywhere if that is None."""
        modes = [_make_position_layout(mode.shape, n == dimension) for n, mode in enumerate(self.layouts[0].modes)]
        return TensorLevel((*self.layouts, concatenate(*modes)), self.whole)

    def enlarged(self, dimension: int, size: int) -> TensorLevel:
        """The level with `dimension` enlarged to `size` with the same strides. Raises CannotLower if impossible."""

        def grow_layout(layout: Layout) -> Layout:
            return concatenate(*(enlarge(m, size) if n == dimension else m for n, m in enumerate(layout.modes)))

        return self.with_layouts(grow_layout)

    def divided(self, tilers: Sequence[Tiler]) -> tuple[TensorLevel, TensorLevel]:
        """The levels (tiles, elements of a tile). Raises CannotLower if a tiler does not tile its dimension."""
        parts = [_divide_dimension(self.dimension(n), tiler) for n, tiler in enumerate(tilers)]
        every = range(len(self.layouts))
        tiles = tuple(concatenate(*(tile[k] for tile, _ in parts)) for k in every)
        rests = tuple(concatenate(*(rest[k] for _, rest in parts)) for k in every)
        return TensorLevel(rests, tuple(tiler is None for tiler in tilers)), TensorLevel(tiles, self.whole)

    def composed(self, inner: Layout) -> TensorLevel:
        """The composition with `inner`, a layout of column-major coordinates. Raises CannotLower if impossible."""
        return _compose_level(self, inner)

    def reshaped(self, shape: IntTuple) -> TensorLevel:
        """The same elements in the same row-major order with dimensions `shape`. Raises CannotLower."""
        return self.select(range(len(self.whole))[::-1]).composed(row_major(shape))

    def joined(self, dimensions: Sequence[int]) -> TensorLevel:
        """The level with `dimensions` joined at the position of the first, whose part is the fastest."""
        rest = [n for n in range(len(self.whole)) if n not in dimensions]
        at = sum(n < dimensions[0] for n in rest)

        def join(layout: Layout) -> Layout:
            joint = concatenate(*(layout[n] for n in dimensions))
            return concatenate(*(layout[n] for n in rest[:at]), joint, *(layout[n] for n in rest[at:]))

        whole = [self.whole[n] for n in rest]
        return TensorLevel(tuple(map(join, self.layouts)), (*whole[:at], False, *whole[at:]))

    def picked(self, at: Sequence[Coordinate]) -> tuple[TensorLevel, tuple[Expr, ...]]:
        """The dimensions that a coordinate per dimension leaves open, and the offset of `at` in every layout."""
        taken = [(n, c) for n, c in enumerate(at) if c is not None]
        offsets = tuple(
            _add_terms(_make_coordinate_offset(mode, c) for n, c in taken if (mode := modes[n]) is not None)
            for modes in _moving_modes(self)
        )
        return _remaining_level(self, tuple(map(_open_parts, at))), offsets


def row_major(shape: IntTuple, step: int = 1) -> Layout:
    """The row-major layout with unit stride `step`; in a hierarchical dimension, the first part is the fastest."""
    modes: list[Layout] = []
    for part in reversed(shape if isinstance(shape, tuple) else (shape,)):
        compact = Layout.column_major(part)
        modes.append(compose(Layout(compact.size, step), compact))
        step *= compact.size
    return concatenate(*reversed(modes))


def offset_at(layout: Layout, coordinate: int | Expr) -> Expr:
    """The offset at an integer coordinate, which is split into digits if the layout has several modes."""
    modes = _merged_modes(layout)
    if type(coordinate) is int:
        return build.const(_compute_mode_offset(modes, coordinate))
    total: Expr = build.const(0)
    reached = 1
    for n, (size, stride) in enumerate(modes):
        if stride:
            digit = build.div(coordinate, reached)
            digit = digit if n == len(modes) - 1 else build.mod(digit, size)
            total = build.add(total, build.mul(digit, stride))
        reached *= size
    return total


@lru_cache(1024)
def _split_modes(level: TensorLevel) -> tuple[tuple[Layout, ...], ...]:
    """The dimensions of every layout."""
    return tuple(layout.modes for layout in level.layouts)


@lru_cache(1024)
def _moving_modes(level: TensorLevel) -> tuple[tuple[Layout | None, ...], ...]:
    """The dimensions of every layout; None for those with stride 0."""
    return tuple(
        tuple(mode if any(flatten_tuple(mode.stride)) else None for mode in modes) for modes in _split_modes(level)
    )


@lru_cache(1024)
def _merged_modes(layout: Layout) -> tuple[tuple[int, int], ...]:
    return tuple(coalesce(layout).flat)


def _compute_mode_offset(modes: Sequence[tuple[int, int]], coordinate: int) -> int:
    """The offset at an integer coordinate; the last mode continues beyond its size."""
    place = 0
    for size, stride in modes[:-1]:
        coordinate, digit = divmod(coordinate, size)
        place += digit * stride
    return place + (coordinate * modes[-1][1] if modes else 0)


def least_tiled(tiler: Layout) -> int:
    """The least size that `tiler` tiles. Raises CannotLower if it tiles none."""
    return tiler.size * complement(tiler).size


def is_valid_coordinate(shape: IntTuple, at: Coordinate) -> bool:
    """Whether `at` is a coordinate of a dimension of this shape."""
    if isinstance(at, tuple):
        return isinstance(shape, tuple) and len(at) == len(shape) and all(map(is_valid_coordinate, shape, at))
    if isinstance(at, slice):
        return at == slice(None)
    if type(at) is int:
        return 0 <= at < prod(flatten_tuple(shape))
    return at is None or (isinstance(at, Expr) and at.type == build.INDEX)


def _make_position_layout(shape: IntTuple, count: bool) -> Layout:
    column = Layout.column_major(shape)
    return column if count else compose(Layout(column.size, 0), column)


@lru_cache(1024)
def _divide_dimension(modes: tuple[Layout, ...], tiler: Tiler) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The parts (tile, tiles) of a dimension, given in every layout."""
    if tiler is None:
        return modes, tuple(Layout(1, 0) for _ in modes)
    tile = Layout(tiler, 1) if isinstance(tiler, int) else tiler
    parts = compose_together(modes, concatenate(tile, complement(tile, modes[0].size)))
    return tuple(p[0] for p in parts), tuple(p[1] for p in parts)


@lru_cache(1024)
def _compose_level(level: TensorLevel, inner: Layout) -> TensorLevel:
    return TensorLevel(compose_together(level.layouts, inner), (False,) * len(inner.modes))


_OpenParts: TypeAlias = Union[bool, "tuple[_OpenParts, ...]"]
"""For each part of a dimension, whether a coordinate leaves it open."""


def _open_parts(at: Coordinate) -> _OpenParts:
    if isinstance(at, tuple):
        return tuple(map(_open_parts, at))
    return at is None or isinstance(at, slice)


@lru_cache(1024)
def _remaining_level(level: TensorLevel, is_open: tuple[_OpenParts, ...]) -> TensorLevel:
    """The level of the parts that a coordinate leaves open."""
    left = [list(map(_remaining_layout, modes, is_open)) for modes in _split_modes(level)]
    layouts = tuple(concatenate(*(m for m in modes if m is not None)) for modes in left)
    return TensorLevel(layouts, tuple(whole for whole, m in zip(level.whole, left[0], strict=True) if m is not None))


def _remaining_layout(dimension: Layout, is_open: _OpenParts) -> Layout | None:
    if isinstance(is_open, bool):
        return dimension if is_open else None
    left = [p for p in map(_remaining_layout, dimension.modes, is_open) if p is not None]
    return concatenate(*left) if len(left) > 1 else left[0] if left else None


def _add_terms(terms: Iterable[Expr]) -> Expr:
    zero: Expr = build.const(0)
    total = zero
    for term in terms:
        if term is not zero:
            total = term if total is zero else build.add(total, term)
    return total


def _make_coordinate_offset(dimension: Layout, at: Coordinate) -> Expr:
    """The offset of a coordinate along a dimension; 0 for open parts."""
    match at:
        case None | slice():
            return build.const(0)
        case tuple():
            return _add_terms(_make_coordinate_offset(part, c) for part, c in zip(dimension.modes, at, strict=True))
    return offset_at(dimension, at)
