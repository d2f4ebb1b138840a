"""Swizzled shared memory keeps its meaning, whatever the width of the accesses; the swizzle itself is an involution."""

from __future__ import annotations

import numpy as np
import pytest

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.swizzled_buffer import column_key, swizzle_fault, swizzle_offset
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.runtime.emulate import emulator

TX, STAGE = b.var(ir.THREAD[0]), b.const(1)
SWIZZLES = [(3, 2, 3), (2, 2, 4), (1, 3, 2), (3, 1, 4), (2, 0, 5), (0, 2, 3)]


def make_shared_buffer(swizzle: tuple[int, int, int] | None, shape: tuple[int, ...] = (2, 64, 32)) -> ir.Buffer:
    strides = tuple(int(np.prod(shape[n + 1 :])) for n in range(len(shape)))
    return ir.Buffer("s", ir.Type(FLOAT32), shape, strides, ir.Space.SHARED, swizzle=swizzle)


def transposition(swizzle: tuple[int, int, int] | None) -> ir.Module:
    """Rows are written four elements at a time, columns read one by one."""
    s, source, out = make_shared_buffer(swizzle), b.buffer("x", FLOAT32, (64, 32)), b.buffer("out", FLOAT32, (32, 64))
    quad = b.ramp(b.mul(b.var("c"), 4), 1, 4)
    write = ir.Store(s, (STAGE, TX, quad), ir.Load(source, (TX, quad)))
    column = b.store(out, (b.mod(TX, 32), b.var("i")), b.load(s, STAGE, b.var("i"), b.mod(TX, 32)))
    body = b.block(
        b.loops([("c", 8)], write),
        ir.Invoke("barrier", ()),
        ir.If(b.lt(TX, 32), b.loops([("i", 64)], column)),
    )
    kernel = ir.Kernel("turn", b.allocate([s], body), ir.Launch((1, 1, 1), (64, 1, 1)))
    return ir.Module("turn", (source, out), (), (kernel,), (), ("out",))


def arrays() -> dict[str, np.ndarray]:
    x = np.random.default_rng(3).random((64, 32), np.float32)
    return {"x": x, "out": np.zeros((32, 64), np.float32)}


@pytest.mark.parametrize("swizzle", SWIZZLES, ids=str)
def test_columns_move_as_the_offsets_do(swizzle: tuple[int, int, int]) -> None:
    s = make_shared_buffer(swizzle)
    assert swizzle_fault(s) is None
    key = column_key(s)
    offsets = [swizzle_offset(x, swizzle) for x in range(s.span)]
    assert sorted(offsets) == list(range(s.span))
    assert all(swizzle_offset(y, swizzle) == x for x, y in enumerate(offsets))
    for x, y in enumerate(offsets):
        row, column = x // 32, x % 32
        assert y == row * 32 + (column ^ (row // key.divisor % key.count) * key.factor)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (make_shared_buffer((3, 2, 2)), "bits overlap"),
        (make_shared_buffer((3, 3, 3)), "leaves rows"),
        (make_shared_buffer((2, 2, 2)), "leaves rows"),
        (make_shared_buffer((3, 2, 3), (2, 12, 32)), "from one matrix to the next"),
        (make_shared_buffer((2, 2, 3), (64,)), "only rows"),
        (b.buffer("r", FLOAT32, (8, 32)), ""),
    ],
)  # fmt: skip
def test_swizzles_that_no_buffer_has(buffer: ir.Buffer, message: str) -> None:
    fault = swizzle_fault(buffer)
    assert message in fault if fault is not None else message == ""


def test_results() -> None:
    modules = [transposition(w) for w in (None, *SWIZZLES)]
    built = emulator.build_emulated([emit_cuda(m) for m in modules]) if emulator.is_emulator_available() else []
    for m in modules:
        verify(m)
        found = arrays()
        assert interpret(m, found) == []
        np.testing.assert_array_equal(found["out"], found["x"].T)
    for m, emulated in zip(modules, built, strict=False):
        found = arrays()
        assert emulator.run_emulated_module(emulated, m, found) == (0, 0)
        np.testing.assert_array_equal(found["out"], found["x"].T)


def test_texts() -> None:
    text = emit_cuda(transposition((3, 2, 3))).source
    assert "*reinterpret_cast<float4 *>(&s[1][tx][c * 4 ^ tx % 8 * 4])" in text
    assert "s[1][i][tx % 32 ^ i % 8 * 4]" in text
    assert "float4" not in emit_cuda(transposition((3, 1, 4))).source.split("s[1]")[1].split("barrier")[0].split(";")[0]
    assert "swizzle (3, 2, 3)" in format_program(transposition((3, 2, 3)))


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
def test_faults_name_the_element() -> None:
    """One thread reads what another has written, with no barrier between them."""
    s, out = make_shared_buffer((3, 2, 3)), b.buffer("out", FLOAT32, (64,))
    body = b.block(
        b.store(s, (STAGE, TX, b.const(5)), 1.0),
        b.store(out, (TX,), b.load(s, STAGE, b.sub(63, TX), b.const(5))),
    )
    kernel = ir.Kernel("k", b.allocate([s], body), ir.Launch((1, 1, 1), (64, 1, 1)))
    m = ir.Module("k", (out,), (), (kernel,), (), ("out",))
    with pytest.raises(InternalError, match=r"s\[1, \d+, 5\]"):
        emulator.run_emulated_code(emit_cuda(m), m, {"out": np.zeros(64, np.float32)})
