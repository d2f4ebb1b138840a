"""Change the element width or the size of a layout, and find the common vector of two layouts."""

from __future__ import annotations

from itertools import count
from math import prod

from .algebra import refusal
from .layout import IntTuple, Layout


def widen(layout: Layout, n: int) -> Layout:
    """View the same memory in elements `n` times as wide: the leaves that make up a wide element shrink.

    Raises:
        CannotLower: a wide element would be unaligned or incomplete.
    """
    if n < 1:
        raise refusal("widen", layout, n, "no element is that wide")
    flat = layout.flat
    taken = [1] * len(flat)
    reached = 1
    for at in sorted(range(len(flat)), key=lambda at: flat[at][1]):
        size, stride = flat[at]
        if size > 1 and stride % n:
            taken[at] = min(size, n // reached)
            if stride != reached or n % (reached * taken[at]) or size % taken[at]:
                raise refusal("widen", layout, n, f"{size} : {stride} is no number of whole elements")
            reached *= taken[at]
    if reached != n:
        raise refusal("widen", layout, n, f"{reached} of every {n} neighbors are there")
    steps = [(size // t, stride * t) for (size, stride), t in zip(flat, taken, strict=True)]
    return with_leaves(layout, [(size, 0 if step % n else step // n) for size, step in steps])


def narrow(layout: Layout, n: int) -> Layout:
    """View the same memory in elements `n` times as narrow: the contiguous leaf becomes `n` times as long.

    Raises:
        CannotLower: no leaf has a stride of 1 or a size of 1.
    """
    flat = list(layout.flat)
    grows = [at for at, (_, stride) in enumerate(flat) if stride == 1]
    grows += [at for at, (size, _) in enumerate(flat) if size == 1]
    if n < 1 or not grows:
        raise refusal("narrow", layout, n, "no leaf has neighboring elements")
    scaled = [(size, stride * n) for size, stride in flat]
    scaled[grows[0]] = (flat[grows[0]][0] * n, 1)
    return with_leaves(layout, scaled)


def enlarge(layout: Layout, size: int) -> Layout:
    """`layout` with its last leaf grown until it has `size` coordinates.

    Raises:
        CannotLower: `layout` already has more, or the product of the other leaves does not divide `size`.
    """
    *others, (_, stride) = layout.flat or ((1, 0),)
    known = prod(extent for extent, _ in others)
    if size < layout.size or size % known or not layout.flat:
        raise refusal("enlarge", layout, size, f"it has {layout.size}, and {known} in all leaves but the last")
    return with_leaves(layout, [*others, (size // known, stride)])


def common_vector(a: Layout, b: Layout) -> int:
    """How many elements, contiguous from offset 0 on, have the same coordinates in both layouts.

    Raises:
        CannotLower: the layouts differ in size.
    """
    if a.size != b.size:
        raise refusal("compare", a, b, f"sizes {a.size} and {b.size}")
    shared = {x for x, y in zip(a.offsets(), b.offsets(), strict=True) if x == y}
    return next(n for n in count() if n not in shared)


def with_leaves(layout: Layout, modes: list[tuple[int, int]]) -> Layout:
    """A layout with the nesting of `layout` and with `modes` as the size and stride of its leaves."""
    rest = iter(modes)

    def rebuild(shape: IntTuple) -> tuple[IntTuple, IntTuple]:
        if isinstance(shape, int):
            return next(rest)
        parts = [rebuild(part) for part in shape]
        return tuple(size for size, _ in parts), tuple(stride for _, stride in parts)

    return Layout(*rebuild(layout.shape))
