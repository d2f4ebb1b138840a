"""Index expressions of the loop program: read, counted, evaluated."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.nodes import Binary, Const, Expr, Var

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "div", ast.Mod: "mod"}
MEANING: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.floordiv, "mod": operator.mod,
    "lt": operator.lt, "and": operator.and_,
}  # fmt: skip


def expression(text: str) -> Expr:
    """An index expression from Python's syntax, nothing simplified."""

    def convert(node: ast.AST) -> Expr:
        match node:
            case ast.Name(id=name):
                return b.var(name)
            case ast.Constant(value=int(n)):
                return b.const(n)
            case ast.BinOp(left, op, right):
                return Binary(BINARY[type(op)], convert(left), convert(right))
        raise AssertionError(text)

    return convert(ast.parse(text, mode="eval").body)


def operations(e: Expr) -> int:
    return 1 + operations(e.left) + operations(e.right) if isinstance(e, Binary) else 0


def value(e: Expr, at: Mapping[str, int] | None = None) -> int:
    """`e` where its variables have the values `at`."""
    match e:
        case Const(n):
            return int(n)
        case Var(name):
            assert at is not None
            return at[name]
        case Binary(op, left, right):
            return MEANING[op](value(left, at), value(right, at))
    raise AssertionError(e)
