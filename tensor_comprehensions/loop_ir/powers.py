"""Expand powers with small constant exponents to products, quotients and square roots: 20 times faster than `pow`."""

from __future__ import annotations

import math
from itertools import islice

from . import build
from .nodes import Const, Expr
from .rewrite import walk_expr

LARGEST_BASE = 200
"""The largest base, in nodes, that is duplicated: the size of nested powers doubles with each level."""


def expand_power(base: Expr, exponent: Expr) -> Expr | None:
    """`pow(base, exponent)` without a call, or None; its error is at most 1.5 ulp, and special cases are as in C.

    It differs from `torch.pow` in square roots of -0 and of negative infinity, which are 0 and infinity as in C.
    """
    if not isinstance(exponent, Const) or not base.type.dtype.is_float:
        return None
    if sum(1 for _ in islice(walk_expr(base), LARGEST_BASE + 1)) > LARGEST_BASE:
        return None
    match float(exponent.value):
        case 1.0:
            return base
        case 2.0:
            return build.mul(base, base)
        case 3.0:
            return build.mul(build.mul(base, base), base)
        case 4.0:
            square = build.mul(base, base)
            return build.mul(square, square)
        case -1.0:
            return build.div(1.0, base)
        case -2.0:
            inverse = build.div(1.0, base)
            return build.mul(inverse, inverse)
        case 0.5:
            return _with_infinity(base, build.call("sqrt", build.add(base, 0.0)), math.inf)
        case -0.5:
            return _with_infinity(base, build.div(1.0, build.call("sqrt", build.add(base, 0.0))), 0.0)
        case _:
            return None


def _with_infinity(base: Expr, root: Expr, limit: float) -> Expr:
    """`root`, or `limit` where `base` is negative infinity."""
    dtype, lanes = base.type.dtype, base.type.lanes
    infinite = build.eq(base, build.const(-math.inf, dtype, lanes))
    return build.select(infinite, build.const(limit, dtype, lanes), root)
