"""CUDA kernels on the CPU compute what they should, and every planted fault is reported with its place.

The interpreter, which knows nothing of the text, must find the same faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import ArgumentError, InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.rewrite import map_stmt
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers import planted_faults
from ..helpers.gpu_programs import (
    BARRIER,
    BX,
    PROGRAMS,
    TX,
    TY,
    Program,
    gather,
    kernel,
    loop,
    row_sums,
    staged_copy,
    tiled_matmul,
)

needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)


def arrays_of(p: Program) -> dict[str, np.ndarray]:
    return {
        a.name: p.inputs[a.name].copy() if a.name in p.inputs else np.zeros(a.shape, a.type.dtype.name)
        for a in p.module.arguments
    }


@needs_compiler
def test_results() -> None:
    programs = {name: make() for name, make in PROGRAMS.items()}
    built = emulator.build_emulated([emit_cuda(p.module) for p in programs.values()])
    for (name, p), emulated in zip(programs.items(), built, strict=True):
        verify(p.module)
        arrays = arrays_of(p)
        assert emulator.run_emulated_module(emulated, p.module, arrays) == (0, 0), name
        for tensor, expected in p.expected.items():
            np.testing.assert_array_equal(arrays[tensor], expected, err_msg=name)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "tiled"])
def test_results_by_the_interpreter(name: str) -> None:
    p = PROGRAMS[name]()
    arrays = arrays_of(p)
    assert interpret(p.module, arrays) == []
    for tensor, expected in p.expected.items():
        np.testing.assert_array_equal(arrays[tensor], expected)


@needs_compiler
def test_failed_check_stops_the_kernels_after_it() -> None:
    p = gather()
    p.inputs["index"][3] = 11
    arrays = arrays_of(p)
    assert emulator.run_emulated_code(emit_cuda(p.module), p.module, arrays) == (1, 11)
    assert not arrays["counts"].any()


@needs_compiler
def test_shared_memory_that_the_launch_provides() -> None:
    """More than a text may declare: a pointer into what the launch brings, with the same checks."""
    n = 4096
    x, out = b.buffer("x", FLOAT32, (n,)), b.buffer("out", FLOAT32, (n,))
    large = [b.buffer(name, FLOAT32, (8, 1024), ir.Space.SHARED) for name in ("first", "second")]
    at = (b.mod(b.var("i"), 8), b.add(TX, b.mul(b.div(b.var("i"), 8), 32)))
    place = b.add(TX, b.mul(b.var("i"), 32))
    fill = loop("i", n // 32, b.block(*[b.store(s, at, b.load(x, place)) for s in large]))
    total = b.add(b.load(large[0], *at), b.load(large[1], *at))
    body = b.allocate(large, b.block(fill, BARRIER, loop("i", n // 32, b.store(out, (place,), total))))
    m = ir.Module("large", (x, out), (), (kernel("large", body, (1, 1, 1), (32, 1, 1)),), (), ("out",))
    code = emit_cuda(m)
    assert code.kernels[0].dynamic == 65536
    assert "dynamic_shared + 32768" in code.source
    arrays = {"x": np.arange(n, dtype=np.float32), "out": np.zeros(n, np.float32)}
    assert emulator.run_emulated_code(code, m, arrays) == (0, 0)
    np.testing.assert_array_equal(arrays["out"], 2 * arrays["x"])
    beyond = replace_body(m, lambda s: replace(s, stop=b.const(n // 32 + 1)) if isinstance(s, ir.Loop) else s)
    with pytest.raises(InternalError, match=r"out of bounds: thread 0 of block 0 reads x"):
        emulator.run_emulated_code(emit_cuda(beyond), beyond, arrays)


# --- planted faults ----------------------------------------------------------------------------------------------


def replace_body(m: ir.Module, change: Callable[[ir.Stmt], ir.Stmt]) -> ir.Module:
    """`m` with `change` applied to every statement, from the inside out."""

    def visit(s: ir.Stmt) -> ir.Stmt:
        return change(map_stmt(s, lambda e: e, visit))

    return replace(m, kernels=tuple(replace(k, body=visit(k.body)) for k in m.kernels))


def without_barrier(p: Program, number: int) -> ir.Module:
    seen = []

    def change(s: ir.Stmt) -> ir.Stmt:
        if s != BARRIER:
            return s
        seen.append(s)
        return b.NOTHING if len(seen) - 1 == number else s

    return replace_body(p.module, change)


def resize_buffer(p: Program, name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> ir.Module:
    """With another size of a shared buffer: the box around what is copied is wrong."""

    def change(s: ir.Stmt) -> ir.Stmt:
        for buffer in s.buffers if isinstance(s, ir.Allocate) else ():
            if buffer.name == name:
                return planted_faults.resize_buffer(s, buffer, shape, strides)
        return s

    return replace_body(p.module, change)


def shrunken_copy(p: Program) -> ir.Module:
    """The first loop that copies leaves out its last step."""
    done = []

    def change(s: ir.Stmt) -> ir.Stmt:
        copies = isinstance(s, ir.Loop) and isinstance(s.body, ir.Store) and s.body.buffer.space is ir.Space.SHARED
        if isinstance(s, ir.Loop) and copies and not done:
            done.append(s)
            return replace(s, stop=b.const(3))
        return s

    return replace_body(p.module, change)


def swapped_threads(p: Program) -> ir.Module:
    """Results go where x and y of the thread are exchanged."""

    def change(s: ir.Stmt) -> ir.Stmt:
        if isinstance(s, ir.Store) and s.buffer.name == "C":
            row, column = s.indices
            at = (b.add(b.mul(BX, 16), TX), b.add(b.mul(b.var("block.y"), 16), b.add(TY, b.mul(b.var("u"), 4))))
            assert (row, column) != at
            return replace(s, indices=at)
        return s

    return replace_body(p.module, change)


def where(condition: ir.Expr) -> Callable[[ir.Stmt], ir.Stmt]:
    """Barriers only for some threads."""
    return lambda s: ir.If(condition, BARRIER) if s == BARRIER else s


def plain_update(s: ir.Stmt) -> ir.Stmt:
    return replace(s, atomic=False) if isinstance(s, ir.Store) else s


def one_place(s: ir.Stmt) -> ir.Stmt:
    """All blocks write to the first element."""
    return replace(s, indices=(b.const(0),)) if isinstance(s, ir.Store) and s.buffer.name == "total" else s


def shift_vectors(s: ir.Stmt) -> ir.Stmt:
    """Vectors start one element too far."""
    if isinstance(s, ir.Store) and isinstance(s.indices[-1], ir.Ramp):
        last = s.indices[-1]
        return replace(s, indices=(replace(last, base=b.add(last.base, 4)),))
    return s


@dataclass(frozen=True)
class Fault:
    """What is wrong, what the emulator says, and what the interpreter says."""

    make: Callable[[], ir.Module]
    program: Callable[[], Program]
    emulated: str
    interpreted: str


def small() -> Program:
    return tiled_matmul(20)


FAULTS = {
    "removed barrier": Fault(
        lambda: without_barrier(small(), 0), small,
        r"(race|undefined): thread .* [AB]_shared\[\d+, \d+\].*, line \d+: \w", "race|undefined",
    ),
    "removed last barrier": Fault(
        lambda: without_barrier(small(), 1), small,
        r"race: thread .* [AB]_shared\[\d+, \d+\], which .* with no barrier between, line \d+: \w",
        "race in loop threads",
    ),
    "shrunken copy": Fault(
        lambda: shrunken_copy(small()), small,
        r"undefined: .* reads A_shared\[12, 0\], which nothing wrote, line \d+: ", "A_shared.* undefined",
    ),
    "wrong box": Fault(
        lambda: resize_buffer(small(), "A_shared", (16, 12), (12, 1)), small,
        r"out of bounds: .* subscript 12 in an array .* line", "A_shared.* extent 12",
    ),
    "box with too few rows": Fault(
        lambda: resize_buffer(small(), "A_shared", (12, 16), (17, 1)), small,
        r"out of bounds: .* line", "A_shared.* extent 12",
    ),
    "barrier for some threads": Fault(
        lambda: replace_body(staged_copy().module, where(b.lt(TX, 4))), staged_copy,
        r"divergence: thread 0 of block 0 waits, but thread 4|race: .* reads stage", "disagree",
    ),
    "lax wait": Fault(
        lambda: staged_copy(wait=1).module, staged_copy,
        r"undefined: .* reads stage\[28\], .*line \d+: \*reinterpret_cast", "stage.* undefined",
    ),
    "missing barrier after a shuffle": Fault(
        lambda: without_barrier(row_sums(), 0), row_sums,
        r"undefined: thread 0 .* reads parts\[1\]|race: .* parts\[1\]", "parts.* undefined|race",
    ),
    "update that is not atomic": Fault(
        lambda: replace_body(gather().module, plain_update), gather, r"race: .* counts\[", "race in loop threads",
    ),
    "blocks that write one place": Fault(
        lambda: replace_body(row_sums().module, one_place), row_sums,
        r"race: thread 0 of block 1 writes total\[0\], which thread 0 of block 0 wrote", "race in loop blocks",
    ),
    "place outside of a tensor": Fault(
        lambda: replace_body(staged_copy().module, shift_vectors), staged_copy,
        r"out of bounds: thread 7 .* writes out\[32\]", "out.* extent 32",
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_reported(name: str) -> None:
    fault = FAULTS[name]
    m = fault.make()
    with pytest.raises(InternalError, match=fault.emulated):
        emulator.run_emulated_code(emit_cuda(m), m, arrays_of(fault.program()))


@pytest.mark.parametrize("name", FAULTS)
def test_the_interpreter_finds_planted_faults(name: str) -> None:
    fault = FAULTS[name]
    with pytest.raises(InternalError, match=fault.interpreted):
        interpret(fault.make(), arrays_of(fault.program()))


@needs_compiler
def test_swapped_threads_give_other_values() -> None:
    """Every thread writes an element of its own, so that only the result tells."""
    p = small()
    m = swapped_threads(p)
    emulated, interpreted = arrays_of(p), arrays_of(p)
    emulator.run_emulated_code(emit_cuda(m), m, emulated)
    interpret(m, interpreted)
    np.testing.assert_array_equal(emulated["C"], interpreted["C"])
    assert not np.array_equal(emulated["C"], p.expected["C"])


def test_the_verifier_wants_barriers_for_all_threads() -> None:
    read, *_, written = small().module.arguments
    assert written.name in small().module.written
    for condition in (b.lt(TY, 2), b.gt(b.load(written, 0, 0), 0.0)):
        with pytest.raises(InternalError, match="not all threads of a block come to barrier"):
            verify(replace_body(small().module, where(condition)))
    verify(replace_body(small().module, where(b.lt(BX, 1))))
    verify(replace_body(small().module, where(b.gt(b.load(read, 0, 0), 0.0))))  # no thread writes it: all see the same


@needs_compiler
def test_other_faults() -> None:
    """A thread that returns, two barriers for one, and a lane that is not there."""
    x = b.buffer("x", FLOAT32, (8,))
    r = b.buffer("r", FLOAT32, (), ir.Space.REGISTER)
    first = ir.If(b.eq(TX, 0), BARRIER, b.block(b.store(x, (TX,), 1.0), BARRIER))
    shuffle = ir.Invoke("shuffle_down", ((r, ()), (r, ())), (1, 32))
    for body, message in (
        (ir.If(b.lt(TX, 5), BARRIER), "thread 5 of block 0 has returned"),
        (first, "divergence: thread 0 of block 0 waits, and thread 1 of block 0 waits at line"),
        (
            ir.Allocate((r,), b.block(b.store(r, (), 1.0), shuffle, b.store(x, (TX,), b.load(r)))),
            "lane that does not exist",
        ),
    ):
        m = ir.Module("m", (x,), (), (kernel("m", body, (1, 1, 1), (8, 1, 1)),), (), ("x",))
        with pytest.raises(InternalError, match=message):
            emulator.run_emulated_code(emit_cuda(m), m, {"x": np.zeros(8, np.float32)})


@needs_compiler
def test_outputs_may_start_undefined() -> None:
    out = b.buffer("out", FLOAT32, (4,))
    update = b.store(out, (TX,), 1.0, op="+")
    m = ir.Module("m", (out,), (), (kernel("m", update, (1, 1, 1), (4, 1, 1)),), (), ("out",))
    array = np.zeros(4, np.float32)
    emulated = emulator.build_emulated([emit_cuda(m)])[0]
    with pytest.raises(InternalError, match=r"reads out\[0\], which nothing wrote"):
        emulated([emulator.EmulatedTensor(array.ctypes.data, out, False)])
    assert emulated([emulator.EmulatedTensor(array.ctypes.data, out, True)]) == (0, 0)
    assert array.tolist() == [1.0] * 4


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator.shutil, "which", lambda name: None)
    assert not emulator.is_emulator_available()
    with pytest.raises(ArgumentError, match="C\\+\\+ compiler"):
        emulator._compile([], emulator._folder())
