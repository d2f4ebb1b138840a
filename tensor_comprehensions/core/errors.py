"""The error classes of the public API.

A `TCError` is the user's mistake; it says where it is, what was expected, what was found and how to fix it. An
`InternalError` is our own bug. `CannotLower` never leaves the package: a transform or a lowering that does not apply
raises it with a reason, so that the caller can try another way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of character offsets in a source text."""

    start: int
    end: int


def to_printable(text: str) -> str:
    """`text` with unpaired surrogates escaped, which no file and no terminal can encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class TCError(Exception):
    """A mistake in a TC program or in a call, with its position and a way to fix it.

    Attributes:
        message: the mistake, in one sentence.
        source: the TC text, if the mistake is in it.
        span: the position in `source`.
        expected, found: the expected and the found thing, as text; empty if there is nothing to say.
        suggestion: how to fix it, or empty.
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
    """The text does not match the grammar of the language."""


class CheckError(TCError):
    """The program parses, but a type, rank, name or definition is wrong."""


class RangeError(TCError):
    """The range of an index cannot be inferred, or an access leaves its tensor."""


class ArgumentError(TCError):
    """A call passes tensors or options that the def, the target or the machine does not accept."""


class CacheError(TCError):
    """The cache failed. Without `TC_CACHE_STRICT`, only commands on the cache raise it."""


class DeviceError(TCError):
    """A device has no memory left, or is unusable because an earlier kernel failed on it."""


class InternalError(AssertionError):
    """A bug of this package, never the user's mistake. Please report it with the program that shows it."""


class CannotLower(Exception):
    """A transform or a lowering does not apply here; the message says why."""


WIDTH = 120
"""Maximum characters of a line that are shown around a mistake."""


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
