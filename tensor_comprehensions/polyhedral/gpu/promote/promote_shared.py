"""Promotion to shared memory: boxes that a block's threads reuse, or would read uncoalesced, are copied there first.

A scope is a node of the schedule tree above the mapping to threads. The elements that its instances access are grouped
(`reference_groups`); profitable groups are kept in shared buffers, as many as the budget allows. One statement copies
in before the subtree of the scope, and one copies out after it. Both are extensions of the tree without dimensions of
their own, which all threads of the block execute together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from math import gcd, prod

import islpy as isl

from ....core.decisions import Decision, is_recording, note_decision
from ....core.errors import CannotLower
from ....core.internal_names import internal_name
from ....loop_ir import build
from ....loop_ir.buffer_view import buffer_indices
from ....loop_ir.intrinsics import BARRIER
from ....loop_ir.nodes import Buffer, Expr, Invoke, Launch, Space, Stmt
from ...scop.scop import with_op_limit
from .bank_conflicts import pad_rows
from .coalescing import NeighborInstances, ThreadStrides, thread_strides
from .copies import BlockCopy, IndirectSource, copy_lanes, in_bounds_map, indirect_copy_lanes
from .footprint import OUT, Box, Reference, ReferenceGroup, bounding_box, reference_footprint, reference_groups
from .references import subscript_name

FLOW_OPERATIONS = 100_000
"""Limit of isl operations for finding a group's live-in elements: three times the most in usual kernels."""

BARRIER_STATEMENT = Invoke(BARRIER, ())


@dataclass(frozen=True, slots=True, eq=False)
class Promoted:
    """The replacement of a reference: the position in `buffer` of its `element(S[i])` in the box at `prefix(S[i])`."""

    buffer: Buffer
    element: isl.MultiPwAff
    prefix: isl.MultiPwAff
    box: Box

    @property
    def is_dense(self) -> bool:
        """Whether the buffer is in shared memory and the box has no gaps."""
        return all(d.stride == 1 for d in self.box.digits) and self.buffer.space is Space.SHARED

    def subscripts(self) -> tuple[isl.PwAff, ...]:
        """The indices in the buffer as functions of `S[i]`, correct wherever the reference accesses memory.

        In a dimension of one element, the index is 0.
        """
        distance: dict[int, isl.PwAff] = {}
        for d, side in enumerate(self.box.sides):
            first = isl.PwAff.from_aff(side.first).pullback_multi_pw_aff(self.prefix)
            distance[d] = self.element.get_at(d).sub(first)
        found = buffer_indices(self.box.digits, distance, _floor_divide, _remainder)
        return tuple(
            f.scale_val(isl.Val(0, f.get_ctx())) if d.extent == 1 else f
            for f, d in zip(found, self.box.digits, strict=True)
        )

    def relation(self) -> isl.Map:
        """`S[i] -> buffer[p]`, the accessed element of the buffer."""
        result = isl.Map.from_domain(self.element.domain())
        for part in self.subscripts():
            result = result.flat_range_product(isl.Map.from_pw_aff(part))
        return result.set_tuple_name(OUT, self.buffer.name)


def _floor_divide(f: isl.PwAff, divisor: int) -> isl.PwAff:
    return f.scale_down_val(isl.Val(divisor, f.get_ctx())).floor()


def _remainder(f: isl.PwAff, divisor: int) -> isl.PwAff:
    return f.mod_val(isl.Val(divisor, f.get_ctx()))


@dataclass(frozen=True, slots=True, eq=False)
class CopyStatement:
    """The meaning of an extension statement: copies by all threads, and barriers before and after them.

    into: whether it copies into buffers, or out of them. private: whether each thread copies for itself.
    unrolled: the largest number of iterations for which a copy loop is unrolled.
    """

    copies: tuple[BlockCopy, ...]
    into: bool
    before: bool
    after: bool
    private: bool = False
    unrolled: int = 1

    def statement(self, outer: Sequence[Expr], launch: Launch) -> Stmt:
        """The loop program of the statement. outer: the values of its dimensions."""
        if self.private:
            return build.block(*(c.copy_by_thread(outer, launch, into=self.into) for c in self.copies))
        filled = {c.buffer.name for c in self.copies}
        first, second = (
            [
                c.statement(outer, launch, into=self.into, unrolled=self.unrolled)
                for c in self.copies
                if c.is_after(filled) is late
            ]
            for late in (False, True)
        )
        before, between, after = (
            [BARRIER_STATEMENT] * needed for needed in (self.before, bool(first and second), self.after)
        )
        return build.block(*before, *first, *between, *second, *after)


@dataclass(frozen=True, slots=True, eq=False)
class Promotion:
    """The promotions of a kernel.

    accesses: the replacements of references, by tag. stagings: the meaning of extension statements, by name.
    contracted: the tensors that need no global memory any more.
    """

    buffers: tuple[Buffer, ...] = ()
    accesses: Mapping[str, Promoted] = field(default_factory=dict)
    stagings: Mapping[str, CopyStatement] = field(default_factory=dict)

    contracted: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """The bytes of shared memory that the buffers take."""
        return sum(shared_bytes_of(b) for b in self.buffers if b.space is Space.SHARED)

    @property
    def ranks(self) -> Mapping[str, tuple[str, int]]:
        """For each tag, the name and the rank of the buffer."""
        return {tag: (p.buffer.name, len(p.buffer.shape)) for tag, p in self.accesses.items()}

    def functions(self, statement: str) -> list[isl.PwAff]:
        """The subscripts of the promoted references of a statement, as functions of its instances."""
        return [f for tag, p in self.accesses.items() if _is_of(tag, statement) for f in p.subscripts()]

    def names(self, statement: str) -> list[str]:
        """The names that `references.with_moved_accesses` gives to the values of `functions`."""
        mine = [(tag, p) for tag, p in self.accesses.items() if _is_of(tag, statement)]
        return [subscript_name(tag, d) for tag, p in mine for d in range(len(p.buffer.shape))]

    def merge(self, other: Promotion) -> Promotion:
        return Promotion(
            (*self.buffers, *other.buffers),
            {**self.accesses, **other.accesses},
            {**self.stagings, **other.stagings},
            self.contracted | other.contracted,
        )


def _record_promotion(tensor: Buffer, buffer: Buffer, room: int) -> None:
    size = shared_bytes_of(buffer)
    numbers = ("bytes", size), ("room", room)
    box = " x ".join(map(str, buffer.shape)) or "one element"
    chosen, why = f"{tensor.name}: {box} in shared memory", "threads of a block share it, or read it across memory"
    if size > room:
        chosen, why = f"{tensor.name} stays in global memory", f"its box of {box} exceeds what is left of shared memory"
    note_decision(Decision("promotion", (), chosen, why, numbers))


def _is_of(tag: str, statement: str) -> bool:
    return tag.rpartition(".")[0] == statement


@dataclass(frozen=True, slots=True, eq=False)
class PromotionContext:
    """The facts about the kernel for promotion at any scope.

    tensors: the buffers of the tensors. local: the tensors that are not read after the kernel.
    order: `S[i] -> [time]`, the schedule without copies. threads: `S[i] -> [x, y, z]`, the thread of an instance.
    instances: `S[i]`, those of the block and thread that are parameters. budget: bytes of shared memory.
    unrolled_loops: `S[i] -> [q]`, the unrolled loops.
    register_tiled: the statements that read their operands from registers, which are loaded as vectors.
    unrolled: the largest number of iterations for which a loop that copies to shared memory is unrolled.
    walks: cached instances of neighboring threads (see `thread_strides`).
    """

    references: tuple[Reference, ...]
    tensors: Mapping[str, Buffer]
    local: frozenset[str]
    order: isl.UnionMap
    threads: isl.UnionMap
    instances: isl.UnionSet
    unrolled_loops: isl.UnionMap
    launch: Launch
    budget: int
    register_tiled: frozenset[str] = frozenset()
    unrolled: int = 1
    walks: dict[isl.Set, NeighborInstances | None] = field(default_factory=dict)

    def memory(self, group: ReferenceGroup) -> Buffer:
        """The buffer from which the elements of a group are copied."""
        return self.tensors[group.lookup.tensor if group.lookup is not None else group.tensor]

    @property
    def written_tensors(self) -> frozenset[str]:
        return frozenset(r.tensor for r in self.references if r.writes)

    def tensors_accessed_elsewhere(self, scope: isl.UnionMap, promoted: Mapping[str, Promoted]) -> frozenset[str]:
        """The tensors that instances outside of `scope`, or references that are not promoted, access."""
        inside = scope.domain().project_out_all_params()
        found = set()
        for r in self.references:
            everywhere = isl.UnionSet.from_set(r.relation.domain())
            if r.tag not in promoted or not everywhere.is_subset(inside):
                found.add(r.tensor)
        return frozenset(found)


def promote_shared(
    node: isl.ScheduleNode,
    around: PromotionContext,
    done: Promotion,
    *,
    only: frozenset[str] | None = None,
    inner: Sequence[isl.UnionMap] = (),
) -> tuple[isl.ScheduleNode, Promotion]:
    """`node` with copies around its subtree, and `done` extended by their promotions; unchanged if no group gains.

    Args:
        only: the tensors that may be promoted; None for all.
        inner: scopes below `node`; a group must access the same elements in each of them.
    """
    free = [r for r in around.references if r.tag not in done.accesses and (only is None or r.tensor in only)]
    if not free:
        return node, done
    scope, prefix = node.get_prefix_schedule_relation(), node.get_prefix_schedule_multi_union_pw_aff()
    chosen: list[tuple[ReferenceGroup, Buffer]] = []
    room = around.budget - done.bytes
    for group, steps in _rank_promotable_groups(free, scope, around, inner):
        tensor = around.memory(group)
        name = fresh_buffer_name(internal_name(tensor.name, "shared"), done, chosen)
        buffer = build.buffer(name, tensor.type.dtype, group.box.shape, Space.SHARED)
        points = isl.Set.from_union_set(scope.range())
        lanes = (
            indirect_copy_lanes(tensor, group, points) if group.lookup else copy_lanes(tensor, group.box, points, None)
        )
        wide = all(r.tag.rpartition(".")[0] in around.register_tiled for r in group.references)
        buffer = pad_rows(buffer, group.box, steps, around.launch, lanes, wide=wide)
        fits = shared_bytes_of(buffer) <= room
        if is_recording():
            _record_promotion(tensor, buffer, room)
        if fits:
            chosen.append((group, buffer))
            room -= shared_bytes_of(buffer)
    if not chosen:
        return node, done
    number = len(done.stagings)
    accesses = {
        r.tag: Promoted(buffer, r.element(), band_prefix(prefix, r), group.box)
        for group, buffer in chosen
        for r in group.references
    }
    known = {**done.accesses, **accesses}
    node, stagings, dead = _insert_copies(node, scope, around, chosen, known, number)
    return node, done.merge(Promotion(tuple(b for _, b in chosen), accesses, stagings, dead))


def fresh_buffer_name(stem: str, done: Promotion, chosen: Sequence[tuple[ReferenceGroup, Buffer]]) -> str:
    """`stem`, followed by a number if that name is taken."""
    taken = {b.name for b in (*done.buffers, *(b for _, b in chosen))}
    names = (f"{stem}{n or ''}" for n in count())
    return next(name for name in names if name not in taken)


def shared_bytes_of(buffer: Buffer) -> int:
    """The bytes of shared memory that a buffer takes, rounded up to 16."""
    return -(-buffer.bytes // 16) * 16


def band_prefix(prefix: isl.MultiUnionPwAff, reference: Reference) -> isl.MultiPwAff:
    """`S[i] -> [c]` for the statement of `reference`, extended to all points if it is a single affine function."""
    space = reference.relation.domain().get_space()
    found = prefix.extract_multi_pw_aff(space)
    parts = isl.PwAffList.alloc(space.get_ctx(), found.dim(OUT))
    for k in range(found.dim(OUT)):
        parts = parts.add(_drop_domain(found.get_at(k)))
    return isl.MultiPwAff.from_pw_aff_list(found.get_space(), parts)


def _drop_domain(f: isl.PwAff) -> isl.PwAff:
    """`f` defined everywhere if it has a single piece, else unchanged."""
    pieces: list[isl.Aff] = []
    f.foreach_piece(lambda _, aff: pieces.append(aff))
    return isl.PwAff.from_aff(pieces[0]) if len(pieces) == 1 else f


# --- what gains --------------------------------------------------------------------------------------------------


def _rank_promotable_groups(
    references: Sequence[Reference], scope: isl.UnionMap, around: PromotionContext, inner: Sequence[isl.UnionMap]
) -> list[tuple[ReferenceGroup, list[ThreadStrides]]]:
    """The groups that gain, by accesses saved per byte, the best first; each with the strides of its references."""
    found = []
    for mine in reference_groups(references, scope, bounding_box).values():
        for group in mine:
            if (
                not group.box.sides
                or not _has_only_affine_references(group, scope, around)
                or not is_quasi_affine(group.footprint)
            ):
                continue
            if not all(_is_steady(group, i) for i in inner):
                continue
            steps = [s for r in group.references if (s := thread_strides(r, around.threads, around.walks)) is not None]
            uses = sum(_count_statement_instances(r, scope) for r in group.references)
            reused = uses > group.box.size and not _is_injective(group, scope)
            if reused or not all(s.is_coalesced for s in steps):
                saved = (uses - group.box.size) / (group.box.size * around.memory(group).type.dtype.size)
                found.append((saved, group, steps))
    ranked = sorted(found, key=lambda f: (-f[0], f[1].tensor, f[1].references[0].tag))
    return [(group, steps) for _, group, steps in ranked]


def _has_only_affine_references(group: ReferenceGroup, scope: isl.UnionMap, around: PromotionContext) -> bool:
    """False if the group writes and a reference below the scope that is in no group could read a stale value."""
    if not group.writes:
        return True
    live = [r for r in around.references if r.tensor == group.tensor]
    inside = scope.domain()
    here = [r for r in live if not inside.intersect(isl.UnionSet.from_set(r.relation.domain())).is_empty()]
    return all(r.affine for r in here)


def _is_steady(group: ReferenceGroup, inner: isl.UnionMap) -> bool:
    """Whether the group accesses the same elements at all points of the scope `inner` with equal outer dimensions."""
    touched = [f for r in group.references if (f := reference_footprint(r, inner)) is not None]
    if not touched:
        return True
    here = reduce(lambda a, b: a.union(b), touched)
    outside = group.footprint.dim(isl.dim_type.in_)
    points = isl.Set.from_union_set(inner.range())
    shared = points.identity().project_out(OUT, outside, points.dim(isl.dim_type.set) - outside)
    return bool(shared.apply_range(group.footprint).is_subset(here))


def is_quasi_affine(wanted: isl.Map) -> bool:
    """Whether membership in `wanted` can be tested by formulas, without a search."""
    parts = wanted.wrap().compute_divs().get_basic_sets()
    affs = [c.get_aff() for part in parts for c in part.get_constraints()]
    return not any(a.get_div(k).is_nan() for a in affs for k in range(a.dim(isl.dim_type.div)))


def _is_injective(group: ReferenceGroup, scope: isl.UnionMap) -> bool:
    """Whether no element is accessed twice below the scope."""
    uses = isl.UnionMap.empty(scope.get_space())
    for r in group.references:
        mine = scope.range_product(isl.UnionMap.from_map(r.relation))
        if not uses.range().is_disjoint(mine.range()):
            return False
        uses = uses.union(mine)
    return bool(uses.is_injective())


def _count_statement_instances(reference: Reference, scope: isl.UnionMap) -> int:
    """An upper bound of the number of instances of the statement of `reference` per point of the scope."""
    mine = scope.intersect_domain(isl.UnionSet.from_set(reference.relation.domain()))
    below = isl.Map.from_union_map(mine).reverse()
    return prod(_count_values_along_dim(below, d) for d in range(below.dim(OUT)))


def _count_values_along_dim(below: isl.Map, d: int) -> int:
    """The size of the range of dimension `d` for one input, including gaps; 1 if it is unbounded."""
    line = below.project_out(OUT, d + 1, below.dim(OUT) - d - 1).project_out(OUT, 0, d)
    most = line.range_product(line).range().unwrap().deltas().dim_max_val(0)
    return most.to_python() + 1 if most.is_int() else 1


# --- copies ------------------------------------------------------------------------------------------------------


def _insert_copies(
    node: isl.ScheduleNode,
    scope: isl.UnionMap,
    around: PromotionContext,
    chosen: Sequence[tuple[ReferenceGroup, Buffer]],
    accesses: Mapping[str, Promoted],
    number: int,
) -> tuple[isl.ScheduleNode, Mapping[str, CopyStatement], frozenset[str]]:
    """`node` with extension statements that copy in and out, their meaning, and the tensors that need no memory."""
    points = isl.Set.from_union_set(scope.range())
    repeats = not isl.Map.from_range(points).is_single_valued()
    elsewhere = around.tensors_accessed_elsewhere(scope, accesses)
    reading = tuple(
        copy_statement(g, b, around.memory(g), points, only, indirect_source(g, around, accesses))
        for g, b in chosen
        for only in _elements_to_copy(g, scope, around)
    )
    dead = around.local - elsewhere - {c.tensor.name for c in reading}
    writing = tuple(
        copy_statement(g, b, around.memory(g), points, written_elements(g, scope))
        for g, b in chosen
        if g.writes and g.tensor not in dead
    )
    found: dict[str, CopyStatement] = {}
    produced = any(c.tensor.name in around.written_tensors for c in reading)
    if reading or repeats:
        name = f"copy_in_{number}"
        found[name] = CopyStatement(
            reading, True, before=repeats or produced, after=bool(reading), unrolled=around.unrolled
        )
        node = graft(node, name, points, after=False)
    if writing:
        name = f"copy_out_{number}"
        shared = any(g.tensor in elsewhere for g, _ in chosen if g.writes)
        found[name] = CopyStatement(writing, False, before=True, after=shared, unrolled=around.unrolled)
        node = graft(node, name, points, after=True)
    return node, found, frozenset(g.tensor for g, _ in chosen if g.tensor in dead)


def graft(node: isl.ScheduleNode, name: str, points: isl.Set, *, after: bool) -> isl.ScheduleNode:
    """`node` with an extension statement `name[c]` before or after its subtree."""
    identity = points.identity().set_tuple_name(OUT, name)
    extension = isl.ScheduleNode.from_extension(isl.UnionMap.from_map(identity))
    return node.graft_after(extension) if after else node.graft_before(extension)


def _elements_to_copy(group: ReferenceGroup, scope: isl.UnionMap, around: PromotionContext) -> list[isl.Map | None]:
    """The copies in (at most one): of elements read before they are written, or None for all of a read-only tensor."""
    if not group.reads:
        return []
    if group.tensor not in around.written_tensors:
        return [None]
    missing = live_in_elements(group, scope, around.order)
    return [] if missing is None else [missing]


def indirect_source(
    group: ReferenceGroup, around: PromotionContext, promoted: Mapping[str, Promoted]
) -> IndirectSource | None:
    """The source of a copy for a group with data-dependent subscripts, read from shared memory if possible, or None."""
    if group.lookup is None:
        return None
    plain = {r.tag for r in around.references if r.lookup is None}
    buffers: dict[str, tuple[Buffer, Box | None]] = {}
    for tensor, _ in group.lookup.reads:
        tags = [tag for r in group.references if r.lookup for name, tag in r.lookup.reads if name == tensor]
        places = [promoted[tag] for tag in tags if tag in promoted and tag in plain]
        buffers[tensor] = (around.tensors[tensor], None)
        if len(places) == len(tags) and all(p.buffer is places[0].buffer and p.is_dense for p in places):
            buffers[tensor] = (places[0].buffer, places[0].box)
    return IndirectSource(group.lookup, buffers)


def copy_statement(
    group: ReferenceGroup,
    buffer: Buffer,
    tensor: Buffer,
    points: isl.Set,
    only: isl.Map | None,
    found: IndirectSource | None = None,
) -> BlockCopy:
    """The copy of `only`, or if None of all elements of the box in the tensor; with `found`, of the footprint."""
    if found is not None:
        lanes = gcd(indirect_copy_lanes(tensor, group, points), *buffer.strides[:-1])
        return BlockCopy(tensor, buffer, group.box, points, group.footprint, lanes, found)
    if only is not None:
        inside = group.box.relation.intersect_domain(points)
        only = None if inside.intersect(in_bounds_map(inside.get_space(), tensor)).is_subset(only) else only
    lanes = gcd(copy_lanes(tensor, group.box, points, only), *buffer.strides[:-1])
    return BlockCopy(tensor, buffer, group.box, points, only, lanes)


def written_elements(group: ReferenceGroup, scope: isl.UnionMap) -> isl.Map:
    """`[c] -> T[x]`: the elements that the group writes."""
    parts = [f for r in group.references if r.writes and (f := reference_footprint(r, scope)) is not None]
    return reduce(lambda a, b: a.union(b), parts).coalesce()


def live_in_elements(group: ReferenceGroup, scope: isl.UnionMap, order: isl.UnionMap) -> isl.Map | None:
    """`[c] -> T[x]`: the elements of the group that are read below the scope before they are written there, or None.

    Raises:
        CannotLower: finding them would take isl too long.
    """
    reading = [r for r in group.references if r.reads and not _is_initialized(r, group, scope)]
    if not reading:
        return None
    reads, writes = (
        _union_maps([scope.range_product(isl.UnionMap.from_map(r.relation)) for r in references], scope)
        for references in (reading, [r for r in group.references if r.writes])
    )
    info = isl.UnionAccessInfo.from_sink(reads).set_must_source(writes).set_schedule_map(order)
    flow = with_op_limit(FLOW_OPERATIONS, info.compute_flow)
    if flow is None:
        raise CannotLower(f"the content of {group.tensor} before its reads takes too long to find")
    missing = flow.get_must_no_source().range()
    if missing.is_empty():
        return None
    return isl.Set.from_union_set(missing).unwrap().coalesce()


def _is_initialized(reference: Reference, group: ReferenceGroup, scope: isl.UnionMap) -> bool:
    """Whether every element that `reference` accesses is initialized below the scope."""
    starter = next((r for r in group.references if r.tag == reference.init_ref), None)
    first = None if starter is None else reference_footprint(starter, scope)
    touched = reference_footprint(reference, scope)
    return first is not None and touched is not None and bool(touched.is_subset(first))


def _union_maps(parts: Sequence[isl.UnionMap], scope: isl.UnionMap) -> isl.UnionMap:
    total = isl.UnionMap.empty(scope.get_space())
    for p in parts:
        total = total.union(p)
    return total
