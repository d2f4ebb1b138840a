"""Compiled loop programs against the interpreter."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from llvm_harness import assembly, compare, compile_module, module, random_array, run

import tensor_comprehensions as tc
from tensor_comprehensions.codegen.llvm.llvm_printer import emit_llvm
from tensor_comprehensions.core import dtypes as d
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Binary,
    Block,
    Check,
    If,
    Let,
    Load,
    Loop,
    LoopKind,
    Select,
    Space,
    Stmt,
    Store,
)  # fmt: skip
from tensor_comprehensions.loop_ir.passes.unroll import unroll_loops
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.runtime.cpu import host_symbols
from tensor_comprehensions.schedules import pack, parallel, tile
from tensor_comprehensions.schedules import vectorize as vectorized
from tensor_comprehensions.target import AVX512, CpuTarget
from tests.helpers.anywhere import TARGETS

I, J, K = ir.var("i"), ir.var("j"), ir.var("k")  # noqa: E741
on_targets = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
NUMBERS = [t for t in d.DTYPES.values() if t not in (d.BOOL, d.FLOAT16, d.BFLOAT16)]
N = 45


def loop(var: str, stop: int, body: Stmt, kind: LoopKind = LoopKind.SERIAL, lanes: int = 1, **more: int) -> Stmt:
    return Loop(var, ir.const(0), ir.const(stop), body, kind, vector_factors=(lanes, 1), **more)


def over_lanes(body: Stmt, lanes: int, n: int = N) -> Stmt:
    """`body` for i < n, scalar or in vectors."""
    kind = LoopKind.SERIAL if lanes == 1 else LoopKind.VECTOR
    return vectorize_loops(loop("i", n, body, kind, lanes))


@on_targets
@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_arithmetic(dtype: d.DType, lanes: int, target: CpuTarget) -> None:
    a, b = ir.buffer("A", dtype, (N,)), ir.buffer("B", dtype, (N,))
    x, y = ir.load(a, I), ir.load(b, I)
    ops = ["add", "sub", "mul", "min", "max"] + (["div", "mod"] if dtype.is_integer else ["div"])
    body = Block(tuple(Store(ir.buffer(f"C{op}", dtype, (N,)), (I,), Binary(op, x, y)) for op in ops))
    m = module(over_lanes(body, lanes))
    arrays = {s.name: random_array(dtype, (N,), n) for n, s in enumerate(m.arguments)}
    compare(m, arrays, target)


@on_targets
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_comparisons_and_select(dtype: d.DType, target: CpuTarget) -> None:
    a, b = ir.buffer("A", dtype, (N,)), ir.buffer("B", dtype, (N,))
    x, y = ir.load(a, I), ir.load(b, I)
    body = []
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        body.append(ir.store(ir.buffer(f"C{op}", d.BOOL, (N,)), (I,), Binary(op, x, y)))
        body.append(ir.store(ir.buffer(f"D{op}", dtype, (N,)), (I,), Select(Binary(op, x, y), x, y)))
    for lanes in (1, 16):
        m = module(over_lanes(Block(tuple(body)), lanes))
        arrays = {s.name: random_array(s.type.dtype, (N,), n) for n, s in enumerate(m.arguments)}
        if dtype.is_float:
            arrays["A"][::7] = np.nan
        compare(m, arrays, target)


@on_targets
def test_division_by_constants_and_corners(target: CpuTarget) -> None:
    for divisor in (1, 2, 3, 16, -1, -3, 0):
        _check_division(divisor, target)


def _check_division(divisor: int, target: CpuTarget) -> None:
    a = ir.buffer("A", d.INT32, (N,))
    x, y = ir.load(a, I), ir.const(divisor, d.INT32)
    by_const = [ir.store(ir.buffer(op, d.INT32, (N,)), (I,), Binary(op, x, y)) for op in ("div", "mod")]
    b = ir.buffer("B", d.INT32, (N,))
    by_value = [
        ir.store(ir.buffer(f"{op}v", d.INT32, (N,)), (I,), Binary(op, x, ir.load(b, I))) for op in ("div", "mod")
    ]
    values = np.arange(-22, 23, dtype=np.int32)
    values[:2] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    for lanes in (1, 8):
        m = module(over_lanes(Block((*by_const, *by_value)), lanes))
        arrays = {s.name: np.zeros(N, np.int32) for s in m.arguments}
        arrays |= {"A": values, "B": np.full(N, divisor, np.int32)}
        compare(m, arrays, target)


@on_targets
@pytest.mark.parametrize("lanes", [1, 16])
def test_casts(lanes: int, target: CpuTarget) -> None:
    for source in d.DTYPES.values():
        a = ir.buffer("A", source, (N,))
        body = [ir.store(ir.buffer(f"to_{t}", t, (N,)), (I,), ir.cast(ir.load(a, I), t)) for t in d.DTYPES.values()]
        m = module(over_lanes(Block(tuple(body)), lanes))
        arrays = {b.name: np.zeros_like(random_array(b.type.dtype, (N,))) for b in m.arguments}
        arrays["A"] = np.abs(random_array(source, (N,), 3))  # negative floats as unsigned integers are left open
        compare(m, arrays, target)


@on_targets
def test_sixteen_bit_floats_round_once(target: CpuTarget) -> None:
    values = np.array(
        [0, -0.0, 1, 65504, 65519.99, 65520, 7e4, -1e30, np.inf, -np.inf, np.nan, 6e-8, 2.9e-8, 3e-8, 6.1e-5, 6.09e-5,
         1 + 2**-11, 1 + 2**-11 + 2**-40, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 2**-8 + 2**-45, 3.3e38,
         -2049, 2051, 1e-40, 1e-300],
    )  # fmt: skip
    n = len(values)
    for source in (d.FLOAT32, d.FLOAT64):
        a = ir.buffer("A", source, (n,))
        body = [
            ir.store(ir.buffer(f"to_{t}", t, (n,)), (I,), ir.cast(ir.load(a, I), t)) for t in (d.FLOAT16, d.BFLOAT16)
        ]
        for lanes in (1, 8):
            m = module(over_lanes(Block(tuple(body)), lanes, n))
            with np.errstate(over="ignore"):
                given = values.astype(source.name)
            got, _ = run(m, {"A": given, "to_float16": np.zeros(n, "f2"), "to_bfloat16": np.zeros(n, "f4")}, target)
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(got["to_float16"], given.astype(np.float16))
            np.testing.assert_array_equal(got["to_bfloat16"], _bfloat16(given))


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 by trying both neighbors in exact arithmetic."""
    result = []
    for v in values.astype(np.float64):
        if not np.isfinite(v) or v == 0:
            result.append(np.float32(v))
            continue
        _, e = np.frexp(v)
        unit = np.longdouble(2.0) ** (max(int(e), -125) - 8)
        q = np.rint(np.longdouble(v) / unit) * unit
        result.append(np.float32(q) if abs(q) < 2.0**128 else np.float32(np.copysign(np.inf, v)))
    return np.array(result, np.float32)


@on_targets
@pytest.mark.parametrize("to", [d.INT32, d.INT8, d.UINT8, d.INT64, d.UINT64], ids=str)
def test_floats_out_of_range_saturate(to: d.DType, target: CpuTarget) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 300, -300, -0.9, 2.5e9, -2.5e9, 1.9, 0, 5, 7, 8, 9], "f4")
    n = len(values)
    m = module(
        over_lanes(
            ir.store(ir.buffer("B", to, (n,)), (I,), ir.cast(ir.load(ir.buffer("A", d.FLOAT32, (n,)), I), to)), 8, n
        )
    )
    got, _ = run(m, {"A": values, "B": np.zeros(n, to.name)}, target)
    info = np.iinfo(to.name)
    expected = [0 if np.isnan(v) else int(np.clip(np.trunc(np.longdouble(v)), info.min, info.max)) for v in values]
    assert got["B"].tolist() == expected


@on_targets
@pytest.mark.parametrize("dtype", [d.FLOAT32, d.FLOAT64, d.INT32, d.UINT8, d.BOOL, d.FLOAT16, d.BFLOAT16], ids=str)
def test_strided_reads_and_writes(dtype: d.DType, target: CpuTarget) -> None:
    for stride in (-3, -1, 0, 1, 2, 3, 4, 9):
        _check_stride(dtype, stride, target)


def _check_stride(dtype: d.DType, stride: int, target: CpuTarget) -> None:
    start = 200 if stride < 0 else 3
    a = ir.buffer("A", dtype, (500,))
    where = ir.add(ir.mul(I, stride), start)
    read = over_lanes(ir.store(ir.buffer("B", dtype, (N,)), (I,), ir.load(a, where)), 16)
    statements = [read]
    if stride:
        c = ir.buffer("C", dtype, (500,))
        statements.append(over_lanes(ir.store(c, (where,), ir.load(ir.buffer("D", dtype, (N,)), I)), 16))
    m = module(*statements)
    compare(m, {b.name: random_array(dtype, b.shape, n) for n, b in enumerate(m.arguments)}, target)


@on_targets
@pytest.mark.parametrize("dtype", [d.FLOAT32, d.FLOAT64, d.INT8, d.BOOL, d.FLOAT16], ids=str)
def test_masked_access(dtype: d.DType, target: CpuTarget) -> None:
    for stride in (-1, 0, 1, 2, 3, 4):
        for known in (False, True):
            _check_mask(dtype, stride, known, target)


def _check_mask(dtype: d.DType, stride: int, known: bool, target: CpuTarget) -> None:
    lanes, base = 16, 20 if stride < 0 else 0
    a, b, flags = ir.buffer("A", dtype, (64,)), ir.buffer("B", dtype, (64,)), ir.buffer("F", d.BOOL, (16,))
    ramp = ir.ramp(ir.const(0), 1, lanes)
    mask = Binary("lt", ramp, ir.broadcast(ir.const(11), lanes)) if known else Load(flags, (ramp,))
    where = ir.ramp(ir.const(base), stride, lanes) if stride else ir.broadcast(ir.const(base), lanes)
    out = where if stride else ramp
    value = Load(a, (where,), mask)
    masked = Store(b, (out,), value, mask=mask)
    whole = Store(ir.buffer("W", dtype, (16,)), (ramp,), value)
    m = module(Block((masked, whole)))
    arrays = {x.name: random_array(x.type.dtype, x.shape, n + 5) for n, x in enumerate(m.arguments)}
    compare(m, arrays, target)


@on_targets
@pytest.mark.parametrize("dtype", [d.FLOAT32, d.FLOAT64, d.INT8, d.BOOL, d.BFLOAT16], ids=str)
def test_known_masks_store_parts_of_vectors_without_mask_registers(dtype: d.DType, target: CpuTarget) -> None:
    """A masked store is a dozen cycles of microcode on AMD processors without AVX-512."""
    ramp, stores = ir.ramp(ir.const(0), 1, 16), []
    a = ir.buffer("A", dtype, (16,))
    for count in (3, 4, 7, 11, 15):
        for first in (0, 1):  # from the first lane on, and without it
            b = ir.buffer(f"B{first}_{count}", dtype, (16,))
            mask = Binary("lt", ramp, ir.broadcast(ir.const(count), 16))
            if first:
                mask = Binary("and", mask, Binary("ge", ramp, ir.broadcast(ir.const(first), 16)))
            stores.append(Store(b, (ramp,), Load(a, (ramp,)), mask=mask))
    m = module(Block(tuple(stores)))
    compare(m, {x.name: random_array(dtype, x.shape, n + 5) for n, x in enumerate(m.arguments)}, target)
    masked = emit_llvm(m, target, host_symbols.vector_functions()).count("call void @llvm.masked.store")
    assert masked == (len(stores) if target.has_mask_registers else 0)


@on_targets
@pytest.mark.parametrize("to", [d.BFLOAT16, d.INT8, d.INT16, d.UINT8], ids=str)
def test_a_single_lane_of_narrow_numbers_writes_nothing_beyond(to: d.DType, target: CpuTarget) -> None:
    wide = d.FLOAT32 if to.is_float else d.INT32
    a, c = ir.buffer("A", wide, (8,)), ir.buffer("C", to, (8,))
    along = ir.ramp(0, 1, 8)
    first = ir.lt(along, 1)
    value = ir.cast(ir.add(ir.load(a, along), ir.load(a, along)), to)
    m = module(Block((ir.store(c, (along,), ir.const(3, to)), ir.store(c, (along,), value, mask=first))))
    compare(m, {"A": random_array(wide, (8,), 1), "C": random_array(to, (8,), 2)}, target)


@on_targets
@pytest.mark.parametrize("dtype", [d.FLOAT32, d.FLOAT64, d.INT16, d.BOOL], ids=str)
def test_data_dependent_access(dtype: d.DType, target: CpuTarget) -> None:
    a, idx = ir.buffer("A", dtype, (7, N)), ir.buffer("X", d.INT32, (N,))
    picked = ir.cast(ir.load(idx, I), d.INT64)
    gather = over_lanes(ir.store(ir.buffer("B", dtype, (N,)), (I,), ir.load(a, ir.const(3), picked)), 16)
    ramp = ir.ramp(ir.const(0), 1, 16)
    flags = ir.load(ir.buffer("F", d.BOOL, (16,)), ramp)
    place = ir.cast(Load(idx, (ramp,)), d.INT64)
    masked = Block((
        Store(ir.buffer("M", dtype, (16,)), (ramp,), Load(a, (ir.broadcast(ir.const(2), 16), place), flags)),
        Store(ir.buffer("S", dtype, (N,)), (place,), Load(a, (ir.broadcast(ir.const(1), 16), ramp)), mask=flags),
    ))  # fmt: skip
    m = module(gather, masked)
    arrays = {x.name: random_array(x.type.dtype, x.shape, n + 5) for n, x in enumerate(m.arguments)}
    arrays["X"] = np.random.default_rng(1).permutation(N).astype(np.int32)
    compare(m, arrays, target)


@on_targets
def test_updates_that_meet_at_one_element(target: CpuTarget) -> None:
    """Lanes of a histogram that fall into one bin all count."""
    idx, out = ir.buffer("X", d.INT64, (64,)), ir.buffer("H", d.FLOAT32, (5,))
    where = Load(idx, (ir.ramp(ir.mul(K, 16), 1, 16),))
    m = module(loop("k", 4, Store(out, (where,), ir.const(1.0, d.FLOAT32, 16), "+")))
    if not target.runs_here():  # the interpreter takes lanes that meet for a fault of vectorization
        compile_module(m, target)
        return
    got, _ = run(m, {"X": np.arange(64) % 5, "H": np.zeros(5, np.float32)}, target)
    assert got["H"].tolist() == [13, 13, 13, 13, 12]


@on_targets
@pytest.mark.parametrize("dtype", [*NUMBERS, d.BOOL], ids=str)
def test_reductions_over_lanes(dtype: d.DType, target: CpuTarget) -> None:
    for op in ("+", "*", "min", "max"):
        _check_reduction(dtype, op, target)


def _check_reduction(dtype: d.DType, op: str, target: CpuTarget) -> None:
    op = {"+": "or", "*": "and"}.get(op, op) if dtype == d.BOOL else op
    a, out = ir.buffer("A", dtype, (N,)), ir.buffer("S", dtype, (3,))
    statements = []
    for n, lanes in enumerate((2, 6, 16)):
        value = ir.reduce_lanes(op, Load(a, (ir.ramp(ir.const(n), 1, lanes),)))
        statements.append(Store(out, (ir.const(n),), value))
    m = module(Block(tuple(statements)))
    compare(m, {"A": random_array(dtype, (N,), 9), "S": random_array(dtype, (3,))}, target, rtol=1e-5)


@on_targets
def test_extremes_keep_nan(target: CpuTarget) -> None:
    a, b = ir.buffer("A", d.FLOAT32, (N,)), ir.buffer("B", d.FLOAT32, (N,))
    x, y, zero = ir.load(a, I), ir.load(b, I), ir.const(0.0, d.FLOAT32)
    exprs = [Binary(op, p, q) for op in ("min", "max") for p, q in ((x, y), (y, x), (x, zero), (zero, x))]
    body = [ir.store(ir.buffer(f"C{n}", d.FLOAT32, (N,)), (I,), e) for n, e in enumerate(exprs)]
    peak = vectorize_loops(Loop("i", ir.const(0), ir.const(N), ir.store(ir.buffer("P", d.FLOAT32, ()), (), x, op="max"),
                          LoopKind.VECTOR, vector_factors=(16, 2)))  # fmt: skip
    m = module(over_lanes(Block(tuple(body)), 16), peak)
    arrays = {s.name: random_array(d.FLOAT32, s.shape, n) for n, s in enumerate(m.arguments)}
    arrays["A"][[1, 20]] = np.nan
    arrays["B"][[2, 20, 44]] = np.nan
    compare(m, arrays, target)


# --- statements --------------------------------------------------------------------------------------------------


@on_targets
@pytest.mark.parametrize("grain", [1, 1000])
@pytest.mark.parametrize("step", [1, 3])
def test_parallel_loops_capture_what_they_use(grain: int, step: int, target: CpuTarget) -> None:
    a, b = ir.buffer("A", d.FLOAT32, (20, N)), ir.buffer("B", d.FLOAT32, (20, N))
    scale = ir.load(ir.buffer("S", d.FLOAT32, (3,)), K)
    value = ir.mul(ir.load(a, I, J), ir.var("factor", d.FLOAT32))
    inner = Loop(
        "j", ir.const(0), ir.const(N), ir.store(b, (I, J), value, op="+"), LoopKind.VECTOR, vector_factors=(16, 1)
    )
    body = Loop("i", ir.const(2), ir.const(19), inner, LoopKind.PARALLEL, step=step, grain=grain)
    m = module(vectorize_loops(loop("k", 3, Let("factor", scale, body))))
    compare(m, {x.name: random_array(d.FLOAT32, x.shape, n) for n, x in enumerate(m.arguments)}, target, rtol=1e-5)


@on_targets
@pytest.mark.parametrize("space", [Space.REGISTER, Space.SCRATCH])
def test_parallel_loops_allocate_what_a_statement_before_had_under_the_same_name(
    space: Space, target: CpuTarget
) -> None:
    a, b = ir.buffer("A", d.FLOAT32, (9,)), ir.buffer("B", d.FLOAT32, (9,))
    acc = ir.buffer("acc", d.FLOAT32, (), space)
    double = Block((ir.store(acc, (), ir.load(a, I)), ir.store(b, (I,), ir.add(ir.load(acc), ir.load(acc)))))
    part = Allocate((acc,), double)
    m = module(Block((loop("i", 4, part), Loop("i", ir.const(4), ir.const(9), part, LoopKind.PARALLEL))))
    compare(m, {x.name: random_array(d.FLOAT32, x.shape, n) for n, x in enumerate(m.arguments)}, target)


@on_targets
@pytest.mark.parametrize("columns", [40, 3000])
def test_scratch_on_stack_and_heap(columns: int, target: CpuTarget) -> None:
    a, b = ir.buffer("A", d.FLOAT32, (9, columns)), ir.buffer("B", d.FLOAT32, (9, columns))
    s, t = (ir.buffer(n, d.FLOAT32, (columns,), Space.SCRATCH) for n in ("first", "second"))
    fill = loop("j", columns, ir.store(s, (J,), ir.mul(ir.load(a, I, J), 2.0)))
    turn = loop("j", columns, ir.store(t, (J,), ir.load(s, ir.sub(columns - 1, J))))
    copy = loop("j", columns, ir.store(b, (I, J), ir.load(t, J)))
    body = Allocate((s,), Allocate((t,), Block((fill, turn, copy))))
    m = module(loop("i", 9, body, LoopKind.PARALLEL))
    text = emit_llvm(m, target, {})
    assert ("tc_allocate" in text) == (columns == 3000)
    compare(m, {x.name: random_array(d.FLOAT32, x.shape, n) for n, x in enumerate(m.arguments)}, target)


@on_targets
def test_register_tiles(target: CpuTarget) -> None:
    """A 3 x 2 tile of vectors accumulates over k without touching memory."""
    a, b, c = (ir.buffer(n, d.FLOAT32, s) for n, s in (("A", (3, 11)), ("B", (11, 32)), ("C", (3, 32))))
    acc = ir.buffer("acc", d.FLOAT32, (3, 2), Space.REGISTER, lanes=16)
    zero = ir.store(acc, (I, J), ir.const(0.0, d.FLOAT32, 16))
    column = ir.ramp(ir.mul(J, 16), 1, 16)
    product = ir.mul(ir.broadcast(ir.load(a, I, K), 16), ir.load(b, ir.broadcast(K, 16), column))
    update = Store(acc, (I, J), product, "+")
    write = Store(c, (ir.broadcast(I, 16), column), Load(acc, (I, J)))

    def tile(body: Stmt) -> Stmt:
        return loop("i", 3, loop("j", 2, body, LoopKind.UNROLLED), LoopKind.UNROLLED)

    m = module(unroll_loops(Allocate((acc,), Block((tile(zero), loop("k", 11, tile(update)), tile(write))))))
    arrays = {x.name: random_array(d.FLOAT32, x.shape, n) for n, x in enumerate(m.arguments)}
    compare(m, arrays, target, rtol=1e-5, atol=1e-5)
    assert "vfmadd" in assembly(m, TARGETS[0])


@on_targets
def test_branches_and_lets(target: CpuTarget) -> None:
    a, b = ir.buffer("A", d.INT32, (N,)), ir.buffer("B", d.INT32, (N,))
    x = ir.var("x", d.INT32)
    then, other = ir.store(b, (I,), ir.mul(x, 3)), ir.store(b, (I,), ir.sub(0, x))
    half = If(Binary("gt", x, ir.const(4, d.INT32)), ir.store(b, (I,), ir.const(7, d.INT32), op="+"))
    body = Let("x", ir.load(a, I), Block((If(Binary("lt", x, ir.const(0, d.INT32)), then, other), half)))
    m = module(loop("i", N, body))
    compare(m, {x.name: random_array(d.INT32, x.shape, n) for n, x in enumerate(m.arguments)}, target)


@on_targets
def test_checks_stop_the_kernels_after_them(target: CpuTarget) -> None:
    a, b = ir.buffer("A", d.INT64, (N,)), ir.buffer("B", d.INT64, (N,))
    value = ir.load(a, I)
    check = loop("i", N, Check(Binary("lt", value, ir.const(15)), 4, value), LoopKind.PARALLEL, grain=8)
    m = module(check, loop("i", N, ir.store(b, (I,), value)))
    arrays = {"A": np.arange(N) % 15, "B": np.full(N, -1)}
    compare(m, arrays, target)
    arrays["A"][33] = 99
    got, status = run(m, arrays, target)
    assert status == (5, 99)
    assert (got["B"] == -1).all()


def test_loops_without_trips_and_with_one() -> None:
    a = ir.buffer("A", d.INT64, (4,))
    n = ir.load(ir.buffer("N", d.INT64, ()))
    never = loop("i", 0, ir.store(a, (I,), ir.const(9)))
    once = Loop("i", ir.const(2), ir.const(3), ir.store(a, (I,), ir.const(5)))
    dynamic = Loop("i", ir.const(0), n, ir.store(a, (I,), ir.const(1)), LoopKind.PARALLEL)
    m = module(Block((never, once)), dynamic)
    for trips in (0, 1, 4):
        compare(m, {"A": np.zeros(4, np.int64), "N": np.array(trips)}, TARGETS[0])


def test_zero_sized_buffers() -> None:
    a, b = ir.buffer("A", d.FLOAT32, (0, 5)), ir.buffer("B", d.FLOAT32, (0, 5))
    m = module(loop("i", 0, loop("j", 5, ir.store(b, (I, J), ir.load(a, I, J))), LoopKind.PARALLEL))
    compare(m, {"A": np.zeros((0, 5), "f4"), "B": np.zeros((0, 5), "f4")}, TARGETS[0])


@on_targets
def test_streaming_stores(target: CpuTarget) -> None:
    a, b = ir.buffer("A", d.FLOAT32, (N,)), ir.buffer("B", d.FLOAT32, (N,))
    lanes = target.lanes(32)
    where = (ir.ramp(ir.mul(I, lanes), 1, lanes),)
    m = module(loop("i", N // lanes, Store(b, where, Load(a, where), nontemporal=True)))
    compare(m, {"A": random_array(d.FLOAT32, (N,), 1), "B": np.zeros(N, "f4")}, target)
    assert "movnt" in assembly(m, target)


@pytest.mark.parametrize("first", [0, 1, 4, 8])
@pytest.mark.parametrize("count", [16, 8, 4, 11])
def test_streaming_stores_of_some_lanes_and_at_any_address(first: int, count: int) -> None:
    a, b = ir.buffer("A", d.FLOAT32, (N,)), ir.buffer("B", d.FLOAT32, (N,))
    rows, run = (N - first - 16) // count, ir.ramp(0, 1, 16)
    where = (ir.ramp(ir.add(ir.mul(I, count), first), 1, 16),)
    mask = None if count == 16 else ir.lt(run, count)
    m = module(loop("i", rows, Store(b, where, Load(a, where, mask), mask=mask, nontemporal=True)))
    compare(m, {"A": random_array(d.FLOAT32, (N,), 1), "B": np.zeros(N, "f4")}, AVX512)
    text = assembly(m, AVX512)
    assert ("movnt" in text) == (count != 11)
    if count != 11:
        assert "{%k" not in text.split("movnt")[-1]


@on_targets
@pytest.mark.parametrize("apart", [64, 24, 5])
def test_streaming_stores_a_constant_apart_share_a_test(apart: int, target: CpuTarget) -> None:
    a, b = ir.buffer("A", d.FLOAT32, (300,)), ir.buffer("B", d.FLOAT32, (300,))
    lanes = target.lanes(32)
    rows = [ir.ramp(ir.add(ir.mul(I, lanes), first), 1, lanes) for first in (0, apart, 64 + 2 * apart)]
    stores = ir.block(*[Store(b, (row,), Load(a, (row,)), nontemporal=True) for row in rows])
    m = module(loop("i", 3, stores))
    compare(m, {"A": random_array(d.FLOAT32, (300,), 1), "B": np.zeros(300, "f4")}, target)
    assert emit_llvm(m, target, {}).count("ptrtoint") == 1


def test_same_text_under_every_hash_seed() -> None:
    """In another process as in this one, whose seed is random."""
    program = (
        "import sys; sys.path.insert(0, 'tests/codegen'); import test_llvm as t; from llvm_harness import *\n"
        "print(emit_llvm(t.some_module(), t.AVX512, host_symbols.vector_functions()))"
    )
    environment = {"PYTHONHASHSEED": "1", "TC_CACHE": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == f"{emit_llvm(some_module(), AVX512, host_symbols.vector_functions())}\n"


def some_module():  # type: ignore[no-untyped-def]
    a, b = ir.buffer("A", d.FLOAT32, (20, N)), ir.buffer("B", d.FLOAT32, (20, N))
    value = ir.call("log", ir.mul(ir.load(a, I, J), 0.5))
    inner = Loop("j", ir.const(0), ir.const(N), ir.store(b, (I, J), value), LoopKind.VECTOR, vector_factors=(16, 2))
    return module(vectorize_loops(loop("i", 20, inner, LoopKind.PARALLEL)))


def test_emitted_text(golden) -> None:  # type: ignore[no-untyped-def]
    symbols = {f"log.float32x{n}": f"Sleef_logf{n}_u10" for n in (8, 16)}
    golden.check("llvm_pointwise.ll", emit_llvm(some_module(), AVX512, symbols))


@on_targets
@pytest.mark.parametrize("dtype", d.DTYPES.values(), ids=str)
def test_shuffles(dtype: d.DType, target: CpuTarget) -> None:
    """Bound to a name, and one inside the other with other numbers of lanes."""
    x, out = ir.buffer("X", dtype, (16,)), ir.buffer("OUT", dtype, (2, 8))
    first, second = ir.load(x, ir.ramp(0, 1, 8)), ir.load(x, ir.ramp(8, 1, 8))
    zipped = ir.shuffle(first, second, (0, 8, 1, 9, 2, 10, 3, 15))
    pair = ir.shuffle(second, first, (7, 11))
    body = Block(
        (
            Let("v", zipped, ir.store(out, (0, ir.ramp(0, 1, 8)), ir.var("v", dtype, 8))),
            ir.store(out, (1, ir.ramp(0, 1, 8)), ir.shuffle(pair, pair, (0, 1, 2, 3, 1, 1, 0, 0))),
        )
    )
    array = random_array(dtype, (16,))
    m = module(body)
    compare(m, {"X": array, "OUT": random_array(dtype, (2, 8))}, target)
    got, _ = run(m, {"X": array, "OUT": random_array(dtype, (2, 8))}, target)
    np.testing.assert_array_equal(got["OUT"][0], array[[0, 8, 1, 9, 2, 10, 3, 15]])
    np.testing.assert_array_equal(got["OUT"][1], array[[15, 3, 15, 3, 3, 3, 15, 15]])


@on_targets
def test_loads_see_every_earlier_store(target: CpuTarget) -> None:
    """Values are kept across statements and loops only as long as nothing writes where they came from."""
    a, b, s = ir.buffer("A", d.FLOAT32, (N,)), ir.buffer("B", d.FLOAT32, (N,)), ir.buffer("S", d.FLOAT32, ())
    first = ir.load(b, 0)
    prefix = Loop("i", ir.const(1), ir.const(N), ir.store(b, (I,), ir.add(ir.load(b, ir.sub(I, 1)), ir.load(a, I))))
    guarded = If(
        Binary("lt", ir.load(a, I), ir.const(0.0, d.FLOAT32)), ir.store(s, (), ir.load(a, I)), ir.store(b, (0,), 2.0)
    )
    inner = loop("j", 3, Block((ir.store(b, (J,), ir.add(ir.load(b, J), ir.load(s))), ir.store(s, (), first, op="+"))))
    twice = Block((ir.store(s, (), first, op="+"), ir.store(b, (0,), ir.load(s)), ir.store(s, (), first, op="+")))
    m = module(
        Block((prefix, twice, loop("i", 6, Block((guarded, inner, ir.store(a, (I,), ir.add(first, ir.load(s))))))))
    )
    compare(m, {x.name: random_array(d.FLOAT32, x.shape, n) for n, x in enumerate(m.arguments)}, target, rtol=1e-4)


def test_register_tiles_in_shared_loops_keep_their_addresses_in_registers() -> None:
    """Code generation had kept a pointer for each scalar of a tile on the stack, where origins are quotients."""
    source = """
    def conv(float(N,C,H,W) I, float(F,C,KH,KW) W, float(F) B) -> (O) {
        O(n,f,h,w) +=! I(n,c,h+kh,w+kw) * W(f,c,kh,kw)
        O(n,f,h,w) = fmax(O(n,f,h,w) + B(f), 0)
    }"""
    shared = tile(n=1, h=19) >> tile(n=1, h=1, f=32, w=14) >> pack(W="h1") >> parallel("n1", "h1") >> vectorized("f")
    tensors = torch.zeros(4, 64, 58, 58), torch.zeros(64, 64, 3, 3), torch.zeros(64)
    text = tc.define(source).conv.compile(*tensors, schedule=shared, target=AVX512).source("asm")
    blocks = [re.match(r"(\w+):(.*?)\n\tj\w+\t\.L\1\n", block, re.DOTALL) for block in text.split("\n.L")]
    tiles = [found[2] for found in blocks if found and found[2].count("vfmadd") >= 28]
    assert tiles
    assert not any("(%rsp" in body for body in tiles)
