"""Faults planted in kernels that the mapper made: no barrier of theirs can be left out, and no copy be smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.rewrite import map_stmt, substitute_stmt, walk_stmts
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target

from ..helpers.gpu_suite import Case, case_of, map_case, memory_of
from ..helpers.planted_faults import resize_buffer

pytestmark = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
MATMUL = "def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
OPTIONS = MappingOptions(tile=(8, 8, 8), threads=(8, 4), blocks=(4, 4), shared_memory=True, private_memory=True)


def matmul() -> tuple[Case, ir.Module]:
    rng = np.random.default_rng(0)
    arrays = {"A": rng.standard_normal((20, 30)).astype("f4"), "B": rng.standard_normal((30, 24)).astype("f4")}
    case = case_of("matmul", MATMUL, None, arrays, set())
    return case, map_case(case, OPTIONS, parse_gpu_target("cuda:sm_90"))


def change_statements(m: ir.Module, change: Callable[[ir.Stmt], ir.Stmt]) -> ir.Module:
    def visit(s: ir.Stmt) -> ir.Stmt:
        return change(map_stmt(s, lambda e: e, visit))

    return replace(m, kernels=tuple(replace(k, body=visit(k.body)) for k in m.kernels))


def without_barriers(m: ir.Module) -> Iterator[ir.Module]:
    """The module without each of its barriers in turn."""
    count = sum(isinstance(s, ir.Invoke) and s.name == "barrier" for k in m.kernels for s in walk_stmts(k.body))
    for number in range(count):
        seen = iter(range(count))
        yield change_statements(
            m,
            lambda s, n=number, seen=seen: (  # type: ignore[misc]
                b.NOTHING if isinstance(s, ir.Invoke) and s.name == "barrier" and next(seen) == n else s
            ),
        )


def test_no_barrier_can_be_left_out() -> None:
    case, module = matmul()
    variants = list(without_barriers(module))
    assert len(variants) >= 2
    for m, emulated in zip(variants, emulator.build_emulated([emit_cuda(m) for m in variants]), strict=True):
        with pytest.raises(InternalError, match=r"race: .* [AB]_shared|undefined: .* [AB]_shared|race: .*shared"):
            emulator.run_emulated_module(emulated, m, memory_of(case, m))


def test_no_copy_can_be_smaller() -> None:
    """Thread 0 along y copies nothing."""
    case, module = matmul()

    def change(s: ir.Stmt) -> ir.Stmt:
        if isinstance(s, ir.Store) and s.buffer.space is ir.Space.SHARED:
            return ir.If(b.gt(b.var("thread.y"), 0), s)
        return s

    m = change_statements(module, change)
    assert m != module
    with pytest.raises(InternalError, match=r"undefined: .* which nothing wrote, line"):
        emulator.run_emulated_code(emit_cuda(m), m, memory_of(case, m))


def test_no_box_can_be_smaller() -> None:
    case, module = matmul()

    def change(s: ir.Stmt) -> ir.Stmt:
        for buffer in s.buffers if isinstance(s, ir.Allocate) else ():
            if buffer.space is ir.Space.SHARED:
                return resize_buffer(s, buffer, (buffer.shape[0] - 1, *buffer.shape[1:]), buffer.strides)
        return s

    m = change_statements(module, change)
    with pytest.raises(InternalError, match="out of bounds: "):
        emulator.run_emulated_code(emit_cuda(m), m, memory_of(case, m))


def test_swapped_threads_are_found() -> None:
    """By a place out of bounds, a race or an element that nothing wrote; else by the values."""
    case, module = matmul()
    swap = {"thread.x": b.var("thread.y"), "thread.y": b.var("thread.x")}
    m = replace(module, kernels=tuple(replace(k, body=substitute_stmt(k.body, swap)) for k in module.kernels))
    arrays = memory_of(case, m)
    with pytest.raises((InternalError, AssertionError)):
        emulator.run_emulated_code(emit_cuda(m), m, arrays)
        np.testing.assert_allclose(arrays["C"], case.expected["C"], rtol=1e-4, atol=1e-4)
