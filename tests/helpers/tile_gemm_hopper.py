"""A product on Hopper's tensor cores, written out statement by statement: TMA, a ring of barriers, roles, wgmma."""

from __future__ import annotations

from dataclasses import dataclass

from tensor_comprehensions.core.dtypes import BFLOAT16, BOOL, FLOAT32, UINT32, UINT64, DType
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.instructions import BROADCAST_WARP

TX, BX, BY = b.var(ir.THREAD[0]), b.var(ir.BLOCK[0]), b.var(ir.BLOCK[1])
NONE = b.const(0)
GROUP = 128
SWIZZLE = (3, 3, 3)


def call(name: str, *operands: tuple[ir.Buffer, tuple[ir.Expr | int, ...]], **more: tuple[object, ...]) -> ir.Invoke:
    views = tuple((x, tuple(b.const(i) if isinstance(i, int) else i for i in where)) for x, where in operands)
    return ir.Invoke(name, views, **more)  # type: ignore[arg-type]


def make_shared_buffer(name: str, dtype: DType, *shape: int) -> ir.Buffer:
    return b.buffer(name, dtype, shape, ir.Space.SHARED)


def swizzle_buffer(x: ir.Buffer, swizzle: tuple[int, int, int] = SWIZZLE) -> ir.Buffer:
    return ir.Buffer(x.name, x.type, x.shape, x.strides, x.space, swizzle=swizzle)


@dataclass(frozen=True)
class Gemm90:
    """Sizes and pieces of `C = A @ B.T`: a role loads, two warpgroups multiply 64 rows each."""

    m: int
    n: int
    k: int
    bn: int = 64
    depth: int = 4
    dtype: DType = BFLOAT16
    bm: int = 128
    bk: int = 64

    @property
    def steps(self) -> int:
        return -(-self.k // self.bk)

    def module(self) -> ir.Module:
        a, w = b.buffer("A", self.dtype, (self.m, self.k)), b.buffer("B", self.dtype, (self.n, self.k))
        out = b.buffer("C", self.dtype, (self.m, self.n))
        maps = (
            ir.TensorMap("A", a, (self.bm, self.bk), 128),
            ir.TensorMap("B", w, (self.bn, self.bk), 128),
        )
        grid = (-(-self.n // self.bn), -(-self.m // self.bm), 1)
        kernel = ir.Kernel("gemm90", self.body(a, w, out), ir.Launch(grid, (3 * GROUP, 1, 1)), maps=maps)
        return ir.Module("gemm90", (a, w, out), (), (kernel,), (), ("C",))

    def body(self, a: ir.Buffer, w: ir.Buffer, out: ir.Buffer) -> ir.Stmt:
        tiles = (
            swizzle_buffer(make_shared_buffer("sA", self.dtype, self.depth, self.bm, self.bk)),
            swizzle_buffer(make_shared_buffer("sB", self.dtype, self.depth, self.bn, self.bk)),
        )
        full, empty = (b.buffer(x, UINT64, (self.depth,), ir.Space.BARRIER) for x in ("full", "empty"))
        role = b.var("role")
        inits = [
            call("barrier_init", (bar, (s,)), attributes=(count,))
            for bar, count in ((full, 1), (empty, 2))
            for s in range(self.depth)
        ]
        whole = b.block(
            ir.If(b.eq(TX, 0), b.block(*inits, call("fence_barrier_init"))),
            call("barrier"),
            ir.If(
                b.eq(role, 0),
                self.load(a, w, tiles, full, empty),
                self.multiply(out, tiles, full, empty),
            ),
        )  # fmt: skip
        roles = ir.Call(BROADCAST_WARP, (b.div(TX, GROUP),))
        return ir.Let("role", roles, b.allocate([*tiles, full, empty], whole))

    def load(
        self, a: ir.Buffer, w: ir.Buffer, tiles: tuple[ir.Buffer, ...], full: ir.Buffer, empty: ir.Buffer
    ) -> ir.Stmt:
        chosen, i = b.register("chosen", UINT32), b.var("i")
        stage, phase = b.mod(i, self.depth), b.mod(b.div(i, self.depth), 2)
        size = sum(x.strides[0] * x.type.dtype.size for x in tiles)
        column = b.mul(i, self.bk)
        copies = [
            call(
                "tma_load_2",
                (x, (stage, 0, 0)),
                (source, (b.mul(block, rows), column)),
                (full, (stage,)),
                attributes=(n,),
            )
            for n, (x, source, block, rows) in enumerate(zip(tiles, (a, w), (BY, BX), (self.bm, self.bn), strict=True))
        ]  # fmt: skip
        step = b.block(
            call("barrier_wait", (empty, (stage,)), values=(b.sub(1, phase),)),
            call("barrier_expect", (full, (stage,)), attributes=(size,)),
            *copies,
        )
        one = ir.If(b.ne(b.load(chosen), b.const(1 - 1, UINT32)), ir.Loop("i", NONE, b.const(self.steps), step))
        first = ir.If(b.lt(TX, 32), b.block(call("elect", (chosen, ())), one))
        return b.block(call("registers_dec", attributes=(40,)), b.allocate([chosen], first))

    def multiply(self, out: ir.Buffer, tiles: tuple[ir.Buffer, ...], full: ir.Buffer, empty: ir.Buffer) -> ir.Stmt:
        acc = b.buffer("acc", FLOAT32, (self.bn // 2,), ir.Space.REGISTER)
        j, group = b.var("j"), b.sub(b.var("role"), 1)
        stage, phase = b.mod(j, self.depth), b.mod(b.div(j, self.depth), 2)
        kind = "bf16" if self.dtype == BFLOAT16 else "f16"
        products = [
            call(
                f"wgmma_m64n{self.bn}k16_f32_{kind}", (acc, (0,)),
                (tiles[0], (stage, b.mul(group, 64), 16 * kk)), (tiles[1], (stage, 0, 16 * kk)),
                values=(b.logical_or(b.ne(j, 0), b.const(kk > 0, BOOL)),),
            )
            for kk in range(self.bk // 16)
        ]  # fmt: skip
        before = b.mod(b.sub(j, 1), self.depth)
        release = call("barrier_arrive", (empty, (before,)))
        step = b.block(
            call("barrier_wait", (full, (stage,)), values=(phase,)),
            call("wgmma_fence"),
            *products,
            call("wgmma_commit"),
            call("wgmma_wait", attributes=(1,)),
            ir.If(b.logical_and(b.eq(b.mod(TX, GROUP), 0), b.gt(j, 0)), release),
        )
        return b.block(
            call("registers_inc", attributes=(232,)),
            b.allocate(
                [acc],
                b.block(
                    ir.Loop("j", NONE, b.const(self.steps), step),
                    call("wgmma_wait", attributes=(0,)),
                    self.store(out, acc),
                ),
            ),
        )

    def store(self, out: ir.Buffer, acc: ir.Buffer) -> ir.Stmt:
        """Each thread's own sums, where they are in the tensor."""
        thread = b.mod(TX, GROUP)
        parts = []
        for half in range(2):
            row = b.add(
                b.add(b.mul(BY, self.bm), b.mul(b.sub(b.var("role"), 1), 64)),
                b.add(b.add(b.mul(b.div(thread, 32), 16), b.div(b.mod(thread, 32), 4)), 8 * half),
            )
            stores = []
            for v in range(self.bn // 8):
                for x in range(2):
                    column = b.add(b.mul(BX, self.bn), b.add(b.mul(b.mod(thread, 4), 2), 8 * v + x))
                    value = b.cast(b.load(acc, 4 * v + 2 * half + x), self.dtype)
                    s = b.store(out, (row, column), value)
                    stores.append(s if self.n % self.bn == 0 else ir.If(b.lt(column, self.n), s))
            part = b.block(*stores)
            parts.append(part if self.m % self.bm == 0 else ir.If(b.lt(row, self.m), part))
        return b.block(*parts)
