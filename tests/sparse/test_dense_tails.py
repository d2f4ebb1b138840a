"""Temporaries with more dimensions than the operand whose stored places they have: a row of values at each place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.runtime.emulate import emulator

OPS = tc.define("""
def heads(double(N,N) A, double(N,H,D) Q, double(N,H,D) K) -> (m, y) {
    s(i,h,j) +=! Q(i,h,d) * K(j,h,d) where exists A(i,j)
    s(i,h,j) = s(i,h,j) * A(i,j)
    s(i,h,j) += A(i,j) * Q(i,h,0)
    m(i,h) max=! s(i,h,j) where exists A(i,j)
    y(j,h) +=! s(i,h,j)
}
def permuted(double(N,M) A, double(H,G) x) -> (y, double(N,M) C: csr) {
    t(h,j,i,g) = A(i,j) * x(h,g)
    y(h,i) +=! t(h,j,i,g)
    C(i,j) +=! t(h,j,i,g) * x(h,g)
}
def both(double(N,N) A, double(H) x) -> (y) {
    t(i,j,h) = A(i,j) * x(h)
    y(i,h) +=! t(i,j,h) * t(j,i,h)
}
def shifted(double(N,M) A, double(H) x) -> (y) {
    t(i,h,j) = A(i,j) * (x(h) + h) where j in 1:4, h in 1:H
    y(i,h) +=! t(i,h,j)
}
def largest(double(N,N) A, double(N,D) Q, double(H) x) -> (y) {
    t(i,h,j) max=! Q(i,d) * Q(j,d) - x(h) where exists A(i,j)
    y(i,h) max=! t(i,h,j)
}
def vector(double(N) a, double(N,M) X) -> (y) {
    t(i,j) = a(i) * X(i,j)
    y(j) +=! t(i,j) * t(i,j)
}
""")


def random(*shape: int, density: float = 1.0, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=g) < density, x, 0.0)


A = random(6, 6, density=0.4)
Q, K, X, H = random(6, 3, 4, seed=1), random(6, 3, 4, seed=2), random(3, 2, seed=3), random(3, seed=4)


def operands(name: str, a: object) -> tuple[object, ...]:
    return {"heads": (a, Q, K), "permuted": (a, X), "both": (a, H), "shifted": (a, H)}[name]


def compute_expected(name: str) -> tuple[Tensor, ...]:
    """By dense arrays."""
    match name:
        case "heads":
            s = torch.einsum("ihd,jhd->ihj", Q, K) * A[:, None] + A[:, None] * Q[:, :, :1]
            there = (A != 0)[:, None]
            return torch.where(there, s, -torch.inf).amax(2), torch.where(there, s, 0.0).sum(0).T
        case "permuted":
            return torch.einsum("ij,hg->hi", A, X), A * (X * X).sum()
        case "both":
            return (torch.einsum("ij,ji,h->ih", A, A, H * H),)
        case _:
            y = A[:, 1:4].sum(1, keepdim=True) * (H + torch.arange(3))[1:]
            return (y,)


@pytest.mark.parametrize(("name", "format"), [
    ("heads", "csr"), ("heads", "csc"), ("permuted", "csr"), ("permuted", "coo"), ("both", "csr"), ("both", "dcsc"),
    ("permuted", "dcsr"), ("shifted", "csr"),
])  # fmt: skip
def test_values(name: str, format: str) -> None:
    given = operands(name, tc.as_sparse(A, format))
    kernel = getattr(OPS, name).compile(*given)
    found = kernel(*given)
    for x, y in zip(found if isinstance(found, tuple) else (found,), compute_expected(name), strict=True):
        torch.testing.assert_close(x.to_dense() if isinstance(x, tc.SparseTensor) else x, y)
    assert "dense temporary" not in kernel.source("schedule")


def test_rows_of_a_vector_that_is_sparse() -> None:
    a, x = random(6, density=0.5, seed=5), random(6, 4, seed=6)
    torch.testing.assert_close(OPS.vector(tc.as_sparse(a, "s"), x), ((a[:, None] * x) ** 2).sum(0))
    assert "dense temporary" not in OPS.vector.compile(tc.as_sparse(a, "s"), x).source("schedule")


@pytest.mark.parametrize("order", [(), ("j", "i", "h")])
def test_other_reductions_are_dense_in_any_order(order: tuple[str, ...]) -> None:
    """They are the identity where the operand has no place, so that their places must not depend on the order."""
    a = tc.as_sparse(A, "csr")
    products = (Q[:, 0, None] * Q[:, 0]).amax(2)[:, None] - H[:, None]
    compute_expected = torch.where((A != 0)[:, None], products, -torch.inf).amax(2)
    kernel = OPS.largest.compile(a, Q[:, 0].contiguous(), H, options=tc.SparseOptions(order=order))
    torch.testing.assert_close(kernel(a, Q[:, 0].contiguous(), H), compute_expected)


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
@pytest.mark.parametrize("name", ["both"])
def test_on_gpus(name: str) -> None:
    given = operands(name, tc.as_sparse(A, "csr"))
    found = getattr(OPS, name).compile(*given, target="cuda:sm_90").emulate(*given)
    for x, y in zip(found if isinstance(found, tuple) else (found,), compute_expected(name), strict=True):
        torch.testing.assert_close(x, y)
