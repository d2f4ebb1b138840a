"""The names of what a program does not name: one function gives them all, and none of them can be a program's."""

from __future__ import annotations

SEPARATOR = "."
"""In every name that is given here, and in no identifier of the language."""


def compose_name(*parts: str | int) -> str:
    """The name of what lowering introduces: `S0.acc`, or `.tile` from a word alone.

    Printers spell it in their own language, apart from the names around it.
    """
    return SEPARATOR.join(map(str, parts if len(parts) > 1 else ("", *parts)))
