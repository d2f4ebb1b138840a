"""Kernels that normalize rows."""

from __future__ import annotations

from typing import Any

import tensor_comprehensions as tc
from tensor_comprehensions import tiles as t


@tc.tile_kernel("Y:[N,D].fp16 <- X:[N,D].fp16, g:[D].fp16, b:[D].fp16")
def layernorm(k: Any, Y: Any, X: Any, g: Any, b: Any, warps: int = 4, eps: float = 1e-5) -> None:
    """Normalize rows to mean 0 and variance 1, then scale by `g` and add `b`; each warp holds a row in registers."""
    warp, D = k.threads(32 * warps).tile(32), X.shape[1]
    (i,), (w,) = k.blocks(X.tile(warps, None)), warp.indices()
    x, y = (T.tile(warps, None)[i].tile(1, None)[w] for T in (X, Y))
    v = k.move(k.registers("v", x.shape, t.fp32, by=warp, vector=8), x)  # 16 bytes a lane, round and round
    d = k.map(lambda v, s: v - s / D, v, k.reduce("+", v, axis=1))  # in the thread, then shfl.bfly
    r = k.map(lambda s: t.rsqrt(s / D + eps), k.reduce("+", k.map(lambda d: d * d, d), axis=1))
    k.move(y, k.map(lambda d, r, g, b: d * r * g + b, d, r, g, b))
