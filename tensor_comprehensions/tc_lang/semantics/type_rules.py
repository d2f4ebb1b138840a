"""The types of expressions: weak literals, conversions, and the checked form of every operator.

A `TypedExpr` pairs a checked expression with its type in the language. The two differ for the storage types float16 and
bfloat16: an expression of type float16 computes in float32, so its `expr.dtype` is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from ...core.dtypes import BOOL, FLOAT32, FLOAT64, INT32, INT64, UINT64, DType, Kind, promote_dtypes, wrap_integer
from ...core.errors import InternalError
from ...core.math_functions import TF32
from ..builtins import CONSTANTS, canonical_name
from ..ir import Binary, Call, Cast, Const, Expr, Select, Unary
from ..unlocated_error import UnlocatedTypeError

MAX_DEPTH = 220
MAX_NODES = 20000

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


@dataclass(frozen=True, slots=True)
class TypedExpr:
    """A checked expression.

    type: its type in the language. weak: whether it consists only of integer literals and adapts to its context's type.
    depth, nodes: the depth and the number of nodes of the expression.
    """

    expr: Expr
    type: DType
    weak: bool = False
    depth: int = 1
    nodes: int = 1


def make_typed(expr: Expr, type: DType, *parts: TypedExpr, weak: bool = False) -> TypedExpr:
    """A TypedExpr built from `parts`. Raises UnlocatedTypeError if it is too deep or too large for later stages."""
    depth = 1 + max((p.depth for p in parts), default=0)
    nodes = 1 + sum(p.nodes for p in parts)
    if depth > MAX_DEPTH:
        raise UnlocatedTypeError(
            "this expression nests too deeply once lets and builtins are expanded",
            expected=f"at most {MAX_DEPTH} levels",
            found=f"{depth} levels",
            suggestion="store parts of it in temporaries",
        )
    if nodes > MAX_NODES:
        raise UnlocatedTypeError(
            "this expression is too large once lets and builtins are expanded",
            expected=f"at most {MAX_NODES} nodes",
            found=f"{nodes} nodes",
            suggestion="store parts of it in temporaries",
        )
    return TypedExpr(expr, type, weak, depth, nodes)


def literal_type(value: int | float, *, index: bool = False) -> TypedExpr:
    """A typed literal: float32 if written with `.` or `e`, else a weak integer, which is int32 if that can hold it."""
    if isinstance(value, float):
        if math.isinf(value):
            raise UnlocatedTypeError("this number does not fit float64", suggestion="write `inf` for infinity")
        return TypedExpr(Const(value, FLOAT32), FLOAT32)
    return _weak_literal(value, index)


def named_constant(name: str) -> TypedExpr:
    """The constant `inf` or `nan`, as float32."""
    return TypedExpr(Const(CONSTANTS[name], FLOAT32), FLOAT32)


def _weak_literal(value: int, index: bool) -> TypedExpr:
    for dtype in (INT64,) if index else (INT32, INT64, UINT64):
        least, most = _integer_limits(dtype)
        if least <= value <= most:
            return TypedExpr(Const(value, dtype), dtype, weak=True)
    raise UnlocatedTypeError(
        f"this integer does not fit {'int64' if index else '64 bits'}",
        expected=f"{-(2**63)} to {2 ** (63 if index else 64) - 1}",
        found=str(value),
    )


def _integer_limits(dtype: DType) -> tuple[int, int]:
    """The least and the greatest value of an integer type."""
    if dtype.kind is Kind.UNSIGNED:
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1


# --- conversions ---------------------------------------------------------------------------------------------------


def resolve_weak(x: TypedExpr) -> TypedExpr:
    """`x` with its default type if it is weak."""
    return convert(x, x.type) if x.weak else x


def convert(x: TypedExpr, to: DType) -> TypedExpr:
    """Convert `x` to an operand of type `to`, without rounding to a storage type, which only stores and casts do."""
    if x.weak:
        return _retype_weak(x, to)
    compute = to.accumulator
    if x.expr.dtype == compute:
        return TypedExpr(x.expr, to, False, x.depth, x.nodes)
    if isinstance(x.expr, Const) and x.expr.dtype.is_float and compute.is_float:
        return TypedExpr(Const(x.expr.value, compute), to)
    return make_typed(Cast(x.expr, compute), to, x)


def _retype_weak(x: TypedExpr, to: DType) -> TypedExpr:
    match x.expr:
        case Const(value=value):
            return TypedExpr(Const(_fit_literal(int(value), to), to.accumulator), to)
        case Select(condition=condition, then=a, otherwise=b):
            then = _retype_weak(TypedExpr(a, x.type, True), to)
            otherwise = _retype_weak(TypedExpr(b, x.type, True), to)
            expr = Select(condition, then.expr, otherwise.expr, to.accumulator)
            return TypedExpr(expr, to, False, x.depth, x.nodes)
    raise InternalError(f"not a weak expression: {x.expr!r}")


def _fit_literal(value: int, to: DType) -> int | float | bool:
    if to.is_float:
        return float(value)
    if to.is_bool:
        return bool(value)
    top = _integer_limits(to)[1] + 1
    if not -(2 ** (to.bits - 1)) <= value < top:
        raise UnlocatedTypeError(
            f"the literal {value} does not fit {to}",
            expected=f"{-top if to.is_signed else 0} to {top - 1}",
            found=str(value),
            suggestion=f"cast the other operand to a wider type, or write {to}({value}) for the wrapped value",
        )
    return value % top if to.kind is Kind.UNSIGNED else value


def explicit_cast(x: TypedExpr, to: DType) -> TypedExpr:
    """The cast `to(x)` as written in the text: it rounds to storage types and wraps integers."""
    if x.weak and isinstance(x.expr, Const):
        value = int(x.expr.value)
        if to.is_integer:
            value = wrap_integer(value, to)
        return TypedExpr(Const(_fit_literal(value, to), to.accumulator), to)
    x = resolve_weak(x)
    if x.type == to and x.expr.dtype == to:
        return x
    if to.accumulator != to:
        rounded = rounded_to(x, to)
        return make_typed(Cast(rounded, to.accumulator), to, x)
    return convert(x, to)


def rounded_to(x: TypedExpr, to: DType) -> Expr:
    """`x` as an expression of exactly the type `to`, as a store needs it."""
    if isinstance(x.expr, Cast) and x.expr.operand.dtype == to and to.accumulator == x.expr.dtype:
        return x.expr.operand  # a value that was loaded as `to` or rounded to it, unchanged
    x = convert(x, to)
    return x.expr if x.expr.dtype == to else Cast(x.expr, to)


def common_type(xs: Sequence[TypedExpr]) -> tuple[list[TypedExpr], DType]:
    """The operands converted to their common type, and that type."""
    firm = [x.type for x in xs if not x.weak]
    if not firm:
        to = reduce(promote_dtypes, (x.type for x in xs))
    else:
        to = reduce(promote_dtypes, firm)
        if to.is_bool and len(firm) < len(xs):
            to = INT32
    return [convert(x, to) for x in xs], to


# --- operators -----------------------------------------------------------------------------------------------------


def typed_binary(op: str, a: TypedExpr, b: TypedExpr, *, index: bool = False) -> TypedExpr:
    """`a op b`."""
    if op in ("&&", "||"):
        return _type_logical(op, a, b)
    if a.weak and b.weak and isinstance(a.expr, Const) and isinstance(b.expr, Const):
        return _fold_literals(op, int(a.expr.value), int(b.expr.value), index)
    (left, right), to = common_type((a, b))
    if op in COMPARISONS:
        if to.is_bool and op not in ("==", "!="):
            left, right = convert(left, INT32), convert(right, INT32)
        return make_typed(Binary(op, left.expr, right.expr, BOOL), BOOL, left, right)
    if to.is_bool:
        raise UnlocatedTypeError(
            f"'{op}' does not take bool", expected="numbers", found="bool", suggestion="cast it: int32(x), float(x)"
        )
    if op == "%" and to.is_float:
        raise UnlocatedTypeError("'%' takes integers", expected="integers", found=str(to), suggestion="use fmod(a, b)")
    if op in ("/", "%") and to.is_integer and isinstance(right.expr, Const) and right.expr.value == 0:
        raise UnlocatedTypeError(f"'{op}' divides by zero")
    return make_typed(Binary(op, left.expr, right.expr, left.expr.dtype), to, left, right)


def _type_logical(op: str, a: TypedExpr, b: TypedExpr) -> TypedExpr:
    for x in (a, b):
        require_bool(x, f"'{op}'")
    return make_typed(Binary(op, a.expr, b.expr, BOOL), BOOL, a, b)


def require_bool(x: TypedExpr, what: str) -> None:
    """Reject an operand or a condition that is not bool. Raises UnlocatedTypeError."""
    if not x.type.is_bool:
        raise UnlocatedTypeError(
            f"{what} takes bool", expected="bool", found=str(x.type), suggestion="compare: `x != 0`"
        )


def _fold_literals(op: str, a: int, b: int, index: bool) -> TypedExpr:
    """Fold an operation on two literals. Here, and only here, `/` and `%` truncate as in C: `-3 % 2` is -1."""
    if op in COMPARISONS:
        holds = {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b, "==": a == b, "!=": a != b}[op]
        return TypedExpr(Const(holds, BOOL), BOOL)
    if op in ("/", "%"):
        if b == 0:
            raise UnlocatedTypeError(f"'{op}' divides by zero")
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return _weak_literal(quotient if op == "/" else a - quotient * b, index)
    value = {"+": a + b, "-": a - b, "*": a * b, "min": min(a, b), "max": max(a, b)}[op]
    return _weak_literal(value, index)


def typed_negate(x: TypedExpr, *, index: bool = False) -> TypedExpr:
    """`-x`."""
    if x.type.is_bool:
        raise UnlocatedTypeError("'-' does not take bool", expected="a number", found="bool", suggestion="use '!'")
    if x.weak and isinstance(x.expr, Const):
        return _weak_literal(-int(x.expr.value), index)
    if isinstance(x.expr, Const) and x.expr.dtype.is_float:
        return TypedExpr(Const(-x.expr.value, x.expr.dtype), x.type)
    x = resolve_weak(x)
    return make_typed(Unary("-", x.expr, x.expr.dtype), x.type, x)


def typed_not(x: TypedExpr) -> TypedExpr:
    """`!x`."""
    require_bool(x, "'!'")
    return make_typed(Unary("!", x.expr, BOOL), BOOL, x)


def typed_select(condition: TypedExpr, a: TypedExpr, b: TypedExpr) -> TypedExpr:
    """`condition ? a : b`, which is weak if both branches are."""
    require_bool(condition, "the condition of '?:'")
    if a.weak and b.weak:
        (then, otherwise), to = common_type((a, b))
        expr = Select(condition.expr, then.expr, otherwise.expr, to)
        return make_typed(expr, to, condition, then, otherwise, weak=True)
    (then, otherwise), to = common_type((a, b))
    expr = Select(condition.expr, then.expr, otherwise.expr, then.expr.dtype)
    return make_typed(expr, to, condition, then, otherwise)


def typed_builtin(name: str, arguments: Sequence[TypedExpr], *, index: bool = False) -> TypedExpr:
    """A builtin applied to the right number of arguments, expanded so that only C functions remain calls."""
    if name in ("min", "max"):
        return _make_typed_extremum(name, arguments, index)
    if name == "abs" and not arguments[0].type.is_float:
        return _integer_abs(arguments[0], index)
    xs, to = _promote_to_float(arguments)
    match name:
        case "relu":
            zero = TypedExpr(Const(0.0, to.accumulator), to)
            return typed_binary("max", xs[0], zero)
        case "sigmoid":
            one = TypedExpr(Const(1.0, to.accumulator), to)
            return typed_binary("/", one, typed_binary("+", one, _make_typed_call("exp", [typed_negate(xs[0])], to)))
        case "abs":
            return _make_typed_call("fabs", xs, to)
        case "tf32":
            return _round_to_tf32(xs[0])
    canonical = canonical_name(name)
    if canonical is None:
        raise InternalError(f"no such builtin: {name}")
    return _make_typed_call(canonical, xs, to)


def _round_to_tf32(x: TypedExpr) -> TypedExpr:
    if x.type == FLOAT64:
        raise UnlocatedTypeError(
            "tf32 rounds float32", expected="float32", found="float64", suggestion="cast it: tf32(float(x))"
        )
    return _make_typed_call(TF32, [convert(x, FLOAT32)], FLOAT32)


def _make_typed_call(name: str, xs: Sequence[TypedExpr], to: DType) -> TypedExpr:
    return make_typed(Call(name, tuple(x.expr for x in xs), to.accumulator), to, *xs)


def _promote_to_float(arguments: Sequence[TypedExpr]) -> tuple[list[TypedExpr], DType]:
    """Convert the arguments of a C function to their widest floating-point type, or float32 if all are integers."""
    floats = [x.type for x in arguments if x.type.is_float]
    to = reduce(promote_dtypes, floats) if floats else FLOAT32
    return [convert(x, to) for x in arguments], to


def _make_typed_extremum(name: str, arguments: Sequence[TypedExpr], index: bool) -> TypedExpr:
    if all(x.weak for x in arguments):
        return reduce(lambda a, b: typed_binary(name, a, b, index=index), arguments)
    xs, _ = common_type(arguments)
    return reduce(lambda a, b: typed_binary(name, a, b), xs)


def _integer_abs(x: TypedExpr, index: bool) -> TypedExpr:
    if x.type.is_bool:
        raise UnlocatedTypeError("'abs' takes a number", expected="a number", found="bool")
    if x.weak and isinstance(x.expr, Const):
        return _weak_literal(abs(int(x.expr.value)), index)
    x = resolve_weak(x)
    if x.type.kind is Kind.UNSIGNED:
        return x
    zero = TypedExpr(Const(0, x.expr.dtype), x.type)
    return typed_select(typed_binary("<", x, zero), typed_negate(x), x)
