"""The condition under which an expression reads an element, from the conditionals around the read.

The condition of a derivative is not enough: it may be zero where the element is read. Bounds of subscripts depend only
on where reads happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from ...core.dtypes import BOOL
from ..affine import Affine, to_affine
from ..binding.ranges import Bounds
from ..ir import Access, Binary, Const, Expr, Select, Unary, operands_of
from ..size_polynomial import Value, constant_value

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


def drop_implied_conditions(value: Expr, access: Access, bounds: Sequence[Bounds], sizes: Mapping[str, Value]) -> Expr:
    """`value` without its outer conditions that hold wherever the subscripts of `access` are within `bounds`.

    All conditions of a padded window `h+k >= 1 && h+k < H+1 ? x(h+k-1) : 0` are of this kind.
    """
    if not (isinstance(value, Select) and isinstance(value.otherwise, Const) and value.otherwise.value == 0):
        return value
    slacks = list[Affine]()
    for e, (lower, upper) in zip(access.subscripts, bounds, strict=True):
        form = to_affine(e, sizes)
        slacks += [form.shift(-lower), form.scale(-1).shift(upper - 1)]
    kept = [c for c in _list_conjuncts(value.condition) if not _is_implied(c, slacks, sizes)]
    if not kept:
        return value.then
    return Select(reduce(_and, kept), value.then, value.otherwise, value.dtype)


def _list_conjuncts(c: Expr) -> list[Expr]:
    if isinstance(c, Binary) and c.op == "&&":
        return _list_conjuncts(c.left) + _list_conjuncts(c.right)
    return [c]


def _is_implied(c: Expr, slacks: Sequence[Affine], sizes: Mapping[str, Value]) -> bool:
    """Whether a comparison follows from one of `slacks` being at least 0."""
    if not (isinstance(c, Binary) and c.op in (">", ">=", "<", "<=") and c.left.dtype.is_integer):
        return False
    difference = to_affine(c.left, sizes) - to_affine(c.right, sizes)
    if c.op in ("<", "<="):
        difference = difference.scale(-1)
    needed = difference.shift(-1) if c.op in (">", "<") else difference
    rests = [needed - s for s in slacks]
    return any(not r.terms and (n := constant_value(r.constant)) is not None and n >= 0 for r in rests)


def _select_condition(c: Expr, a: Expr, b: Expr) -> Expr:
    """`c ? a : b` as a logical formula, for conditions."""
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
