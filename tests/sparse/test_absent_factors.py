"""A factor that is not stored makes a product 0, even times infinity; a constant factor 0 makes infinity NaN."""

from __future__ import annotations

from math import inf

import pytest
import torch

import tensor_comprehensions as tc

CONSTANT_FACTORS = [
    "def f(float(N,N) A, float(N) x) -> (T) { y(i) +=! A(i,j) T(j) = y(j) + (1 * 0.0) * x(j) }",
    "def f(float(N,N) A, float(N) x) -> (y) { T(j) = 0.0 * x(j) y(i) +=! A(i,j) * T(j) }",
    "def f(float(N,N) A, float(N) x) -> (y) { y(i) +=! A(i,j) * (0.0 * x(j)) }",
    "def f(float(N,N) A, float(N) x) -> (y) { y(i) = A(i,i) + x(i) * 0.0 }",
    "def f(float(N,N) A, float(N) x) -> (y) { y(i) +=! 0.0 * A(i,j) + 0.0 / (x(j) - x(j)) }",
]


@pytest.mark.parametrize("source", CONSTANT_FACTORS)
def test_constants_are_as_in_dense_defs(source: str) -> None:
    """Of full operands, sparse and dense ones give the same."""
    A, x = torch.tensor([[1.0, 2, 3], [4, inf, 6], [7, 8, 9]]), torch.tensor([1, inf, 2])
    f = tc.define(source).f
    dense = f(A, x)
    assert dense.isnan().any()
    torch.testing.assert_close(f(tc.as_sparse(A, "csr"), x), dense, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "factor", ["A(i,j) * x(j)", "x(j) * (2 * A(i,j))", "sin(A(i,j)) * x(j)", "(0.0 + A(i,j)) * x(j)"]
)
def test_absent_factors_annihilate(factor: str) -> None:
    A, x = torch.tensor([[1.0, 0, 3], [0, 0, 6], [0, 8, 0]]), torch.tensor([inf, 2, inf])
    f = tc.define(f"def f(float(N,N) A, float(N) x) -> (y) {{ y(i) +=! {factor} }}").f
    y = f(tc.as_sparse(A, "csr"), x)
    assert not y.isnan().any()
    assert y[2].isfinite()
    assert f(A, x).isnan().any()


def test_a_constant_factor_keeps_the_places_of_the_other() -> None:
    f = tc.define("def f(float(N) a: s) -> (b: s) { b(i) = a(i) * 0.0 }").f
    b = f(tc.as_sparse(torch.tensor([1.0, 0, inf]), "s"))
    assert b.coordinates().tolist() == [[0, 2]]
    assert b.values.isnan().tolist() == [False, True]
