"""Long reductions into few elements run in parts, with the same result on any number of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Loop, LoopKind
from tensor_comprehensions.loop_ir.rewrite import walk_stmts
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.polyhedral.cpu.lower import lower_cpu
from tensor_comprehensions.target import AVX512
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

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
    bound = legalize(bind(function, {"M": rows, "N": 1024}))
    module = lower_cpu(bound, CpuOptions(), replace(AVX512, cache=(32768, 1 << 20, 1 << 23)))
    assert len(module.kernels) > 1
    first = module.kernels[0].body
    assert isinstance(first, Loop)
    assert first.kind is LoopKind.PARALLEL
    assert [s.step for s in walk_stmts(first.body) if isinstance(s, Loop) and s.var == "m.block"] == [8]
    near = lower_cpu(bound, CpuOptions(), replace(AVX512, cache=(32768, 1 << 20, 1 << 28)))
    assert not [s for k in near.kernels for s in walk_stmts(k.body) if isinstance(s, Loop) and s.var == "m.block"]


def test_far_caches_count_as_memory() -> None:
    """Rows of their own pay earlier where the last cache is far."""
    (function,) = compile_source("def f(float(M,N) X) -> (s) { s(n) +=! X(m,n) }")
    bound = legalize(bind(function, {"M": 1000, "N": 1280}))
    far, near = (replace(AVX512, name=name) for name in ("skylake-avx512", "znver4"))
    assert len(lower_cpu(bound, CpuOptions(), far).kernels) > 1
    assert len(lower_cpu(bound, CpuOptions(), near).kernels) == 1


@pytest.mark.parametrize("rows", [32, 35])
def test_blocks_of_rows_give_what_rows_give(rows: int) -> None:
    """With small caches, so that a small matrix counts as large."""
    (function,) = compile_source("def f(float(A,M,N) X, float(M,N) Y) -> (s) { s(a,n) += X(a,m,n) - Y(m,n) }")
    bound = legalize(bind(function, {"A": 4, "M": rows, "N": 270}))
    module = lower_cpu(bound, CpuOptions(), replace(AVX512, cache=(1024, 2048, 4096)))
    assert [s for k in module.kernels for s in walk_stmts(k.body) if isinstance(s, Loop) and s.var == "m.block"]
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
    module = lower_cpu(legalize(bind(function, {"N": 1 << 20})), CpuOptions(), AVX512)
    assert any(isinstance(s, Loop) and s.kind is LoopKind.PARALLEL for s in walk_stmts(module.kernels[0].body))
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


PARTS = """def f(float(M,N) X, float(M,K) Y, float(N) b) -> (g, top, c) {
    g(n,k) = b(n) where k in 0:K
    g(n,k) += X(m,n) * Y(m,k)
    top(n) max=! X(m,n) where m in 3:M
    c(n,k) +=! X(m + j,n) * Y(m,k) where m in 0:M-4, j in 0:4
}"""


@pytest.mark.sampled  # options
@pytest.mark.parametrize("fusion", ["max", "min"])
@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_as_many_parts_as_are_asked_for(parts: int, structured: bool, fusion: str) -> None:
    op = tc.define(PARTS).f
    tensors = torch.randn(333, 9), torch.randn(333, 5), torch.randn(9)
    options = CpuOptions(split_k=parts, use_microkernels=structured, fusion=fusion, grain_size=64)
    kernel = op.compile(*tensors, options=options)
    for found, expected in zip(kernel(*tensors), op.reference(*tensors), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    schedule = kernel.source("schedule")
    assert all((name in schedule) == (parts > 1) for name in ("g.part", "top.part", "c.part"))


@pytest.mark.parametrize(
    "source", ["def f(float(N) X) -> (s) { s +=! X(n) }", "def f(float(N) X) -> (s) { s max=! X(n) }"]
)
def test_never_in_parts(source: str) -> None:
    op, x = tc.define(source).f, torch.randn(1 << 18)
    assert "s.part" in op.compile(x).source("schedule")
    assert "s.part" not in op.compile(x, options=CpuOptions(split_k=1)).source("schedule")


def test_parts_stay_small_beside_what_they_sum() -> None:
    """Neither of fewer than 16 terms, nor where there are more results than terms."""
    op = tc.define("def f(float(M,N) X, float(M,K) Y) -> (g) { g(n,k) +=! X(m,n) * Y(m,k) }").f
    for m, n, k, parts in ((64, 4, 4, 5), (64, 9, 8, 2)):
        kernel = op.compile(torch.randn(m, n), torch.randn(m, k), options=CpuOptions(split_k=parts))
        assert "g.part" not in kernel.source("schedule")
    with pytest.raises(tc.ArgumentError, match="split_k is -1"):
        op.compile(torch.randn(64, 4), torch.randn(64, 4), options=CpuOptions(split_k=-1))
