"""Defs whose dense contractions run as dense kernels between sparse ones: the same results, gradients and places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.sparse.shared_sparsity import shared_patterns
from tensor_comprehensions.tc_lang.transforms.split_dense import split_dense_contractions

OPS = tc.define("""
def gcn(double(N,N) A: csr, double(N,F) X, double(F,G) W) -> (Y) {
    H(i,g) +=! X(i,f) * W(f,g)
    Y(i,g) +=! A(i,j) * H(j,g)
    Y(i,g) = max(Y(i,g), 0)
}
def two(double(N,N) A: csr, double(N,F) X, double(F,G) W, double(G,K) V) -> (Z, H) {
    H(i,g) +=! X(i,f) * W(f,g)
    Y(i,g) +=! A(i,j) * H(j,g)
    Z(i,k) +=! Y(i,g) * V(g,k)
}
def scores(double(N,N) A: csr, double(N,F) X, double(F,G) W) -> (S: csr) {
    H(i,g) +=! X(i,f) * W(f,g)
    S(i,j) +=! H(i,g) * H(j,g) where exists A(i,j)
}
def attend(double(N,N) A: csr, double(N,F) X, double(F,G) W) -> (O) {
    s(i,j) +=! X(i,f) * X(j,f) where exists A(i,j)
    H(i,g) +=! X(i,f) * W(f,g)
    O(i,g) +=! s(i,j) * H(j,g)
}
def shifted(double(N,N) A: csr, double(N,F) X, double(F,G) W) -> (Y) {
    H(i,g) +=! X(i,f) * W(f,g) where i in 1:N
    Y(i,g) +=! A(i,j) * H(j,g) where j in 1:N
}
def unused(double(N,N) A: csr, double(N,F) X, double(F,G) W) -> (Y) {
    H(i,g) +=! X(i,f) * W(f,g)
    Y(i,f) +=! A(i,j) * X(j,f)
}
def plain(double(N,N) A: csr, double(N,F) X) -> (Y) { Y(i,f) +=! A(i,j) * X(j,f) }
""")
PARTS = {
    "gcn": [True, False],
    "two": [True, False, True],
    "scores": [True, False],
    "attend": [],
    "shifted": [],
    "unused": [],
    "plain": [],
}


def operands(name: str) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"N": 12, "F": 5, "G": 4, "K": 3}
    made: list[Any] = []
    for p in OPS[name].function.parameters:
        shape = [sizes[str(e)] if str(e) in sizes else sizes[e.name] for e in p.extents or ()]  # type: ignore[attr-defined]
        x = torch.rand(shape, dtype=torch.float64, generator=generator)
        if p.is_sparse:
            x[torch.rand(shape, generator=generator) > 0.4] = 0
        made.append(tc.as_sparse(x, "csr") if p.is_sparse else x)
    return made


def flat(x: Any) -> Any:
    return x.values if isinstance(x, tc.SparseTensor) else x


@pytest.mark.parametrize("name", PARTS)
def test_results_are_those_of_the_reference(name: str) -> None:
    op, given = OPS[name], operands(name)
    function = op.function
    parts = split_dense_contractions(function, shared_patterns(function))
    assert [p.is_dense for p in parts] == PARTS[name]
    found, wanted = op(*given), op.reference(*given)
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
    torch.testing.assert_close([flat(x) for x in found], [flat(x) for x in wanted])
    assert ("dense kernels" in op.compile(*given).source("schedule")) == bool(parts)


@pytest.mark.parametrize("name", ["gcn", "two", "scores"])
def test_gradients(name: str) -> None:
    given = operands(name)
    leaves = [flat(x).requires_grad_() for x in given]

    def call(*values: torch.Tensor) -> Any:
        mine = [x.with_values(v) if isinstance(x, tc.SparseTensor) else v for x, v in zip(given, values, strict=True)]
        found = OPS[name](*mine)
        return tuple(map(flat, found)) if isinstance(found, tuple) else flat(found)

    assert torch.autograd.gradcheck(call, leaves, atol=1e-4)


def test_assembled_calls_give_the_same_bits() -> None:
    given = operands("scores")
    fixed, expected = OPS.scores.assemble(*given), OPS.scores(*given)
    for _ in range(2):
        assert torch.equal(fixed(*given).values, expected.values)


def test_options_reach_the_sparse_parts() -> None:
    given = operands("gcn")
    kernel = OPS.gcn.compile(*given, options=tc.SparseOptions(prefetch_distance=0, order=("j", "i")))
    torch.testing.assert_close(kernel(*given), OPS.gcn(*given))
