"""A product of halves on tensor cores, written out statement by statement: what a lowering of tiles shall make."""

from __future__ import annotations

from tensor_comprehensions.core.dtypes import FLOAT32, UINT32, DType
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir

TX, BX, BY = b.var(ir.THREAD[0]), b.var(ir.BLOCK[0]), b.var(ir.BLOCK[1])
TILE, DEPTH, THREADS = 64, 2, 128
SWIZZLES = {16: (1, 3, 3), 32: (2, 3, 3), 64: (3, 3, 3)}
NONE = b.const(0)


def gemm(dtype: DType, m: int = 64, n: int = 64, k: int = 64, bk: int = 32, *, swizzled: bool = True) -> ir.Module:
    """`C = A @ B.T`: 4 warps in a block, 32 x 32 each; cp.async in a ring of two stages, ldmatrix.x4, mma.m16n8k16."""
    a, w = b.buffer("A", dtype, (m, k)), b.buffer("B", dtype, (n, k))
    out = b.buffer("C", dtype, (m, n))
    shared = [
        ir.Buffer(
            name, ir.Type(dtype), (DEPTH, TILE, bk), (TILE * bk, bk, 1), ir.Space.SHARED,
            swizzle=SWIZZLES[bk] if swizzled else None,
        )
        for name in ("sA", "sB")
    ]  # fmt: skip
    acc = b.buffer("acc", FLOAT32, (2, 4, 4), ir.Space.REGISTER)
    left, right = (b.buffer(x, UINT32, (2, 4), ir.Space.REGISTER) for x in ("left", "right"))
    steps, t = k // bk, b.var("t")

    def fill(stage: ir.Expr, step: ir.Expr) -> ir.Stmt:
        parts = []
        for to, source, tile in ((shared[0], a, BY), (shared[1], w, BX)):
            for u in range(TILE * bk // 8 // THREADS):
                chunk = b.add(TX, u * THREADS)
                row, column = b.div(chunk, bk // 8), b.mul(b.mod(chunk, bk // 8), 8)
                place = (b.add(b.mul(tile, TILE), row), b.add(b.mul(step, bk), column))
                parts.append(ir.Invoke("copy_async", ((to, (stage, row, column)), (source, place)), (16,)))
        return b.block(*parts)

    commit = ir.Invoke("commit_async", ())
    first = b.block(*(b.block(fill(b.const(s), b.const(s)), commit) for s in range(DEPTH)))
    ahead = b.add(t, DEPTH)
    body = b.block(
        ir.Invoke("wait_async", (), (DEPTH - 1,)),
        ir.Invoke("barrier", ()),
        *(multiply(shared, acc, left, right, b.mod(t, DEPTH), kk) for kk in range(bk // 16)),
        ir.Invoke("barrier", ()),
        ir.If(b.lt(ahead, steps), fill(b.mod(ahead, DEPTH), ahead)),
        commit,
    )
    every = [(i, j, v) for i in range(2) for j in range(4) for v in range(4)]
    whole = b.block(
        *(b.store(acc, tuple(map(b.const, x)), b.const(0.0, FLOAT32)) for x in every),
        first,
        ir.Loop("t", NONE, b.const(steps), body),
        *(b.store(out, place_of(*x), b.cast(b.load(acc, *x), dtype)) for x in every),
    )
    lets = ir.Let("warp", b.div(TX, 32), ir.Let("lane", b.mod(TX, 32), b.allocate([*shared, acc, left, right], whole)))
    kernel = ir.Kernel("gemm", lets, ir.Launch((n // TILE, m // TILE, 1), (THREADS, 1, 1)))
    return ir.Module("gemm", (a, w, out), (), (kernel,), (), ("C",))


def place_of(i: int, j: int, v: int) -> tuple[ir.Expr, ir.Expr]:
    """The element of C that a lane's v-th sum of the tile (i, j) of its warp is."""
    warp, lane = b.var("warp"), b.var("lane")
    row = b.add(b.add(b.mul(BY, TILE), b.mul(b.div(warp, 2), 32)), b.add(b.div(lane, 4), 16 * i + 8 * (v // 2)))
    column = b.add(b.add(b.mul(BX, TILE), b.mul(b.mod(warp, 2), 32)), b.mul(b.mod(lane, 4), 2))
    return row, b.add(column, 8 * j + v % 2)


def multiply(
    shared: list[ir.Buffer], acc: ir.Buffer, left: ir.Buffer, right: ir.Buffer, stage: ir.Expr, step: int
) -> ir.Stmt:
    """16 columns of both tiles: 2 x 4 products of a warp."""
    warp, lane = b.var("warp"), b.var("lane")
    parts: list[ir.Stmt] = []
    for i in range(2):
        row = b.add(b.add(b.mul(b.div(warp, 2), 32), 16 * i), b.mod(lane, 16))
        column = b.add(b.mul(b.div(lane, 16), 8), 16 * step)
        views = ((left, (b.const(i), NONE)), (shared[0], (stage, row, column)))
        parts.append(ir.Invoke("ldmatrix_x4", views))
    for j in range(2):
        row = b.add(b.add(b.mul(b.mod(warp, 2), 32), 16 * j), b.add(b.mul(b.div(lane, 16), 8), b.mod(lane, 8)))
        column = b.add(b.mul(b.mod(b.div(lane, 8), 2), 8), 16 * step)
        views = ((right, (b.const(j), NONE)), (shared[1], (stage, row, column)))
        parts.append(ir.Invoke("ldmatrix_x4", views))
    name = f"mma_m16n8k16_f32_{'f16' if shared[0].type.dtype.name == 'float16' else 'bf16'}"
    for i in range(2):
        for j in range(4):
            views = (
                (acc, (b.const(i), b.const(j), NONE)),
                (left, (b.const(i), NONE)),
                (right, (b.const(j // 2), b.const(j % 2 * 2))),
            )
            parts.append(ir.Invoke(name, views))
    return b.block(*parts)
