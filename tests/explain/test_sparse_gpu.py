"""Reports on sparse kernels for GPUs."""

from __future__ import annotations

import torch

import tensor_comprehensions as tc

SPMM = "def spmm(float(N,M) A: csr, float(M,K) x) -> (y) { y(i,k) +=! A(i,j) * x(j,k) }"


def test_lines_of_cuda_lead_to_statements() -> None:
    a = tc.as_sparse(torch.eye(20, 30), "csr")
    report = tc.define(SPMM).spmm.explain(a, torch.randn(30, 32), target="cuda:sm_90")
    assert "cuda sm_90" in str(report)
    (cuda,) = (x for x in report.listings if x.kind == "cuda")
    stores = [line for line in cuda.lines if "y[" in line.text and " = " in line.text]
    assert stores
    assert all(line.statements == ("S0",) for line in stores)
    assert "<html" in report._repr_mimebundle_()["text/html"] or "<iframe" in report._repr_mimebundle_()["text/html"]
