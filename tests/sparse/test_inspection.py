"""What a sparse kernel shows of itself, and the reference evaluator behind the public interface."""

from __future__ import annotations

import re
from functools import reduce

import numpy as np
import pytest
import torch
from patterns import random_tensor, store

import tensor_comprehensions as tc

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
ATTENTION = """
def attend(float(N,N) M: csr, float(N,D) Q, float(N,D) K, float(N,D) V) -> (O) {
    s(i,j) +=! Q(i,d) * K(j,d) where exists M(i,j)
    O(i,c) +=! s(i,j) * V(j,c)
}
"""


def matrix(rows: int, columns: int, format: str, density: float = 0.4) -> tc.SparseTensor:
    return store(random_tensor(np.random.default_rng(rows * columns), (rows, columns), density), format)


def test_the_schedule_names_conversions_loops_and_results() -> None:
    op = tc.from_notation(
        "C(i,j) = A(i,k)*B(k,j)", formats={"A": "csr", "C": "csr"}, A="double", B="double"
    )  # fmt: skip
    text = op.compile(matrix(6, 5, "csr"), matrix(5, 7, "csc")).source("schedule")
    assert "B'0: csr, converted from B before every run" in text
    assert "statement 0: C, loops i, k, j" in text
    assert "k: what A(i,k) stores" in text
    assert "counted first" in text


def test_the_schedule_names_merges_and_shared_places() -> None:
    add = tc.define("def f(double(N) a: s, double(N) b: s) -> (y: s, z) { y(i) = a(i)+b(i)  z(i) = exp(a(i)) * b(i) }")
    a = store(torch.tensor([1.0, 0, 2, 0]).double(), "s")
    text = add.f.compile(a, a).source("schedule")
    assert "i: merges a(i), b(i): a(i) and b(i); a(i); b(i)" in text
    assert "for the elements of a and b together" in text
    attend = tc.define(ATTENTION).attend
    mask = tc.as_sparse(torch.eye(4), "csr")
    text = attend.compile(mask, *torch.rand(3, 4, 3)).source("schedule")
    assert "s: csr, with the stored places of M" in text
    assert "fixed sizes: D = 3" in text


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "bsr(2,1)", "sd", "ss(1,0)"])
def test_the_text_has_the_formats_of_the_operands(format: str) -> None:
    op = tc.define("def f(double(N,M) A, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }").f
    text = op.compile(matrix(4, 3, format), torch.ones(3).double()).source("tc")
    assert re.search(r"A: ([a-z]+(?:\([\d,]+\))?)", text)[1] == str(matrix(4, 3, format).format)
    assert list(tc.define(text))


def test_every_kind_of_source() -> None:
    op = tc.define("def f(double(N,M) A: csr, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }").f
    a, x = matrix(4, 3, "csr"), torch.ones(3).double()
    kernel = op.compile(a, x)
    assert "sparse kernel of f(" in repr(kernel)
    assert kernel.compile_seconds > 0
    assert torch.equal(kernel(a, x), op(a, x))
    for kind, part in {"loops": "A.pos1", "c": "A_crd1", "llvm": "define ", "asm": ".section", "tc": "def f"}.items():
        assert part in kernel.source(kind)
    with pytest.raises(tc.ArgumentError, match="'cuda'"):
        kernel.source("cuda")
    with pytest.raises(tc.ArgumentError, match="SparseOptions"):
        op.compile(a, x, options=tc.CpuOptions())


def test_the_reference_gives_values_and_stored_places() -> None:
    op = tc.define("def f(double(N,M) A, double(N,M) B) -> (C: bsr(2,1)) { C(i,j) = A(i,j) * B(i,j) }").f
    a, b = matrix(4, 3, "bsr(2,1)"), matrix(4, 3, "bsr(2,1)", 0.7)
    found, expected = op(a, b), op.reference(a, b)
    assert expected.format == found.format
    assert torch.equal(expected.to_dense(), a.to_dense() * b.to_dense())
    assert torch.equal(found.coordinates(), expected.coordinates())
    assert torch.equal(found.values, expected.values)
    as_torch = op.reference(a.torch(), b.torch())
    assert as_torch.layout is torch.sparse_bsr


def test_the_reference_takes_what_a_call_takes() -> None:
    op = tc.define("def f(bfloat16(N,M) A: csr, bfloat16(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }").f
    a, x = tc.as_sparse(torch.eye(3).bfloat16(), "csr"), torch.arange(3).bfloat16().requires_grad_()
    assert torch.equal(op.reference(a, x), torch.arange(3).bfloat16())
    gemv = tc.define("def f(double(N,M) A: csr, double(M) x) -> (y) { y(i) += A(i,j) * x(j) }").f
    y = torch.ones(3).double()
    assert torch.equal(gemv.reference(tc.as_sparse(torch.eye(3).double(), "csr"), y, y=y), 2 * y)


def test_the_reference_takes_the_dense_format_for_dense() -> None:
    op = tc.define("def f(double(N) a, double(N) b) -> (y: s) { y(i) = a(i) * b(i) }").f
    x = torch.tensor([0.0, 2, 3]).double()
    a, b = tc.as_sparse(x, "dense"), torch.ones(3).double()
    assert op(a, b).coordinates().tolist() == op.reference(a, b).coordinates().tolist() == [[1, 2]]


def test_size_of_merges() -> None:
    """Code grows with the sets of operands that may meet, not with sets of sets: it did so at every further index."""
    lines = []
    for names in ("ABCD", "ABCDEF"):
        parameters = ", ".join(f"float(N,M) {n}: dcsr" for n in names)
        value = reduce(lambda e, n: f"max({e}, {n}(i,j))", names[1:], f"{names[0]}(i,j)")
        op = tc.define(f"def f({parameters}) -> (T: dcsr) {{ T(i,j) = {value} }}").f
        operands = [tc.as_sparse(torch.eye(3), "dcsr")] * len(names)
        lines.append(op.compile(*operands).source("loops").count("\n"))
    assert lines[1] < 5 * lines[0]
    assert lines[1] < 2_000
