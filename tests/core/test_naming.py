"""One function gives the names of what lowering introduces, and no program can have them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tensor_comprehensions as tc
from tensor_comprehensions.core.internal_names import SEPARATOR, internal_name

PACKAGE = Path(tc.__file__).parent
ROOMS = (
    "loop_ir",
    "structured",
    "polyhedral",
    "codegen",
    "tc_lang/transforms/legalize.py",
    "tc_lang/transforms/canonical_bound.py",
)
NAMED = {
    "Var",
    "var",
    "Buffer",
    "buffer",
    "private_view",
    "Loop",
    "Let",
    "fresh",
    "Kernel",
    "Iterator",
    "BoundIndex",
    "Tensor",
}
"""What is called with a name first."""


def test_no_identifier_has_the_separator() -> None:
    assert internal_name("S0", "acc") == "S0.acc"
    assert SEPARATOR in internal_name("tile")
    for text in (f"def f(float(N) a{SEPARATOR}b) -> (c) {{ c(i) = 1 }}", "def f(float(N) .tile) -> (c) { c(i) = 1 }"):
        with pytest.raises(tc.ParseError):
            tc.define(text)


@pytest.mark.parametrize("room", ROOMS)
def test_names_are_minted(room: str) -> None:
    """Nothing is named by a text that is written or put together where it is made."""
    where = PACKAGE / room
    for path in sorted(where.rglob("*.py")) if where.is_dir() else [where]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first, text = node.args[0], ast.unparse(node)
            if called in NAMED and (isinstance(first, ast.JoinedStr) or getattr(first, "value", None).__class__ is str):
                printed = "codegen" in path.parts and called == "fresh"  # spelled apart from all others there
                assert printed, f"{path.relative_to(PACKAGE)}: {text}"
