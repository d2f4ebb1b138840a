"""A mistake in a part of a program, found by those who do not know where in the text it stands."""

from __future__ import annotations


class UnlocatedTypeError(Exception):
    """A mistake without a place; the caller knows the place in the text and makes a TCError of it."""

    def __init__(self, message: str, *, expected: str = "", found: str = "", suggestion: str = "") -> None:
        super().__init__(message)
        self.message, self.expected, self.found, self.suggestion = message, expected, found, suggestion
