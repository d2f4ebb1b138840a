"""Matrix products: squares of every size, those of the structured-code-generation paper, small ones in batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch

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
NAMES = {torch.float32: "f32", torch.float64: "f64"}


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
    for b, m, n, k in BATCHES:
        peers = (Peer("torch", torch.bmm, compiled=True),)
        yield _product("gemm_batched", f"gemm_batched_{b}_{m}x{n}x{k}", BATCHED, peers, (m, n, k), batch=b)


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
        goal=1.0, tolerance=1e-4 if dtype == torch.float32 else 1e-12, flops=2 * count * m * n * k,
        operands=dtype.itemsize * count * (m * k + k * n + m * n),
    )  # fmt: skip
