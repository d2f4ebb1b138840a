"""Split-K on the grid: split long sums with few results into parts with their own blocks; a second kernel adds them.

A block has a tile of the result, so a product of 32 x 65536 and 65536 x 32 keeps only four multiprocessors busy. With
split-K, each tile of each part has its own block. That costs a launch, and memory traffic for the parts; for long sums
it is less than the cost of idle multiprocessors. The cost model of the mapping decides, for products and for plain sums
alike: it compares the unsplit sum with numbers of parts from two up to two blocks of the least tile per multiprocessor.
So the parts fill the multiprocessors about once or twice, have enough terms to hide the memory latency, and are small
compared to the operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ....core.decisions import close_book
from ....machine import GPU_LAUNCH_SECONDS
from ....options import MappingOptions
from ....target import GpuTarget
from ....tc_lang.ir import BoundFunction, BoundStatement
from ....thresholds import (
    GPU_MAX_SPLIT_BLOCKS_PER_SM,
    GPU_MIN_PART_TERMS,
    GPU_PART_ALIGNMENT,
    GPU_SERIAL_TERMS,
    GPU_SPLIT_GAIN,
    GPU_SPLIT_TIE,
)
from ...schedule.fusion import FusionGroup
from ...schedule.shared_rows import BandMember
from ...scop.rfactor import SplitPoint, in_two_stages, is_divisible
from ...scop.scop import Scop, ScopStatement
from .mapping_heuristics import group_cycles


def split_grid_reductions(function: BoundFunction, options: MappingOptions | None, target: GpuTarget) -> BoundFunction:
    """`function` with reductions in two stages, where that pays by the cost model or as `options` request."""
    if options is None:
        why = "processors would idle: both kernels together are expected to take less than three quarters of the time"
        return in_two_stages(function, lambda s: _choose_split_point(function, s, target), why)
    asked = f"the option split_k={options.split_k} asks for it"
    return in_two_stages(function, lambda s: _requested_split(s, options.split_k, target), asked)


def _requested_split(s: BoundStatement, parts: int, target: GpuTarget) -> SplitPoint | None:
    """The split of the outermost index that is long enough for `parts` parts; None if that is not worthwhile."""
    if parts == 1 or not _has_few_results(s, target):
        return None
    terms = prod(i.extent for i in s.reduction_indices)
    index = next((i for i in s.reduction_indices if i.extent >= parts), None)
    return (
        None if index is None or terms < GPU_SERIAL_TERMS * parts else (index, _choose_even_parts(index.extent, parts))
    )


def _has_few_results(s: BoundStatement, target: GpuTarget) -> bool:
    """Whether `s` has fewer results than the target has threads."""
    return is_divisible(s) and 0 < prod(i.extent for i in s.free) < target.num_sms * target.threads_per_sm


def _choose_split_point(function: BoundFunction, s: BoundStatement, target: GpuTarget) -> SplitPoint | None:
    """The fastest split by the cost model (of ties, one with many parts); None if the gain is too small."""
    if not _has_few_results(s, target) or prod(i.extent for i in s.reduction_indices) < 2 * GPU_MIN_PART_TERMS:
        return None
    launch = GPU_LAUNCH_SECONDS * target.clock
    limit = GPU_SPLIT_GAIN * _predict_cycles(function, s, target)
    if limit <= launch:
        return None
    found = [(launch + _two_stage_cycles(function, s, cut, target), cut) for cut in _list_split_points(s, target)]
    least = min((cycles for cycles, _ in found), default=limit)
    return next(cut for cycles, cut in found if cycles <= GPU_SPLIT_TIE * least) if least < limit else None


def _list_split_points(s: BoundStatement, target: GpuTarget) -> Iterator[SplitPoint]:
    """Candidate splits for each index, with numbers of parts from many to few, each about half of the last."""
    terms = prod(i.extent for i in s.reduction_indices)
    for index in s.reduction_indices:
        most = min(GPU_MAX_SPLIT_BLOCKS_PER_SM * target.num_sms, index.extent, terms // GPU_MIN_PART_TERMS)
        tried = dict.fromkeys(_choose_even_parts(index.extent, most >> k) for k in range(most.bit_length() - 1))
        yield from ((index, parts) for parts in tried)


def _choose_even_parts(extent: int, most: int) -> int:
    """A number of parts above `most` / 2 with few terms left over, whose parts start at aligned vectors if possible."""

    def cost(n: int) -> tuple[bool, bool, int, int]:
        chunk, rest = divmod(extent, n)
        return rest > 0, chunk % GPU_PART_ALIGNMENT > 0, rest, -n

    return min(range(most, most // 2, -1), key=cost)


def _two_stage_cycles(function: BoundFunction, s: BoundStatement, cut: SplitPoint, target: GpuTarget) -> float:
    """The predicted cycles of computing the parts of `s`, writing them to memory, and adding them up."""
    with close_book():  # only an estimate: do not record decisions
        whole = in_two_stages(replace(function, statements=(s,)), lambda _: cut)
    part = whole.tensors[-1]
    written = part.size * part.dtype.size * target.clock / target.bandwidth
    return written + sum(_predict_cycles(whole, stage, target) for stage in whole.statements)


def _predict_cycles(function: BoundFunction, s: BoundStatement, target: GpuTarget) -> float:
    """The predicted cycles of a kernel of `s` alone: its free indices are rows, since it writes each element once."""
    node = ScopStatement("S0", (s,))
    rows = tuple(BandMember(((node.name, (i.name, 0)),), i.lower, i.upper) for i in s.free)
    return group_cycles(Scop(function, (node,)), FusionGroup((node,), rows), target)
