"""Names that lowering introduces: one function composes them all, and no program can contain one."""

from __future__ import annotations

SEPARATOR = "."
"""In every name that is given here, and in no identifier of the language."""


def internal_name(*parts: str | int) -> str:
    """The name of an object that lowering introduces: `S0.acc`, or `.tile` from a word alone.

    Printers spell it in their own language, distinct from the names around it.
    """
    return SEPARATOR.join(map(str, parts if len(parts) > 1 else ("", *parts)))
