"""The rewrite rules of `simplify`: functions `(node, ranges) -> replacement or None`, listed by kind of node.

Rules on floats preserve every bit of the result, for signed zeros, infinities and NaN, too. Rules that use intervals
require bounded ones, so that no sum they rearrange can wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import gcd
from typing import Any

from ...core.dtypes import FLOAT16, FLOAT64, INT64, DType
from .. import build, intervals, linear_forms
from ..intervals import Interval, Ranges
from ..nodes import (
    COMPARISONS,
    Binary,
    Broadcast,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Ramp,
    ReduceLanes,
    Select,
    Type,
    Unary,
)
from ..rewrite import refold

Rule = Callable[[Any, Ranges], Expr | None]
_LIMIT = 1 << 62


# --- any operator ------------------------------------------------------------------------------------------------


def fold(e: Expr, _: Ranges) -> Expr | None:
    """Apply the folding constructors of `build`: constants, ramps, neutral elements of integers."""
    new = refold(e)
    return None if new is e or _same_parts(new, e) else new


def _same_parts(a: Expr, b: Expr) -> bool:
    if isinstance(a, Binary) and isinstance(b, Binary):
        return a.op == b.op and a.left is b.left and a.right is b.right
    if isinstance(a, Ramp) and isinstance(b, Ramp):
        return a.base is b.base and a.stride == b.stride
    if isinstance(a, Select) and isinstance(b, Select):
        return a.condition is b.condition and a.then is b.then and a.otherwise is b.otherwise
    if isinstance(a, Broadcast | Cast | Unary) and isinstance(b, Broadcast | Cast | Unary):
        return type(a) is type(b) and a.operand is b.operand
    return False


def broadcast_late(e: Binary, _: Ranges) -> Expr | None:
    """x4(a) + x4(b) is x4(a + b): an operation on uniform vectors is done once."""
    a, b = _match_uniform_scalar(e.left), _match_uniform_scalar(e.right)
    if a is None or b is None or (type(a) is Const and type(b) is Const):
        return None
    lanes = e.left.type.lanes
    return build.broadcast(build.binary(e.op, a, b), lanes) if lanes > 1 else None


def _match_uniform_scalar(e: Expr) -> Expr | None:
    """The scalar in all lanes of `e` if it is a broadcast or a constant, else None."""
    match e:
        case Broadcast(operand):
            return operand
        case Const(value, t) if t.lanes > 1:
            return Const(value, Type(t.dtype))
    return None


# --- integers ----------------------------------------------------------------------------------------------------


def _bounded_interval(e: Expr, ranges: Ranges) -> Interval | None:
    """The interval of `e` if it is bounded so that no arithmetic on it can overflow, else None."""
    if e.type.dtype != INT64:
        return None
    i = intervals.index_interval(e, ranges)
    return i if i.low is not None and i.high is not None and i.low > -_LIMIT and i.high < _LIMIT else None


def _split_by_divisor(e: Binary, ranges: Ranges) -> tuple[Expr, Expr, int] | None:
    """(q, r, d) with `e.left == d*q + r`, where d does not divide the terms of r; None unless `e.left` is bounded."""
    d = build.integer(e.right)
    if d is None or d <= 0 or e.type.lanes > 1 or _bounded_interval(e.left, ranges) is None:
        return None
    terms, constant = linear_forms.linear_terms(e.left)
    quotient = linear_forms.terms_to_expr({a: c // d for a, c in terms.items() if c % d == 0}, constant // d)
    rest = linear_forms.terms_to_expr({a: c for a, c in terms.items() if c % d != 0}, constant % d)
    return quotient, rest, d


def divide_terms(e: Binary, ranges: Ranges) -> Expr | None:
    """(8*i + j) // 8 is i + j // 8, where j // 8 is constant if j stays between two multiples of 8."""
    if (parts := _split_by_divisor(e, ranges)) is None:
        return None
    quotient, rest, d = parts
    i = intervals.index_interval(rest, ranges)
    if i.low is not None and i.high is not None and i.low // d == i.high // d:
        return build.add(quotient, i.low // d)
    if build.integer(quotient) == 0:
        return None
    return build.add(quotient, build.div(rest, d))


def remainder_of_terms(e: Binary, ranges: Ranges) -> Expr | None:
    """(8*i + j) % 8 is j % 8, which is j minus a constant if j stays between two multiples of 8."""
    if (parts := _split_by_divisor(e, ranges)) is None:
        return None
    quotient, rest, d = parts
    i = intervals.index_interval(rest, ranges)
    if i.low is not None and i.high is not None and i.low // d == i.high // d:
        return linear_forms.subtract(rest, build.const(i.low // d * d))
    return None if build.integer(quotient) == 0 else build.mod(rest, d)


def divide_factor(e: Binary, ranges: Ranges) -> Expr | None:
    """(8*i + j) // 32 is (i + q) // 4 if j stays in 8*q .. 8*q + 7."""
    if (parts := _factor_common_divisor(e, ranges)) is None:
        return None
    multiples, carried, _, g, d = parts
    return build.div(build.add(multiples, carried), d // g)


def remainder_of_factor(e: Binary, ranges: Ranges) -> Expr | None:
    """(8*i + j) % 32 is i % 4 * 8 + j if j stays in 0 .. 7."""
    if (parts := _factor_common_divisor(e, ranges)) is None:
        return None
    multiples, carried, rest, g, d = parts
    if carried and build.integer(rest) != carried * g:  # no operation would be saved
        return None
    digit = build.mul(build.mod(build.add(multiples, carried), d // g), g)
    return digit if carried else build.add(digit, rest)


def _factor_common_divisor(e: Binary, ranges: Ranges) -> tuple[Expr, int, Expr, int, int] | None:
    """(x, q, r, g, d) with `e.left == g*x + r`, where g > 1 divides the divisor d and r stays in g*q .. g*q + g - 1."""
    d = build.integer(e.right)
    if d is None or d <= 0 or e.type.lanes > 1 or _bounded_interval(e.left, ranges) is None:
        return None
    terms, constant = linear_forms.linear_terms(e.left)
    for g in sorted({gcd(c, d) for c in terms.values()} | {gcd(d, *terms.values())}, reverse=True):
        rest = linear_forms.terms_to_expr({a: c for a, c in terms.items() if c % g}, constant)
        i = intervals.index_interval(rest, ranges)
        if g > 1 and i.low is not None and i.high is not None and i.low // g == i.high // g:
            multiples = linear_forms.terms_to_expr({a: c // g for a, c in terms.items() if c % g == 0}, 0)
            return multiples, i.low // g, rest, g, d
    return None


def quotient_of_quotient(e: Binary, ranges: Ranges) -> Expr | None:
    """(x // 4 + 1) // 8 is (x + 4) // 32."""
    d = build.integer(e.right)
    if d is None or d <= 0 or e.type.lanes > 1 or _bounded_interval(e.left, ranges) is None:
        return None
    terms, constant = linear_forms.linear_terms(e.left)
    match list(terms.items()):
        case [(Binary("div", x, Const(by)), 1)] if int(by) > 0:
            shifted = build.add(x, constant * int(by))
            return build.div(shifted, int(by) * d) if _bounded_interval(shifted, ranges) is not None else None
    return None


def remainder_of_remainder(e: Binary, ranges: Ranges) -> Expr | None:
    """(x % 32 + y) % 4 is (x + y) % 4."""
    d = build.integer(e.right)
    if d is None or d <= 0 or e.type.lanes > 1 or _bounded_interval(e.left, ranges) is None:
        return None
    terms, constant = linear_forms.linear_terms(e.left)
    plain: linear_forms.Terms = {}
    for atom, c in terms.items():
        match atom:
            case Binary("mod", x, Const(by)) if by and c * int(by) % d == 0:
                atom = x
        plain[atom] = plain.get(atom, 0) + c
    if plain.keys() == terms.keys():
        return None
    left = linear_forms.terms_to_expr({a: c for a, c in plain.items() if c}, constant)
    return build.mod(left, d) if _bounded_interval(left, ranges) is not None else None


def decide_minimum(e: Binary, ranges: Ranges) -> Expr | None:
    """min(a, b) is a if a <= b always, or b if b <= a always."""
    if e.left is e.right:
        return e.left
    i = _compute_difference_interval(e.left, e.right, ranges)
    if i is None or i.low is None or i.high is None:
        return None
    return e.left if i.high <= 0 else e.right if i.low >= 0 else None


def decide_maximum(e: Binary, ranges: Ranges) -> Expr | None:
    """max(a, b) is a if a >= b always, or b if b >= a always."""
    if e.left is e.right:
        return e.left
    i = _compute_difference_interval(e.left, e.right, ranges)
    if i is None or i.low is None or i.high is None:
        return None
    return e.left if i.low >= 0 else e.right if i.high <= 0 else None


def decide_comparison(e: Binary, ranges: Ranges) -> Expr | None:
    """A comparison of integers is constant if the interval of their difference decides it."""
    i = _compute_difference_interval(e.left, e.right, ranges)
    if i is None or i.low is None or i.high is None:
        return None
    always, never = {
        "lt": (i.high < 0, i.low >= 0),
        "le": (i.high <= 0, i.low > 0),
        "gt": (i.low > 0, i.high <= 0),
        "ge": (i.low >= 0, i.high < 0),
        "eq": (i.low == i.high == 0, i.low > 0 or i.high < 0),
        "ne": (i.low > 0 or i.high < 0, i.low == i.high == 0),
    }[e.op]
    return Const(always, e.type) if always or never else None


def _compute_difference_interval(a: Expr, b: Expr, ranges: Ranges) -> Interval | None:
    """The interval of `a - b` over all lanes, for bounded integers."""
    first, second = _bounded_interval(a, ranges), _bounded_interval(b, ranges)
    if first is None or second is None:
        return None
    apart = first + second.scale(-1)
    x, y = _match_lane_progression(a), _match_lane_progression(b)
    if x is None or y is None:
        return apart
    spread = (x[1] - y[1]) * (a.type.lanes - 1)
    close = intervals.index_interval(linear_forms.subtract(x[0], y[0]), ranges) + Interval(
        min(0, spread), max(0, spread)
    )
    return Interval(_max_known(apart.low, close.low), _min_known(apart.high, close.high))


def _match_lane_progression(e: Expr) -> tuple[Expr, int] | None:
    if type(e) is Ramp:
        return e.base, e.stride
    if (lane := _match_uniform_scalar(e)) is not None:
        return lane, 0
    return (e, 0) if e.type.lanes == 1 else None


def _max_known(a: int | None, b: int | None) -> int | None:
    return max(a, b) if a is not None and b is not None else a if b is None else b


def _min_known(a: int | None, b: int | None) -> int | None:
    return min(a, b) if a is not None and b is not None else a if b is None else b


# --- floats ------------------------------------------------------------------------------------------------------


def _is_float(e: Expr, value: float) -> bool:
    """Whether `e` is the float constant `value`, the sign of zero included."""
    if type(e) is not Const or not e.type.dtype.is_float:
        return False
    return e.value == value and math.copysign(1.0, e.value) == math.copysign(1.0, value)


def multiply_by_one(e: Binary, _: Ranges) -> Expr | None:
    """x * 1 is x."""
    return e.left if _is_float(e.right, 1.0) else e.right if _is_float(e.left, 1.0) else None


def divide_by_one(e: Binary, _: Ranges) -> Expr | None:
    """x / 1 is x."""
    return e.left if _is_float(e.right, 1.0) else None


def add_negative_zero(e: Binary, _: Ranges) -> Expr | None:
    """x + -0.0 is x; x + 0.0 is not, for it turns -0.0 into 0.0."""
    return e.left if _is_float(e.right, -0.0) else e.right if _is_float(e.left, -0.0) else None


def subtract_zero(e: Binary, _: Ranges) -> Expr | None:
    """x - 0.0 is x."""
    return e.left if _is_float(e.right, 0.0) else None


def same_operand(e: Binary, _: Ranges) -> Expr | None:
    """min(x, x), max(x, x), x and x, x or x are x."""
    return e.left if e.left is e.right else None


# --- the rest ----------------------------------------------------------------------------------------------------

_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def negate_comparison(e: Unary, _: Ranges) -> Expr | None:
    """not (a < b) is a >= b for integers; for floats only == and != are opposites, because of NaN."""
    c = e.operand
    if type(c) is not Binary or c.op not in COMPARISONS:
        return None
    if c.left.type.dtype.is_float and c.op not in ("eq", "ne"):
        return None
    return Binary(_OPPOSITE[c.op], c.left, c.right)


def select_of_same(e: Select, _: Ranges) -> Expr | None:
    """select(c, x, x) is x."""
    return e.then if e.then is e.otherwise or (type(e.then) is type(e.otherwise) and e.then == e.otherwise) else None


def select_of_booleans(e: Select, _: Ranges) -> Expr | None:
    """select(c, true, false) is c."""
    if not (type(e.then) is type(e.otherwise) is Const and e.then.type.dtype.is_bool):
        return None
    return e.condition if build.is_true(e.then) else build.unary("not", e.condition)


def cast_constant(e: Cast, _: Ranges) -> Expr | None:
    """An integer constant that a float type holds exactly is that float."""
    c = e.operand
    if type(c) is not Const or c.type.dtype.is_float or not e.dtype.is_float:
        return None
    return build.const(float(c.value), e.dtype, c.type.lanes) if abs(c.value) <= _exact_integers(e.dtype) else None


def _exact_integers(dtype: DType) -> int:
    """The largest n such that `dtype` represents all integers of magnitude up to n exactly."""
    if dtype.bits == 16:
        return 1 << 11 if dtype == FLOAT16 else 1 << 8
    return 1 << 53 if dtype == FLOAT64 else 1 << 24


def cast_broadcast(e: Cast, _: Ranges) -> Expr | None:
    """A scalar is converted before it is broadcast."""
    return Broadcast(Cast(e.operand.operand, e.dtype), e.operand.lanes) if type(e.operand) is Broadcast else None


def unary_broadcast(e: Unary, _: Ranges) -> Expr | None:
    """A scalar is negated before it is broadcast."""
    return Broadcast(Unary(e.op, e.operand.operand), e.operand.lanes) if type(e.operand) is Broadcast else None


def call_on_broadcasts(e: Call, _: Ranges) -> Expr | None:
    """f(x4(a)) is x4(f(a)): a function of uniform vectors is evaluated once."""
    lanes = [_match_uniform_scalar(a) for a in e.arguments]
    if any(x is None for x in lanes) or all(type(x) is Const for x in lanes):
        return None
    return Broadcast(Call(e.function, tuple(x for x in lanes if x is not None)), e.type.lanes)


def masked_load(e: Load, _: Ranges) -> Expr | None:
    """An all-true mask is dropped; a load with an all-false mask is 0."""
    if build.is_false(e.mask):
        return build.const(0, e.buffer.type.dtype, e.type.lanes)
    return Load(e.buffer, e.indices) if e.mask is not None and build.is_true(e.mask) else None


def reduce_broadcast(e: ReduceLanes, _: Ranges) -> Expr | None:
    """min, max, `and` and `or` over uniform lanes are the scalar itself."""
    return _match_uniform_scalar(e.operand) if e.op in ("min", "max", "and", "or") else None


_COMPARE = (fold, decide_comparison, broadcast_late)
RULES: dict[str, tuple[Rule, ...]] = {
    "add": (fold, add_negative_zero, broadcast_late),
    "sub": (fold, subtract_zero, broadcast_late),
    "mul": (fold, multiply_by_one, broadcast_late),
    "div": (fold, divide_by_one, divide_terms, divide_factor, quotient_of_quotient, broadcast_late),
    "mod": (fold, remainder_of_terms, remainder_of_factor, remainder_of_remainder, broadcast_late),
    "min": (fold, decide_minimum, broadcast_late),
    "max": (fold, decide_maximum, broadcast_late),
    "and": (fold, same_operand, broadcast_late),
    "or": (fold, same_operand, broadcast_late),
    **dict.fromkeys(COMPARISONS, _COMPARE),
    "neg": (fold, unary_broadcast),
    "not": (fold, negate_comparison, unary_broadcast),
    "Select": (fold, select_of_same, select_of_booleans),
    "Cast": (fold, cast_constant, cast_broadcast),
    "Ramp": (fold,),
    "Broadcast": (fold,),
    "Call": (call_on_broadcasts,),
    "Load": (masked_load,),
    "ReduceLanes": (reduce_broadcast,),
}
