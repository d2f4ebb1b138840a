"""Rewriting of the language's expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..tc_lang import function as tc
from ..tc_lang.function import BoundStatement


def map_expression(e: tc.Expr, f: Callable[[tc.Expr], tc.Expr]) -> tc.Expr:
    """`e` with `f` applied to its operands."""
    match e:
        case tc.Access(subscripts=subscripts):
            return replace(e, subscripts=tuple(map(f, subscripts)))
        case tc.Unary(operand=x) | tc.Cast(operand=x):
            return replace(e, operand=f(x))
        case tc.Binary(left=a, right=b):
            return replace(e, left=f(a), right=f(b))
        case tc.Select(condition=c, then=a, otherwise=b):
            return replace(e, condition=f(c), then=f(a), otherwise=f(b))
        case tc.Call(arguments=arguments):
            return replace(e, arguments=tuple(map(f, arguments)))
        case _:
            return e


def rename(s: BoundStatement, names: Mapping[str, str]) -> BoundStatement:
    """`s` with its index variables renamed."""

    def renamed(e: tc.Expr) -> tc.Expr:
        if isinstance(e, tc.Index):
            return replace(e, name=names.get(e.name, e.name))
        return map_expression(e, renamed)

    return replace(
        s,
        subscripts=tuple(map(renamed, s.subscripts)),
        value=renamed(s.value),
        indices=tuple(replace(i, name=names.get(i.name, i.name)) for i in s.indices),
        checks=tuple(
            replace(c, subscript=renamed(c.subscript), guard=renamed(c.guard) if c.guard is not None else None)
            for c in s.checks
        ),
    )
