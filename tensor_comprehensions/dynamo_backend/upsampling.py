"""Upsampling by whole factors and its gradient as formulas; torch keeps other factors.

The new elements of each old one are a loop of their own, so that none of the subscripts is a quotient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ..core.dtypes import DType
from .index_views import Texts, Value, broadcast_value, merge_loops, permute_value, reshape_value
from .literals import Unsupported, compute_dtype, format_literal
from .op_table import TranslationContext, aten, operation, reduce_dims

OUTER = 2
"""The dimensions before those that are upsampled: images and channels."""
LARGEST_FACTOR = 16
"""Larger factors, which are rare, stay with torch; they were not measured."""


@operation(aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default)
def upsample_nearest(c: TranslationContext, x: Value, _: Any, *scales: float | None) -> Value:
    return _repeat_elements(c, x, _check_nearest(x.shape, c.shape, scales, 0.0))


@operation(
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
)
def upsample_nearest_exact(c: TranslationContext, x: Value, _: Any, *scales: float | None) -> Value:
    return _repeat_elements(c, x, _check_nearest(x.shape, c.shape, scales, 0.5))


@operation(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
)
def upsample_nearest_backward(c: TranslationContext, g: Value, _: Any, __: Any, *scales: float | None) -> Value:
    return _sum_elements(c, g, _check_nearest(c.shape, g.shape, scales, 0.0))


@operation(
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
)
def upsample_nearest_exact_backward(c: TranslationContext, g: Value, _: Any, __: Any, *scales: float | None) -> Value:
    return _sum_elements(c, g, _check_nearest(c.shape, g.shape, scales, 0.5))


@operation(aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default)
def upsample_linear(c: TranslationContext, x: Value, _: Any, corners: bool, *scales: float | None) -> Value:
    factors = _check_linear(x.shape, c.shape, corners, scales)
    for d in range(len(c.shape) - 1, OUTER - 1, -1):
        if factors[d - OUTER] > 1:
            x = _interpolate(c, x, d, factors[d - OUTER])
    return x


@operation(
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)
def upsample_linear_backward(
    c: TranslationContext, g: Value, _: Any, __: Any, corners: bool, *scales: float | None
) -> Value:
    factors = _check_linear(c.shape, g.shape, corners, scales)
    for d in range(OUTER, len(c.shape)):
        if factors[d - OUTER] > 1:
            g = _add_interpolated(c, g, d, factors[d - OUTER])
    return g


def _find_factors(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """How many elements each old one becomes, for each upsampled dimension."""
    sizes = list(zip(old[OUTER:], new[OUTER:], strict=True))
    if any(n % o or n // o > LARGEST_FACTOR for o, n in sizes):
        raise Unsupported("not by a small whole factor")
    return [n // o for o, n in sizes]


def _check_nearest(old: Sequence[int], new: Sequence[int], scales: Sequence[float | None], shift: float) -> list[int]:
    """The factors, if torch, which computes places in float32, finds the same nearest elements."""
    factors = _find_factors(old, new)
    for size, k, scale in zip_longest(old[OUTER:], factors, scales):
        step = np.float32(1 / scale if scale else np.float32(size) / np.float32(size * k))
        places = np.floor((np.arange(size * k, dtype=np.float32) + np.float32(shift)) * step)
        exact = np.arange(size * k) // k
        if k not in (1, 2) and not np.array_equal(np.minimum(places, size - 1), exact):
            raise Unsupported("whose places torch rounds to others")
        if k in (1, 2) and scale not in (None, k):
            raise Unsupported("by a factor that is not that of the sizes")
    return factors


def _check_linear(old: Sequence[int], new: Sequence[int], corners: bool, scales: Sequence[float | None]) -> list[int]:
    factors = _find_factors(old, new)
    if corners:
        raise Unsupported("with aligned corners")
    if any(scale not in (None, k) for k, scale in zip_longest(factors, scales)):
        raise Unsupported("by a factor that is not that of the sizes")
    return factors


def _split_shape(old: Sequence[int], factors: Sequence[int], repeats: bool) -> list[int]:
    """The sizes with each upsampled dimension followed by one of its factor, or by one of 1 unless `repeats`."""
    return [*old[:OUTER], *(n for o, k in zip(old[OUTER:], factors, strict=True) for n in (o, k if repeats else 1))]


def _repeat_elements(c: TranslationContext, x: Value, factors: Sequence[int]) -> Value:
    x = x if x.access else c.body.materialize(x)
    apart = reshape_value(x, _split_shape(x.shape, factors, repeats=False))
    return reshape_value(broadcast_value(apart, _split_shape(x.shape, factors, repeats=True)), c.shape)


def _sum_elements(c: TranslationContext, g: Value, factors: Sequence[int]) -> Value:
    apart = reshape_value(g, _split_shape(c.shape, factors, repeats=True))
    return reduce_dims(c, apart, [OUTER + 1 + 2 * k for k in range(len(factors))], False, "+")


def _interpolate(c: TranslationContext, x: Value, dimension: int, factor: int) -> Value:
    """`x` with `factor` elements for each one in a dimension, interpolated between neighbors.

    Element `p` of those of element `i` is at `i + (2 * p + 1 - factor) / (2 * factor)`.
    """
    if x.shape[dimension] == 1:
        return _repeat_dim(x, dimension, factor)
    x = merge_loops(x if x.access else c.body.materialize(x), dimension)
    place, last = sum(len(g) for g in x.groups[:dimension]), x.shape[dimension] - 1

    def element_text(i: Texts) -> str:
        index, p = i[place], i[place + 1]
        before, here, after = (
            x.at([*i[:place], at, *i[place + 2 :]]) for at in (f"({index} - 1)", index, f"({index} + 1)")
        )
        behind, ahead = _format_weight(c, p, factor, ahead=False), _format_weight(c, p, factor, ahead=True)
        lower = f"(({index} >= 1 ? {before} : {here}) * {_complement(c, behind)} + {here} * {behind})"
        upper = f"({here} * {_complement(c, ahead)} + ({index} < {last} ? {after} : {here}) * {ahead})"
        return f"({p} < {factor // 2} ? {lower} : {upper})"

    return _materialize_in_order(c, _with_loops(x, dimension, (last + 1, factor), element_text, c.dtype))


def _add_interpolated(c: TranslationContext, g: Value, dimension: int, factor: int) -> Value:
    """The gradient of `_interpolate`: `g` with one element for each `factor` in a dimension."""
    size = g.shape[dimension] // factor
    g = merge_loops(g if g.access else c.body.materialize(g), dimension)
    place, last, zero = sum(len(x) for x in g.groups[:dimension]), size - 1, format_literal(0, c.dtype)

    def element_text(i: Texts) -> str:
        index, p = (i[place], i[place + 1]) if last else ("0", i[place])

        def read_at(position: str) -> str:
            return g.at([*i[:place], f"({position} * {factor} + {p})", *i[place + (2 if last else 1) :]])

        here, behind, ahead = (
            read_at(index),
            _format_weight(c, p, factor, ahead=False),
            _format_weight(c, p, factor, ahead=True),
        )
        if not last:
            return here
        lower = (
            f"({here} * {behind} + ({index} < {last} ? {read_at(f'({index} + 1)')} : {zero}) * {_complement(c, behind)}"
            f" + ({index} < 1 ? {here} : {zero}) * {_complement(c, behind)})"
        )
        upper = (
            f"({here} * {_complement(c, ahead)} + ({index} >= 1 ? {read_at(f'({index} - 1)')} : {zero}) * {ahead}"
            f" + ({index} >= {last} ? {here} : {zero}) * {ahead})"
        )
        return f"({p} < {factor // 2} ? {lower} : {upper})"

    apart = _with_loops(g, dimension, (size, factor) if last else (factor,), element_text, c.dtype)
    order = c.order
    back = [order.index(d) for d in range(len(order))]
    shape = [*g.shape[:dimension], size, factor, *g.shape[dimension + 1 :]]
    turned = permute_value(reshape_value(apart, shape), [d + (d > dimension) for d in order] + [dimension + 1])
    return permute_value(reduce_dims(c, turned, [len(order)], False, "+"), back)


def _materialize_in_order(c: TranslationContext, x: Value) -> Value:
    """`x` stored in a tensor with its dimensions in the order of the result."""
    stored = c.body.materialize(permute_value(x, c.order))
    return permute_value(stored, [c.order.index(d) for d in range(len(c.order))])


def _repeat_dim(x: Value, dimension: int, factor: int) -> Value:
    """`x` with its only element of a dimension `factor` times."""
    shape = list(x.shape)
    shape[dimension] = factor
    return broadcast_value(x, shape)


def _with_loops(x: Value, dimension: int, loops: tuple[int, ...], at: Callable[[Texts], str], dtype: DType) -> Value:
    return Value((*x.groups[:dimension], loops, *x.groups[dimension + 1 :]), at, dtype)


def _format_weight(c: TranslationContext, p: str, factor: int, *, ahead: bool) -> str:
    """The weight of the second of the two neighbors of new element `p`: the next old element, or its own one."""
    first = ((1 if ahead else 1 + 2 * factor) - factor) / (2 * factor)
    dtype = compute_dtype(c.dtype)
    return f"({dtype.name}({p}) * {format_literal(1 / factor, dtype)} + {format_literal(first, dtype)})"


def _complement(c: TranslationContext, weight: str) -> str:
    return f"({format_literal(1, c.dtype)} - {weight})"
