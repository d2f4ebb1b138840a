"""Promotion in the schedule tree of a kernel: which scopes there are, and in what order they are looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import islpy as isl

from ...errors import CannotLower
from ...loop_ir.nodes import Buffer
from ...options import MappingOptions
from ...target import GpuTarget
from ...tc_lang.function import BoundFunction
from ..scop import CONTEXT
from .mapping import ELEMENTS, SHARED, TILE, WRITTEN_OUT, KernelPlan
from .promote import Promotion, Surroundings, promote_shared, room_of
from .references import by_coordinates, references_of
from .registers import promote_registers
from .threads import instances_of, threads_of


def promote(
    schedule: isl.Schedule,
    plain: isl.Schedule,
    plan: KernelPlan,
    function: BoundFunction,
    tensors: Mapping[str, Buffer],
    local: frozenset[str],
    shared: Sequence[Buffer],
    options: MappingOptions,
    target: GpuTarget,
) -> tuple[isl.Schedule, Promotion]:
    """The schedule of a kernel with copies, and what they promote.

    Scopes are the marks of the tree. At "tile" goes what one leaf writes for another, to registers where each thread
    reads what it wrote. At "elements" go accumulators, and what all tiles of terms share; at "shared" the rest that
    threads share, at "registers" the rest that a thread reuses.

    Args:
        plain: the schedule without what threads do together: isl cannot say when the statements of a tree with
            extensions run.
        tensors: the buffers of those that may be promoted. local: those that nothing reads after the kernel.
        shared: buffers in shared memory that the kernel has already.
    """
    if not (options.shared_memory or options.private_memory):
        return schedule, Promotion()
    every = by_coordinates(references_of(plan.units, function, CONTEXT))
    instances = instances_of(plain)
    around = Surroundings(
        references=tuple(r for r in every if (r.lookup.tensor if r.lookup else r.tensor) in tensors),
        tensors=tensors,
        local=local,
        order=plain.get_map().project_out_all_params(),
        threads=threads_of(instances, plan.launch),
        instances=instances,
        launch=plan.launch,
        blocked=frozenset(u.name for leaf in plan.leaves if leaf.blocked for u in leaf.units),
        budget=(options.max_shared_memory or target.shared) - sum(room_of(b) for b in shared),
    )
    crossing = around.written & _crossing(plan)
    done = Promotion()
    if options.private_memory:
        schedule, done = _registers(schedule, TILE, around, done, crossing)
    if options.shared_memory:
        schedule, done = _shared(schedule, TILE, around, done, only=crossing)
    if options.private_memory:
        schedule, done = _registers(schedule, ELEMENTS, around, done)
    if options.shared_memory:  # what no loop over tiles of terms changes is copied before these
        schedule, done = _shared(schedule, ELEMENTS, around, done, steady=SHARED)
        schedule, done = _shared(schedule, SHARED, around, done)
    if options.private_memory:
        schedule, done = _registers(schedule, WRITTEN_OUT, around, done)
    return schedule, done


def _crossing(plan: KernelPlan) -> frozenset[str]:
    """The tensors that several leaves touch."""
    touched = [{t for n in leaf.leaf.nodes for t in n.tensors} for leaf in plan.leaves]
    return frozenset(t for k, mine in enumerate(touched) for t in mine if any(t in other for other in touched[:k]))


def _shared(
    schedule: isl.Schedule,
    mark: str,
    around: Surroundings,
    done: Promotion,
    *,
    only: frozenset[str] | None = None,
    steady: str = "",
) -> tuple[isl.Schedule, Promotion]:
    """Promotion at the marks of a name, outer ones first: copies at inner ones then start from what is there already.

    only: the tensors that may be promoted; None for all. steady: of boxes, those that are the same at all marks of
    that name below; empty for all.
    """
    number = 0
    while (node := _marked(schedule, mark, number)) is not None:
        with suppress(CannotLower):  # the tensors stay where they are
            inner = _scopes_below(node, steady) if steady else ()
            node, done = promote_shared(node, around, done, only=only, inner=inner)
            schedule = node.get_schedule()
        number += 1
    return schedule, done


def _scopes_below(node: isl.ScheduleNode, mark: str) -> tuple[isl.UnionMap, ...]:
    """The scopes of the marks of a name below `node`."""
    found: list[isl.UnionMap] = []

    def visit(below: isl.ScheduleNode) -> bool:
        if is_mark(below, mark):
            found.append(below.get_prefix_schedule_relation())
        return True

    node.foreach_descendant_top_down(visit)
    return tuple(found)


def _registers(
    schedule: isl.Schedule, mark: str, around: Surroundings, done: Promotion, only: frozenset[str] | None = None
) -> tuple[isl.Schedule, Promotion]:
    unrolled = _unrolled(schedule, around)
    number = 0
    while (node := _marked(schedule, mark, number)) is not None:
        with suppress(CannotLower):
            node, done = promote_registers(node, around, done, unrolled, only=only)
            schedule = node.get_schedule()
        number += 1
    return schedule, done


def _unrolled(schedule: isl.Schedule, around: Surroundings) -> isl.UnionMap:
    """`S[i] -> [q]`: the loops below the marks "registers"."""
    total = isl.UnionMap.empty(around.threads.get_space())
    number = 0
    while (node := _marked(schedule, WRITTEN_OUT, number)) is not None:
        below = node.child(0)
        if is_band(below):
            total = total.union(below.band_get_partial_schedule_union_map())
        number += 1
    return total


def is_band(node: isl.ScheduleNode) -> bool:
    kind: object = node.get_type()
    return kind == isl.schedule_node_type.band


def is_mark(node: isl.ScheduleNode, name: str) -> bool:
    kind: object = node.get_type()
    return kind == isl.schedule_node_type.mark and node.mark_get_id().get_name() == name


def _marked(schedule: isl.Schedule, name: str, number: int) -> isl.ScheduleNode | None:
    """The mark of that name with so many of the same name before it."""
    found: list[isl.ScheduleNode] = []

    def visit(node: isl.ScheduleNode) -> bool:
        if is_mark(node, name):
            found.append(node.copy())
        return True

    schedule.foreach_schedule_node_top_down(visit)
    return found[number] if number < len(found) else None
