"""Statements have one number in everything that people read."""

from __future__ import annotations

import re

import torch

import tensor_comprehensions as tc

SOURCE = """
def twice(float(P,Q) x) -> (y) { u(i,j) = x(i,j) * 2  y(i,j) = u(i,j) + 1 }
def f(float(M,K) A, float(K,N) B, float(N) b) -> (O, W, D, float(M,N) Z) {
    t = twice(A)
    s(m) +=! t(m,k)
    C(m,n) +=! A(m,k) * B(k,n)
    O(m,n) = fmax(C(m,n) + b(n), 0) + s(m)
    W(m) max=! O(m,n)
    D(2*i) +=! A(i,k) where i in 0:32
    Z(m,n) += A(m,k) * B(k,n)
}
"""


def list_numbered_statements(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"\b(S\d+)(?:_\w+)?: +(\w+) \S*=", text))


def test_listings_number_statements_alike() -> None:
    tensors = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(64)]
    op = tc.define(SOURCE).f
    for options in (tc.CpuOptions(), tc.CpuOptions(use_microkernels=False), tc.CpuOptions(fusion="min", split_k=2)):
        kernel = op.compile(*tensors, options=options, Z=torch.randn(64, 64))
        written = set(re.findall(r"^(S\d+)(?:_\w+)? +writes (\w+)", kernel.source("ranges"), re.MULTILINE))
        assert ("S6", "D") in written
        shown = list_numbered_statements(kernel.source("schedule"))
        assert {pair for pair in shown if "_" not in pair[1]} <= written
        assert {"S3", "S4", "S5", "S6", "S7"} <= {name for name, _ in shown}
    kernel = op.compile(*tensors, target="cuda:sm_90", Z=torch.randn(64, 64))
    names = set(re.findall(r"\b(S\d+)", str(kernel.source("schedule"))))
    assert names == {f"S{n}" for n in range(8)}
