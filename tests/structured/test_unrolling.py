"""How far sums in register tiles are unrolled: by registers, and by where the scalars come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.structured.contraction import lower
from tensor_comprehensions.structured.cost import RegisterTile
from tensor_comprehensions.structured.expert import choose
from tensor_comprehensions.structured.facts import facts
from tensor_comprehensions.structured.unrolling import STEPS, STEPS_OF_PANELS, complete
from tensor_comprehensions.target import AVX512

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
    known = facts(ops.op(f"O:f,h,w = I:c,h+kh,{window} x W:f,c,kh,kw", IMAGE), "f")
    tile = RegisterTile(16, (("f", filters), ("w", row)))
    assert complete(known, AVX512, tile, ("c", "kh", "kw")) == unrolled


@pytest.mark.parametrize(
    ("sizes", "right", "steps"),
    [
        ({"m": 12544, "n": 64, "k": 256}, "k,n", STEPS),
        ({"m": 12500, "n": 64, "k": 500}, "k,n", 4),
        ({"m": 1024, "n": 1024, "k": 1024}, "k,n", STEPS_OF_PANELS),
        ({"m": 12500, "n": 64, "k": 255}, "k,n", 1),  # code for the steps left over would be as long again
        ({"m": 12500, "n": 64, "k": 32}, "k,n", 1),
        ({"m": 256, "n": 64, "k": 256}, "k,n", 1),  # near
    ],
)
def test_long_sums_of_scalars_from_afar_take_several_steps_at_once(
    ops: Any, sizes: dict[str, int], right: str, steps: int
) -> None:
    op = ops.op(f"C:m,n = A:m,k x B:{right}", sizes)
    assert choose(op, MESHED, parallel=False).steps == steps
    assert choose(op, AVX512, parallel=False).steps == 1


def test_several_steps_of_blocks_are_right(ops: Any) -> None:
    op = ops.op("C:m,n = A:m,k x B:k,n", {"m": 25, "n": 50, "k": 280})
    small = replace(MESHED, vector_bits=128, vector_registers=16, cache=(1024, 8192, 1 << 20))
    plan = choose(op, small, parallel=False)
    (block,) = (level.size for level in plan.levels if level.iterator == "k")
    assert plan.steps > 1
    assert block < 280
    arrays = ops.run(op, lower(op, small, parallel=False))
    assert np.array_equal(arrays["result"], arrays["A"] @ arrays["B"])
