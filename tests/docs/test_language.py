"""The page on the language lists what the language has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tensor_comprehensions.core.math_functions import FUNCTIONS
from tensor_comprehensions.tc_lang.builtins import CONSTANTS, SPECIAL

PAGE = (Path(__file__).parents[2] / "docs" / "language.md").read_text()
SECTION = PAGE.partition("### Functions")[2].partition("###")[0]
ARITIES = {"one": 1, "two": 2, "three": 3}


@pytest.mark.parametrize("word", ARITIES)
def test_the_functions_of_c_are_listed(word: str) -> None:
    row = re.search(rf"^\| {word} \| (.*) \|$", SECTION, re.MULTILINE)
    assert row is not None
    listed = re.findall(r"`(\w+)`", row[1])
    assert sorted(listed) == sorted(name for name, f in FUNCTIONS.items() if f.arity == ARITIES[word])


def test_every_arity_has_a_row_and_the_rest_is_named() -> None:
    assert {f.arity for f in FUNCTIONS.values()} == set(ARITIES.values())
    rest = SECTION.partition("Beside them")[2].partition("Where")[0]
    assert set(re.findall(r"`(\w+)`", rest)) == set(SPECIAL)
    assert all(f"`{name}`" in PAGE for name in CONSTANTS)
