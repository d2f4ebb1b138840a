"""Views of formulas, compared with torch on the positions of the elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tensor_comprehensions.core.dtypes import INT64
from tensor_comprehensions.dynamo_backend.index_views import (
    Value,
    align_values,
    broadcast_value,
    of_shape,
    permute_value,
    reshape_value,
    shift_dim,
)

SIZES = (1, 2, 3, 4, 6, 8)


def number_elements(shape: Sequence[int]) -> Value:
    """The position of each element, as a formula of its indices."""

    def at(i: Sequence[str]) -> str:
        rest = iter(i)
        text = "0"
        for n in shape:
            text = f"({text} * {n} + {next(rest) if n != 1 else 0})"
        return text

    return of_shape(shape, at, INT64)


def evaluate_elements(x: Value) -> Tensor:
    """The elements of a value; `/` in a formula is that of the language, which rounds down."""
    values = [eval(x.at([str(k) for k in point]).replace("/", "//")) for point in product(*(range(n) for n in x.loops))]
    return torch.tensor(values).reshape(x.shape)


def positions(shape: Sequence[int]) -> Tensor:
    return torch.arange(prod(shape)).reshape(tuple(shape))


@st.composite
def views(draw: st.DrawFn) -> tuple[Value, Tensor]:
    shape = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
    x, y = number_elements(shape), positions(shape)
    for _ in range(draw(st.integers(0, 4))):
        how = draw(st.sampled_from(("permute", "reshape", "expand", "slice")))
        if how == "permute":
            order = draw(st.permutations(range(y.dim())))
            x, y = permute_value(x, order), y.permute(order)
        elif how == "reshape":
            new = draw(st.sampled_from(_shapes(y.numel())))
            x, y = reshape_value(x, new), y.reshape(new)
        elif how == "expand" and y.numel() < 200:
            new = [draw(st.sampled_from((1, 2))), *(n if n != 1 else draw(st.sampled_from((1, 3))) for n in y.shape)]
            x, y = broadcast_value(x, new), y.expand(new)
        elif how == "slice":
            d = draw(st.integers(0, y.dim() - 1))
            step = draw(st.integers(1, 2))
            x = shift_dim(x, d, len(range(0, y.shape[d], step)), lambda i, step=step: f"({i} * {step})")
            y = y[(slice(None),) * d + (slice(None, None, step),)]
    return x, y


def _shapes(count: int) -> list[list[int]]:
    """Some shapes of so many elements."""
    found = [[count], [1, count], [count, 1]]
    found += [[a, count // a] for a in range(2, 7) if count % a == 0]
    found += [[a, b, count // a // b] for a in (2, 3, 4) for b in (2, 3) if count % (a * b) == 0]
    return found


@given(views())
def test_views_pick_the_elements_that_torch_picks(case: tuple[Value, Tensor]) -> None:
    value, expected = case
    assert value.shape == tuple(expected.shape)
    assert torch.equal(evaluate_elements(value), expected)


@given(views(), st.data())
def test_aligned_values_have_the_same_loops(case: tuple[Value, Tensor], data: st.DataObject) -> None:
    value, expected = case
    other = reshape_value(number_elements([expected.numel()]), expected.shape)
    a, b = align_values([value, other])
    assert a.groups == b.groups
    assert torch.equal(evaluate_elements(a), expected)
    assert torch.equal(evaluate_elements(b), positions(expected.shape))


@pytest.mark.parametrize(
    ("shape", "new", "text"),
    [
        ((6, 5), (2, 3, 5), "x((a * 3 + b), c)"),
        ((2, 3, 5), (6, 5), "x(a, b, c)"),
        ((4, 6), (8, 3), "x(a, (b * 3 + c))"),
    ],
)
def test_reshaping_divides_no_index_where_loops_can_be_split(
    shape: tuple[int, ...], new: tuple[int, ...], text: str
) -> None:
    value = of_shape(shape, lambda i: f"x({', '.join(i)})", INT64)
    assert reshape_value(value, new).at("abc") == text


def test_merged_and_split_again_is_what_it_was() -> None:
    value = number_elements((4, 6, 5))
    assert reshape_value(reshape_value(value, (24, 5)), (4, 6, 5)).groups == value.groups
