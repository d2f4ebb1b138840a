"""Lints: legal code that is probably a mistake, such as integer quotients in floating-point expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...core.errors import CheckError
from ...core.lazy_import import lazy_module
from ..ir import Function

if TYPE_CHECKING:
    from ..syntax import parse
    from ..syntax import tree as s
else:
    parse, s = lazy_module("tc_lang.syntax.parse"), lazy_module("tc_lang.syntax.tree")

_QUOTIENT = re.compile(r"(?<![\w.])\d\w*[\s)]*/[\s(]*[-+]?\d\w*(?![\w.])")
"""A quotient of two literals, neither with a decimal point."""


def lint(functions: Sequence[Function]) -> Iterator[CheckError]:
    """Yield the lints of the checked `functions` of a program, each with its position.

    The program is parsed again only if its text has a quotient that looks suspicious.
    """
    text = functions[0].source if functions else ""
    if not _QUOTIENT.search(text):
        return
    for d, function in zip(parse.parse_program(text).defs, functions, strict=True):
        floats = {t.name for t in function.tensors if t.dtype.is_float}
        everything = {t.name for t in function.tensors}
        for statement in d.body:
            if isinstance(statement, s.Statement) and statement.target in floats:
                values = [statement.value, *(c.value for c in statement.clauses if isinstance(c, s.Let))]
                for quotient, a, b in (q for value in values for q in _truncated_quotients(value, everything)):
                    yield CheckError(
                        f"{a}/{b} is {a // b} here: a quotient of integers rounds down",
                        source=text,
                        span=quotient.span,
                        suggestion=f"write {a}.0/{b} for {a / b:.4g}",
                    )


def _truncated_quotients(e: s.Expression, tensors: set[str]) -> Iterator[tuple[s.Binary, int, int]]:
    """The quotients of integer literals with a remainder in an expression, except in subscripts and integer casts."""
    match e:
        case s.Binary(op="/", left=left, right=right):
            a, b = _match_integer(left), _match_integer(right)
            if a is not None and b is not None and b and a % b:
                yield e, a, b
        case s.Cast(dtype=dtype) if not dtype.is_float:
            return
        case s.Apply(name=name) if name in tensors:
            return
    for part in s.child_expressions(e):
        yield from _truncated_quotients(part, tensors)


def _match_integer(e: s.Expression) -> int | None:
    match e:
        case s.Number(value=int(n)):
            return n
        case s.Unary(op="-", operand=s.Number(value=int(n))):
            return -n
    return None
