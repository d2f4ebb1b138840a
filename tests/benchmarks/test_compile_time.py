"""What the times of compilation are made of."""

from __future__ import annotations

from math import prod

from benchmarks.compile_time import compiling, planning_seconds, recognize_contraction
from benchmarks.contractions import contractions
from tensor_comprehensions.compiler.cpu_passes import PASSES
from tensor_comprehensions.core import knobs
from tensor_comprehensions.target import AVX512


def test_the_contraction_that_is_planned_is_that_of_the_benchmark() -> None:
    case = contractions("ci")[0]
    op = recognize_contraction(case)
    assert op.multiplications == prod(case.sizes.values())
    assert planning_seconds(op, AVX512, 2) > 0


def test_compiling_tells_the_time_of_every_pass() -> None:
    """Of a contraction, compiled from its text."""
    with knobs.override_knobs(cache="off"):
        took = compiling(contractions("odd")[0], 1)
    assert tuple(took.passes) == tuple(step.name for step in PASSES)
    assert min(took.processor, took.clock) > 0
