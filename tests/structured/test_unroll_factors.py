"""How far sums in register tiles are unrolled: by registers, and by where the scalars come from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.structured.analysis.contraction_info import analyze_contraction
from tensor_comprehensions.structured.analysis.window_reuse import distinct_taps
from tensor_comprehensions.structured.cost.tile_cost import RegisterTile
from tensor_comprehensions.structured.cost.unroll_factors import count_unrolled_reductions
from tensor_comprehensions.structured.lower.contraction import lower_contraction
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import AVX512
from tensor_comprehensions.thresholds import MAX_UNROLLED_PANEL_STEPS, MAX_UNROLLED_STEPS

MESHED = replace(AVX512, name="sapphirerapids", cache=(49152, 2097152, 110100480))
IMAGE = {"f": 128, "h": 14, "w": 14, "c": 64, "kh": 3, "kw": 3}


@pytest.mark.parametrize(
    ("window", "filters", "row", "unrolled"),
    [
        ("1*w+1*kw", 64, 5, True),  # 20 sums, 4 vectors and 5 scalars that are met again
        ("1*w+1*kw", 64, 6, False),
        ("1*w+1*kw", 32, 14, False),
        ("2*w+1*kw", 64, 5, True),
        ("2*w+1*kw", 64, 6, False),
        ("1*w+7*kw", 64, 6, False),  # nothing is met again
    ],
)
def test_windows_are_unrolled_where_registers_hold_the_scalars_that_taps_share(
    ops: Any, window: str, filters: int, row: int, unrolled: bool
) -> None:
    known = analyze_contraction(ops.op(f"O:f,h,w = I:c,h+kh,{window} x W:f,c,kh,kw", IMAGE), "f")
    tile = RegisterTile(16, (("f", filters), ("w", row)))
    assert count_unrolled_reductions(known, AVX512, tile, ("c", "kh", "kw")) == unrolled


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("dilation", [1, 2, 4])
@pytest.mark.parametrize("row", [1, 2, 3, 7])
def test_scalars_of_windows_are_counted_once(ops: Any, stride: int, dilation: int, row: int) -> None:
    known = analyze_contraction(ops.op(f"O:f,h,w = I:c,h+kh,{stride}*w+{dilation}*kw x W:f,c,kh,kw", IMAGE), "f")
    found = Counter((h, stride * w + dilation * kw) for h, w, kw in product(range(2), range(row), range(3)))
    (read,), (shared,) = distinct_taps(
        known, "kw", {"f": np.array([32.0]), "w": np.array([float(row)]), "h": np.array([2.0])}
    )
    if stride % dilation and dilation % stride:
        assert (read, shared) == (2 * row * 3, 0)  # taken as apart
    else:
        assert (read, shared) == (len(found), sum(n > 1 for n in found.values()))


@pytest.mark.parametrize("row", [12, 14])  # 12 sums and 12 scalars fill the registers as well as 24 sums do
def test_lanes_run_along_the_channels_of_a_group_where_taps_share_scalars(ops: Any, row: int) -> None:
    sizes = {"n": 4, "g": 32, "f": 16, "c": 16, "h": row, "w": row, "kh": 3, "kw": 3}
    op = ops.op("O:n,g,f,h,w = I:n,g,c,h+kh,w+kw x W:g,f,c,kh,kw", sizes)
    plan = select_plan(op, MESHED, parallel=False)
    assert (plan.vector, plan.unrolled, plan.tile("w")) == ("f", 1, row)


@pytest.mark.parametrize(
    ("sizes", "right", "steps"),
    [
        ({"m": 12544, "n": 64, "k": 256}, "k,n", MAX_UNROLLED_STEPS),
        ({"m": 12500, "n": 64, "k": 500}, "k,n", 4),
        ({"m": 1024, "n": 1024, "k": 1024}, "k,n", MAX_UNROLLED_PANEL_STEPS),
        ({"m": 12500, "n": 64, "k": 255}, "k,n", 1),  # code for the steps left over would be as long again
        ({"m": 12500, "n": 64, "k": 32}, "k,n", 1),
        ({"m": 256, "n": 64, "k": 256}, "k,n", 1),  # near
    ],
)
def test_long_sums_of_scalars_from_afar_take_several_steps_at_once(
    ops: Any, sizes: dict[str, int], right: str, steps: int
) -> None:
    op = ops.op(f"C:m,n = A:m,k x B:{right}", sizes)
    assert select_plan(op, MESHED, parallel=False).unroll_steps == steps
    assert select_plan(op, AVX512, parallel=False).unroll_steps == 1


def test_several_steps_of_blocks_are_right(ops: Any) -> None:
    op = ops.op("C:m,n = A:m,k x B:k,n", {"m": 25, "n": 50, "k": 280})
    small = replace(MESHED, vector_bits=128, vector_registers=16, cache=(1024, 8192, 1 << 20))
    plan = select_plan(op, small, parallel=False)
    (block,) = (level.size for level in plan.levels if level.iterator == "k")
    assert plan.unroll_steps > 1
    assert block < 280
    arrays = ops.run(op, lower_contraction(op, small, parallel=False))
    assert np.array_equal(arrays["result"], arrays["A"] @ arrays["B"])
