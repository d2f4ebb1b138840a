"""Decide which nodes to fuse on a CPU: not if threads would idle, or if operands would no longer stay in cache."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...options import CpuOptions
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, walk_expr
from ...thresholds import CONTRACTION_TILE_ROWS, ENOUGH_PARALLELISM, SHARED_FMAS, SMALL_RESULT_FACTOR
from ..scop.scop import Scop, ScopStatement
from .chain_fusion import fuse_chain, merge_producer
from .contraction_chain import chain_tiles
from .fusion import FusionGroup, FusionObjection, accessed_bytes, partition_statements, reads_memory


def fuse_statements(scop: Scop, options: CpuOptions, target: CpuTarget) -> tuple[FusionGroup, ...]:
    """Partition the nodes into groups; every dependence goes forward between and within groups."""

    def object_to(before: FusionGroup, alone: FusionGroup, joined: FusionGroup) -> FusionObjection | None:
        return _object_to(scop.function, before, alone, joined, target)

    def join(group: FusionGroup, node: ScopStatement, later: Sequence[ScopStatement]) -> FusionGroup | None:
        return fuse_chain(scop, group, node, later, target)

    def merge(alone: FusionGroup, group: FusionGroup) -> FusionGroup | None:
        return merge_producer(scop.function, alone, group, target)

    return partition_statements(scop, options.fusion, object_to, join, merge)


def _object_to(
    function: BoundFunction, before: FusionGroup, alone: FusionGroup, joined: FusionGroup, target: CpuTarget
) -> FusionObjection | None:
    """The objection to a fusion that would lose much parallelism or locality of its parts, or None."""
    contracts = any(n.cluster is not None for n in joined.nodes)
    if contracts and chain_tiles(function, joined, target) is None:
        against = _lost_threads(joined) or _far_operands(function, joined, target)
        if against is not None:
            return against
    apart = min(before.parallelism, alone.parallelism)
    if joined.parallelism < min(apart, ENOUGH_PARALLELISM) or joined.parallelism < 2:
        numbers = ("parallelism", joined.parallelism), ("parallelism apart", apart), ("enough", ENOUGH_PARALLELISM)
        return FusionObjection("too few iterations of the shared loops are independent", numbers)
    return _lost_row_order(function, before, joined, target)


def _lost_threads(joined: FusionGroup) -> FusionObjection | None:
    """The objection if a contraction, parallel on its own, would run in a single tile of the group's first row."""
    contractions = (n for n in joined.nodes if n.cluster is not None)
    work = max(prod(i.extent for i in (*n.free, *n.reduction_indices)) for n in contractions)
    rows = joined.rows[0].extent
    if rows > CONTRACTION_TILE_ROWS or work < SHARED_FMAS:
        return None
    tile, worth = ("rows of a tile", CONTRACTION_TILE_ROWS), ("multiply-adds worth threads", SHARED_FMAS)
    why = "threads would idle: the first shared loop fits into one tile"
    return FusionObjection(why, (("rows", rows), tile, ("multiply-adds", work), worth))


def _lost_row_order(
    function: BoundFunction, before: FusionGroup, joined: FusionGroup, target: CpuTarget
) -> FusionObjection | None:
    """The objection if a reduction of much memory to little would no longer read its rows in order."""
    (node, *others) = before.nodes
    first = before.rows[0].index_and_shift(node)
    if (
        others
        or not node.reduction_indices
        or node.cluster is not None
        or any(r.index_and_shift(node) == first for r in joined.rows)
    ):
        return None
    read, written = accessed_bytes(function, node.reads), accessed_bytes(function, node.writes)
    if written * SMALL_RESULT_FACTOR >= read or not reads_memory(function, node, target):
        return None
    numbers = ("bytes read", read), ("bytes written", written)
    return FusionObjection("a reduction would no longer read the rows of memory one after another", numbers)


def _far_operands(function: BoundFunction, group: FusionGroup, target: CpuTarget) -> FusionObjection | None:
    """The objection if the operands that every iteration of the first row reads do not fit into half of L2."""
    again: dict[str, int] = {}
    for node in group.nodes:
        first, _ = group.rows[0].index_and_shift(node)
        for access in node.reads:
            moves = any(isinstance(x, tc.Index) and x.name == first for e in access.subscripts for x in walk_expr(e))
            if not moves:
                tensor = function.tensor(access.tensor)
                again[tensor.name] = tensor.size * tensor.dtype.size
    size, room = sum(again.values()), target.cache[1] // 2
    if size <= room:
        return None
    numbers = ("bytes read again", size), ("room in the second cache", room)
    return FusionObjection("what each tile reads again would not stay in the second cache", numbers)
