"""Full tiles apart from partial ones: which guards are left, and that every element is still computed once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensor_comprehensions.codegen.gpu import cuda_printer
from tensor_comprehensions.loop_ir.nodes import If, Invoke, Kernel, Loop, Module, Space, Stmt, Store
from tensor_comprehensions.loop_ir.rewrite import walk_stmts
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.polyhedral.gpu.post.loop_partition import count_guards
from tensor_comprehensions.runtime.emulate import emulator

from .test_promote_shared import BLOCKED, DOUBLE, MATMUL, SMALL, inputs, module, needs_compiler, product

COPY = "def f(float(N) A) -> (O) { O(i) = A(i) * 2 }"


def split(m: Module) -> tuple[Stmt, Stmt] | None:
    """What full and what partial tiles run, where a kernel tells them apart."""
    (kernel,) = m.kernels
    whole = [s for s in walk_stmts(kernel.body) if isinstance(s, If) and s.otherwise is not None and meets(s.then)]
    return None if not whole or whole[0].otherwise is None else (whole[0].then, whole[0].otherwise)


def meets(s: Stmt) -> bool:
    return any(isinstance(c, Invoke) and c.name == "barrier" for c in walk_stmts(s))


def computing(s: Stmt) -> list[Stmt]:
    """The conditions around what goes to registers."""
    conditions = [c for c in walk_stmts(s) if isinstance(c, If)]
    return [
        c for c in conditions if any(isinstance(x, Store) and x.buffer.space is Space.REGISTER for x in walk_stmts(c))
    ]


def test_full_tiles_compute_without_guards() -> None:
    parts = split(module(MATMUL, BLOCKED, M=29, N=36, K=20))
    assert parts is not None
    full, partial = parts
    assert not computing(full)
    assert computing(partial)
    assert count_guards(full) < count_guards(partial)


def test_a_partial_tile_of_terms_comes_last() -> None:
    (kernel,) = module(MATMUL, BLOCKED, M=32, N=32, K=20).kernels
    assert not computing(kernel.body)
    assert loop_stop(kernel) == 2


def loop_stop(kernel: Kernel) -> int:
    loops = [s for s in walk_stmts(kernel.body) if isinstance(s, Loop) and meets(s.body)]
    return int(getattr(loops[0].stop, "value", -1))


@pytest.mark.parametrize("sizes", [{"M": 32, "N": 32, "K": 16}, {"M": 8, "N": 16, "K": 16}], ids=str)
def test_tiles_that_are_all_full_are_not_distinguished(sizes: dict[str, int]) -> None:
    assert split(module(MATMUL, BLOCKED, **sizes)) is None


def test_a_guard_outside_of_loops_is_no_reason() -> None:
    (kernel,) = module(COPY, MappingOptions(tile=(64,), threads=(64,)), N=1000).kernels
    assert sum(isinstance(s, Store) for s in walk_stmts(kernel.body)) == 1


@needs_compiler
@pytest.mark.parametrize("options", [SMALL, BLOCKED, DOUBLE], ids=["shared", "both", "double"])
def test_values(options: MappingOptions) -> None:
    sizes = [{"M": m, "N": n, "K": k} for m, n, k in ((17, 36, 20), (16, 35, 20), (29, 35, 13), (16, 32, 17))]
    modules = [module(MATMUL, replace(options, unroll=4), **s) for s in sizes]
    for m, built in zip(modules, emulator.build_emulated([cuda_printer.emit_cuda(m) for m in modules]), strict=True):
        arrays = inputs(m)
        assert emulator.run_emulated_module(built, m, arrays) == (0, 0)
        np.testing.assert_array_equal(arrays["C"], product(arrays))
