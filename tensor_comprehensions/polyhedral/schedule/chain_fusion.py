"""Fuse further statements into a chain of contractions: sums over its rows, and producers of its operands.

For example, the gradient of attention's keys is a sum over the queries, which are the rows of all other products. It
can be fused if the tiles of a batch run one after another: each adds its terms to the sum, which stays in cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, Role, walk_expr
from ...thresholds import SERIAL_CHAIN_BATCHES
from ..scop.scop import Scop, ScopStatement, check_reads
from .contraction_chain import chain_tiles, tiled_row
from .fusion import FusionGroup
from .shared_rows import BandMember, is_parallel_index


def fuse_chain(
    scop: Scop, group: FusionGroup, node: ScopStatement, later: Sequence[ScopStatement], target: CpuTarget
) -> FusionGroup | None:
    """`group`, a chain of contractions, extended by `node`; None if that is not possible or not profitable."""
    if chain_tiles(scop.function, group, target) is None:
        return None
    written = {w.tensor for n in group.nodes for w in n.writes}
    if any(check_reads(s) & written for s in node.statements):
        return None  # the checks of its subscripts must run in between
    if {w.tensor for w in node.writes} & {t for n in group.nodes for t in n.tensors}:
        return None
    if written & set(node.tensors):
        return _with_sum(scop.function, group, node, target)
    needed = {w.tensor for w in node.writes}
    if any(needed & set(n.tensors) and written & set(n.tensors) for n in later):
        return _with_independent(scop, group, node)
    return None


def merge_producer(
    function: BoundFunction, first: FusionGroup, group: FusionGroup, target: CpuTarget
) -> FusionGroup | None:
    """`group`, a chain, preceded by the nodes of `first`, which produce temporaries for it; None if not possible."""
    if first.serial is not None or chain_tiles(function, group, target) is None:
        return None
    written = {w.tensor for n in first.nodes for w in n.writes}
    temporary = all(function.tensor(name).role is Role.TEMPORARY for name in written)
    if not temporary or any(check_reads(s) & written for n in group.nodes for s in n.statements):
        return None
    if {w.tensor for n in group.nodes for w in n.writes} & {t for n in first.nodes for t in n.tensors}:
        return None
    rows: list[BandMember] = []
    for row in group.rows:
        readers = (n for n in group.nodes if written & set(n.tensors))
        found = {k for n in readers for k in _rows_of_reads(first, n, row.index_and_shift(n))}
        own = first.rows[found.pop() or 0] if len(found) == 1 and None not in found else None
        if own is None or (own.lower, own.upper) != (row.lower, row.upper):
            return None
        rows.append(BandMember((*own.places, *row.places), row.lower, row.upper))
    joined = FusionGroup((*first.nodes, *group.nodes), tuple(rows), group.serial)
    return joined if chain_tiles(function, joined, target) is not None else None


def _rows_of_reads(first: FusionGroup, node: ScopStatement, row: tuple[str, int]) -> Iterator[int | None]:
    """For every read of a result of `first` by `node`, the row of `first` that matches `row` of `node`, or None.

    row: (index of `node`, shift).
    """
    for producer in first.nodes:
        for write in producer.writes:
            for read in (r for r in node.reads if r.tensor == write.tensor):
                places = [d for d, e in enumerate(read.subscripts) if isinstance(e, tc.Index) and e.name == row[0]]
                own = write.subscripts[places[0]] if len(places) == 1 and not row[1] else None
                rows = (
                    k
                    for k, r in enumerate(first.rows)
                    if isinstance(own, tc.Index) and r.index_and_shift(producer) == (own.name, 0)
                )
                yield next(rows, None)


def _with_sum(
    function: BoundFunction, group: FusionGroup, node: ScopStatement, target: CpuTarget
) -> FusionGroup | None:
    """`group` extended by `node`, a product that sums over the tiled row; None if not possible or not profitable."""
    serial, cluster = tiled_row(group), node.cluster
    if serial is None or cluster is None or cluster.update > 0 or node.elements or cluster.initial:
        return None
    if all(n.cluster is None for n in group.nodes):
        return None  # one product reads each operand as often without the others, and could not be tiled as a whole
    result = function.tensor(cluster.output.tensor)
    if cluster.epilogue is None and result.dtype != cluster.left.dtype:
        return None
    written = {w.tensor for n in group.nodes for w in n.writes}
    finish = () if cluster.epilogue is None else walk_expr(cluster.epilogue)
    if any(isinstance(e, tc.Access) and e.tensor in written for e in finish):
        return None  # the epilogue runs after the last tile
    indices = _rows_read(group, node)
    own = {w.tensor for w in node.writes}
    if indices is None or any(group.adds_up(n) and own & set(n.tensors) for n in group.nodes):
        return None
    rows: list[BandMember] = []
    for k, (row, name) in enumerate(zip(group.rows, indices, strict=True)):
        candidates = node.reduction_indices if k == serial else node.free
        if not any(i.name == name and (i.lower, i.upper) == (row.lower, row.upper) for i in candidates):
            return None
        rows.append(BandMember((*row.places, (node.name, (name, 0))), row.lower, row.upper))
    joined = FusionGroup((*group.nodes, node), tuple(rows), serial)
    if joined.parallelism < SERIAL_CHAIN_BATCHES or chain_tiles(function, joined, target) is None:
        return None
    return joined


def _rows_read(group: FusionGroup, node: ScopStatement) -> tuple[str, ...] | None:
    """For each row, the index of `node` that subscripts it in all reads of the group's results; None if not unique."""
    found: dict[int, str] = {}
    writes = [(n, w) for n in group.nodes for w in n.writes]
    for n, write in writes:
        for read in (r for r in node.reads if r.tensor == write.tensor):
            for k, row in enumerate(group.rows):
                index, shift = row.index_and_shift(n)
                places = [d for d, e in enumerate(write.subscripts) if isinstance(e, tc.Index) and e.name == index]
                if group.adds_up(n) or shift or len(places) != 1:
                    return None
                own = read.subscripts[places[0]]
                if not isinstance(own, tc.Index) or found.setdefault(k, own.name) != own.name:
                    return None
    return tuple(found[k] for k in range(len(group.rows))) if len(set(found.values())) == len(group.rows) else None


def _with_independent(scop: Scop, group: FusionGroup, node: ScopStatement) -> FusionGroup | None:
    """`group` extended by `node`, whose parallel indices match the rows by range, in order; None if they do not."""
    if node.cluster is not None:
        return None
    parallel = [i for i in node.free if is_parallel_index(scop, node, i)]
    rows: list[BandMember] = []
    for row in group.rows:
        index = next((i for i in parallel if (i.lower, i.upper) == (row.lower, row.upper)), None)
        if index is None:
            return None
        parallel.remove(index)
        rows.append(BandMember((*row.places, (node.name, (index.name, 0))), row.lower, row.upper))
    return FusionGroup((*group.nodes, node), tuple(rows), group.serial)
