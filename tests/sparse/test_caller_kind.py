"""Results in formats that the library of the operands lacks are refused before anything is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.dispatch.sparse import sparse_run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")


def refuse_to_run(*_: object) -> None:
    raise AssertionError("a kernel ran")


def make_scipy(dtype: Any = np.float64) -> Any:
    return scipy.sparse.csr_array(np.eye(3, dtype=dtype))


@pytest.mark.parametrize("format", ["dcsr", "dcsc", "sd", "bsc(1,1)"])
def test_formats_that_scipy_lacks(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were refused after the kernel had run."""
    op = tc.define(f"def f(double(N,M) A) -> (B: {format}) {{ B(i,j) = 2 * A(i,j) }}").f
    with monkeypatch.context() as patch:
        patch.setattr(sparse_run.SparseRun, "results", refuse_to_run)
        with pytest.raises(tc.ArgumentError, match="the result 'B' of f has a format that SciPy lacks") as refusal:
            op(make_scipy())
    assert refusal.value.expected == "coo, csr, csc or bsr"
    assert refusal.value.found == format
    assert refusal.value.suggestion == "pass tc.as_sparse(A) to get a SparseTensor, or declare B: csr"
    if "b" not in format:
        assert op(tc.as_sparse(make_scipy())).to_dense().tolist() == (2 * torch.eye(3)).tolist()


def test_formats_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    op = tc.define("def f(double(N,M) A, double(N,M) B) -> (C: ss) { C(i,j) = A(i,j) + B(i,j) }").f
    a = torch.eye(3, dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(sparse_run.SparseRun, "results", refuse_to_run)
        with pytest.raises(tc.ArgumentError, match=r"a format that torch lacks(.|\n)*declare C: csr"):
            op(a.to_sparse_csr(), a.to_sparse_csr())
        with pytest.raises(tc.ArgumentError, match="a format that torch lacks"):
            op.reference(a.to_sparse_csr(), a.to_sparse_csr())
    assert op(tc.as_sparse(a, "csr"), a.to_sparse_csr()).values.tolist() == [2, 2, 2]


def test_more_dimensions_than_scipy_has() -> None:
    op = tc.define("def f(double(N,M) A, double(N,M,K) X) -> (B: csf) { B(i,j,k) = A(i,j) * X(i,j,k) }").f
    with pytest.raises(tc.ArgumentError, match=r"a format that SciPy lacks(.|\n)*declare B: coo"):
        op(make_scipy(), np.ones((3, 3, 2)))


def test_element_types_that_scipy_lacks() -> None:
    op = tc.define("def f(double(N,M) A: csr) -> (half B: csr) { B(i,j) = half(A(i,j)) }").f
    with pytest.raises(tc.ArgumentError, match=r"elements of a type that SciPy lacks(.|\n)*float16"):
        op(make_scipy())


def test_arguments_are_checked_first() -> None:
    op = tc.define("def f(double(N,M) A: csr) -> (B: ss) { B(i,j) = A(i,j) }").f
    with pytest.raises(tc.ArgumentError, match="another element type"):
        op(make_scipy(np.float32))
