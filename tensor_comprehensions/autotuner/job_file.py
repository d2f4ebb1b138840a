"""Job files as tables of known settings: untrusted TOML or JSON, checked before use.

Invariant: a mistake in a file is an ArgumentError, and reading a file takes time in proportion to its length.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..cache.safe_io import read_bounded
from ..core.errors import ArgumentError
from ..dispatch.arguments import parse_sizes

MAX_FILE_BYTES = 1 << 22
"""The maximum size of a job file, and of a file with defs, in bytes."""
MAX_DEPTH = 16
"""The maximum depth of nested tables and lists, and of dotted keys, for which parsers take quadratic time."""
MAX_INTEGER_BITS = 63
"""The maximum width of an integer, so that it can be printed and fits into messages."""
_WORD = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-])(?:{_WORD}[ \t]*\.[ \t]*){{{MAX_DEPTH}}}")


def read_table(path: Path) -> dict[str, Any]:
    """The table in a TOML or JSON file. Raises ArgumentError."""
    try:
        text = read_bounded(path, MAX_FILE_BYTES, pipes=True).decode("utf-8-sig")
        found = json.loads(text) if path.suffix == ".json" else _parse_toml(text)
    except OSError as error:
        raise ArgumentError(f"cannot read the job {path}: {error}") from error
    except RecursionError:  # drop its traceback of thousands of frames
        raise ArgumentError(f"the job {path} nests too deep", expected=f"at most {MAX_DEPTH} levels") from None
    except ValueError as error:  # from either parser, or from decoding UTF-8
        raise ArgumentError(f"the job {path} cannot be understood: {error}") from error
    _check_values(found, str(path))
    if not isinstance(found, dict):
        raise ArgumentError(f"the job {path} is not a table")
    return found


def _parse_toml(text: str) -> Any:
    if key := _LONG_KEY.search(text):
        raise ValueError(f"the key {key[0][:40]}... has more than {MAX_DEPTH} parts")
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml
    return toml.loads(text)


def _check_values(found: object, where: str) -> None:
    """Refuse values that cannot be printed, sent or traversed. Iterative: it runs before the depth is known."""
    level = [found]
    for _ in range(MAX_DEPTH):
        for value in level:
            if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
                raise ArgumentError(f"{where} has a number of {value.bit_length()} bits", expected="at most 63")
            if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
                raise ArgumentError(f"{where} has half of a character: {value[:80]!a}")
        level = [inner for value in level for inner in _list_nested_values(value)]
    if level:
        raise ArgumentError(f"{where} nests too deep", expected=f"at most {MAX_DEPTH} levels")


def _list_nested_values(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value


# --- settings ----------------------------------------------------------------------------------------------------


def check_settings(table: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    """Refuse a setting that is not known. Raises ArgumentError."""
    if unknown := [name for name in table if name not in known]:
        raise ArgumentError(f"{where}: there is no setting {unknown[0]!r}", expected=", ".join(known))


def read_text_setting(table: Mapping[str, Any], name: str, where: str) -> str | None:
    """A setting that is a text, or None if it is missing. Raises ArgumentError."""
    value = table[name]
    if value is None or isinstance(value, str):
        return value
    raise ArgumentError(f"{where}: {name} is {value!r}", expected="a text")


def read_sizes_setting(given: object, where: str) -> list[dict[str, float]]:
    """Parse the sizes of a task: a table or text, or a list of these. Raises ArgumentError."""
    several = given if isinstance(given, list) else [given]
    if not several:
        raise ArgumentError(f"{where}: sizes is an empty list", suggestion="leave sizes away for a def without sizes")
    return [_check_sizes(parse_sizes(one) if isinstance(one, str) else one, where) for one in several]


def _check_sizes(one: object, where: str) -> dict[str, float]:
    if not isinstance(one, dict):
        raise ArgumentError(f"{where}: sizes are {one!r}", expected='a list of {M = 128} or "M=128"')
    for name, value in one.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1 << 63:
            raise ArgumentError(f"{where}: the size {name} is {value!r}", expected="a number")
    return one


def read_source_file(path: Path, where: str) -> str:
    """The text of a file with defs that a task names. Raises ArgumentError."""
    try:
        return read_bounded(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{where}: cannot read the defs: {error}") from error
