"""Decide which nodes run in one kernel, and which parallel loops they share.

The rows on which every dependence among a set of nodes has distance zero are the loops that fused nodes share; inside
them, the nodes run one after another.
Fusion is greedy in program order: a node joins the previous kernel if enough parallelism remains.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...core.decisions import Decision, Rival, is_recording, note_decision
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction
from ...thresholds import MEMORY_READ_SHARE
from ..scop.scop import Scop, ScopStatement, check_reads, statements_of
from .shared_rows import BandMember, find_shared_rows, is_parallel_index


@dataclass(frozen=True)
class FusionGroup:
    """Nodes of one kernel in program order, and the coincident rows that they share, outermost first.

    serial: the row whose tiles run one after another, because some nodes sum over it; None if there is no such row.
    """

    nodes: tuple[ScopStatement, ...]
    rows: tuple[BandMember, ...]
    serial: int | None = None

    @property
    def parallelism(self) -> int:
        return prod(r.extent for k, r in enumerate(self.rows) if k != self.serial)

    @cached_property
    def accesses(self) -> Mapping[str, Sequence[tuple[ScopStatement, tc.Access]]]:
        """The accesses of each tensor, with their nodes."""
        found: dict[str, list[tuple[ScopStatement, tc.Access]]] = {}
        for node in self.nodes:
            for access in (*node.writes, *node.reads):
                found.setdefault(access.tensor, []).append((node, access))
        return found

    def adds_up(self, node: ScopStatement) -> bool:
        """Whether `node` reduces over the serial row."""
        if self.serial is None:
            return False
        index, _ = self.rows[self.serial].index_and_shift(node)
        return any(i.name == index for i in node.reduction_indices)


@dataclass(frozen=True, slots=True)
class FusionObjection:
    """The reason for not fusing nodes that could share loops, with the deciding numbers by name."""

    why: str
    numbers: tuple[tuple[str, float], ...] = ()


ObjectionFn = Callable[[FusionGroup, FusionGroup, FusionGroup], FusionObjection | None]
"""(group so far, the node alone, both fused) -> the objection to fusing them, or None."""
Join = Callable[[FusionGroup, ScopStatement, Sequence[ScopStatement]], FusionGroup | None]
Merge = Callable[[FusionGroup, FusionGroup], FusionGroup | None]


def partition_statements(
    scop: Scop,
    fusion: str,
    object_to: ObjectionFn,
    join: Join | None = None,
    merge: Merge | None = None,
) -> tuple[FusionGroup, ...]:
    """Partition the nodes into groups with the strategy `fusion`: "min", "max" or "preserve3".

    object_to: decides under "preserve3" whether to fuse. join: another way to extend a group by a node if that is
    profitable, given the later nodes. merge: fuses the last two groups if that is profitable.
    """
    groups: list[FusionGroup] = []
    objections: dict[str, FusionObjection] = {}  # by the first node of the later group
    for position, node in enumerate(scop.nodes):
        alone = _single_node_group(scop, node)
        joined, profitable = None, False
        if groups and fusion != "min":
            joined = None if join is None else join(groups[-1], node, scop.nodes[position + 1 :])
            profitable = joined is not None
            joined = joined or _fuse_node(scop, groups[-1], node)
        against: FusionObjection | None = APART
        if joined is not None:
            against = None if profitable or fusion == "max" else object_to(groups[-1], alone, joined)
        if joined is not None and against is None:
            groups[-1] = joined
        else:
            if groups and against is not None:
                objections[node.name] = against
            groups.append(alone)
        while merge is not None and fusion != "min" and len(groups) > 1 and (merged := merge(*groups[-2:])) is not None:
            groups[-2:] = [merged]
    record_groups(scop, groups, fusion, object_to, objections)
    return tuple(groups)


APART = FusionObjection("they share no loop whose iterations are independent")


def record_groups(
    scop: Scop,
    groups: Sequence[FusionGroup],
    fusion: str,
    object_to: ObjectionFn,
    objections: Mapping[str, FusionObjection] | None = None,
) -> None:
    """Record which nodes share loops, and why each group was not fused with the previous one.

    objections: by the first node of the later group; None: find them again.
    """
    if not is_recording():
        return
    for group in groups:
        if len(group.nodes) > 1:
            rows = ", ".join(f"{r.places[0][1][0]} ({r.extent})" for r in group.rows)
            note_decision(
                Decision(
                    "fusion",
                    statements_of(group.nodes),
                    f"{FUSED} {rows}",
                    "their dependences stay within one iteration of these loops, which keep enough parallelism",
                    (("parallelism", group.parallelism), ("shared loops", len(group.rows))),
                )
            )
    for before, group in itertools.pairwise(groups):
        if fusion == "min" or objections is None:
            found = _find_objection(scop, before, group, object_to)
        else:
            found = objections.get(group.nodes[0].name, APART)
        if fusion == "min":
            asked = "the option fusion='min' keeps all statements apart"
            found = replace(found, why=f"{asked}; without it: {found.why}" if found.why else asked)
        handed_on = [
            t for t in _tensors_passed_between(before, group) if scop.function.tensor(t).role is tc.Role.TEMPORARY
        ]
        size = sum(_tensor_bytes(scop, t) for t in handed_on)
        numbers = (*found.numbers, ("bytes through memory", float(size)))
        through = tuple(Rival(t, float(_tensor_bytes(scop, t)), HANDED_ON) for t in handed_on)
        both = statements_of((*before.nodes, *group.nodes))
        note_decision(Decision("fusion", both, NOT_FUSED, found.why, numbers, through))


FUSED, NOT_FUSED = "one kernel, loops", "two kernels"
HANDED_ON = "written by one kernel, read by the next"


def _tensor_bytes(scop: Scop, name: str) -> int:
    tensor = scop.function.tensor(name)
    return tensor.size * tensor.dtype.size


def _find_objection(scop: Scop, before: FusionGroup, group: FusionGroup, object_to: ObjectionFn) -> FusionObjection:
    """The objection to fusing two consecutive groups; with an empty reason if there is none."""
    joined = _fuse_node(scop, before, group.nodes[0])
    return APART if joined is None else object_to(before, group, joined) or FusionObjection("")


def _tensors_passed_between(before: FusionGroup, group: FusionGroup) -> tuple[str, ...]:
    """The tensors that one group writes and a later one reads."""
    written = dict.fromkeys(w.tensor for n in before.nodes for w in n.writes)
    read = {r.tensor for n in group.nodes for r in n.reads}
    return tuple(t for t in written if t in read)


def reads_memory(function: BoundFunction, node: ScopStatement, target: CpuTarget) -> bool:
    """Whether the tensors that `node` reads are too large to be in cache."""
    return accessed_bytes(function, node.reads) > min(
        target.cache[-1] // MEMORY_READ_SHARE, target.writeback_limit_bytes
    )


def accessed_bytes(function: BoundFunction, accesses: Sequence[tc.Access]) -> int:
    """The total bytes of the tensors in `accesses`."""
    tensors = map(function.tensor, dict.fromkeys(a.tensor for a in accesses))
    return sum(t.size * t.dtype.size for t in tensors)


def _single_node_group(scop: Scop, node: ScopStatement) -> FusionGroup:
    """The group of one node, with all its parallel indices as rows, in the order of the text."""
    rows = tuple(
        BandMember(((node.name, (i.name, 0)),), i.lower, i.upper) for i in node.free if is_parallel_index(scop, node, i)
    )
    return FusionGroup((node,), rows)


def fuse_consecutive(scop: Scop, first: FusionGroup, second: FusionGroup) -> FusionGroup | None:
    """Two consecutive groups as one group, or None if they share no tensor or no coincident row."""
    written = {w.tensor for n in first.nodes for w in n.writes}
    if any(check_reads(s) & written for n in second.nodes for s in n.statements):
        return None  # the checks of its subscripts must run in between
    if not {t for n in second.nodes for t in n.tensors} & {t for n in first.nodes for t in n.tensors}:
        return None
    return _schedule_group(scop, (*first.nodes, *second.nodes))


def fuse_independent(first: FusionGroup, second: FusionGroup) -> FusionGroup | None:
    """Two groups without common tensors as one group, or None if their rows have different ranges."""
    ours, theirs = ({t for n in g.nodes for t in n.tensors} for g in (first, second))
    checked = {t for n in second.nodes for s in n.statements for t in check_reads(s)}
    if (theirs | checked) & ours or [(r.lower, r.upper) for r in first.rows] != [
        (r.lower, r.upper) for r in second.rows
    ]:
        return None
    rows = (BandMember((*a.places, *b.places), a.lower, a.upper) for a, b in zip(first.rows, second.rows, strict=True))
    return FusionGroup((*first.nodes, *second.nodes), tuple(rows))


def _fuse_node(scop: Scop, group: FusionGroup, node: ScopStatement) -> FusionGroup | None:
    """`group` extended by `node`, or None if they share no coincident row of the form `index + shift`."""
    if not _are_connected(group.nodes, node):
        return None
    if group.serial is not None:
        return _beside_sums(scop, group, node)
    extended = _extend_group(scop, group, node)
    return extended if extended is not None else _schedule_group(scop, (*group.nodes, node))


def _beside_sums(scop: Scop, group: FusionGroup, node: ScopStatement) -> FusionGroup | None:
    """`group`, which has sums over a serial row, extended by `node`; None unless `node` is independent of the sums."""
    sums = [n for n in group.nodes if group.adds_up(n)]
    written = {w.tensor for w in node.writes}
    if any(written & set(n.tensors) or {w.tensor for w in n.writes} & set(node.tensors) for n in sums):
        return None
    others = FusionGroup(tuple(n for n in group.nodes if n not in sums), group.rows)
    extended = _extend_group(scop, others, node)
    return None if extended is None else replace(extended, nodes=(*group.nodes, node), serial=group.serial)


def _extend_group(scop: Scop, group: FusionGroup, node: ScopStatement) -> FusionGroup | None:
    """`group` extended by `node`, with one of its indices for every row; None if a row would carry a dependence.

    All nodes cannot share more rows than the group has.
    """
    sources = [n for n in group.nodes if n.name in scop.sources_of(node)]
    if not sources:
        return None  # without a dependence, no index is known to match a row
    rows: list[BandMember] = []
    for row in group.rows:
        taken = {r.index_and_shift(node)[0] for r in rows}
        free = (i for i in node.free if i.name not in taken and i.extent == row.extent)
        places = {n.name: row.index_and_shift(n)[0] for n in sources}
        fitting = (
            i
            for i in free
            if all((places[n.name], i.name) in scop.coincident_indices(n, node) for n in sources)
            and is_parallel_index(scop, node, i)
        )
        index = next(fitting, None)
        if index is None:
            return None
        place = node.name, (index.name, row.lower - index.lower)
        rows.append(BandMember((*row.places, place), row.lower, row.upper))
    return FusionGroup((*group.nodes, node), tuple(rows)) if rows else None


def _schedule_group(scop: Scop, nodes: Sequence[ScopStatement]) -> FusionGroup | None:
    """The group of all `nodes` with the rows that they can share, or None if there are none."""
    rows = find_shared_rows(scop, nodes)
    return FusionGroup(tuple(nodes), rows) if rows else None


def _are_connected(before: Sequence[ScopStatement], last: ScopStatement) -> bool:
    written = {w.tensor for n in before for w in n.writes}
    if any(check_reads(s) & written for s in last.statements):
        return False  # the checks of its subscripts must run in between
    return any(set(last.tensors) & set(n.tensors) for n in before)
