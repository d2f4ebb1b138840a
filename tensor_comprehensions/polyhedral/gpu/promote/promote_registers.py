"""Promotion to registers: private accumulators and reused tiles of a thread.

A scope is examined for one thread at a time. A group is promoted if no other thread accesses the elements that it
writes, if elements are reused or loaded in vectors, and if every subscript is constant after the loops below a mark
"registers" are unrolled. Copies are extensions of the tree like those to shared memory, but private to each thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import islpy as isl

from ....core.dtypes import FLOAT32
from ....core.internal_names import internal_name
from ....loop_ir import build
from ....loop_ir.nodes import Buffer, Space, Type
from ....thresholds import GPU_MAX_ELEMENT_REGISTERS
from .copies import indirect_copy_lanes
from .footprint import Reference, ReferenceGroup, reference_groups, strided_bounding_box
from .promote_shared import (
    CopyStatement,
    Promoted,
    Promotion,
    PromotionContext,
    band_prefix,
    copy_statement,
    fresh_buffer_name,
    graft,
    indirect_source,
    live_in_elements,
    written_elements,
)


def promote_registers(
    node: isl.ScheduleNode,
    around: PromotionContext,
    done: Promotion,
    *,
    only: frozenset[str] | None = None,
) -> tuple[isl.ScheduleNode, Promotion]:
    """`node` with copies around its subtree, and `done` extended by their promotions.

    References to shared buffers are promoted from these. only: the tensors that may be promoted; None for all.
    """
    sources = [_redirect_to_shared(r, done) for r in around.references]
    candidates = [r for r in sources if r is not None and (only is None or r.tensor in only)]
    if not candidates:
        return node, done
    scope = node.get_prefix_schedule_relation().intersect_domain(around.instances)
    prefix = node.get_prefix_schedule_multi_union_pw_aff()
    if only is not None:  # results that one leaf passes to another: each thread must read its own
        own = {t for t in dict.fromkeys(r.tensor for r in candidates) if _is_private(t, candidates, scope, around)}
        candidates = [r for r in candidates if r.tensor in own]
    tensors = {**around.tensors, **{b.name: b for b in done.buffers}}
    room = GPU_MAX_ELEMENT_REGISTERS - sum(prod(b.shape) for b in done.buffers if b.space is Space.REGISTER)
    chosen: list[tuple[ReferenceGroup, Buffer]] = []
    for tensor, found in reference_groups(candidates, scope, strided_bounding_box).items():
        for group in found:
            origin = tensor.partition(".")[0]
            memory = tensors[group.lookup.tensor if group.lookup else tensor]
            name = fresh_buffer_name(internal_name(origin, "own"), done, chosen)
            buffer = build.buffer(name, memory.type.dtype, group.box.shape, Space.REGISTER)
            gains = group.box.size <= room and (_is_reused(group, scope) or _in_vectors(group, buffer, memory, scope))
            if not gains or not _can_live_in_registers(group, candidates, scope, prefix, around):
                continue
            chosen.append((group, buffer))
            room -= group.box.size
    if not chosen:
        return node, done
    accesses = {
        r.tag: Promoted(buffer, r.element(), band_prefix(prefix, r), group.box)
        for group, buffer in chosen
        for r in group.references
    }
    number = len(done.stagings)
    known = {**done.accesses, **accesses}
    node, stagings, dead = _insert_copies(node, scope, around, chosen, tensors, known, number)
    return node, done.merge(Promotion(tuple(b for _, b in chosen), accesses, stagings, dead))


def _redirect_to_shared(reference: Reference, done: Promotion) -> Reference | None:
    """`reference`, redirected to the shared buffer if it was promoted to one; None if it is in a register already."""
    promoted = done.accesses.get(reference.tag)
    if promoted is None:
        return reference
    if promoted.buffer.space is Space.REGISTER:
        return None
    relation = promoted.relation().intersect_domain(reference.relation.domain())
    return Reference(reference.tag, promoted.buffer.name, relation, reference.reads, reference.writes)


def _can_live_in_registers(
    group: ReferenceGroup,
    references: Sequence[Reference],
    scope: isl.UnionMap,
    prefix: isl.MultiUnionPwAff,
    around: PromotionContext,
) -> bool:
    """Whether no other thread accesses the written elements, and all subscripts are constant after unrolling."""
    if group.writes and not _is_private(group.tensor, references, scope, around):
        return False
    return all(_has_static_subscripts(r, group, scope, prefix, around.unrolled_loops) for r in group.references)


def _is_reused(group: ReferenceGroup, scope: isl.UnionMap) -> bool:
    """Whether a thread accesses elements repeatedly."""
    uses = (scope.range_product(isl.UnionMap.from_map(r.relation)) for r in group.references)
    return len(group.references) > 1 or not all(u.is_injective() for u in uses)


def _in_vectors(group: ReferenceGroup, buffer: Buffer, memory: Buffer, scope: isl.UnionMap) -> bool:
    """Whether the copy would load or store vectors."""
    points = isl.Set.from_union_set(scope.range())
    if group.lookup is not None:
        return indirect_copy_lanes(memory, group, points) > 1
    return copy_statement(group, buffer, memory, points, group.footprint).lanes > 1


def _is_private(tensor: str, references: Sequence[Reference], scope: isl.UnionMap, around: PromotionContext) -> bool:
    """Whether each element of `tensor` that references below the scope access is accessed by one thread only."""
    everyone = scope.project_out_all_params()
    who = isl.UnionMap.empty(scope.get_space())
    for r in references:
        if r.tensor == tensor:
            uses = everyone.range_product(isl.UnionMap.from_map(r.relation.project_out_all_params()))
            who = who.union(uses.reverse().apply_range(around.threads))
    return bool(who.is_single_valued())


def _has_static_subscripts(
    reference: Reference,
    group: ReferenceGroup,
    scope: isl.UnionMap,
    prefix: isl.MultiUnionPwAff,
    unrolled: isl.UnionMap,
) -> bool:
    """Whether the unrolled loops alone determine the position in the buffer.

    This must hold even at instances whose access a condition prevents, because code is generated for them, too.
    """
    every = isl.UnionSet.from_set(isl.Set.universe(reference.relation.domain().get_space()))
    mine = unrolled.intersect_domain(every)
    if group.box.size == 1:
        return True
    if mine.is_empty():
        return False
    place = Promoted(_PLACE, reference.element(), band_prefix(prefix, reference), group.box).relation()
    here = scope.intersect_domain(every).domain()
    places = place.intersect_domain(isl.Set.from_union_set(here)).project_out_all_params()
    loops = isl.Map.from_union_map(mine).project_out_all_params()
    return bool(loops.reverse().apply_range(places).is_single_valued())


_PLACE = Buffer(internal_name("place"), Type(FLOAT32), (), (), Space.REGISTER)


def _insert_copies(
    node: isl.ScheduleNode,
    scope: isl.UnionMap,
    around: PromotionContext,
    chosen: Sequence[tuple[ReferenceGroup, Buffer]],
    tensors: Mapping[str, Buffer],
    promoted: Mapping[str, Promoted],
    number: int,
) -> tuple[isl.ScheduleNode, Mapping[str, CopyStatement], frozenset[str]]:
    """`node` with extension statements that copy in and out, their meaning, and the tensors that need no memory."""
    points = isl.Set.from_union_set(scope.range())
    reading, writing, dead = [], [], set()
    elsewhere = around.tensors_accessed_elsewhere(scope, promoted)
    for group, buffer in chosen:
        tensor = tensors[group.lookup.tensor if group.lookup else group.tensor]
        wanted = live_in_elements(group, scope, around.order) if group.writes else group.footprint
        if group.reads and wanted is not None:
            reading.append(
                copy_statement(group, buffer, tensor, points, wanted, indirect_source(group, around, promoted))
            )
        elif group.tensor in around.local - elsewhere:
            dead.add(group.tensor)
            continue
        if group.writes:
            writing.append(copy_statement(group, buffer, tensor, points, written_elements(group, scope)))
    found: dict[str, CopyStatement] = {}
    for copies, into in ((reading, True), (writing, False)):
        if copies:
            name = f"copy_{'in' if into else 'out'}_{number}"
            found[name] = CopyStatement(tuple(copies), into, before=False, after=False, private=True)
            node = graft(node, name, points, after=not into)
    return node, found, frozenset(dead)
