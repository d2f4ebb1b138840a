"""Random layouts, their coordinates, and operations on them that may refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.layouts import Layout, concatenate
from tensor_comprehensions.layouts.layout import IntTuple

SIZES = st.sampled_from((1, 2, 3, 4, 6))
STRIDES = st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12, 16, 24))


def nest_layouts(leaf: st.SearchStrategy[tuple[int, int]]) -> st.SearchStrategy[Layout]:
    one = leaf.map(lambda mode: Layout(*mode))
    return st.recursive(
        one, lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda m: concatenate(*m)), max_leaves=4
    )


def compact(shape: list[int], order: list[int]) -> Layout:
    """A permuted contiguous layout: every offset once."""
    strides, step = [0] * len(shape), 1
    for place in sorted(range(len(shape)), key=lambda n: order[n]):
        strides[place] = step
        step *= shape[place]
    return Layout(tuple(shape), tuple(strides))


LAYOUTS = nest_layouts(st.tuples(SIZES, STRIDES))
SIGNED = nest_layouts(st.tuples(SIZES, STRIDES.flatmap(lambda d: st.sampled_from((d, -d)))))
COMPACT = st.lists(SIZES, min_size=1, max_size=4).flatmap(
    lambda shape: st.permutations(range(len(shape))).map(lambda order: compact(shape, order))
)


def coordinates(shape: IntTuple) -> list[IntTuple]:
    """All nested coordinates, the first mode fastest."""
    if isinstance(shape, int):
        return list(range(shape))
    found: list[tuple[IntTuple, ...]] = [()]
    for part in reversed(shape):
        found = [(c, *rest) for rest in found for c in coordinates(part)]
    return list(found)


def attempt(operation: Callable[..., Any], *operands: Any) -> Any:
    """The result, or None where the operation refuses with all layouts in its message."""
    try:
        return operation(*operands)
    except CannotLower as reason:
        message = str(reason)
    assert all(str(o) in message for o in operands if isinstance(o, Layout))
    return None
