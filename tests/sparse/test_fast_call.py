"""The short way of a call gives what the long way gives, and leaves to it whatever is not as it was."""

from __future__ import annotations

from typing import Any

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


def make_lane(op: tc.Op, *operands: Any) -> None:
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
    make_lane(op, a, x)
    assert op(tc.as_sparse(matrix().flip(1), "csr"), x).tolist() == [3.0, 3.0]
    assert op(tc.as_sparse(matrix()[:, :2].contiguous(), "csr"), x[:2]).tolist() == [1.0, 0.0]
    assert len(longs) == 4


def test_ever_new_patterns_make_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(SparseKernels, "lane", lambda _, call, __: made.append(call))
    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    for operand in (a, tc.as_sparse(matrix(), "csr"), a, tc.as_sparse(matrix().flip(1), "csr")):
        assert op(operand, x).tolist() == [3.0, 3.0]
    assert not made
    op(operand, x)
    assert len(made) == 1


def test_arrays_that_change_in_place_are_checked_again() -> None:
    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    make_lane(op, a, x)
    a.levels[1][1][2] = 100  # type: ignore[index]
    with pytest.raises(tc.ArgumentError, match="100"):
        op(a, x)


@pytest.mark.usefixtures("server")
def test_what_a_lane_must_not_take() -> None:
    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    make_lane(op, a, x)
    y = op(a, x.clone().requires_grad_())
    assert y.requires_grad
    make_lane(op, a, x)
    assert op(a, torch.ones(6, dtype=torch.float64)[::2]).tolist() == [3.0, 3.0]
    make_lane(op, a, x)
    with pytest.raises(tc.ArgumentError):
        op(a, x.float())
    make_lane(op, a, x)
    a.values.requires_grad_()
    assert op(a, x).requires_grad


def test_a_lane_keeps_no_operand() -> None:
    import weakref

    op, x = tc.define(SPMV).spmv, torch.ones(3, dtype=torch.float64)
    a = tc.as_sparse(matrix(), "csr")
    memory = [weakref.ref(t.untyped_storage()) for t in (a.values, x, *a.levels[1])]  # type: ignore[union-attr, misc]
    make_lane(op, a, x)
    assert op(a, x).tolist() == [3.0, 3.0]
    del a, x
    assert all(m() is None for m in memory)
