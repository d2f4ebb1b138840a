"""The parser of layouts, and parts that other small parsers share. Mistakes raise `ArgumentError` with a caret."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from ..core.errors import ArgumentError, Span
from ..core.interrupts import deferred_interrupts
from .layout import IntTuple, Layout, are_congruent, flatten_tuple, format_tuple

MAX_DEPTH = 16
"""Maximum levels of nested tuples, so that the operations can recurse over them."""
MAX_DIGITS = 18
"""Maximum digits of an integer, so that each fits 64 bits."""

_SPELLING = {"INTEGER": "an integer", "NAME": "a name", "$END": "the end of the text"}


def parse(text: str) -> Layout:
    """The layout that `text` writes as `shape : stride`.

    Raises:
        ArgumentError: the text is not a layout; the message shows where.
    """
    layout: Layout = parse_text(_make_parser(), "layout", text)
    return layout


class NotationError(Exception):
    """A mistake at a token of a text that `parse_text` reads."""

    def __init__(self, message: str, token: Any, *, expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.span = Span(token.start_pos, token.end_pos)
        self.expected, self.found = expected, found


def make_layout_parser(builder: object, start: Sequence[str], *grammars: tuple[str, str]) -> Any:
    """A parser for `grammars`, files given by package and name; `builder` has a method for each rule."""
    with deferred_interrupts():
        from importlib.resources import files

        import lark  # here because importing it costs more than the rest of the package together
    text = "\n".join(files(package).joinpath(name).read_text(encoding="utf-8") for package, name in grammars)
    return lark.Lark(text, parser="lalr", start=list(start), maybe_placeholders=False, transformer=builder)


def parse_text(parser: Any, start: str, text: str) -> Any:
    """Parse `text` by the grammar's rule `start`; `start` also names the text in messages.

    Raises:
        ArgumentError: `text` does not match; the message shows where.
    """
    with deferred_interrupts():
        import lark
    what = start.replace("_", " ")
    if not isinstance(text, str):
        raise ArgumentError(f"a {what} is written as text", expected="str", found=type(text).__name__)
    try:
        return parser.parse(text, start=start)
    except lark.exceptions.UnexpectedToken as e:
        end, at = e.token.type == "$END", len(text.rstrip())
        message = f"the {what} ends too early" if end else f"unexpected '{e.token}' in a {what}"
        span = Span(at, at + 1) if end else Span(e.token.start_pos, e.token.end_pos)
        raise ArgumentError(
            message, source=text, span=span, expected=_describe_expected_terminals(parser, e.expected or ())
        ) from None
    except lark.exceptions.UnexpectedCharacters as e:
        at = e.pos_in_stream or 0
        raise ArgumentError(
            f"unexpected {text[at]!r} in a {what}", source=text, span=Span(at, at + 1),
            expected=_describe_expected_terminals(parser, e.allowed or ()),
        ) from None  # fmt: skip
    except NotationError as e:
        raise ArgumentError(e.message, source=text, span=e.span, expected=e.expected, found=e.found) from None


def _describe_expected_terminals(parser: Any, terminals: Collection[str]) -> str:
    """The expected `terminals` in words."""
    literal = {t.name: f"'{t.pattern.value}'" for t in parser.terminals if t.pattern.type == "str"}
    spelled = sorted({_SPELLING.get(n) or literal.get(n, n) for n in terminals})
    return ", ".join(spelled[:-1]) + " or " + spelled[-1] if len(spelled) > 1 else "".join(spelled)


class LayoutBuilder:
    """Builds layouts from the rules of `layout.lark`."""

    def integer(self, children: list[Any]) -> int:
        (token,) = children
        if len(token) > MAX_DIGITS:
            raise NotationError("this number is too long", token, expected=f"up to {MAX_DIGITS} digits")
        return int(token)

    def nested(self, children: list[Any]) -> tuple[IntTuple, ...]:
        return tuple(children)

    def layout(self, children: list[Any]) -> Layout:
        shape, colon, stride = children
        return checked_layout(shape, stride, colon)


def checked_layout(shape: IntTuple, stride: IntTuple, token: Any) -> Layout:
    """The layout `shape : stride`. Raises NotationError at `token` if they do not make one."""
    if depth(shape) > MAX_DEPTH or depth(stride) > MAX_DEPTH:
        raise NotationError("these tuples nest too deep", token, expected=f"up to {MAX_DEPTH} levels")
    if any(size < 1 for size in flatten_tuple(shape)):
        raise NotationError("a size is below 1", token, expected="sizes of 1 or more", found=format_tuple(shape))
    if not are_congruent(shape, stride):
        raise NotationError(
            "sizes and strides differ in structure", token, expected=f"strides as nested as {format_tuple(shape)}",
            found=format_tuple(stride),
        )  # fmt: skip
    return Layout(shape, stride)


def depth(t: IntTuple) -> int:
    """The nesting depth of tuples, computed without recursion because the text may nest arbitrarily deep."""
    levels, level = 0, [t]
    while level := [part for x in level if isinstance(x, tuple) for part in (*x, 0)]:
        levels += 1
    return levels


@cache
def _make_parser() -> Any:
    return make_layout_parser(LayoutBuilder(), ["layout"], (__package__ or "", "layout.lark"))
