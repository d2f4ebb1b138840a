"""Programs that once went wrong on their way to a GPU."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator

EVERYTHING = MappingOptions.naive().use_shared_memory().use_private_memory()


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
@pytest.mark.parametrize("options", [None, EVERYTHING, EVERYTHING.tile(4, 8).map_to_threads(32, 4)])
def test_what_says_where_to_write_is_read_where_promotion_keeps_it(options: MappingOptions | None) -> None:
    scatter = tc.define("""
    def scatter(uint8(N,D) a, float(N,D) x, float(N,K) z) -> (y) {
        place(n) max=! a(n,d)
        y(n,k) = z(n,k)
        y(n,place(n)) += x(n,d)
    }""").scatter
    arguments = torch.randint(100, (6, 40), dtype=torch.uint8), torch.randn(6, 40), torch.randn(6, 256)
    kernel = scatter.compile(*arguments, target="cuda:sm_90", options=options)
    torch.testing.assert_close(kernel.emulate(*arguments), scatter.reference(*arguments))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "half"])
def test_double_buffers_whose_copies_are_too_narrow_to_be_started_early(dtype: str) -> None:
    reduce = tc.define(f"def reduce({dtype}(N,M) a) -> (x) {{ x(i) max=! a(i,j) }}").reduce
    argument = torch.zeros(5, 3, dtype=getattr(torch, dtype))
    options = MappingOptions(
        tile=(2, 1), threads=(16,), shared_memory=True, double_buffer=True, cooperative_reductions=False, shared_depth=2
    )
    kernel = reduce.compile(argument, target="cuda:sm_90", options=options)
    assert "__pipeline_commit" in kernel.source("cuda")
    if nvrtc.is_nvrtc_available():
        assert nvrtc.compile_text(kernel.source("cuda"), "sm_90").binary
    if emulator.is_emulator_available():
        torch.testing.assert_close(kernel.emulate(argument), reduce.reference(argument))


def test_a_condition_that_keeps_threads_from_memory_leaves_subscripts_of_registers_literal() -> None:
    f = tc.define("""
    def f(float(N) A, float(M) B) -> (R) {
        R max= A(j) + (-j >= M && -j < N ? A(-j) : 0) where j in M:N
    }""").f
    arguments, initial = (torch.randn(2), torch.randn(0)), torch.randn(())
    options = MappingOptions(tile=(0,), threads=(4,), private_memory=True, private_depth=0, cooperative_reductions=True)
    kernel = f.compile(*arguments, target="cuda:sm_90", options=options, R=initial)
    assert "A_own[0]" in kernel.source("cuda")
    assert "A_own[tx" not in kernel.source("cuda")
    if emulator.is_emulator_available():
        torch.testing.assert_close(kernel.emulate(*arguments, R=initial), f.reference(*arguments, R=initial))


def test_what_is_looked_up_may_have_fewer_coordinates_than_dimensions() -> None:
    f = tc.define("def f(float(N,M) T, int32(K) I, float(P,M) X) -> (o) { o(i,j) = T(I(0),j) * X(i,j) }").f
    arguments = torch.randn(6, 9), torch.tensor([3, 1], dtype=torch.int32), torch.randn(12, 9)
    options = MappingOptions(tile=(4, 16), threads=(16,), shared_memory=True)
    kernel = f.compile(*arguments, target="cuda:sm_90", options=options)
    assert "T_shared[tx] = T[(long long)I_shared[0]][tx]" in kernel.source("cuda")
    if emulator.is_emulator_available():
        torch.testing.assert_close(kernel.emulate(*arguments), f.reference(*arguments))


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
@pytest.mark.parametrize(
    "statements", ["s(i,k) +=! x(i,j,k)  t(k) +=! x(i,j,k)", "t(k) max=! x(i,j,k)  s(i,k) +=! x(i,j,k)"]
)
def test_what_one_statement_sums_over_may_be_free_in_another(statements: str) -> None:
    """Threads that summed both in one nest had one register for all elements of `s`."""
    sums = tc.define(f"def sums(float(N,M,K) x) -> (s, t) {{ {statements} }}").sums
    x = torch.randint(-3, 4, (3, 17, 2)).float()
    for options in (None, MappingOptions(threads=(4, 4), cooperative_reductions=True)):
        kernel = sums.compile(x, target="cuda:sm_90", options=options)
        assert "_parts" in kernel.source("cuda") or "__shfl" in kernel.source("cuda"), "no thread shares a sum"
        torch.testing.assert_close(kernel.emulate(x), sums.reference(x))


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
def test_extrema_of_int64_with_a_small_number() -> None:
    """CUDA has no `max` of a `long long` and an `int`."""
    op = tc.define("def f(int64(N) x) -> (y) { y max=! x(i)  y max= 1 + 0 * x(i)  y min= 7 }").f
    x = torch.tensor([-3, 9, 4])
    kernel = op.compile(x, target="cuda:sm_90")
    assert kernel.emulate(x).item() == 7
    if nvrtc.is_nvrtc_available():
        assert kernel.resources["kernels"]
