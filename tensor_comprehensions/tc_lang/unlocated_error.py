"""An error about part of a program, raised by code that does not know its position in the text."""

from __future__ import annotations


class UnlocatedTypeError(Exception):
    """A mistake without a position; the caller knows the position and turns it into a TCError."""

    def __init__(self, message: str, *, expected: str = "", found: str = "", suggestion: str = "") -> None:
        super().__init__(message)
        self.message, self.expected, self.found, self.suggestion = message, expected, found, suggestion
