"""A tensor-core product by hand: verified, interpreted, emulated, compiled; planted faults are reported or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.dtypes import BFLOAT16, FLOAT16, DType
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.passes.simplify import simplify
from tensor_comprehensions.loop_ir.rewrite import map_stmt
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers.tile_gemm import gemm

Array = np.ndarray[Any, Any]
SEED = 4
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")

CASES = [
    (FLOAT16, 64, 64, 64, 32, True),
    (BFLOAT16, 64, 64, 64, 32, True),
    (FLOAT16, 128, 64, 96, 32, True),
    (FLOAT16, 64, 64, 128, 64, True),
    (BFLOAT16, 64, 128, 48, 16, True),
    (FLOAT16, 64, 64, 64, 32, False),
]
MODULES = {"-".join(map(str, c)): gemm(*c[:5], swizzled=c[5]) for c in CASES}
KERNEL = MODULES["float16-64-64-64-32-True"].kernels[0]
MODULES["simplified"] = replace(
    MODULES["float16-64-64-64-32-True"], kernels=(replace(KERNEL, body=simplify(KERNEL.body)),)
)


def arrays_of(m: ir.Module, *, bits: bool) -> tuple[dict[str, Array], Array]:
    """Small whole numbers, whose sums are exact, and what must come out. bits: bfloat16 as bits, else in float32."""
    rng, arrays = np.random.default_rng(SEED), {}
    for a in m.arguments:
        arrays[a.name] = rng.integers(-3, 4, a.shape).astype(np.float32)
    expected = arrays["A"] @ arrays["B"].T
    dtype = m.arguments[0].type.dtype
    return {n: convert_to_storage(x, dtype, bits=bits) for n, x in arrays.items()}, convert_to_storage(
        expected, dtype, bits=bits
    )


def convert_to_storage(x: Array, dtype: DType, *, bits: bool) -> Array:
    if dtype == FLOAT16:
        return x.astype(np.float16)
    exact = x.view(np.uint32)
    rounded = exact + 0x7FFF + ((exact >> 16) & 1)
    return (rounded >> 16).astype(np.uint16) if bits else (rounded & 0xFFFF0000).view(np.float32)


@pytest.mark.sampled  # the emulator runs all
@pytest.mark.parametrize("name", MODULES)
def test_interpreter(name: str) -> None:
    m = MODULES[name]
    verify(m)
    arrays, expected = arrays_of(m, bits=False)
    arrays["C"][...] = 0
    assert interpret(m, arrays) == []
    np.testing.assert_array_equal(arrays["C"], expected, err_msg=f"seed {SEED}")


@needs_compiler
def test_emulator() -> None:
    built = emulator.build_emulated([emit_cuda(m) for m in MODULES.values()])
    for m, emulated in zip(MODULES.values(), built, strict=True):
        arrays, expected = arrays_of(m, bits=True)
        arrays["C"][...] = 0
        assert emulator.run_emulated_module(emulated, m, arrays) == (0, 0)
        np.testing.assert_array_equal(arrays["C"], expected, err_msg=f"seed {SEED}")


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", MODULES)
def test_compiles_without_spills(name: str, architecture: str) -> None:
    resources = nvrtc.compile_text(emit_cuda(MODULES[name]).source, architecture).resources["gemm"]
    assert (resources.local, resources.spill_stores, resources.spill_loads) == (0, 0, 0)
    assert resources.registers <= 128


def test_the_text_reads_like_this() -> None:
    text = emit_cuda(MODULES["float16-64-64-64-32-True"]).source
    assert "__shared__ __align__(16) __half sA[2][64][32];" in text
    assert "mma_m16n8k16_f32_f16(&acc[0][0][0], &left[0][0], &right[0][0]);" in text
    assert "ldmatrix_x4(&left[1][0], &sA[t % 2][" in text
    assert text.count("#ifndef TC_MACHINE") == 2
    assert "/ 2 % 4 * 8]" in text


# --- planted faults ----------------------------------------------------------------------------------------------


def change_statements(m: ir.Module, change: Callable[[ir.Stmt], ir.Stmt]) -> ir.Module:
    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        return change(map_stmt(s, lambda e: e, on_stmt))

    (kernel,) = m.kernels
    return replace(m, kernels=(replace(kernel, body=on_stmt(kernel.body)),))


def without(name: str) -> Callable[[ir.Stmt], ir.Stmt]:
    return lambda s: b.block() if isinstance(s, ir.Invoke) and s.name == name else s


def lax(s: ir.Stmt) -> ir.Stmt:
    return replace(s, attributes=(2,)) if isinstance(s, ir.Invoke) and s.name == "wait_async" else s


def move_row(s: ir.Stmt) -> ir.Stmt:
    """A row of ldmatrix begins in the middle of 16 bytes."""
    if not isinstance(s, ir.Invoke) or s.name != "ldmatrix_x4" or s.operands[1][0].name != "sB":
        return s
    registers, (memory, (stage, row, column)) = s.operands
    return replace(s, operands=(registers, (memory, (stage, row, b.minimum(b.add(column, 4), 24)))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("barrier"), r"race: .* s[AB]|undefined: .* s[AB]|race in loop threads: .* s[AB]|s[AB].* undefined"),
        (lax, "undefined"),
        (move_row, "misaligned: .*sB"),
    ],
    ids=["barrier", "wait", "alignment"],
)
def test_planted_faults_are_reported(change: Callable[[ir.Stmt], ir.Stmt], message: str) -> None:
    m = change_statements(MODULES["float16-64-64-64-32-True"], change)
    with pytest.raises(InternalError, match=message):
        interpret(m, arrays_of(m, bits=False)[0])
    if emulator.is_emulator_available():
        with pytest.raises(InternalError, match=message):
            emulator.run_emulated_code(emit_cuda(m), m, arrays_of(m, bits=True)[0])


def divergent(s: ir.Stmt) -> ir.Stmt:
    if isinstance(s, ir.Invoke) and s.name == "ldmatrix_x4":
        return ir.If(b.lt(b.var("lane"), 16), s)
    return s


def narrow(s: ir.Stmt) -> ir.Stmt:
    if isinstance(s, ir.Invoke) and s.name.startswith("mma"):
        total, (left, (i, _)), right = s.operands
        return replace(s, operands=(total, (left, (i, b.const(1))), right))
    return s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (divergent, "not all of 32 threads come to ldmatrix_x4"),
        (narrow, "dimension 1 of left.* is not proved inside"),
    ],
)
def test_planted_faults_are_refused(change: Callable[[ir.Stmt], ir.Stmt], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        verify(change_statements(MODULES["float16-64-64-64-32-True"], change))


@pytest.mark.parametrize(
    ("swizzle", "message"),
    [
        ((3, 3, 3), "leaves rows of 32 elements"),
        ((2, 3, 1), "its bits overlap"),
        ((2, 2, 3), "divides rows"),
    ],
)
def test_swizzles_that_do_not_fit_are_refused(swizzle: tuple[int, int, int], message: str) -> None:
    m = MODULES["float16-64-64-64-32-True"]
    (kernel,) = m.kernels

    def buffer(x: ir.Buffer) -> ir.Buffer:
        return replace(x, swizzle=swizzle) if x.space is ir.Space.SHARED else x

    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        s = map_stmt(s, lambda e: e, on_stmt)
        if isinstance(s, ir.Allocate):
            return replace(s, buffers=tuple(map(buffer, s.buffers)))
        if isinstance(s, ir.Invoke):
            return replace(s, operands=tuple((buffer(x), where) for x, where in s.operands))
        return s

    with pytest.raises(InternalError, match=message):
        verify(replace(m, kernels=(replace(kernel, body=on_stmt(kernel.body)),)))
