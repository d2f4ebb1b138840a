"""Every operation against what it promises, enumerated."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.layouts import (
    Layout,
    coalesce,
    complement,
    compose,
    concatenate,
    divide_layout,
    layout_product,
    left_inverse,
    right_inverse,
)
from tensor_comprehensions.layouts.layout import IntTuple, flatten_tuple

from ..helpers.random_layouts import COMPACT, LAYOUTS, SIGNED, SIZES, STRIDES, attempt, coordinates


def test_printing_and_evaluation() -> None:
    layout = Layout((4, 8), (1, 4))
    assert str(layout) == "(4, 8) : (1, 4)"
    assert str(Layout(((2, 2), 8), ((1, 16), 2))) == "((2, 2), 8) : ((1, 16), 2)"
    assert repr(layout) == "Layout(shape=(4, 8), stride=(1, 4))"
    assert layout(5) == layout((1, 1)) == layout(1, 1) == 5
    assert (layout.size, layout.cosize, len(layout)) == (32, 32, 2)
    assert layout[1] == Layout(8, 4)
    assert str(Layout.row_major((2, 3, 4))) == "(2, 3, 4) : (12, 4, 1)"
    assert str(Layout.column_major((2, (3, 4)))) == "(2, (3, 4)) : (1, (2, 6))"


@pytest.mark.parametrize(
    ("shape", "stride"), [((2, 3), (1,)), (2, (1,)), ((2, (3, 4)), (1, 2)), (0, 1), ((2, -1), (1, 1))]
)
def test_malformed_layouts_are_refused(shape: IntTuple, stride: IntTuple) -> None:
    with pytest.raises(InternalError, match="a layout of shape"):
        Layout(shape, stride)


@pytest.mark.parametrize("at", [4, -1, (1, 1), (0, 0, 0), ((0, 1), 0)])
def test_coordinates_outside_are_refused(at: IntTuple) -> None:
    with pytest.raises(InternalError, match="the coordinate"):
        Layout((2, (1, 2)), (1, (2, 4)))(at if at != (1, 1) else (1, 2))


@given(SIGNED)
def test_flat_and_nested_coordinates_agree(layout: Layout) -> None:
    everywhere = coordinates(layout.shape)
    assert [layout(c) for c in everywhere] == [layout(n) for n in range(layout.size)]
    strides = flatten_tuple(layout.stride)
    assert [layout(c) for c in everywhere] == [
        sum(x * d for x, d in zip(flatten_tuple(c), strides, strict=True)) for c in everywhere
    ]
    found = list(layout.offsets())
    assert layout.cosize == 1 + max(found) - min(found)


@given(SIGNED)
def test_coalescing_keeps_the_function(layout: Layout) -> None:
    short = coalesce(layout)
    assert list(short.offsets()) == list(layout.offsets())
    assert coalesce(short) == short
    assert len(short.flat) <= len(layout.flat)
    for (size, stride), (_, following) in zip(short.flat, short.flat[1:], strict=False):
        assert following != size * stride


@given(SIGNED, LAYOUTS)
def test_a_composition_is_exact_or_refused(outer: Layout, inner: Layout) -> None:
    both = attempt(compose, outer, inner)
    if both is None:
        return
    assert [both(c) for c in coordinates(inner.shape)] == [outer(inner(c)) for c in coordinates(inner.shape)]


@given(COMPACT, COMPACT)
def test_compositions_that_must_succeed(outer: Layout, inner: Layout) -> None:
    assert compose(outer, Layout(outer.size, 1)).size == outer.size
    assert list(compose(Layout(inner.size, 3), inner).offsets()) == [3 * n for n in inner.offsets()]
    by_mode = Layout.column_major(outer.shape)
    assert list(compose(outer, by_mode).offsets()) == list(outer.offsets())
    for mode in by_mode.modes:
        assert [outer(mode(n)) for n in range(mode.size)] == list(compose(outer, mode).offsets())


def test_compositions_of_the_literature() -> None:
    assert str(compose(Layout((6, 2), (8, 2)), Layout((4, 3), (3, 1)))) == "((2, 2), 3) : ((24, 2), 8)"
    assert str(compose(Layout(20, 2), Layout((5, 4), (4, 1)))) == "(5, 4) : (8, 2)"
    assert str(compose(Layout((10, 2), (16, 4)), Layout((5, 4), (1, 5)))) == "(5, (2, 2)) : (16, (80, 4))"


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (Layout((4, 6), (1, 10)), Layout(4, 3)),  # 0 3 6 9: not one step in the first mode
        (Layout((4, 6), (1, 10)), Layout(6, 1)),  # six do not fill whole rows of four
        (Layout((4, 4), (1, 10)), Layout((3, 3), (1, 2))),  # 2 + 2 carries into the second mode
        (Layout(4, 1), Layout(5, 1)),  # leaves the domain
        (Layout(4, 1), Layout(2, -1)),
    ],
)
def test_inexact_compositions_show_both_operands(outer: Layout, inner: Layout) -> None:
    with pytest.raises(CannotLower) as refusal:
        compose(outer, inner)
    assert str(outer) in str(refusal.value)
    assert str(inner) in str(refusal.value)


@given(LAYOUTS, st.sampled_from((None, 24, 36, 48, 64)))
def test_a_complement_fills_the_gaps_or_is_refused(layout: Layout, size: int | None) -> None:
    rest = attempt(complement, layout, size)
    if rest is None:
        return
    found = sorted(concatenate(layout, rest).offsets())
    assert found == list(range(layout.size * rest.size if size is None else size))


@given(COMPACT, st.integers(1, 4), st.integers(1, 4))
def test_complements_that_must_exist(layout: Layout, step: int, times: int) -> None:
    spread = compose(Layout(layout.size, step), layout)
    assert complement(spread, spread.size * step * times).size == step * times


@given(COMPACT, st.lists(st.tuples(SIZES, STRIDES), min_size=1, max_size=2))
def test_a_division_visits_everything_once(layout: Layout, tile_modes: list[tuple[int, int]]) -> None:
    tile = concatenate(*(Layout(*mode) for mode in tile_modes))
    parts = attempt(divide_layout, layout, tile)
    if parts is None:
        return
    assert sorted(parts.offsets()) == list(range(layout.size))
    assert list(parts[0].offsets()) == [layout(tile(n)) for n in range(tile.size)]


def test_a_division_into_tiles() -> None:
    assert str(divide_layout(Layout(24, 3), Layout(4, 2))) == "(4, (2, 3)) : (6, (3, 24))"
    with pytest.raises(CannotLower, match=r"24 : 3 with 5 : 1"):
        divide_layout(Layout(24, 3), Layout(5, 1))


@given(COMPACT, st.integers(1, 3), COMPACT)
def test_a_product_repeats_without_overlap(layout: Layout, step: int, repetition: Layout) -> None:
    assume(layout.size * repetition.size <= 500)
    spread = compose(Layout(layout.size, step), layout)
    whole = attempt(layout_product, spread, repetition)
    if whole is None:
        return
    found = list(whole.offsets())
    assert len(set(found)) == len(found)
    assert list(whole[0].offsets()) == list(spread.offsets())
    shifts = list(whole[1].offsets())
    assert shifts == [complement(spread, spread.size * step * repetition.cosize)(n) for n in repetition.offsets()]


def test_a_product_of_blocks() -> None:
    assert str(layout_product(Layout((2, 2), (4, 1)), Layout(6, 1))) == "((2, 2), (2, 3)) : ((4, 1), (2, 8))"


@given(LAYOUTS)
def test_a_right_inverse(layout: Layout) -> None:
    inverse = right_inverse(layout)
    assert [layout(inverse(n)) for n in range(inverse.size)] == list(range(inverse.size))


@given(COMPACT, st.integers(1, 3))
def test_inverses_of_permutations(layout: Layout, step: int) -> None:
    assert right_inverse(layout).size == layout.size
    spread = compose(Layout(layout.size, step), layout)
    inverse = left_inverse(spread)
    assert [inverse(spread(n)) for n in range(spread.size)] == list(range(spread.size))


def test_what_repeats_has_no_left_inverse() -> None:
    with pytest.raises(CannotLower, match=r"\(2, 2\) : \(1, 1\)"):
        left_inverse(Layout((2, 2), (1, 1)))
