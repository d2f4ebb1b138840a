"""Text -> `syntax.Program`. The grammar is `tc.lark`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

from ...core.dtypes import ALIASES, DTYPES
from ...core.errors import ParseError, Span
from ...core.interrupts import deferred_interrupts
from . import tree as s
from .foreign_syntax_hints import suggest_literal, suggest_syntax

MAX_DEPTH = 150
"""Maximum nesting depth of an expression, so that every later stage can safely recurse over expressions."""

_MAX_DIGITS = 40
_MAX_NAME = 200
_MARK = "\ufeff"

_SPELLING = {
    "ID": "a name", "INT": "an integer", "HEX": "an integer", "FLOAT": "a number", "SCALAR": "a type",
    "LPAR": "'('", "_TUPLE": "'('", "RPAR": "')'", "LBRACE": "'{'", "RBRACE": "'}'", "COMMA": "','",
    "OR": "'||'", "AND": "'&&'", "COMPARE": "a comparison", "ADD": "'+'", "MINUS": "'-'", "NOT": "'!'",
    "MULTIPLY": "'*', '/' or '%'", "_ARROW": "'->'", "$END": "the end of the text",
}  # fmt: skip


def parse_program(source: str | bytes) -> s.Program:
    """Parse a TC program into its syntax tree.

    Raises ParseError, with the position, if the text does not match the grammar.
    """
    text = text_of(source)
    with deferred_interrupts():
        import lark  # here because importing it costs more than the rest of the package together
    try:
        program: s.Program = _load_parser().parse(text)
    except lark.exceptions.UnexpectedToken as e:
        raise _unexpected_token(text, e) from None
    except lark.exceptions.UnexpectedCharacters as e:
        at = e.pos_in_stream or 0
        _check_number(text, at)
        span = Span(at, at + 1)
        expected = _describe_terminals(tuple(e.allowed or ()))
        raise ParseError(
            "this character cannot stand here", source=text, span=span, expected=expected, found=repr(text[span.start]),
            suggestion=suggest_syntax(text, at),
        ) from None  # fmt: skip
    except ParseError as e:
        raise ParseError(
            e.message, source=text, span=e.span, expected=e.expected, found=e.found, suggestion=e.suggestion
        ) from None
    _check_depth(program, text)
    _check_tuple_calls(program, text)
    return program


def text_of(source: str | bytes) -> str:
    """The text of a program without a byte-order mark. Raises ParseError if it is not text."""
    if isinstance(source, bytes | bytearray):
        try:
            return source.decode("utf-8").removeprefix(_MARK)
        except UnicodeDecodeError as e:
            raise ParseError(f"the text is not UTF-8: byte {e.start} is wrong") from None
    if not isinstance(source, str):
        raise ParseError("a TC program is a string", expected="str", found=type(source).__name__)
    return source.removeprefix(_MARK)


@cache
def _load_parser() -> Any:
    with deferred_interrupts():
        from . import parser_tables
    return parser_tables.make_parser(transformer=_Builder(), lexer_callbacks={"ID": _check_name_length})


def _unexpected_token(text: str, e: Any) -> ParseError:
    token = e.token
    expected = _describe_terminals(tuple(e.expected or ()))
    if token.type == "$END":
        end = len(text.rstrip())
        return ParseError(
            "the text ends too early", source=text, span=Span(end, end + 1), expected=expected, found="the end"
        )
    _check_number(text, token.start_pos)
    span = Span(token.start_pos, token.end_pos)
    return ParseError(
        f"unexpected '{token}'", source=text, span=span, expected=expected, found=f"'{token}'",
        suggestion=suggest_syntax(text, token.start_pos),
    )  # fmt: skip


def _check_number(text: str, at: int) -> None:
    """Reject a number directly before a name, such as a suffix, which the grammar sees as two tokens."""
    found = suggest_literal(text, at)
    if found is not None:
        start, end, way_out = found
        raise ParseError(
            f"'{text[start:end]}' is not a number", source=text, span=Span(start, end), expected="a number or a name",
            found=f"'{text[start:end]}'", suggestion=way_out,
        )  # fmt: skip


def _describe_terminals(terminals: Collection[str]) -> str:
    """The expected `terminals` in words."""
    names = set(terminals)
    literal = {t.name: f"'{t.pattern.value}'" for t in _load_parser().terminals if t.pattern.type == "str"}
    operators = {"OR", "AND", "COMPARE", "ADD", "MINUS", "MULTIPLY"}
    if operators <= names:
        names -= operators | {n for n, text in literal.items() if text in ("'?'", "'<=>'")}
    spelled = sorted({_SPELLING.get(n) or literal.get(n, n) for n in names})
    if operators <= set(terminals):
        spelled = ["an operator", *spelled]
    return ", ".join(spelled[:-1]) + " or " + spelled[-1] if len(spelled) > 1 else "".join(spelled)


def _check_depth(program: s.Program, text: str) -> None:
    """Reject expressions that nest deeper than MAX_DEPTH. Iterative, since it runs before the depth is known."""
    for d in program.defs:
        for statement in d.body:
            level = list(s.statement_expressions(statement))
            for _ in range(MAX_DEPTH):
                level = [x for e in level for x in s.child_expressions(e)]
            if level:
                raise ParseError(
                    f"this expression nests deeper than {MAX_DEPTH} levels",
                    source=text,
                    span=level[0].span,
                    expected=f"at most {MAX_DEPTH} levels, of which each operator of a chain is one",
                    suggestion="group a long chain with brackets, `(a + b + ...) + (c + d + ...)`, or use temporaries",
                )


def _check_tuple_calls(program: s.Program, text: str) -> None:
    names = {d.name for d in program.defs}
    for d in program.defs:
        for statement in d.body:
            if isinstance(statement, s.TupleCall) and statement.callee not in names:
                raise ParseError(
                    f"a tuple of targets needs a call of a def, and '{statement.callee}' is none",
                    source=text,
                    span=statement.callee_span,
                    expected="the name of a def of this program",
                    found=f"'{statement.callee}'",
                )


def _span_between(first: Any, last: Any) -> Span:
    return Span(_find_start_position(first), _find_end_position(last))


def _find_start_position(x: Any) -> int:
    span = getattr(x, "span", None)
    return int(span.start if span is not None else x.start_pos)


def _find_end_position(x: Any) -> int:
    span = getattr(x, "span", None)
    return int(span.end if span is not None else x.end_pos)


def _check_name_length(token: Any) -> Any:
    """Reject a name that is too long, else return `token`: LLVM truncates names after a thousand characters."""
    if len(token) > _MAX_NAME:
        raise ParseError(
            "this name is too long", span=_span_between(token, token), expected=f"up to {_MAX_NAME} characters"
        )
    return token


def _parse_integer(token: Any) -> int:
    if len(token) > _MAX_DIGITS:
        raise ParseError(
            "this number is too long", span=_span_between(token, token), expected=f"up to {_MAX_DIGITS} digits"
        )
    return int(token, 16 if token.type == "HEX" else 10)


class _List(tuple[Any, ...]):
    """A parenthesized list with its span."""

    span: Span


def _list_items(children: list[Any]) -> _List:
    """The items of a parenthesized list `( [items] )`."""
    out = _List(children[1] if len(children) == 3 else ())
    out.span = _span_between(children[0], children[-1])
    return out


def _drop_separators(children: list[Any]) -> tuple[Any, ...]:
    return tuple(children[::2])


class _Builder:
    """Builds the syntax tree. Methods get the children of a grammar rule: named tokens and built nodes."""

    parameters = dimensions = expressions = where = staticmethod(_drop_separators)
    subscripts = arguments = staticmethod(_list_items)

    def program(self, x: list[Any]) -> s.Program:
        return s.Program(tuple(x))

    def definition(self, x: list[Any]) -> s.Def:
        name, rest = x[0], x[2:]
        parameters = rest.pop(0) if isinstance(rest[0], tuple) else ()
        body = rest[3:-1]
        returns = rest[1]
        return s.Def(str(name), parameters, returns, tuple(body), _span_between(name, name))

    def parameter(self, x: list[Any]) -> s.Declaration:
        type_ = x[0] if isinstance(x[0], s.Type) else None
        format_ = x[-1] if isinstance(x[-1], s.FormatName) else None
        name = x[1] if type_ is not None else x[0]
        return s.Declaration(str(name), type_, format_, _span_between(x[0], name))

    def format(self, x: list[Any]) -> s.FormatName:
        return s.FormatName(str(x[0]), x[2] if len(x) > 1 else (), _span_between(x[0], x[-1]))

    def numbers(self, x: list[Any]) -> tuple[int, ...]:
        return tuple(_parse_integer(token) for token in x[::2])

    def return_list(self, x: list[Any]) -> tuple[s.Declaration, ...]:
        return tuple(_list_items(x))

    def single_return(self, x: list[Any]) -> tuple[s.Declaration, ...]:
        return (x[0],)

    def type(self, x: list[Any]) -> s.Type:
        dtype = ALIASES.get(x[0]) or DTYPES[x[0]]
        return s.Type(dtype, tuple(_list_items(x[1:])) if len(x) > 1 else None, _span_between(x[0], x[-1]))

    def dimension(self, x: list[Any]) -> s.Dimension:
        token = x[0]
        return s.Dimension(str(token) if token.type == "ID" else _parse_integer(token), _span_between(token, token))

    def assignment(self, x: list[Any]) -> s.Statement:
        target, rest = x[0], x[1:]
        subscripts = rest.pop(0) if isinstance(rest[0], _List) else None
        operator, value, *where = [part for part in rest if part is not None]
        clauses = where[0] if where else ()
        last = clauses[-1] if clauses else value
        written = _span_between(target, target) if subscripts is None else _span_between(target, subscripts)
        listed = None if subscripts is None else tuple(subscripts)
        return s.Statement(str(target), listed, operator, value, clauses, written, _span_between(target, last))

    def operator(self, x: list[Any]) -> str:
        return str(x[0])

    def equivalent(self, x: list[Any]) -> None:
        """Parsed and ignored: it names a library call that the reference implementation never made."""

    def tuple_call(self, x: list[Any]) -> s.TupleCall:
        close = next(n for n, part in enumerate(x) if getattr(part, "type", "") == "RPAR")
        targets = tuple(s.Name(str(t), _span_between(t, t)) for t in x[:close:2])
        callee, arguments = x[close + 1 :]
        return s.TupleCall(
            targets, str(callee), tuple(arguments), _span_between(callee, callee), _span_between(x[0], arguments)
        )

    def range(self, x: list[Any]) -> s.Range:
        return s.Range(str(x[0]), x[1], x[2], _span_between(x[0], x[2]))

    def let(self, x: list[Any]) -> s.Let:
        return s.Let(str(x[0]), x[1], _span_between(x[0], x[1]))

    def exists(self, x: list[Any]) -> s.Exists:
        return s.Exists(x[0], x[0].span)

    def conditional(self, x: list[Any]) -> s.Conditional:
        return s.Conditional(x[0], x[1], x[2], _span_between(x[0], x[2]))

    def binary(self, x: list[Any]) -> s.Binary:
        return s.Binary(str(x[1]), x[0], x[2], _span_between(x[0], x[2]))

    def negate(self, x: list[Any]) -> s.Unary:
        return s.Unary(str(x[0]), x[1], _span_between(x[0], x[1]))

    def integer(self, x: list[Any]) -> s.Number:
        return s.Number(_parse_integer(x[0]), _span_between(x[0], x[0]))

    def real(self, x: list[Any]) -> s.Number:
        return s.Number(float(x[0]), _span_between(x[0], x[0]))

    def parenthesized(self, x: list[Any]) -> s.Expression:
        e: s.Expression = replace(x[1], span=_span_between(x[0], x[2]))
        return e

    def cast(self, x: list[Any]) -> s.Cast:
        return s.Cast(ALIASES.get(x[0]) or DTYPES[x[0]], x[2], _span_between(x[0], x[3]))

    def name(self, x: list[Any]) -> s.Name:
        return s.Name(str(x[0]), _span_between(x[0], x[0]))

    def apply(self, x: list[Any]) -> s.Apply:
        return s.Apply(str(x[0]), tuple(x[1]), _span_between(x[0], x[1]))

    def extent(self, x: list[Any]) -> s.Extent:
        return s.Extent(str(x[0]), _parse_integer(x[1]), _span_between(x[0], x[1]))
