"""Small modules to run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensor_comprehensions.codegen.llvm.llvm_printer import emit_llvm
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.nodes import Kernel, Loop, LoopKind, Module
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.runtime.cpu import host_symbols
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.runtime.cpu.object_code import Executable, assemble_and_load


def addition(n: int) -> str:
    """The assembly of `C(i) = A(i) + B(i)`, on the threads of the pool from two chunks of 1024 on."""
    a, b, c = (ir.buffer(name, FLOAT32, (n,)) for name in "ABC")
    i, block = ir.var("i"), ir.var("block")
    stop = ir.minimum(ir.add(block, 1024), n)
    inner = Loop(
        "i",
        block,
        stop,
        ir.store(c, (i,), ir.add(ir.load(a, i), ir.load(b, i))),
        LoopKind.VECTOR,
        vector_factors=(8, 2),
    )
    body = vectorize_loops(Loop("block", ir.const(0), ir.const(n), inner, LoopKind.PARALLEL, step=1024))
    module = Module("addition", (a, b, c), (), (Kernel("k", body),), (), ("C",))
    return emit_llvm(module, host(), host_symbols.vector_functions())


@pytest.fixture(scope="session")
def add() -> Callable[[int], Executable]:
    """Loads the addition of vectors of a length."""
    return lambda n: assemble_and_load(addition(n), host())
