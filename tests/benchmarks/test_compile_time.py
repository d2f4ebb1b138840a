"""What the times of compilation are made of."""

from __future__ import annotations

from math import prod

from benchmarks.compile_time import planning_seconds, recognised
from benchmarks.contractions import contractions
from tensor_comprehensions.target import AVX512


def test_the_contraction_that_is_planned_is_that_of_the_benchmark() -> None:
    case = contractions("ci")[0]
    op = recognised(case)
    assert op.multiplications == prod(case.sizes.values())
    assert planning_seconds(op, AVX512, 2) > 0
