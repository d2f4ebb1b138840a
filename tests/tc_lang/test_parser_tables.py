"""The parser's tables that come with the package are those of the grammar, and lark does without them."""

from __future__ import annotations

import json
from importlib.resources import files

import lark
import pytest

from tensor_comprehensions.tc_lang.syntax import parse, parser_tables

PROGRAM = """
def f(float(M,N) x, int k) -> (y, z) {  # a comment
    y(n) +=! x(m, n) * 2.5e-1 where m in 0:M-k, exists n
    z(n) max=! n > 3 && y(n) <= 1 ? fmaxf(y(n), x(0, n)) : float(n) / x.0
}
"""


def test_the_tables_are_those_of_the_grammar() -> None:
    """Where this fails, run `python -m tensor_comprehensions.tc_lang.syntax.parser_tables`. lark numbers states as it
    likes."""
    kept = json.loads(files(parser_tables.__package__).joinpath(parser_tables.TABLES).read_text(encoding="utf-8"))
    (version, grammar), (kept_version, kept_grammar) = parser_tables._source(), kept["of"]
    assert grammar == kept_grammar
    assert (parser_tables._read() is None) == (version != kept_version)
    if version == kept_version:
        made = json.loads(parser_tables.generate_tables())
        assert len(made["data"]["parser"]["parser"]["states"]) == len(kept["data"]["parser"]["parser"]["states"])
        assert sorted(map(repr, made["memo"].values())) == sorted(map(repr, kept["memo"].values()))


def test_lark_makes_its_own_tables_for_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"transformer": parse._Builder(), "lexer_callbacks": {"ID": parse._check_name_length}}
    expected = parser_tables.make_parser(**options).parse(PROGRAM)
    monkeypatch.setattr(lark, "__version__", "0.0.1")
    assert parser_tables._read() is None
    assert parser_tables.make_parser(**options).parse(PROGRAM) == expected
