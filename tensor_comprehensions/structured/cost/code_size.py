"""The code size of a plan: it determines the compile time, and whether the code runs from L1."""

from __future__ import annotations

from collections.abc import Sequence

from ..lower.tile import num_tiles
from ..op import Iterator, StructuredOp
from ..plan import Edge, Plan, TileLoop


def code_length(op: StructuredOp, plan: Plan) -> int:
    """The number of vector multiply-adds in the code for a normalized op, of all variants of its register tile."""
    total = 1
    for i in op.iterators:
        parts = _list_part_sizes(i.extent, [level for level in plan.levels if level.iterator == i.name])
        total *= sum(_count_unrolled_points(part, i, plan) for part in parts)
    return total


def _list_part_sizes(extent: int, levels: Sequence[TileLoop]) -> list[int]:
    """Sizes along an iterator of the innermost tiles that have code of their own."""
    if not levels:
        return [extent]
    size = levels[0].size
    full, rest = divmod(extent, size)
    if levels[0].edge is Edge.PADDED:
        full, rest = 1, 0
    found = _list_part_sizes(size, levels[1:]) if full else []
    return [*found, *(_list_part_sizes(rest, levels[1:]) if rest else [])]


def _count_unrolled_points(part: int, i: Iterator, plan: Plan) -> int:
    """How many of a part's points along an iterator are unrolled in the code; vectors along the lanes."""
    if i.is_parallel:
        return num_tiles(part, plan.lanes) if i.name == plan.vector else part
    inside = len(plan.reductions) - plan.reductions.index(i.name)
    if inside <= plan.unrolled:
        return part
    if inside > plan.unrolled + 1:
        return 1
    return min(plan.unroll_steps, part) + (part % plan.unroll_steps if plan.unroll_steps < part else 0)
