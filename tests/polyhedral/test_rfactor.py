"""Long reductions into few elements run in parts, with the same result on any number of threads."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
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
