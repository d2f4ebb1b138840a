"""Promotion in the schedule tree of a kernel: which scopes there are, and in what order they are looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import islpy as isl

from ...loop_ir.nodes import Buffer
from ...options import MappingOptions
from ...target import GpuTarget
from ...tc_lang.function import BoundFunction
from ..scop import CONTEXT
from .mapping import KernelPlan
from .promote import Promotion, Surroundings, promote_shared, room_of
from .references import references_of
from .threads import threads_of

SHARED_MARK = "shared"
TILE_MARK = "tile"


def promote(
    schedule: isl.Schedule,
    plan: KernelPlan,
    function: BoundFunction,
    tensors: Mapping[str, Buffer],
    local: frozenset[str],
    shared: Sequence[Buffer],
    options: MappingOptions,
    target: GpuTarget,
) -> tuple[isl.Schedule, Promotion]:
    """The schedule of a kernel with copies, and what they promote.

    Scopes are the marks of the tree: "tile" is below the loops over tiles that all leaves share, where what one leaf
    writes for another is kept; "shared" below all loops over tiles of a leaf.

    Args:
        tensors: the buffers of those that may be promoted. local: those that nothing reads after the kernel.
        shared: buffers in shared memory that the kernel has already.
    """
    if not options.shared_memory:
        return schedule, Promotion()
    every = references_of(plan.units, function, CONTEXT)
    around = Surroundings(
        references=tuple(r for r in every if r.tensor in tensors),
        tensors=tensors,
        local=local,
        order=schedule.get_map().project_out_all_params(),
        threads=threads_of(schedule, plan.launch),
        launch=plan.launch,
        budget=(options.max_shared_memory or target.shared) - sum(room_of(b) for b in shared),
    )
    done = Promotion()
    for mark, only in ((TILE_MARK, around.written), (SHARED_MARK, None)):
        number = 0
        while (node := _marked(schedule, mark, number)) is not None:
            node, done = promote_shared(node, around, done, only=only)
            schedule = node.get_schedule()
            number += 1
    return schedule, done


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
