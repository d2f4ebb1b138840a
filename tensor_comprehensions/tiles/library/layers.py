"""Network layers: an MLP as a chain of products in registers, and an LSTM cell."""

from __future__ import annotations

from typing import Any

import tensor_comprehensions as tc
from tensor_comprehensions import tiles as t


@tc.tile_kernel("Y:[B,W].fp16 <- X:[B,W].fp16, Ws:[L,W,W].fp16, bs:[L,W].fp16")
def mlp(k: Any, Y: Any, X: Any, Ws: Any, bs: Any, rows: int = 128, bk: int = 64, depth: int = 3) -> None:
    """An MLP, `relu(x @ W.T + b)` for each layer; activations between layers stay in registers."""
    (i,), warp, W = k.blocks(X.tile(rows, None)), k.threads(rows * 2).tile(32), X.shape[1]  # 16 rows a warp
    h = k.move(k.fragment("h", (rows, W), t.fp16, "A", by=warp), X.tile(rows, None)[i])
    sW = k.shared("sW", (depth, W, bk), t.fp16)
    for layer in k.loop(Ws.shape[0]):
        acc, w = k.init(k.accumulator("acc", (rows, W), X, Ws, by=warp), 0), Ws[layer].tile(None, bk)

        def fill(s: Any, j: Any, w: Any = w) -> None:
            k.move(sW[s], w[j])

        def use(s: Any, j: Any, acc: Any = acc) -> None:
            k.matmul(acc, h.tile(None, bk)[j], sW[s], by=warp)

        k.ring(w.count, depth, fill, use)
        k.map(lambda a, b: t.max(a + b, 0), acc, bs[layer], out=h)  # the sums are laid out as the next left factor
    k.move(Y.tile(rows, None)[i], h)


@tc.tile_kernel(
    "H:[B,U].fp16, C:[B,U].fp32 <- "
    "x:[B,I].fp16, h:[B,U].fp16, c:[B,U].fp32, W:[4,U,I].fp16, R:[4,U,U].fp16, b:[4,U].fp32"
)
def lstm(
    k: Any, H: Any, C: Any, x: Any, h: Any, c: Any, W: Any, R: Any, b: Any,
    tile: tuple[int, int, int] = (128, 32, 32), depth: int = 3,
) -> None:  # fmt: skip
    """The next hidden state and cell of an LSTM: all gates in one accumulator, whose threads hold all four gates."""
    bm, bn, bk = tile
    (m, n), warp, s = k.blocks(H.tile(bm, bn)), k.threads(128).tile(32), t.sigmoid
    sx, sw = k.shared("sx", (depth, bm, bk), t.fp16), k.shared("sw", (depth, (4, bn), bk), t.fp16)
    acc = k.init(k.accumulator("acc", (bm, (4, bn)), x, W, by=warp), 0)
    for left, right in ((x, W), (h, R)):  # two products, one sum
        p, q = left.tile(bm, bk)[m], right.join(0, 1).tile(4 * bn, bk)[n]

        def fill(stage: Any, j: Any, p: Any = p, q: Any = q) -> None:
            k.move(sx[stage], p[j])
            k.move(sw[stage], q[j])

        k.ring(p.count, depth, fill, lambda stage, j: k.matmul(acc, sx[stage], sw[stage], by=warp))
    z = k.map(lambda a, b: a + b, acc, b.join(0, 1).tile(4 * bn)[n])
    i, f, g, o = (z[:, (gate, None)] for gate in range(4))
    new = k.map(lambda i, f, g, c: s(f) * c + s(i) * t.tanh(g), i, f, g, c.tile(bm, bn)[m, n])
    k.move(C.tile(bm, bn)[m, n], new)
    k.move(H.tile(bm, bn)[m, n], k.map(lambda o, c: s(o) * t.tanh(c), o, new))
