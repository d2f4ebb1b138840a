"""Kernels with launches, written by hand, for every test that runs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32, INT64, DType
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir

SHARED, REGISTER = ir.Space.SHARED, ir.Space.REGISTER
BX, BY, _BZ = (b.var(n) for n in ir.BLOCK)
TX, TY, _TZ = (b.var(n) for n in ir.THREAD)
BARRIER = ir.Invoke("barrier", ())


@dataclass(frozen=True)
class Program:
    """A module, what goes into it and what must come out."""

    module: ir.Module
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def loop(var: str, stop: b.Operand, body: ir.Stmt, kind: ir.LoopKind = ir.LoopKind.SERIAL, step: int = 1) -> ir.Loop:
    last = b.const(stop) if isinstance(stop, int) else stop
    return ir.Loop(var, b.const(0), last, body, kind, step)


def kernel(name: str, body: ir.Stmt, grid: tuple[int, int, int], block: tuple[int, int, int]) -> ir.Kernel:
    return ir.Kernel(name, body, ir.Launch(grid, block))


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Small whole numbers, which any order of a sum adds to the same."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def identity_matmul() -> Program:
    """Three loops in one thread."""
    a, w, out = (b.buffer(n, FLOAT32, s) for n, s in (("A", (6, 5)), ("B", (5, 7)), ("C", (6, 7))))
    i, j, k = (b.var(n) for n in "ijk")
    update = b.store(out, (i, j), b.mul(b.load(a, i, k), b.load(w, k, j)), op="+")
    body = loop("i", 6, loop("j", 7, b.block(b.store(out, (i, j), 0.0), loop("k", 5, update))))
    module = ir.Module("matmul", (a, w, out), (), (ir.Kernel("matmul", body),), (), ("C",))
    x, y = numbers(6, 5), numbers(5, 7, seed=1)
    return Program(module, {"A": x, "B": y}, {"C": x @ y})


def tiled_matmul(n: int = 40, tile: int = 16, *, wide: bool = False) -> Program:
    """Tiles of both factors in shared memory, with edges; 4 outputs to a thread in registers."""
    rows = tile // 4
    a, w, out = (b.buffer(name, FLOAT32, (n, n)) for name in "ABC")
    pad = 4 if wide else 1
    sa, sb = (ir.Buffer(f"{x}_shared", ir.Type(FLOAT32), (tile, tile), (tile + pad, 1), SHARED) for x in "AB")
    acc = b.buffer("acc", FLOAT32, (4,), REGISTER)
    k0, k, u = b.var("k0"), b.var("k"), b.var("u")
    row, column = b.add(b.mul(BY, tile), b.add(TY, b.mul(u, rows))), b.add(b.mul(BX, tile), TX)

    def copied(target: ir.Buffer, source: ir.Buffer, first: ir.Expr, second: ir.Expr) -> ir.Stmt:
        line = b.add(TY, b.mul(u, rows))
        at = (b.add(first, line), b.add(second, TX))
        inside = b.logical_and(b.lt(at[0], n), b.lt(at[1], n))
        return loop("u", 4, b.store(target, (line, TX), b.load(source, *at, mask=inside)), ir.LoopKind.UNROLLED)

    product = b.mul(b.load(sa, b.add(TY, b.mul(u, rows)), k), b.load(sb, k, TX))
    compute = loop("k", tile, loop("u", 4, b.store(acc, (u,), product, op="+"), ir.LoopKind.UNROLLED))
    copies = (copied(sa, a, b.mul(BY, tile), k0), copied(sb, w, k0, b.mul(BX, tile)))
    steps = loop("k0", n, b.block(*copies, BARRIER, compute, BARRIER), step=tile)
    write = ir.If(b.logical_and(b.lt(row, n), b.lt(column, n)), b.store(out, (row, column), b.load(acc, u)))
    body = b.block(
        loop("u", 4, b.store(acc, (u,), 0.0), ir.LoopKind.UNROLLED), steps, loop("u", 4, write, ir.LoopKind.UNROLLED)
    )
    body = ir.Allocate((acc,), ir.Allocate((sa,), ir.Allocate((sb,), body)))
    blocks = -(-n // tile)
    module = ir.Module(
        "matmul", (a, w, out), (), (kernel("matmul", body, (blocks, blocks, 1), (tile, rows, 1)),), (), ("C",)
    )
    x, y = numbers(n, n), numbers(n, n, seed=1)
    return Program(module, {"A": x, "B": y}, {"C": x @ y})


def row_sums(rows: int = 5, columns: int = 70) -> Program:
    """A block of two warps to a row: shuffles in each warp, one shared array between them."""
    x, out = b.buffer("x", FLOAT32, (rows, columns)), b.buffer("total", FLOAT32, (rows,))
    acc, other = (b.buffer(n, FLOAT32, (), REGISTER) for n in ("acc", "other"))
    parts = b.buffer("parts", FLOAT32, (2,), SHARED)
    c = b.var("c")
    add = b.store(acc, (), b.load(other), op="+")
    shuffles = [
        b.block(ir.Invoke("shuffle_xor", ((other, ()), (acc, ())), (offset, 32)), add) for offset in (16, 8, 4, 2, 1)
    ]
    first = ir.If(b.eq(b.mod(TX, 32), 0), b.store(parts, (b.div(TX, 32),), b.load(acc)))
    last = ir.If(b.eq(TX, 0), b.store(out, (BX,), b.add(b.load(parts, 0), b.load(parts, 1))))
    body = b.block(
        b.store(acc, (), 0.0),
        ir.Loop("c", TX, b.const(columns), b.store(acc, (), b.load(x, BX, c), op="+"), step=64),
        *shuffles,
        first,
        BARRIER,
        last,
    )
    body = ir.Allocate((acc,), ir.Allocate((other,), ir.Allocate((parts,), body)))
    module = ir.Module("sums", (x, out), (), (kernel("sums", body, (rows, 1, 1), (64, 1, 1)),), (), ("total",))
    values = numbers(rows, columns)
    return Program(module, {"x": values}, {"total": values.sum(1)})


def staged_copy(dtype: DType = FLOAT32, lanes: int = 4, threads: int = 8, *, wait: int = 0) -> Program:
    """Each thread copies a vector past the registers, waits, meets the others and writes what its neighbor copied."""
    n = lanes * threads
    x, out = b.buffer("x", dtype, (n,)), b.buffer("out", dtype, (n,))
    stage = b.buffer("stage", dtype, (n,), SHARED)
    place = b.mul(TX, lanes)
    copy = ir.Invoke("copy_async", ((stage, (place,)), (x, (place,))), (lanes * dtype.size,))
    mirrored = b.sub(n - lanes, place)
    write = ir.Store(out, (b.ramp(place, 1, lanes),), ir.Load(stage, (b.ramp(mirrored, 1, lanes),)))
    body = b.block(copy, ir.Invoke("commit_async", ()), ir.Invoke("wait_async", (), (wait,)), BARRIER, write)
    body = ir.Allocate((stage,), body)
    module = ir.Module("stage", (x, out), (), (kernel("stage", body, (1, 1, 1), (threads, 1, 1)),), (), ("out",))
    values = np.arange(n).astype(dtype.name)
    return Program(module, {"x": values}, {"out": values.reshape(threads, lanes)[::-1].reshape(-1)})


def gather(n: int = 6) -> Program:
    """Checked subscripts, then the reads; a histogram by atomic updates."""
    table, index = b.buffer("table", FLOAT32, (9,)), b.buffer("index", INT64, (n,))
    out, counts = b.buffer("out", FLOAT32, (n,)), b.buffer("counts", FLOAT32, (9,))
    at = b.load(index, TX)
    check = ir.Check(b.logical_and(b.le(0, at), b.lt(at, 9)), 0, at)
    count = ir.Store(counts, (at,), b.const(1.0, FLOAT32), "+", atomic=True)
    read = b.block(b.store(out, (TX,), b.load(table, at)), count)
    kernels = (kernel("check", check, (1, 1, 1), (n, 1, 1)), kernel("gather", read, (1, 1, 1), (n, 1, 1)))
    module = ir.Module(
        "gather", (table, index, out, counts), (), kernels, (ir.CheckSite("table", 0, 9),), ("out", "counts")
    )
    indices = np.random.default_rng(2).integers(0, 9, n)
    values = numbers(9)
    start = np.zeros(9, np.float32)
    expected = {"out": values[indices], "counts": np.bincount(indices, minlength=9).astype(np.float32)}
    return Program(module, {"table": values, "index": indices, "counts": start}, expected)


PROGRAMS = {
    "identity": identity_matmul,
    "tiled": tiled_matmul,
    "sums": row_sums,
    "staged": staged_copy,
    "half": lambda: staged_copy(FLOAT16, 8),
    "gather": gather,
}
