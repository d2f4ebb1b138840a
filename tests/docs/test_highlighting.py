"""The Pygments lexer colors every program of the pages and the examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Token

from tensor_comprehensions.core.dtypes import ALIASES, DTYPES
from tensor_comprehensions.tc_lang.builtins import builtin_names
from tensor_comprehensions.tc_lang.syntax.pygments_lexer import TcLexer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples").glob("*.tc"))

SOURCE = "def f(float(N) in, int min) -> (y) { y(i) max=! exp(in(i)) + inf where i in 0:min, exists T(i) # note\n}"


def tokens(text: str) -> list[tuple[object, str]]:
    return [(kind, value) for kind, value in TcLexer().get_tokens(text) if value.strip()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_programs_have_no_unknown_token(program: Path) -> None:
    text = program.read_text()
    found = tokens(text)
    assert Error not in {kind for kind, _ in found}
    assert "".join(value for _, value in found).replace(" ", "") == "".join(text.split())


def test_each_kind_of_word_has_its_color() -> None:
    found = tokens(SOURCE)
    for pair in (
        (Keyword.Declaration, "def"),
        (Name.Function, "f"),
        (Keyword.Type, "float"),
        (Operator, "max=!"),
        (Name.Builtin, "exp"),
        (Keyword.Constant, "inf"),
        (Keyword, "where"),
        (Keyword, "in"),
        (Keyword, "exists"),
        (Number.Integer, "0"),
        (Comment.Single, "# note"),
    ):
        assert pair in found
    assert [value for kind, value in found if kind is Name and value in ("in", "min")] == ["in", "min", "in", "min"]


def test_every_type_and_function_is_colored() -> None:
    for word in (*DTYPES, *ALIASES):
        assert tokens(word) == [(Keyword.Type, word)]
    for word in builtin_names():
        assert tokens(f"{word}(x)")[0] == (Name.Builtin, word)


def test_a_foreign_character_is_an_error_token() -> None:
    assert (Token.Error, "@") in tokens("y(i) = x(i) @ 2")


def test_the_entry_point_leads_to_the_lexer(tmp_path: Path) -> None:
    """Pygments finds the lexer by the entry point of pyproject.toml, also in a process that imports nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (f"{name} = {target}" for name, target in project["entry-points"]["pygments.lexers"].items())
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("[pygments.lexers]\n" + "\n".join(lines) + "\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "from pygments.lexers import get_lexer_by_name; print(type(get_lexer_by_name('tc')).__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.strip() == "TcLexer", result.stderr
