"""Kernels for tensor cores, which `benchmarks.gpu` times: products, attention, and layers of half precision.

Names begin with `gemm_`, `fmha_`, `half_` and so on. Each builder takes sizes; the tests call them with small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tensor_comprehensions as tc
from tensor_comprehensions.tiles.library.layers import lstm, mlp

from .contractions import contractions
from .kernels import Benchmark, Input, Outputs, Peer, floats, peers

BF16, F16 = torch.bfloat16, torch.float16
WORDS = {BF16: "bfloat16", F16: "half", torch.int8: "int8"}
HALF_TOLERANCE = 2e-2
"""Of results that are rounded to half precision, also between statements."""
SIDES = (512, 768, 1000, 1024, 1536, 2048, 3000, 4096, 5120, 6144, 8192)
"""Sides of products of many sizes; some are no multiples of a tile."""
TOKENS, HIDDEN = 16384, 2048
"""Tokens of a batch of attention, and values of a token over all heads."""

PRODUCT = "def product({t}(M,K) A, {t}(N,K) B) -> (C) {{ C(m,n) +=! A(m,k) * B(n,k) }}"
BYTES = "def product(int8(M,K) A, int8(N,K) B) -> (C) { C(m,n) +=! int32(A(m,k)) * int32(B(n,k)) }"
GELU = """
def product_gelu(bfloat16(M,K) A, bfloat16(N,K) B, bfloat16(N) bias, bfloat16(M,N) residual) -> (C) {
    S(m,n) +=! float(A(m,k)) * float(B(n,k))
    T(m,n) = S(m,n) + float(bias(n))
    C(m,n) = bfloat16(0.5 * T(m,n) * (1 + erf(T(m,n) * 0.70710678)) + float(residual(m,n)))
}"""
SWIGLU = """
def swiglu(bfloat16(M,K) X, bfloat16(N,K) W, bfloat16(N,K) V) -> (O) {
    G(m,n) +=! float(X(m,k)) * float(W(n,k))
    H(m,n) +=! float(X(m,k)) * float(V(n,k))
    O(m,n) = bfloat16(G(m,n) * sigmoid(G(m,n)) * H(m,n))
}"""
ATTENTION = """
def attention(bfloat16(Z,I,D) Q, bfloat16(Z,J,D) K, bfloat16(Z,J,D) V) -> (O) {{
    score(z,i,j) +=! float(Q(z,i,d)) * float(K(z,j,d))
    top(z,i) max=! {mask}score(z,i,j){masked}
    weight(z,i,j) = {mask}exp((score(z,i,j) - top(z,i)) * rsqrt(float(D))){zero}
    total(z,i) +=! weight(z,i,j)
    mixed(z,i,d) +=! {mask}float(bfloat16(weight(z,i,j))) * float(V(z,j,d)){zero}
    O(z,i,d) = bfloat16(mixed(z,i,d) / total(z,i))
}}"""
LAYERNORM = """
def layernorm(half(N,D) x, half(D) g, half(D) b) -> (y) {
    mean(n) +=! float(x(n,d))
    mean(n) = mean(n) / D
    variance(n) +=! (float(x(n,d)) - mean(n)) * (float(x(n,d)) - mean(n))
    y(n,d) = half((float(x(n,d)) - mean(n)) * rsqrt(variance(n) / D + 1e-5) * float(g(d)) + float(b(d)))
}"""


def products() -> Iterator[Benchmark]:
    """All, at the sizes whose times are compared with those of libraries."""
    for n in (2048, 4096, 8192):
        yield from (gemm(f"gemm_{name}_{n}", n, n, n, dtype) for name, dtype in (("bf16", BF16), ("f16", F16)))
    random = Random(0)
    sizes = {tuple(random.choice(SIDES) for _ in range(3)) for _ in range(40)}
    for m, n, k in sorted(sizes)[:30]:
        yield gemm(f"gemm_bf16_{m}x{n}x{k}", m, n, k, BF16)
    for n in (4096, 8192):
        yield gemm_bytes(n, n, n)
        yield gemm_tf32(n, n, n)
        yield gemm_gelu(n, n, n)
    yield swiglu(4096, 11008, 4096)
    yield from half_contractions("ci")
    for d in (64, 128):
        for length in (1024, 4096, 16384):
            for causal in (False, True):
                yield fmha(TOKENS // length * HIDDEN // d, length, d, causal=causal)
    yield fmha(32 * 16, 384, 64, causal=False)
    for d in (1024, 2048, 4096, 8192):
        yield layernorm(65536, d)
    yield lstm_cell(4096, 1024, 1024)
    for rows in (4096, 16384, 65536):
        yield mlp_layers(rows, 128, 20)


def gemm(name: str, m: int, n: int, k: int, dtype: torch.dtype) -> Benchmark:
    """`A @ B.T`, summed in float32."""
    text = PRODUCT.format(t=WORDS[dtype])
    inputs = floats((m, k), (n, k), dtype=dtype)
    return Benchmark(
        name, "gemm", text, inputs, peers(transposed_product), tolerance=HALF_TOLERANCE, flops=2 * m * n * k
    )


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def gemm_bytes(m: int, n: int, k: int) -> Benchmark:
    inputs = tuple(Input(shape, torch.int8, 127) for shape in ((m, k), (n, k)))
    same = (Peer("torch._int_mm", lambda a, b: torch._int_mm(a, b.t())),)
    return Benchmark(f"gemm_int8_{m}", "gemm", BYTES, inputs, same, tolerance=0, flops=2 * m * n * k)


def gemm_tf32(m: int, n: int, k: int) -> Benchmark:
    """Factors of float32 that both sides round to tf32."""
    text, options = PRODUCT.format(t="float"), tc.TileOptions(products="tf32")
    return Benchmark(
        f"gemm_tf32_{m}", "gemm", text, floats((m, k), (n, k)), (Peer("torch, tf32", tf32_product),), tolerance=2e-3,
        flops=2 * m * n * k, kernel=partial(_call_with_options, text, options),
    )  # fmt: skip


def tf32_product(a: Tensor, b: Tensor) -> Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return a @ b.t()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def gemm_gelu(m: int, n: int, k: int) -> Benchmark:
    """A product with bias, gelu and residual, beside torch's kernels and beside our own product without these."""
    inputs = floats((m, k), (n, k), (n,), (m, n), dtype=BF16)
    plain = Peer("own product", lambda a, b, *_: _operator(PRODUCT.format(t="bfloat16"))(a, b))
    return Benchmark(
        f"gemm_gelu_{m}", "gemm", GELU, inputs, (*peers(unfused_gelu), plain), tolerance=HALF_TOLERANCE,
        flops=2 * m * n * k,
    )  # fmt: skip


def unfused_gelu(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(F.linear(a, b, bias)) + residual


def swiglu(m: int, n: int, k: int) -> Benchmark:
    return Benchmark(
        f"swiglu_{m}x{n}x{k}", "swiglu", SWIGLU, floats((m, k), (n, k), (n, k), dtype=BF16),
        peers(lambda x, w, v: F.silu(x @ w.t()) * (x @ v.t())), tolerance=2 * HALF_TOLERANCE, flops=4 * m * n * k,
    )  # fmt: skip


def half_contractions(size: str) -> Iterator[Benchmark]:
    """Every third contraction of the GETT paper, in half precision."""
    for case in contractions(size)[::3]:
        half = replace(case, dtype=F16)
        _, a, b = half.tensors
        yield Benchmark(
            f"half_{case.id}", "contraction", half.source, floats(half.shape(a), half.shape(b), dtype=F16),
            peers(partial(torch.einsum, half.equation)), tolerance=HALF_TOLERANCE, flops=half.flops,
        )  # fmt: skip


def fmha(heads: int, length: int, d: int, *, causal: bool) -> Benchmark:
    """Attention of heads over `length` tokens; causal: a token attends to itself and those before it."""
    mask, masked, zero = ("j <= i ? ", " : -inf", " : 0") if causal else ("", "", "")
    ways = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    others = (Peer(name, partial(fused_attention, backend, causal)) for name, backend in ways.items())
    return Benchmark(
        f"fmha_{heads}x{length}x{d}{'_causal' if causal else ''}", "fmha",
        ATTENTION.format(mask=mask, masked=masked, zero=zero), floats(*((heads, length, d),) * 3, dtype=BF16),
        (Peer("unfused", partial(unfused_attention, causal)), *others), tolerance=HALF_TOLERANCE,
        flops=4 * heads * length**2 * d // (2 if causal else 1),
    )  # fmt: skip


def unfused_attention(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head by head, since all scores at once may not fit the memory."""
    after = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1) if causal else None
    found = torch.empty_like(q)
    for head in range(len(q)):
        scores = q[head] @ k[head].t() * q.shape[-1] ** -0.5
        if after is not None:
            scores.masked_fill_(after, -torch.inf)
        found[head] = torch.softmax(scores, 1) @ v[head]
    return found


def fused_attention(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]


def layernorm(rows: int, d: int) -> Benchmark:
    return Benchmark(
        f"half_layernorm_{rows}x{d}", "layernorm", LAYERNORM, floats((rows, d), (d,), (d,), dtype=F16),
        peers(lambda x, g, b: F.layer_norm(x, g.shape, g, b)), tolerance=HALF_TOLERANCE,
    )  # fmt: skip


def lstm_cell(batch: int, units: int, inputs: int) -> Benchmark:
    """The tile kernel of the library: two products, four gates."""
    given = (
        *floats((batch, inputs), (batch, units), dtype=F16), Input((batch, units)),
        *(Input(shape, F16, scale=shape[-1] ** -0.5) for shape in ((4, units, inputs), (4, units, units))),
        Input((4, units)),
    )  # fmt: skip
    return Benchmark(
        f"lstm_{batch}x{units}x{inputs}", "lstm", "", given, peers(unfused_lstm), tolerance=HALF_TOLERANCE,
        flops=8 * batch * units * (inputs + units), kernel=lstm,
    )  # fmt: skip


def unfused_lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, r: Tensor, b: Tensor) -> Outputs:
    z = (x @ w.flatten(0, 1).t()).to(c.dtype) + (h @ r.flatten(0, 1).t()).to(c.dtype) + b.flatten()
    i, f, g, o = z.chunk(4, 1)
    new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return (torch.sigmoid(o) * torch.tanh(new)).to(x.dtype), new


def mlp_layers(batch: int, width: int, layers: int) -> Benchmark:
    """The tile kernel of the library: activations stay in registers. Weights keep their size."""
    given = (
        Input((batch, width), F16), Input((layers, width, width), F16, scale=(2 / width) ** 0.5),
        Input((layers, width), F16, scale=0.1),
    )  # fmt: skip
    return Benchmark(
        f"mlp_{batch}x{width}x{layers}", "mlp", "", given, peers(unfused_mlp), tolerance=2 * HALF_TOLERANCE,
        flops=2 * batch * width**2 * layers, kernel=mlp,
    )  # fmt: skip


def unfused_mlp(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    for w, b in zip(weights, biases, strict=True):
        x = F.relu(F.linear(x, w, b))
    return x


@cache
def _operator(text: str) -> Callable[..., Any]:
    return next(iter(tc.define(text)))


_KERNELS: dict[Any, Callable[..., Any]] = {}


def _call_with_options(text: str, options: tc.TileOptions, *tensors: Tensor) -> Any:
    """Call a def with options, by a kernel that is compiled once for these sizes."""
    key = (text, options, *((x.shape, x.device) for x in tensors))
    if key not in _KERNELS:
        op: Any = _operator(text)
        _KERNELS[key] = op.compile(*tensors, options=options)
    return _KERNELS[key](*tensors)
