"""`pow` with a constant exponent needs no call, and keeps the precision and the special cases of C."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc

EXPONENTS = ("1", "2", "3.0", "4", "-1", "-2.0", "0.5", "-0.5")
SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3e38, -3e38, 1e19, 1e-19)


def inputs(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    drawn = torch.randn(1000, dtype=torch.float64) * torch.pow(10.0, torch.rand(1000, dtype=torch.float64) * 30 - 15)
    return torch.cat((torch.tensor(SPECIAL, dtype=torch.float64), drawn)).to(dtype)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_exponents_need_no_call(exponent: str, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    name = {torch.float32: "float", torch.float64: "double"}[dtype]
    op = tc.define(f"def power({name}(N) x) -> (y) {{ y(i) = pow(x(i), {exponent}) }}").power
    text = op.compile(x).source("llvm")
    assert "pow" not in text.replace("@power", "")
    y = op(x).numpy()
    with np.errstate(all="ignore"):
        expected = np.power(x.numpy().astype(np.longdouble), np.longdouble(exponent)).astype(y.dtype)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(y[finite]), np.signbit(expected[finite]))
    np.testing.assert_array_max_ulp(y[finite], expected[finite], maxulp=2)


@pytest.mark.parametrize("exponent", ["0", "2.5", "5", "x(i)"])
def test_other_exponents_call_pow(exponent: str) -> None:
    x = torch.rand(64) + 0.5
    op = tc.define(f"def f(float(N) x) -> (y) {{ y(i) = pow(x(i), {exponent}) }}").f
    torch.testing.assert_close(op(x), op.reference(x))
    assert "pow" in op.compile(x).source("llvm")


def test_nested_powers_stay_small() -> None:
    value = "x(i)"
    for _ in range(12):
        value = f"pow({value}, 2)"
    op = tc.define(f"def f(float(N) x) -> (y) {{ y(i) = {value} }}").f
    x = 1 + torch.rand(64) * 1e-3
    torch.testing.assert_close(op(x), op.reference(x), rtol=1e-3, atol=0)
    assert len(op.compile(x).source("c")) < 50_000


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_powers_of_stored_elements_need_no_call() -> None:
    op = tc.define("def f(float(N,M) A: csr) -> (y) { y(i) +=! pow(A(i,j), 2) }").f
    A = torch.randn(9, 7).relu()
    torch.testing.assert_close(op(A.to_sparse_csr()), (A * A).sum(1))
    assert "pow" not in op.compile(A.to_sparse_csr()).source("llvm")
