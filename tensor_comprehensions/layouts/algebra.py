"""Operations on layouts. Each is exact, or refuses."""

from __future__ import annotations

from math import prod

from ..core.errors import CannotLower
from .layout import IntTuple, Layout, concatenate

Mode = tuple[int, int]
"""A size and a stride."""


def coalesce(layout: Layout) -> Layout:
    """The same function of integers with as few modes as possible, all of them integers."""
    return _from_modes(_coalesced(layout))


def compose(outer: Layout, inner: Layout) -> Layout:
    """`outer(inner(c))` for every coordinate c of `inner`; a part of its shape that is split becomes a tuple.

    Raises:
        CannotLower: no layout does that, or `inner` leaves the domain of `outer`.
    """
    modes = _coalesced(outer) or ((1, 0),)
    used = [0] * len(modes)

    def part(shape: IntTuple, stride: IntTuple) -> Layout:
        if isinstance(shape, tuple) and isinstance(stride, tuple):
            return concatenate(*map(part, shape, stride))
        assert isinstance(shape, int)
        assert isinstance(stride, int)
        found = _compose_mode(modes, shape, stride, used)
        if found is None:
            raise _refusal("compose", outer, inner, f"{shape} : {stride} does not divide the sizes of the former")
        return _from_modes(found)

    result = part(inner.shape, inner.stride)
    if any(most >= size for most, (size, _) in zip(used, modes, strict=True)):
        raise _refusal("compose", outer, inner, "the offsets of the latter carry over, or leave the former")
    return result


def complement(layout: Layout, size: int | None = None) -> Layout:
    """The layout that, beside `layout`, reaches each of the first `size` offsets exactly once.

    Args:
        size: a multiple of the least number of offsets that `layout` tiles, which is the default.

    Raises:
        CannotLower: `layout` repeats an offset, or does not tile `size` offsets.
    """
    found: list[Mode] = []
    reached = 1
    for extent, stride in sorted(_longer(layout), key=lambda mode: mode[1]):
        if stride < reached or stride % reached:
            raise CannotLower(f"cannot complement {layout}: its offsets overlap, or leave gaps that are no layout")
        found.append((stride // reached, reached))
        reached = extent * stride
    most = reached if size is None else size
    if most % reached:
        raise CannotLower(f"cannot complement {layout} in {most}: {reached} does not divide it")
    return coalesce(_from_modes((*found, (most // reached, reached))))


def divide_layout(layout: Layout, tile: Layout) -> Layout:
    """Two modes: `layout` at the places that `tile` gives, and the ways to move that tile over all of `layout`.

    Raises:
        CannotLower: `tile` does not tile the size of `layout`, or a composition is not exact.
    """
    try:
        return compose(layout, concatenate(tile, complement(tile, layout.size)))
    except CannotLower as reason:
        raise _refusal("divide", layout, tile, str(reason)) from None


def layout_product(layout: Layout, repetition: Layout) -> Layout:
    """Two modes: `layout`, and its repetitions at the offsets that `repetition` gives, counted in whole layouts.

    Raises:
        CannotLower: `layout` has no complement, or a composition is not exact.
    """
    try:
        rest = complement(layout, layout.size * complement(layout).size * repetition.cosize)
        return concatenate(layout, compose(rest, repetition))
    except CannotLower as reason:
        raise _refusal("repeat", layout, repetition, str(reason)) from None


def right_inverse(layout: Layout) -> Layout:
    """The longest layout R with `layout(R(n)) == n` for all n below its size."""
    modes = _coalesced(layout)
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
        CannotLower: `layout` repeats an offset, or leaves gaps that are no layout.
    """
    return right_inverse(concatenate(layout, complement(layout)))


# --- modes -------------------------------------------------------------------------------------------------------


def _longer(layout: Layout) -> tuple[Mode, ...]:
    return tuple((size, stride) for size, stride in layout.flat if size > 1)


def _coalesced(layout: Layout) -> tuple[Mode, ...]:
    found: list[Mode] = []
    for size, stride in _longer(layout):
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return tuple(found)


def _from_modes(modes: tuple[Mode, ...]) -> Layout:
    """The flat layout of some modes, without a tuple around a single one."""
    match modes:
        case ():
            return Layout(1, 0)
        case ((size, stride),):
            return Layout(size, stride)
    return Layout(tuple(size for size, _ in modes), tuple(stride for _, stride in modes))


def _compose_mode(modes: tuple[Mode, ...], size: int, step: int, used: list[int]) -> tuple[Mode, ...] | None:
    """The offsets of `modes` at 0, step, .., (size - 1) * step; None where that is no layout.

    used: how far each of `modes` is walked, over all calls; this one is added.
    """
    if size == 1 or step == 0:
        return ((size, 0),)
    if step < 0:
        return None
    found: list[Mode] = []
    for n, (extent, stride) in enumerate(modes):
        if n == len(modes) - 1 or (size - 1) * step < extent:
            used[n] += (size - 1) * step
            return (*found, (size, step * stride))
        if step % extent == 0:
            step //= extent
            continue
        count = extent // step
        if extent % step or size % count:
            return None
        used[n] += (count - 1) * step
        found.append((count, step * stride))
        size, step = size // count, 1
    return tuple(found)


def _refusal(what: str, first: Layout, second: Layout, why: str) -> CannotLower:
    return CannotLower(f"cannot {what} {first} with {second}: {why}")
