"""Strides, and how far a tensor reaches."""

from __future__ import annotations

from itertools import product

import pytest

from tensor_comprehensions.core.memory_layout import contiguous_strides, storage_extent


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (1, 7, 1), (3, 0, 2)])
def test_a_contiguous_tensor_reaches_as_far_as_it_has_elements(shape: tuple[int, ...]) -> None:
    elements = list(product(*map(range, shape)))
    strides = contiguous_strides(shape)
    assert [sum(i * s for i, s in zip(e, strides, strict=True)) for e in elements] == list(range(len(elements)))
    assert storage_extent(shape, strides) == len(elements)


@pytest.mark.parametrize(("shape", "strides"), [((3, 4), (10, 2)), ((4, 3), (0, 1)), ((2, 2, 2), (1, 5, 9))])
def test_a_strided_tensor_reaches_to_its_last_element(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    offsets = [sum(i * s for i, s in zip(e, strides, strict=True)) for e in product(*map(range, shape))]
    assert storage_extent(shape, strides) == 1 + max(offsets)
