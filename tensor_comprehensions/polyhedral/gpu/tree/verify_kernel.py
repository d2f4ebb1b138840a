"""Verify the final tree of a kernel with isl; enabled in tests and with TC_VERIFY.

A conflict is a pair of instances that access the same element, at least one of them writing. A kernel is correct if
every conflict stays in one block, keeps the order of the program, and is either inside one thread or separated by a
barrier that all participating threads reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import islpy as isl

from ....core.errors import InternalError
from ....machine import WARP_THREADS
from ...scop.scop import CONTEXT, Scop
from ..plan.mapping import KernelPlan, NestPlan, thread_values
from ..plan.statement_phases import Phase, Unit
from ..promote.footprint import Reference
from ..promote.references import references_of
from .barrier_placement import SyncLevel
from .schedule_tree import (
    THREAD_IDS,
    Band,
    Collective,
    Empty,
    MappingFilter,
    Mark,
    SequenceNode,
    Tree,
    tree_to_isl,
    without_collectives,
)


def check_kernel(scop: Scop, plan: KernelPlan, tree: Tree, levels: Sequence[SyncLevel]) -> None:
    """Raise InternalError unless `tree`, with barriers of `levels` before the leaves, executes `plan` correctly."""
    _check_tree_structure(tree, plan, mapped=False)
    if any(leaf.cooperative and leaf.leaf.interleaves_reductions for leaf in plan.leaves):
        raise InternalError("threads add terms of several elements to one register")
    found = references_of(plan.units, scop.function, CONTEXT)
    order = tree_to_isl(CONTEXT, plan.units, without_collectives(tree)).get_map().project_out_all_params()
    places = {u.name: (n, leaf, u) for n, leaf in enumerate(plan.leaves) for u in leaf.units}
    position = {u.name: k for k, u in enumerate(plan.units)}
    for a in found:
        for b in found:
            if a.tensor != b.tensor or not (a.writes or b.writes):
                continue
            first, second = (places[r.tag.rpartition(".")[0]] for r in (a, b))
            if position[first[2].name] > position[second[2].name]:
                continue
            conflicts = _make_conflict_map(a, b, first[2], second[2])
            if conflicts.is_empty():
                continue
            _in_one_block(conflicts, plan, first[2], second[2])
            if first[2].phase is not Phase.UPDATE or first[2] != second[2]:  # terms may be combined in any order
                _verify_conflict_order(conflicts, order)
            _verify_sync(conflicts, plan, first, second, levels)


def _make_conflict_map(a: Reference, b: Reference, first: Unit, second: Unit) -> isl.Map:
    """The pairs of instances that access the same element, the one that is earlier in the program first."""
    pairs = a.relation.apply_range(b.relation.reverse())
    if first == second:
        pairs = pairs.intersect(
            isl.Map.lex_lt(pairs.get_space().domain())
            .set_tuple_id(isl.dim_type.in_, pairs.get_tuple_id(isl.dim_type.in_))
            .set_tuple_id(isl.dim_type.out, pairs.get_tuple_id(isl.dim_type.out))
        )
    return pairs


def _in_one_block(conflicts: isl.Map, plan: KernelPlan, first: Unit, second: Unit) -> None:
    """Require that no conflict leaves its tile, and so its block."""
    rows = range(len(plan.sizes))
    tiles = [_make_instance_map(u, [plan.tile(k, u) for k in rows]) for u in (first, second)]
    moved = conflicts.apply_domain(tiles[0]).apply_range(tiles[1])
    if not _is_identity(moved):
        raise InternalError(f"blocks conflict: {_sample_text(conflicts)}")


def _verify_conflict_order(conflicts: isl.Map, order: isl.UnionMap) -> None:
    times = isl.UnionMap.from_map(conflicts).apply_domain(order).apply_range(order)
    if times.is_empty():
        raise InternalError(f"instances have no time: {_sample_text(conflicts)}")
    moved = isl.Map.from_union_map(times)
    if not moved.is_subset(isl.Map.lex_lt(moved.get_space().domain())):
        raise InternalError(f"a conflict runs backwards in time: {_sample_text(conflicts)}")


Place = tuple[int, NestPlan, Unit]


def _verify_sync(
    conflicts: isl.Map, plan: KernelPlan, first: Place, second: Place, levels: Sequence[SyncLevel]
) -> None:
    """Require sufficient barriers between leaves with conflicts across threads, and no such conflicts inside a leaf."""
    threads = [_make_instance_map(unit, thread_values(plan, leaf, unit)) for _, leaf, unit in (first, second)]
    moved = conflicts.apply_domain(threads[0]).apply_range(threads[1])
    if _is_identity(moved):
        return
    between = max(levels[first[0] + 1 : second[0] + 1], default=SyncLevel.NONE)
    x, y, _ = plan.launch.block
    warp = isl.Map(f"{{ [t0, t1, t2] -> [floor((t0 + {x} * (t1 + {y} * t2))/{WARP_THREADS})] }}", CONTEXT)
    needed = SyncLevel.WARP if _is_identity(moved.apply_domain(warp).apply_range(warp)) else SyncLevel.BLOCK
    if between < needed:
        raise InternalError(f"threads conflict without a barrier between them: {_sample_text(conflicts)}")


def _check_tree_structure(tree: Tree, plan: KernelPlan, *, mapped: bool) -> None:
    """Require that every path maps threads once, and that loops around collectives are the same for all threads."""
    match tree:
        case Empty():
            if not mapped and max(plan.launch.block) > 1:
                raise InternalError("a statement is mapped to no thread")
        case Mark(child=child):
            _check_tree_structure(child, plan, mapped=mapped)
        case Band(units=units, child=child):
            if not units:
                raise InternalError("a band without instances")
            _check_tree_structure(child, plan, mapped=mapped)
        case MappingFilter(values=values, child=child):
            here = any(name in THREAD_IDS for name, _, _ in values)
            if here and mapped:
                raise InternalError("a statement is mapped to threads twice")
            _check_tree_structure(child, plan, mapped=mapped or here)
        case SequenceNode(children=children):
            for c in children:
                if isinstance(c, Collective):
                    if mapped:
                        raise InternalError(f"{c.name} is not reached by all threads")
                elif not c[0]:
                    raise InternalError("a filter without instances")
                else:
                    _check_tree_structure(c[1], plan, mapped=mapped)


def _make_instance_map(unit: Unit, values: Sequence[str]) -> isl.Map:
    return isl.Map(f"{{ {unit.instance} -> [{', '.join(f'({v})' for v in values)}] }}", CONTEXT)


def _is_identity(moved: isl.Map) -> bool:
    return bool(moved.is_subset(isl.Map.identity(moved.get_space())))


def _sample_text(conflicts: isl.Map) -> str:
    return str(conflicts.sample())
