"""The condition under which an expression reads an element: that of the conditionals around the read.

A derivative is often zero although the element is read, as that of `fabs` on one of its sides. The bounds of subscripts
depend on the reads alone.
"""

from __future__ import annotations

from functools import reduce

from ...core.dtypes import BOOL
from ..ir import Access, Binary, Const, Expr, Select, Unary, operands_of

ALWAYS: Expr = Const(True, BOOL)
NEVER: Expr = Const(False, BOOL)


def read_condition(access: Access, e: Expr) -> Expr:
    """The condition under which evaluating `e` reads `access`; ALWAYS and NEVER if it is constant."""
    if e == access:
        return ALWAYS
    match e:
        case Select(condition=c, then=a, otherwise=b):
            inside = _select_condition(c, read_condition(access, a), read_condition(access, b))
            return _or(read_condition(access, c), inside)
        case Binary(op="&&", left=a, right=b):
            return _or(read_condition(access, a), _and(a, read_condition(access, b)))
        case Binary(op="||", left=a, right=b):
            return _or(read_condition(access, a), _and(_not(a), read_condition(access, b)))
    return reduce(_or, (read_condition(access, x) for x in operands_of(e)), NEVER)


def _select_condition(c: Expr, a: Expr, b: Expr) -> Expr:
    """`c ? a : b` for conditions."""
    return a if a == b else _or(_and(c, a), _and(_not(c), b))


def _not(a: Expr) -> Expr:
    return a.operand if isinstance(a, Unary) and a.op == "!" else Unary("!", a, BOOL)


def _and(a: Expr, b: Expr) -> Expr:
    if b in (ALWAYS, NEVER):
        return a if b == ALWAYS else NEVER
    return Binary("&&", a, b, BOOL)


def _or(a: Expr, b: Expr) -> Expr:
    if ALWAYS in (a, b):
        return ALWAYS
    if NEVER in (a, b):
        return b if a == NEVER else a
    return a if a == b else Binary("||", a, b, BOOL)
