"""The parser of `tc.lark` from stored tables.

`python -m tensor_comprehensions.tc_lang.syntax.parser_tables` writes them. Computing them takes several times as long
as reading them. They belong to one grammar and one version of lark; with another version, lark computes its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import lark
from lark.grammar import Rule
from lark.lexer import TerminalDef

TABLES = "tables.json"
_OPTIONS: dict[str, Any] = {"parser": "lalr", "start": "program", "maybe_placeholders": False}


def make_parser(**options: Any) -> lark.Lark:
    """A parser with the given lark options: `transformer` and `lexer_callbacks`."""
    found = _read()
    if found is None:
        return lark.Lark(_read_grammar(), **_OPTIONS, **options)
    load: Callable[..., lark.Lark] = lark.Lark._load_from_dict
    return load(*found, **options)


def generate_tables() -> str:
    """The content of the tables file."""
    data, memo = lark.Lark(_read_grammar(), **_OPTIONS).memo_serialize([TerminalDef, Rule])
    return json.dumps({"of": _source(), "data": data, "memo": memo}, separators=(",", ":"), sort_keys=True) + "\n"


def _source() -> list[str]:
    """What the tables depend on: the version of lark and the hash of the grammar."""
    return [lark.__version__, sha256(_read_grammar().encode()).hexdigest()]


@cache
def _read_grammar() -> str:
    return files(__package__).joinpath("tc.lark").read_text(encoding="utf-8")


def _read() -> tuple[Any, Any] | None:
    """The stored tables and the objects that they refer to; None if they do not match this grammar and lark."""
    try:
        found = json.loads(files(__package__).joinpath(TABLES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return (_with_numbers(found["data"]), _with_numbers(found["memo"])) if found["of"] == _source() else None


def _with_numbers(x: Any) -> Any:
    """`x` with dict keys that are digits converted back to integers, which JSON turns into strings."""
    if isinstance(x, dict):
        return {int(k) if k.isdigit() else k: _with_numbers(v) for k, v in x.items()}
    return [_with_numbers(v) for v in x] if isinstance(x, list) else x


if __name__ == "__main__":
    Path(__file__).with_name(TABLES).write_text(generate_tables(), encoding="utf-8")
