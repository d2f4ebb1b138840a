"""Index notation becomes the statements that its sums imply, for any formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sparse_cases import Case, Operand, cases, complete, format_of

import tensor_comprehensions as tc
from tensor_comprehensions.sparse.index_notation import notation_to_def

CASES = [c for c in cases() if "notation" in c.record]


def argument(x: Operand) -> Any:
    if x.format is None:
        return torch.from_numpy(np.asarray(x.values))
    where = np.stack(np.nonzero(x.places))
    return tc.SparseTensor.from_coordinates(where, x.values[x.places], x.values.shape, x.format)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_conformance(case: Case) -> None:
    operands = case.operands()
    types = dict.fromkeys(operands, "double")
    op = tc.from_notation(case.record["notation"], formats=case.record["formats"], **types)
    found = op(*(argument(x) for x in operands.values()))
    (expected,), (name,) = case.expected(operands), case.returns
    places = case.stored(operands).get(name)
    if places is None:
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
        return
    format = format_of(case.record["formats"][name], places.ndim)
    assert found.check().format == format
    np.testing.assert_allclose(found.to_dense().numpy(), expected, rtol=1e-9)
    stored = np.zeros(places.shape, bool)
    stored[tuple(found.coordinates().numpy())] = True
    np.testing.assert_array_equal(stored, complete(places, format))


@pytest.mark.parametrize(
    ("notation", "statements"),
    [
        ("y(i) = A(i,j)*x(j)", ["y(i) +=! A(i, j) * x(j)"]),
        ("y(i) = b(i) - A(i,j)*x(j)", ["y(i) = b(i)", "y(i) += -(A(i, j) * x(j))"]),
        ("y(i) = A(i,j)*x(j) - b(i)", ["y(i) = -b(i)", "y(i) += A(i, j) * x(j)"]),
        ("y(i) = a(i) - (b(i,j) - c(i,k)) + 3", ["y(i) = a(i) + 3", "y(i) += -b(i, j)", "y(i) += c(i, k)"]),
        ("y = -(a(i) - b(j))", ["y +=! -a(i)", "y += b(j)"]),
        ("y(i) = (A(i,j) + B(i,j))*x(j)", ["y(i) +=! (A(i, j) + B(i, j)) * x(j)"]),
        ("y(i) = max(a(i), alpha) + beta", ["y(i) = max(a(i), alpha) + beta"]),
        ("y(i) = A(i,j) where exists M(i,j)", ["y(i) +=! A(i, j) where exists M(i, j)"]),
        ("y(i) = a(i) where exists M(i,j)", ["y(i) +=! a(i) where exists M(i, j)"]),
        ("y(i) = a(k) where k = i + 1", ["y(i) = a(k) where k = i + 1"]),
        ("t(i) = A(i,j)*x(j)\n y = t(i)*t(i)", ["t(i) +=! A(i, j) * x(j)", "y +=! t(i) * t(i)"]),
    ],
)
def test_statements(notation: str, statements: list[str]) -> None:
    body = notation_to_def("f", notation, {}).splitlines()[1:-1]
    assert [line.strip() for line in body] == statements


def test_an_index_with_a_type_is_a_parameter() -> None:
    shifted = tc.from_notation("y(i) = a(i+s) * b(i)", s="int")
    assert torch.equal(shifted(torch.arange(5.0), 2, torch.ones(3)), torch.arange(2.0, 5.0))


def test_parameters_come_in_the_order_of_the_text() -> None:
    op = tc.from_notation("y(i) = alpha*A(i,j)*x(j) + beta*z(i)")
    assert [p.name for p in op.function.parameters] == ["alpha", "A", "x", "beta", "z"]


@pytest.mark.parametrize(
    ("notation", "error", "words"),
    [
        ("y(i) += a(i)", tc.ParseError, ["expected: =", "found: +=", "from_expression"]),
        ("y(i) = a(i) - b(i) where i in 0:3", tc.ParseError, ["where", "several terms"]),
        ("y(i) = ", tc.ParseError, ["unexpected"]),
        ("", tc.ParseError, ["no statement"]),
        (3, tc.ArgumentError, ["int, not a string"]),
    ],
)
def test_what_is_refused(notation: Any, error: type[tc.TCError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        tc.from_notation(notation)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


def test_a_format_for_no_tensor_is_refused() -> None:
    with pytest.raises(tc.ArgumentError, match="'B'"):
        tc.from_notation("y(i) = A(i,j)*x(j)", formats={"B": "csr"})
