"""Sums in blocks for L1, where L2 cannot hold both factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import BFLOAT16
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.structured.lower.contraction import lower_contraction
from tensor_comprehensions.structured.op import HalfSpace, StructuredOp, accumulator_var
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget

ZEN3 = replace(AVX2, cache=(32768, 524288, 33554432))
MESHED = replace(AVX512, name="sapphirerapids", cache=(49152, 2097152, 110100480))
TEXT = "C:i,e = A:k,i x B:k,e"
"""The second product of attention on a tile of rows."""


def make_op(ops: Any, rows: int, columns: int, steps: int, **extra: Any) -> StructuredOp:
    op: StructuredOp = ops.op(TEXT, {"i": rows, "e": columns, "k": steps}, **extra)
    return op


def block_of(op: StructuredOp, target: CpuTarget = ZEN3, *, parallel: bool = False) -> int | None:
    """Steps in a block of the sum; None if the sum is not blocked outside of the rows."""
    first = select_plan(op, target, parallel=parallel).levels[0]
    return first.size if first.iterator == "k" else None


@pytest.mark.parametrize("steps", [1024, 4096])
def test_a_long_sum_of_lines_past_l2_is_blocked_for_l1(ops: Any, steps: int) -> None:
    assert block_of(make_op(ops, 48, 64, steps)) == 64


@pytest.mark.parametrize(
    ("rows", "columns", "steps"),
    [
        (48, 64, 512),  # L2 holds both factors
        (18, 64, 2048),  # few register tiles use a block
        (48, 512, 1024),  # blocks would be short
        (48, 64, 1000),  # blocks without a remainder would be short
    ],
)
def test_sums_for_which_blocks_do_not_pay_are_whole(ops: Any, rows: int, columns: int, steps: int) -> None:
    assert block_of(make_op(ops, rows, columns, steps)) is None


def test_sums_that_threads_share_are_whole(ops: Any) -> None:
    op = ops.op("C:b,i,e = A:b,k,i x B:b,k,e", {"b": 64, "i": 48, "e": 64, "k": 1024})
    plan = select_plan(op, ZEN3, parallel=True)
    assert plan.parallel_depth
    assert "k" not in {level.iterator for level in plan.levels}


def test_sums_are_whole_before_a_cache_on_a_mesh(ops: Any) -> None:
    assert block_of(make_op(ops, 48, 64, 4096), MESHED) is None


def test_masked_sums_are_whole(ops: Any) -> None:
    """Blocks without any term would still load and store the partial sums."""
    causal = HalfSpace((("i", 1), ("k", -1)), build.const(0))
    assert block_of(make_op(ops, 48, 64, 1024, terms=(causal,))) is None


def test_sums_are_whole_where_the_output_cannot_hold_parts_of_them(ops: Any) -> None:
    op = make_op(ops, 48, 64, 1024)
    assert block_of(make_op(ops, 48, 64, 1024, storage=BFLOAT16)) is None
    assert block_of(replace(op, epilogue=build.add(op.output, accumulator_var(op.dtype)))) is None
    assert block_of(replace(op, epilogue=build.mul(accumulator_var(op.dtype), 2.0))) == 64


@pytest.mark.parametrize(("rows", "columns", "steps"), [(25, 16, 67), (31, 32, 66), (28, 16, 96)])
def test_blocks_are_right_at_all_edges(
    ops: Any, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, steps: int
) -> None:
    monkeypatch.setattr("tensor_comprehensions.structured.planners.l1_blocks.MIN_L1_BLOCK_STEPS", 4)
    small = replace(ZEN3, cache=(2048, 8192, 1 << 20))
    op = make_op(ops, rows, columns, steps)
    for epilogue in (None, build.mul(accumulator_var(op.dtype), 2.0)):
        finished = replace(op, epilogue=epilogue)
        plan = select_plan(finished, small, parallel=False)
        assert plan.levels[0].iterator == "k"
        arrays = ops.run(finished, lower_contraction(finished, small, parallel=False, plan=plan))
        expected = arrays["A"].T @ arrays["B"]
        assert np.array_equal(arrays["result"], expected if epilogue is None else 2 * expected)
