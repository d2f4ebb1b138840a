"""Convolutions and their gradients as formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import fx

from ..core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from ..runtime.cpu.host import host
from .conv_windows import ConvWindows, format_element
from .index_views import Value, guard_value, offset_dim, permute_value, reshape_value, shift_dim
from .literals import Unsupported, format_literal
from .op_table import (
    FLOPS,
    MULTI_OUTPUT_OPS,
    Parts,
    TranslationContext,
    add_scaled,
    aten,
    operation,
    reduce_dims,
)

LEAST_LANES = 8
"""The minimum number of channels for vectors along them in the gradient by the weights."""
CHANNELS_LAST_BYTES = 1 << 20
"""The data size above which its channels are innermost there, not those of the results: it does not stay in L2."""
LEAST_PAIRED_CHANNELS = 32
"""The number of channels from which they are innermost in a convolution that multiplies pairs of bfloat16 channels."""
MOST_ROWS = 2
"""The maximum number of windows, for each channel of the results, that are copied to rows for a product of matrices."""
MOST_PHASES = 4
"""The maximum number of phases of a transposed convolution, each of which is a statement."""
CONVOLUTION, BACKWARD = aten.convolution.default, aten.convolution_backward.default


def repeat_number(values: Sequence[int], count: int) -> list[int]:
    """`values` for each of `count` dimensions, where one number may stand for all."""
    return [*values] * count if len(values) == 1 else [*values]


def pad_value(
    c: TranslationContext, x: Value, widths: Sequence[tuple[int, int]], fill: str, *, channels_last: bool = False
) -> Value:
    """`x` padded with `fill` by (before, after) `widths` in its last dimensions. Raises Unsupported if one is negative.

    channels_last: whether channels, dimension 1, are innermost in memory.
    """
    if any(n < 0 for both in widths for n in both):
        raise Unsupported("padding of more than a window")
    rank, first = len(x.groups), len(x.groups) - len(widths)
    if channels_last:  # a statement of its own, because only plain copies are transposed in registers
        x = c.body.materialize_rounded(permute_value(x, [0, *range(2, rank), 1]))
        first -= 1
    padded = x if x.access or not any(map(any, widths)) else c.body.materialize_rounded(x)
    bounds: list[tuple[int, int, int]] = []
    for d, (before, behind) in enumerate(widths, first):
        if before or behind:
            size = x.shape[d]
            padded = offset_dim(padded, d, before + size + behind, before)
            bounds.append((d, before, before + size))
    if not bounds:
        padded = c.body.materialize_rounded(padded)
    else:
        split, guarded = any(len(g) > 1 for g in padded.groups), guard_value(padded, bounds, fill)
        padded = c.body.materialize_merged(guarded) if split else c.body.materialize_rounded(guarded)
    return permute_value(padded, [0, rank - 1, *range(1, rank - 1)]) if channels_last else padded


def _fit_channels(c: TranslationContext, x: Value, groups: int) -> Value:
    """`x`, or a copy of it without loops that split a dimension in another way than `groups` of channels."""
    channels = x.shape[1] // groups
    others = (g for d, g in enumerate(x.groups) if d != 1)
    fits = all(len(g) <= 1 for g in others) and (len(x.groups[1]) <= 1 or x.groups[1] == (groups, channels))
    return x if fits else c.body.materialize_merged(x)


def both_sides(widths: Sequence[int]) -> list[tuple[int, int]]:
    return [(n, n) for n in widths]


# --- convolutions ------------------------------------------------------------------------------------------------


def _check_type(dtype: DType) -> None:
    if dtype not in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64):
        raise Unsupported("not in floating point")


def padded_weights(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the weights that the def of `node` multiplies with zeros of the padding, which torch skips.

    Infinite or NaN weights make those products NaN.
    """
    if node.target is CONVOLUTION and (any(node.args[4]) or node.args[6]):  # type: ignore[arg-type]
        yield node.args[1]  # type: ignore[misc]
    elif node.target is BACKWARD and node.args[-1][0]:  # type: ignore[index]
        yield node.args[2]  # type: ignore[misc]


@operation(CONVOLUTION)
def conv(
    c: TranslationContext, x: Value, weight: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any,
    is_transposed: bool, _: Any, groups: int,
) -> Value:  # fmt: skip
    _check_type(c.dtype)
    count = len(x.groups) - 2
    shape = ConvShape.of(groups, count, stride, padding, dilation)
    weight = c.body.materialize_rounded(weight)
    result = (_spread_windows if is_transposed else _gather_windows)(c, x, weight, shape, c.shape)
    if bias is None:
        return result
    return add_scaled(c, "+", result, reshape_value(bias, [1, *bias.shape, *[1] * count]), 1)


@dataclass(frozen=True, slots=True)
class ConvShape:
    """The groups of channels, and the stride, padding and dilation of windows in each dimension."""

    groups: int
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @staticmethod
    def of(groups: int, count: int, *each: Sequence[int]) -> ConvShape:
        """Of stride, padding and dilation, of which one number may stand for all dimensions."""
        stride, padding, dilation = (repeat_number(s, count) for s in each)
        return ConvShape(groups, stride, padding, dilation)


def _gather_windows(c: TranslationContext, x: Value, weight: Value, s: ConvShape, sizes: Sequence[int]) -> Value:
    """A convolution: the result, of `sizes`, sums windows of `x`.

    An instruction that multiplies pairs of bfloat16 reads those of neighboring channels at once if these are innermost.
    """
    windows = ConvWindows.of(sizes[0], s.groups, weight.shape, sizes[2:], s.stride, s.dilation)
    pairs = x.dtype == BFLOAT16 and s.groups == 1 and x.shape[1] >= LEAST_PAIRED_CHANNELS and host().has_bf16_dot
    pairs = pairs and math.prod(weight.shape[2:]) > 1 and not c.body.is_selection(x)
    x = pad_value(c, x, both_sides(s.padding), format_literal(0, x.dtype), channels_last=pairs)
    x = _fit_channels(c, x, s.groups)
    return windows.convolve(c, lambda w: w.data(x), windows.taps(weight))


def convolution_backward(
    c: TranslationContext, g: Value, x: Value, weight: Value, _: Any, stride: Any, padding: Any, dilation: Any,
    is_transposed: bool,
    __: Any, groups: int, mask: Sequence[bool],
) -> Parts:  # fmt: skip
    """The gradients by the input, by the weights and by the bias."""
    _check_type(g.dtype)
    count = len(x.groups) - 2
    shape = ConvShape.of(groups, count, stride, padding, dilation)

    def by_input() -> Value:
        taps = c.body.materialize_rounded(weight)
        return (_gather_windows if is_transposed else _spread_windows)(c, g, taps, shape, x.shape)

    def by_weight() -> Value:
        data, results = (g, x) if is_transposed else (x, g)
        return _correlate(c, data, results, weight.shape, shape)

    def by_bias() -> Value:
        total = reduce_dims(c, g, [0, *range(2, 2 + count)], True, "+")
        return reshape_value(total, [g.shape[1]])

    return [part if wanted else None for part, wanted in zip((by_input, by_weight, by_bias), mask, strict=True)]


def _correlate(c: TranslationContext, x: Value, g: Value, weight: Sequence[int], s: ConvShape) -> Value:
    """The gradient of a convolution of `x` by its weights, from `g`, the gradient by its results.

    It is one matrix product per tap, of channels of the results by channels of the data, summed over all positions. A
    copy makes the channels of one of them innermost, so that a vector has neighboring channels.
    """
    count, spatial = len(s.stride), range(len(s.stride))
    windows = ConvWindows.of(x.shape[0], s.groups, weight, g.shape[2:], s.stride, s.dilation)
    padding, zero = both_sides(s.padding), format_literal(0, x.dtype)
    results, channels = windows.extents["o"], windows.extents["c"]
    if results < LEAST_LANES and channels < LEAST_LANES:
        upstream = c.body.materialize_rounded(_fit_channels(c, g, s.groups))
        data = _fit_channels(c, pad_value(c, x, padding, zero), s.groups)
        return windows.reduce(c, windows.of_taps, f"{windows.data(data)} * {windows.results(upstream)}")
    places = math.prod(windows.extents[t] for t in ("n", *(f"h{d}" for d in spatial)))
    if s.groups == 1 and places <= MOST_ROWS * results and min(results, math.prod(weight[1:])) > 1 and places > 1:
        data, upstream = (
            _fit_channels(c, v, 1) for v in (pad_value(c, x, padding, zero), c.body.materialize_rounded(g))
        )
        return windows.correlate(c, data, upstream)
    taps, bytes_ = [(f"k{d}",) for d in spatial], math.prod(x.shape) * x.dtype.bits // 8
    along = channels >= LEAST_LANES and (
        results < LEAST_LANES or (bytes_ > CHANNELS_LAST_BYTES and all(n == 1 for n in s.stride))
    )
    data = _fit_channels(c, pad_value(c, x, padding, zero, channels_last=along), s.groups)
    upstream = _fit_channels(c, pad_value(c, g, [(0, 0)] * count, zero, channels_last=not along), s.groups)
    order: list[Sequence[str]] = ["g", *taps, "o", "c"] if along else ["g", "c", *taps, "o"]
    product = windows.reduce(c, order, f"{windows.data(data)} * {windows.results(upstream)}")
    back = [0, count + 1, count + 2, *range(1, count + 1)] if along else [0, count + 2, 1, *range(2, count + 2)]
    return reshape_value(permute_value(product, back), weight)


def _spread_windows(c: TranslationContext, x: Value, weight: Value, s: ConvShape, sizes: Sequence[int]) -> Value:
    """A transposed convolution: every element of `x` is spread over a window of the result, which has `sizes`.

    Only every `stride`-th tap reaches an element of the result, so that the elements whose index has the same remainder
    modulo the stride, a phase, are a convolution with these taps.
    """
    if all(n == 1 for n in s.stride):
        taps = _transpose_weight(weight, s.groups)
        widths = [e * (k - 1) - p for e, k, p in zip(s.dilation, weight.shape[2:], s.padding, strict=True)]
        return _gather_windows(c, x, taps, replace(s, padding=widths), sizes)
    if any(n != 1 for n in s.dilation):
        raise Unsupported("a transposed convolution with dilation")
    if math.prod(s.stride) > MOST_PHASES:
        raise Unsupported(f"a transposed convolution with more than {MOST_PHASES} phases")
    phases = [
        [StridePhase.of(r, stride, p, k) for r in range(stride)]
        for stride, p, k in zip(s.stride, s.padding, weight.shape[2:], strict=True)
    ]
    counts = [-(-n // stride) for n, stride in zip(sizes[2:], s.stride, strict=True)]
    before = [max(0, *(p.taps - 1 - p.offset for p in each)) for each in phases]
    behind = [max(0, *(n - h + p.offset for p in each)) for each, n, h in zip(phases, counts, x.shape[2:], strict=True)]
    padded = pad_value(c, x, list(zip(before, behind, strict=True)), format_literal(0, x.dtype))
    parts = {
        chosen: _reduce_phase(c, padded, weight, s, counts, before, chosen)
        for chosen in product(*phases)
        if all(p.taps for p in chosen)
    }
    whole = _interleave_phases(c, phases, parts, s, [n * stride for n, stride in zip(counts, s.stride, strict=True)])
    for d, n in enumerate(sizes[2:], 2):
        if n != whole.shape[d]:  # the last elements of some phases are beyond the end
            whole = shift_dim(whole, d, n, lambda i: i)
    return whole


@dataclass(frozen=True, slots=True)
class StridePhase:
    """The elements of a dimension of a transposed convolution at `stride * q + r`, for all q.

    They are the sum of the element of the data at `q + offset - b` times the tap at `first + stride * b`, for all
    `b` below `taps`.
    """

    offset: int
    first: int
    taps: int

    @staticmethod
    def of(r: int, stride: int, padding: int, kernel: int) -> StridePhase:
        offset, first = divmod(r + padding, stride)
        return StridePhase(offset, first, max(0, -(-(kernel - first) // stride)))


def _reduce_phase(
    c: TranslationContext, x: Value, weight: Value, s: ConvShape, counts: Sequence[int], before: Sequence[int],
    chosen: Sequence[StridePhase],
) -> Value:  # fmt: skip
    """The elements of one phase in each dimension."""
    taps = [n.taps for n in chosen]
    shape = [weight.shape[1] * s.groups, weight.shape[0] // s.groups, *taps]
    windows = ConvWindows.of(x.shape[0], s.groups, shape, counts, s.stride, s.dilation)
    steps = [
        f"({p.first + stride * (p.taps - 1)} - {stride} * {windows.name(f'k{d}')})"
        for d, (p, stride) in enumerate(zip(chosen, s.stride, strict=True))
    ]
    starts = [p.offset + width - (p.taps - 1) for p, width in zip(chosen, before, strict=True)]

    def data(w: ConvWindows) -> str:
        places = [f"({w.name(f'h{d}')} + {w.name(f'k{d}')} + {start})" for d, start in enumerate(starts)]
        return format_element(x, [w.name("n"), w.channel("c"), *places])

    return windows.convolve(c, data, format_element(weight, [windows.channel("c"), windows.name("o"), *steps]))


def _interleave_phases(
    c: TranslationContext, phases: Sequence[Sequence[StridePhase]], parts: Mapping[tuple[StridePhase, ...], Value],
    s: ConvShape, sizes: Sequence[int],
) -> Value:  # fmt: skip
    """The phases as one value of spatial `sizes`: in dimension d, the element at `stride * q + r` is phase r at q."""
    groups = list(next(iter(parts.values())).groups[:2])
    outer = sum(map(len, groups))
    for size, stride in zip(sizes, s.stride, strict=True):
        groups.append(tuple(n for n in (size // stride, stride) if n != 1))

    def element_text(i: Sequence[str]) -> str:
        rest, at, remainders = list(i[outer:]), list(i[:outer]), []
        for size, stride in zip(sizes, s.stride, strict=True):
            at += [rest.pop(0)] if size // stride != 1 else []
            remainders.append(rest.pop(0) if stride != 1 else "0")

        def choose(chosen: tuple[StridePhase, ...]) -> str:
            d = len(chosen)
            if d == len(phases):
                return parts[chosen].at(at) if chosen in parts else format_literal(0, c.dtype)
            text = choose((*chosen, phases[d][-1]))
            for r, phase in reversed(list(enumerate(phases[d][:-1]))):
                text = f"({remainders[d]} == {r} ? {choose((*chosen, phase))} : {text})"
            return text

        return choose(())

    return Value(tuple(groups), element_text, c.dtype)


def _transpose_weight(weight: Value, groups: int) -> Value:
    """The weights for the gradient by the input: `w(g c, o, -k...)`."""
    results, channels, *kernel = weight.shape
    spatial = range(len(kernel))
    if groups == 1:
        swapped = permute_value(weight, [1, 0, *(2 + d for d in spatial)])
    else:
        apart = reshape_value(weight, [groups, results // groups, channels, *kernel])
        swapped = permute_value(apart, [0, 2, 1, *(3 + d for d in spatial)])
        swapped = reshape_value(swapped, [groups * channels, results // groups, *kernel])
    for d, size in enumerate(kernel):
        swapped = shift_dim(swapped, 2 + d, size, lambda i, size=size: f"({size - 1} - {i})")  # type: ignore[misc]
    return swapped


def split_conv_backward(graph: fx.Graph) -> None:
    """Split each backward of a convolution into a node per gradient, so that regions may include some of them."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is BACKWARD:
            _split_backward_node(graph, node)
    graph.eliminate_dead_code()


def _split_backward_node(graph: fx.Graph, node: fx.Node) -> None:
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


MULTI_OUTPUT_OPS[BACKWARD] = convolution_backward


def _count_filter_taps(node: fx.Node, argument: int) -> int:
    return math.prod(node.args[argument].meta["val"].shape[1:])  # type: ignore[union-attr]


def _count_flops(node: fx.Node, data: int, results: Sequence[int], is_transposed: bool) -> int:
    """The flops of a convolution of argument `data` with the next one; `is_transposed`: a transposed convolution."""
    return (
        2
        * (math.prod(_get_argument_shape(node, data)) if is_transposed else math.prod(results))
        * _count_filter_taps(node, data + 1)
    )


FLOPS[CONVOLUTION] = lambda node: _count_flops(node, 0, node.meta["val"].shape, bool(node.args[6]))
FLOPS[BACKWARD] = lambda node: (
    _count_flops(node, 1, _get_argument_shape(node, 0), bool(node.args[7])) * sum(map(bool, node.args[-1][:2]))  # type: ignore[index,arg-type]
)


def _get_argument_shape(node: fx.Node, argument: int) -> torch.Size:
    found: torch.Size = node.args[argument].meta["val"].shape  # type: ignore[union-attr]
    return found
