"""Loops that memory ends, buffers whose size the run decides, instructions on bits: on every machine that we have."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from loop_programs import same_bits
from numpy.typing import NDArray

from tensor_comprehensions.codegen.c import c_printer
from tensor_comprehensions.codegen.llvm.llvm_printer import emit_llvm
from tensor_comprehensions.core.dtypes import BOOL, FLOAT64, INT32, INT64
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.instructions import (
    BIT_AND,
    BIT_OR,
    INSTRUCTIONS,
    POPCOUNT,
    SHIFT_LEFT,
    SHIFT_RIGHT,
    TRAILING_ZEROS,
)
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import (
    BITS,
    Allocate,
    Binary,
    Expr,
    If,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    ReduceLanes,
    Select,
    Space,
    Stmt,
    Store,
    While,
)
from tensor_comprehensions.loop_ir.passes.scalar_promotion import hoist_accumulators
from tensor_comprehensions.loop_ir.passes.simplify import simplify
from tensor_comprehensions.loop_ir.passes.unroll import unroll_loops
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.runtime.cpu import host_symbols, object_code
from tensor_comprehensions.runtime.cpu.host import host

Array = NDArray[np.generic]
Run = Callable[..., int]
GCC = shutil.which("gcc")


@pytest.fixture
def run_module(tmp_path: Path) -> Run:
    """Run a module by one of the machines; the arguments' arrays take its results."""

    def run(machine: str, module: Module, arrays: dict[str, Array], *, may_fail: bool = False) -> int:
        if machine == "interpreter":
            assert interpret(module, arrays) == []
            return 0
        addresses = [arrays[x.name].ctypes.data for x in module.arguments]
        status = _run_c(module, addresses, tmp_path) if machine == "c" else _run_llvm(module, addresses)
        assert may_fail or status == 0
        return status

    return run


def _run_llvm(module: Module, addresses: list[int]) -> int:
    status, _ = object_code.assemble_and_load(emit_llvm(module, host(), host_symbols.vector_functions()), host())(
        addresses
    )
    return status


def _run_c(module: Module, addresses: list[int], folder: Path) -> int:
    if GCC is None:
        pytest.skip("compiling the C text needs gcc")
    (folder / "m.c").write_text(c_printer.emit_c(module))
    flags = ["-std=c99", "-O1", "-Wall", "-Werror", "-fopenmp", "-fwrapv", "-shared", "-fPIC"]
    subprocess.run([GCC, *flags, "m.c", "-o", "m.so", "-lm"], cwd=folder, check=True)
    function = getattr(ctypes.CDLL(str(folder / "m.so")), module.name)
    status: int = function(*map(ctypes.c_void_p, addresses))
    return status


B_CRD, C_CRD = b.dynamic_buffer("b_crd", INT32), b.dynamic_buffer("c_crd", INT32)
B_VALUES, C_VALUES = b.dynamic_buffer("b_values", FLOAT64), b.dynamic_buffer("c_values", FLOAT64)
A_CRD, A_VALUES = b.dynamic_buffer("a_crd", INT32), b.dynamic_buffer("a_values", FLOAT64)
SIZES = b.buffer("sizes", INT64, (3,))  # stored places of b and of c, extent
TOTAL = b.buffer("total", INT64, (1,))
PB, PC, Q = b.register("pb"), b.register("pc"), b.register("q")


def at(position: Expr, crd: b.Buffer, live: Expr) -> Expr:
    """The coordinate where an iterator stands; the extent behind its end."""
    return Select(live, b.cast(Load(crd, (position,), live), INT64), b.load(SIZES, 2))


def union() -> Stmt:
    """`a(i) = b(i) + c(i)` of sorted coordinates, without a branch that data decides."""
    pb, pc, q, least = Load(PB, ()), Load(PC, ()), Load(Q, ()), b.var("least")
    live_b, live_c = b.lt(pb, b.load(SIZES, 0)), b.lt(pc, b.load(SIZES, 1))
    at_b, at_c = b.eq(b.var("jb"), least), b.eq(b.var("jc"), least)
    zero = b.const(0.0, FLOAT64)
    value = b.add(Select(at_b, Load(B_VALUES, (pb,), at_b), zero), Select(at_c, Load(C_VALUES, (pc,), at_c), zero))
    body: Stmt = b.block(
        b.store(A_CRD, (q,), b.cast(least, INT32)),
        b.store(A_VALUES, (q,), value),
        b.store(Q, (), 1, op="+"),
        b.store(PB, (), b.cast(at_b, INT64), op="+"),
        b.store(PC, (), b.cast(at_c, INT64), op="+"),
    )
    body = Let("least", b.minimum(b.var("jb"), b.var("jc")), body)
    body = Let("jb", at(pb, B_CRD, live_b), Let("jc", at(pc, C_CRD, live_c), body))
    start = [b.store(r, (), 0) for r in (PB, PC, Q)]
    merge = While(Binary("or", live_b, live_c), body)
    return Allocate((PB, PC, Q), b.block(*start, merge, b.store(TOTAL, (0,), q)))


MERGE = Module(
    "merge", (B_CRD, B_VALUES, C_CRD, C_VALUES, SIZES, A_CRD, A_VALUES, TOTAL), (), (Kernel("k", union()),),
    written=("a_crd", "a_values", "total"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operands:
    """Two sparse vectors, and room for the result."""

    arrays: dict[str, Array]
    expected: Array

    @staticmethod
    def random(seed: int, extent: int, density: float) -> Operands:
        rng = np.random.default_rng(seed)
        dense = np.where(rng.random((2, extent)) < density, rng.integers(1, 9, (2, extent)), 0).astype(np.float64)
        crd = [np.flatnonzero(row).astype(np.int32) for row in dense]
        room = crd[0].size + crd[1].size
        arrays: dict[str, Array] = {
            "b_crd": crd[0], "b_values": dense[0][crd[0]], "c_crd": crd[1], "c_values": dense[1][crd[1]],
            "sizes": np.array([crd[0].size, crd[1].size, extent]),
            "a_crd": np.zeros(room, np.int32), "a_values": np.zeros(room), "total": np.zeros(1, np.int64),
        }  # fmt: skip
        return Operands(arrays, dense.sum(0))

    def check(self) -> None:
        count = int(self.arrays["total"][0])
        found = np.zeros(self.expected.size)
        found[self.arrays["a_crd"][:count]] = self.arrays["a_values"][:count]
        np.testing.assert_array_equal(found, self.expected)
        assert count == np.count_nonzero(self.expected)


def run_passes(module: Module) -> Module:
    """What the passes of the compiler make of it."""
    body = simplify(hoist_accumulators(unroll_loops(vectorize_loops(simplify(module.kernels[0].body)))))
    return Module(module.name, module.arguments, (), (Kernel("k", body),), written=module.written)


def test_merges_verify_and_survive_every_pass() -> None:
    verify(MERGE)
    verify(run_passes(MERGE))
    assert format_program(MERGE).count("while ") == format_program(run_passes(MERGE)).count("while ") == 1
    assert "int32 b_crd[]" in format_program(MERGE)


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("machine", ["interpreter", "llvm", "c"])
def test_merges_give_the_union(machine: str, density: float, run_module: Run) -> None:
    operands = Operands.random(17, 40, density)
    run_module(machine, run_passes(MERGE), operands.arrays)
    operands.check()


def test_the_text_of_c_is_a_while_loop_over_pointers() -> None:
    text = c_printer.emit_c(MERGE)
    assert "while (" in text
    assert "const int32_t *restrict b_crd" in text


# --- scratch memory whose size the run decides -------------------------------------------------------------------

N = b.buffer("n", INT64, (1,))
X, Y = b.dynamic_buffer("x", FLOAT64), b.dynamic_buffer("y", FLOAT64)
W = b.dynamic_buffer("w", FLOAT64, space=Space.SCRATCH)


def reversed_through_scratch(chunks: int) -> Module:
    """`y = reversed(x)`, each chunk by way of memory of its own."""
    i, chunk, n = b.var("i"), b.var("chunk"), b.load(N, 0)
    fill = Loop("i", b.const(0), n, b.store(W, (i,), b.load(X, i)), LoopKind.VECTOR, vector_factors=(4, 2))
    last = b.sub(n, 1)
    back = Loop("i", chunk, n, b.store(Y, (i,), b.load(W, b.sub(last, i))), step=chunks)
    body = Loop("chunk", b.const(0), b.const(chunks), Allocate((W,), b.block(fill, back), (n,)), LoopKind.PARALLEL)
    return Module("reverse", (N, X, Y), (), (Kernel("k", body),), written=("y",))


@pytest.mark.parametrize("n", [0, 1, 7, 5000])
@pytest.mark.parametrize("machine", ["interpreter", "llvm", "c"])
def test_scratch_is_as_long_as_the_run_says(machine: str, n: int, run_module: Run) -> None:
    if machine == "interpreter" and n > 100:
        n = 100
    module = reversed_through_scratch(3)
    verify(module)
    x = np.arange(float(n))
    arrays: dict[str, Array] = {"n": np.array([n]), "x": x, "y": np.zeros(n)}
    run_module(machine, run_passes(module), arrays)
    np.testing.assert_array_equal(arrays["y"], x[::-1])


def test_memory_that_there_is_not_is_a_failure_and_nothing_runs(run_module: Run) -> None:
    n = b.mul(b.load(N, 0), 1 << 40)
    body = Allocate((W,), b.block(b.store(W, (0,), 1.0), b.store(Y, (0,), Load(W, (b.const(0),)))), (n,))
    module = Module("huge", (N, Y), (), (Kernel("k", body),), written=("y",))
    arrays: dict[str, Array] = {"n": np.array([1 << 20]), "y": np.zeros(1)}
    assert run_module("llvm", module, arrays, may_fail=True) == -1
    assert arrays["y"][0] == 0


def test_the_interpreter_checks_dynamic_buffers_against_their_arrays() -> None:
    body = b.store(Y, (b.load(N, 0),), 1.0)
    module = Module("m", (N, Y), (), (Kernel("k", body),), written=("y",))
    verify(module)
    interpret(module, {"n": np.array([4]), "y": np.zeros(5)})
    with pytest.raises(InternalError, match="extent 5"):
        interpret(module, {"n": np.array([5]), "y": np.zeros(5)})


# --- what is refused ---------------------------------------------------------------------------------------------


def test_a_vector_loop_cannot_contain_a_while() -> None:
    spin = While(b.lt(Load(PB, ()), b.const(3)), b.store(PB, (), 1, op="+"))
    loop = Loop("i", b.const(0), b.const(8), b.block(spin), LoopKind.VECTOR, vector_factors=(4, 1))
    with pytest.raises(CannotLower, match="While"):
        vectorize_loops(Allocate((PB,), b.block(b.store(PB, (), 0), loop)))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (Allocate((W,), b.store(W, (0,), 1.0)), "without a length"),
        (Allocate((b.buffer("s", FLOAT64, (4,), Space.SCRATCH),), b.NOTHING, (b.const(4),)), "without a length"),
        (Allocate((W,), b.store(W, (0,), 1.0), (b.const(1.0, FLOAT64),)), "is float64, not int64"),
        (While(b.const(1), b.NOTHING), "is int64, not bool"),
        (b.store(b.buffer("e", FLOAT64, (4,)), (b.const(4),), 1.0), "not proved inside"),
    ],
)
def test_verify_names_what_is_wrong(body: Stmt, says: str) -> None:
    with pytest.raises(InternalError, match=says):
        verify(Module("m", (b.buffer("e", FLOAT64, (4,)),), (), (Kernel("k", body),)))


def test_a_loop_that_nothing_enters_goes_and_an_empty_one_stays() -> None:
    assert simplify(While(b.FALSE, b.store(Y, (0,), 1.0))) == b.NOTHING
    spin = While(b.lt(b.load(N, 0), b.const(3)), b.NOTHING)
    assert simplify(spin) == spin


# --- bits --------------------------------------------------------------------------------------------------------

WORDS = np.array([0, 1, -1, 2, 3, 1 << 62, -(1 << 63), 0x0123456789ABCDEF, -12345678901234], np.int64)
IN, OUT = b.dynamic_buffer("words", INT64), b.dynamic_buffer("out", INT64)
PYTHON = {
    BIT_AND: lambda x, k: x & k,
    BIT_OR: lambda x, k: x | k,
    SHIFT_LEFT: lambda x, k: x << k,
    SHIFT_RIGHT: lambda x, k: x >> k,
    TRAILING_ZEROS: lambda x: 64 if x == 0 else (x & -x).bit_length() - 1,
    POPCOUNT: lambda x: x.bit_count(),
}


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("function", list(PYTHON))
@pytest.mark.parametrize("machine", ["interpreter", "llvm", "c"])
def test_instructions_on_bits(machine: str, function: str, lanes: int, run_module: Run) -> None:
    i, count = b.var("i"), len(INSTRUCTIONS[function].operands) - 1
    value = b.call(function, b.load(IN, i), *[b.const(5)] * count)
    loop = Loop(
        "i", b.const(0), b.const(WORDS.size), b.store(OUT, (i,), value), LoopKind.VECTOR, vector_factors=(lanes, 1)
    )
    module = Module("bits", (IN, OUT), (), (Kernel("k", loop),), written=("out",))
    arrays: dict[str, Array] = {"words": WORDS, "out": np.zeros_like(WORDS)}
    run_module(machine, run_passes(module), arrays)
    expected = [PYTHON[function](int(w) % (1 << 64), *[5] * count) for w in WORDS]
    assert [int(x) % (1 << 64) for x in arrays["out"]] == [x % (1 << 64) for x in expected]


@pytest.mark.parametrize("lanes", [8, 64])
@pytest.mark.parametrize("machine", ["interpreter", "llvm", "c"])
def test_lanes_become_bits(machine: str, lanes: int, run_module: Run) -> None:
    flags = b.dynamic_buffer("flags", BOOL)
    value = ReduceLanes(BITS, b.load(flags, b.ramp(0, 1, lanes)))
    body = If(b.ne(value, 0), b.store(OUT, (0,), value))
    module = Module("bits", (flags, OUT), (), (Kernel("k", body),), written=("out",))
    verify(module)
    pattern = np.random.default_rng(lanes).random(lanes) < 0.5
    pattern[-1] = True
    arrays: dict[str, Array] = {"flags": pattern, "out": np.zeros(1, np.int64)}
    run_module(machine, module, arrays)
    assert int(arrays["out"][0]) % (1 << 64) == sum(1 << int(lane) for lane in np.flatnonzero(pattern))
    assert same_bits(arrays["flags"], pattern)


def test_stores_inside_a_while_are_not_hoisted_past_it() -> None:
    """What a `While` updates may not run at all, so that no register stands for it outside."""
    spin = While(b.lt(Load(PB, ()), b.load(N, 0)), b.block(Store(Y, (b.const(0),), b.const(1.0, FLOAT64), "+"),
                                                           b.store(PB, (), 1, op="+")))  # fmt: skip
    loop = Loop("i", b.const(0), b.const(3), spin)
    body = Allocate((PB,), b.block(b.store(PB, (), 0), loop))
    module = Module("m", (N, Y), (), (Kernel("k", body),), written=("y",))
    arrays: dict[str, Array] = {"n": np.array([5]), "y": np.zeros(1)}
    assert interpret(run_passes(module), arrays) == []
    assert arrays["y"][0] == 5
