"""The grammar: what parses, to which tree, and where errors point."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32, INT32
from tensor_comprehensions.core.errors import CheckError, ParseError, TCError
from tensor_comprehensions.tc_lang import compile_source
from tensor_comprehensions.tc_lang.syntax import tree as s
from tensor_comprehensions.tc_lang.syntax.parse import MAX_DEPTH, parse_program


def expression(text: str) -> s.Expression:
    statement = parse_program(f"def f() -> (b) {{ b = {text} }}").defs[0].body[0]
    assert isinstance(statement, s.Statement)
    return statement.value


def name(text: str) -> s.Name:
    return s.Name(text)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("3", s.Number(3)),
        ("3.", s.Number(3.0)),
        (".3", s.Number(0.3)),
        ("1.4", s.Number(1.4)),
        ("3e-3", s.Number(3e-3)),
        (".5E-7", s.Number(0.5e-7)),
        ("0x1F", s.Number(31)),
        ("a - b - c", s.Binary("-", s.Binary("-", name("a"), name("b")), name("c"))),
        ("a + b * c", s.Binary("+", name("a"), s.Binary("*", name("b"), name("c")))),
        ("-a * b", s.Binary("*", s.Unary("-", name("a")), name("b"))),
        ("!a && b || c", s.Binary("||", s.Binary("&&", s.Unary("!", name("a")), name("b")), name("c"))),
        ("a < b == c", s.Binary("==", s.Binary("<", name("a"), name("b")), name("c"))),
        ("a ? b : c ? d : e", s.Conditional(name("a"), name("b"), s.Conditional(name("c"), name("d"), name("e")))),
        ("T.1", s.Extent("T", 1)),
        ("half(a)", s.Cast(FLOAT16, name("a"))),
        ("f()", s.Apply("f", ())),
        ("f(a, 1)", s.Apply("f", (name("a"), s.Number(1)))),
        ("(a)", name("a")),
        ("floaty", name("floaty")),
        ("int8_t", name("int8_t")),
    ],
)
def test_expression(text: str, tree: s.Expression) -> None:
    assert expression(text) == tree


@pytest.mark.parametrize("word", ["in", "min", "max", "exists"])
def test_keywords_name_tensors(word: str) -> None:
    (d,) = parse_program(f"def f(float(N) {word}) -> (b) {{ b(i) = {word}(i) where i in 0:{word}.0 }}").defs
    statement = d.body[0]
    assert isinstance(statement, s.Statement)
    assert statement.value == s.Apply(word, (name("i"),))


@pytest.mark.parametrize("operator", ["=", "+=", "*=", "min=", "max=", "+=!", "*=!", "min=!", "max=!"])
def test_operators(operator: str) -> None:
    statement = parse_program(f"def f() -> (b) {{ b {operator}1 }}").defs[0].body[0]
    assert isinstance(statement, s.Statement)
    assert statement.operator == operator


def test_declarations() -> None:
    (d,) = parse_program("def f(float(N,3) a, int b, c) -> d { }").defs
    assert d.parameters == (
        s.Declaration("a", s.Type(FLOAT32, (s.Dimension("N"), s.Dimension(3)))),
        s.Declaration("b", s.Type(INT32, None)),
        s.Declaration("c", None),
    )
    assert d.returns == (s.Declaration("d", None),)


def test_clauses() -> None:
    body = parse_program("def f() -> (b) { b(i) = x where i in 0:N ? 1 : 2, x = i, exists a(i) c = 3 }").defs[0].body
    assert len(body) == 2
    assert isinstance(body[0], s.Statement)
    assert [type(c) for c in body[0].clauses] == [s.Range, s.Let, s.Exists]


def test_tuple_call_needs_no_separator() -> None:
    body = (
        parse_program("def g() -> (x, y) { } def f() -> (b, c) { t = u (b, # a\n c) = g() d = u (b) == c }")
        .defs[1]
        .body
    )
    assert [type(x) for x in body] == [s.Statement, s.TupleCall, s.Statement]


def test_layout_and_comments_mean_nothing() -> None:
    plain = parse_program("def f(float(N) a) -> (b) { b(i) = a(i) }")
    assert parse_program("#x\ndef\nf(float\n(N)a)#y\n->(b){b(\ti)=a(i)}#") == plain


@pytest.mark.parametrize(
    ("source", "line", "column", "expected", "found"),
    [
        ("def f(float(N) a) -> (b) { b(i) = a(i) @ 2 }", 1, 40, "an operator", "'@'"),
        ("def f(float(N) a)\n  (b) { }", 2, 3, "'->'", "'('"),
        ("def f(float(N) a) -> (b) { b(i) = a(i)", 1, 39, "'}'", "the end"),
        ("def f(float(N) a,) -> (b) { }", 1, 18, "a name or a type", "')'"),
        ("def f(float(N+1) a) -> (b) { }", 1, 14, "')' or ','", "'+'"),
        ("def f() -> (b) { b = 3abc }", 1, 22, "a number", "'3abc'"),
        ("def f() -> (b) { b =+ 3 }", 1, 21, "a number", "'+'"),
        ("def f() -> (b) { (b, c) = g() }", 1, 27, "the name of a def", "'g'"),
        ("x", 1, 1, "'def'", "'x'"),
        ("def f() -> (b) { b = " + "9" * 50 + " }", 1, 22, "up to 40 digits", ""),
    ],
)
def test_errors_have_a_place(source: str, line: int, column: int, expected: str, found: str) -> None:
    with pytest.raises(ParseError) as e:
        parse_program(source)
    assert (e.value.line, e.value.column) == (line, column)
    assert expected in e.value.expected
    assert e.value.found == found
    assert "^" in str(e.value)


@pytest.mark.parametrize(
    "value",
    ["-" * 5000 + "a", "f(" * 5000 + "a" + ")" * 5000, "+".join("a" * 5000), "a?b:" * 5000 + "c"],
    ids=["unary", "apply", "sum", "conditional"],
)
def test_deep_nesting_is_refused(value: str) -> None:
    with pytest.raises(ParseError, match=f"deeper than {MAX_DEPTH}") as e:
        parse_program(f"def f() -> (b) {{ b = {value} }}")
    assert "brackets" in e.value.suggestion


def test_brackets_do_not_nest() -> None:
    assert expression("(" * 5000 + "a" + ")" * 5000) == name("a")


def test_the_deepest_expression_compiles() -> None:
    terms = "+".join(["a(i)"] * (MAX_DEPTH - 1))
    (f,) = compile_source(f"def f(float(N) a) -> (b) {{ b(i) = {terms} }}")
    assert repr(f)


def test_brackets_make_a_long_chain_shallow() -> None:
    groups = ["(" + " + ".join(f"{k}.5 * a(i)" for k in range(n, n + 40)) + ")" for n in range(0, 1000, 40)]
    (f,) = compile_source(f"def f(float(N) a) -> (b) {{ b(i) = {' + '.join(groups)} }}")
    assert repr(f)


def test_lets_count_where_they_stand() -> None:
    terms = "+".join(["a(i)"] * (MAX_DEPTH - 10))
    with pytest.raises(CheckError, match=r"too large|too deeply") as e:
        compile_source(f"def f(float(N) a) -> (b) {{ b(i) = x + {terms} where x = {terms} }}")
    assert "temporaries" in e.value.suggestion


@pytest.mark.parametrize("source", [b"\xff", b"def f", "", "\ud800", "\0", 3, None, [], bytearray(b"def")])
def test_any_source_is_answered(source: object) -> None:
    with suppress(TCError):
        assert parse_program(source).defs == ()  # type: ignore[arg-type]


def test_importing_the_language_loads_no_parser() -> None:
    code = "import sys, tensor_comprehensions.tc_lang; sys.exit('lark' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
