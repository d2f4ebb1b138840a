"""Sparse defs called through the public interface give what the conformance programs say, and refuse what they name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sparse_cases import ERRORS, Case, Operand, cases, complete, format_of

import tensor_comprehensions as tc

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
TORCH = {"g": torch.bfloat16}
RUN = [c for c in cases() if "error" not in c.record and "tc" in c.record]
REFUSED = [c for c in cases() if "error" in c.record]


def argument(case: Case, name: str, x: Operand) -> Any:
    """The operand as the case passes it."""
    spec = case.record["inputs"].get(name)
    if x.format is None:
        dtype = TORCH.get(spec[0]) if isinstance(spec, str) else None
        dense = torch.from_numpy(x.values)
        return dense if dtype is None else dense.to(dtype)
    index = torch.int64 if spec.get("index") == "int64" else torch.int32
    if "levels" in spec or "torch_arrays" in spec:
        return make_malformed(spec)
    places = np.ones(x.values.shape, bool) if x.places is None else x.places
    where, values = np.stack(np.nonzero(places)), x.values[places]
    if spec["make"].startswith("dup"):
        where, values = np.concatenate((where, where), 1), np.concatenate((values / 4, values * 0.75))
    t = tc.SparseTensor.from_coordinates(where, values, x.values.shape, x.format, index)
    how = case.record.get("pass", "")
    if how == "torch":
        if spec["make"].startswith("dup"):
            return torch.sparse_coo_tensor(torch.from_numpy(where), torch.from_numpy(values), x.values.shape)
        return t.torch()
    if how == "scipy unsorted":
        import scipy.sparse as sp

        mixed = np.random.default_rng(0).permutation(where.shape[1])
        rows = where[0][mixed]
        order = np.argsort(rows, kind="stable")
        pos = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=x.values.shape[0]))))
        return sp.csr_array((values[mixed][order], where[1][mixed][order], pos), shape=x.values.shape)
    return t.scipy() if how == "scipy" else t


def make_malformed(spec: dict[str, Any]) -> Any:
    dtype = getattr(torch, spec.get("index", "int32"))
    values = torch.tensor(spec["values"], dtype=torch.float64)
    if "torch_arrays" in spec:
        pos, crd = (torch.tensor(a) for a in spec["torch_arrays"])
        return torch.sparse_csr_tensor(pos, crd, values, spec["shape"], check_invariants=False)
    levels = [None if a is None else tuple(torch.tensor(x, dtype=dtype) for x in a) for a in spec["levels"]]
    levels += [None] * (len(spec["format"].partition("(")[2].split(",")) if spec["format"].startswith("bs") else 0)
    return tc.SparseTensor.from_arrays(spec["format"], spec["shape"], levels, values)


def call(case: Case) -> tuple[Any, ...]:
    op = list(tc.define(case.record["tc"], formats=case.record.get("define_formats")))[-1]
    operands = {name: argument(case, name, x) for name, x in case.operands().items()}
    initial = {name: torch.from_numpy(x.values) for name, x in case.initial().items()}
    result = op(*operands.values(), **initial)
    return result if isinstance(result, tuple) else (result,)


def dense(x: Any) -> np.ndarray[Any, Any]:
    if hasattr(x, "toarray"):
        return np.asarray(x.toarray())
    if isinstance(x, tc.SparseTensor):
        x = x.to_dense()
    if isinstance(x, np.ndarray):
        return x
    x = x.to_dense() if x.layout is not torch.strided else x
    return np.asarray(x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy())


@pytest.mark.parametrize("case", [c for c in RUN if "by_coordinates" not in c.record], ids=lambda c: c.id)
def test_values_places_and_formats(case: Case) -> None:
    found = call(case)
    operands = case.operands()
    for name, x, expected in zip(case.returns, found, case.expected(operands), strict=True):
        dtype = str(x.dtype).removeprefix("torch.")
        tolerance = case.record.get("tolerance", TOLERANCE.get(dtype, 0))
        values = dense(x)
        np.testing.assert_allclose(values, expected.astype(values.dtype), rtol=tolerance, atol=tolerance, err_msg=name)
        if name in case.record.get("stored", {}):
            check_stored(case, name, x, case.stored(operands)[name])


def check_stored(case: Case, name: str, x: Any, places: np.ndarray[Any, Any]) -> None:
    """The result has the format of the case, in the caller's kind of tensor, and stores these places."""
    how = case.record.get("pass", "")
    assert isinstance(x, torch.Tensor) == (how == "torch")
    assert hasattr(x, "toarray") == how.startswith("scipy")
    t = tc.as_sparse(x).check()
    format = format_of(case.record["formats"][name], places.ndim)
    assert t.format == format
    stored = np.zeros(places.shape, bool)
    stored[tuple(t.coordinates().numpy())] = True
    np.testing.assert_array_equal(stored, complete(places, format))


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.id)
def test_what_is_refused(case: Case) -> None:
    with pytest.raises(ERRORS[case.record["error"]]) as error:
        call(case)
    for word in case.record["says"]:
        assert word in str(error.value)


def test_dimensions_beyond_32_bits() -> None:
    case = next(c for c in RUN if "by_coordinates" in c.record)
    op = tc.define(case.record["tc"])[case.record["tc"].split()[1].partition("(")[0]]
    n = 3_000_000_000
    b = tc.SparseTensor.from_coordinates([[5, 7, n - 1]], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), (n,), "s")
    c = tc.SparseTensor.from_coordinates([[0, 7]], torch.tensor([4.0, 5.0], dtype=torch.float64), (n,), "s")
    a = op(b, c)
    assert a.coordinates().tolist() == [[0, 5, 7, n - 1]]
    assert a.values.tolist() == [4.0, 1.0, 7.0, 3.0]


def test_exists_with_the_indices_of_a_result_gives_it_the_places_of_that_operand() -> None:
    op = tc.define("""def f(double(N,M) B: csr, double(N,M) C: csr) -> (double(N,M) A: csr) {
        A(i,j) = 2 * C(i,j) where exists B(i,j)
    }""").f
    b = tc.as_sparse(torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64), "csr")
    c = tc.as_sparse(torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64), "csr")
    a = op(b, c)
    assert a.coordinates().tolist() == b.coordinates().tolist()
    assert a.values.tolist() == [0.0, 6.0, 0.0]
