"""Blocked operands beside others: they are converted where their blocks do not fit."""

from __future__ import annotations

from random import Random

import pytest
import torch
from test_random_sparse import check_program

import tensor_comprehensions as tc
from tests.helpers.sparse_checks import interpret_def, same
from tests.helpers.sparse_programs import program_of

PROGRAMS = {
    "rows and blocks": "def f(double(N,M) A: bsr(2,4), double(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) + B(i,j) }",
    "blocks of a product": """def f(double(N,K) A: csr, double(K,M) B: bsc(2,2)) -> (y) {
        y(i,j) +=! A(i,k) * B(k,j)
    }""",
    "blocks of two extents": """def f(double(N,M) A: bsr(2,2), double(N,M) B: bsr(4,2)) -> (C: bsr(4,4)) {
        C(i,j) = A(i,j) - B(i,j)
    }""",
    "a result in blocks": "def f(double(N,M) A: csr) -> (C: bsr(2,2)) { C(i,j) = 2 * A(i,j) }",
    "a result with the places of blocks": """def f(double(N,M) A: bsr(2,2), double(N,M) B: csr) -> (C: bsr(2,2)) {
        C(i,j) = 2 * B(i,j) where exists A(i,j)
    }""",
    "a temporary with the places of blocks": """def f(double(N,M) A: bsr(2,2), double(N,M) B: csr) -> (y) {
        t(i,j) = A(i,j) * A(i,j)  y(i) +=! t(i,j) * B(i,j)
    }""",
    "columns of blocks and rows": """def f(double(N,M) A: bsr(2,2), double(M,N) B: dcsr) -> (C: coo) {
        C(j,i) = A(i,j) * B(j,i)
    }""",
    "a window of blocks": "def f(double(N,M) A: bsr(2,2)) -> (y) { y(i) +=! A(i,j) where j in 1:4 }",
    "a row of blocks": "def f(double(N,M) A: bsr(2,2), double(M) x) -> (y) { y(j) = A(3,j) * x(j) }",
    "the same blocks twice": """def f(double(N,N) A: bsr(2,2), double(N,N) B: csr) -> (C: csr, y) {
        C(i,j) = A(i,j) * B(i,j)  y(i) +=! A(j,i) * B(i,j)
    }""",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_programs(what: str) -> None:
    """Most were refused: an operand has no blocks, and meets one that has."""
    for seed in range(2):
        check_program(Random(seed), program_of(PROGRAMS[what], dict.fromkeys("NMKP", 8)))


def make_operands() -> tuple[tc.SparseTensor, tc.SparseTensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return tc.as_sparse(x, "bsr(2,2)"), tc.as_sparse(y * (y > 0.6), "csr")


def test_gradients() -> None:
    op = tc.define("def f(double(N,M) A, double(N,M) B, double(M) x) -> (y) { y(i) +=! A(i,j) * B(i,j) * x(j) }").f
    (a, b), x = make_operands(), torch.rand(8, dtype=torch.float64, requires_grad=True)
    given = [t.values.clone().requires_grad_() for t in (a, b)]

    def call(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return op(a.with_values(p), b.with_values(q), x)

    assert torch.autograd.gradcheck(call, (*given, x))


def test_conversions_are_shown_and_can_be_ruled_out() -> None:
    op = tc.define("def f(double(N,M) A, double(N,M) B) -> (C: csr) { C(i,j) = A(i,j) * B(i,j) }").f
    a, b = make_operands()
    assert "converted from A" in op.compile(a, b).source("schedule")
    with pytest.raises(
        tc.ArgumentError, match="'B' has no blocks, and meets one that has: A would have to be converted"
    ):
        op.compile(a, b, options=tc.SparseOptions(convert=False))


def test_an_operand_is_converted_once() -> None:
    """A conversion to single elements, in the order of another operand."""
    op = tc.define("def f(double(N,M) A, double(N,M) B) -> (double(N,M) C: csc) { C(i,j) = A(i,j) * B(i,j) }").f
    a, b = make_operands()
    c = b.to("csc")
    kernel = op.compile(a, c)
    assert len(kernel.compiled.plan.conversions) == 1
    assert same(op(a, c), interpret_def(op._kernels.sparse, [a, c], {})["C"])
    torch.testing.assert_close(op(a, c).to_dense(), a.to_dense() * b.to_dense())


def test_emulated_on_a_gpu() -> None:
    op = tc.define("def f(double(N,M) A, double(N,M) B, double(M) x) -> (y) { y(i) +=! A(i,j) * B(i,j) * x(j) }").f
    (a, b), x = make_operands(), torch.rand(8, dtype=torch.float64)
    found = op.compile(a, b, x, target="cuda:sm_90").emulate(a, b, x)
    torch.testing.assert_close(found, (a.to_dense() * b.to_dense()) @ x)
