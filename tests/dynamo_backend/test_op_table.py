"""Every operation of the table computes what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tensor_comprehensions.dynamo_backend import emit_def
from tensor_comprehensions.dynamo_backend.backend import fuse_regions
from tensor_comprehensions.dynamo_backend.decompositions import decomposition_table
from tensor_comprehensions.dynamo_backend.kernel_or_eager import KernelOrEager
from tensor_comprehensions.dynamo_backend.op_table import MULTI_OUTPUT_OPS, TABLE, aten, prims
from tensor_comprehensions.dynamo_backend.undecomposed_operations import captured_whole

r = torch.randn
A, B, ROW, COLUMN = r(4, 6), r(4, 6), r(6), r(4, 1)
POSITIVE = A.abs() + 0.5
IMAGE = r(2, 6, 9, 8)
HALF = r(4, 6).bfloat16()
ROUNDED = torch.linspace(-2, 2, 24).view(4, 6).bfloat16()
WHOLE = torch.randint(-3, 4, (4, 6))
BOOLEAN = A > 0

KEPT = torch.tensor([1.0, 0, 1, 1, 1, 0, 1]).bool().expand(1, 1, 5, 7).clone()  # and a row with nothing
KEPT[0, 0, 3] = False
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "add": (lambda x, y: torch.add(x, y, alpha=2) + 1, (A, ROW)),
    "add of integers": (lambda x, y: x + 2 * y - 1, (WHOLE, WHOLE.flip(0))),
    "subtract": (lambda x, y: (1 - x) - torch.sub(x, y, alpha=0.5), (A, COLUMN)),
    "multiply, divide": (lambda x, y: (x * y) / (2.5 + y * y) / 3, (A, ROW)),
    "unary": (lambda x: torch.sigmoid(x).exp() + x.tanh().sin() - x.erf().cos() + (-x).abs().relu(), (A,)),
    "positive": (lambda x: x.sqrt() + x.rsqrt() * x.log() + x.log1p() + x.log2() + 1 / x, (POSITIVE,)),
    "rounding": (lambda x: (3 * x).floor() + (3 * x).ceil() + x.expm1() + x.exp2(), (A,)),
    "powers": (lambda x: x**2 + x**3 - x**0.5 * x**-0.5 + x**1, (POSITIVE,)),
    "least and greatest": (lambda x, y: torch.maximum(x, y) - torch.minimum(x, y).clamp(-0.5, 0.5), (A, B)),
    "clamp below": (lambda x: x.clamp(min=0.1).sqrt(), (A,)),
    "comparisons": (lambda x, y: torch.where((x > y) | (x <= 0.5) & ~(y == 0), x, 2 * y), (A, ROW)),
    "comparison of types": (lambda x, y: torch.where(x > y, 1.5, 0.0) + torch.where(x != 1, 1.0, y), (WHOLE, A)),
    "masks": (lambda x, m: x * m.float() + torch.logical_not(m).float(), (A, BOOLEAN)),
    "numbers": (lambda x: torch.full((4, 6), 0.5) * x + torch.full_like(x, -2.0), (A,)),
    "by name": (
        lambda x: prims.convert_element_type(
            aten.mul.Scalar(aten.add.Scalar(x, 1.0), 2.0) - aten.div.Scalar(aten.sub.Scalar(x, 1.0), 3.0), torch.float64
        ),
        (A,),
    ),
    "comparisons by name": (
        lambda x, y: torch.where(
            torch.logical_and(torch.logical_or(x == y, x < y), torch.logical_or(x != y, x >= y)),
            torch.where(x < 0.1, x, y), torch.where(x >= 0.2, y, 1.0),
        ),
        (A, B),
    ),
    "numbers alone": (lambda x: torch.where(x > 0, 1, 2) * 3 + 1, (A,)),
    "small integers": (lambda x: (x.to(torch.uint8) * 3 + 250) * 2, (WHOLE.abs(),)),
    "infinity": (lambda x, m: x.masked_fill(m, -torch.inf).exp(), (A, BOOLEAN)),
    "range": (lambda x: x * torch.arange(6).float() + (torch.arange(4).unsqueeze(1) <= torch.arange(6)).float(), (A,)),
    "16 bits": (lambda x, y: (x * 2 + y.bfloat16()).float() * y, (HALF, A)),
    "comparisons of computed 16 bits": (
        lambda x, y: (
            (x * 1.01 == y).float() + (x * 1.01 >= 1.5).float() * 2 + ((x * 1.01).t() < y.t()).float().sum() * 4
        ),
        (ROUNDED, ROUNDED * 1.01),
    ),
    "16 bit sums": (lambda x: x.sum(1) + (x + x).amax(1), (HALF,)),
    "permute": (lambda x: (x + 1).permute(2, 0, 3, 1) * 2, (IMAGE,)),
    "transpose": (lambda x, y: ((x * 2).t() + y.transpose(0, 1)).exp(), (A, B)),
    "reshape": (lambda x: (x * 2).reshape(3, 8).exp().view(2, 2, 6) + 1, (A,)),
    "squeeze": (lambda x: (x * 2).unsqueeze(1).exp().squeeze(1) + (x + 1).reshape(1, 4, 1, 6).squeeze((0, 2)), (A,)),
    "expand": (lambda x, y: (x.exp() * 2).expand(4, 6) * y, (COLUMN, A)),
    "select": (lambda x: (x * 2).select(1, -1).exp() + (x + 1)[2, 3], (A,)),
    "slice": (lambda x: (x * 2)[1:, ::2].exp() + (x + 1)[:-1, 3:], (A,)),
    "split": (lambda x: torch.mul(*(x * 2).split([2, 4], 1)[::-1][0].split(2, 1)) + (x + 1).split(2, 1)[0], (A,)),
    "gradients of slices": (
        lambda x: aten.slice_backward(x * 2, [9, 6], 0, 2, 6, 1) - aten.slice_backward(x, [9, 6], -2, -4, 1 << 62, 1),
        (A,),
    ),
    "gradients of whole slices": (
        lambda x: aten.slice_backward(x[:1] * 2, [1, 6], 0, 0, 1, 1) + F.pad(F.pad(x, (-5, 0)), (-1, 1), value=3.0),
        (A,),
    ),
    "gradients of selections": (
        lambda x: aten.select_backward(x + 1, [4, 3, 6], 1, -2).exp() + aten.select_backward(x, [4, 3, 6], 1, 0),
        (A,),
    ),
    "signed integers": (
        lambda i, j: ((-i).abs() * 3 + j).minimum(j * 5).maximum(i - 7) + torch.where(i > j, -j, i.abs()),
        (torch.randint(-9, 9, (4, 6)), torch.randint(-9, 9, (4, 6))),
    ),
    "least integers": (lambda i: (-i).abs() + i.abs() * 2, (torch.tensor([-(1 << 63), 5, (1 << 63) - 1]),)),
    "roll": (lambda x: torch.roll(x * 2, (3, -5), (0, -1)).exp() + torch.roll(x, 2, 1), (A,)),
    "padding": (
        lambda x, m: (F.pad(x * 2, (1, -2, 0, 3), value=0.5).exp(), F.pad(m, (2, 0)).float() * 2)[0]
        + F.pad(F.pad(m, (-1, 0), value=True).float(), (0, 0, 0, 3)),
        (A, BOOLEAN),
    ),
    "cat": (lambda x, y: torch.cat([x * 2, y, (x + y)[:2]], 0).exp() + torch.cat([x, y, y[:2]]), (A, B)),
    "cat of pieces": (lambda x, y: torch.cat([(x * 2).reshape(2, 2, 6), y.exp().view(2, 2, 6)], -1) * 2, (A, B)),
    "copies": (lambda x: (x * 2).clone().detach().contiguous() + 1, (A,)),
    "sums": (lambda x: (x * 2).sum(1) + x.sum((0, 1)) + (x + 1).sum(), (A,)),
    "sum kept": (lambda x: x / x.exp().sum(0, keepdim=True) + x.mean(1, keepdim=True) + x.mean(), (A,)),
    "extremes": (lambda x: (x.amax((1,)) - x.amin(1)) * x.exp().amax(), (A,)),
    "variance": (lambda x: x.var(1, keepdim=True) * x + x.var(0, correction=0), (A,)),
    "softmax": (lambda x: F.softmax(x, 1) + F.log_softmax(x, 0), (A,)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (A, ROW, ROW.flip(0))),
    "group norm": (lambda x, w: F.group_norm(x, 3, w, w), (IMAGE, ROW)),
    "group norm of one group": (lambda x, w: F.group_norm(x * 2, 1, w, w) + 1, (IMAGE, ROW)),
    "batch norm": (lambda x, w: F.batch_norm(x, w, w.abs(), w, w), (IMAGE, ROW)),
    "rms norm": (lambda x, w: F.rms_norm(x, (6,), w, 1e-6) * F.silu(x), (A, ROW)),
    "activations": (lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.leaky_relu(x) + F.elu(x), (A,)),
    "product": (lambda x, y: (x @ y.t() + 1).relu() @ y, (A, B)),
    "linear": (lambda x, w, b: F.gelu(F.linear(x.reshape(2, 2, 6) * 2, w, b)), (A, r(5, 6), r(5))),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2).exp(), (ROW, r(3, 5), r(5, 6))),
    "products in a batch": (lambda x, y: torch.softmax(torch.bmm(x, y) * 0.5, 2) + 1, (r(3, 4, 5), r(3, 5, 2))),
    "heads": (
        lambda x, w, k: (F.linear(x, w).view(2, 3, 2, 4).transpose(1, 2) * 2).reshape(4, 3, 4).bmm(k),
        (r(2, 3, 6), r(8, 6), r(4, 4, 5)),
    ),
    "merged": (lambda x, y: (x * 2).reshape(8, 6).t() @ (y + 1).reshape(8, 3), (r(2, 4, 6), r(2, 4, 3))),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(), (IMAGE, r(4, 6, 3, 3), r(4))),
    "strided": (lambda x, w: F.conv2d(x * 2, w, None, 2, (0, 2), (1, 2)) + 1, (IMAGE, r(4, 6, 3, 3))),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=3, padding=1) + 1, (IMAGE, r(9, 2, 3, 3))),
    "depthwise": (lambda x, w: F.conv1d(x[0] + 1, w, groups=6) * 2, (IMAGE[..., 0], r(6, 1, 3))),
    "three dimensions": (lambda x, w: F.conv3d(x.unsqueeze(1), w).exp(), (IMAGE, r(2, 1, 2, 3, 1))),
    "gradients of a convolution": (
        lambda g, x, w: _gradients(g, x, w, [1, 1], [1, 1], [1, 1], 1),
        (r(2, 4, 9, 8), IMAGE, r(4, 6, 3, 3)),
    ),
    "gradients of groups": (
        lambda g, x, w: _gradients(g, x, w, [1, 1], [0, 2], [1, 2], 3),
        (r(2, 9, 7, 8), IMAGE, r(9, 2, 3, 3)),
    ),
    "gradient of strides": (
        lambda g, x, w: _gradients(g, x, w, [2, 1], [0, 1], [1, 1], 1) + 1,
        (r(2, 4, 4, 8), IMAGE, r(4, 6, 3, 3)),
    ),
    "gradients of means of windows": (
        lambda g, x: aten.avg_pool2d_backward(g * 2, x, [3, 3], [1, 1], [1, 1], False, False, None) + x,
        (torch.rand(2, 3, 6, 5), torch.rand(2, 3, 6, 5)),
    ),
    "means of windows": (lambda x: F.avg_pool2d(x * 2, 3, 2) + F.avg_pool2d(x, 3, 2, 1)[:, :, 1:, 1:], (IMAGE,)),
    "extremes of windows": (lambda x: F.max_pool2d(x * 2, 3, 2, 1) + F.max_pool2d(x, (2, 3), 2, (1, 1)), (IMAGE,)),
    "gradients of extremes of windows": (
        lambda x, g: sum(
            torch.ops.aten.max_pool2d_with_indices_backward(
                g[:, :, : 4 - s], x, [2, 2], [s, 2], [0, 0], [1, 1], False,
                F.max_pool2d(x, 2, (s, 2), return_indices=True)[1],
            )
            for s in (1, 2)
        ),
        (r(2, 3, 4, 6), r(2, 3, 3, 3)),
    ),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 2, (r(2, 3, 5, 4), *r(2, 2, 3, 7, 4))),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(
            *(x.view(2, 6, 3, 4).transpose(1, 2) for x in (q, k * 2, v)), is_causal=True, scale=0.3
        ).transpose(1, 2).reshape(2, 6, 12) + q,
        tuple(r(3, 2, 6, 12)),
    ),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (r(2, 3, 5, 4), *r(2, 2, 3, 7, 4), KEPT),
    ),
    "gradients of attention with a mask": (
        lambda g, q, k, v, m: _attention_gradients(g, q, k, v, m, causal=False),
        (*r(2, 2, 3, 5, 4), *r(2, 2, 3, 7, 4), torch.zeros(KEPT.shape).masked_fill(~KEPT, -torch.inf)),
    ),
    "gradients of attention": (lambda g, q, k, v: _attention_gradients(g, q, k, v), tuple(r(4, 2, 3, 6, 4))),
    "softmax of rows of -inf": (
        lambda x: torch.cat([aten._safe_softmax(x * 2, -1) + 1, aten._safe_softmax(x, 0).exp()]),
        (KEPT[0, 0].float().log(),),
    ),
    "convolution in bfloat16": (
        lambda x, w, b: F.conv2d(x.relu(), w.bfloat16(), b, padding=1).relu() * 2,
        (torch.rand(2, 3, 6, 5).bfloat16(), torch.rand(4, 3, 3, 3), torch.rand(4).bfloat16()),
    ),
    "convolution of one element in bfloat16": (
        lambda x, w: F.conv2d(x * 2, w).tanh(),
        (torch.rand(2, 32, 5, 5).bfloat16() / 8, torch.rand(24, 32, 1, 1).bfloat16()),
    ),
    "convolution of many channels in bfloat16": (
        lambda x, w: F.conv2d(x.relu(), w, padding=1, stride=(1, 2)).tanh(),
        (torch.rand(2, 33, 6, 9).bfloat16(), torch.rand(24, 33, 3, 3).bfloat16() / 16),
    ),
    "convolution in float16": (
        lambda x, w, b: F.conv2d(x.relu(), w, b, padding=1, groups=2).relu() * 2,
        (torch.rand(2, 32, 6, 5).half(), torch.rand(24, 16, 3, 3).half() / 8, torch.rand(24).half()),
    ),
    "gradients of a convolution in float16": (
        lambda g, x, w: _gradients(g * 0.5, x, w, [2, 2], [1, 1], [1, 1], 1),
        (torch.rand(2, 32, 3, 3).half(), torch.rand(2, 24, 6, 6).half(), torch.rand(32, 24, 3, 3).half()),
    ),
    "gradients of a convolution in bfloat16": (
        lambda g, x, w: _gradients(g * 0.5, x, w, [1, 1], [1, 1], [1, 1], 1),
        (torch.rand(2, 4, 6, 5).bfloat16(), torch.rand(2, 3, 6, 5).bfloat16(), torch.rand(4, 3, 3, 3).bfloat16()),
    ),
    "gradients of a wide convolution in bfloat16": (
        lambda g, x, w: _gradients(g, x, w, [1, 1], [0, 0], [1, 1], 1) * 0.5,
        (torch.rand(2, 32, 4, 4).bfloat16(), torch.rand(2, 24, 6, 6).bfloat16(), torch.rand(32, 24, 3, 3).bfloat16()),
    ),
    "softmax in bfloat16": (lambda x: aten._safe_softmax(x * 2, -1) * 2, (r(4, 6)[0].bfloat16(),)),
    "embedding": (lambda t, i: F.embedding(i, t) * 2 + 1, (A, torch.randint(4, (3, 2)))),
    "embedding of a product": (lambda t, i: F.embedding(i, t * 2) + 1, (A, torch.randint(4, (3, 2)))),
    "lookups": (
        lambda x, i: torch.cat(
            [x.index_select(1, i) * 2, x[:, i] + 1, (x * 3)[:, i], x[:, (i - 3).view(2, 2)].flatten(1)]
        ),
        (A, torch.tensor([0, 2, 2, 1])),
    ),
    "lookups from the end": (lambda x, i: x[i - 4] * x[i] + x[i[:1]], (A, torch.tensor([0, 2, 2, 1]))),
    "lookups by several indices": (
        lambda x, i, j: x[:, i, j] * 2 + x[:, i - 3, j.flip(0)] + (x * 3)[:, i[0], j].sum() + x[0, i, j[:1]].sum(),
        (torch.randn(3, 4, 5, 2), torch.tensor([[0], [2], [3]]), torch.tensor([4, 0, -5, 1])),
    ),
    "lookups by indices of views": (
        lambda x, i: (x.view(2, 2, 6)[i % 2, i.view(2, 2).t().reshape(4) % 2] + 1) * 2,
        (A, torch.tensor([0, 2, 2, 1])),
    ),
    "sums by index": (
        lambda x, i: (x * 2).index_add(1, i, x[:, :5] * 3, alpha=0.5) + x.index_add(0, i[:4], x),
        (A, torch.tensor([1, 3, 1, 0, 2])),
    ),
    "gradients of an embedding": (
        lambda g, i: aten.embedding_dense_backward(g * 2, i, 6, -1, False)
        + aten.embedding_dense_backward(g + 1, i, 6, 2, False),
        (r(3, 5, 4), torch.randint(6, (3, 5))),
    ),
    "sums at indices": (
        lambda x, i, y: (x * 2).index_put((i - 4,), y.exp(), accumulate=True)
        + x.index_put((i.view(5, 1),), y.view(5, 1, 6) * 2, accumulate=True)
        + x.index_put((i,), y[0] * 2, accumulate=True),
        (A, torch.tensor([1, 3, 1, 0, 2]), r(5, 6)),
    ),
    "elements at indices": (
        lambda x, i: x.gather(1, i) * 2 + (x * 2).gather(0, i % 4) + x[:, :1].gather(0, i[:, :1] % 4),
        (A, torch.randint(6, (3, 5))),
    ),
    "sums of elements at indices": (
        lambda x, i, y: (x * 2).scatter_add(1, i, y * 3) + x.scatter_add(0, i.t()[:3, :1].expand(3, 6) % 4, x + 1),
        (A, torch.randint(6, (4, 5)), r(4, 7)),
    ),
    "losses": (
        lambda x, i: F.cross_entropy(x * 2, i, reduction="sum") + F.nll_loss(x, i, ignore_index=2),
        (A, torch.tensor([0, 2, 5, 1])),
    ),
    "attention with shared heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True) * 2,
        (r(2, 6, 5, 4), *r(2, 2, 3, 5, 4)),
    ),
    "gradients of attention with shared heads": (
        lambda g, q, k, v: _attention_gradients(g, q, k, v, causal=False),
        (*r(2, 2, 6, 5, 4), *r(2, 2, 2, 5, 4)),
    ),
    "larger lines": (lambda x: _enlarge(x, "linear1d"), (r(2, 3, 4),)),
    "larger images": (lambda x: _enlarge(x, "bilinear2d"), (r(2, 3, 4, 5),)),
    "larger volumes": (lambda x: _enlarge(x, "trilinear3d"), (r(1, 2, 3, 4, 5),)),
    "doubles": (lambda x: (x * 0.5).exp() @ x.t() + 1, (A.double(),)),
}  # fmt: skip


def _gradients(g: Tensor, x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """All three gradients of a convolution in one vector."""
    parts = aten.convolution_backward(
        g, x, w, [len(w)], stride, padding, dilation, False, [0, 0], groups, [True, True, True]
    )
    return torch.cat([p.reshape(-1) for p in parts])


def _enlarge(x: Tensor, linear: str) -> Tensor:
    """The sum of `x` enlarged in all ways that have formulas, and the gradients of these, in one vector."""
    dimensions = x.dim() - 2
    large = [3 * n for n in x.shape[2:]]
    ways = [(f"{kind}{dimensions}d", ()) for kind in ("upsample_nearest", "_upsample_nearest_exact")]
    ways.append((f"upsample_{linear}", (False,)))
    larger = sum(getattr(aten, name)(x * 2, large, *given, *[None] * dimensions) for name, given in ways)
    parts = [
        getattr(aten, f"{name}_backward")(larger * 2, large, x.shape, *given, *[None] * dimensions)
        for name, given in ways
    ]
    return torch.cat([x.flatten() for x in (larger, *parts)])


def _attention_gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = True
) -> Tensor:
    out, logarithms = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, logarithms, 0.0, causal, attn_mask=mask
    )
    return torch.cat([p.flatten() for p in (*parts, logarithms)])


def trace_graph(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> torch.fx.GraphModule:
    others = {operation: f for operation, f in decomposition_table().items() if operation not in TABLE}
    with captured_whole(inputs):
        return make_fx(function, others, tracing_mode="fake")(*inputs)


def fuse_graph(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> torch.fx.GraphModule:
    module = fuse_regions(trace_graph(function, inputs))
    for child in module.children():
        if isinstance(child, KernelOrEager):
            child.uses_kernel = True
    return module


@pytest.mark.parametrize("name", CASES)
def test_operations_agree_with_torch(name: str) -> None:
    function, inputs = CASES[name]
    module = fuse_graph(function, inputs)
    assert any(isinstance(m, KernelOrEager) for m in module.children()), "everything stayed with torch"
    ours, theirs = module(*inputs), function(*inputs)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    # Torch rounds to 16 bits after every operation, a kernel at its end.
    rounded = any(x.dtype in (torch.bfloat16, torch.float16) for x in inputs)
    torch.testing.assert_close(ours, theirs, rtol=2e-2 if rounded else 1e-4, atol=2e-2 if rounded else 1e-5)


@pytest.mark.parametrize("most", [0, 1 << 19])
def test_large_tensors_of_16_bits_are_rounded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_def, "MOST_EXACT", most)

    def double_rounded(x: Tensor) -> Tensor:
        y = x * 1.01
        return torch.cat([y.float() + 1, y.float() * 2])

    found, exact = fuse_graph(double_rounded, (HALF,))(HALF), HALF.float() * 1.01
    expected = double_rounded(HALF) if most == 0 else torch.cat([exact + 1, exact * 2])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_cases_reach_the_whole_table() -> None:
    seen = set()
    for function, inputs in CASES.values():
        seen |= {n.target for n in trace_graph(function, inputs).graph.nodes}
    assert {t for t in (*TABLE, *MULTI_OUTPUT_OPS) if t not in seen} == set()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * x.long()).sum(),
        lambda x: (x.double() * 0.1).exp() + 1,
        lambda x: torch.complex(x, x).abs() + 1,
        lambda x: (x.int() / 2 + 1).exp().sort()[0],
    ],
)
def test_what_cannot_be_expressed_stays_with_torch(function: Callable[[Tensor], Tensor]) -> None:
    torch.testing.assert_close(fuse_graph(function, (A,))(A), function(A))


def test_a_kernel_that_is_slower_gives_way() -> None:
    module = fuse_regions(make_fx(lambda x: (x * 2).exp().sum(0), decomposition_table(), tracing_mode="fake")(A))
    (choice,) = (m for m in module.children() if isinstance(m, KernelOrEager))
    choice.graph.forward = lambda x: ((x * 2).exp().sum(0),)
    assert choice.uses_kernel is None
    torch.testing.assert_close(module(A), (A * 2).exp().sum(0))
    assert choice.uses_kernel in (True, False)
    for choice.uses_kernel in (True, False):
        torch.testing.assert_close(module(A), (A * 2).exp().sum(0))
