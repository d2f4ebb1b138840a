"""Facts about plans of contractions, and a processor with a far last cache."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tensor_comprehensions.structured.plan import Plan, Side
from tensor_comprehensions.target import AVX512

MESHED = replace(AVX512, name="sapphirerapids", cache=(49152, 2097152, 110100480))


def list_packed_sides(plan: Plan) -> set[Side]:
    return {p.side for p in plan.packs}


def count_chunks(plan: Plan, sizes: dict[str, int]) -> int:
    """Iterations of the parallel loop."""
    return prod(-(-sizes[level.iterator] // level.size) for level in plan.levels[: plan.parallel_depth])


STEM = {"n": 8, "f": 64, "h": 112, "w": 112, "c": 3, "kh": 7, "kw": 7}
