"""Footprints in buffers of their own: places and distances are inverse, and views find what they hold."""

from __future__ import annotations

from itertools import product
from operator import floordiv, mod

import pytest

from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.buffer_view import (
    BufferDim,
    BufferView,
    buffer_indices,
    buffer_shape,
    footprint_offsets,
    private_view,
    with_row_pitch,
)
from tensor_comprehensions.loop_ir.nodes import LoopKind, Space
from tensor_comprehensions.loop_ir.passes.simplify import simplify

GAPS = (BufferDim(0, 10, 3), BufferDim(0, 2, 4), BufferDim(1, 1, 5))
"""Runs of four elements, every second one, ten apart, in rows of five."""
TILES = (BufferDim("i", 6, 2), BufferDim("k", 1, 3), BufferDim("i", 1, 6), BufferDim("j", 1, 1))
"""A panel: the tiles of `i`, then a sum, then the points of a tile."""


@pytest.mark.parametrize("digits", [GAPS, TILES, ()])
def test_places_and_distances_are_inverse(digits: tuple[BufferDim[int], ...]) -> None:
    seen = set()
    for indices in product(*map(range, buffer_shape(digits))):
        distance = {
            a: build.integer(e) for a, e in footprint_offsets(digits, [build.const(i) for i in indices]).items()
        }
        assert all(isinstance(d, int) for d in distance.values())
        assert buffer_indices(digits, distance, floordiv, mod) == indices
        seen.add(tuple(distance.values()))
    assert len(seen) == len(list(product(*map(range, buffer_shape(digits)))))


def test_a_view_finds_the_points_that_its_buffer_holds() -> None:
    buffer = build.buffer("panel", FLOAT32, buffer_shape(TILES), Space.SCRATCH)
    view = BufferView(buffer, TILES, {"i": build.const(12), "k": build.var("k0"), "j": build.const(0)})
    point = {"i": build.const(12 + 6 + 4), "k": build.add(build.var("k0"), 2), "j": build.const(0)}
    store = build.store(buffer, view.indices(point), build.const(0, FLOAT32))
    assert simplify(store) == build.store(buffer, (1, 2, 4, 0), build.const(0, FLOAT32))


def test_an_axis_without_digits_has_one_point() -> None:
    one = private_view("x", FLOAT32)
    assert (one.buffer.space, one.buffer.shape) == (Space.REGISTER, ())
    assert one.indices({0: build.var("i"), 1: build.var("j")}) == ()
    row = private_view("x", FLOAT32, (BufferDim(1, 1, 8),), {1: build.var("j0")})
    assert (row.buffer.space, row.buffer.shape) == (Space.SCRATCH, (8,))
    assert row.indices({0: build.var("i"), 1: build.var("j")}) == (build.sub(build.var("j"), build.var("j0")),)


def test_rows_of_a_pitched_buffer_are_apart() -> None:
    buffer = with_row_pitch(build.buffer("b", FLOAT32, (2, 3, 4)), 5)
    assert (buffer.shape, buffer.strides) == ((2, 3, 4), (15, 5, 1))
    assert buffer.span == 15 + 2 * 5 + 4
    assert buffer.bytes == 4 * buffer.span


def test_loops_nest_in_the_order_given() -> None:
    nest = build.loops([("i", 2), ("j", 3)], build.NOTHING, LoopKind.UNROLLED)
    assert (nest.var, nest.body.var) == ("i", "j")
    assert nest.kind is nest.body.kind is LoopKind.UNROLLED
