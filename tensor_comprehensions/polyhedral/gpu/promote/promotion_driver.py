"""Drive promotion in the schedule tree of a kernel: choose the scopes and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import islpy as isl

from ....core.errors import CannotLower
from ....loop_ir.nodes import Buffer, Space
from ....options import MappingOptions
from ....target import GpuTarget
from ....tc_lang.ir import BoundFunction
from ....thresholds import GPU_UNROLLED_COPY_TRIPS
from ...scop.scop import CONTEXT
from ..plan.mapping import ELEMENTS, PRIVATE_DEPTH, SHARED, SHARED_DEPTH, TILE, WRITTEN_OUT, KernelPlan
from .coalescing import instances_of, threads_of
from .promote_registers import promote_registers
from .promote_shared import Promotion, PromotionContext, promote_shared, shared_bytes_of
from .references import references_of, with_coordinates


def promote_kernel(
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
    """The schedule of a kernel with copies, and the promotions that these implement.

    Scopes are the marks of the tree. At "tile", results that one leaf passes to another are promoted, to registers if
    each thread reads its own. At "elements", accumulators are promoted, and operands that all tiles of terms share; at
    "shared", other operands that threads share; at "registers", others that a thread reuses. If options set the depth,
    there is a single mark.

    Args:
        plain: the schedule without collectives, because isl cannot order the statements of a tree with extensions.
        tensors: the buffers of tensors that may be promoted. local: tensors that are not read after the kernel.
        shared: buffers that the kernel already has in shared memory.
    """
    if not (options.shared_memory or options.private_memory):
        return schedule, Promotion()
    every = with_coordinates(references_of(plan.units, function, CONTEXT))
    instances = instances_of(plain)
    threads = threads_of(instances, plan.launch)
    around = PromotionContext(
        references=tuple(r for r in every if (r.lookup.tensor if r.lookup else r.tensor) in tensors),
        tensors=tensors,
        local=local,
        order=plain.get_map().project_out_all_params(),
        threads=threads,
        instances=instances,
        unrolled_loops=_unrolled_loops(plain, threads.get_space()),
        launch=plan.launch,
        unrolled=GPU_UNROLLED_COPY_TRIPS if options.unroll_copy_shared else 1,
        register_tiled=frozenset(u.name for leaf in plan.leaves if leaf.register_tiled for u in leaf.units),
        budget=(options.max_shared_memory or target.max_shared) - sum(shared_bytes_of(b) for b in shared),
    )
    crossing = around.written_tensors & _tensors_of_several_leaves(plan)
    done = Promotion()
    for mark, number in _collect_marks(schedule):
        for step in _list_promotion_steps(options):
            if step.mark == mark and (crossing or not step.crossing):
                only = crossing if step.crossing else None
                promoted = _promote_shared_step if step.space is Space.SHARED else _promote_registers_step
                with suppress(CannotLower):  # skip this promotion
                    schedule, done = promoted(schedule, step, number, around, done, only)
    return schedule, done


@dataclass(frozen=True, slots=True)
class _PromotionStep:
    """Promotion to `space` at the marks named `mark`.

    crossing: whether to promote only tensors that several leaves access. steady: if given, promote only boxes that are
    the same at all inner marks of this name.
    """

    mark: str
    space: Space
    crossing: bool = False
    steady: str = ""


_SHARED = (
    _PromotionStep(TILE, Space.SHARED, crossing=True),
    _PromotionStep(ELEMENTS, Space.SHARED, steady=SHARED),
    _PromotionStep(SHARED, Space.SHARED),
)
_PRIVATE = (
    _PromotionStep(TILE, Space.REGISTER, crossing=True),
    _PromotionStep(ELEMENTS, Space.REGISTER),
    _PromotionStep(WRITTEN_OUT, Space.REGISTER),
)


def _list_promotion_steps(options: MappingOptions) -> tuple[_PromotionStep, ...]:
    """The promotion steps that `options` request; at each mark, registers come first."""
    shared = _SHARED if options.shared_depth < 0 else (_PromotionStep(SHARED_DEPTH, Space.SHARED),)
    private = _PRIVATE if options.private_depth < 0 else (_PromotionStep(PRIVATE_DEPTH, Space.REGISTER),)
    return (*(private if options.private_memory else ()), *(shared if options.shared_memory else ()))


def _collect_marks(schedule: isl.Schedule) -> list[tuple[str, int]]:
    """The marks, outermost first, so that inner copies start from outer ones.

    Each is (name, number of earlier marks of this name in the tree).
    """
    found: list[tuple[int, str, int]] = []

    def visit(node: isl.ScheduleNode) -> bool:
        kind: object = node.get_type()
        if kind == isl.schedule_node_type.mark:
            name = node.mark_get_id().get_name()
            found.append((node.get_schedule_depth(), name, sum(n == name for _, n, _ in found)))
        return True

    schedule.foreach_schedule_node_top_down(visit)
    return [(name, number) for _, name, number in sorted(found, key=lambda f: f[0])]


def _tensors_of_several_leaves(plan: KernelPlan) -> frozenset[str]:
    """The tensors that several leaves access."""
    touched = [{t for n in leaf.leaf.nodes for t in n.tensors} for leaf in plan.leaves]
    return frozenset(t for k, mine in enumerate(touched) for t in mine if any(t in other for other in touched[:k]))


def _promote_shared_step(
    schedule: isl.Schedule,
    step: _PromotionStep,
    number: int,
    around: PromotionContext,
    done: Promotion,
    only: frozenset[str] | None,
) -> tuple[isl.Schedule, Promotion]:
    node = _find_mark(schedule, step.mark, number)
    inner = _scopes_below(node, step.steady) if step.steady else ()
    node, done = promote_shared(node, around, done, only=only, inner=inner)
    return node.get_schedule(), done


def _scopes_below(node: isl.ScheduleNode, mark: str) -> tuple[isl.UnionMap, ...]:
    """The scopes of the marks named `mark` below `node`."""
    found: list[isl.UnionMap] = []

    def visit(below: isl.ScheduleNode) -> bool:
        if is_mark(below, mark):
            found.append(below.get_prefix_schedule_relation())
        return True

    node.foreach_descendant_top_down(visit)
    return tuple(found)


def _promote_registers_step(
    schedule: isl.Schedule,
    step: _PromotionStep,
    number: int,
    around: PromotionContext,
    done: Promotion,
    only: frozenset[str] | None,
) -> tuple[isl.Schedule, Promotion]:
    node = _find_mark(schedule, step.mark, number)
    node, done = promote_registers(node, around, done, only=only)
    return node.get_schedule(), done


def _unrolled_loops(schedule: isl.Schedule, space: isl.Space) -> isl.UnionMap:
    """`S[i] -> [q]`: the loops below the marks "registers"."""
    total = isl.UnionMap.empty(space)
    for mark in _all_marked(schedule, WRITTEN_OUT):
        total = total.union(mark.get_subtree_schedule_union_map())
    return total


def is_mark(node: isl.ScheduleNode, name: str) -> bool:
    kind: object = node.get_type()
    return kind == isl.schedule_node_type.mark and node.mark_get_id().get_name() == name


def _find_mark(schedule: isl.Schedule, name: str, number: int) -> isl.ScheduleNode:
    """The mark at position `number` among those of this name."""
    return _all_marked(schedule, name)[number]


def _all_marked(schedule: isl.Schedule, name: str) -> list[isl.ScheduleNode]:
    found: list[isl.ScheduleNode] = []

    def visit(node: isl.ScheduleNode) -> bool:
        if is_mark(node, name):
            found.append(node.copy())
        return True

    schedule.foreach_schedule_node_top_down(visit)
    return found
