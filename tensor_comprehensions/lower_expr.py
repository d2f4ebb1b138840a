"""Lower expressions of the language to expressions of the loop program.

Subscripts become int64 arithmetic on loop variables; values keep the language's types. A guarded access becomes a
load masked by the conditions under which the language would have evaluated it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .core.dtypes import INT64, DType
from .core.errors import InternalError
from .loop_ir import build
from .loop_ir import nodes as ir
from .loop_ir.buffer_view import BufferView
from .loop_ir.nodes import Buffer, Type
from .loop_ir.powers import expand_power
from .tc_lang import ir as tc

OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "%": "mod", "min": "min", "max": "max", "&&": "and", "||": "or",
    "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoweringScope:
    """The meaning of names in an expression to translate: indices are int64 values, tensors are buffers.

    guards: the conditions, in the language, under which the expression is evaluated.
    """

    indices: Mapping[str, ir.Expr]
    buffers: Mapping[str, Buffer | BufferView[int]]
    guards: tuple[tc.Expr, ...] = ()

    def with_guard(self, condition: tc.Expr) -> LoweringScope:
        return replace(self, guards=(*self.guards, condition))


def lower_expr(e: tc.Expr, scope: LoweringScope) -> ir.Expr:
    """Lower `e` to an expression of type `e.dtype`."""
    match e:
        case tc.Const(value, dtype):
            return ir.Const(value, Type(dtype))
        case tc.Index(name, dtype):
            return _cast(scope.indices[name], dtype)
        case tc.Access():
            return _lower_load(e, scope)
        case tc.Unary(op, operand):
            return ir.Unary("neg" if op == "-" else "not", lower_expr(operand, scope))
        case tc.Binary(op, left, right):
            return build.binary(
                OPERATORS[op], lower_expr(left, scope), lower_expr(right, _right_scope(op, left, scope))
            )
        case tc.Select(condition, then, otherwise):
            return ir.Select(
                lower_expr(condition, scope),
                lower_expr(then, scope.with_guard(condition)),
                lower_expr(otherwise, scope.with_guard(_negate(condition))),
            )
        case tc.Cast(operand, dtype):
            return _cast(lower_expr(operand, scope), dtype)
        case tc.Call(function, arguments):
            return math_call(function, tuple(lower_expr(a, scope) for a in arguments))
    raise InternalError(f"not an expression of a bound function: {e!r}")


def math_call(function: str, arguments: tuple[ir.Expr, ...]) -> ir.Expr:
    """A call of a function of the language; a power with a small constant exponent becomes products."""
    power = expand_power(*arguments) if function == "pow" else None
    return ir.Call(function, arguments) if power is None else power


def lower_subscript(e: tc.Expr, scope: LoweringScope) -> ir.Expr:
    """Lower the integer expression `e` to int64, which is exact even if the type of `e` would wrap."""
    match e:
        case tc.Const(value):
            return ir.Const(int(value), Type(INT64))
        case tc.Index(name):
            return scope.indices[name]
        case tc.Unary("-", operand):
            return ir.Unary("neg", lower_subscript(operand, scope))
        case tc.Binary("+" | "-" | "*" | "/" | "%" | "min" | "max" as op, left, right):
            return build.binary(OPERATORS[op], lower_subscript(left, scope), lower_subscript(right, scope))
        case tc.Select(condition, then, otherwise):
            return ir.Select(
                lower_expr(condition, scope),
                lower_subscript(then, scope.with_guard(condition)),
                lower_subscript(otherwise, scope.with_guard(_negate(condition))),
            )
        case tc.Cast(operand, dtype) if is_lossless_widening(operand.dtype, dtype):
            return lower_subscript(operand, scope)
        case _:
            return _cast(lower_expr(e, scope), INT64)


def lower_access(
    tensor: str, subscripts: tuple[tc.Expr, ...], scope: LoweringScope
) -> tuple[Buffer, tuple[ir.Expr, ...]]:
    """The buffer that holds `tensor`, and the indices into it of the element at `subscripts`."""
    indices = tuple(lower_subscript(s, scope) for s in subscripts)
    place = scope.buffers[tensor]
    return (
        (place.buffer, place.indices(dict(enumerate(indices)))) if isinstance(place, BufferView) else (place, indices)
    )


def _lower_load(e: tc.Access, scope: LoweringScope) -> ir.Load:
    buffer, indices = lower_access(e.tensor, e.subscripts, scope)
    return ir.Load(buffer, indices, _lower_guards_to_mask(scope) if e.guarded else None)


def _lower_guards_to_mask(scope: LoweringScope) -> ir.Expr | None:
    mask: ir.Expr | None = None
    for depth, condition in enumerate(scope.guards):
        term = lower_expr(condition, replace(scope, guards=scope.guards[:depth]))
        mask = term if mask is None else ir.Binary("and", mask, term)
    return mask


def _right_scope(op: str, left: tc.Expr, scope: LoweringScope) -> LoweringScope:
    if op == "&&":
        return scope.with_guard(left)
    return scope.with_guard(_negate(left)) if op == "||" else scope


def _negate(condition: tc.Expr) -> tc.Expr:
    return tc.Unary("!", condition, condition.dtype)


def is_lossless_widening(source: DType, target: DType) -> bool:
    """Whether the integer type `target` holds every value of the integer type `source`. Any other cast may wrap."""
    return source.is_integer and target.is_integer and target.is_signed and target.bits > source.bits - source.is_signed


def _cast(e: ir.Expr, dtype: DType) -> ir.Expr:
    return e if e.type.dtype == dtype else ir.Cast(e, dtype)
