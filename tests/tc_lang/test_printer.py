"""Printing trees, and the canonical form."""

from __future__ import annotations

import pytest
from cases import CASES
from hypothesis import given
from hypothesis import strategies as st

from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.tc_lang import compile_source
from tensor_comprehensions.tc_lang.syntax import tree as s
from tensor_comprehensions.tc_lang.syntax.parse import parse_program
from tensor_comprehensions.tc_lang.syntax.printer import to_text

names = st.sampled_from(["a", "b", "in", "min", "exists", "floaty"])
numbers = st.one_of(st.integers(0, 2**31 - 1), st.floats(0, 1e300, allow_nan=False))
leaves = st.one_of(
    st.builds(s.Number, numbers), st.builds(s.Name, names), st.builds(s.Extent, names, st.integers(0, 5))
)
BINARY = ("+", "-", "*", "/", "%", "<", "<=", ">", ">=", "==", "!=", "&&", "||")


def _larger(e: st.SearchStrategy[s.Expression]) -> st.SearchStrategy[s.Expression]:
    return st.one_of(
        st.builds(s.Unary, st.sampled_from("-!"), e),
        st.builds(s.Binary, st.sampled_from(BINARY), e, e),
        st.builds(s.Conditional, e, e, e),
        st.builds(s.Apply, names, st.lists(e, max_size=3).map(tuple)),
    )


expressions = st.recursive(leaves, _larger, max_leaves=20)


@given(expressions)
def test_expressions_round_trip(e: s.Expression) -> None:
    text = f"def f() -> (b) {{ b = {to_text(e)} where i in {to_text(e)}:{to_text(e)} }}"
    statement = parse_program(text).defs[0].body[0]
    assert isinstance(statement, s.Statement)
    assert statement.value == e
    assert statement.clauses == (s.Range("i", e, e),)


@pytest.mark.parametrize("case", [c for c in CASES if c.record.get("error") != "parse"], ids=lambda c: c.id)
def test_programs_round_trip(case: object) -> None:
    program = parse_program(case.source)  # type: ignore[attr-defined]
    assert parse_program(to_text(program)) == program


def test_brackets_only_where_needed() -> None:
    text = "def f() -> (b) {\n    b = (a + b) * -c - (d - e) + (x ? y : z) / (p || q)\n}"
    assert to_text(parse_program(text)) == text


def canonical(source: str) -> str:
    return compile_source(source)[-1].canonical


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "def f(float(N) a) -> (b) { b(i) = a(i) }",
            "def  g(float(M) # x\n x) -> (y) { y(k) = x(k) }",
        ),
        (
            "def f(float(N,K) A) -> (s) { s(i) = 0 s(j) += fmax(A(j,k), 0) }",
            "def f(float(N,K) A) -> (s) { s(i) = 0 s(i) += fmaxf(A(i,j), 0) }",
        ),
        (
            "def g(float(N) x) -> (y) { y(i) = x(i) } def f(float(N) a) -> (b) { b = g(a) }",
            "def h(float(P) u) -> (v) { v(k) = u(k) } def k(float(Q) a) -> (c) { c = h(a) }",
        ),
        (
            "def f(float(N) a) -> (b) { b(i) = x where x = a(i) }",
            "def f(float(N) a) -> (b) { b(j) = y where y = a(j) }",
        ),
    ],
)
def test_equal_up_to_names(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(float(N,M) a) -> (b) { b(i,j) = a(i,j) }", "def f(float(N,N) a) -> (b) { b(i,j) = a(i,j) }"),
        ("def f(float(N,N) a) -> (b) { b(i,j) = a(i,j) }", "def f(float(N,N) a) -> (b) { b(i,j) = a(j,i) }"),
        ("def f(float(N) a) -> (b) { b(i) = exp(a(i)) }", "def f(float(N) a) -> (b) { b(i) = log(a(i)) }"),
        (
            "def f(float(N) exp) -> (b) { b(i) = exp(i) }",
            "def f(float(N) a) -> (b) { b(i) = exp(i) where exists a(i) }",
        ),
        ("def f(float(N) a) -> (b) { b(i) = a(i) + inf }", "def f(float(N) a, float x) -> (b) { b(i) = a(i) + x }"),
    ],
)
def test_different_programs(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)


def test_canonical_text_is_its_own_canonical_form() -> None:
    for case in CASES:
        try:
            text = compile_source(case.source)[0].canonical
        except TCError:
            continue
        assert compile_source(text)[0].canonical == text
