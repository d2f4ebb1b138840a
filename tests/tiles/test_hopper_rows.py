"""The rows of Hopper on random bits: interpreter = emulator = NumPy; descriptors lead to the bytes of their tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.dtypes import (
    FLOAT16,
    FLOAT32,
    INT8,
    UINT16,
)
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.matrix_descriptor import MatrixPlacement, matrix_placement, swizzle_of
from tensor_comprehensions.loop_ir.rewrite import map_stmt
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.tiles.lower.descriptors import descriptor

from ..helpers.atom_cases import arrays_of
from ..helpers.hopper_cases import SEED, ZERO, cases, wide
from ..helpers.tile_gemm_hopper import make_shared_buffer, swizzle_buffer

needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")


@pytest.mark.sampled  # the emulator runs all
@pytest.mark.parametrize("name", cases())
def test_interpreter(name: str) -> None:
    c = cases()[name]
    verify(c.module)
    arrays = {a.name: wide(arrays_of(c)[a.name], a) for a in c.module.arguments}
    assert interpret(c.module, arrays) == []
    np.testing.assert_array_equal(arrays["out"], c.expected, err_msg=f"seed {SEED}")


@needs_compiler
def test_emulator() -> None:
    built = emulator.build_emulated([emit_cuda(c.module) for c in cases().values()])
    for c, one in zip(cases().values(), built, strict=True):
        arrays = arrays_of(c)
        assert emulator.run_emulated_module(one, c.module, arrays) == (0, 0)
        np.testing.assert_array_equal(arrays["out"], c.expected, err_msg=f"{c.module.name}, seed {SEED}")


def without_fence(s: ir.Stmt) -> ir.Stmt:
    return b.block() if isinstance(s, ir.Invoke) and s.name == "fence_async" else s


def overwrite_stored(s: ir.Stmt) -> ir.Stmt:
    """What is being stored is written again, with no wait between."""
    if not isinstance(s, ir.Invoke) or s.name != "bulk_wait":
        return s
    tile = swizzle_buffer(make_shared_buffer("s", UINT16, 16, 64), swizzle_of(128, 2))
    return b.store(tile, (ZERO, ZERO), b.const(3, UINT16))


def move_box(s: ir.Stmt) -> ir.Stmt:
    """The box begins in the middle of the swizzle's pattern."""
    if not isinstance(s, ir.Invoke) or not s.name.startswith("tma_load"):
        return s
    (tile, _), *rest = s.operands
    return replace(s, operands=((tile, (b.const(4), ZERO)), *rest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_fence, r"fence: .* s\["),
        (overwrite_stored, r"race: .* s\[.*stores of boxes of warp 0"),
        (move_box, r"misaligned: .*s\[|dimension 1 of s|out of bounds"),
    ],
)
def test_faults_around_boxes(change: Callable[[ir.Stmt], ir.Stmt], message: str) -> None:
    c = cases()["box_2_128"]

    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        return change(map_stmt(s, lambda e: e, on_stmt))

    (kernel,) = c.module.kernels
    m = replace(c.module, kernels=(replace(kernel, body=on_stmt(kernel.body)),))
    with pytest.raises(InternalError, match=message):
        interpret(m, arrays_of(c))
    if emulator.is_emulator_available():
        with pytest.raises(InternalError, match=message):
            emulator.run_emulated_code(emit_cuda(m), m, arrays_of(c))


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name", ["box_5_0", "wgmma_m64n128k16_f32_bf16_registers_across", "wgmma_m64n24k32_s32_s8"])
def test_calls_compile(name: str) -> None:
    resources = nvrtc.compile_text(emit_cuda(cases()[name].module).source, "sm_90a").resources
    assert {r.spill_stores for r in resources.values()} == {0}


@pytest.mark.parametrize("width", [128, 64, 32])
def test_placements_are_those_of_descriptors(width: int) -> None:
    """`tiles.lower.descriptors` proves, byte by byte, where its descriptors lead."""
    for dtype in (INT8, FLOAT16, FLOAT32):
        columns = width // dtype.size
        tile = swizzle_buffer(make_shared_buffer("s", dtype, 2, 64, columns), swizzle_of(width, dtype.size))
        expected = descriptor(major="K", swizzle=width, address=0, bits=dtype.bits).value
        assert _value(matrix_placement(tile, across=False)) == expected
    tile = swizzle_buffer(make_shared_buffer("s", FLOAT16, 4, 64, width // 2), swizzle_of(width, 2))
    expected = descriptor(major="MN", swizzle=width, address=0, rows=64).value
    assert _value(matrix_placement(tile, across=True)) == expected


def _value(p: MatrixPlacement | str) -> int:
    assert isinstance(p, MatrixPlacement), p
    return p.leading << 16 | p.stride << 32 | p.mode << 62
