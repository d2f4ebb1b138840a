"""Memory of calls with sparse operands, counted allocation by allocation: operands, results, and little else.

torch's profiler counts what its allocator gives, the same in every run. Workspaces of kernels are counted in their
loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tensor_comprehensions as tc
from tensor_comprehensions.loop_ir.nodes import Allocate, Space
from tensor_comprehensions.loop_ir.rewrite import walk_stmts

OPS = tc.define("""
def spmv(float(N,M) A: csr, float(M) X) -> (Y) { Y(i) +=! A(i,j) * X(j) }
def spmm(float(N,M) A: csr, float(M,F) X) -> (Y) { Y(i,f) +=! A(i,j) * X(j,f) }
def spgemm(double(N,K) A: csr, double(K,M) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }
def add(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) + B(i,j) }
""")
N, NNZ = 4000, 40_000
BACKWARD = 2.5
"""Times the bytes of operands, results and gradients that a forward and a backward call may have at once."""


def matrix(dtype: torch.dtype) -> tc.SparseTensor:
    generator = torch.Generator().manual_seed(0)
    where = torch.randint(0, N, (2, NNZ), generator=generator)
    return tc.SparseTensor.from_coordinates(where, torch.rand(NNZ, generator=generator, dtype=dtype), (N, N), "csr")


def peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that a call has at once of those that it allocates, and its result, which is alive to the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, result


def size(*tensors: Any) -> int:
    """Bytes of tensors."""
    parts: list[torch.Tensor] = []
    for x in tensors:
        if isinstance(x, tc.SparseTensor):
            parts += [x.values, *(a for level in x.levels if level is not None for a in level if a is not None)]
        else:
            parts.append(x)
    return sum(p.nbytes for p in parts)


@pytest.mark.parametrize(("name", "shape"), [("spmv", (N,)), ("spmm", (N, 16))])
def test_products_with_dense_operands_and_their_gradients(name: str, shape: tuple[int, ...]) -> None:
    op, a, x = OPS[name], matrix(torch.float32), torch.rand(shape)
    op(a, x)
    most, y = peak(lambda: op(a, x))
    assert most == size(y)
    a.values.requires_grad_()
    x.requires_grad_()

    def both() -> Any:
        result = op(a, x)
        return result, *torch.autograd.grad(result.sum(), (a.values, x))

    most, results = peak(both)
    assert most >= size(*results)
    assert size(a, x) + most <= BACKWARD * size(a, x, *results)


@pytest.mark.parametrize(("name", "factor"), [("spgemm", 1.0), ("add", 2.0)])
def test_sparse_results(name: str, factor: float) -> None:
    """A product is counted first. A sum is written where all elements of its operands would have place."""
    op, a = OPS[name], matrix(torch.float64)
    op(a, a)
    most, c = peak(lambda: op(a, a))
    assert size(c) <= most <= factor * size(c) + 1024


def test_workspaces_of_threads_have_nine_bytes_for_a_column() -> None:
    op, a = OPS.spgemm, matrix(torch.float64)
    for phase in op.compile(a, a).compiled.program.phases:
        found = [s for k in phase.kernels for s in walk_stmts(k.body) if isinstance(s, Allocate)]
        scratch = {b.name: b.type.dtype.size for s in found for b in s.buffers if b.space is Space.SCRATCH}
        assert set(scratch) <= {"C.row", "C.touched", "C.line"}  # of the last, one for 64 columns
        assert sum(scratch[n] for n in scratch if n != "C.line") <= 9
