"""Place barriers between leaves that conflict across threads.

Rows of a kernel are coincident, so no dependence leaves a tile, and only the leaves inside a tile need ordering. Every
pair of leaves with a conflict across threads needs a barrier between them; a warp barrier suffices if the conflicts
stay in warps. Dynamic programming finds the fewest block barriers, then the fewest warp barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import prod

import islpy as isl

from ....machine import WARP_THREADS
from ...scop.scop import CONTEXT, Scop
from ..plan.mapping import KernelPlan, NestPlan, thread_values
from ..plan.statement_phases import Unit
from ..promote.footprint import Reference
from ..promote.references import references_of


class SyncLevel(IntEnum):
    """The group of threads that must synchronize."""

    NONE = 0
    WARP = 1
    BLOCK = 2


@dataclass(frozen=True, slots=True)
class Wait:
    """A required barrier of at least `level` between the leaves `before` and `after`, given by position."""

    before: int
    after: int
    level: SyncLevel


def kernel_barriers(scop: Scop, plan: KernelPlan) -> tuple[SyncLevel, ...]:
    """For each leaf, the level of the barrier before it."""
    return place_barriers(len(plan.leaves), required_barriers(scop, plan))


def required_barriers(scop: Scop, plan: KernelPlan) -> tuple[Wait, ...]:
    """The pairs of leaves that conflict across threads, with the level that they need."""
    if prod(plan.launch.block) == 1 or len(plan.leaves) == 1:
        return ()
    relations = [_Relations.of(scop, plan, leaf) for leaf in plan.leaves]
    found = []
    for after in range(1, len(plan.leaves)):
        for before in reversed(range(after)):
            level = _find_sync_level(relations[before], relations[after], plan)
            if level is not SyncLevel.NONE:
                found.append(Wait(before, after, level))
    return tuple(found)


def place_barriers(count: int, wanted: Sequence[Wait]) -> tuple[SyncLevel, ...]:
    """For each of `count` consecutive leaves, the level of the barrier before it, so that `wanted` are satisfied.

    This uses the fewest block barriers, then the fewest warp barriers, as early as possible.
    """

    @cache
    def best(k: int, block: int, either: int) -> tuple[tuple[int, int], tuple[SyncLevel, ...]]:
        """(cost, levels) for leaves from `k` on. block: the last leaf with a block barrier before it; either: with any
        barrier; -1: none."""
        if k == count:
            return (0, 0), ()
        options = []
        for level in SyncLevel:
            last = k if level is SyncLevel.BLOCK else block
            any_ = k if level is not SyncLevel.NONE else either
            if all((last if w.level is SyncLevel.BLOCK else any_) > w.before for w in wanted if w.after == k):
                (blocks, warps), rest = best(k + 1, last, any_)
                cost = blocks + (level is SyncLevel.BLOCK), warps + (level is SyncLevel.WARP)
                options.append((cost, (level, *rest)))
        return min(options, key=lambda o: (o[0], tuple(-x for x in o[1])))

    return best(0, -1, -1)[1] if count else ()


@dataclass(frozen=True, slots=True, eq=False)
class _Relations:
    """The accesses of one leaf, and by unit the tile and thread of instances: `S[i] -> [tile]` and `[t0, t1, t2]`."""

    references: tuple[Reference, ...]
    tiles: dict[str, isl.Map]
    threads: dict[str, isl.Map]

    @staticmethod
    def of(scop: Scop, plan: KernelPlan, leaf: NestPlan) -> _Relations:
        references = references_of(leaf.units, scop.function, CONTEXT)
        tiles = {u.name: _make_instance_map(u, [plan.tile(k, u) for k in range(len(plan.sizes))]) for u in leaf.units}
        threads = {u.name: _make_instance_map(u, thread_values(plan, leaf, u)) for u in leaf.units}
        return _Relations(references, tiles, threads)


def _make_instance_map(unit: Unit, values: Sequence[str]) -> isl.Map:
    return isl.Map(f"{{ {unit.instance} -> [{', '.join(f'({v})' for v in values)}] }}", CONTEXT)


def _find_sync_level(first: _Relations, second: _Relations, plan: KernelPlan) -> SyncLevel:
    """The level of synchronization that the conflicts between two leaves need."""
    level = SyncLevel.NONE
    for a in first.references:
        for b in second.references:
            if a.tensor == b.tensor and (a.writes or b.writes) and level is not SyncLevel.BLOCK:
                level = max(level, _conflict_sync_level(a, b, first, second, plan))
    return level


def _conflict_sync_level(
    a: Reference, b: Reference, first: _Relations, second: _Relations, plan: KernelPlan
) -> SyncLevel:
    one, other = a.tag.rpartition(".")[0], b.tag.rpartition(".")[0]
    together = first.tiles[one].apply_range(second.tiles[other].reverse())
    conflicts = a.relation.apply_range(b.relation.reverse()).intersect(together)
    moved = conflicts.apply_domain(first.threads[one]).apply_range(second.threads[other])
    if _is_identity(moved):
        return SyncLevel.NONE
    x, y, _ = plan.launch.block
    warp = isl.Map(f"{{ [t0, t1, t2] -> [floor((t0 + {x} * (t1 + {y} * t2))/{WARP_THREADS})] }}", CONTEXT)
    return SyncLevel.WARP if _is_identity(moved.apply_domain(warp).apply_range(warp)) else SyncLevel.BLOCK


def _is_identity(moved: isl.Map) -> bool:
    """Whether the relation only contains pairs of equal elements."""
    return bool(moved.is_subset(isl.Map.identity(moved.get_space())))
