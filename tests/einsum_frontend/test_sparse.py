"""`tc.einsum` of sparse operands, and with sparse results."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.einsum_frontend.lookup import operator_for

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
SIZES = {"i": 5, "j": 6, "k": 7, "r": 4, "l": 3}


def operand(labels: str, seed: str) -> torch.Tensor:
    """Half of it zeros."""
    rng = np.random.default_rng(zlib.crc32((labels + seed).encode()))
    shape = [SIZES[x] for x in labels]
    return torch.from_numpy(np.where(rng.random(shape) < 0.5, rng.integers(1, 9, shape), 0).astype(np.float64))


@pytest.mark.parametrize(
    ("equation", "formats", "result"),
    [
        ("ij,j->i", ["csr", None], None),
        ("ij,jk->ik", ["csr", None], None),
        ("ij,jk->ik", ["csr", "csr"], "csr"),
        ("ij,jk->ik", ["csr", "csc"], None),
        ("ij,jk", ["csc", "coo"], "csc"),
        ("ij,jk->ik", [None, None], "csr"),
        ("ij,ij->ij", ["csr", None], "csr"),
        ("ij->i", ["coo"], None),
        ("ij->", ["csr"], None),
        ("ij->ji", ["csr"], "csr"),
        ("ii->i", ["csr"], "s"),
        ("ijk,jr,kr->ir", ["csf", None, None], None),
        ("ijk,kl->ijl", ["csf", None], "csf"),
        ("ij,jk,kl->il", ["csr", None, None], None),
        ("ij,jk,kl->il", ["csr", "csr", "csr"], "csr"),
        ("...ij,jr->...ir", ["csf", None], None),
        ("ij,kj->ik", ["bsr(5,2)", None], None),
        ("i,j->ij", ["s", "s"], "dcsr"),
        ("ik,jk,lr->ij", ["csr", None, None], None),
    ],
)
def test_equations(equation: str, formats: list[str | None], result: str | None) -> None:
    terms = equation.replace("...", "l").split("->")[0].split(",")
    terms = ["ii" if t == "ii" else t for t in terms]
    dense = [operand(t, str(n)) for n, t in enumerate(terms)]
    given: list[Any] = [x if f is None else tc.as_sparse(x, f) for x, f in zip(dense, formats, strict=True)]
    found = tc.einsum(equation, *given, format=result)
    expected = torch.einsum(equation, *dense)
    if result is None:
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected)
    else:
        assert str(found.check().format) == result
        assert torch.equal(found.to_dense(), expected)


def test_operands_and_results_of_torch_and_scipy() -> None:
    a, b = operand("ij", "a"), operand("jk", "b")
    assert tc.einsum("ij,jk->ik", a.to_sparse_csr(), b.to_sparse(), format="csr").layout is torch.sparse_csr
    assert torch.equal(tc.einsum("ij,jk->ik", a.to_sparse_bsr((5, 2)), b), a @ b)
    x, y = scipy.sparse.csr_array(a.numpy()), scipy.sparse.csc_array(b.numpy())
    product = tc.einsum("ij,jk->ik", x, y, format="csr")
    assert scipy.sparse.issparse(product)
    np.testing.assert_array_equal(product.toarray(), (a @ b).numpy())
    np.testing.assert_array_equal(tc.einsum("ij,jk->ik", x, b.numpy()), (a @ b).numpy())


def sparse(shape: tuple[int, ...], nnz: int, format: str) -> tc.SparseTensor:
    where = torch.stack([torch.arange(nnz) * 7919 % n for n in shape])
    return tc.SparseTensor.from_coordinates(where, torch.ones(nnz), shape, format)


def statements(equation: str, *operands: Any) -> list[str]:
    return [s.strip() for s in operator_for(equation, *operands).function.source.splitlines()[1:-1]]


def test_products_with_sparse_operands_make_no_large_temporaries() -> None:
    tensor, factor = sparse((100, 100, 100), 1000, "csf"), torch.rand(100, 8)
    assert statements("ijk,jr,kr->ir", tensor, factor, factor) == ["out(i, r) +=! X0(i, j, k) * X1(j, r) * X2(k, r)"]
    a = sparse((1000, 1000), 5000, "csr")
    assert len(statements("ij,jk,kl->il", a, a, a)) == 1


def test_dense_operands_are_multiplied_first_and_give_whole_rows() -> None:
    adjacency, x, w = sparse((1000, 1000), 5000, "csr"), torch.rand(1000, 64), torch.rand(64, 16)
    product, result = statements("ij,jf,fg->ig", adjacency, x, w)
    assert product == "T0(j, g) +=! X1(j, f) * X2(f, g)"
    assert result == "out(i, g) +=! X0(i, j) * T0(j, g)"


def test_similar_numbers_of_elements_have_one_operator() -> None:
    x = torch.rand(1000, 4)
    first, second = (operator_for("ij,jk->ik", sparse((1000, 1000), n, "csr"), x) for n in (5000, 6000))
    assert first is second


@pytest.mark.parametrize(
    ("equation", "keywords", "words"),
    [
        ("ij,jk->ik", {"format": "crs"}, ["'crs'", "did you mean csr?"]),
        ("ij,jk->ik", {"format": 3}, ["the format is an int"]),
        ("ij,jk->ik", {"out": torch.ones(5, 7)}, ["'out' is for dense operands"]),
        ("ij,jk->i", {"format": "csr"}, ["'csr' is for 2 dimensions, the tensor has 1"]),
        ("ij,ij->ij", {}, ["size 5", "and 6"]),
    ],
)
def test_mistakes(equation: str, keywords: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(tc.ArgumentError) as error:
        tc.einsum(equation, tc.as_sparse(operand("ij", ""), "csr"), operand("jk", "")[:, :7], **keywords)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("whole", [False, True])
def test_graphs_hold_sparse_operands_and_results(whole: bool) -> None:
    a, x = operand("ij", ""), operand("j", "")
    stored = tc.as_sparse(a, "csr")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: tc.einsum("ij->ij", x, format="csr").values * 2, backend="eager", fullgraph=whole
    )
    assert torch.equal(compiled(a), stored.values * 2)
    compiled = torch.compile(lambda a, x: tc.einsum("ij,j->i", a, 2 * x) + 1, backend="eager", fullgraph=whole)
    assert torch.equal(compiled(stored, x), a @ (2 * x) + 1)


def test_graphs_break_at_sparse_tensors_of_torch() -> None:
    a, x = operand("ij", ""), operand("j", "")
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, x: tc.einsum("ij,j->i", a, 2 * x) + 1, backend="eager")
    assert torch.equal(compiled(a.to_sparse_csr(), x), a @ (2 * x) + 1)
