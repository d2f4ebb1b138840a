"""Quotients and remainders of indices, as tiles and thread numbers make them: equal at every point, and no longer."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.intervals import Interval
from tensor_comprehensions.loop_ir.nodes import Binary, Const, Expr, Var
from tensor_comprehensions.loop_ir.passes.simplify import simplify

EXTENTS = {"t": (0, 63), "i": (0, 3), "u": (-5, 7)}
RANGES = {name: Interval(*where) for name, where in EXTENTS.items()}
POINTS = dict(zip(EXTENTS, np.array(list(product(*(range(a, z + 1) for a, z in EXTENTS.values())))).T, strict=True))
SIZES = st.sampled_from([2, 3, 4, 6, 8, 16, 32])
T, VALUE = b.var("t"), b.var("i")


def _grow_expressions(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.one_of(
        st.builds(b.div, inner, SIZES),
        st.builds(b.mod, inner, SIZES),
        st.builds(b.mul, inner, SIZES),
        st.builds(b.add, inner, inner),
        st.builds(b.add, inner, st.integers(-9, 9)),
    )


EXPRESSIONS = st.recursive(st.sampled_from([b.var(n) for n in EXTENTS]), _grow_expressions, max_leaves=5)


def value(e: Expr) -> np.ndarray:
    """`e` at every point."""
    match e:
        case Const(n):
            return np.full(len(POINTS["t"]), n)
        case Var(name):
            return POINTS[name]
        case Binary(op, left, right):
            x, y = value(left), value(right)
            return {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.floor_divide, "mod": np.mod}[op](
                x, y
            )
    raise AssertionError(e)


def divisions(e: Expr) -> int:
    if not isinstance(e, Binary):
        return 0
    return (e.op in ("div", "mod")) + divisions(e.left) + divisions(e.right)


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS)
def test_simplified_digits_are_equal_at_every_point(e: Expr) -> None:
    new = simplify(e, RANGES)
    assert (value(new) == value(e)).all()
    assert divisions(new) <= divisions(e)
    assert simplify(new, RANGES) is new


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b.div(b.mul(T, 8), 32), b.div(T, 4)),
        (b.mod(b.mul(T, 8), 32), b.mul(b.mod(T, 4), 8)),
        (b.div(b.add(b.mul(T, 8), VALUE), 32), b.div(T, 4)),
        (b.mod(b.add(b.mul(T, 8), VALUE), 32), b.add(b.mul(b.mod(T, 4), 8), VALUE)),
        (b.div(b.div(T, 4), 8), b.div(T, 32)),
        (b.div(b.add(b.div(T, 4), 1), 8), b.div(b.add(T, 4), 32)),
        (b.mod(b.mod(T, 32), 4), b.mod(T, 4)),
        (b.add(b.mul(b.div(b.div(T, 4), 8), 8), b.mod(b.div(T, 4), 8)), b.div(T, 4)),
    ],
)
def test_common_factors_and_nested_digits(before: Expr, after: Expr) -> None:
    assert simplify(before, RANGES) == after


def test_a_remainder_that_would_carry_is_left_alone() -> None:
    e = b.mod(b.add(b.mul(T, 8), b.var("u")), 32)  # u leaves 0 to 7
    assert simplify(e, RANGES) is e
