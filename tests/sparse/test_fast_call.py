"""The fast path of a call gives what the slow path gives, and leaves to it whatever has changed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.dispatch.sparse import fast_call
from tensor_comprehensions.dispatch.sparse.sparse_kernels import SparseKernels
from tensor_comprehensions.torch_ext.sparse_op import SparseOp

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
SPMV = "def spmv(double(N,M) A, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }"


def matrix() -> torch.Tensor:
    return torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]], dtype=torch.float64)


def use_fast_path(op: tc.Op, *operands: Any) -> None:
    """Call twice with the same operands: the second call makes the fast path."""
    for _ in range(2):
        op(*operands)


@pytest.fixture
def longs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that go the long way."""
    calls: list[Any] = []
    run = SparseOp.call_eagerly

    def counted(self: SparseOp, *args: Any) -> Any:
        calls.append(args)
        return run(self, *args)

    monkeypatch.setattr(SparseOp, "call_eagerly", counted)
    return calls


@pytest.fixture(params=["machine code", "Python"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves short calls: machine code, or Python where that does not know this torch."""
    if request.param == "Python":
        monkeypatch.setattr(fast_call.availability, "is_fast_path_available", lambda: False)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("kind", ["csr", "csc", "dcsr", "torch csr", "torch csc"])
def test_calls_like_the_one_before(kind: str, longs: list[Any]) -> None:
    op = tc.define(SPMV).spmv
    a = tc.as_sparse(matrix(), kind.removeprefix("torch "))
    given = a.torch() if kind.startswith("torch") else a
    for n in (1.0, 2.0, 3.0, 4.0):
        x = torch.full((3,), n, dtype=torch.float64)
        assert op(given, x).tolist() == [3 * n, 3 * n]
    assert len(longs) == 2
    a.values *= 2  # the same memory
    assert op(given, x).tolist() == [24.0, 24.0]
    assert len(longs) == 2


def test_other_places_and_sizes_go_the_long_way(longs: list[Any]) -> None:
    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    use_fast_path(op, a, x)
    assert op(tc.as_sparse(matrix().flip(1), "csr"), x).tolist() == [3.0, 3.0]
    assert op(tc.as_sparse(matrix()[:, :2].contiguous(), "csr"), x[:2]).tolist() == [1.0, 0.0]
    assert len(longs) == 4


def test_ever_new_patterns_make_no_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(SparseKernels, "make_fast_call", lambda _, call, *__: made.append(call))
    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    for operand in (a, tc.as_sparse(matrix(), "csr"), tc.as_sparse(matrix().flip(1), "csr")):
        assert op(operand, x).tolist() == [3.0, 3.0]
    assert not made
    for _ in range(3):
        op(operand, x)
    assert len(made) == 1  # one for each pattern, although it takes no calls here


def test_arrays_that_change_in_place_are_checked_again() -> None:
    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    use_fast_path(op, a, x)
    a.levels[1][1][2] = 100  # type: ignore[index]
    with pytest.raises(tc.ArgumentError, match="100"):
        op(a, x)


@pytest.mark.usefixtures("server")
def test_what_the_fast_path_must_not_take() -> None:
    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    use_fast_path(op, a, x)
    y = op(a, x.clone().requires_grad_())
    assert y.requires_grad
    use_fast_path(op, a, x)
    assert op(a, torch.ones(6, dtype=torch.float64)[::2]).tolist() == [3.0, 3.0]
    use_fast_path(op, a, x)
    with pytest.raises(tc.ArgumentError):
        op(a, x.float())
    use_fast_path(op, a, x)
    a.values.requires_grad_()
    assert op(a, x).requires_grad


def test_the_fast_path_keeps_no_operand() -> None:
    import weakref

    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    memory = [weakref.ref(t.untyped_storage()) for t in (a.values, x, *a.levels[1])]  # type: ignore[union-attr, misc]
    use_fast_path(op, a, x)
    assert op(a, x).tolist() == [3.0, 3.0]
    del a, x
    assert all(m() is None for m in memory)


SPARSE = {
    "a sum": "def f(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) + B(i,j) }",
    "a product of elements": "def f(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) * B(i,j) }",
    "a matrix product": "def f(double(N,M) A: csr, double(M,K) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }",
    "shared places": "def f(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr, s, D: csr) {"
    " C(i,j) = 2 * A(i,j)  s(i) +=! A(i,j)  D(i,j) = A(i,j) - B(i,j) }",
}


def square(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((6, 6), generator=generator, dtype=torch.float64)
    return torch.where(x < 0.4, x, 0.0)


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def all_dense(results: Any) -> list[torch.Tensor]:
    return [x.check().to_dense() if isinstance(x, tc.SparseTensor) else x.to_dense() for x in as_tuple(results)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("server", "threads")
@pytest.mark.parametrize("kind", ["csr", "torch csr"])
@pytest.mark.parametrize("text", SPARSE)
def test_sparse_results(text: str, kind: str, longs: list[Any]) -> None:
    op = tc.define(SPARSE[text]).f
    a, b = (tc.as_sparse(square(n), "csr") for n in range(2))
    given = [x.torch() if kind == "torch csr" else x for x in (a, b)]
    expected = all_dense(op(*given))
    kinds = [type(x) for x in as_tuple(op(*given))]
    assert len(longs) == 2
    for factor in (1.0, 2.0):
        a.values *= factor
        b.values *= factor
        results = op(*given)
        scale = factor * factor if "*" in SPARSE[text] and "2 *" not in SPARSE[text] else factor
        for x, y in zip(all_dense(results), expected, strict=True):
            torch.testing.assert_close(x, scale * y)
        assert [type(x) for x in as_tuple(results)] == kinds
    assert len(longs) == 2


def test_results_of_two_calls_share_no_memory(longs: list[Any]) -> None:
    op = tc.define(SPARSE["a sum"]).f
    a, b = (tc.as_sparse(square(n), "csr") for n in range(2))
    use_fast_path(op, a, b)
    first, second = op(a, b), op(a, b)
    assert len(longs) == 2
    first.levels[1][1].zero_()
    first.levels[1][0].zero_()
    assert torch.equal(second.check().to_dense(), square(0) + square(1))
    assert torch.equal(op(a, b).check().to_dense(), square(0) + square(1))


def test_patterns_and_sizes_that_alternate(longs: list[Any]) -> None:
    op = tc.define("def f(double(N,M) A: csr, double(M,K) X) -> (Y) { Y(i,k) +=! A(i,j) * X(j,k) }").f
    matrices = [square(n) for n in range(3)]
    operands = [(tc.as_sparse(m, "csr"), torch.rand(6, k, dtype=torch.float64), m) for m in matrices for k in (2, 3)]
    for n in range(4):
        for a, x, m in operands:
            torch.testing.assert_close(op(a, x), m @ x)
            torch.testing.assert_close(op(a.torch(), x), m @ x)
        if n == 1:
            done = len(longs)
    assert len(longs) == done


def test_results_whose_places_follow_values_go_the_long_way(longs: list[Any]) -> None:
    op = tc.define("def f(double(N) x, double(N) y: s) -> (C: s, s) { C(i) = x(i)  s +=! y(i) }").f
    x, y = torch.tensor([1.0, 0.0, 2.0]).double(), tc.as_sparse(torch.ones(3).double(), "s")
    use_fast_path(op, x, y)
    x[1] = 5.0
    assert op(x, y)[0].to_dense().tolist() == [1.0, 5.0, 2.0]
    assert len(longs) == 3


@pytest.mark.usefixtures("server", "threads")
@pytest.mark.parametrize("text", SPARSE)
def test_patterns_that_numpy_changes(text: str) -> None:
    """NumPy shares the memory of a pattern and changes no version: results may become longer, as when they are new."""
    op = tc.define(SPARSE[text]).f
    columns = [np.zeros(40, np.int32) for _ in range(2)]
    row_starts = torch.arange(41, dtype=torch.int32)
    a, b = (
        tc.SparseTensor.from_arrays("csr", (40, 40), [None, (row_starts, torch.from_numpy(c))], torch.ones(40).double())
        for c in columns
    )
    for step in range(6):
        if step > 2:
            columns[0][:] = (np.arange(40) * step) % 40
            columns[1][:] = (np.arange(40) * step + step % 2) % 40
        x, y = a.to_dense(), b.to_dense()
        expected = {
            "a sum": (x + y,), "a product of elements": (x * y,), "a matrix product": (x @ y,),
            "shared places": (2 * x, x.sum(1), x - y),
        }[text]  # fmt: skip
        for found, right in zip(as_tuple(op(a, b)), expected, strict=True):
            found = found.check().to_dense() if isinstance(found, tc.SparseTensor) else found
            torch.testing.assert_close(found, right)


def test_threads_call_at_the_same_time() -> None:
    op = tc.define(SPARSE["a matrix product"]).f
    a, b = (tc.as_sparse(square(n), "csr") for n in range(2))
    use_fast_path(op, a, b)
    expected = op(a, b).to_dense()
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(c.check().to_dense(), expected) for c in pool.map(lambda _: op(a, b), range(200)))
