"""Structured kernels at sizes, strides, dilations and groups that nothing divides equal the reference evaluator.

The data are small whole numbers, so that every order of summation gives the same floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.schedules import pack, tile, vectorize

QUICK = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEW = settings(QUICK, max_examples=max(12, settings().max_examples // 8))
SIZE = st.integers(1, 19)


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(prod(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def agrees(source: str, *tensors: torch.Tensor) -> None:
    """The only def of `source`, compiled, against the reference evaluator."""
    library = tc.define(source)
    name = source.split("def", 1)[1].split("(", 1)[0].strip()
    op = getattr(library, name)
    torch.testing.assert_close(op(*tensors), op.reference(*tensors), rtol=0, atol=0)


def floats(name: str, rank: int) -> str:
    return f"float({', '.join(f'{name}{d}' for d in range(rank))})"


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """A convolution in one to three dimensions and the shapes of its input and weights."""
    rank = draw(st.integers(1, 3))
    most = (40, 14, 7)[rank - 1]
    sizes = draw(st.tuples(*[st.integers(1, most)] * rank))
    window = draw(st.tuples(*[st.integers(1, 4)] * rank))
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    image = tuple((n - 1) * stride + (k - 1) * dilation + 1 for n, k in zip(sizes, window, strict=True))
    batch, channels, filters = draw(st.integers(1, 2)), draw(st.integers(1, 18)), draw(st.integers(1, 37))
    kind = draw(st.sampled_from(("first", "last", "depthwise first", "depthwise last", "grouped")))
    axes, taps = "hwd"[:rank], [f"k{a}" for a in "hwd"[:rank]]
    places = ", ".join(f"{stride}*{a} + {dilation}*{k}" for a, k in zip(axes, taps, strict=True))
    out, window_indices = ", ".join(axes), ", ".join(taps)
    text, x, w = {
        "first": (f"O(n,f,{out}) +=! I(n,c,{places}) * W(f,c,{window_indices})",
                  (batch, channels, *image), (filters, channels, *window)),
        "last": (f"O(n,{out},f) +=! I(n,{places},c) * W({window_indices},c,f)",
                 (batch, *image, channels), (*window, channels, filters)),
        "depthwise first": (f"O(n,c,{out}) +=! I(n,c,{places}) * W(c,{window_indices})",
                            (batch, channels, *image), (channels, *window)),
        "depthwise last": (f"O(n,{out},c) +=! I(n,{places},c) * W({window_indices},c)",
                           (batch, *image, filters), (*window, filters)),
        "grouped": (f"O(n,g,f,{out}) +=! I(n,g,c,{places}) * W(g,f,c,{window_indices})",
                    (batch, 3, channels, *image), (3, filters, channels, *window)),
    }[kind]  # fmt: skip
    return f"def conv({floats('X', len(x))} I, {floats('Y', len(w))} W) -> (O) {{ {text} }}", [x, w]


@FEW
@given(convolutions())
def test_convolutions(case: tuple[str, Sequence[tuple[int, ...]]]) -> None:
    source, shapes = case
    agrees(source, *(whole(*shape) for shape in shapes))


@FEW
@given(st.tuples(st.integers(1, 3), st.integers(1, 20), SIZE, SIZE), st.integers(1, 4), st.integers(1, 3),
       st.sampled_from(("max=!", "min=!", "+=!")), st.booleans())  # fmt: skip
def test_pooling(sizes: tuple[int, ...], window: int, stride: int, reduction: str, last: bool) -> None:
    n, c, h, w = sizes
    rows = f"{stride}*h + kh, {stride}*w + kw"
    image = tuple((k - 1) * stride + window for k in (h, w))
    out, read = ("n,h,w,c", f"n,{rows},c") if last else ("n,c,h,w", f"n,c,{rows}")
    where = f"where kh in 0:{window}, kw in 0:{window}"
    source = f"def pool(float(A,B,C,D) x) -> (y) {{ y({out}) {reduction} x({read}) {where} }}"
    agrees(source, whole(n, *image, c) if last else whole(n, c, *image))


@FEW
@given(st.permutations("abcd").filter(lambda p: p != list("abcd")), st.tuples(SIZE, SIZE, st.integers(1, 40), SIZE),
       st.sampled_from((torch.float32, torch.float64, torch.uint8)))  # fmt: skip
def test_permutations(order: Sequence[str], sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    name = {torch.float32: "float", torch.float64: "double", torch.uint8: "uint8"}[dtype]
    source = f"def permute({name}(A,B,C,D) x) -> (y) {{ y({','.join(order)}) = x(a,b,c,d) }}"
    agrees(source, whole(*sizes, dtype=torch.int64).abs().to(dtype))


@pytest.mark.parametrize("shape", [(1000, 530), (47, 2100), (2051, 33), (530, 700)], ids=str)
def test_large_transpositions_with_edges(shape: tuple[int, int]) -> None:
    """More than the second cache holds, so that lines are asked for early, or leave past the caches where the last one
    is far; tiles of all four kinds."""
    x = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    flip = tc.define("def flip(float(M,N) x) -> (y) { y(n,m) = x(m,n) }").flip
    assert torch.equal(flip(x), x.t())
    loops = flip.compile(x).source("loops")
    assert "prefetch" in loops or "streaming" in loops or x.numel() * 4 < 1 << 19


@FEW
@given(st.integers(1, 130), st.integers(1, 300), st.sampled_from(("+=!", "max=!")),
       st.sampled_from(("y(m)", "y(n)", "y(k,n)", "y(n,k)")))  # fmt: skip
def test_reductions(m: int, n: int, reduction: str, result: str) -> None:
    read, shape = ("x(m,k,n)", (m, 3, n)) if "k" in result else ("x(m,n)", (m, n))
    kinds = floats("S", len(shape))
    agrees(f"def reduce({kinds} x) -> (y) {{ {result} {reduction} {read} }}", whole(*shape))


@pytest.mark.parametrize("shape", [(2048, 2048), (300, 1000), (4000, 72)], ids=str)
def test_long_columns(shape: tuple[int, int]) -> None:
    x = whole(*shape)
    columns = tc.define("def columns(float(M,N) x) -> (y, z) { y(n) +=! x(m,n) z(n) max=! x(m,n) }").columns
    total, most = columns(x)
    assert torch.equal(total, x.sum(0))
    assert torch.equal(most, x.amax(0))


@FEW
@given(st.integers(1, 3), SIZE, st.integers(1, 40), st.integers(1, 20), st.integers(1, 14), st.booleans())
def test_products_over_single_points(n: int, f: int, h: int, w: int, c: int, biased: bool) -> None:
    """1 x 1 windows, whose images are walked as one dimension, with what is fused around them."""
    text = "O(n,f,h,w) +=! I(n,c,h+kh,w+kw) * W(f,c,kh,kw)"
    if biased:
        text = f"O(n,f,h,w) = B(f) {text.replace('+=!', '+=')} O(n,f,h,w) = fmax(O(n,f,h,w), 0)"
    source = f"def conv(float(N,C,H,W) I, float(F,C,KH,KW) W, float(F) B) -> (O) {{ {text} }}"
    agrees(source.replace("N,C,H,W", "N,C,P,Q"), whole(n, c, h, w), whole(f, c, 1, 1), whole(f))


@pytest.mark.parametrize(("filters", "tiled"), [(35, 32), (43, 24)])
@pytest.mark.parametrize("window", [(2,), (3,), (5,), (3, 3), (2, 5), (3, 1, 3)])
def test_weights_of_small_windows(window: tuple[int, ...], filters: int, tiled: int) -> None:
    """Windows are shorter than vectors: weights are turned across window by window, a line of the panel at a time."""
    rank = len(window)
    axes, taps = "hwd"[:rank], [f"k{a}" for a in "hwd"[:rank]]
    places = ", ".join(f"{a} + {k}" for a, k in zip(axes, taps, strict=True))
    image, weights = whole(2, 37, *(13 + k for k in window)), whole(filters, 37, *window)
    source = (
        f"def conv({floats('A', rank + 2)} I, {floats('B', rank + 2)} W) -> (O) "
        f"{{ O(n,f,{', '.join(axes)}) +=! I(n,c,{places}) * W(f,c,{', '.join(taps)}) }}"
    )
    op = tc.define(source).conv
    pipeline = tile(**{"n": 1, **dict.fromkeys(axes, 1), "f": tiled}) >> pack("W") >> vectorize("f")
    kernel = op.compile(image, weights, schedule=pipeline)
    copied = kernel.source("loops").split(".acc", 1)[0]
    assert "shuffle" in copied, "weights are copied one by one"
    stores = copied.split(".c.c in ")[1].count("] = S0.right.x")  # in the first loop over channels
    assert stores == 16 // (4 if window[-1] <= 4 else 8) * window[-1], "a line of the panel is written in parts"
    torch.testing.assert_close(kernel(image, weights), op.reference(image, weights), rtol=0, atol=0)
