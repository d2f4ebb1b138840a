"""Sparse results beyond the conformance programs: parts of index ranges, large ones, any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.dispatch.sparse import sparse_run

OPS = tc.define("""
def part(double(N,M) A: csr) -> (C: csr) { C(i,j) = 2 * A(i,j) where i in 5:20, j in 3:9 }
def product_part(double(N,K) A: csr, double(K,M) B: csr) -> (C: csr) {
    C(i,j) +=! A(i,k) * B(k,j) where i in 2:30, j in 4:20
}
def beside(double(N,M) A: csr, double(N) x) -> (C: csr) { C(i,j) = A(i,j) * x(i+1) }
def product(double(N,K) A: csr, double(K,M) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }
def both(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) * B(i,j) }
def either(double(N,M) A: coo, double(N,M) B: coo) -> (C: coo) { C(i,j) = A(i,j) + B(i,j) }
def masked(double(N,M) W: csr, double(N,K) A: csr, double(K,M) B: csr) -> (C: csr) {
    C(i,j) +=! W(i,j) * A(i,k) * B(k,j)
}
def rows(double(N,M) A: csr, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def names(double(sizes,totals) chunk: csr, double(totals) chunks) -> (count) {
    count(element) +=! chunk(element,line) * chunks(line)
}
""")


def matrix(rows: int, columns: int, seed: int, density: float = 0.02) -> sp.csr_array:
    return sp.random_array((rows, columns), density=density, format="csr", rng=np.random.default_rng(seed))


def dense(x: tc.SparseTensor) -> np.ndarray:
    return np.asarray(x.check().to_dense().numpy())


def test_results_of_a_part_of_an_index_range_begin_at_0() -> None:
    a, b = matrix(40, 30, 0, 0.3), matrix(30, 25, 1, 0.3)
    A, B = tc.as_sparse(a), tc.as_sparse(b)
    np.testing.assert_allclose(dense(OPS.part(A)), 2 * a.toarray()[5:20, 3:9])
    np.testing.assert_allclose(dense(OPS.product_part(A, B)), (a @ b).toarray()[2:30, 4:20])
    x = np.random.default_rng(2).random(40)
    np.testing.assert_allclose(dense(OPS.beside(A, torch.from_numpy(x))), a.toarray()[:39] * x[1:, None])


@pytest.mark.parametrize(("statement", "filled"), [
    ("C(i,j) = 2 * A(i,j)", False),
    ("C(i,j) +=! A(i,j) * x(i)", False),
    ("C(i,j) +=! U(i,k) * V(k,j) where exists A(i,j)", False),
    ("C(i,j) = x(i) where exists A(i,j)  C(i,j) += A(i,j)", False),
    ("C(i,j) = 0 where exists A(i,j)", True),
    ("C(i,j) = A(i,j) * B(i,j) where exists A(i,j)", True),
    ("C(i,j) = B(i,j) where exists A(i,j)", True),
    ("C(i,j) = A(i,j)  C(i,j) = x(i) where exists A(i,j), exists B(i,j)", False),
    ("C(i,j) = A(i,j)  C(i,j) max=! x(i) where exists A(i,j), exists B(i,j)", False),
    ("C(i,j) = A(i,j) - B(i,j) where exists A(i,j)", False),
])  # fmt: skip
def test_only_places_that_no_instance_writes_are_filled_before(
    statement: str, filled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_array = sparse_run._new_array
    monkeypatch.setattr(sparse_run, "_new_array", lambda *x: new_array(*x).fill_(-77))
    f = tc.define(
        "def f(double(N,M) A: csr, double(N,M) B: csr, double(N) x, double(N,K) U, double(K,M) V) -> (C: csr) "
        f"{{ {statement} }}"
    ).f
    operands = (
        tc.as_sparse(matrix(30, 20, 1, 0.3)),
        tc.as_sparse(matrix(30, 20, 2, 0.3)),
        *map(torch.from_numpy, (np.random.default_rng(3).random(s) for s in ((30,), (30, 4), (4, 20)))),
    )
    program = f.compile(*operands).compiled.program
    assert (program.problem.shared, program.unfilled) == ((("C", "A"),), () if filled else ("C",))
    np.testing.assert_allclose(dense(f(*operands)), dense(f.reference(*operands)))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_large_results() -> None:
    a, b, c, w = matrix(3000, 2000, 3), matrix(3000, 2000, 4), matrix(2000, 3000, 5), matrix(3000, 3000, 6)
    A, B, C, W = map(tc.as_sparse, (a, b, c, w))
    np.testing.assert_allclose(dense(OPS.both(A, B)), (a * b).toarray())
    np.testing.assert_allclose(dense(OPS.product(A, C)), (a @ c).toarray())
    np.testing.assert_allclose(dense(OPS.either(A.to("coo"), B.to("coo"))), (a + b).toarray())
    np.testing.assert_allclose(dense(OPS.masked(W, A, C)), (w * (a @ c)).toarray())


def test_any_number_of_threads_gives_the_same_bits() -> None:
    A, C = tc.as_sparse(matrix(3000, 2000, 3)), tc.as_sparse(matrix(2000, 3000, 5))
    x, before, found = torch.rand(2000, dtype=torch.float64), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append((OPS.product(A, C).values, OPS.rows(A, x)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(p, found[0][0]) and torch.equal(y, found[0][1]) for p, y in found)


def test_names_that_kernels_use_are_free_for_programs() -> None:
    a = matrix(50, 40, 7, 0.2)
    x = np.random.default_rng(8).random(40)
    np.testing.assert_allclose(OPS.names(tc.as_sparse(a), torch.from_numpy(x)).numpy(), a @ x)


SUMS = tc.define("""
def twice(double(N,M) B: csr, double(N,K) C, double(M,K) D, double(N,M) A: csr, double(N,K) E) -> (R: csr) {
    R(i,j) +=! D(j,k) * B(i,j) * C(i,k) where exists A(i,j)
    R(i,j) += E(i,k) * B(i,j) * D(j,k) where exists A(i,j)
}
def row_sums(double(N,M) A) -> (y: s) { y(i) +=! A(i,j) }
def last_sums(double(N,M,K) A) -> (y: csr) { y(i,j) +=! A(i,j,k) }
def misses(double(N,M) S: csr, double(N,K) U, double(M,K) V) -> (E: csr) {
    P(i,j) +=! U(i,k) * V(j,k) where exists S(i,j)
    E(i,j) = S(i,j) - P(i,j)
}
""")


def test_a_second_sum_adds_to_the_first_at_shared_places() -> None:
    a, b = matrix(30, 20, 11, 0.3), matrix(30, 20, 12, 0.3)
    rng = np.random.default_rng(13)
    c, d, e = rng.random((30, 5)), rng.random((20, 5)), rng.random((30, 5))
    result = SUMS.twice(tc.as_sparse(b), *map(torch.from_numpy, (c, d)), tc.as_sparse(a), torch.from_numpy(e))
    np.testing.assert_allclose(dense(result), b.toarray() * ((c + e) @ d.T) * (a.toarray() != 0))


def test_sums_of_dense_operands_are_stored_where_they_are_not_0() -> None:
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    x[2], x[5, 1] = 0, 0
    rows = SUMS.row_sums(x[:, 0])
    assert rows.coordinates().tolist() == [[0, 1, 3, 4, 5]]
    torch.testing.assert_close(rows.to_dense(), x[:, 0].sum(1))
    sums = SUMS.last_sums(x)
    assert sums.values.numel() == 6 * 4 - 5
    torch.testing.assert_close(sums.to_dense(), x.sum(2))


def test_a_result_has_the_places_that_a_temporary_shares() -> None:
    s = matrix(30, 20, 14, 0.3)
    u, v = torch.randn(30, 5, dtype=torch.float64), torch.randn(20, 5, dtype=torch.float64)
    S = tc.as_sparse(s)
    assert "E: csr, with the stored places of S" in SUMS.misses.compile(S, u, v).source()
    expected = s.toarray() - (u @ v.T).numpy() * (s.toarray() != 0)
    np.testing.assert_allclose(dense(SUMS.misses(S, u, v)), expected)


def test_a_converted_operand_stores_the_same_elements() -> None:
    """A dense tail between its other levels."""
    formats = {"T0": "ds(1,0)", "T2": "ssd", "y": "dcsc"}
    op = tc.from_notation("y(k,j) = T0(j,i)*T1(j)*T2(k,j,i)", formats=formats)
    x = torch.zeros(2, 2, 2)
    x[0, 0], x[1, 1] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    first = tc.as_sparse(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), "ds(1,0)")
    result = op(first, torch.ones(2), tc.as_sparse(x, "ssd"))
    assert result.coordinates().tolist() == [[1], [1]]
    assert result.values.tolist() == [7.0]


@pytest.mark.parametrize("format", ["dq", "sq"])
def test_a_format_with_one_coordinate_per_row_holds_just_that(format: str) -> None:
    op = tc.define(f"def f(double(N,M) A: csr) -> (T: {format}) {{ T(i,j) = 2 * A(i,j) }}").f
    for x in (torch.eye(3), torch.diag(torch.tensor([1.0, 0.0, 2.0]))):  # also where a row stores nothing
        found = op(tc.as_sparse(x.double(), "csr")).check()
        assert str(found.format) == format
        assert torch.equal(found.to_dense(), 2 * x.double())
    with pytest.raises(tc.ArgumentError, match="holds one coordinate where the tensor has several"):
        op(tc.as_sparse(torch.ones(2, 2).double(), "csr"))


@pytest.mark.parametrize(("statement", "expected"), [
    ("T(j,l,i) = exp(A(j,l,i))", lambda a, _: a.exp()),
    ("T(j,l,i) = A(j,l,i) * B(j,l,i)", lambda a, b: a * b),
    ("T(j) +=! exp(A(j,l,i))", lambda a, _: a.exp().sum((1, 2))),
    ("T(j,l,i) = x(l) < 2 ? A(j,l,i) : x(l)", lambda a, _: torch.where(torch.arange(2)[:, None] < 2, a, 0.0)),
])  # fmt: skip
def test_padding_that_repeats_is_added_to_its_element(statement: str, expected: Any) -> None:
    """Below repeated coordinates, every place of the dense level has an element, which may be stored twice."""
    pos, crd, padded = torch.tensor([0, 3]), torch.tensor([0, 0, 2]), torch.tensor([0, 1, 0, 0, 1, 0])
    values = torch.tensor([3.0, 0.0, 0.0, -2.0, 5.0, 0.0], dtype=torch.float64)
    a = tc.SparseTensor.from_arrays("udq", (3, 2, 2), [(pos, crd), None, (None, padded)], values)
    b = tc.as_sparse(torch.tensor([[[0, 2], [1, 1]], [[1, 0], [1, 1]], [[1, 4], [0, 1]]], dtype=torch.float64), "csf")
    op = tc.define(f"def f(double(J,L,I) A: udq, double(J,L,I) B, double(L) x) -> (T) {{ {statement} }}").f
    found = op(a, b, torch.arange(2, dtype=torch.float64))
    torch.testing.assert_close(found, expected(a.to_dense(), b.to_dense()))


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("y +=! abs(A(0,k) * c)", 0.0),
        ("y *=! 1 + A(0,k) * c where exists A(0,k)", 1.0),
        ("y max=! A(0,k) * c where exists A(0,k)", -torch.inf),
    ],
)
def test_a_scalar_without_terms_is_the_identity(
    statement: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 0 stores nothing, so no loop is entered; the memory of the result must not show."""
    f = tc.define(f"def f(double(N,K) A: dcsr, double c) -> (y) {{ {statement} }}").f
    a = torch.zeros((3, 4), dtype=torch.float64)
    a[1, 2] = 1
    sparse = tc.as_sparse(a, "dcsr")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kwargs: empty(*sizes, **kwargs).fill_(7))
    assert f(sparse, 2.0).item() == expected


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("operator", ["max=!", "min=!", "*=!", "+=!"])
def test_nonzero_results_of_dense_operands_count_terms_that_are_0(operator: str, rows: int) -> None:
    """The terms of a maximum, minimum or product are needed even where they are 0, or where there are none."""
    f = tc.define(f"def f(double(N,K,M) D) -> (T: s) {{ T(m) {operator} D(i,k,m) where i in 0:{rows} }}").f
    x = torch.tensor([[-1.0, 0, 2, 0], [0, -3, 0, 5]], dtype=torch.float64).expand(2, 2, 4)
    found, expected = (y.to_dense() for y in (f(x), f.reference(x)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", ["D(i,m)", "1 + D(i,m)", "D(i,m) * E(i)"])
def test_sums_of_dense_operands_that_cancel_are_not_stored(value: str) -> None:
    f = tc.define(f"def f(double(N,M) D, double(N) E) -> (T: s) {{ T(m) +=! {value} }}").f
    D = torch.tensor([[1.0, 2, 0, -1, -2], [-1, 2, 0, -1, 0]]).double()
    given = (D, torch.tensor([1.0, 1]).double())
    found, expected = f(*given), f.reference(*given)
    assert torch.equal(found.coordinates(), expected.coordinates())
    assert torch.equal(found.values, expected.values)
    assert 0 not in found.values


def test_an_order_that_leaves_out_terms_is_refused() -> None:
    f = tc.define("def f(double(N,M) D) -> (T: s) { T(m) max=! D(i,m) }").f
    with pytest.raises(tc.ArgumentError, match="no order of loops with i, m"):
        f.compile(torch.zeros((3, 4)).double(), options=tc.SparseOptions(order=("i", "m")))


def test_results_share_no_indices_with_arrays_of_scipy() -> None:
    """SciPy changes indices in place, as when it drops zeros."""
    ops = tc.define("""
    def scaled(double(N,M) A, double(N) d) -> (C: csr, D: csr) { C(i,j) = d(i) * A(i,j)  D(i,j) = 2 * A(i,j) }
    """)
    ones = np.ones(3)
    for call in (ops.scaled, ops.scaled.assemble(sp.csr_array(np.eye(3)), ones)):
        for d in (ones, torch.ones(3).double()):
            a = sp.csr_array(np.eye(3))
            results = [*call(a, d), *call(a, d)]
            for x in (a, *results):
                before = [y.todense() if sp.issparse(y) else y.to_dense() for y in results if y is not x]
                if not sp.issparse(x):
                    continue
                x.data[0] = 0
                x.eliminate_zeros()
                after = [y.todense() if sp.issparse(y) else y.to_dense() for y in results if y is not x]
                assert all((b == c).all() for b, c in zip(before, after, strict=True))
