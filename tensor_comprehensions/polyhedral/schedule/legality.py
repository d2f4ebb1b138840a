"""Prove with isl that a schedule respects the program: every dependence goes forward in time.

Instances of the statements, including reduced indices, are mapped to the times at which the emitted loops run them.
Dependences must be lexicographically increasing in time, and must not cross iterations of parallel loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import islpy as isl

from ...core.errors import InternalError
from ...structured.memory_bound.nest_plan import MemoryBoundPlan
from ..scop.isl_affine import isl_name
from ..scop.scop import CONTEXT, Scop, ScopStatement, domain_of, instance_tuple, union_map
from .fusion import FusionGroup
from .loop_nest import DimKind, LoopNest


@dataclass(frozen=True, slots=True)
class ScheduledGroup:
    """A group with the tile sizes of its rows and its nests in order.

    movement: the plan of its only nest, if the user's schedule determines it.
    """

    group: FusionGroup
    sizes: tuple[int, ...]
    leaves: tuple[LoopNest, ...]
    movement: MemoryBoundPlan | None = None


def check_legal(scop: Scop, schedule: Sequence[ScheduledGroup]) -> None:
    """Raise InternalError, with a violated dependence, unless `schedule` is legal."""
    sums = {n.name for g in schedule for n in g.group.nodes if g.group.adds_up(n)}
    nodes = tuple(part for n in scop.nodes for part in (_split_sum(n) if n.name in sums else (_include_reductions(n),)))
    dependences = ordered = (scop if nodes == scop.nodes else Scop(scop.function, nodes)).dependences
    if dependences.is_empty():
        return
    for node in nodes:  # the terms of a reduction may run in any order, but not in parallel
        if node.cluster is None and node.statements[0].reduction is not None:
            own = domain_of((node,))
            ordered = ordered.subtract(ordered.intersect_domain(own).intersect_range(own))
    times = _schedule_to_time_map(nodes, schedule)
    distance = ordered.apply_domain(times).apply_range(times)
    _check_dependence_subset(distance, _make_lex_order_map(_count_time_dims(schedule)), "runs backwards in time")
    for parallel in _parallel_maps(nodes, schedule):
        moved = dependences.apply_domain(parallel).apply_range(parallel)
        _check_dependence_subset(moved, _identity_on(moved), "crosses parallel iterations")


def _include_reductions(node: ScopStatement) -> ScopStatement:
    """The node with its reduced indices in the domain; clusters are unchanged, as they reduce internally."""
    if node.cluster is not None:
        return node
    (s,) = node.statements
    return replace(node, statements=(replace(s, num_free=len(s.indices)),))


def _split_sum(node: ScopStatement) -> tuple[ScopStatement, ...]:
    """A sum over a serial row, and its epilogue, which runs after the last tile."""
    update, *finish = node.statements
    summed = _include_reductions(replace(node, cluster=None, statements=(update,)))
    return (summed, ScopStatement(_finish_name(node), tuple(finish))) if finish else (summed,)


def _finish_name(node: ScopStatement) -> str:
    return f"{node.name}_finish"


def _check_dependence_subset(actual: isl.UnionMap, allowed: isl.UnionMap, problem: str) -> None:
    if not actual.is_subset(allowed):
        raise InternalError(f"a dependence {problem}: {actual.subtract(allowed)}")


def _count_time_dims(schedule: Sequence[ScheduledGroup]) -> int:
    return 3 + max((len(s.sizes) + len(leaf.dims) for s in schedule for leaf in s.leaves), default=0)


def _schedule_to_time_map(nodes: Sequence[ScopStatement], schedule: Sequence[ScheduledGroup]) -> isl.UnionMap:
    depth = _count_time_dims(schedule)
    pieces = []
    for g, scheduled in enumerate(schedule):
        for position, leaf in enumerate(scheduled.leaves):
            for k, node in enumerate(_nodes_of_leaf(nodes, leaf)):
                time = [
                    str(g),
                    *_make_tile_exprs(scheduled, node),
                    str(position),
                    *_make_point_exprs(scheduled, leaf, node),
                    str(k),
                ]
                pieces.append(_print_schedule_piece(node, time + ["0"] * (depth - len(time))))
        for node, finish in _finished_sums(nodes, scheduled):
            time = [str(g), *_make_tile_exprs(scheduled, node, after_serial_row=True)]
            pieces.append(_print_schedule_piece(finish, time + ["0"] * (depth - len(time))))
    return union_map("{ " + "; ".join(pieces) + " }")


def _parallel_maps(nodes: Sequence[ScopStatement], schedule: Sequence[ScheduledGroup]) -> list[isl.UnionMap]:
    """For each parallel loop nest, the map from instances of its nodes to its parallel coordinates."""
    maps = []
    for g in schedule:
        inside = [(leaf, node) for leaf in g.leaves for node in _nodes_of_leaf(nodes, leaf)]
        pieces = [_print_schedule_piece(node, _shared_tiles(g, node)) for _, node in inside]
        pieces += (_print_schedule_piece(last, _shared_tiles(g, node)) for node, last in _finished_sums(nodes, g))
        maps.append("; ".join(pieces))
        for leaf in g.leaves:
            parallel = [k for k, d in enumerate(leaf.dims) if d.kind is DimKind.PARALLEL]
            pieces = []
            for node in _nodes_of_leaf(nodes, leaf):
                point = _make_point_exprs(g, leaf, node)
                pieces.append(_print_schedule_piece(node, [*_shared_tiles(g, node), *(point[k] for k in parallel)]))
            maps.append("; ".join(pieces))
    return [union_map("{ " + text + " }") for text in maps]


def _nodes_of_leaf(nodes: Sequence[ScopStatement], leaf: LoopNest) -> list[ScopStatement]:
    by_name = {n.name: n for n in nodes}
    return [by_name[n.name] for n in leaf.nodes]


def _finished_sums(
    nodes: Sequence[ScopStatement], scheduled: ScheduledGroup
) -> Iterator[tuple[ScopStatement, ScopStatement]]:
    """The sums over the serial row, with their epilogues."""
    by_name = {n.name: n for n in nodes}
    for node in filter(scheduled.group.adds_up, scheduled.group.nodes):
        if _finish_name(node) in by_name:
            yield node, by_name[_finish_name(node)]


def _make_tile_exprs(scheduled: ScheduledGroup, node: ScopStatement, *, after_serial_row: bool = False) -> list[str]:
    """The tile of each row; after_serial_row: with the number of tiles for the serial row."""
    texts = []
    for k, (row, size) in enumerate(zip(scheduled.group.rows, scheduled.sizes, strict=True)):
        if after_serial_row and k == scheduled.group.serial:
            texts.append(str(-(-row.extent // size)))
            continue
        index, shift = row.index_and_shift(node)
        texts.append(f"floor(({isl_name(index)} + {shift - row.lower})/{size})")
    return texts


def _shared_tiles(scheduled: ScheduledGroup, node: ScopStatement) -> list[str]:
    """The tile indices of the parallel loop over tiles: of all rows except the serial one."""
    return [t for k, t in enumerate(_make_tile_exprs(scheduled, node)) if k != scheduled.group.serial]


def _make_point_exprs(scheduled: ScheduledGroup, leaf: LoopNest, node: ScopStatement) -> list[str]:
    """The values of the leaf's loop variables for an instance of `node`, in terms of the first node's indices."""
    inside = {i.name for i in node.free}
    texts = []
    for dim in leaf.dims:
        shift = 0
        if dim.row is not None:
            row = scheduled.group.rows[dim.row]
            shift = row.index_and_shift(node)[1] - row.index_and_shift(leaf.nodes[0])[1]
        index = dim.index(node)
        texts.append(f"{isl_name(index)} + {shift}" if index in inside else "0")
    return texts


def _print_schedule_piece(node: ScopStatement, time: Sequence[str]) -> str:
    return f"{instance_tuple(node)} -> [{', '.join(time)}]"


def _make_lex_order_map(depth: int) -> isl.UnionMap:
    space = isl.Set(f"{{ [{', '.join(f't{k}' for k in range(depth))}] }}", CONTEXT).get_space()
    return isl.UnionMap.from_map(isl.Map.lex_lt(space))


def _identity_on(moved: isl.UnionMap) -> isl.UnionMap:
    return moved.domain().union(moved.range()).identity()
