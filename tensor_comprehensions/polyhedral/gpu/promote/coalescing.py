"""The strides between neighboring threads at a reference, which determine coalescing and bank conflicts.

Only profitability depends on them, so a single sample is examined: an instance of thread 0, and the instances of its
neighbors along x, y and z in the same iteration of their loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import islpy as isl

from ....loop_ir.nodes import Launch
from ..tree.schedule_tree import THREAD_IDS
from .footprint import IN, OUT, PARAM, SET, Reference

# Candidate distances between the instances of neighboring threads: 1, or the length of a vector.
STRIDES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ThreadStrides:
    """The strides of an access between neighboring threads.

    moves: for x, y and z, the difference of subscripts in each dimension of the tensor; None if there is no neighbor.
    """

    moves: tuple[tuple[int, ...] | None, ...]

    @property
    def is_coalesced(self) -> bool:
        """Whether neighboring threads along x access neighboring elements (or vectors), or all the same element."""
        along = self.moves[0]
        if along is None or not any(along):
            return True
        *rest, last = along
        return not any(rest) and abs(last) in STRIDES


def instances_of(schedule: isl.Schedule) -> isl.UnionSet:
    """`S[i]`: the instances of the block and thread that are parameters of the set."""
    parts: list[isl.UnionSet] = []

    def visit(node: isl.ScheduleNode) -> bool:
        if not node.has_children():
            parts.append(node.get_domain())
        return True

    schedule.foreach_schedule_node_top_down(visit)
    return reduce(lambda a, b: a.union(b), parts)


def threads_of(instances: isl.UnionSet, launch: Launch) -> isl.UnionMap:
    """`S[i] -> [t0, t1, t2]`: the thread that runs each of `instances`."""
    parts: list[isl.UnionMap] = []
    instances.foreach_set(lambda s: parts.append(isl.UnionMap.from_map(_map_instances_to_threads(s, launch))))
    return reduce(lambda a, b: a.union(b), parts)


def _map_instances_to_threads(instances: isl.Set, launch: Launch) -> isl.Map:
    result = isl.Map.from_domain(instances)
    for name, count in zip(THREAD_IDS, launch.block, strict=True):
        position, k = result.find_dim_by_name(PARAM, name), result.dim(OUT)
        result = result.add_dims(OUT, 1) if position < 0 else result.move_dims(OUT, k, PARAM, position, 1)
        least, most = (isl.Val(v, result.get_ctx()) for v in (0, count - 1))
        result = result.lower_bound_val(OUT, k, least).upper_bound_val(OUT, k, most)
    return result


def fix_dim(relation: isl.Map, kind: isl.dim_type, k: int, value: int) -> isl.Map:
    return relation.fix_val(kind, k, isl.Val(value, relation.get_ctx()))


@dataclass(frozen=True, slots=True)
class NeighborInstances:
    """`at`: an instance of thread 0; `there`: those of its neighbors along x, y and z, or None."""

    at: tuple[int, ...]
    there: tuple[tuple[int, ...] | None, ...]


def thread_strides(
    reference: Reference, threads: isl.UnionMap, walks: dict[isl.Set, NeighborInstances | None]
) -> ThreadStrides | None:
    """The strides of `reference` in its tensor from thread to thread; None if they are unknown.

    walks: a cache of neighboring instances, by the domain of references.
    """
    if not reference.affine:
        return None
    instances = reference.relation.domain()
    if instances not in walks:
        walks[instances] = _find_neighbor_instances(instances, threads)
    walk = walks[instances]
    if walk is None:
        return None
    first = _find_unique_image(reference.relation, walk.at)
    return ThreadStrides(
        tuple(
            _subtract_coordinates(first, None if t is None else _find_unique_image(reference.relation, t))
            for t in walk.there
        )
    )


def _subtract_coordinates(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if a is None or b is None else tuple(y - x for x, y in zip(a, b, strict=True))


def _find_neighbor_instances(instances: isl.Set, threads: isl.UnionMap) -> NeighborInstances | None:
    mine = threads.intersect_domain(isl.UnionSet.from_set(instances))
    if mine.is_empty():
        return None
    who = isl.Map.from_union_map(mine)
    who = who.project_out(PARAM, 0, who.dim(PARAM))
    first = who
    for k in range(len(THREAD_IDS)):
        first = fix_dim(first, OUT, k, 0)
    start = first.domain().coalesce()
    if start.is_empty():
        return None
    at = _get_point_coordinates(start.lexmin())
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for d in range(len(at)):
        for stride in STRIDES:
            there = tuple(x + stride * (k == d) for k, x in enumerate(at))
            if (thread := _find_unique_image(who, there)) is not None:
                found.setdefault(thread, there)
    directions = (tuple(int(k == n) for k in range(len(THREAD_IDS))) for n in range(len(THREAD_IDS)))
    return NeighborInstances(at, tuple(found.get(n) for n in directions))


def _get_point_coordinates(point: isl.Set) -> tuple[int, ...]:
    return tuple(point.dim_min_val(k).to_python() for k in range(point.dim(SET)))


def _find_unique_image(relation: isl.Map, at: Sequence[int]) -> tuple[int, ...] | None:
    """The image of the point `at` under `relation` if it is unique, else None."""
    for k, x in enumerate(at):
        relation = fix_dim(relation, IN, k, x)
    image = relation.range()
    if image.is_empty():
        return None
    least = image.lexmin()
    return _get_point_coordinates(least) if image.is_subset(least) else None
