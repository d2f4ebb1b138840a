"""Nothing is lost over many calls and many compilations, and temporaries cost no more than the unfused program's."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

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


ROUTES: dict[str, tuple[int, Callable[[tc.Op, Tensor], object]]] = {
    "op": (400_000, lambda op, x: op(x)),
    "operator": (400_000, lambda op, x: op.overload(x)),
    "layout that changes": (20_000, lambda op, x: (op(x), op(x[::2]), op.overload(x[::2]))),
    "recorded": (10_000, lambda op, x: op(x.requires_grad_()).sum().backward()),
    "recorded, never used": (20_000, lambda op, x: op(x.requires_grad_())),
    "recorded by the operator": (10_000, lambda op, x: op.overload(x.requires_grad_()).sum().backward()),
    "torch.func": (1_000, lambda op, x: torch.func.vmap(op)(x.detach()[None])),
    "array": (10_000, lambda op, x: op(x.detach().numpy())),
}
"""How calls come in, and how many are made where no long test is asked for."""


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_left_of_many_calls(route: str, request: pytest.FixtureRequest) -> None:
    op = tc.define("def scale(float(N) x) -> (y) { y(i) = 2 * x(i) }").scale
    count, call = ROUTES[route]
    x = torch.ones(1000)

    def calls(count: int) -> None:
        for _ in range(count):
            call(op, x)

    calls(1000)
    before = resident_bytes()
    calls(400_000 if request.config.getoption("--long") else count)
    assert resident_bytes() - before < 2 * 2**20


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
