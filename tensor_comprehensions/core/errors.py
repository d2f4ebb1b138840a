"""The error classes of the public API.

A `TCError` is the user's mistake and says where, what was expected, what was found and the way out.
An `InternalError` is our own bug. `CannotLower` never leaves the package: it is how a transform or a
lowering refuses, with a reason, so that the caller can try another way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of character offsets in a source text."""

    start: int
    end: int


def to_printable(text: str) -> str:
    """`text` with what no file and no terminal can take, halves of surrogate pairs, in words that they can."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class TCError(Exception):
    """A mistake in a TC program or in a call, told with its place and the way out.

    Attributes:
        message: what is wrong, in one sentence.
        source: the TC text, when the mistake has a place in it.
        span: where in `source`.
        expected, found: the two sides of the disagreement, where there are two.
        suggestion: the way out, where one is obvious.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        span: Span | None = None,
        expected: str = "",
        found: str = "",
        suggestion: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.source = source
        self.span = span
        self.expected = expected
        self.found = found
        self.suggestion = suggestion

    @property
    def line(self) -> int | None:
        """The line of the mistake, counted from 1."""
        if self.source is None or self.span is None:
            return None
        return self.source.count("\n", 0, self.span.start) + 1

    @property
    def column(self) -> int | None:
        """The column of the mistake, counted from 1."""
        if self.source is None or self.span is None:
            return None
        return self.span.start - self.source.rfind("\n", 0, self.span.start)

    def __str__(self) -> str:
        lines = [self.message]
        if self.source is not None and self.span is not None:
            lines[0] = f"{self.line}:{self.column}: {self.message}"
            lines += _caret_lines(self.source, self.span)
        for label, text in (("expected", self.expected), ("found", self.found), ("help", self.suggestion)):
            if text:
                lines.append(f"  {label}: {text}")
        return to_printable("\n".join(lines))


class ParseError(TCError):
    """The text is not in the grammar of the language."""


class CheckError(TCError):
    """The program is grammatical but means nothing: a type, rank, name or definition is wrong."""


class RangeError(TCError):
    """The range of an index cannot be inferred, or an access leaves its tensor."""


class ArgumentError(TCError):
    """A call passes tensors or options that the def, the target or the machine does not accept."""


class CacheError(TCError):
    """The cache cannot be used as it was asked to be; without `TC_CACHE_STRICT`, only a command on it says so."""


class DeviceError(TCError):
    """A device can do no more: its memory is used up, or a kernel that ran before has broken it."""


class InternalError(AssertionError):
    """A bug of this package, never the user's mistake. Please report it with the program that shows it."""


class CannotLower(Exception):
    """A transform or a lowering does not apply here; the message says why."""


WIDTH = 120
"""How much of a line is shown around a mistake."""


def _caret_lines(source: str, span: Span) -> list[str]:
    start = source.rfind("\n", 0, span.start) + 1
    stop = source.find("\n", span.start)
    text = source[start : stop if stop >= 0 else len(source)].replace("\t", " ")
    text = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)  # one column for one character
    column = span.start - start
    first = max(0, column - WIDTH // 2) if len(text) > WIDTH else 0
    shown = text[first : first + WIDTH]
    width = max(1, min(span.end - span.start, len(shown) - (column - first)))
    return [f"  {shown}", f"  {' ' * (column - first)}{'^' * width}"]
