"""What derived gradients leave out, what they read where it is known already, and what calls keep for them."""

from __future__ import annotations

import pytest
from helpers import compile_last_def

from tensor_comprehensions.core.dtypes import FLOAT32, INT64
from tensor_comprehensions.tc_lang.gradients.derivatives import divide_exprs, minus, plus, times
from tensor_comprehensions.tc_lang.gradients.differentiate import differentiate
from tensor_comprehensions.tc_lang.gradients.factorize import (
    NamedProduct,
    product_to_expr,
    simplify_product,
    to_product,
    with_named_products,
)
from tensor_comprehensions.tc_lang.gradients.saved_tensors import with_saved_outputs
from tensor_comprehensions.tc_lang.ir import Access, Const, Expr, Index
from tensor_comprehensions.tc_lang.semantics.to_syntax import expr_to_syntax
from tensor_comprehensions.tc_lang.syntax.printer import to_text
from tests.helpers import differentiable as defs

ROW, J = Index("i", INT64), Index("j", INT64)


def element(name: str, *subscripts: Expr) -> Access:
    return Access(name, subscripts, FLOAT32)


A, B, S = element("a", ROW, J), element("b", ROW, J), element("s", ROW)
HALF = Const(0.5, FLOAT32)


@pytest.mark.parametrize(
    ("e", "wanted"),
    [
        (plus(times(A, S), times(A, S)), "2.0 * a(i, j) * s(i)"),
        (minus(times(A, S), times(A, S)), "0.0"),
        (minus(divide_exprs(A, S), divide_exprs(B, S)), "(a(i, j) - b(i, j)) / s(i)"),
        (plus(times(A, B), times(times(B, HALF), A)), "1.5 * a(i, j) * b(i, j)"),
        (plus(times(A, B), A), "a(i, j) * (b(i, j) + 1.0)"),
        (minus(minus(times(HALF, A), times(A, B)), times(HALF, A)), "-(a(i, j) * b(i, j))"),
        (divide_exprs(times(A, B), B), "a(i, j) * b(i, j) / b(i, j)"),
        (divide_exprs(A, times(HALF, B)), "a(i, j) / (0.5 * b(i, j))"),
    ],
)
def test_common_factors_are_taken_out_and_nothing_cancels(e: Expr, wanted: str) -> None:
    assert to_text(expr_to_syntax(simplify_product(e))) == wanted


def test_what_an_inner_loop_does_not_change_comes_first() -> None:
    e = times(times(A, S), times(B, S))
    assert to_text(expr_to_syntax(simplify_product(e, "j"))) == "s(i) * s(i) * (a(i, j) * b(i, j))"
    assert to_text(expr_to_syntax(simplify_product(e))) == "a(i, j) * s(i) * b(i, j) * s(i)"


def test_products_are_read_where_they_are_held() -> None:
    n, d = Index("n", INT64), Index("d", INT64)
    held = NamedProduct(element("y", n, d), to_product(divide_exprs(element("a", n, d), element("s", n))))
    e = divide_exprs(times(times(A, B), B), S)
    assert (
        to_text(expr_to_syntax(product_to_expr(with_named_products(to_product(e), [held], lambda x: True), FLOAT32)))
        == "y(i, j) * b(i, j) * b(i, j)"
    )
    assert with_named_products(to_product(e), [held], lambda x: False) == to_product(e)
    for other in (divide_exprs(A, element("s", J)), times(A, S), divide_exprs(element("a", J, J), S)):
        assert with_named_products(to_product(other), [held], lambda x: True) == to_product(other)


def statements(source: str, keep: bool = False) -> list[str]:
    return [line.strip() for line in differentiate(compile_last_def(source), keep=keep).source.splitlines()[1:-1]]


CANCELLED = {
    "softmax in one statement": """def f(float(N,D) x) -> (y) {
        m(n) max=! x(n,d)
        t(n) +=! exp(x(n,d) - m(n))
        y(n,d) = exp(x(n,d) - m(n)) / t(n)
    }""",
    "softmax times something": """def f(float(N,D) x, float(N,D) w) -> (z) {
        m(n) max=! x(n,d)
        e(n,d) = exp(x(n,d) - m(n))
        t(n) +=! e(n,d)
        z(n) +=! e(n,d) / t(n) * w(n,d)
    }""",
    "logarithm of a softmax": """def f(float(N,D) x) -> (y) {
        m(n) max=! x(n,d)
        t(n) +=! exp(x(n,d) - m(n))
        y(n,d) = x(n,d) - m(n) - log(t(n))
    }""",
    "logsumexp": """def f(float(N,D) x) -> (y) {
        m(n) max=! x(n,d)
        t(n) +=! exp(x(n,d) - m(n))
        y(n) = m(n) + log(t(n))
    }""",
    "attention": """def f(float(B,Q,E) q, float(B,K,E) k, float(B,K,E) v) -> (o) {
        s(b,i,j) +=! q(b,i,e) * k(b,j,e)
        m(b,i) max=! s(b,i,j)
        p(b,i,j) = exp(s(b,i,j) - m(b,i))
        t(b,i) +=! p(b,i,j)
        o(b,i,e) +=! p(b,i,j) / t(b,i) * v(b,j,e)
    }""",
}


@pytest.mark.parametrize("name", CANCELLED)
def test_a_peak_that_cancels_has_no_gradient(name: str) -> None:
    assert not any("count" in s or "d_m" in s for s in statements(CANCELLED[name]))


def test_sums_of_three_factors_are_sums_of_two_where_that_takes_no_more_memory() -> None:
    found = statements(CANCELLED["attention"], keep=True)
    assert found[:5] == [
        "s(b, i, j) +=! q(b, i, e) * k(b, j, e)",
        "p(b, i, j) = exp(s(b, i, j) - m(b, i))",
        "part_p(b, i, j) +=! d_o(b, i, e) * v(b, j, e)",
        "sum_t(b, i) +=! part_p(b, i, j) * p(b, i, j)",
        "d_s(b, i, j) = (part_p(b, i, j) - sum_t(b, i) / t(b, i)) * p(b, i, j) / t(b, i)",
    ]
    bilinear = "def f(float(I,J,K) x, float(J,R) b, float(K,R) c) -> (m) { m(i,r) +=! x(i,j,k) * b(j,r) * c(k,r) }"
    assert not any("part" in s for s in statements(bilinear))


def test_a_peak_that_does_not_cancel_has_one() -> None:
    text = """def f(float(N,D) x) -> (y) {
        m(n) max=! x(n,d)
        t(n) +=! exp(x(n,d) - 2 * m(n))
        y(n) = m(n) + log(t(n))
    }"""
    assert any("count_m" in s for s in statements(text))


def test_what_deviates_from_a_mean_sums_to_nothing() -> None:
    text = (
        "def f(float(N,D) x) -> (v) { m(n) +=! x(n,d)\n m(n) = m(n) / D\n v(n) +=! (x(n,d) - m(n)) * (x(n,d) - m(n)) }"
    )
    assert statements(text)[2:] == ["d_x(n, d) = 2.0 * d_v(n) * (x(n, d) - m(n))"]
    assert len(statements(text.replace("/ D", "/ 7"))) > 3


def test_a_call_keeps_sums_and_what_is_as_small() -> None:
    def kept(source: str) -> tuple[str, ...]:
        return differentiate(compile_last_def(source), keep=True).saved_names

    assert kept(defs.SWIGLU) == ("s", "u", "v")
    assert kept(defs.LAYERNORM) == ("mean", "r")
    assert kept(defs.SOFTMAX) == kept(defs.MATMUL) == kept(defs.SHIFTED) == ()
    assert kept(CANCELLED["attention"]) == ("m", "t")


def test_a_mask_of_a_def_is_around_the_sums_of_its_gradient() -> None:
    mask = {
        "m(b,i) max=! s(b,i,j)": "m(b,i) max=! j <= i ? s(b,i,j) : -inf",
        "= exp(s(b,i,j) - m(b,i))": "= j <= i ? exp(s(b,i,j) - m(b,i)) : 0",
        "+=! p(b,i,j) / t(b,i) * v(b,j,e)": "+=! j <= i ? p(b,i,j) / t(b,i) * v(b,j,e) : 0",
    }
    text = CANCELLED["attention"]
    for plain, masked in mask.items():
        text = text.replace(plain, masked)
    found = statements(text, keep=True)
    assert not any("count" in s or "d_m" in s for s in found)
    assert sum(s.count("exp") for s in found) == 1
    sums = [s for s in found if s.startswith(("d_q(", "d_k(", "d_v("))]
    assert len(sums) == 3
    assert all("j <= i ?" in s for s in sums)


def test_a_def_that_keeps_temporaries_returns_them_last() -> None:
    function = with_saved_outputs(compile_last_def(defs.LAYERNORM), ("mean", "r"))
    assert function.returns == ("y", "mean", "r")
    assert [t.name for t in function.tensors] == ["x", "w", "b", "y", "mean", "r", "var"]
    assert function.canonical != compile_last_def(defs.LAYERNORM).canonical


def test_outputs_are_passed_rather_than_computed_again() -> None:
    both = defs.LAYERNORM.replace("-> (y)", "-> (y, mean, r)")
    gradient = differentiate(compile_last_def(both))
    assert {("output", "mean"), ("output", "r")} <= set(gradient.inputs)
    assert "var" not in gradient.source
