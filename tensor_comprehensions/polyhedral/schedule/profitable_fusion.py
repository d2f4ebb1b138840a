"""Which nodes are worth a common kernel on a CPU: those whose tiles keep the threads busy and the caches full."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...options import CpuOptions
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, walk_expr
from ..scop.scop import Scop, ScopStatement
from .chain_fusion import join_chain, merge_producer
from .contraction_chain import CONTRACTION_ROWS, chain_tiles
from .fusion import ENOUGH_PARALLELISM, FusionGroup, accessed_bytes, partition_statements, reads_memory

# Multiply-adds of a contraction alone that several threads share.
SHARED_WORK = 1 << 19
# A result is little beside what is read if it is smaller by this factor.
LITTLE = 16


def fuse_statements(scop: Scop, options: CpuOptions, target: CpuTarget) -> tuple[FusionGroup, ...]:
    """Partition the nodes into groups; every dependence goes forward in the order of groups and within them."""

    def is_profitable(before: FusionGroup, alone: FusionGroup, joined: FusionGroup) -> bool:
        return _is_profitable(scop.function, before, alone, joined, target)

    def join(group: FusionGroup, node: ScopStatement, later: Sequence[ScopStatement]) -> FusionGroup | None:
        return join_chain(scop, group, node, later, target)

    def merge(alone: FusionGroup, group: FusionGroup) -> FusionGroup | None:
        return merge_producer(scop.function, alone, group, target)

    return partition_statements(scop, options.fusion, is_profitable, join, merge)


def _is_profitable(
    function: BoundFunction, before: FusionGroup, alone: FusionGroup, joined: FusionGroup, target: CpuTarget
) -> bool:
    """Does fusion keep enough of the parallelism that its parts have apart?"""
    apart = min(before.parallelism, alone.parallelism)
    contracts = any(n.cluster is not None for n in joined.nodes)
    whole_rows = contracts and chain_tiles(function, joined, target) is None
    if whole_rows and (_loses_threads(joined) or not _operands_stay_close(function, joined, target)):
        return False
    if joined.parallelism < min(apart, ENOUGH_PARALLELISM) or joined.parallelism < 2:
        return False
    return not _loses_row_order(function, before, joined, target)


def _loses_threads(joined: FusionGroup) -> bool:
    """Would a contraction that threads share alone run in one tile of the first row of a group?"""
    contractions = (n for n in joined.nodes if n.cluster is not None)
    work = max(prod(i.extent for i in (*n.free, *n.reduction_indices)) for n in contractions)
    return joined.rows[0].extent <= CONTRACTION_ROWS and work >= SHARED_WORK


def _loses_row_order(function: BoundFunction, before: FusionGroup, joined: FusionGroup, target: CpuTarget) -> bool:
    """Would a reduction of much memory to little, alone so far, no longer walk the rows it reads one after another?"""
    (node, *others) = before.nodes
    first = before.rows[0].index_and_shift(node)
    if (
        others
        or not node.reduction_indices
        or node.cluster is not None
        or any(r.index_and_shift(node) == first for r in joined.rows)
    ):
        return False
    little = accessed_bytes(function, node.writes) * LITTLE < accessed_bytes(function, node.reads)
    return little and reads_memory(function, node, target)


def _operands_stay_close(function: BoundFunction, group: FusionGroup, target: CpuTarget) -> bool:
    """Does what every iteration of the first row reads again fit into half of the second-level cache?"""
    again: dict[str, int] = {}
    for node in group.nodes:
        first, _ = group.rows[0].index_and_shift(node)
        for access in node.reads:
            moves = any(isinstance(x, tc.Index) and x.name == first for e in access.subscripts for x in walk_expr(e))
            if not moves:
                tensor = function.tensor(access.tensor)
                again[tensor.name] = tensor.size * tensor.dtype.size
    return sum(again.values()) <= target.cache[1] // 2
