"""Operations by modes, on elements and from text: every one against what it promises, enumerated.

`pytest tests/layouts --examples 30000` draws as many layouts for each law, `--hypothesis-seed` the same ones again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tensor_comprehensions import layouts
from tensor_comprehensions.core.errors import ArgumentError, CannotLower
from tensor_comprehensions.layouts import Layout, Swizzle, compose, concatenate, parse
from tensor_comprehensions.layouts.elements import with_leaves
from tensor_comprehensions.layouts.layout import flatten_tuple

from ..helpers.random_layouts import COMPACT, LAYOUTS, SIGNED, SIZES, STRIDES, attempt

law = settings(deadline=None)
FACTORS = st.sampled_from((1, 2, 3, 4, 6, 8))
TILERS = st.one_of(SIZES, st.builds(Layout, SIZES, STRIDES))
MODES = st.lists(LAYOUTS, min_size=1, max_size=3).map(lambda modes: concatenate(*modes))
NEIGHBOURS = st.lists(st.sampled_from((1, 2, 4, 8)), min_size=1, max_size=3).flatmap(
    lambda shape: st.permutations(range(len(shape))).map(
        lambda order: Layout(tuple(shape[n] for n in order), tuple(_running(shape)[n] for n in order))
    )
)


def _running(shape: Sequence[int]) -> list[int]:
    return list(flatten_tuple(Layout.column_major(tuple(shape)).stride))


def at(layout: Layout, coordinate: Sequence[int]) -> int:
    """The offset at a number for every leaf."""
    return sum(n * stride for n, stride in zip(coordinate, flatten_tuple(layout.stride), strict=True))


def points(layout: Layout) -> list[tuple[int, ...]]:
    return list(product(*(range(size) for size in flatten_tuple(layout.shape))))


def as_layout(tiler: Layout | int) -> Layout:
    return Layout(tiler, 1) if isinstance(tiler, int) else tiler


@law
@given(SIGNED)
def test_offsets_are_those_of_the_coordinates(layout: Layout) -> None:
    assert list(layout.offsets()) == [layout(n) for n in range(layout.size)]


@law
@given(MODES)
def test_coalesced_modes_keep_the_function_of_their_coordinates(layout: Layout) -> None:
    short = layouts.coalesce_modes(layout)
    assert [mode.size for mode in short.modes] == [mode.size for mode in layout.modes]
    for mode, before in zip(short.modes, layout.modes, strict=True):
        assert list(mode.offsets()) == list(before.offsets())
        assert mode == layouts.coalesce(mode)


@law
@given(st.lists(COMPACT, min_size=1, max_size=3), st.data())
def test_layouts_are_composed_and_divided_mode_by_mode(modes: list[Layout], data: st.DataObject) -> None:
    layout, tilers = concatenate(*modes), [data.draw(TILERS) for _ in modes]
    if (composed := attempt(layouts.compose_modes, layout, tilers)) is not None:
        for mode, tiler, got in zip(modes, map(as_layout, tilers), composed.modes, strict=True):
            assert list(got.offsets()) == [mode(tiler(n)) for n in range(tiler.size)]
    if (divided := attempt(layouts.divide_modes, layout, tilers)) is not None:
        tile, rest = divided.modes
        for n, tiler in enumerate(map(as_layout, tilers)):
            both = concatenate(tile[n], rest[n])
            assert sorted(both.offsets()) == sorted(modes[n].offsets())
            assert list(tile[n].offsets()) == [modes[n](tiler(c)) for c in range(tiler.size)]


@law
@given(st.one_of(COMPACT, LAYOUTS), LAYOUTS)
def test_compositions_with_one_layout_have_one_shape(first: Layout, inner: Layout) -> None:
    strides = flatten_tuple(first.stride)
    other = [(size, n) for n, size in enumerate(flatten_tuple(first.shape))]
    scaled = [(size, 7 * d) for size, d in zip(flatten_tuple(first.shape), strides, strict=True)]
    outers = (first, with_leaves(first, scaled), with_leaves(first, other))
    if (found := attempt(layouts.compose_together, outers, inner)) is None:
        return
    assert len({got.shape for got in found}) == 1
    for outer, got in zip(outers, found, strict=True):
        assert list(got.offsets()) == [outer(inner(n)) for n in range(inner.size)]


@law
@given(COMPACT, st.data(), st.integers(1, 2))
def test_blocks_and_rakes_are_products_mode_by_mode(block: Layout, data: st.DataObject, step: int) -> None:
    assume(block.size <= 36)
    block = compose(Layout(block.size, step), block)
    grid = Layout.column_major(data.draw(st.tuples(*[st.sampled_from((1, 2, 3))] * len(block))))
    if (repeated := attempt(layouts.layout_product, block, grid)) is None:
        assert attempt(layouts.blocked_product, block, grid) is attempt(layouts.raked_product, block, grid) is None
        return
    blocked, raked = layouts.blocked_product(block, grid), layouts.raked_product(block, grid)
    sizes = [(b.size, g.size) for b, g in zip(block.modes, grid.modes, strict=True)]
    for c in product(*(product(range(b), range(g)) for b, g in sizes)):
        expected = repeated((tuple(b for b, _ in c), tuple(g for _, g in c)))
        assert blocked(tuple(b + g * size for (b, g), (size, _) in zip(c, sizes, strict=True))) == expected
        assert raked(tuple(g + b * size for (b, g), (_, size) in zip(c, sizes, strict=True))) == expected


@law
@given(st.one_of(SIGNED, NEIGHBOURS), FACTORS)
def test_wide_elements_are_those_that_hold_the_narrow_ones(layout: Layout, n: int) -> None:
    if (wide := attempt(layouts.widen, layout, n)) is None:
        return
    times = [a // b for a, b in zip(flatten_tuple(layout.shape), flatten_tuple(wide.shape), strict=True)]
    assert layout.size == n * wide.size
    for c in points(layout):
        assert at(wide, [x // t for x, t in zip(c, times, strict=True)]) == at(layout, c) // n
    assert Counter(n * w + k for w in wide.offsets() for k in range(n)) == Counter(layout.offsets())


@law
@given(st.one_of(SIGNED, NEIGHBOURS), FACTORS)
def test_narrow_elements_fill_the_wide_ones(layout: Layout, n: int) -> None:
    if (fine := attempt(layouts.narrow, layout, n)) is None:
        return
    times = [a // b for a, b in zip(flatten_tuple(fine.shape), flatten_tuple(layout.shape), strict=True)]
    for c in points(fine):
        assert at(fine, c) // n == at(layout, [x // t for x, t in zip(c, times, strict=True)])
    assert Counter(fine.offsets()) == Counter(n * w + k for w in layout.offsets() for k in range(n))


@law
@given(NEIGHBOURS, st.sampled_from((1, 2, 4)))
def test_what_is_narrowed_can_be_widened(layout: Layout, n: int) -> None:
    assert list(layouts.widen(layouts.narrow(layout, n), n).offsets()) == list(layout.offsets())


@law
@given(LAYOUTS, st.integers(1, 64))
def test_an_enlarged_layout_begins_as_before(layout: Layout, size: int) -> None:
    if (more := attempt(layouts.enlarge, layout, size)) is None:
        assert size < layout.size or any(size % n for n in (layout.size // flatten_tuple(layout.shape)[-1],))
        return
    assert more.size == size
    assert list(more.offsets())[: layout.size] == list(layout.offsets())


@law
@given(st.one_of(COMPACT, LAYOUTS), st.one_of(COMPACT, LAYOUTS))
def test_a_common_vector_is_what_both_have_side_by_side(a: Layout, b: Layout) -> None:
    if (found := attempt(layouts.common_vector, a, b)) is None:
        assert a.size != b.size
        return
    pairs = {(a(n), b(n)) for n in range(a.size)}
    assert found == next(n for n in count() if (n, n) not in pairs)


@law
@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 5))
def test_a_swizzle_permutes_its_period_and_is_its_own_inverse(bits: int, base: int, shift: int) -> None:
    if shift < bits:
        with pytest.raises(ArgumentError, match=f"Sw<{bits},{base},{shift}> has no inverse"):
            Swizzle(bits, base, shift)
        return
    swizzle = Swizzle(bits, base, shift)
    everywhere = range(2 * swizzle.period)
    assert [swizzle(swizzle(x)) for x in everywhere] == list(everywhere)
    assert sorted(map(swizzle, everywhere)) == list(everywhere)
    assert all(swizzle(x) - x == swizzle(x + swizzle.period) - x - swizzle.period for x in range(swizzle.period))
    assert all(swizzle(x) >> base == swizzle(x >> base << base) >> base for x in range(swizzle.period))


@law
@given(SIGNED)
def test_a_layout_is_read_as_it_prints(layout: Layout) -> None:
    assert parse(str(layout)) == layout
    assert parse(str(layout).replace(" ", "")) == layout


@pytest.mark.parametrize(
    ("operation", "operands"),
    [
        (layouts.compose_modes, (Layout((4, 6), (1, 4)), [2])),
        (layouts.divide_modes, (Layout((4, 6), (1, 4)), [2, 4])),
        (layouts.blocked_product, (Layout((2, 2), (1, 2)), Layout(4, 1))),
        (layouts.raked_product, (Layout((2, 2), (1, 1)), Layout((2, 2), (1, 2)))),
        (layouts.widen, (Layout((16, 15), (15, 1)), 8)),
        (layouts.widen, (Layout(8, 2), 4)),
        (layouts.widen, (Layout(8, 1), 0)),
        (layouts.narrow, (Layout(4, 2), 4)),
        (layouts.enlarge, (Layout((4, 6), (6, 1)), 26)),
        (layouts.enlarge, (Layout(4, 1), 2)),
        (layouts.common_vector, (Layout(4, 1), Layout(5, 1))),
        (layouts.divide_layout, (Layout(24, 3), 5)),
        (layouts.compose, (Layout((4, 6), (1, 10)), Layout(4, 3))),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refusals_name_both_operands(operation: object, operands: tuple[object, ...]) -> None:
    assert callable(operation)
    with pytest.raises(CannotLower) as refusal:
        operation(*operands)
    for operand in operands:
        for part in operand if isinstance(operand, list) else [operand]:
            assert str(part) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("4:", "the layout ends too early", 3),
        ("", "the layout ends too early", 1),
        ("4:a", "unexpected 'a' in a layout", 3),
        ("(4,:", "unexpected ':' in a layout", 4),
        ("4:1:2", "unexpected ':' in a layout", 4),
        ("(4,2):1", "sizes and strides differ in structure", 6),
        ("(4,0):(1,1)", "a size is below 1", 6),
        ("1234567890123456789:1", "this number is too long", 1),
        ("(" * 17 + "1" + ")" * 17 + ":1", "these tuples nest too deep", 36),
        ("(" * 9999, "the layout ends too early", 10000),
        ("(" * 9999 + "1" + ")" * 9999 + ":1", "these tuples nest too deep", 20000),
    ],
)
def test_what_is_no_layout_is_marked(text: str, message: str, column: int) -> None:
    with pytest.raises(ArgumentError) as error:
        parse(text)
    assert message in error.value.message
    assert error.value.column == column
    assert "^" in str(error.value)


def test_a_layout_that_is_no_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a layout is written as text"):
        parse(4)  # type: ignore[arg-type]


def test_spaces_and_the_comma_of_one_do_not_count() -> None:
    assert parse(" ( 4 , (2,) ) : (1,(4)) ") == Layout((4, (2,)), (1, (4,)))
    assert parse("8:-1") == Layout(8, -1)
