"""Kernels for Hopper: a role loads by TMA, warpgroups multiply, barriers in memory lie between."""

from __future__ import annotations

from typing import Any

import tensor_comprehensions as tc


@tc.tile_kernel("C:[M,N].bf16 <- A:[M,K].bf16, B:[N,K].bf16")
def gemm90(
    k: Any, C: Any, A: Any, B: Any, tile: tuple[int, int, int] = (128, 256, 64), depth: int = 4, group: int = 8
) -> None:
    """`C = A @ B.T`: persistent blocks; a warpgroup loads, two multiply; sums in float32, rounded once."""
    bm, bn, bk = tile
    load, math = k.threads(384).tile(128).split(1, 2)  # [1].[128].thread, [2].[128].thread
    sA, sB = k.shared("sA", (depth, bm, bk), A.dtype), k.shared("sB", (depth, bn, bk), B.dtype)
    full, empty = k.barriers("full", depth, 1), k.barriers("empty", depth, 2)
    for m, n in k.each(C.tile(bm, bn), persistent=True, group=group):
        a, b = A.tile(bm, bk)[m], B.tile(bn, bk)[n]
        with k.role(load, registers=40), k.one():
            for i in k.steps(a.count, depth):
                k.wait(empty[i.stage], i.phase ^ 1)
                k.expect(full[i.stage], sA[i.stage], sB[i.stage])
                k.move(sA[i.stage], a[i], done=full[i.stage])
                k.move(sB[i.stage], b[i], done=full[i.stage])
        with k.role(math, registers=232):
            acc = k.init(k.accumulator("acc", (bm, bn), A, B, by=math), 0)  # 64 rows a warpgroup
            for i in k.steps(a.count, depth):
                k.wait(full[i.stage], i.phase)
                k.matmul(acc, sA[i.stage], sB[i.stage], by=math)
                k.release(empty, i, after=1)
            k.move(C.tile(bm, bn)[m, n], acc)
