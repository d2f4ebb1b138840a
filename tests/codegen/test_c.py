"""The C text compiles without a warning and computes what the loop program means."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.codegen.c.c_printer import emit_c
from tensor_comprehensions.codegen.c.dialect import C99
from tensor_comprehensions.codegen.c.expressions import print_literal
from tensor_comprehensions.core.dtypes import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT32,
    INT64,
    UINT8,
    UINT64,
    DType,
)
from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.passes.simplify import simplify
from tensor_comprehensions.loop_ir.passes.unroll import unroll_loops
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.structured.lower.contraction import lower_contraction
from tensor_comprehensions.structured.op import Iterator, IteratorKind, StructuredOp
from tensor_comprehensions.target import AVX2

from ..helpers.functions_of_types import functions_of

GCC = shutil.which("gcc")
needs_gcc = pytest.mark.skipif(GCC is None, reason="compiling the C text needs gcc")
SERIAL, PARALLEL, UNROLLED, VECTOR = ir.LoopKind
SCRATCH, REGISTER = ir.Space.SCRATCH, ir.Space.REGISTER
rng = np.random.default_rng(0)


def module(name: str, arguments: list[ir.Buffer], *bodies: ir.Stmt, written: str = "out", **more: Any) -> ir.Module:
    kernels = tuple(ir.Kernel(f"{name}_{n}", body) for n, body in enumerate(bodies))
    return ir.Module(name, tuple(arguments), kernels=kernels, written=(written,), **{"temporaries": (), **more})


def loop(var: str, start: int, stop: b.Operand, body: ir.Stmt, kind: ir.LoopKind = SERIAL, **more: int) -> ir.Loop:
    last = stop if not isinstance(stop, (int, float)) else b.const(stop)
    return ir.Loop(var, b.const(start), last, body, kind, **more)


i, j, k = (b.var(n) for n in "ijk")


def run(m: ir.Module, folder: Path, *arrays: np.ndarray) -> int:
    """Compile `m` with every warning an error and call it on `arrays`."""
    source, library = folder / "kernel.c", folder / "kernel.so"
    source.write_text(emit_c(m))
    flags = ["-std=c99", "-Wall", "-Werror", "-O2", "-march=native", "-fopenmp", "-fwrapv", "-shared", "-fPIC"]
    done = subprocess.run([str(GCC), *flags, str(source), "-o", str(library), "-lm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + source.read_text()
    function = getattr(ctypes.CDLL(str(library)), m.name)
    return int(function(*(ctypes.c_void_p(a.ctypes.data) for a in arrays)))


def floats(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


# --- loops and memory --------------------------------------------------------------------------------------------


def matmul(kind: ir.LoopKind) -> ir.Module:
    a, w, out = (b.buffer(n, FLOAT32, s) for n, s in (("a", (6, 5)), ("w", (5, 33)), ("out", (6, 33))))
    update = b.store(out, (i, j), b.mul(b.load(a, i, k), b.load(w, k, j)), op="+")
    nest = b.block(
        loop("j", 0, 33, b.store(out, (i, j), 0.0), VECTOR, vector_factors=(16, 1)),
        loop("k", 0, 5, loop("j", 0, 33, update, VECTOR, vector_factors=(16, 1))),
    )
    return module("matmul", [a, w, out], loop("i", 0, 6, nest, kind))


@needs_gcc
@pytest.mark.parametrize("kind", [SERIAL, PARALLEL])
def test_loops(kind: ir.LoopKind, tmp_path: Path) -> None:
    m = matmul(kind)
    a, w, out = floats(6, 5), floats(5, 33), floats(6, 33)
    assert run(m, tmp_path, a, w, out) == 0
    np.testing.assert_allclose(out, a @ w, rtol=1e-5)
    text = emit_c(m)
    assert ("#pragma omp parallel for" in text) == (kind is PARALLEL)
    assert text.count("#pragma omp simd") == 2


@needs_gcc
@pytest.mark.parametrize("op", ["+", "*", "min", "max"])
@pytest.mark.parametrize("dtype", [FLOAT32, INT32, UINT8])
def test_vector_loop_that_reduces(op: str, dtype: DType, tmp_path: Path) -> None:
    x, out = b.buffer("x", dtype, (4, 37)), b.buffer("out", dtype, (4,))
    inner = loop("j", 0, 37, b.store(out, (i,), b.load(x, i, j), op=op), VECTOR, vector_factors=(8, 2))
    m = module("reduce", [x, out], loop("i", 0, 4, inner))
    values = rng.integers(1, 4, (4, 37)).astype(dtype.name)
    start = np.full(4, 2, dtype.name)
    function = {"+": np.add, "*": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    with np.errstate(over="ignore"):
        expected = function(function.reduce(values, axis=1, dtype=dtype.name), start)
    assert run(m, tmp_path, values, start) == 0
    np.testing.assert_allclose(start, expected, rtol=1e-5)


@needs_gcc
def test_bounds_steps_and_shadowing(tmp_path: Path) -> None:
    """A triangle with a step, written under a `Let` that takes a new meaning from its old one."""
    out = b.buffer("out", INT64, (9, 9))
    body = ir.Let("v", b.mul(i, 10), ir.Let("v", b.add(b.var("v"), j), b.store(out, (i, j), b.var("v"))))
    m = module("triangle", [out], loop("i", 0, 9, loop("j", 1, b.add(i, 1), body, step=2)))
    result = np.zeros((9, 9), np.int64)
    assert run(m, tmp_path, result) == 0
    np.testing.assert_array_equal(
        result, [[10 * r + c if 1 <= c <= r and c % 2 else 0 for c in range(9)] for r in range(9)]
    )


@needs_gcc
def test_bounds_that_are_conditions(tmp_path: Path) -> None:
    out = b.buffer("out", INT64, (4, 9))
    end = b.select(b.lt(i, 2), b.const(3), b.mul(i, 2))
    m = module("ends", [out], loop("i", 0, 4, loop("j", 0, end, b.store(out, (i, j), b.const(1)))))
    result = np.zeros((4, 9), np.int64)
    assert run(m, tmp_path, result) == 0
    np.testing.assert_array_equal(result.sum(1), [3, 3, 4, 6])


@needs_gcc
def test_strided_arguments_and_names_of_c(tmp_path: Path) -> None:
    x = ir.Buffer("float", ir.Type(FLOAT32), (4, 3), (1, 5))
    y = ir.Buffer("int", ir.Type(FLOAT32), (3,), (0,))
    out = b.buffer("out", FLOAT32, (4, 3))
    body = b.store(out, (i, j), b.add(b.load(x, i, j), b.load(y, j)))
    m = module("exp", [x, y, out], loop("i", 0, 4, loop("j", 0, 3, body)))
    memory, result = floats(3, 5), floats(4, 3)
    assert "int exp_1(" in emit_c(m)
    assert run(replace(m, name="strided"), tmp_path, memory, memory, result) == 0
    np.testing.assert_array_equal(result, memory.T[:4] + memory[0, 0])


@needs_gcc
@pytest.mark.parametrize("extent", [16, 50_000])
def test_scratch_on_the_stack_and_on_the_heap(extent: int, tmp_path: Path) -> None:
    x, out = b.buffer("x", FLOAT32, (3, extent)), b.buffer("out", FLOAT32, (3, extent))
    row, panel = b.buffer("row", FLOAT32, (extent,), SCRATCH), b.buffer("panel", FLOAT32, (2, extent), SCRATCH)
    twice = loop("j", 0, extent, b.store(row, (j,), b.mul(b.load(x, i, j), 2.0)), VECTOR)
    fill = loop("j", 0, extent, b.store(panel, (1, j), b.load(row, j)), VECTOR)
    use = loop("j", 0, extent, b.store(out, (i, j), b.load(panel, 1, b.sub(extent - 1, j))), VECTOR)
    both = ir.Allocate((row, panel), b.block(twice, fill, use))
    m = module("scratch", [x, out], loop("i", 0, 3, both, PARALLEL))
    assert emit_c(m).count("malloc") == (2 if extent > 16 else 0)
    values, result = floats(3, extent), floats(3, extent)
    assert run(m, tmp_path, values, result) == 0
    np.testing.assert_array_equal(result, 2 * values[:, ::-1])


@needs_gcc
def test_kernels_run_in_order_over_temporaries(tmp_path: Path) -> None:
    x, t, out = (b.buffer(n, FLOAT64, (7,)) for n in ("x", "t", "out"))
    first = loop("i", 0, 7, b.store(t, (i,), b.add(b.load(x, i), 1.0)))
    second = loop("i", 0, 7, b.store(out, (i,), b.mul(b.load(t, i), b.load(t, b.sub(6, i)))))
    m = module("pair", [x, out], first, second, temporaries=(t,))
    values, result, memory = floats(7, dtype="float64"), floats(7, dtype="float64"), floats(7, dtype="float64")
    assert run(m, tmp_path, values, result, memory) == 0
    np.testing.assert_array_equal(result, (values + 1) * (values + 1)[::-1])


@needs_gcc
@pytest.mark.parametrize("kind", [SERIAL, PARALLEL])
def test_check_returns_its_site_and_stops_later_kernels(kind: ir.LoopKind, tmp_path: Path) -> None:
    index, out = b.buffer("index", INT64, (5,)), b.buffer("out", INT64, (5,))
    value = b.load(index, i)
    check = ir.Check(b.logical_and(b.le(0, value), b.lt(value, 9)), 1, value)
    later = loop("i", 0, 5, b.store(out, (i,), 7))
    sites = (ir.CheckSite("other", 0, 3), ir.CheckSite("table", 0, 9))
    m = module("checked", [index, out], loop("i", 0, 5, check, kind), later, sites=sites)
    good, bad, result = np.array([0, 8, 3, 2, 1]), np.array([0, 8, 9, 2, 1]), np.zeros(5, np.int64)
    assert run(m, tmp_path, bad, result) == 2
    assert not result.any()
    assert run(m, tmp_path, good, result) == 0
    assert (result == 7).all()


@needs_gcc
def test_conditions(tmp_path: Path) -> None:
    x, out = b.buffer("x", INT32, (8,)), b.buffer("out", INT32, (8,))
    inside = ir.Binary("or", ir.Binary("and", b.ge(i, 2), b.lt(i, 5)), b.eq(i, 7))
    guarded = b.load(x, b.sub(i, 3), mask=b.ge(i, 3))
    chosen = b.select(b.logical_not(inside), guarded, b.const(-5, INT32))
    body = ir.If(b.lt(i, 6), b.store(out, (i,), chosen), b.store(out, (i,), 100, mask=b.eq(i, 7)))
    m = module("conditions", [x, out], loop("i", 0, 8, body))
    values, result = np.arange(1, 9, dtype=np.int32), np.zeros(8, np.int32)
    assert run(m, tmp_path, values, result) == 0
    np.testing.assert_array_equal(result, [0, 0, -5, -5, -5, 3, 0, 100])


# --- explicit vectors --------------------------------------------------------------------------------------------


@needs_gcc
def test_vectors_masks_registers_and_lane_reductions(tmp_path: Path) -> None:
    """A dot product per row: an accumulator of 8 lanes, a masked last vector, a reduction over lanes."""
    x, y, out = b.buffer("x", FLOAT32, (3, 20)), b.buffer("y", FLOAT32, (20,)), b.buffer("out", FLOAT32, (3,))
    acc = b.buffer("acc", FLOAT32, (1,), REGISTER, 8)
    lane = b.ramp(j, 1, 8)
    mask = b.lt(lane, 20)
    product = b.call("fma", b.load(x, i, lane, mask=mask), b.load(y, lane, mask=mask), b.load(acc, 0))
    steps = loop("j", 0, 20, ir.Store(acc, (b.const(0),), product), step=8)
    clear = b.store(acc, (0,), 0.0)
    last = b.store(out, (i,), b.add(b.reduce_lanes("+", b.load(acc, 0)), b.reduce_lanes("max", b.load(acc, 0))))
    m = module("dot", [x, y, out], loop("i", 0, 3, ir.Allocate((acc,), b.block(clear, steps, last))))
    xs, ys, result = floats(3, 20), floats(20), floats(3)
    assert run(m, tmp_path, xs, ys, result) == 0
    lanes = np.pad(xs * ys, ((0, 0), (0, 4))).reshape(3, 3, 8).sum(1)
    np.testing.assert_allclose(result, lanes.sum(1) + lanes.max(1), rtol=1e-5)


@needs_gcc
def test_vector_store_reads_all_lanes_before_it_writes(tmp_path: Path) -> None:
    out = b.buffer("out", INT32, (17,))
    here, before = b.ramp(1, 1, 16), b.ramp(0, 1, 16)
    shift = ir.Store(out, (here,), b.load(out, before))
    reverse = ir.Store(out, (here,), b.load(out, b.ramp(16, -1, 16)), mask=b.gt(b.load(out, before), 2))
    m = module("shift", [out], b.block(shift, reverse))
    result = np.arange(17, dtype=np.int32)
    assert run(m, tmp_path, result) == 0
    shifted = np.array([0, *range(16)])
    expected = shifted.copy()
    expected[1:] = np.where(shifted[:-1] > 2, shifted[16:0:-1], shifted[1:])
    np.testing.assert_array_equal(result, expected)


@needs_gcc
def test_vector_lets_gathers_and_scatters(tmp_path: Path) -> None:
    index, table, out = b.buffer("index", INT32, (8,)), b.buffer("table", FLOAT32, (5,)), b.buffer("out", FLOAT32, (5,))
    at = b.var("at", INT64, 8)
    doubled = b.mul(b.load(table, at), b.const(2.0, FLOAT32, 8))
    scatter = ir.Store(out, (at,), doubled, op="+")
    where = b.cast(b.load(index, b.ramp(0, 1, 8)), INT64)
    m = module("scatter", [index, table, out], ir.Let("at", where, scatter))
    indices = np.array([0, 1, 1, 4, 1, 0, 3, 3], np.int32)
    values, result = floats(5), np.zeros(5, np.float32)
    assert run(m, tmp_path, indices, values, result) == 0
    np.testing.assert_allclose(result, 2 * values * np.bincount(indices, minlength=5), rtol=1e-6)


def vectorize_module(m: ir.Module) -> ir.Module:
    """`m` with explicit vectors, as the compiler makes them."""
    kernels = tuple(replace(x, body=simplify(unroll_loops(vectorize_loops(simplify(x.body))))) for x in m.kernels)
    return replace(m, kernels=kernels)


def blend() -> ir.Module:
    """A masked, data-dependent pointwise kernel and a sum in interleaved accumulators."""
    x, index, out, total = (
        b.buffer(n, t, s)
        for n, t, s in (("x", FLOAT32, (45,)), ("index", INT32, (45,)), ("out", FLOAT32, (45,)), ("total", FLOAT32, ()))
    )
    gathered = b.load(x, b.cast(b.load(index, i), INT64))
    value = b.select(b.gt(b.load(x, i), 0.0), b.mul(gathered, 2.0), b.const(-1.0, FLOAT32))
    body = b.block(
        loop("i", 0, 45, b.store(out, (i,), value), VECTOR, vector_factors=(8, 2)),
        b.store(total, (), 0.0),
        loop(
            "i", 0, 45, b.store(total, (), b.mul(b.load(x, i), b.load(out, i)), op="+"), VECTOR, vector_factors=(8, 2)
        ),
    )
    return replace(module("blend", [x, index, out, total], body), written=("out", "total"))


@needs_gcc
@pytest.mark.parametrize("make", [lambda: matmul(PARALLEL), lambda: matmul(SERIAL), blend], ids=["par", "mm", "blend"])
def test_same_as_the_interpreter_after_vectorization(make: Callable[[], ir.Module], tmp_path: Path) -> None:
    m = vectorize_module(make())
    arrays = {
        a.name: np.asarray(floats(*a.shape) if a.type.dtype.is_float else rng.integers(0, 45, a.shape, "int32"))
        for a in m.arguments
    }
    expected = {name: array.copy() for name, array in arrays.items()}
    assert interpret(m, expected) == []
    assert run(m, tmp_path, *arrays.values()) == 0
    for name, array in arrays.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5)


@needs_gcc
@pytest.mark.parametrize("text", ["C:i,j = A:i,k x B:k,j", "C:i,j = A:k,i x B:j,k"])
def test_micro_kernel(text: str, tmp_path: Path) -> None:
    """The register tile, packed panels and masked edges of a whole contraction."""
    sizes = {"i": 37, "j": 53, "k": 29}
    left, right = (part.split(":")[1].split(",") for part in text.split("= ")[1].split(" x "))
    a, w = (b.buffer(n, FLOAT32, tuple(sizes[d] for d in dims)) for n, dims in (("A", left), ("B", right)))
    out = b.buffer("C", FLOAT32, (37, 53))
    iterators = tuple(
        Iterator(n, extent, IteratorKind.REDUCTION if n == "k" else IteratorKind.PARALLEL)
        for n, extent in sizes.items()
    )
    op = StructuredOp(
        "c", iterators, b.load(out, i, j), b.load(a, *map(b.var, left)), b.load(w, *map(b.var, right))
    )  # fmt: skip
    body = ir.Block(
        (loop("i", 0, 37, loop("j", 0, 53, b.store(out, (i, j), 0.0))), lower_contraction(op, AVX2, parallel=True))
    )
    m = vectorize_module(module("contract", [a, w, out], body, written="C"))
    xs, ys, result = floats(*a.shape), floats(*w.shape), floats(37, 53)
    assert run(m, tmp_path, xs, ys, result) == 0
    subscripts = f"{''.join(left)},{''.join(right)}->ij"
    np.testing.assert_allclose(result, np.einsum(subscripts, xs, ys), rtol=1e-4, atol=1e-4)


# --- scalar types and functions ----------------------------------------------------------------------------------


INTEGERS = [d for d in DTYPES.values() if d.is_integer]


@needs_gcc
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_operators(dtype: DType, tmp_path: Path) -> None:
    x, y, out = b.buffer("x", dtype, (64,)), b.buffer("y", dtype, (64,)), b.buffer("out", dtype, (7, 64))
    ops = ("add", "sub", "mul", "div", "mod", "min", "max")
    stores = [b.store(out, (n, i), ir.Binary(op, b.load(x, i), b.load(y, i))) for n, op in enumerate(ops)]
    m = module("integers", [x, y, out], loop("i", 0, 64, b.block(*stores)))
    limits = np.iinfo(dtype.name)
    xs = rng.integers(limits.min, limits.max, 64, dtype.name, endpoint=True)
    ys = rng.integers(max(limits.min, -9), 9, 64, dtype.name, endpoint=True)
    ys[ys == 0] = 1
    xs[0], ys[0] = limits.min, limits.max if limits.min == 0 else -1
    result = np.empty((7, 64), dtype.name)
    assert run(m, tmp_path, xs, ys, result) == 0
    functions = (np.add, np.subtract, np.multiply, np.floor_divide, np.mod, np.minimum, np.maximum)
    with np.errstate(all="ignore"):
        expected = np.stack([f(xs, ys) for f in functions])
    np.testing.assert_array_equal(result, expected)


@needs_gcc
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_every_function(dtype: DType, tmp_path: Path) -> None:
    x = b.buffer("x", dtype, (32,))
    out = b.buffer("out", dtype, (len(functions_of(dtype)), 32))
    arguments = (b.load(x, i), b.add(b.load(x, i), 0.25), b.const(0.5, dtype))
    stores = [b.store(out, (n, i), b.call(f.name, *arguments[: f.arity])) for n, f in enumerate(functions_of(dtype))]
    m = module("functions", [x, out], loop("i", 0, 32, b.block(*stores)))
    xs = rng.uniform(0.05, 0.95, 32).astype(dtype.name)
    result = np.empty((len(functions_of(dtype)), 32), dtype.name)
    assert run(m, tmp_path, xs, result) == 0
    values = (xs, xs + xs.dtype.type(0.25), np.full_like(xs, 0.5))
    with np.errstate(all="ignore"):
        expected = np.stack([f.evaluate(*values[: f.arity]) for f in functions_of(dtype)])
    np.testing.assert_allclose(result, expected, rtol=3e-6 if dtype == FLOAT32 else 1e-13)


@needs_gcc
def test_minimum_maximum_and_literals_keep_nan(tmp_path: Path) -> None:
    x, out = b.buffer("x", FLOAT32, (4,)), b.buffer("out", FLOAT32, (6, 4))
    values = (
        ir.Binary("min", b.load(x, i), b.const(1.0, FLOAT32)),
        ir.Binary("max", b.const(1.0, FLOAT32), b.load(x, i)),
        b.const(float("nan"), FLOAT32),
        b.const(float("-inf"), FLOAT32),
        b.const(1e300, FLOAT32),
        b.sub(b.load(x, i), ir.Binary("sub", b.const(-0.1, FLOAT32), b.const(1.5e-7, FLOAT32))),
    )
    stores = [b.store(out, (n, i), v) for n, v in enumerate(values)]
    m = module("nans", [x, out], loop("i", 0, 4, b.block(*stores)))
    xs = np.array([np.nan, 2, -np.inf, 0.5], np.float32)
    result = np.empty((6, 4), np.float32)
    assert run(m, tmp_path, xs, result) == 0
    f = np.float32
    rows = [np.minimum(xs, f(1)), np.maximum(f(1), xs), *([v] * 4 for v in (np.nan, -np.inf, np.inf))]
    np.testing.assert_array_equal(result, np.array([*rows, xs - (f(-0.1) - f(1.5e-7))], f))


def test_literals_are_exact() -> None:
    for value in (0.1, 1 / 3, 1e-45, 3.4028235e38, 16777217.0, -2.5):
        text = print_literal(value, FLOAT32, C99).text
        assert text.endswith("f")
        assert np.float32(text[:-1]) == np.float32(value)
        assert float(print_literal(value, FLOAT64, C99).text) == value
    assert print_literal(-(2**63), INT64, C99).text == "-9223372036854775807ll - 1"
    assert print_literal(-(2**31), INT32, C99).text == "-2147483647 - 1"
    assert print_literal(2**64 - 1, UINT64, C99).text == "18446744073709551615ull"
    assert print_literal(True, BOOL, C99).text == "true"


@needs_gcc
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_small_floats(dtype: DType, tmp_path: Path) -> None:
    """Computed in float32 and rounded once, to nearest with ties to even; also as a running maximum and sum."""
    torch = pytest.importorskip("torch")
    x, out = b.buffer("x", dtype, (4, 40)), b.buffer("out", dtype, (4, 40))
    most, total = b.buffer("most", dtype, (1,)), b.buffer("total", dtype, (1,))
    wide = b.cast(b.load(x, i, j), FLOAT32)
    value = b.cast(b.mul(wide, b.const(1.1, FLOAT32)), dtype)
    body = b.block(
        b.store(out, (i, j), b.select(b.gt(b.load(x, i, j), b.const(0.5, dtype)), value, ir.Unary("neg", value))),
        b.store(most, (0,), b.load(x, i, j), op="max"),
        b.store(total, (0,), b.load(x, i, j), op="+"),
    )
    m = module("small", [x, out, most, total], loop("i", 0, 4, loop("j", 0, 40, body)))
    m = ir.Module(m.name, m.arguments, (), m.kernels, (), ("out", "most", "total"))
    kind = getattr(torch, dtype.name)
    xs = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)).to(kind)
    xs[0, 1] = torch.inf
    scaled = (xs.float() * 1.1).to(kind)
    running = torch.zeros((), dtype=kind)
    for v in xs.flatten():
        running = running + v
    bits = xs.view(torch.int16).numpy().copy()
    results = [np.zeros(s, np.int16) for s in ((4, 40), (1,), (1,))]
    assert run(m, tmp_path, bits, *results) == 0
    expected = [torch.where(xs > 0.5, scaled, -scaled), xs.max()[None], running[None]]
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got).view(kind), want, rtol=0, atol=0)


@needs_gcc
def test_casts(tmp_path: Path) -> None:
    x, out = b.buffer("x", FLOAT64, (4,)), b.buffer("out", FLOAT64, (4, 4))
    v = b.load(x, i)
    values = (b.cast(v, INT8), b.cast(b.cast(v, INT32), UINT8), b.cast(v, FLOAT16), b.cast(v, BOOL))
    stores = [b.store(out, (n, i), b.cast(value, FLOAT64)) for n, value in enumerate(values)]
    m = module("casts", [x, out], loop("i", 0, 4, b.block(*stores)))
    xs = np.array([-1.75, 0.0, 100.4, 99.9])
    result = np.empty((4, 4))
    assert run(m, tmp_path, xs, result) == 0
    rows = [xs.astype("i1"), xs.astype("i4").astype("u1"), xs.astype("f2"), xs != 0]
    np.testing.assert_array_equal(result, np.array([r.astype("f8") for r in rows]))


@needs_gcc
@pytest.mark.parametrize("dtype", [INT8, INT32, INT64, UINT8, UINT64], ids=str)
def test_floats_that_do_not_fit_saturate(dtype: DType, tmp_path: Path) -> None:
    x, out = b.buffer("x", FLOAT64, (6,)), b.buffer("out", dtype, (6,))
    m = module("saturate", [x, out], loop("i", 0, 6, b.store(out, (i,), b.cast(b.load(x, i), dtype))))
    xs, result = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 99.9]), np.empty(6, dtype.name)
    assert run(m, tmp_path, xs, result) == 0
    limits = np.iinfo(dtype.name)
    assert result.tolist() == [0, limits.max, limits.min, limits.max, limits.min, 99]


@needs_gcc
def test_float64_rounds_once_to_bfloat16(tmp_path: Path) -> None:
    x, out = b.buffer("x", FLOAT64, (5,)), b.buffer("out", BFLOAT16, (5,))
    m = module("narrow", [x, out], loop("i", 0, 5, b.store(out, (i,), b.cast(b.load(x, i), BFLOAT16))))
    tie = 1 + 2.0**-8  # halfway between 1 and the next bfloat16, which float32 hides the last three from
    xs, result = np.array([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40, 1e300]), np.empty(5, np.uint16)
    assert run(m, tmp_path, xs, result) == 0
    assert [hex(bits) for bits in result] == ["0x3f80", "0x3f81", "0x3f80", "0xbf81", "0x7f80"]


# --- the text ----------------------------------------------------------------------------------------------------


def test_whole_kernel(golden: Any) -> None:
    header = "\ndef matmul(float(M,K) a, float(K,N) w) -> (out) { out(m,n) +=! a(m,k) * w(k,n) }\nM=6 K=5 N=33"
    golden.check("matmul.c", emit_c(matmul(PARALLEL), header=header))


def test_whole_vectorized_kernel(golden: Any) -> None:
    golden.check("blend.c", emit_c(vectorize_module(blend())))


def test_header_cannot_end_the_comment() -> None:
    text = emit_c(matmul(SERIAL), header="a */ b")
    assert text.index("*/") > text.index("cc -std=c99")


def test_unused_names_and_headers_are_left_out() -> None:
    out = b.buffer("out", FLOAT32, (3,))
    text = emit_c(
        module("fill", [out], ir.Let("unused", b.const(1.0, FLOAT32), loop("i", 0, 3, b.store(out, (i,), 2.5))))
    )
    assert "unused" not in text
    assert "#include <stdint.h>" in text
    assert "math.h" not in text
    assert "stdlib.h" not in text


def test_parentheses_only_where_needed() -> None:
    out = b.buffer("out", INT64, (9,))
    value = ir.Binary("sub", i, ir.Binary("sub", b.mul(b.add(i, 1), 2), j))
    text = emit_c(module("level", [out], loop("i", 0, 3, loop("j", 0, 3, b.store(out, (b.add(i, -1),), value)))))
    assert "out[i - 1] = i - ((i + 1) * 2 - j);" in text


def test_intrinsics_are_refused() -> None:
    out = b.buffer("out", FLOAT32, (3,))
    with pytest.raises(CannotLower, match="mma"):
        emit_c(module("tile", [out], ir.Invoke("mma", ((out, (b.const(0),)),))))


@needs_gcc
def test_prefetches(tmp_path: Path) -> None:
    """Printed where they run once for a row, and left out of loops over its elements."""
    x, at, out = b.buffer("x", FLOAT32, (9, 16)), b.buffer("at", INT64, (9,)), b.buffer("out", FLOAT32, (9, 16))
    place = (b.load(at, b.minimum(b.add(i, 2), 8)), b.const(0))
    hint = ir.Invoke("prefetch", ((x, place),), (0,))
    copy = b.store(out, (i, j), b.load(x, b.load(at, i), j))
    for body in (b.block(hint, loop("j", 0, 16, copy, VECTOR)), loop("j", 0, 16, b.block(hint, copy), VECTOR)):
        m = module("rows", [x, at, out], loop("i", 0, 9, body))
        values, order, result = floats(9, 16), rng.integers(0, 9, 9), np.zeros((9, 16), np.float32)
        assert run(m, tmp_path, values, order, result) == 0
        np.testing.assert_array_equal(result, values[order])
        assert ("__builtin_prefetch(&x[at[" in emit_c(m)) == isinstance(body, ir.Block)


@needs_gcc
@pytest.mark.parametrize("dtype", [FLOAT32, BOOL, UINT8, FLOAT64], ids=str)
def test_shuffles(dtype: DType, tmp_path: Path) -> None:
    """Bound to a name, stored at once, one inside the other and under a reduction."""
    x, out = b.buffer("x", dtype, (16,)), b.buffer("out", dtype, (12,))
    first, second = b.load(x, b.ramp(0, 1, 8)), b.load(x, b.ramp(8, 1, 8))
    mixed = b.shuffle(first, second, (0, 15, 3, 8))
    swapped = b.shuffle(b.shuffle(second, first, (7, 6, 8, 9)), mixed, (3, 2, 4, 5))
    total = b.reduce_lanes("or" if dtype.is_bool else "max", b.shuffle(first, first, (1, 2)))
    where = [(b.ramp(n, 1, 4),) for n in (0, 4, 8)]
    body = b.block(
        ir.Let("v", mixed, b.store(out, where[0], b.var("v", dtype, 4))),
        b.store(out, where[1], swapped),
        b.store(out, where[2], total),
    )
    m = module("shuffles", [x, out], body)
    values = rng.integers(0, 2, 16).astype(bool) if dtype.is_bool else rng.integers(0, 99, 16).astype(dtype.name)
    result, expected = np.zeros(12, dtype.name), np.zeros(12, dtype.name)
    assert run(m, tmp_path, values, result) == 0
    interpret(m, {"x": values, "out": expected})
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(expected[:4], values[[0, 15, 3, 8]])
    np.testing.assert_array_equal(expected[4:8], [values[1], values[0], values[0], values[15]])
    np.testing.assert_array_equal(expected[8:], [max(values[1], values[2])] * 4)
