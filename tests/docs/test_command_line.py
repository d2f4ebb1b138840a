"""The page on the command line has every command and every option."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tensor_comprehensions.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()


def commands() -> dict[str, argparse.ArgumentParser]:
    subparsers = next(a for a in main._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(subparsers.choices)


@pytest.mark.parametrize("name", commands())
def test_the_command_and_its_options_are_listed(name: str) -> None:
    assert f"| `{name}" in PAGE
    for action in commands()[name]._actions:
        flags = [f for f in action.option_strings if f not in ("-h", "--help") and not f.startswith("--no-use")]
        if not flags or name == "cache":
            continue
        assert any(f"`{flag}" in PAGE for flag in flags), flags
