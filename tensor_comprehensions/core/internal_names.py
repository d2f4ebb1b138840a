"""Names that lowering introduces. One function composes them all; they cannot occur in a program."""

from __future__ import annotations

SEPARATOR = "."
"""Part of every name composed here. No identifier of the language contains it."""


def internal_name(*parts: str | int) -> str:
    """The name of an object that lowering introduces: `S0.acc`, or `.tile` from a single word.

    Printers turn it into a valid identifier of their language that differs from all others in scope.
    """
    return SEPARATOR.join(map(str, parts if len(parts) > 1 else ("", *parts)))
