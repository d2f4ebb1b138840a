"""Variables in place of numbers of rows: found where two bindings of a def differ; other differences are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tensor_comprehensions as tc
from tensor_comprehensions.tc_lang.binding.bind import bind
from tensor_comprehensions.tc_lang.dynamic_sizes.open_extents import make_open_axes, open_extents
from tensor_comprehensions.tc_lang.dynamic_sizes.rows import CannotGeneralize, Rows
from tensor_comprehensions.tc_lang.ir import BoundFunction, Const, Tensor

CONV = "def f(float(N,W) x, float(K) w) -> (y) { y(n,i) +=! x(n,i+k) * w(k) }"
COUNTS = ((11, 13), (17, 19))
WINDOWED = Rows(("W",), (("x", 1), ("y", 1)), step=1, reach=3, windowed=("x",))
AXES = make_open_axes((Rows(("N",), (("x", 0), ("y", 0))), WINDOWED), COUNTS, lambda n: f"rows{n}")


def bindings() -> list[BoundFunction]:
    function = tc.define(CONV).f.function
    return [bind(function, {"N": n, "W": w + 2, "K": 3}, {}) for n, w in COUNTS]


def outer_dimensions(t: Tensor) -> list[int]:
    return list(range(len(t.shape) - 1))


def test_extents_that_differ_are_variables() -> None:
    opened, other = open_extents(bindings(), AXES, outer_dimensions)
    assert opened.tensor("x").extent_variables == ("rows0", "windows.1")
    assert opened.tensor("y").extent_variables == ("rows0", "rows1")
    assert opened.tensor("w").extent_variables == ()
    assert [i.variable for i in opened.statements[0].indices] == ["rows0", "rows1", ""]
    assert opened.tensor("x").stride_variables == ("x.stride.0", None)
    assert opened.tensor("x").strides == other.tensor("x").strides, "the number is only typical"
    assert opened.tensor("x").strides[0] % 2, "and no vector divides it"


def test_whatever_else_differs_is_refused() -> None:
    first, second = bindings()
    (s,) = second.statements
    changed = replace(second, statements=(replace(s, value=Const(2.0, s.value.dtype)),))
    with pytest.raises(CannotGeneralize, match="decides more than the number of rows"):
        open_extents((first, changed), AXES, outer_dimensions)
    longer = replace(s, indices=(*s.indices[:2], replace(s.indices[2], upper=5)))
    with pytest.raises(CannotGeneralize, match="an extent depends on it that is no number of rows"):
        open_extents((first, replace(second, statements=(longer,))), AXES, outer_dimensions)
    with pytest.raises(CannotGeneralize, match="by other statements"):
        open_extents((first, replace(second, statements=())), AXES, outer_dimensions)
