"""The table of faults at the end of docs/developers/testing.md names the tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "developers" / "testing.md").read_text().partition("## Faults by their numbers")[2]
UNNUMBERED = {23, 25, *range(56, 63)}
"""Faults whose tests are about more than that."""


def numbers(text: str) -> set[int]:
    """Of `1-5, 7`, and of `34_to_37_and_39_40`."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:(?:-|_to_)(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def find_provoked_faults(path: Path) -> set[int]:
    """The faults that the tests in a file, or what they are called with, have in their names."""
    names = re.findall(r"(?:fault|case)s?_((?:\d+_(?:to_|and_)?)+)", path.read_text())
    return {n for name in names for n in numbers(name)}


def rows() -> list[tuple[set[int], list[Path]]]:
    found = re.findall(r"^\| ([\d, -]+) \|.*\| (`.*`) \|$", TABLE, re.MULTILINE)
    return [(numbers(first), [TESTS / name for name in re.findall(r"`([^`]+)`", files)]) for first, files in found]


def test_every_fault_is_in_the_table() -> None:
    assert sorted(n for found, _ in rows() for n in found) == list(range(1, 63))


def test_every_fault_of_the_table_has_a_test_where_it_says() -> None:
    for found, paths in rows():
        assert all(path.exists() for path in paths), paths
        there = {n for path in paths if path.is_file() for n in find_provoked_faults(path)}
        assert found - UNNUMBERED <= there, f"{sorted(found - UNNUMBERED - there)} are not in {paths}"
