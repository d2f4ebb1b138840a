"""The page on the language has every function, every constant and the grammar of the package."""

from __future__ import annotations

import re
from pathlib import Path

from tensor_comprehensions.core.dtypes import ALIASES, DTYPES
from tensor_comprehensions.core.math_functions import FUNCTIONS
from tensor_comprehensions.tc_lang.builtins import CONSTANTS, SPECIAL
from tensor_comprehensions.tc_lang.formats import NAMES
from tensor_comprehensions.tc_lang.syntax import parse

PAGE = (Path(__file__).parents[2] / "docs" / "language.md").read_text()
SECTION = PAGE.partition("### Functions")[2].partition("###")[0]
TABLE = "\n".join(line.rpartition(" | ")[0] for line in SECTION.splitlines() if line.startswith("| `"))
GRAMMAR = (Path(parse.__file__).parent / "tc.lark").read_text()
TERMINALS = {
    "LPAR": '"("',
    "RPAR": '")"',
    "LBRACE": '"{"',
    "RBRACE": '"}"',
    "_TUPLE": '"("',
    "COMMA": '","',
    "_ARROW": '"->"',
    "OR": '"||"',
    "AND": '"&&"',
    "COMPARE": '("<=" | ">=" | "==" | "!=" | "<" | ">")',
    "ADD": '"+"',
    "MINUS": '"-"',
    "NOT": '"!"',
    "MULTIPLY": '("*" | "/" | "%")',
}
"""Terminals that the page spells out."""


def readable_grammar() -> str:
    """The rules of the parser without what only the parser needs: names of alternatives, inlining, comments."""
    rules = GRAMMAR[GRAMMAR.index("program:") : GRAMMAR.index("_ARROW:")]
    rules = re.sub(r" *-> \w+$", "", rules, flags=re.MULTILINE)
    rules = re.sub(r"^[?!]", "", rules, flags=re.MULTILINE)
    rules = re.sub(r"\b_?[A-Z]+\b", lambda m: TERMINALS.get(m[0], m[0]), rules)
    lines = [line for line in rules.splitlines() if line.strip()]
    return "\n".join(f"    {line.strip()}" if line.startswith(" ") else line for line in lines) + "\n"


def test_every_function_is_listed_with_its_arguments() -> None:
    listed = {m[1]: m[2].count(",") + 1 for m in re.finditer(r"`(\w+)\(([^)]*)\)`", TABLE)}
    assert set(listed) == {*FUNCTIONS, *SPECIAL}
    assert {name: listed[name] for name in FUNCTIONS} == {name: f.arity for name, f in FUNCTIONS.items()}


def test_constants_types_and_formats_are_named() -> None:
    assert all(f"`{name}`" in PAGE for name in (*CONSTANTS, *ALIASES))
    types = PAGE.partition("## Types")[2].partition("##")[0]
    assert all(re.search(rf"\b{name}\b", types) for name in DTYPES)
    formats = PAGE.partition("## Formats")[2].partition("##")[0]
    assert all(re.search(rf"\b{name}\b", formats) for name in NAMES)


def test_the_grammar_is_that_of_the_parser() -> None:
    assert f"```ebnf\n{readable_grammar()}```" in PAGE, readable_grammar()
