"""Defs from decorated functions and from statements alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tensor_comprehensions as tc


@tc.op
def scale(x: torch.Tensor, a: float) -> torch.Tensor:  # type: ignore[empty-body]
    """def scale(float(N) x, float a) -> (y) { y(i) = a * x(i) }"""


def test_the_docstring_is_the_def() -> None:
    x = torch.randn(5)
    assert torch.equal(scale(x, 2.0), 2 * x)
    assert scale.__module__ == __name__
    assert torch.equal(pickle.loads(pickle.dumps(scale))(x, 2.0), 2 * x)
    assert copy.deepcopy(scale).__name__ == "scale"


def test_the_def_of_the_functions_name_is_taken() -> None:
    @tc.op
    def second():
        """
        def first(float(N) x) -> (y) { y(i) = x(i) + 1 }
        def second(float(N) x) -> (y) { y = first(x) }
        """

    assert torch.equal(second(torch.zeros(2)), torch.ones(2))


def test_a_gradient_of_ones_own() -> None:
    @tc.op(backward=lambda inputs, outputs, gradients: [7 * gradients[0]])
    def same(x):
        """def same(float(N) x) -> (y) { y(i) = x(i) }"""

    x = torch.zeros(3, requires_grad=True)
    same(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 7.0))


def undocumented(x):
    return x


def other(a, b):
    """def other(float(N) x, float a) -> (y) { y(i) = a * x(i) }"""


def unnamed():
    """def another(float(N) x) -> (y) { y(i) = x(i) }"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (undocumented, "docstring"),
        (other, "different arguments"),
        (unnamed, "no def 'unnamed'"),
        (len, "docstring"),
        (3, "docstring"),
    ],
)
def test_functions_that_are_no_defs(function: object, words: str) -> None:
    with pytest.raises(tc.ArgumentError, match=words):
        tc.op(function)


def test_statements_alone() -> None:
    x, b = torch.randn(6), torch.randn(6)
    axpy = tc.from_expression("y(i) = a * x(i) + b(i)")
    assert torch.allclose(axpy(2.0, x, b), 2 * x + b)
    softmax = tc.from_expression(
        """
        m(i) max=! x(i,j)
        e(i,j) = exp(x(i,j) - m(i))
        s(i) +=! e(i,j)
        y(i,j) = e(i,j) / s(i)
        """,
        name="softmax",
    )
    rows = torch.randn(4, 5)
    assert torch.allclose(softmax(rows), rows.softmax(1), atol=1e-6)
    assert softmax.__name__ == "softmax"


@pytest.mark.parametrize(
    ("statements", "types", "signature"),
    [
        ("C(m,n) +=! A(m,k) * B(k,n)", {}, "float(M, K) A, float(K, N) B"),
        ("y(i) +=! x(s*i+j) where j in 0:k", {"k": "int", "s": "int"}, "float(X0) x, int s, int k"),
        ("b(i,d) = t(w(i),d)", {"w": "long"}, "float(T0, D) t, long(I) w"),
        ("y(i) = I * x(i)", {}, "float I, float(I_0) x"),
        ("y(i) = x(i) > 0 ? x(i) : nan", {}, "float(I) x"),
        ("y(i) = max(x(i), c) where c = lower + 1", {}, "float(I) x, float lower"),
        ("s +=! x(i); ".replace("; ", "\n") + "y(i) = x(i) / s", {}, "float(I) x"),
        ("y(i) = i where i in 0:10", {}, ""),
    ],
)
def test_parameters_are_what_is_read_and_not_written(statements: str, types: dict[str, str], signature: str) -> None:
    assert tc.from_expression(statements, **types).function.source.startswith(f"def expression({signature}) -> (")


@pytest.mark.parametrize(
    ("statements", "types", "error", "words"),
    [
        ("y(i) = x(i) +", {}, tc.ParseError, "unexpected"),
        ("", {}, tc.ParseError, "no statement"),
        ("(a, b) = f(x)", {}, tc.ParseError, "def"),
        ("y(i) = x(i) + x(i,j)", {}, tc.CheckError, "dimension"),
        ("y(i) = x(i)", {"z": "int"}, tc.CheckError, "not a parameter"),
        ("y(i) = x(i)", {"x": "complex"}, tc.CheckError, "not a type"),
        (3, {}, tc.ArgumentError, "not a string"),
    ],
)
def test_statements_that_are_none(statements: str, types: dict[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tc.from_expression(statements, **types)


def test_one_index_is_one_size() -> None:
    add = tc.from_expression("y(i) = a(i) + b(i)")
    with pytest.raises(tc.ArgumentError, match="size"):
        add(torch.ones(3), torch.ones(4))
