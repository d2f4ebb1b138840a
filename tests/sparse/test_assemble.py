"""Calls of what `assemble` gives: the same bits as plain calls, for operands of the same places only."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sparse_cases import Case, cases
from test_sparse_kernels import argument

import tensor_comprehensions as tc

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
RUN = [c for c in cases() if {"error", "by_coordinates", "pass"}.isdisjoint(c.record) and "tc" in c.record]
SPGEMM = "def f(double(M,K) B: csr, double(K,N) C: csr) -> (double(M,N) A: csr) { A(i,j) +=! B(i,k) * C(k,j) }"


def parts(x: Any) -> list[torch.Tensor]:
    if not isinstance(x, tc.SparseTensor):
        return [torch.as_tensor(x)]
    return [x.values, *(a for level in x.levels if level is not None for a in level if a is not None)]


def same(a: Any, b: Any) -> bool:
    x, y = ([p for r in (z if isinstance(z, tuple) else (z,)) for p in parts(r)] for z in (a, b))
    return all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


@pytest.mark.sampled  # `test_sparse_kernels` runs all programs
@pytest.mark.parametrize("case", [c for c in RUN if c.record.get("stored")], ids=lambda c: c.id)
def test_assembled_calls_give_the_same_bits(case: Case) -> None:
    op = list(tc.define(case.record["tc"], formats=case.record.get("define_formats")))[-1]
    given = [argument(case, n, x) for n, x in case.operands().items()]
    initial = {n: torch.from_numpy(x.values) for n, x in case.initial().items()}
    fixed = op.assemble(*given, **initial)
    expected = op(*given, **initial)
    for _ in range(2):
        assert same(fixed(*given, **initial), expected)


def matrix(seed: int, n: int = 20) -> tc.SparseTensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, n, dtype=torch.float64, generator=generator)
    x[torch.rand(n, n, generator=generator) > 0.2] = 0
    return tc.as_sparse(x, "csr")


def test_other_values_at_the_same_places() -> None:
    op, b, c = tc.define(SPGEMM).f, matrix(0), matrix(1)
    fixed = op.assemble(b, c)
    other = tc.as_sparse(3 * b.to_dense(), "csr")
    first, second = fixed(b, c), fixed(other, c)
    assert same(second, op(other, c))
    assert first.levels is second.levels


def test_what_only_counts_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensor_comprehensions.runtime.cpu.object_code import Executable

    op, b, c = tc.define(SPGEMM).f, matrix(0), matrix(1)
    fixed = op.assemble(b, c)
    runs: list[Executable] = []
    call = Executable.__call__

    def counted(self: Executable, addresses: Any) -> tuple[int, int]:
        runs.append(self)
        return call(self, addresses)

    monkeypatch.setattr(Executable, "__call__", counted)
    op(b, c)
    plain = len(runs)
    fixed(b, c)
    assert plain == 2
    assert len(runs) - plain == 1


def test_other_places_are_refused() -> None:
    op, b, c = tc.define(SPGEMM).f, matrix(0), matrix(1)
    fixed = op.assemble(b, c)
    with pytest.raises(tc.ArgumentError, match="'C' has other stored places"):
        fixed(b, b)
    with pytest.raises(tc.ArgumentError, match="M is 30"):
        fixed(matrix(0, 30), matrix(1, 30))
    with pytest.raises(tc.ArgumentError, match="another format"):
        fixed(b.to("csc"), c)
    c.levels[1][1][0] += 1  # type: ignore[index]
    with pytest.raises(tc.ArgumentError):
        fixed(b, c)


def test_results_that_follow_values() -> None:
    op = tc.define("def f(double(N) x) -> (double(N) a: s) { a(i) = x(i) }").f
    x = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    fixed = op.assemble(x)
    assert fixed(3 * x).values.tolist() == [3.0, 6.0]
    with pytest.raises(tc.ArgumentError, match="'a' would get other stored places"):
        fixed(x + 1)


def test_gradients_of_assembled_calls() -> None:
    op, b, c = tc.define(SPGEMM).f, matrix(0), matrix(1)
    b.values.requires_grad_()
    fixed = op.assemble(b, c)
    (a,) = torch.autograd.grad(fixed(b, c).values.sum(), b.values)
    (e,) = torch.autograd.grad(op(b, c).values.sum(), b.values)
    assert torch.equal(a, e)


def test_a_def_without_sparse_tensors_is_not_assembled() -> None:
    op = tc.define("def f(double(N) x) -> (y) { y(i) = x(i) }").f
    with pytest.raises(tc.ArgumentError, match="no sparse operands"):
        op.assemble(torch.ones(3, dtype=torch.float64))


REFILLED = {
    "csr": (SPGEMM, "csr csr"),
    "csc": ("def f(double(M,K) B: csc, double(K,N) C: csc) -> (A: csc) { A(i,j) +=! B(i,k) * C(k,j) }", "csc csc"),
    "a converted factor": (SPGEMM.replace("C: csr", "C: csc"), "csr csc"),
    "one row": ("def f(double(M,K) B: csr, double(K) x) -> (double(M) a: s) { a(j) +=! B(k,j) * x(k) }", "csr -"),
    "windows": (
        "def f(double(M,K) B: csr, double(K,N) C: csr) -> (A: csr) "
        "{ A(i,j) +=! B(i,k) * C(k,j) where i in 2:19, j in 3:17 }",
        "csr csr",
    ),
    "three levels": (
        "def f(double(M,K) B: csr, double(K,N) C: csr) -> (A: dds) "
        "{ A(l,i,j) +=! l * (B(i,k) * C(k,j)) where l in 0:3 }",
        "csr csr",
    ),
}


@pytest.mark.parametrize(("name", "type"), [("csr", "half"), ("csr", "int"), *((n, "double") for n in REFILLED)])
def test_rows_that_are_filled_again(name: str, type: str) -> None:
    """No place is looked for: one phase, without flags, whose sums are those of a plain call bit by bit."""
    text, formats = REFILLED[name]
    op, dtype = tc.define(text.replace("double", type)).f, {"double": torch.double, "half": torch.half}.get(type)
    dense = [(4 * matrix(n).to_dense()).to(dtype or torch.int32) for n in range(2)]
    given = [tc.as_sparse(x, f) if f != "-" else x[0] for x, f in zip(dense, formats.split(), strict=True)]
    fixed = op.assemble(*given)
    for _ in range(2):
        assert same(fixed(*given), op(*given))
    found = {id(k): k for k in op._kernels.sparse._kernels._values.values()}  # under one key for each way to ask
    kernels = [k for k in found.values() if k.program.problem.refills]
    assert len(kernels) == 1
    assert len(kernels[0].phases) == 1
    assert "touched" not in kernels[0].source("loops")


def test_a_copy_of_an_assembled_function() -> None:
    """Modules are copied with what they hold, such as for averaged weights."""
    a = tc.as_sparse(torch.eye(3).double(), "csr")
    fixed = tc.define(SPGEMM).f.assemble(a, a)
    assert copy.deepcopy({"layer": fixed})["layer"] is copy.copy(fixed) is fixed
    with pytest.raises(tc.ArgumentError, match="kernels of this process"):
        pickle.dumps(fixed)


def test_a_pattern_of_scipy_that_changed_in_place() -> None:
    op = tc.define(SPGEMM).f
    a = sp.csr_array(np.diag([1.0, 2, 3]))
    fixed = op.assemble(a, a)
    assert (fixed(a, a).todense() == (a @ a).todense()).all()
    a.indices[0] = 1
    with pytest.raises(tc.ArgumentError, match="'B' has other stored places"):
        fixed(a, a)


@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc", "to_sparse_coo"])
def test_operands_made_in_inference_mode(layout: str) -> None:
    """Torch counts no changes of these."""
    op = tc.define("def f(double(N,M) A, double(M) x) -> (C: csr, y) { C(i,j) = 2 * A(i,j)  y(i) +=! A(i,j) * x(j) }").f
    dense, x = torch.tensor([[1.0, 0, 2], [0, 3, 0]]).double(), torch.ones(3).double()
    with torch.inference_mode():
        a = getattr(dense, layout)()
        fixed = op.assemble(a, x)
        for call in (op, op, op, fixed, fixed):
            C, y = call(a, x)
            assert C.to_dense().tolist() == (2 * dense).tolist()
            assert y.tolist() == [3, 3]


def test_a_pattern_of_inference_mode_that_changed_in_place() -> None:
    with torch.inference_mode():
        a = torch.eye(3).double().to_sparse_csr()
        fixed = tc.define(SPGEMM).f.assemble(a, a)
        a.col_indices()[0] = 1
        with pytest.raises(tc.ArgumentError, match="'B' has other stored places"):
            fixed(a, a)


def test_conversions_made_in_inference_mode_serve_gradients() -> None:
    text = "def f(double(N,M) A, double(M) x) -> (y) { y(i) +=! exp(A(i,j)) * x(j) where exists A(i,j) }"
    op = tc.define(text, options=tc.SparseOptions(order=("i", "j"))).f
    a, x = tc.as_sparse(torch.eye(3).double(), "csc"), torch.ones(3).double()
    with torch.inference_mode():
        op(a, x)
    values = a.values.clone().requires_grad_()
    op(a.with_values(values), x).sum().backward()
    assert torch.allclose(values.grad, a.values.exp())
