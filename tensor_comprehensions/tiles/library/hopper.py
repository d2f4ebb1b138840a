"""Warp-specialized kernels for Hopper: one role loads by TMA, warpgroups multiply, and barriers synchronize them."""

from __future__ import annotations

from typing import Any

import tensor_comprehensions as tc
from tensor_comprehensions import tiles as t

LOG2_E = 1.4426950408889634


@tc.tile_kernel("C:[M,N].bf16 <- A:[M,K].bf16, B:[N,K].bf16")
def gemm90(
    k: Any, C: Any, A: Any, B: Any, tile: tuple[int, int, int] = (128, 256, 64), depth: int = 4, group: int = 8,
    cluster: int = 1,
) -> None:  # fmt: skip
    """`C = A @ B.T` with persistent blocks: one warpgroup loads, two multiply; float32 sums are rounded once.

    cluster: the number of blocks, in neighboring rows, that share each load of a tile of B.
    """
    bm, bn, bk = tile
    load, math = k.threads(384).tile(128).split(1, 2)  # [1].[128].thread, [2].[128].thread
    sA, sB = k.shared("sA", (depth, bm, bk), A.dtype), k.shared("sB", (depth, bn, bk), B.dtype)
    k.clusters(cluster)
    full, empty = k.barriers("full", depth, 1), k.barriers("empty", depth, 2, everywhere=cluster > 1)
    for m, n in k.each(C.tile(bm, bn), persistent=True, group=group):
        a, b = A.tile(bm, bk)[m], B.tile(bn, bk)[n]
        with k.role(load, registers=40), k.one():
            for i in k.steps(a.count, depth):
                k.wait(empty[i.stage], i.phase ^ 1)
                k.expect(full[i.stage], sA[i.stage], sB[i.stage])
                k.move(sA[i.stage], a[i], done=full[i.stage])
                k.move(sB[i.stage], b[i], done=full[i.stage], multicast=cluster > 1)
        with k.role(math, registers=232):
            acc = k.init(k.accumulator("acc", (bm, bn), A, B, by=math), 0)  # 64 rows a warpgroup
            for i in k.steps(a.count, depth):
                k.wait(full[i.stage], i.phase)
                k.matmul(acc, sA[i.stage], sB[i.stage], by=math)
                k.release(empty, i, after=1)
            k.move(C.tile(bm, bn)[m, n], acc)


@tc.tile_kernel("O:[Z,I,D].bf16 <- Q:[Z,I,D].bf16, K:[Z,J,D].bf16, V:[Z,J,D].bf16")
def fmha(
    k: Any, O: Any,  # noqa: E741
    Q: Any, K: Any, V: Any, scale: float = 1.0, rows: int = 128, columns: int = 128, depth: int = 2,
    causal: bool = False,
) -> None:  # fmt: skip
    """`softmax(scale * Q @ K.T) @ V` with an online softmax, scores in registers; causal: column j <= row i only."""
    (z, i), D, c = k.blocks(Q.tile(1, rows, None)), Q.shape[2], scale * LOG2_E
    load, math = k.threads(128 + 2 * rows).tile(128).split(1, rows // 64)
    sQ = k.shared("sQ", (rows, D), t.bf16)
    sK, sV = (k.shared(n, (depth, columns, D), t.bf16) for n in ("sK", "sV"))
    o = k.init(k.accumulator("o", (rows, D), Q, V, by=math), 0)
    top, total = k.init(o.row("top"), -t.inf), k.init(o.row("total"), 0)  # one value a row
    keys, tiles, J = K[z].tile(columns, None), V[z].tile(columns, None), K.shape[1]
    first_row, steps = i * rows, keys.count

    def fill(s: Any, j: Any) -> None:
        k.move(sK[s], keys[j])
        k.move(sV[s], tiles[j])

    def use(s: Any, j: Any) -> None:
        x = k.matmul(k.accumulator("x", (rows, columns), Q, K, by=math), sQ, sK[s], first=True)
        n, m = x.positions(1, j * columns), x.positions(0, first_row)
        if J % columns:
            with k.when((j + 1) * columns > J):
                k.map(lambda x, n: t.where(n < J, x, -t.inf), x, n, out=x)
        if causal:
            with k.when((j + 1) * columns > first_row + 1):
                k.map(lambda x, n, m: t.where(n <= m, x, -t.inf), x, n, m, out=x)
        new = k.map(t.max, top, k.reduce("max", x, axis=1))  # values, then 4 lanes
        fade = k.map(lambda a, b: t.exp2((a - b) * c), top, new)
        p = k.map(lambda x, m: t.exp2((x - m) * c), x, new)
        k.map(lambda t, f, r: t * f + r, total, fade, k.reduce("+", p, axis=1), out=total)
        k.map(lambda o, f: o * f, o, fade, out=o)
        k.move(top, new)
        k.matmul(o, k.map(lambda p: p, p, dtype=t.bf16), sV[s].T, by=math)  # left factor from registers

    if causal:
        steps = ((first_row + rows + columns - 1) // columns).at_most(steps)
    k.ring(steps, depth, fill, use, load=load, first=lambda: k.move(sQ, Q[z].tile(rows, None)[i]))
    k.move(O[z].tile(rows, None)[i], k.map(lambda o, s: o / s, o, total))
