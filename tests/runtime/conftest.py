"""Small modules to run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensor_comprehensions.codegen.llvm import emit
from tensor_comprehensions.dtypes import FLOAT32
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.nodes import Kernel, Loop, LoopKind, Module
from tensor_comprehensions.loop_ir.vectorize import vectorize
from tensor_comprehensions.runtime import process
from tensor_comprehensions.runtime.cpu import Executable, load
from tensor_comprehensions.runtime.host import host


def addition(n: int) -> str:
    """The assembly of `C(i) = A(i) + B(i)`, on the threads of the pool from two chunks of 1024 on."""
    a, b, c = (ir.buffer(name, FLOAT32, (n,)) for name in "ABC")
    i, block = ir.var("i"), ir.var("block")
    stop = ir.minimum(ir.add(block, 1024), n)
    inner = Loop(
        "i", block, stop, ir.store(c, (i,), ir.add(ir.load(a, i), ir.load(b, i))), LoopKind.VECTOR, factor=(8, 2)
    )
    body = vectorize(Loop("block", ir.const(0), ir.const(n), inner, LoopKind.PARALLEL, step=1024))
    module = Module("addition", (a, b, c), (), (Kernel("k", body),), (), ("C",))
    return emit(module, host(), process.mathematics())


@pytest.fixture(scope="session")
def add() -> Callable[[int], Executable]:
    """Loads the addition of vectors of a length."""
    return lambda n: load(addition(n), host())
