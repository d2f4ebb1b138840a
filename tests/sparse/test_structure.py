"""Patterns are checked and converted once, and again when their arrays change; nothing goes unchecked into a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.dispatch.sparse import structure
from tensor_comprehensions.dispatch.sparse.sparse_tensor import to_format
from tensor_comprehensions.tc_lang.formats import parse_format

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
OPS = tc.define("""
def spmv(double(N,M) A, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def symmetric(double(N,N) A: csr) -> (double(N,N) C: csr) { C(i,j) = A(i,j) + A(j,i) }
""")
X = torch.arange(1.0, 4.0, dtype=torch.float64)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is checked and converted, in order."""
    done: list[str] = []
    check, convert = structure.check_parts, structure._make_conversion

    def checked(*args: Any) -> None:
        done.append("check")
        check(*args)

    def converted(*args: Any) -> structure.LevelConversion:
        done.append("convert")
        return convert(*args)

    monkeypatch.setattr(structure, "check_parts", checked)
    monkeypatch.setattr(structure, "_make_conversion", converted)
    return done


def matrix(pos: list[int], crd: list[int], dtype: torch.dtype = torch.int32) -> tc.SparseTensor:
    """A 3 x 3 matrix with the values 1, 2, 3, ..., whose parts nobody has checked."""
    values = torch.arange(1.0, len(crd) + 1, dtype=torch.float64)
    levels = (None, (torch.tensor(pos, dtype=dtype), torch.tensor(crd, dtype=dtype)))
    return tc.SparseTensor(to_format("csr", 2), (3, 3), levels, values)


def test_a_pattern_is_checked_once(checks: list[str]) -> None:
    a = matrix([0, 2, 2, 3], [0, 2, 1])
    for _ in range(3):
        assert OPS.spmv(a, X).tolist() == [7.0, 0.0, 6.0]
    assert OPS.spmv(a.with_values(2 * a.values), X).tolist() == [14.0, 0.0, 12.0]
    assert checks == ["check"]


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
def test_a_pattern_of_torch_is_checked_once(layout: torch.layout, checks: list[str]) -> None:
    a = matrix([0, 2, 2, 3], [0, 2, 1]).to_dense().to_sparse(layout=layout)
    a = a.coalesce() if layout is torch.sparse_coo else a
    for _ in range(3):
        assert OPS.spmv(a, X).tolist() == [7.0, 0.0, 6.0]
    assert checks == ["check"]


def test_what_changes_in_place_is_checked_again(checks: list[str]) -> None:
    a = matrix([0, 2, 2, 3], [0, 2, 1])
    OPS.spmv(a, X)
    crd = a.levels[1][1]  # type: ignore[index]
    crd[2] = 0
    assert OPS.spmv(a, X).tolist() == [7.0, 0.0, 3.0]
    crd[2] = 99
    with pytest.raises(tc.ArgumentError, match="99"):
        OPS.spmv(a, X)
    assert checks == ["check"] * 3


def test_parts_of_torch_that_change_in_place_are_checked_again() -> None:
    a = matrix([0, 2, 2, 3], [0, 2, 1]).torch()
    OPS.spmv(a, X)
    a.col_indices()[2] = 7
    with pytest.raises(tc.ArgumentError, match="7"):
        OPS.spmv(a, X)


def test_scipy_arrays_are_checked_at_every_call() -> None:
    pytest.importorskip("scipy")
    a = matrix([0, 2, 2, 3], [0, 2, 1]).scipy()
    x = X.numpy()
    kept = [OPS.spmv(a, x)]
    a.indices[2] = 0
    kept.append(OPS.spmv(a, x))
    assert kept[1].tolist() == [7.0, 0.0, 3.0]
    a.indices[2] = 7
    with pytest.raises(tc.ArgumentError, match="7"):
        OPS.spmv(a, x)
    a.indptr[1] = 1 << 30
    del a._has_canonical_format
    with pytest.raises(tc.ArgumentError, match="goes back"):
        OPS.spmv(a, x)


@pytest.mark.parametrize(
    ("pos", "crd", "says"),
    [
        ([0, 2, 2, 9], [0, 2, 1], "ends at 9"),
        ([0, 2, 1, 3], [0, 2, 1], "goes back"),
        ([0, 2, 2, 3], [2, 0, 1], "sorted"),
    ],
)
def test_tensors_made_of_parts_are_checked_when_they_are_passed(pos: list[int], crd: list[int], says: str) -> None:
    with pytest.raises(tc.ArgumentError, match=says):
        OPS.spmv(matrix(pos, crd), X)


def test_values_that_are_replaced_are_checked() -> None:
    a = matrix([0, 2, 2, 3], [0, 2, 1])
    OPS.spmv(a, X)
    a.values = a.values[:1]
    with pytest.raises(tc.ArgumentError, match="3 stored positions"):
        OPS.spmv(a, X)


@pytest.mark.parametrize("values", ["meta", "subclass", "zero"])
def test_values_that_are_no_plain_memory(values: str) -> None:
    class Strange(Tensor):
        pass

    a = matrix([0, 2, 2, 3], [0, 2, 1])
    if values == "zero":
        a.values = torch._efficientzerotensor(3, dtype=torch.float64)
        assert OPS.spmv(a, X).tolist() == [0.0] * 3
        return
    if values == "subclass":  # goes through the dispatcher, as with dense tensors
        expected = OPS.spmv(a, X)
        a.values = a.values.as_subclass(Strange)
        found = OPS.spmv(a, X)
        assert isinstance(found, Strange)
        assert torch.equal(found.as_subclass(Tensor), expected)
        return
    a.values = a.values.to("meta")
    with pytest.raises(tc.ArgumentError):
        OPS.spmv(a, X)


def test_arrays_with_gaps_and_of_two_types() -> None:
    pos = torch.tensor([0, 9, 2, 9, 2, 9, 3, 9])[::2]
    crd = torch.tensor([0, 9, 2, 9, 1, 9], dtype=torch.int32)[::2]
    values = torch.tensor([1.0, 9.0, 2.0, 9.0, 3.0, 9.0], dtype=torch.float64)[::2]
    a = tc.SparseTensor.from_arrays("csr", (3, 3), [None, (pos, crd)], values)
    assert OPS.spmv(a, X).tolist() == [7.0, 0.0, 6.0]
    assert torch.equal(OPS.symmetric(a).to_dense(), a.to_dense() + a.to_dense().T)


def test_a_conversion_is_made_once(checks: list[str]) -> None:
    a = matrix([0, 2, 2, 3], [0, 2, 1])
    for n in (1.0, 2.0):
        b = a.with_values(n * a.values)
        assert torch.equal(OPS.symmetric(b).to_dense(), b.to_dense() + b.to_dense().T)
    assert checks == ["check", "convert"]


def test_what_is_known_goes_with_the_memory() -> None:
    before = len(structure._known._entries)
    a = matrix([0, 2, 2, 3], [0, 2, 1])
    OPS.symmetric(a)
    assert len(structure._known._entries) == before + 1
    del a
    assert len(structure._known._entries) == before


MATRIX = tc.as_sparse(torch.eye(4), "csr")
PRODUCT = tc.define("def f(float(N,M) A, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }").f
AXPY = tc.define("def axpy(float a, float(N) x) -> (float(N) y) { y(i) += a * x(i) }").axpy
MISTAKES: dict[str, Callable[[], object]] = {
    "a name as the format": lambda: tc.SparseTensor("csr", (4, 4), MATRIX.levels, MATRIX.values),  # type: ignore[arg-type]
    "a number as the shape": lambda: tc.SparseTensor(MATRIX.format, 4, MATRIX.levels, MATRIX.values),  # type: ignore[arg-type]
    "words in the shape": lambda: tc.SparseTensor(MATRIX.format, (4, "N"), MATRIX.levels, MATRIX.values),  # type: ignore[arg-type]
    "no levels": lambda: tc.SparseTensor(MATRIX.format, (4, 4), None, MATRIX.values),  # type: ignore[arg-type]
    "a number as formats": lambda: tc.define("def f(float(N) A) -> (y) { y(i) = A(i) }", formats=5),  # type: ignore[arg-type]
    "a format against the text": lambda: tc.define("def f(float(N) A: s) -> (y) { y +=! A(i) }", formats={"A": "u"}),
    "a layout without a format": lambda: PRODUCT(torch.eye(4).to_mkldnn(), torch.ones(4)),
    "a sparse in/out value": lambda: AXPY(1.0, torch.ones(4), y=tc.as_sparse(torch.ones(4), "s")),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_argument_errors(kind: str) -> None:
    with pytest.raises(tc.ArgumentError):
        MISTAKES[kind]()


def test_padding_that_is_stored_several_times_is_converted() -> None:
    """Each row of both positions of the first level holds one coordinate, 0 where nothing is stored."""
    t = tc.SparseTensor.from_coordinates([[0, 0], [0, 1], [2, 3]], torch.tensor([1.0, 2.0]), (1, 3, 7), "udq")
    assert t.nnz == 6
    for word, order in (("sss", (0, 1, 2)), ("dds", ()), ("sds", (1, 0, 2))):
        converted = structure.convert_format(t, parse_format(word, order, 3), structure.structure_of(t))
        assert torch.equal(converted.check().to_dense(), t.to_dense())
    f = tc.define("def f(double(M,P,N) A: udq, double(N,P,M) B: sss) -> (T: sss) { T(h,l,m) = A(m,l,h) + B(h,l,m) }").f
    B = tc.as_sparse(torch.rand(7, 3, 1).double(), "sss")
    expected = t.to_dense().double().permute(2, 1, 0) + B.to_dense()
    assert torch.equal(f(t.with_values(t.values.double()), B).check().to_dense(), expected)
