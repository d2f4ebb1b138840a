"""Long reductions into few elements run in parts, with the same result on any number of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.loop_ir.interpret import interpret
from tensor_comprehensions.loop_ir.nodes import Loop, LoopKind
from tensor_comprehensions.loop_ir.rewrite import walk
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.polyhedral.strategy import lower
from tensor_comprehensions.target import AVX512
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.legalise import legalise

SUM = "def f(float(N) X) -> (s) { s +=! X(n) }"


@pytest.mark.parametrize("n", [1 << 17, (1 << 17) + 1, 200_003])
@pytest.mark.parametrize("reduction", ["+=!", "max=!", "min=!"])
def test_a_long_vector_into_one_number(n: int, reduction: str) -> None:
    op = tc.define(f"def f(float(N) X) -> (s) {{ s {reduction} X(n) * 2.0 }}").f
    x = torch.randn(n)
    torch.testing.assert_close(op(x), op.reference(x), rtol=1e-4, atol=1e-2)


def test_few_columns_of_many_rows() -> None:
    op = tc.define("def f(float(N,C) X) -> (s) { s(c) +=! X(n,c) }").f
    x = torch.randn(100_001, 3)
    torch.testing.assert_close(op(x), op.reference(x), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("shape", [(2048, 1024), (2051, 1027), (16400, 130)])
@pytest.mark.parametrize("reduction", ["+=!", "max=!"])
def test_columns_of_a_large_matrix(shape: tuple[int, int], reduction: str) -> None:
    op = tc.define(f"def f(float(M,N) X, float(M) w) -> (s) {{ s(n) {reduction} X(m,n) * w(m) }}").f
    x, w = torch.randn(shape), torch.randn(shape[0])
    torch.testing.assert_close(op(x, w), op.reference(x, w), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("rows", [2048, 2051, 2055])
def test_threads_walk_rows_of_their_own(rows: int) -> None:
    """The parts are not fused with their sum, and are read in blocks of rows from end to end."""
    (function,) = compile_source("def f(float(M,N) X) -> (s) { s(n) +=! X(m,n) }")
    bound = legalise(bind(function, {"M": rows, "N": 1024}))
    module = lower(bound, CpuOptions(), replace(AVX512, cache=(32768, 1 << 20, 1 << 23)))
    assert len(module.kernels) > 1
    first = module.kernels[0].body
    assert isinstance(first, Loop)
    assert first.kind is LoopKind.PARALLEL
    assert [s.step for s in walk(first.body) if isinstance(s, Loop) and s.var == "m_block"] == [8]
    near = lower(bound, CpuOptions(), replace(AVX512, cache=(32768, 1 << 20, 1 << 28)))
    assert not [s for k in near.kernels for s in walk(k.body) if isinstance(s, Loop) and s.var == "m_block"]


def test_far_caches_count_as_memory() -> None:
    """Rows of their own pay earlier where the last cache is far."""
    (function,) = compile_source("def f(float(M,N) X) -> (s) { s(n) +=! X(m,n) }")
    bound = legalise(bind(function, {"M": 1000, "N": 1280}))
    far, near = (replace(AVX512, name=name) for name in ("skylake-avx512", "znver4"))
    assert len(lower(bound, CpuOptions(), far).kernels) > 1
    assert len(lower(bound, CpuOptions(), near).kernels) == 1


@pytest.mark.parametrize("rows", [32, 35])
def test_blocks_of_rows_give_what_rows_give(rows: int) -> None:
    """With small caches, so that a small matrix counts as large."""
    (function,) = compile_source("def f(float(A,M,N) X, float(M,N) Y) -> (s) { s(a,n) += X(a,m,n) - Y(m,n) }")
    bound = legalise(bind(function, {"A": 4, "M": rows, "N": 270}))
    module = lower(bound, CpuOptions(), replace(AVX512, cache=(1024, 2048, 4096)))
    assert [s for k in module.kernels for s in walk(k.body) if isinstance(s, Loop) and s.var == "m_block"]
    random = np.random.default_rng(rows)
    x, y, s = (random.random(shape, np.float32) for shape in ((4, rows, 270), (rows, 270), (4, 270)))
    arrays = {"X": x, "Y": y, "s": s.copy()}
    assert interpret(module, arrays) == []
    np.testing.assert_allclose(arrays["s"], s + (x - y).sum(1), rtol=1e-4)


def test_continuing_an_initial_value_and_an_index_that_starts_above_zero() -> None:
    op = tc.define("def f(float(N) X) -> (s) { s += X(n) where n in 5:N-3 }").f
    x, s = torch.randn(150_000), torch.tensor(3.0)
    torch.testing.assert_close(op(x, s=s), op.reference(x, s=s), rtol=1e-4, atol=1e-2)


def test_the_index_may_be_a_value() -> None:
    op = tc.define("def f(float(N) X) -> (s) { s max=! X(n) > 3.9 ? n : -1 }").f
    x = torch.randn(1 << 18)
    assert op(x) == op.reference(x)


def test_parts_run_in_parallel_and_do_not_depend_on_the_threads() -> None:
    (function,) = compile_source(SUM)
    module = lower(legalise(bind(function, {"N": 1 << 20})), CpuOptions(), AVX512)
    assert any(isinstance(s, Loop) and s.kind is LoopKind.PARALLEL for s in walk(module.kernels[0].body))
    op, x = tc.define(SUM).f, torch.randn(1 << 20)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(op(x).item())
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1]
