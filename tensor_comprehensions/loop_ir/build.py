"""Folding constructors of nodes: Python numbers become constants, scalars are broadcast, integer constants fold.

Only identities that hold for every value are applied, so a built expression always equals the unfolded node.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

from ..core.dtypes import BOOL, INT64, DType, Kind
from ..core.errors import InternalError
from ..core.memory_layout import contiguous_strides
from .nodes import (
    COMPARISONS,
    Allocate,
    Binary,
    Block,
    Broadcast,
    Buffer,
    Call,
    Cast,
    Const,
    Expr,
    If,
    Load,
    Loop,
    LoopKind,
    Ramp,
    ReduceLanes,
    Select,
    Shuffle,
    Space,
    Stmt,
    Store,
    Type,
    Unary,
    Var,
)

Operand = Expr | int | float | bool
INDEX = Type(INT64)
TRUE = Const(True, Type(BOOL))
FALSE = Const(False, Type(BOOL))
NOTHING = Block(())

_SMALL: dict[float, Const] = {n: Const(n, INDEX) for n in range(-8, 1025)}
"""Preallocated constants for common indices."""
_COMBINERS = {"+": "add", "*": "mul", "min": "min", "max": "max", "and": "and", "or": "or"}
_BOOL_REDUCTIONS = {"+": "or", "max": "or", "or": "or", "*": "and", "min": "and", "and": "and"}


# --- leaves ------------------------------------------------------------------------------------------------------


def const(value: int | float | bool, dtype: DType = INT64, lanes: int = 1) -> Const:
    """The constant `value` of type `dtype`, wrapped into its range when an integer."""
    if dtype is INT64 and lanes == 1:
        known = _SMALL.get(value)
        return Const(wrap(int(value), dtype), INDEX) if known is None else known
    if dtype.is_bool:
        return Const(bool(value), Type(BOOL, lanes))
    if dtype.is_float:
        return Const(float(value), Type(dtype, lanes))
    return Const(wrap(int(value), dtype), Type(dtype, lanes))


def var(name: str, dtype: DType = INT64, lanes: int = 1) -> Var:
    """The loop variable or bound name `name`."""
    return Var(name, Type(dtype, lanes))


def wrap(value: int, dtype: DType) -> int:
    """`value` modulo 2^bits, in the range of the integer type `dtype`."""
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if dtype.kind is Kind.SIGNED and value >> (dtype.bits - 1) else value


def integer(e: Expr) -> int | None:
    """The value of an integer constant (scalar or the same in all lanes), else None."""
    return e.value if type(e) is Const and type(e.value) is int else None


def is_true(e: Expr | None) -> bool:
    """Whether `e` is the constant true, in every lane (as is an absent mask)."""
    return e is None or (type(e) is Const and e.value is True)


def is_false(e: Expr | None) -> bool:
    """Whether `e` is the constant false, in every lane."""
    return type(e) is Const and e.value is False


# --- arithmetic --------------------------------------------------------------------------------------------------


def add(a: Operand, b: Operand) -> Expr:
    return binary("add", a, b)


def sub(a: Operand, b: Operand) -> Expr:
    return binary("sub", a, b)


def mul(a: Operand, b: Operand) -> Expr:
    return binary("mul", a, b)


def div(a: Operand, b: Operand) -> Expr:
    """Floor division of integers, division of floats."""
    return binary("div", a, b)


def mod(a: Operand, b: Operand) -> Expr:
    return binary("mod", a, b)


def minimum(a: Operand, b: Operand) -> Expr:
    return binary("min", a, b)


def fold_minimum(values: Iterable[Expr]) -> Expr:
    """The minimum of one or more values."""
    return reduce(minimum, values)


def fold_maximum(values: Iterable[Expr]) -> Expr:
    """The maximum of one or more values."""
    return reduce(maximum, values)


def maximum(a: Operand, b: Operand) -> Expr:
    return binary("max", a, b)


def eq(a: Operand, b: Operand) -> Expr:
    return binary("eq", a, b)


def ne(a: Operand, b: Operand) -> Expr:
    return binary("ne", a, b)


def lt(a: Operand, b: Operand) -> Expr:
    return binary("lt", a, b)


def le(a: Operand, b: Operand) -> Expr:
    return binary("le", a, b)


def gt(a: Operand, b: Operand) -> Expr:
    return binary("gt", a, b)


def ge(a: Operand, b: Operand) -> Expr:
    return binary("ge", a, b)


def logical_and(a: Operand, b: Operand) -> Expr:
    return binary("and", a, b)


def logical_or(a: Operand, b: Operand) -> Expr:
    return binary("or", a, b)


def logical_not(a: Expr) -> Expr:
    return unary("not", a)


def and_masks(a: Expr | None, b: Expr | None) -> Expr | None:
    """The conjunction of two masks, None being all-true."""
    if a is None or b is None:
        return b if a is None else a
    joined = logical_and(a, b)
    return None if is_true(joined) else joined


def unary(op: str, operand: Expr) -> Expr:
    """`op operand`, folded if the operand is a constant or a negation."""
    if type(operand) is Const:
        if op == "not":
            return const(not operand.value, BOOL, operand.type.lanes)
        value = -operand.value
        return const(value, operand.type.dtype, operand.type.lanes)
    if type(operand) is Unary and operand.op == op:
        return operand.operand
    return Unary(op, operand)


def binary(op: str, a: Operand, b: Operand) -> Expr:
    """`a op b`, folded, with Python numbers converted to constants and scalars broadcast to the other side's lanes."""
    left, right = _convert_python_numbers(a, b)
    t, lanes = left.type, right.type.lanes
    if t.lanes != lanes and 1 not in (t.lanes, lanes):
        raise InternalError(f"{op} of {t.lanes} and {lanes} lanes")
    folded = None
    if type(left) is Const and type(right) is Const:
        folded = _fold_constants(op, left, right)
    elif t.dtype.is_integer:
        folded = _fold_integer(op, left, right)
    elif t.dtype.is_bool:
        folded = _fold_bool(op, left, right)
    if folded is not None:
        return folded
    if t.lanes == lanes:
        return Binary(op, left, right)
    lanes = max(t.lanes, lanes)
    return Binary(op, broadcast(left, lanes), broadcast(right, lanes))


def _convert_python_numbers(a: Operand, b: Operand) -> tuple[Expr, Expr]:
    """Give Python numbers the type of the other operand; two numbers are int64."""
    if isinstance(a, (int, float)):
        dtype = b.type.dtype if not isinstance(b, (int, float)) else INT64
        a = const(a, dtype)
    if isinstance(b, (int, float)):
        b = const(b, a.type.dtype)
    return a, b


_INTEGER_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.floordiv, "mod": operator.mod,
    "min": min, "max": max, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "and": operator.and_, "or": operator.or_,
}  # fmt: skip


def _fold_constants(op: str, left: Const, right: Const) -> Expr | None:
    """The value of `op` on two constants, or None for floats, which are left to the target's arithmetic."""
    dtype = left.type.dtype
    if dtype.is_float or (op in ("div", "mod") and right.value == 0):
        return None
    lanes = max(left.type.lanes, right.type.lanes)
    return const(_INTEGER_OPERATORS[op](left.value, right.value), BOOL if op in COMPARISONS else dtype, lanes)


def _fold_integer(op: str, left: Expr, right: Expr) -> Expr | None:
    if op in ("add", "mul") and type(left) is Const:
        left, right = right, left
    c = integer(right)
    if op in ("add", "sub"):
        if c == 0:
            return broadcast(left, max(left.type.lanes, right.type.lanes))
        if c is not None and type(left) is Binary and left.op in ("add", "sub"):
            inner = integer(left.right)
            if inner is not None and left.type.dtype.bits == 64:  # i + 1 + 2 is i + 3
                total = (inner if left.op == "add" else -inner) + (c if op == "add" else -c)
                return add(left.left, const(total, left.type.dtype))
    elif op == "mul" and c == 1:
        return broadcast(left, max(left.type.lanes, right.type.lanes))
    elif op == "mul" and c == 0:
        return const(0, left.type.dtype, max(left.type.lanes, right.type.lanes))
    elif op == "div" and c == 1:
        return broadcast(left, max(left.type.lanes, right.type.lanes))
    elif op == "mod" and c == 1:
        return const(0, left.type.dtype, max(left.type.lanes, right.type.lanes))
    if type(left) is Ramp or type(right) is Ramp:
        return _fold_ramp(op, left, right)
    return None


def _fold_ramp(op: str, left: Expr, right: Expr) -> Expr | None:
    """The ramp for a sum of ramps and scalars, or for a multiple of a ramp, else None."""
    a, b = _match_lane_progression(left), _match_lane_progression(right)
    if a is None or b is None:
        return None
    lanes = max(left.type.lanes, right.type.lanes)
    if op == "add":
        return ramp(add(a[0], b[0]), a[1] + b[1], lanes)
    if op == "sub":
        return ramp(sub(a[0], b[0]), a[1] - b[1], lanes)
    factor = integer(right)
    if op == "mul" and factor is not None:
        return ramp(mul(a[0], factor), a[1] * factor, lanes)
    return None


def _match_lane_progression(e: Expr) -> tuple[Expr, int] | None:
    """(first lane, step between lanes) of a ramp, a scalar or a uniform vector, else None."""
    match e:
        case Ramp(base, stride, _):
            return base, stride
        case Broadcast(operand, _):
            return operand, 0
        case Const(value, t):
            return const(value, t.dtype), 0
    return (e, 0) if e.type.lanes == 1 else None


def _fold_bool(op: str, left: Expr, right: Expr) -> Expr | None:
    if op not in ("and", "or"):
        return None
    lanes = max(left.type.lanes, right.type.lanes)
    for a, b in ((left, right), (right, left)):
        if is_true(a) or is_false(a):
            return broadcast(b if is_true(a) == (op == "and") else a, lanes)
    return broadcast(left, lanes) if left is right else None


# --- other expressions -------------------------------------------------------------------------------------------


def broadcast(e: Expr, lanes: int) -> Expr:
    """`e` in each of `lanes` lanes; a vector of that many lanes is returned unchanged."""
    have = e.type.lanes
    if have == lanes:
        return e
    if have != 1:
        raise InternalError(f"a vector of {have} lanes used as one of {lanes}: {e}")
    return const(e.value, e.type.dtype, lanes) if type(e) is Const else Broadcast(e, lanes)


def ramp(base: Operand, stride: int, lanes: int) -> Expr:
    """`base, base + stride, ...` in `lanes` lanes."""
    first = const(base) if isinstance(base, (int, float)) else base
    return broadcast(first, lanes) if stride == 0 or lanes == 1 else Ramp(first, stride, lanes)


def select(condition: Expr, then: Expr, otherwise: Expr) -> Expr:
    """Choose lane by lane; folded if the condition is constant."""
    lanes = max(condition.type.lanes, then.type.lanes, otherwise.type.lanes)
    if type(condition) is Const:
        return broadcast(then if condition.value else otherwise, lanes)
    return Select(broadcast(condition, lanes), broadcast(then, lanes), broadcast(otherwise, lanes))


def cast(e: Expr, dtype: DType) -> Expr:
    """`e` converted to `dtype`; unchanged if it already has that type."""
    have = e.type.dtype
    if have == dtype:
        return e
    if type(e) is Const and not have.is_float and not dtype.is_float:
        return const(e.value, dtype, e.type.lanes)
    return Cast(e, dtype)


def call(function: str, *arguments: Expr) -> Expr:
    """A call of `function` on arguments of one type; scalars are broadcast if another argument is a vector."""
    widths = [a.type.lanes for a in arguments]
    lanes = max(widths)
    if min(widths) == lanes:
        return Call(function, arguments)
    return Call(function, tuple(broadcast(a, lanes) for a in arguments))


def shuffle(left: Expr, right: Expr, lanes: tuple[int, ...]) -> Expr:
    """The elements `lanes` of `left` followed by `right`; just `left` if these are all its lanes in order."""
    return left if lanes == tuple(range(left.type.lanes)) else Shuffle(left, right, lanes)


def reduce_lanes(op: str, e: Expr) -> Expr:
    """All lanes of `e` combined by `op`; a scalar is returned unchanged."""
    return ReduceLanes(op, e) if e.type.lanes > 1 else e


def load(buffer: Buffer, *indices: Operand, mask: Expr | None = None) -> Load:
    """Load `buffer[indices]`; lanes where `mask` is false give 0."""
    where = _convert_index_numbers(indices)
    if mask is None or is_true(mask):
        return Load(buffer, where)
    return Load(buffer, where, broadcast(mask, max((i.type.lanes for i in where), default=1)))


def _convert_index_numbers(indices: tuple[Operand, ...]) -> tuple[Expr, ...]:
    return tuple([const(i) if isinstance(i, (int, float)) else i for i in indices])


# --- statements --------------------------------------------------------------------------------------------------


def store(
    buffer: Buffer, indices: tuple[Operand, ...], value: Operand, *, op: str | None = None, mask: Expr | None = None
) -> Store:
    """Store `buffer[indices] = value` (or `op=`) where `mask`; `value` is broadcast to the lanes of the indices."""
    where = _convert_index_numbers(indices)
    lanes = max([buffer.type.lanes, *[i.type.lanes for i in where]])
    if isinstance(value, (int, float)):
        value = const(value, buffer.type.dtype)
    return Store(buffer, where, broadcast(value, lanes), op, None if is_true(mask) else mask)


def block(*statements: Stmt) -> Stmt:
    """A block of the statements with nested blocks flattened; a single statement is returned unchanged."""
    flat: list[Stmt] = []
    for s in statements:
        if type(s) is Block:
            flat.extend(s.body)
        else:
            flat.append(s)
    return flat[0] if len(flat) == 1 else Block(tuple(flat))


def when(condition: Expr, then: Stmt, otherwise: Stmt | None = None) -> Stmt:
    """`if condition`; folded if the condition is constant."""
    if type(condition) is Const:
        return then if condition.value else otherwise or NOTHING
    return If(condition, then, otherwise)


def dynamic_buffer(name: str, dtype: DType, inner: Sequence[int] = (), space: Space = Space.GLOBAL) -> Buffer:
    """A row-major buffer with a dynamic first dimension, followed by the extents `inner`."""
    shape = (0, *inner)
    return Buffer(name, Type(dtype), shape, contiguous_strides(shape), space, dynamic=(0,))


def stride(b: Buffer, dimension: int) -> Operand:
    """The stride of a dimension: a number, or the variable that holds it."""
    name = b.stride_variable(dimension)
    return b.strides[dimension] if name is None else var(name)


def count_elements(b: Buffer, lengths: Sequence[Expr]) -> Expr:
    """The number of elements of `b` with its dynamic dimensions as long as `lengths`."""
    count: Expr = const(b.static_elements)
    for length in lengths:
        count = mul(count, length)
    return count


def register(name: str, dtype: DType = INT64) -> Buffer:
    """A scalar register buffer: a mutable variable."""
    return Buffer(name, Type(dtype), (), (), Space.REGISTER)


def allocate(buffers: Iterable[Buffer], body: Stmt) -> Stmt:
    """`body` with `buffers` allocated around it, if there are any."""
    found = tuple(buffers)
    return Allocate(found, body) if found else body


def loops(extents: Sequence[tuple[str, int]], body: Stmt, kind: LoopKind = LoopKind.SERIAL) -> Stmt:
    """`body` nested in loops from 0, the first outermost; each is given as (variable, extent)."""
    for name, extent in reversed(extents):
        body = Loop(name, const(0), const(extent), body, kind)
    return body


def buffer(name: str, dtype: DType, shape: tuple[int, ...], space: Space = Space.GLOBAL, lanes: int = 1) -> Buffer:
    """A compact row-major buffer."""
    return Buffer(name, Type(dtype, lanes), shape, contiguous_strides(shape), space)


def combiner(op: str, dtype: DType) -> str:
    """The operator of `Binary` that combines two values of the reduction `op` (as `Store` names it)."""
    return _BOOL_REDUCTIONS[op] if dtype.is_bool else _COMBINERS[op]


def lanes_combiner(op: str, dtype: DType) -> str:
    """The operator of `ReduceLanes` for the reduction `op`."""
    return _BOOL_REDUCTIONS[op] if dtype.is_bool else op


def neutral(op: str, dtype: DType) -> Const:
    """The constant e with `e op x == x` for every x of `dtype`."""
    if op == "+":
        return const(0, dtype)
    if op == "*":
        return const(1, dtype)
    if op in ("and", "or"):
        return const(op == "and", BOOL)
    low, high = _compute_dtype_range(dtype)
    return const(high if op == "min" else low, dtype)


def _compute_dtype_range(dtype: DType) -> tuple[int | float, int | float]:
    if dtype.is_float:
        return -math.inf, math.inf
    if dtype.is_bool:
        return 0, 1
    if dtype.kind is Kind.UNSIGNED:
        return 0, (1 << dtype.bits) - 1
    return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
