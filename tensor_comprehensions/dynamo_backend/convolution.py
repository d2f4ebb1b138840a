"""Convolutions, their gradients, and pooling as formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..core.dtypes import FLOAT32, FLOAT64, DType
from .index_views import Value, drop_dim, permute_value, reshape_value, shift_dim
from .literals import Unsupported, format_literal
from .op_table import (
    FLOPS,
    MULTI_OUTPUT_OPS,
    Parts,
    TranslationContext,
    add_scaled,
    aten,
    divide_by_count,
    num_elements,
    operation,
    reduce_dims,
)

CONVOLUTION, BACKWARD = aten.convolution.default, aten.convolution_backward.default


@dataclass(frozen=True, slots=True)
class ConvWindows:
    """`out(n, g o, h...) = data(n, g c, s h + d k...) * taps(g o, c, k...)`, any of which may be the summed result.

    Attributes:
        extents: of the indices `n g o c h0 h1... k0 k1...`.
        stride, dilation: of each dimension.
    """

    extents: dict[str, int]
    stride: Sequence[int]
    dilation: Sequence[int]

    @staticmethod
    def of(
        batch: int, groups: int, weight: Sequence[int], output_text: Sequence[int], stride: Any, dilation: Any
    ) -> ConvWindows:
        """Of `batch` images in `groups`, weights of the shape `weight`, and windows at `output_text` positions."""
        extents = {"n": batch, "g": groups, "o": weight[0] // groups, "c": weight[1]}
        extents |= {f"h{d}": n for d, n in enumerate(output_text)} | {f"k{d}": n for d, n in enumerate(weight[2:])}
        return ConvWindows(extents, stride, dilation)

    def name(self, letter: str) -> str:
        return letter if self.extents[letter] != 1 else "0"

    def _merge_channels(self, inner: str) -> str:
        return self.name(inner) if self.extents["g"] == 1 else f"(g * {self.extents[inner]} + {self.name(inner)})"

    def places(self) -> list[str]:
        """Where in the data a tap of a window is."""
        both = zip(self.stride, self.dilation, strict=True)
        return [f"({s} * {self.name(f'h{d}')} + {e} * {self.name(f'k{d}')})" for d, (s, e) in enumerate(both)]

    def data(self, x: Value) -> str:
        return _element(x, [self.name("n"), self._merge_channels("c"), *self.places()])

    def taps(self, weight: Value) -> str:
        spatial = range(len(self.stride))
        return _element(weight, [self._merge_channels("o"), self.name("c"), *(self.name(f"k{d}") for d in spatial)])

    def output_text(self, x: Value) -> str:
        spatial = range(len(self.stride))
        return _element(x, [self.name("n"), self._merge_channels("o"), *(self.name(f"h{d}") for d in spatial)])

    def reduce(self, c: TranslationContext, groups: Sequence[Sequence[str]], term: str, operator: str = "+=!") -> Value:
        """`term` combined into the tensor whose dimensions have the indices `groups`."""
        names = [t for group in groups for t in group if self.extents[t] != 1]
        parts = tuple(tuple(self.extents[t] for t in group if self.extents[t] != 1) for group in groups)
        ranges = [f"{letter} in 0:{n}" for letter, n in self.extents.items() if n != 1]
        like = Value(parts, lambda i: "", c.dtype)
        return c.body.add_sum(like, names, term, ranges, operator)

    @property
    def of_out(self) -> list[Sequence[str]]:
        return ["n", "go", *((f"h{d}",) for d in range(len(self.stride)))]

    @property
    def of_taps(self) -> list[Sequence[str]]:
        return ["go", "c", *((f"k{d}",) for d in range(len(self.stride)))]


def _element(x: Value, indices: Sequence[str]) -> str:
    """The element of `x` at one index for each of its dimensions."""
    if any(len(g) > 1 for g in x.groups):
        raise Unsupported("a window over merged dimensions")
    return x.at([i for i, group in zip(indices, x.groups, strict=True) if group])


def _repeat_number(values: Sequence[int], count: int) -> list[int]:
    """`values` for each of `count` dimensions, where one number may stand for all."""
    return [*values] * count if len(values) == 1 else [*values]


def _pad_value(c: TranslationContext, x: Value, widths: Sequence[int], fill: str) -> Value:
    """`x` with `widths` more elements before and behind each of its last dimensions."""
    for d, width in enumerate(widths, len(x.groups) - len(widths)):
        x = _padded_in(c, x, d, width, fill)
    return x if x.access else c.body.materialize(x)


def _padded_in(c: TranslationContext, x: Value, dimension: int, width: int, fill: str) -> Value:
    if width < 0:
        raise Unsupported("padding of more than a window")
    if not width:
        return x
    size = x.shape[dimension]
    x = x if x.access else c.body.materialize(x)
    shifted = shift_dim(x, dimension, size + 2 * width, lambda i: f"({i} - {width})")
    position = sum(len(g) for g in shifted.groups[:dimension])

    def element_text(i: Sequence[str]) -> str:
        return f"({i[position]} >= {width} && {i[position]} < {size + width} ? {shifted.at(i)} : {fill})"

    return c.body.materialize(Value(shifted.groups, element_text, x.dtype))


# --- convolutions ------------------------------------------------------------------------------------------------


def _check(dtype: DType, turned: bool) -> None:
    if turned or dtype not in (FLOAT32, FLOAT64):
        raise Unsupported("transposed, or not in float32 or float64")


def padded_weights(node: fx.Node) -> Iterator[fx.Node]:
    """The weights that `node` multiplies with zeros around its data, as torch does not.

    One of them that is infinite or NaN makes those products NaN.
    """
    if node.target is CONVOLUTION and any(node.args[4]):  # type: ignore[arg-type]
        yield node.args[1]  # type: ignore[misc]
    elif node.target is BACKWARD and node.args[-1][0]:  # type: ignore[index]
        yield node.args[2]  # type: ignore[misc]


@operation(CONVOLUTION)
def conv(
    c: TranslationContext, x: Value, weight: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any,
    turned: bool, _: Any, groups: int,
) -> Value:  # fmt: skip
    _check(c.dtype, turned)
    count = len(x.groups) - 2
    stride, padding, dilation = (_repeat_number(s, count) for s in (stride, padding, dilation))
    weight = weight if weight.access else c.body.materialize(weight)
    windows = ConvWindows.of(c.shape[0], groups, weight.shape, c.shape[2:], stride, dilation)
    x = _pad_value(c, x, padding, format_literal(0, x.dtype))
    result = windows.reduce(c, windows.of_out, f"{windows.data(x)} * {windows.taps(weight)}")
    if bias is None:
        return result
    return add_scaled(c, "+", result, reshape_value(bias, [1, *bias.shape, *[1] * count]), 1)


def convolution_backward(
    c: TranslationContext, g: Value, x: Value, weight: Value, _: Any, stride: Any, padding: Any, dilation: Any,
    turned: bool,
    __: Any, groups: int, mask: Sequence[bool],
) -> Parts:  # fmt: skip
    """The gradients by the input, by the weights and by the bias."""
    _check(g.dtype, turned)
    count = len(x.groups) - 2
    stride, padding, dilation = (_repeat_number(s, count) for s in (stride, padding, dilation))

    def by_input() -> Value:
        if any(s != 1 for s in stride):
            raise Unsupported("the gradient of a convolution with strides by its input")
        turned = _transpose_weight(weight if weight.access else c.body.materialize(weight), groups)
        widths = [e * (k - 1) - p for e, k, p in zip(dilation, weight.shape[2:], padding, strict=True)]
        windows = ConvWindows.of(x.shape[0], groups, turned.shape, x.shape[2:], stride, dilation)
        spread = _pad_value(c, g, widths, format_literal(0, g.dtype))
        return windows.reduce(c, windows.of_out, f"{windows.data(spread)} * {windows.taps(turned)}")

    def by_weight() -> Value:
        windows = ConvWindows.of(x.shape[0], groups, weight.shape, g.shape[2:], stride, dilation)
        spread = _pad_value(c, x, padding, format_literal(0, x.dtype))
        upstream = g if g.access else c.body.materialize(g)
        return windows.reduce(c, windows.of_taps, f"{windows.data(spread)} * {windows.output_text(upstream)}")

    def by_bias() -> Value:
        total = reduce_dims(c, g, [0, *range(2, 2 + count)], True, "+")
        return reshape_value(total, [g.shape[1]])

    return [part if wanted else None for part, wanted in zip((by_input, by_weight, by_bias), mask, strict=True)]


def _transpose_weight(weight: Value, groups: int) -> Value:
    """The weights as the gradient by the input takes them: `w(g c, o, -k...)`."""
    output_text, channels, *kernel = weight.shape
    spatial = range(len(kernel))
    if groups == 1:
        swapped = permute_value(weight, [1, 0, *(2 + d for d in spatial)])
    else:
        apart = reshape_value(weight, [groups, output_text // groups, channels, *kernel])
        swapped = permute_value(apart, [0, 2, 1, *(3 + d for d in spatial)])
        swapped = reshape_value(swapped, [groups * channels, output_text // groups, *kernel])
    for d, size in enumerate(kernel):
        swapped = shift_dim(swapped, 2 + d, size, lambda i, size=size: f"({size - 1} - {i})")  # type: ignore[misc]
    return swapped


def split_conv_backward(graph: fx.Graph) -> None:
    """Make one node of each gradient of a convolution, so that one may be taken without the others."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is BACKWARD:
            _take_apart(graph, node)
    graph.eliminate_dead_code()


def _take_apart(graph: fx.Graph, node: fx.Node) -> None:
    mask = node.args[-1]
    for piece in list(node.users):
        place = piece.args[1]
        if not isinstance(place, int) or not mask[place]:  # type: ignore[index]
            continue
        with graph.inserting_before(piece):
            if place == 2:
                value = node.args[0].meta["val"]  # type: ignore[union-attr]
                over = [d for d in range(value.ndim) if d != 1]
                new = graph.call_function(aten.sum.dim_IntList, (node.args[0], over))
                new.meta["val"] = piece.meta["val"]
            else:
                only = [n == place for n in range(3)]
                alone = graph.call_function(BACKWARD, (*node.args[:-1], only))
                alone.meta["val"] = tuple(x if n == place else None for n, x in enumerate(node.meta["val"]))
                new = graph.call_function(piece.target, (alone, place))  # type: ignore[arg-type]
                new.meta = dict(piece.meta)
        piece.replace_all_uses_with(new)


# --- pooling -----------------------------------------------------------------------------------------------------


def _emit_pool(
    c: TranslationContext, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, operator: str
) -> Value:
    count = 2
    if len(x.groups) == count + 1:  # one image without a batch
        x, whole = reshape_value(x, [1, *x.shape]), replace(c, shape=(1, *c.shape))
        return drop_dim(_emit_pool(whole, x, kernel, stride, padding, dilation, operator), 0)
    kernel, padding, dilation = (_repeat_number(s, count) for s in (kernel, padding, dilation))
    stride = _repeat_number(stride, count) if stride else kernel
    fill = format_literal(-math.inf if operator == "max=!" else 0, x.dtype)
    reach = [s * (h - 1) + d * (k - 1) + 1 for s, h, d, k in zip(stride, c.shape[2:], dilation, kernel, strict=True)]
    if any(r > n + 2 * p for r, n, p in zip(reach, x.shape[2:], padding, strict=True)):
        raise Unsupported("windows that reach beyond the padding")
    windows = ConvWindows.of(c.shape[0], x.shape[1], (x.shape[1], 1, *kernel), c.shape[2:], stride, dilation)
    spread = _pad_value(c, x, padding, fill)
    return windows.reduce(c, windows.of_out, windows.data(spread), operator)


@operation(aten.avg_pool2d.default)
def avg_pool(
    c: TranslationContext, x: Value, kernel: Any, stride: Any = (), padding: Any = (0,), ceiling: bool = False,
    with_padding: bool = True, divisor: int | None = None,
) -> Value:  # fmt: skip
    if not c.dtype.is_float or ceiling or (any(padding) and not with_padding):
        raise Unsupported("windows of different sizes")
    count = divisor or math.prod(_repeat_number(kernel, 2))
    return divide_by_count(c, _emit_pool(c, x, kernel, stride, padding, (1,), "+=!"), count)


def max_pool(
    c: TranslationContext,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceiling: bool = False,
) -> Parts:
    """The maximum of each window; its index stays with torch."""
    if not c.dtype.is_float:
        raise Unsupported(f"not in {c.dtype}")
    return (lambda: _emit_pool(c, x, kernel, stride, padding, dilation, "max=!"), None)


MULTI_OUTPUT_OPS[aten.max_pool2d_with_indices.default] = max_pool
MULTI_OUTPUT_OPS[BACKWARD] = convolution_backward


def _taps(node: fx.Node, argument: int) -> int:
    return math.prod(node.args[argument].meta["val"].shape[1:])  # type: ignore[union-attr]


FLOPS[CONVOLUTION] = lambda node: 2 * num_elements(node) * _taps(node, 1)
FLOPS[BACKWARD] = lambda node: 2 * math.prod(_shape(node, 0)) * _taps(node, 2) * sum(map(bool, node.args[-1][:2]))  # type: ignore[index,arg-type]


def _shape(node: fx.Node, argument: int) -> torch.Size:
    found: torch.Size = node.args[argument].meta["val"].shape  # type: ignore[union-attr]
    return found
