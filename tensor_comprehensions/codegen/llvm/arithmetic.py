"""LLVM instructions for arithmetic operators on scalars and vectors; each function returns the result's operand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.errors import InternalError
from ...loop_ir.nodes import BITS, Binary, Const, Expr, Ramp, Type
from .hoisting_builder import HoistingBuilder
from .types import (
    constant_vector,
    llvm_constant,
    mangled_suffix,
    register_type,
    scalar_type,
    splat_constant,
    vector_type,
)
from .value_ranges import Interval

_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv", "mod": "frem"}
_ORDERED = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
UPDATES = {"+": "add", "*": "mul", "min": "min", "max": "max", "and": "and", "or": "or"}  # of Store and ReduceLanes


def emit_unary(b: HoistingBuilder, op: str, value: str, type: Type) -> str:
    """`neg` or `not`."""
    text = register_type(type)
    if op == "not":
        return b.define(f"xor {text} {value}, {splat_constant('true', 'i1', type.lanes)}", (value,))
    if type.dtype.is_float:
        return b.define(f"fneg {text} {value}", (value,))
    return b.define(f"sub {text} {splat_constant('0', scalar_type(type.dtype), type.lanes)}, {value}", (value,))


def emit_binary(b: HoistingBuilder, op: str, left: str, right: str, type: Type, *, keep_nan: bool = True) -> str:
    """A binary operator except integer division. keep_nan: whether the left operand of `min` or `max` may be NaN."""
    text = register_type(type)
    if op in _ORDERED:
        return emit_compare(b, op, left, right, type)
    if op in ("min", "max"):
        return _emit_min_max(b, op, left, right, type, keep_nan)
    if type.dtype.is_bool:
        name = {"add": "or", "mul": "and"}.get(op, op)
        return b.define(f"{name} {text} {left}, {right}", (left, right))
    name = f"{_FLOAT[op]} contract" if type.dtype.is_float else op
    return b.define(f"{name} {text} {left}, {right}", (left, right))


def emit_compare(b: HoistingBuilder, op: str, left: str, right: str, type: Type) -> str:
    """A comparison; NaN is unequal to everything."""
    if type.dtype.is_float:
        name = f"fcmp {_ORDERED[op]}"
    elif op in ("eq", "ne"):
        name = f"icmp {op}"
    else:
        name = f"icmp {'s' if type.dtype.is_signed else 'u'}{op}"
    return b.define(f"{name} {register_type(type)} {left}, {right}", (left, right))


def emit_select(b: HoistingBuilder, condition: str, then: str, otherwise: str, type: Type) -> str:
    """A `select`, lane by lane."""
    mask, text = vector_type("i1", type.lanes), register_type(type)
    return b.define(f"select {mask} {condition}, {text} {then}, {text} {otherwise}", (condition, then, otherwise))


def _emit_min_max(b: HoistingBuilder, op: str, left: str, right: str, type: Type, keep_nan: bool) -> str:
    """`min` or `max`. `left > right ? left : right` is one instruction; it drops NaN only if `left` is NaN."""
    comparison = emit_compare(b, "lt" if op == "min" else "gt", left, right, type)
    chosen = emit_select(b, comparison, left, right, type)
    if not (type.dtype.is_float and keep_nan):
        return chosen
    nan = b.define(f"fcmp uno {register_type(type)} {left}, {left}", (left,))
    return emit_select(b, nan, left, chosen, type)


def emit_divide(
    b: HoistingBuilder, op: str, left: str, right: str, type: Type, ranges: tuple[Interval, Interval]
) -> str:
    """Integer floor division, or its remainder. Dividing by 0 gives 0 for both; the smallest integer over -1 wraps.

    ranges: the intervals of `left` and `right`.
    """
    (low, _), (least, most) = ranges
    if least == most and most > 0:
        return _emit_division_by_constant(b, op, left, int(most), type, low >= 0)
    safe = right
    if least <= 0 <= most:
        safe = emit_select(b, _emit_equals(b, right, 0, type), _format_literal(1, type), right, type)
    if (low >= 0 and least >= 0) or not type.dtype.is_signed:
        result = _emit_raw_division(b, op, "u", left, safe, type)
    else:
        result = _emit_floor_division(b, op, left, safe, type, least <= -1 <= most)
    if safe == right:
        return result
    return emit_select(b, _emit_equals(b, right, 0, type), _format_literal(0, type), result, type)


def _emit_division_by_constant(b: HoistingBuilder, op: str, left: str, divisor: int, type: Type, natural: bool) -> str:
    text = register_type(type)
    if divisor & (divisor - 1) == 0:
        shift = "ashr" if type.dtype.is_signed else "lshr"
        name, operand = (shift, divisor.bit_length() - 1) if op == "div" else ("and", divisor - 1)
        return b.define(f"{name} {text} {left}, {_format_literal(operand, type)}", (left,))
    right = _format_literal(divisor, type)
    if natural or not type.dtype.is_signed:
        return _emit_raw_division(b, op, "u", left, right, type)
    return _emit_floor_division(b, op, left, right, type, False)


def _emit_floor_division(b: HoistingBuilder, op: str, left: str, right: str, type: Type, minus_one: bool) -> str:
    """Floor division or remainder from truncating division, corrected where the signs of remainder and divisor differ.

    minus_one: whether the divisor may be -1.
    """
    text, divisor = register_type(type), right
    if minus_one:  # dividing the smallest integer by -1 traps
        divisor = emit_select(b, _emit_equals(b, right, -1, type), _format_literal(1, type), right, type)
    quotient = _emit_raw_division(b, "div", "s", left, divisor, type)
    product = b.define(f"mul {text} {quotient}, {divisor}", (quotient, divisor))
    remainder = b.define(f"sub {text} {left}, {product}", (left, product))
    differ = b.define(f"xor {text} {remainder}, {divisor}", (remainder, divisor))
    signs = b.define(f"icmp slt {text} {differ}, {_format_literal(0, type)}", (differ,))
    rest = b.define(f"icmp ne {text} {remainder}, {_format_literal(0, type)}", (remainder,))
    wrong = b.define(f"and {vector_type('i1', type.lanes)} {signs}, {rest}", (signs, rest))
    if op == "mod":
        more = b.define(f"add {text} {remainder}, {divisor}", (remainder, divisor))
        return emit_select(b, wrong, more, remainder, type)
    less = b.define(f"sub {text} {quotient}, {_format_literal(1, type)}", (quotient,))
    floor = emit_select(b, wrong, less, quotient, type)
    if not minus_one:
        return floor
    negative = b.define(f"sub {text} {_format_literal(0, type)}, {left}", (left,))
    return emit_select(b, _emit_equals(b, right, -1, type), negative, floor, type)


def _emit_raw_division(b: HoistingBuilder, op: str, sign: str, left: str, right: str, type: Type) -> str:
    return b.define(f"{sign}{'div' if op == 'div' else 'rem'} {register_type(type)} {left}, {right}", (left, right))


def _emit_equals(b: HoistingBuilder, value: str, number: int, type: Type) -> str:
    return b.define(f"icmp eq {register_type(type)} {value}, {_format_literal(number, type)}", (value,))


def _format_literal(value: int, type: Type) -> str:
    return llvm_constant(value, type)


# --- vectors -----------------------------------------------------------------------------------------------------


def emit_broadcast(b: HoistingBuilder, value: str, element: str, lanes: int) -> str:
    """A scalar operand in every lane."""
    if not value.startswith("%"):
        return splat_constant(value, element, lanes)
    text = vector_type(element, lanes)
    first = b.define(f"insertelement {text} poison, {element} {value}, i64 0", (value,))
    return b.define(f"shufflevector {text} {first}, {text} poison, <{lanes} x i32> zeroinitializer", (first,))


def emit_ramp(b: HoistingBuilder, base: str, stride: int, type: Type) -> str:
    """`base + stride * lane`."""
    element, text = scalar_type(type.dtype), register_type(type)
    if not base.startswith("%"):
        return constant_vector([int(base) + stride * lane for lane in range(type.lanes)], element)
    steps = constant_vector([stride * lane for lane in range(type.lanes)], element)
    first = emit_broadcast(b, base, element, type.lanes)
    return b.define(f"add {text} {first}, {steps}", (first,))


def emit_shuffle(b: HoistingBuilder, first: str, second: str, lanes: Sequence[int], element: str, width: int) -> str:
    """A `shufflevector` of two vectors of `width` lanes; lanes from `width` on are those of `second`."""
    text = vector_type(element, width)
    mask = constant_vector(lanes, "i32")
    operands = (first, second)
    return b.define(f"shufflevector {text} {first}, {text} {second}, <{len(lanes)} x i32> {mask}", operands)


def emit_reduce_lanes(b: HoistingBuilder, op: str, value: str, type: Type) -> str:
    """All lanes combined by `op`, in any order; with `BITS`, packed into an integer."""
    if op == BITS:
        packed = b.define(f"bitcast {register_type(type)} {value} to i{type.lanes}", (value,))
        return packed if type.lanes == 64 else b.define(f"zext i{type.lanes} {packed} to i64", (packed,))
    name, dtype = UPDATES[op], type.dtype
    element = Type(dtype)
    if dtype.is_float and name in ("min", "max"):
        return _emit_tree_reduction(b, name, value, type)
    if dtype.is_float:
        start = "-0.0" if name == "add" else "1.0"
        intrinsic, prefix = f"@llvm.vector.reduce.f{name}.{mangled_suffix(type)}", "reassoc contract "
        b.declare(f"{register_type(element)} {intrinsic}({register_type(element)}, {register_type(type)})")
        arguments = f"{register_type(element)} {start}, {register_type(type)} {value}"
    else:
        if dtype.is_bool:
            spelled = {"add": "or", "max": "or", "mul": "and", "min": "and"}.get(name, name)
        else:
            spelled = f"{'s' if dtype.is_signed else 'u'}{name}" if name in ("min", "max") else name
        intrinsic, prefix = f"@llvm.vector.reduce.{spelled}.{mangled_suffix(type)}", ""
        b.declare(f"{register_type(element)} {intrinsic}({register_type(type)})")
        arguments = f"{register_type(type)} {value}"
    return b.define(f"call {prefix}{register_type(element)} {intrinsic}({arguments})", (value,))


def _emit_tree_reduction(b: HoistingBuilder, op: str, value: str, type: Type) -> str:
    """Combine halves of the vector until two lanes, or an odd number, are left; combine these in sequence."""
    lanes, dtype = type.lanes, type.dtype
    element = scalar_type(dtype)
    if lanes == 1:
        return value
    if lanes == 2 or lanes % 2:
        parts = [b.define(f"extractelement {register_type(type)} {value}, i64 {i}", (value,)) for i in range(lanes)]
        result = parts[0]
        for part in parts[1:]:
            result = _emit_min_max(b, op, part, result, Type(dtype), True)
        return result
    half = lanes // 2
    low = emit_shuffle(b, value, "poison", list(range(half)), element, lanes)
    high = emit_shuffle(b, value, "poison", list(range(half, lanes)), element, lanes)
    return _emit_tree_reduction(b, op, _emit_min_max(b, op, low, high, Type(dtype, half), True), Type(dtype, half))


def is_non_nan_literal(e: Expr) -> bool:
    """Whether `e` is a literal other than NaN."""
    return isinstance(e, Const) and not math.isnan(e.value)


def exact_inverse(e: Expr) -> Const | None:
    """1 / e if `e` is a float literal that is a power of two, so that multiplying replaces dividing; else None."""
    if not isinstance(e, Const) or not e.type.dtype.is_float or not math.isfinite(e.value):
        return None
    mantissa, exponent = math.frexp(e.value)
    return Const(1 / e.value, e.type) if abs(mantissa) == 0.5 and abs(exponent) < 100 else None


def lane_comparison(e: Binary) -> tuple[str, Ramp, Expr] | None:
    """(op, ramp, other side) if one side of the int64 comparison `e` is a `Ramp`, flipped to put it left; else None."""
    if e.left.type.dtype.name != "int64" or e.left.type.lanes == 1:
        return None
    flipped = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
    if e.op not in flipped:
        return None
    if isinstance(e.left, Ramp):
        return (e.op, e.left, e.right)
    if isinstance(e.right, Ramp):
        return (flipped[e.op], e.right, e.left)
    return None


def unreachable_node(node: object) -> InternalError:
    return InternalError(f"LLVM: cannot print {type(node).__name__}")
