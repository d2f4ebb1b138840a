"""Operations on layouts. Each is exact, or raises CannotLower."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..core.errors import CannotLower
from .layout import IntTuple, Layout, concatenate, flatten_tuple

Mode = tuple[int, int]
"""A size and a stride."""


def coalesce(layout: Layout) -> Layout:
    """The same function of integer coordinates with as few modes as possible, none of them nested."""
    return _from_modes(_coalesce_modes(layout))


def compose(outer: Layout, inner: Layout) -> Layout:
    """The layout c -> `outer(inner(c))`. A part of the shape of `inner` that must be split becomes a tuple.

    Raises:
        CannotLower: no layout is that function, or `inner` leaves the domain of `outer`.
    """
    return compose_together((outer,), inner)[0]


def compose_together(outers: Sequence[Layout], inner: Layout) -> tuple[Layout, ...]:
    """Compose several layouts of the same shape with `inner`. The results also have the same shape.

    Raises:
        CannotLower: no layouts of the same shape are these functions, or `inner` leaves their domain.
    """
    modes = _merge_leaves(outers) or ((1, (0,) * len(outers)),)
    used = [0] * len(modes)

    def part(shape: IntTuple, stride: IntTuple) -> tuple[Layout, ...]:
        if isinstance(shape, tuple) and isinstance(stride, tuple):
            parts = list(map(part, shape, stride))
            return tuple(concatenate(*(p[n] for p in parts)) for n in range(len(outers)))
        assert isinstance(shape, int)
        assert isinstance(stride, int)
        steps = _split_over_modes([size for size, _ in modes], shape, stride, used)
        if steps is None:
            why = f"{shape} : {stride} does not divide the sizes of the former"
            raise refusal("compose", outers[0], inner, why)
        return tuple(
            _from_modes(tuple((size, step * modes[m][1][n]) for size, step, m in steps)) for n in range(len(outers))
        )

    result = part(inner.shape, inner.stride)
    if any(most >= size for most, (size, _) in zip(used, modes, strict=True)):
        raise refusal("compose", outers[0], inner, "the offsets of the latter carry over, or leave the former")
    return result


def complement(layout: Layout, size: int | None = None) -> Layout:
    """The layout that together with `layout` reaches each of the first `size` offsets exactly once.

    Args:
        size: a multiple of the least number of offsets that `layout` tiles, which is the default.

    Raises:
        CannotLower: `layout` repeats an offset, or does not tile `size` offsets.
    """
    found: list[Mode] = []
    reached = 1
    for extent, stride in sorted(_nontrivial_modes(layout), key=lambda mode: mode[1]):
        if stride < reached or stride % reached:
            raise CannotLower(f"cannot complement {layout}: its offsets overlap, or leave gaps that are no layout")
        found.append((stride // reached, reached))
        reached = extent * stride
    most = reached if size is None else size
    if most % reached:
        raise CannotLower(f"cannot complement {layout} in {most}: {reached} does not divide it")
    return coalesce(_from_modes((*found, (most // reached, reached))))


def divide_layout(layout: Layout, tile: Layout | int) -> Layout:
    """Two modes: `layout` at the positions in `tile`, and the offsets that move the tile over all of `layout`.

    An integer is a tile of this many consecutive positions.

    Raises:
        CannotLower: `tile` does not tile the size of `layout`, or a composition is not exact.
    """
    tile = as_layout(tile)
    try:
        return compose(layout, concatenate(tile, complement(tile, layout.size)))
    except CannotLower as reason:
        raise refusal("divide", layout, tile, str(reason)) from None


def layout_product(layout: Layout, repetition: Layout | int) -> Layout:
    """Two modes: `layout`, and its repetitions at the offsets of `repetition`, counted in whole layouts.

    An integer is this many repetitions, one after the other.

    Raises:
        CannotLower: `layout` has no complement, or a composition is not exact.
    """
    repetition = as_layout(repetition)
    try:
        rest = complement(layout, layout.size * complement(layout).size * repetition.cosize)
        return concatenate(layout, compose(rest, repetition))
    except CannotLower as reason:
        raise refusal("repeat", layout, repetition, str(reason)) from None


def right_inverse(layout: Layout) -> Layout:
    """The longest layout R with `layout(R(n)) == n` for all n below the size of R."""
    modes = _coalesce_modes(layout)
    places = [prod(size for size, _ in modes[:n]) for n in range(len(modes))]
    found: list[Mode] = []
    reached = 1
    for (size, stride), place in sorted(zip(modes, places, strict=True), key=lambda m: m[0][1]):
        if stride == reached:
            found.append((size, place))
            reached *= size
    return coalesce(_from_modes(tuple(found)))


def left_inverse(layout: Layout) -> Layout:
    """A layout L with `L(layout(n)) == n` for all n below the size of `layout`.

    Raises:
        CannotLower: `layout` repeats an offset, or the gaps between its offsets do not form a layout.
    """
    return right_inverse(concatenate(layout, complement(layout)))


# --- modes -------------------------------------------------------------------------------------------------------


def _nontrivial_modes(layout: Layout) -> tuple[Mode, ...]:
    return tuple((size, stride) for size, stride in layout.flat if size > 1)


def _coalesce_modes(layout: Layout) -> tuple[Mode, ...]:
    return tuple((size, stride) for size, (stride,) in _merge_leaves((layout,)))


def _merge_leaves(layouts: Sequence[Layout]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The leaves of layouts of the same shape, as (size, strides), merged where all layouts are contiguous."""
    found: list[tuple[int, tuple[int, ...]]] = []
    all_strides = zip(*(flatten_tuple(x.stride) for x in layouts), strict=True)
    for size, strides in zip(flatten_tuple(layouts[0].shape), all_strides, strict=True):
        if size == 1:
            continue
        if found and strides == tuple(found[-1][0] * stride for stride in found[-1][1]):
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, strides))
    return tuple(found)


def _from_modes(modes: tuple[Mode, ...]) -> Layout:
    """The flat layout with these modes; a single mode is not wrapped in a tuple."""
    match modes:
        case ():
            return Layout(1, 0)
        case ((size, stride),):
            return Layout(size, stride)
    return Layout(tuple(size for size, _ in modes), tuple(stride for _, stride in modes))


def _split_over_modes(
    extents: Sequence[int], size: int, step: int, used: list[int]
) -> tuple[tuple[int, int, int], ...] | None:
    """Split the coordinates 0, step, .., (size - 1) * step over modes of these extents; None if they are no layout.

    used: how far all calls so far move along each mode. This call adds its own movement.

    Returns:
        Triples of a number of steps, the length of a step, and the index of the mode.
    """
    if size == 1 or step == 0:
        return ((size, 0, 0),)
    if step < 0:
        return None
    found: list[tuple[int, int, int]] = []
    for n, extent in enumerate(extents):
        if n == len(extents) - 1 or (size - 1) * step < extent:
            used[n] += (size - 1) * step
            return (*found, (size, step, n))
        if step % extent == 0:
            step //= extent
            continue
        count = extent // step
        if extent % step or size % count:
            return None
        used[n] += (count - 1) * step
        found.append((count, step, n))
        size, step = size // count, 1
    return tuple(found)


def as_layout(operand: Layout | int) -> Layout:
    """`operand`, or the layout of that many consecutive offsets if it is an integer."""
    return operand if isinstance(operand, Layout) else Layout(operand, 1)


def refusal(what: str, first: object, second: object, why: str) -> CannotLower:
    """The error of an operation that is not exact; its message names both operands."""
    return CannotLower(f"cannot {what} {first} with {second}: {why}")
