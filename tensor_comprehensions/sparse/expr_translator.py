"""Translate expressions of the language to the loop program, with sizes that are known only at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..core.dtypes import INT64
from ..core.errors import InternalError
from ..loop_ir import build
from ..loop_ir import nodes as ir
from ..loop_ir.nodes import Type
from ..lower_expr import OPERATORS, is_lossless_widening, math_call
from ..tc_lang import ir as tc
from .operand_buffers import Sizes

Read = Callable[[tc.Access, tuple[ir.Expr, ...], ir.Expr | None], ir.Expr]
"""Emits the load of an access at its subscripts; it touches memory only if the mask holds."""


@dataclass(frozen=True, slots=True)
class Translator:
    """Translates expressions at one point of the program.

    indices: int64 values by name. guard: the condition under which the translated expression is evaluated.
    """

    indices: Mapping[str, ir.Expr]
    sizes: Sizes
    read: Read
    guard: ir.Expr | None = None

    def with_condition(self, condition: ir.Expr) -> Translator:
        return replace(self, guard=build.and_masks(self.guard, condition))

    def value(self, e: tc.Expr) -> ir.Expr:
        """Translate `e` to an expression of type `e.dtype`."""
        match e:
            case tc.Const(value, dtype):
                return ir.Const(value, Type(dtype))
            case tc.Size(name, dtype):
                return build.cast(self.sizes.name(name), dtype)
            case tc.Index(name, dtype):
                return build.cast(self.indices[name], dtype)
            case tc.Access(subscripts=subscripts):
                return self.read(e, tuple(self.subscript(s) for s in subscripts), self.guard)
            case tc.Unary(op, operand):
                return ir.Unary("neg" if op == "-" else "not", self.value(operand))
            case tc.Binary(op, left, right):
                return build.binary(OPERATORS[op], self.value(left), self._right(op, left).value(right))
            case tc.Select(condition, then, otherwise):
                c = self.value(condition)
                negated = build.logical_not(c)
                return ir.Select(c, self.with_condition(c).value(then), self.with_condition(negated).value(otherwise))
            case tc.Cast(operand, dtype):
                return build.cast(self.value(operand), dtype)
            case tc.Call(function, arguments):
                return math_call(function, tuple(self.value(a) for a in arguments))
        raise InternalError(f"not an expression: {e!r}")

    def subscript(self, e: tc.Expr) -> ir.Expr:
        """Translate the integer expression `e` to int64, which is exact even if the type of `e` would wrap."""
        match e:
            case tc.Const(value):
                return build.const(int(value))
            case tc.Index(name):
                return self.indices[name]
            case tc.Size(name):
                return self.sizes.name(name)
            case tc.Unary("-", operand):
                return build.sub(0, self.subscript(operand))
            case tc.Binary("+" | "-" | "*" | "/" | "%" | "min" | "max" as op, left, right):
                return build.binary(OPERATORS[op], self.subscript(left), self.subscript(right))
            case tc.Cast(operand, dtype) if is_lossless_widening(operand.dtype, dtype):
                return self.subscript(operand)
            case _:
                return build.cast(self.value(e), INT64)

    def _right(self, op: str, left: tc.Expr) -> Translator:
        if op not in ("&&", "||"):
            return self
        condition = self.value(left)
        return self.with_condition(condition if op == "&&" else build.logical_not(condition))
