"""Matrix products: squares of every size, those of the structured-code-generation paper, small ones in batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import sources as tc
from ..kernels import Benchmark, Peer, floats
from .convolutions import SIZES

SQUARE = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
ODD = (17, 33, 65, 100, 129, 255, 500, 777, 1000, 1023)
BATCHES = (
    (500, 26, 26, 72), (1000, 8, 8, 8), (512, 16, 16, 16), (128, 32, 32, 32), (96, 128, 128, 64), (64, 64, 64, 64),
    (32, 196, 196, 48), (256, 12, 64, 64), (2000, 4, 4, 4),
)  # fmt: skip
BATCHED = "def product(float(B,M,K) x, float(B,K,N) y) -> (z) { z(b,m,n) +=! x(b,m,k) * y(b,k,n) }"
FIRST_TURNED = "def product(float(K,M) x, float(K,N) y) -> (z) { z(m,n) +=! x(k,m) * y(k,n) }"
NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the narrow types: of one rounding of the result, and a little more."""
NARROW = """def product({0}(M,K) x, {0}(K,N) y) -> (z) {{ z(m,n) +=! x(m,k) * y(k,n) }}"""
NARROW_SIZES = (64, 129, 256, 512, 1024)
GELU = """def layer(float(M,K) x, float(N,K) w, float(N) b) -> (y) {
    h(m,n) +=! x(m,k) * w(n,k)
    y(m,n) = 0.5 * (h(m,n) + b(n)) * (1 + erf((h(m,n) + b(n)) * 0.7071067811865475))
}"""
LAYERS = ((64, 768, 768), (128, 1024, 256), (512, 512, 512), (256, 3072, 768), (1000, 300, 500))


def products() -> Iterator[Benchmark]:
    for dtype, source in ((torch.float32, tc.MATMUL), (torch.float64, tc.MATMUL_F64)):
        peers = (Peer("torch", torch.mm),)
        tag = NAMES[dtype]
        for family, squares in (("gemm", SQUARE), ("gemm_odd", ODD)):
            for n in squares:
                yield _product(f"{family}_{tag}", f"{family}_{tag}_{n}", source, peers, (n, n, n), dtype)
    for m, n, k in SIZES["matmul"]:
        sizes = f"{m}x{n}x{k}"
        yield _product("gemm_ab", f"gemm_ab_{sizes}", tc.MATMUL, (Peer("torch", torch.mm),), (m, n, k))
        first = (Peer("torch", lambda x, y: x.t() @ y),)
        yield _product("gemm_atb", f"gemm_atb_{sizes}", FIRST_TURNED, first, (m, n, k), turned=(True, False))
        second = (Peer("torch", lambda x, y: x @ y.t()),)
        yield _product("gemm_abt", f"gemm_abt_{sizes}", tc.TMM, second, (m, n, k), turned=(False, True))
    yield from _narrow()
    yield from _list_fused()
    for b, m, n, k in BATCHES:
        peers = (Peer("torch", torch.bmm, compiled=True),)
        yield _product("gemm_batched", f"gemm_batched_{b}_{m}x{n}x{k}", BATCHED, peers, (m, n, k), batch=b)


def _narrow() -> Iterator[Benchmark]:
    """bfloat16 and float16, summed in float32."""

    def widened(x: Tensor, y: Tensor) -> Tensor:
        return (x.float() @ y.float()).to(x.dtype)

    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        tag = NAMES[dtype]
        for n in NARROW_SIZES:
            # torch's own product of float16 takes seconds without the instructions for it
            peers = (Peer("widened", widened),) if dtype == torch.float16 else (Peer("torch", torch.mm),)
            yield _product(f"gemm_{tag}", f"gemm_{tag}_{n}", NARROW.format(name), peers, (n, n, n), dtype)


def _list_fused() -> Iterator[Benchmark]:
    """A product, a bias and gelu."""

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    for m, n, k in LAYERS:
        yield Benchmark(
            f"linear_gelu_{m}x{n}x{k}", "linear_gelu", GELU, floats((m, k), (n, k), (n,)),
            (Peer("torch", layer, compiled=True),),
            goal=1.15, flops=2 * m * n * k, operands=4 * (m * k + k * n + m * n),
        )  # fmt: skip


def _product(
    family: str, name: str, source: str, peers: tuple[Peer, ...], sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.float32, turned: tuple[bool, bool] = (False, False), batch: int | None = None,
) -> Benchmark:  # fmt: skip
    m, n, k = sizes
    left, right = (k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)
    lead = () if batch is None else (batch,)
    count = batch or 1
    return Benchmark(
        name, family, source, floats((*lead, *left), (*lead, *right), dtype=dtype), peers,
        goal=1.0, tolerance=TOLERANCES[dtype], flops=2 * count * m * n * k,
        operands=dtype.itemsize * count * (m * k + k * n + m * n),
    )  # fmt: skip
