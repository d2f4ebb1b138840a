"""The CUDA text computes what the loop program means, reads well, and NVRTC takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tensor_comprehensions.codegen.c.expressions import print_literal
from tensor_comprehensions.codegen.gpu import cuda_printer, opencl_printer
from tensor_comprehensions.codegen.gpu.cuda_printer import C as DIALECT
from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.dtypes import (
    BFLOAT16,
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
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.runtime import opencl as opencl_runtime
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers.functions_of_types import functions_of
from ..helpers.gpu_programs import BX, PROGRAMS, TX, gather, kernel, loop, row_sums, staged_copy, tiled_matmul

needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
needs_opencl = pytest.mark.skipif(not opencl_runtime.is_opencl_available(), reason="running OpenCL needs a device")
SHARED, REGISTER = ir.Space.SHARED, ir.Space.REGISTER
i = b.var("i")
rng = np.random.default_rng(0)


def single(name: str, arguments: list[ir.Buffer], body: ir.Stmt) -> ir.Module:
    """A module of one thread."""
    return ir.Module(name, tuple(arguments), (), (ir.Kernel(name, body),), (), ("out",))


def build_module(
    arguments: list[ir.Buffer], body: ir.Stmt, threads: tuple[int, int, int] = (32, 1, 1), grid: int = 1
) -> ir.Module:
    return ir.Module("k", tuple(arguments), (), (kernel("k", body, (grid, 1, 1), threads),), (), ("out",))


def run(m: ir.Module, arrays: dict[str, np.ndarray]) -> None:
    assert emulator.run_emulated_code(emit_cuda(m), m, arrays) == (0, 0)


def body_of(m: ir.Module) -> str:
    return emit_cuda(m).source


# --- types and functions, through the emulator and NVRTC ---------------------------------------------------------


def operators(dtype: DType) -> ir.Module:
    x, y, out = b.buffer("x", dtype, (64,)), b.buffer("y", dtype, (64,)), b.buffer("out", dtype, (7, 64))
    ops = ("add", "sub", "mul", "div", "mod", "min", "max")
    stores = [b.store(out, (n, i), ir.Binary(op, b.load(x, i), b.load(y, i))) for n, op in enumerate(ops)]
    return single(f"operators_{dtype}", [x, y, out], loop("i", 64, b.block(*stores)))


def functions(dtype: DType) -> ir.Module:
    x, out = b.buffer("x", dtype, (32,)), b.buffer("out", dtype, (len(functions_of(dtype)), 32))
    arguments = (b.load(x, i), b.add(b.load(x, i), 0.25), b.const(0.5, dtype))
    stores = [b.store(out, (n, i), b.call(f.name, *arguments[: f.arity])) for n, f in enumerate(functions_of(dtype))]
    return single(f"functions_{dtype}", [x, out], loop("i", 32, b.block(*stores)))


def casts(source: DType) -> ir.Module:
    x = b.buffer("x", source, (8,))
    targets = [t for t in DTYPES.values() if t != source]
    outs = [b.buffer(f"to_{t}", t, (8,)) for t in targets]
    stores = [b.store(o, (i,), b.cast(b.load(x, i), t)) for o, t in zip(outs, targets, strict=True)]
    module = single(f"casts_{source}", [x, *outs], loop("i", 8, b.block(*stores)))
    return ir.Module(module.name, module.arguments, (), module.kernels, (), tuple(o.name for o in outs))


TYPES = [d for d in DTYPES.values() if d.is_integer] + [FLOAT32, FLOAT64]


@needs_nvrtc
def test_nvrtc_takes_every_operator_function_and_cast() -> None:
    modules = [*map(operators, TYPES), functions(FLOAT32), functions(FLOAT64), *map(casts, DTYPES.values())]
    for m in modules:
        assert nvrtc.compile_text(emit_cuda(m).source, "sm_80").resources


@needs_compiler
def test_integer_operators() -> None:
    kinds = [d for d in DTYPES.values() if d.is_integer]
    modules = [operators(d) for d in kinds]
    ops = (np.add, np.subtract, np.multiply, np.floor_divide, np.mod, np.minimum, np.maximum)
    for dtype, m, emulated in zip(
        kinds, modules, emulator.build_emulated([emit_cuda(m) for m in modules]), strict=True
    ):
        limits = np.iinfo(dtype.name)
        xs = rng.integers(limits.min, limits.max, 64, dtype.name, endpoint=True)
        ys = rng.integers(max(limits.min, -9), 9, 64, dtype.name, endpoint=True)
        ys[ys == 0] = 1
        xs[0], ys[0] = limits.min, limits.max if limits.min == 0 else -1
        result = np.zeros((7, 64), dtype.name)
        assert emulator.run_emulated_module(emulated, m, {"x": xs, "y": ys, "out": result}) == (0, 0)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(result, np.stack([f(xs, ys) for f in ops]), err_msg=str(dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_every_function(dtype: DType) -> None:
    m, arrays = functions(dtype), arrays_of_functions(dtype)
    run(m, arrays)
    check_functions(dtype, arrays)


@needs_opencl
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_every_function_by_opencl(dtype: DType) -> None:
    m, arrays = functions(dtype), arrays_of_functions(dtype)
    assert opencl_runtime.run_opencl(opencl_printer.emit_opencl(m), m, arrays) == (0, 0)
    check_functions(dtype, arrays)


def arrays_of_functions(dtype: DType) -> dict[str, np.ndarray]:
    return {
        "x": rng.uniform(0.05, 0.95, 32).astype(dtype.name),
        "out": np.zeros((len(functions_of(dtype)), 32), dtype.name),
    }


def check_functions(dtype: DType, arrays: dict[str, np.ndarray]) -> None:
    xs, result = arrays["x"], arrays["out"]
    values = (xs, xs + xs.dtype.type(0.25), np.full_like(xs, 0.5))
    with np.errstate(all="ignore"):
        expected = np.stack([f.evaluate(*values[: f.arity]) for f in functions_of(dtype)])
    np.testing.assert_allclose(result, expected, rtol=3e-6 if dtype == FLOAT32 else 1e-13)


@needs_compiler
def test_floats_that_do_not_fit_saturate() -> None:
    xs = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 99.9, -0.5, 0.0])
    m = casts(FLOAT64)
    arrays: dict[str, Any] = {a.name: np.zeros(8, {"bfloat16": "uint16"}.get(a.type.dtype.name, a.type.dtype.name))
                              for a in m.arguments}  # fmt: skip
    arrays["x"] = xs
    run(m, arrays)
    for dtype in (INT8, INT32, INT64, UINT8, UINT64):
        limits = np.iinfo(dtype.name)
        assert arrays[f"to_{dtype}"].tolist()[:6] == [0, limits.max, limits.min, limits.max, limits.min, 99], dtype
    assert arrays["to_bool"].tolist() == [True] * 7 + [False]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(arrays["to_float16"], xs.astype(np.float16))


@needs_compiler
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_small_floats(dtype: DType) -> None:
    """Computed in float32 and rounded once; also as a running maximum and sum."""
    x, out = b.buffer("x", dtype, (40,)), b.buffer("out", dtype, (40,))
    most, total = b.buffer("most", dtype, (1,)), b.buffer("total", dtype, (1,))
    value = b.cast(b.mul(b.cast(b.load(x, i), FLOAT32), b.const(1.1, FLOAT32)), dtype)
    body = b.block(
        b.store(out, (i,), b.select(b.gt(b.load(x, i), b.const(0.5, dtype)), value, ir.Unary("neg", value))),
        b.store(most, (0,), b.load(x, i), op="max"),
        b.store(total, (0,), b.load(x, i), op="+"),
    )
    m = ir.Module(
        "small", (x, out, most, total), (), (ir.Kernel("small", loop("i", 40, body)),), (), ("out", "most", "total")
    )
    kind = getattr(torch, dtype.name)
    xs = torch.randn(40, generator=torch.Generator().manual_seed(0)).to(kind)
    running = torch.zeros((), dtype=kind)
    for v in xs:
        running = running + v
    arrays = {
        "x": xs.view(torch.int16).numpy(),
        **{n: np.zeros(s, np.int16) for n, s in (("out", 40), ("most", 1), ("total", 1))},
    }
    run(m, arrays)
    scaled = (xs.float() * 1.1).to(kind)
    wanted = {
        "out": torch.where(xs > 0.5, scaled, -scaled),
        "most": xs.max()[None].clamp(min=0),
        "total": running[None],
    }
    for name, expected in wanted.items():
        torch.testing.assert_close(torch.from_numpy(arrays[name]).view(kind), expected, rtol=0, atol=0)


@needs_compiler
@needs_nvrtc
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 1e300, -0.0, 1e-45, 0.1])
def test_literals(value: float) -> None:
    out = b.buffer("out", FLOAT32, (1,))
    m = single("literal", [out], b.store(out, (0,), b.const(value, FLOAT32)))
    array = np.ones(1, np.float32)
    run(m, {"out": array})
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(array, np.float32([value]))
    assert nvrtc.compile_text(emit_cuda(m).source, "sm_80").binary
    assert print_literal(0.1, FLOAT32, DIALECT).text == "0.1f"


# --- index arithmetic --------------------------------------------------------------------------------------------


def test_indices_have_32_bits_where_that_suffices() -> None:
    n = 1 << 20
    x, out = ir.Buffer("x", ir.Type(FLOAT32), (n, 4096), (1, n)), b.buffer("out", FLOAT32, (n,))
    body = b.store(out, (b.add(b.mul(BX, 1024), TX),), b.load(x, b.add(b.mul(BX, 1024), TX), b.const(7)))
    text = body_of(build_module([x, out], body, (1024, 1, 1), 1024))
    assert "const int bx = blockIdx.x;" in text
    assert "out[bx * 1024 + tx] = x[(long long)(bx * 1024 + tx) + 7340032];" in text
    small = ir.Buffer("x", ir.Type(FLOAT32), (n, 4), (1, n))
    text = body_of(build_module([small, out], b.store(out, (TX,), b.load(small, TX, b.const(3)))))
    assert "x[tx + 3145728]" in text


def test_products_beyond_32_bits_have_64() -> None:
    out = b.buffer("out", INT64, (8,))
    j = b.mul(b.add(i, 5), 1 << 30)
    text = body_of(single("wide", [out], loop("i", 8, b.store(out, (i,), j))))
    assert "for (int i = 0; i < 8; ++i)" in text
    assert "out[i] = (long long)(i + 5) * 1073741824;" in text
    index = b.load(out, i)
    text = body_of(single("data", [out], loop("i", 8, b.store(out, (i,), b.minimum(index, b.mul(i, 3))))))
    assert "min(out[i], (long long)(i * 3))" in text


@needs_compiler
def test_loops_over_more_than_32_bits_tell() -> None:
    """Loop variables that do not fit have 64 bits; divisions of what may be negative round down."""
    out = b.buffer("out", INT64, (6,))
    start = (1 << 33) - 1
    body = b.store(out, (b.sub(i, b.const(start)),), b.div(b.sub(b.const(start + 3), i), 2))
    m = single("far", [out], ir.Loop("i", b.const(start), b.const(start + 6), body))
    assert "for (long long i = 8589934591ll;" in body_of(m)
    array = np.zeros(6, np.int64)
    run(m, {"out": array})
    assert array.tolist() == [1, 1, 0, 0, -1, -1]
    near = single("near", [out], loop("i", 6, b.store(out, (i,), b.add(b.div(b.sub(i, 3), 2), b.mod(b.add(i, 1), 4)))))
    assert "floor_div_int32(i - 3, 2) + (i + 1) % 4" in body_of(near)
    run(near, {"out": array})
    assert array.tolist() == [(k - 3) // 2 + (k + 1) % 4 for k in range(6)]


# --- vectors -----------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "lanes"), [(FLOAT32, 4), (FLOAT32, 2), (FLOAT64, 2), (FLOAT16, 8), (INT8, 4), (INT64, 2)]
)
def test_wide_copies(dtype: DType, lanes: int) -> None:
    p = staged_copy(dtype, lanes)
    text = emit_cuda(p.module).source
    assert text.count("*reinterpret_cast<") == 2
    out = np.zeros_like(p.inputs["x"])
    run(p.module, {"x": p.inputs["x"], "out": out})
    np.testing.assert_array_equal(out, p.expected["out"])


@needs_compiler
@needs_nvrtc
def test_wide_reads_into_registers_and_of_what_is_computed() -> None:
    x, out = b.buffer("x", FLOAT32, (8, 36)), b.buffer("out", FLOAT32, (8, 36))
    regs = b.buffer("r", FLOAT32, (4,), REGISTER)
    lanes = b.ramp(b.mul(i, 4), 1, 4)
    fill = ir.Store(regs, (b.ramp(0, 1, 4),), ir.Load(x, (TX, lanes)))
    double = ir.Binary("add", ir.Load(x, (TX, lanes)), b.broadcast(b.load(regs, 3), 4))
    body = ir.Allocate((regs,), loop("i", 9, b.block(fill, ir.Store(out, (TX, lanes), double))))
    m = build_module([x, out], body, (8, 1, 1))
    text = body_of(m)
    assert "const float4 x_1 = *reinterpret_cast<const float4 *>(&x[tx][i * 4]);" in text
    assert "r[3] = x_1.w;" in text
    assert "make_float4(x_1.x + r[3], x_1.y + r[3], x_1.z + r[3], x_1.w + r[3]);" in text
    values = rng.standard_normal((8, 36)).astype(np.float32)
    result = np.zeros((8, 36), np.float32)
    run(m, {"x": values, "out": result})
    np.testing.assert_array_equal(result, values + np.repeat(values[:, 3::4], 4, axis=1))
    assert nvrtc.compile_text(text, "sm_80").resources["k"].local == 0


@pytest.mark.parametrize(
    ("columns", "index", "wide"),
    [(36, b.mul(TX, 4), True), (36, b.add(b.mul(TX, 4), 4), True), (36, TX, False), (34, b.mul(TX, 4), False),
     (36, b.add(b.mul(TX, 4), 2), False)],
)  # fmt: skip
def test_wide_only_where_aligned(columns: int, index: ir.Expr, wide: bool) -> None:
    x, out = b.buffer("x", FLOAT32, (9, columns)), b.buffer("out", FLOAT32, (9, 64))
    m = build_module([x, out], ir.Store(out, (BX, b.ramp(b.mul(TX, 4), 1, 4)), ir.Load(x, (BX, b.ramp(index, 1, 4)))))
    assert ("const float4" in body_of(m)) == wide
    assert "float4" not in emit_cuda(m, aligned=False).source


# --- the text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiled", "sums", "staged", "half", "gather"])
def test_whole_kernels(name: str, golden: Any) -> None:
    header = "\ndef f(...) -> (...) { ... }\nsizes: ..."
    golden.check(f"{name}.cu", emit_cuda(PROGRAMS[name]().module, header=header).source)


def test_whole_opencl_kernel(golden: Any) -> None:
    golden.check("sums.cl", opencl_printer.emit_opencl(row_sums().module).source)


def test_the_identity_mapping_is_plain(golden: Any) -> None:
    text = emit_cuda(PROGRAMS["identity"]().module).source
    golden.check("identity.cu", text)
    assert "threadIdx" not in text


def test_names_that_the_language_has() -> None:
    """Tensors and kernels called as CUDA's own things, or as each other."""
    names = ("threadIdx", "float4", "__half2float", "tx", "min", "template", "dynamic_shared")
    buffers = [b.buffer(n, FLOAT32, (8,)) for n in names]
    body = b.block(*[b.store(buffers[0], (TX,), b.load(x, TX)) for x in buffers])
    m = ir.Module("atomicAdd", tuple(buffers), (), (kernel("exp", body, (1, 1, 1), (8, 1, 1)),) * 1, (), ("threadIdx",))
    text = emit_cuda(m).source
    assert "exp_1(" in text
    assert "float *__restrict__ threadIdx_1" in text
    assert "const float *__restrict__ tx," in text
    assert "const int tx_1 = threadIdx.x;" in text
    if nvrtc.is_nvrtc_available():
        assert nvrtc.compile_text(text, "sm_80").binary


def test_header_cannot_end_the_comment() -> None:
    text = emit_cuda(row_sums().module, header="a */ b /* c").source
    assert text.index("*/") > text.index("c\n")


def test_too_much_shared_memory_for_a_text() -> None:
    big = b.buffer("big", FLOAT32, (20000,), SHARED)
    out = b.buffer("out", FLOAT32, (32,))
    body = ir.Allocate((big,), b.block(b.store(big, (TX,), 1.0), b.store(out, (TX,), b.load(big, TX))))
    code = emit_cuda(build_module([out], body))
    assert code.kernels[0].dynamic == 80000
    assert code.kernels[0].shared == 0
    assert "float *big = reinterpret_cast<float *>(dynamic_shared + 0);" in code.source


def test_what_cannot_be_spelled() -> None:
    out = b.buffer("out", FLOAT32, (8,))
    with pytest.raises(CannotLower, match="mma"):
        emit_cuda(build_module([out], ir.Invoke("mma", ((out, (TX,)),))))
    product = ir.Store(out, (TX,), b.const(2.0, FLOAT32), "*", atomic=True)
    with pytest.raises(CannotLower, match="atomic"):
        emit_cuda(build_module([out], product))
    check = ir.Check(b.lt(TX, 9), 0, TX)
    both = b.block(check, ir.Invoke("barrier", ()))
    with pytest.raises(CannotLower, match="barriers"):
        emit_cuda(
            ir.Module("k", (out,), (), (kernel("k", both, (1, 1, 1), (8, 1, 1)),), (ir.CheckSite("out", 0, 8),), ())
        )


# --- NVRTC -------------------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_named_architectures(architecture: str) -> None:
    for make in PROGRAMS.values():
        code = emit_cuda(make().module)
        cubin = nvrtc.compile_text(code.source, architecture)
        assert cubin.binary[:4] == b"\x7fELF"
        for k in code.kernels:
            report = cubin.resources[k.name]
            assert 8 <= report.registers <= 255
            assert report.spill_loads == report.spill_stores == report.local == 0
            assert report.shared in range(k.shared - 16, k.shared + 1)


@needs_nvrtc
def test_what_nvrtc_refuses() -> None:
    with pytest.raises(InternalError, match=r"(?s)identifier \"nonsense\".*1  nonsense"):
        nvrtc.compile_text("nonsense x;", "sm_80")
    with pytest.raises(nvrtc.ArgumentError, match="does not compile for sm_20"):
        nvrtc.compile_text("", "sm_20")


@needs_nvrtc
def test_local_memory_is_reported() -> None:
    x, out = b.buffer("x", FLOAT32, (64, 32)), b.buffer("out", INT64, (32,))
    array = b.buffer("array", FLOAT32, (64,), ir.Space.SCRATCH)
    j = b.var("j")
    fill = loop("i", 64, b.store(array, (i,), 0.0))
    data = b.cast(b.load(x, j, TX), INT64)
    sums = loop("j", 64, b.store(array, (b.mod(data, 64),), b.load(x, j, TX), op="+"))
    last = b.store(out, (TX,), b.cast(b.load(array, b.mod(b.load(out, TX), 64)), INT64))
    report = nvrtc.compile_text(
        emit_cuda(build_module([x, out], ir.Allocate((array,), b.block(fill, sums, last)))).source, "sm_90"
    )
    assert report.resources["k"].local >= 256


# --- OpenCL ------------------------------------------------------------------------------------------------------


@needs_opencl
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "gather"])
def test_results_by_opencl(name: str) -> None:
    p = PROGRAMS[name]()
    arrays = {a.name: p.inputs[a.name].copy() if a.name in p.inputs else np.zeros(a.shape, a.type.dtype.name)
              for a in p.module.arguments}  # fmt: skip
    assert opencl_runtime.run_opencl(opencl_printer.emit_opencl(p.module), p.module, arrays) == (0, 0)
    for tensor, expected in p.expected.items():
        np.testing.assert_array_equal(arrays[tensor], expected)


@needs_opencl
def test_failed_check_by_opencl() -> None:
    p = gather()
    module = ir.Module("check", p.module.arguments, (), p.module.kernels[:1], p.module.sites, ())
    index = p.inputs["index"].copy()
    index[2] = -4
    arrays = {**p.inputs, "index": index, "out": np.zeros(6, np.float32)}
    assert opencl_runtime.run_opencl(opencl_printer.emit_opencl(module), module, arrays) == (1, -4)


def test_opencl_has_no_float_atomics() -> None:
    with pytest.raises(CannotLower, match="OpenCL has no atomic"):
        opencl_printer.emit_opencl(gather().module)


def test_wide_shared_tiles_print_the_padding() -> None:
    text = cuda_printer.emit_cuda(tiled_matmul(wide=True).module).source
    assert "float A_shared[16][20];" in text
