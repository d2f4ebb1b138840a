"""Nothing is lost over many calls and many compilations, and temporaries cost no more than the unfused program's."""

from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path

import torch

import tensor_comprehensions as tc


def resident_bytes() -> int:
    """Bytes of memory that this process holds now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_no_leak_over_calls() -> None:
    ops = tc.define("""
    def scale(float(N) x) -> (y) { y(i) = 2 * x(i) }
    def into(float(N) x, float alpha) -> (y) { y(i) += alpha * x(i) }
    def lookup(float(V) table, long(B) words) -> (y) { y(b) = table(words(b)) }
    """)
    x, out, bad = torch.ones(1000), torch.empty(1000), torch.tensor([7])

    def calls(count: int) -> None:
        for _ in range(count):
            ops.scale(x)
            ops.scale(x, out=out)
            ops.into(x, 2.0, y=x)
            try:
                ops.lookup(x[:5], bad)
            except tc.RangeError:
                continue
            raise AssertionError("the bad word was read")

    calls(1000)
    before = resident_bytes()
    calls(10_000)
    assert resident_bytes() - before < 2**20, "10,000 calls whose outputs alone are 80 MB"


def test_kernels_that_no_one_holds_are_freed() -> None:
    op = tc.define("def scale(float(N) x) -> (y) { y(i) = 2 * x(i) }").scale
    kernel = weakref.ref(op.compile(torch.ones(3)).compiled.executable)
    assert kernel() is not None
    del op
    gc.collect()
    assert kernel() is None


def test_an_operator_keeps_a_bounded_number_of_kernels() -> None:
    op = tc.define("def scale(float(N) x) -> (y) { y(i) = 2 * x(i) }").scale
    op._kernels.routes.limit = 8
    sizes = range(1, 60)

    def compile_all() -> None:
        for n in sizes:
            assert torch.equal(op(torch.ones(n)), torch.full((n,), 2.0))

    compile_all()
    before = resident_bytes()
    compile_all()
    assert len(op._kernels.routes) == 8
    assert resident_bytes() - before < 4 * 2**20


def test_temporaries_take_no_more_than_unfused() -> None:
    op = tc.define("""
    def chain(float(N,D) x) -> (out) {
        a(n,d) = 2 * x(n,d)
        b(n,d) = a(n,d) + 1
        s(n) +=! b(n,d)
        out(n,d) = b(n,d) / s(n)
    }
    """).chain
    n, d = 64, 128
    kernel = op.compile(torch.ones(n, d))
    assert kernel.resources["temporary_bytes"] <= 4 * (2 * n * d + n)
