"""Pooling and its gradient as formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import fx

from ..core.dtypes import INT32, INT64
from .conv_windows import ConvWindows
from .convolution import both_sides, pad_value, repeat_number
from .index_views import Value, align_values, drop_dim, guard_value, of_shape, reshape_value, shift_dim
from .literals import Unsupported, compute_dtype, format_literal
from .op_table import FLOPS, MULTI_OUTPUT_OPS, Parts, TranslationContext, aten, divide_by_count, operation

OPERATIONS_PER_TAP = 16
"""The flops that a tap of max pooling counts as: torch takes 3 ns for it, as for this many of a small product."""
MAX_POOL, BACKWARD = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The parameters of a pooling operation, each for two dimensions."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @staticmethod
    def of(kernel: Any, stride: Any, padding: Any, dilation: Any) -> PoolShape:
        kernel, padding, dilation = (repeat_number(s, 2) for s in (kernel, padding, dilation))
        return PoolShape(kernel, repeat_number(stride, 2) if stride else kernel, padding, dilation)

    def windows(self, images: int, channels: int, places: Sequence[int]) -> ConvWindows:
        """The windows of each channel, `places` in each dimension."""
        return ConvWindows.of(images, channels, (channels, 1, *self.kernel), places, self.stride, self.dilation)


@dataclass(frozen=True, slots=True)
class Pool:
    """The windows of a batch of images, and the padded images."""

    windows: ConvWindows
    data: Value

    def reduce(self, c: TranslationContext, operator: str) -> Value:
        """Reduce the elements of each window by `operator`."""
        return self.windows.reduce(c, self.windows.of_out, self.windows.data(self.data), operator)


def _pad_windows(c: TranslationContext, x: Value, s: PoolShape, fill: float) -> Pool:
    zipped = zip(s.stride, c.shape[2:], s.dilation, s.kernel, strict=True)
    reach = [t * (h - 1) + d * (k - 1) + 1 for t, h, d, k in zipped]
    if any(r > n + 2 * p for r, n, p in zip(reach, x.shape[2:], s.padding, strict=True)):
        raise Unsupported("windows that reach beyond the padding")
    spread = pad_value(c, x, both_sides(s.padding), format_literal(fill, x.dtype))
    return Pool(s.windows(c.shape[0], x.shape[1], c.shape[2:]), spread)


@operation(aten.avg_pool2d.default)
def avg_pool(
    c: TranslationContext, x: Value, kernel: Any, stride: Any = (), padding: Any = (0,), ceiling: bool = False,
    with_padding: bool = True, divisor: int | None = None,
) -> Value:  # fmt: skip
    s = _check_average(c, kernel, stride, padding, ceiling)
    batched, images = _add_batch(c, x)
    total = _pad_windows(batched, images, s, 0).reduce(batched, "+=!")
    mean = _divide_by_counts(batched, total, s, images.shape[2:], with_padding, divisor)
    return mean if images is x else drop_dim(mean, 0)


@operation(aten.avg_pool2d_backward.default)
def avg_pool_backward(
    c: TranslationContext, g: Value, x: Value, kernel: Any, stride: Any, padding: Any, ceiling: bool,
    with_padding: bool, divisor: int | None,
) -> Value:  # fmt: skip
    """The gradient by the input: every element gets its share of the windows that it is in."""
    s = _check_average(c, kernel, stride, padding, ceiling)
    batched, upstream = _add_batch(c, g)
    sizes = batched.shape[2:]
    shares = _divide_by_counts(replace(batched, shape=upstream.shape), upstream, s, sizes, with_padding, divisor)
    if all(n == 1 for n in s.stride):
        widths = [k - 1 - p for k, p in zip(s.kernel, s.padding, strict=True)]
        padded = pad_value(c, shares, both_sides(widths), format_literal(0, x.dtype))
        found = Pool(s.windows(batched.shape[0], batched.shape[1], sizes), padded).reduce(batched, "+=!")
    elif list(s.stride) == list(s.kernel) and not any(s.padding):
        found = shares
        for d, (n, step) in enumerate(zip(sizes, s.stride, strict=True), 2):
            end = step * upstream.shape[d]
            found = shift_dim(found, d, n, f"({{}} / {step})".format)
            found = guard_value(found, [(d, 0, end)], format_literal(0, x.dtype)) if end < n else found
    else:
        raise Unsupported("windows that overlap in steps")
    return found if upstream is g else drop_dim(found, 0)


def _check_average(c: TranslationContext, kernel: Any, stride: Any, padding: Any, ceiling: bool) -> PoolShape:
    if not c.dtype.is_float or ceiling:
        raise Unsupported("windows of different sizes")
    return PoolShape.of(kernel, stride, padding, (1,))


def _divide_by_counts(
    c: TranslationContext, x: Value, s: PoolShape, sizes: Sequence[int], with_padding: bool, divisor: int | None
) -> Value:
    """`x` divided by the elements of each window: by `divisor`, by all of them, or by those in an image of `sizes`."""
    if divisor or with_padding or not any(s.padding):
        return divide_by_count(c, x, divisor or math.prod(s.kernel))
    wide = compute_dtype(x.dtype)

    def element_text(i: Sequence[str]) -> str:
        places = iter(i[len(i) - sum(len(g) for g in x.groups[2:]) :])
        counts = []
        for group, size, k, step, before in zip(x.groups[2:], sizes, s.kernel, s.stride, s.padding, strict=True):
            first = f"{step} * int64({next(places) if group else 0}) - {before}"
            counts.append(f"(min({first} + {k}, int64({size})) - max({first}, int64(0)))")
        return f"({x.at(i)} / {wide.name}({' * '.join(counts)}))"

    return replace(x, at=element_text, access=False, tensor="")


def max_pool(
    c: TranslationContext, x: Value, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
    ceiling: bool = False,
) -> Parts:  # fmt: skip
    """The maximum of each window, and its index in the image."""
    if not c.dtype.is_float:
        raise Unsupported(f"not in {c.dtype}")
    s = PoolShape.of(kernel, stride, padding, dilation)
    batched, images = _add_batch(c, x)

    @cache
    def pool() -> tuple[Pool, Value]:
        found = _pad_windows(batched, images, s, -math.inf)
        return found, found.reduce(batched, "max=!")

    def maximum() -> Value:
        return pool()[1] if images is x else drop_dim(pool()[1], 0)

    def place() -> Value:
        found = _find_maximum(batched, *pool(), s, images.shape[3])
        return found if images is x else drop_dim(found, 0)

    return (maximum, place)


def _find_maximum(c: TranslationContext, pool: Pool, maximum: Value, s: PoolShape, width: int) -> Value:
    """The index of the maximum in the image: the first of equal elements, the last of several NaNs, as in torch."""
    if any(p and d != 1 for p, d in zip(s.padding, s.dilation, strict=True)):
        raise Unsupported("the place of a maximum between taps with padding")
    windows, taps = pool.windows, math.prod(s.kernel)
    element, tap = windows.data(pool.data), f"int32({windows.name('k0')} * {s.kernel[1]} + {windows.name('k1')})"
    equal = f"({element} == {windows.results(maximum)} ? {tap} : {format_literal(taps, INT32)})"
    term = f"({element} != {element} ? {format_literal(-1, INT32)} - {tap} : {equal})"
    chosen = windows.reduce(replace(c, dtype=INT32), windows.of_out, term, "min=!")

    def tap_text(i: Sequence[str]) -> str:
        return f"({chosen.at(i)} < 0 ? {format_literal(-1, INT32)} - {chosen.at(i)} : {chosen.at(i)})"

    tap_of = c.body.materialize(replace(chosen, at=tap_text, access=False, tensor=""))

    def element_text(i: Sequence[str]) -> str:
        """In a window whose elements are all -inf the first tap may be one of the padding."""
        places = zip(i[-2:], s.stride, s.dilation, s.padding, strict=True)
        within = (f"{tap_of.at(i)} / {s.kernel[1]}", f"{tap_of.at(i)} % {s.kernel[1]}")
        row, column = (f"({t} * {h} + {d} * ({k}) - {p})" for (h, t, d, p), k in zip(places, within, strict=True))
        row, column = (f"max({text}, 0)" if p else text for text, p in zip((row, column), s.padding, strict=True))
        return f"int64({row} * {width} + {column})"

    if any(len(g) != 1 for g in tap_of.groups[2:]):
        raise Unsupported("a single row or column of windows")
    return Value(tap_of.groups, element_text, INT64)


def max_pool_backward(
    c: TranslationContext, g: Value, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, ceiling: bool,
    places: Value,
) -> Value:  # fmt: skip
    """The gradients of all windows, each added at the index of its maximum."""
    s = PoolShape.of(kernel, stride, padding, dilation)
    g, places = align_values([v if v.access else c.body.materialize(v) for v in (g, places)])
    if any(len(group) != 1 for v in (g, x) for group in v.groups[-2:]):
        raise Unsupported("a single row or column of windows, or merged dimensions")
    if all(k <= t and d == 1 for k, t, d in zip(s.kernel, s.stride, s.dilation, strict=True)):
        return _read_windows(c, g, places, s)
    height, width = c.shape[-2:]
    flat = of_shape((*c.shape[:-2], height * width), lambda i: format_literal(0, compute_dtype(c.dtype)), c.dtype)
    if flat.groups[:-1] != g.groups[:-2]:
        raise Unsupported("channels that fall apart differently")
    added = c.body.add_scattered(flat, g, lambda i: [*i[:-2], places.at(i)])
    return reshape_value(added, c.shape)


def _read_windows(c: TranslationContext, g: Value, places: Value, s: PoolShape) -> Value:
    """The gradient for windows no larger than their stride, so that an element is in at most one window."""
    height, width = c.shape[-2:]

    def element_text(i: Sequence[str]) -> str:
        conditions, window = [], []
        for index, stride, before, count, extent in zip(
            i[-2:], s.stride, s.padding, g.shape[-2:], (height, width), strict=True
        ):
            shifted = f"({index} + {before})" if before else index
            window.append(f"({shifted} / {stride})")
            conditions += [f"{shifted} < {count * stride}"] if extent + before > count * stride else []
        at = [*i[:-2], *window]
        found = [*conditions, f"{places.at(at)} == {i[-2]} * {width} + {i[-1]}"]
        return f"({' && '.join(found)} ? {g.at(at)} : {format_literal(0, compute_dtype(c.dtype))})"

    return Value((*g.groups[:-2], (height,), (width,)), element_text, c.dtype)


def _add_batch(c: TranslationContext, x: Value) -> tuple[TranslationContext, Value]:
    """The context and the images with a batch dimension, of size 1 if they have none."""
    if len(x.groups) == 4:
        return c, x
    return replace(c, shape=(1, *c.shape)), reshape_value(x, [1, *x.shape])


MULTI_OUTPUT_OPS[MAX_POOL] = max_pool
operation(BACKWARD)(max_pool_backward)


def _count_taps(node: fx.Node, shape: Sequence[int]) -> int:
    kernel: Any = node.args[2] if node.target is BACKWARD else node.args[1]
    return math.prod(shape) * math.prod(repeat_number(kernel, 2))


FLOPS[MAX_POOL] = lambda node: OPERATIONS_PER_TAP * _count_taps(node, node.meta["val"][0].shape)
