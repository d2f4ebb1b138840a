"""Matrix products on tensor cores."""

from __future__ import annotations

from typing import Any

import tensor_comprehensions as tc


@tc.tile_kernel("C:[M,N].fp16 <- A:[M,K].fp16, B:[N,K].fp16")
def gemm80(
    k: Any, C: Any, A: Any, B: Any, tile: tuple[int, int, int] = (128, 128, 32), warps: tuple[int, int] = (2, 2),
    depth: int = 3,
) -> None:  # fmt: skip
    """`C = A @ B.T` by pipelined asynchronous copies, `ldmatrix` and `mma`; float32 sums are rounded once."""
    bm, bn, bk = tile
    m, n = k.blocks(C.tile(bm, bn), group=8)
    warp = k.threads(32 * warps[0] * warps[1]).tile(32).reshape(0, warps)  # [2,2].[32].thread
    sA, sB = k.shared("sA", (depth, bm, bk), A.dtype), k.shared("sB", (depth, bn, bk), B.dtype)
    a, b = A.tile(bm, bk)[m], B.tile(bn, bk)[n]
    acc = k.init(k.accumulator("acc", (bm, bn), A, B, by=warp), 0)

    def fill(s: Any, i: Any) -> None:
        k.move(sA[s], a[i])
        k.move(sB[s], b[i])

    k.ring(a.count, depth, fill, lambda s, i: k.matmul(acc, sA[s], sB[s], by=warp))
    k.move(C.tile(bm, bn)[m, n], acc)
