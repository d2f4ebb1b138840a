"""Nothing is lost over many calls and many compilations, and temporaries cost no more than the unfused program's."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

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


ROUTES: dict[str, Callable[[tc.Op, Tensor], object]] = {
    "op": lambda op, x: op(x),
    "operator": lambda op, x: op.overload(x),
    "layout that changes": lambda op, x: (op(x), op(x[::2]), op.overload(x[::2])),
    "recorded": lambda op, x: op(x.requires_grad_()).sum().backward(),
    "recorded, never used": lambda op, x: op(x.requires_grad_()),
    "recorded by the operator": lambda op, x: op.overload(x.requires_grad_()).sum().backward(),
    "torch.func": lambda op, x: torch.func.vmap(op)(x.detach()[None]),
    "array": lambda op, x: op(x.detach().numpy()),
    "wrong": lambda op, x: mistaken(op, x.double()),
}
"""How calls come in."""


def mistaken(op: tc.Op, x: Tensor) -> None:
    for call in (op, op.overload):
        with pytest.raises(tc.ArgumentError):
            call(x)


class _Heap(ctypes.Structure):
    """What the C library tells of its heap."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost",
    )]  # fmt: skip


def held() -> tuple[int, int]:
    """Bytes that C code has allocated, and objects of Python."""
    gc.collect()
    heap = ctypes.CDLL(None).mallinfo2
    heap.restype = _Heap
    return heap().used, sys.getallocatedblocks()


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_left_of_many_calls(route: str, request: pytest.FixtureRequest) -> None:
    """Not a word for each call, counted in the heap: 400,000 calls with `--long`."""
    op = tc.define("def scale(float(N) x) -> (y) { y(i) = 2 * x(i) }").scale
    call, x = ROUTES[route], torch.ones(100)
    count = 400_000 if request.config.getoption("--long") else 1_000

    def calls(count: int) -> None:
        for _ in range(count):
            call(op, x)

    calls(200)
    before = held()
    calls(count)
    after = held()
    assert after[0] - before[0] < 4 * count + 4096
    assert after[1] - before[1] < count / 2


def test_kernels_that_no_one_holds_are_freed() -> None:
    op = tc.define("def scale(float(N) x) -> (y) { y(i) = 2 * x(i) }").scale
    kernel = weakref.ref(op.compile(torch.ones(3)).compiled.executable)
    assert kernel() is not None
    del op
    gc.collect()
    assert kernel() is None


def test_an_operator_keeps_a_bounded_number_of_kernels() -> None:
    op = tc.define("def scale(float(N) x) -> (y) { y(i) = 2 * x(i) }", dynamic=False).scale
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
