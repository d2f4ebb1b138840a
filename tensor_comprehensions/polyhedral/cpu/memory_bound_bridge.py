"""Statements that only reduce, permute or copy as structured ops, and their schedules as tile sizes and loop orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...core.errors import ArgumentError, CannotLower
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.nodes import Buffer, Load
from ...lower_expr import LoweringScope, lower_access, lower_expr
from ...options import CpuOptions
from ...structured.language.primitives import Schedule
from ...structured.language.schedule_types import schedule_for
from ...structured.memory_bound.nest_plan import MemoryBoundPlan, memory_bound_plan
from ...structured.op import Iterator, IteratorKind, StructuredOp
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ..schedule.fusion import FusionGroup
from ..scop.scop import ScopStatement


def memory_bound_op(node: ScopStatement, buffers: Mapping[str, Buffer]) -> StructuredOp | None:
    """The single statement of `node` as an op without a second factor; None if it has checks, gathers or a domain."""
    (s, *others) = node.statements
    if node.cluster is not None or others or s.checks or s.domain:
        return None
    if any(_has_data_dependent_subscript(e) for e in (*s.subscripts, s.value)):
        return None
    pairs = [(IteratorKind.PARALLEL, i) for i in s.free] + [(IteratorKind.REDUCTION, i) for i in s.reduction_indices]
    iterators = tuple(Iterator(internal_name(node.name, i.name), i.extent, kind) for kind, i in pairs)
    values = {i.name: build.add(build.var(internal_name(node.name, i.name)), i.lower) for _, i in pairs}
    scope = LoweringScope(values, buffers)
    buffer, where = lower_access(s.target, s.subscripts, scope)
    value = lower_expr(s.value, scope)
    one = build.const(1, value.type.dtype)
    return StructuredOp(node.name, iterators, Load(buffer, where), value, one, reduction=s.reduction or "+")


def _has_data_dependent_subscript(e: tc.Expr) -> bool:
    inner = (x for a in tc.walk_expr(e) if isinstance(a, tc.Access) for sub in a.subscripts for x in tc.walk_expr(sub))
    return any(isinstance(x, tc.Access) for x in inner)


def requested_plan(
    group: FusionGroup, buffers: Mapping[str, Buffer], options: CpuOptions, target: CpuTarget
) -> MemoryBoundPlan | None:
    """The plan that the schedule requests for the only node of a group; None if it requests none.

    Raises ArgumentError if it does not apply.
    """
    for node in group.nodes:
        schedule = (
            None if node.cluster is not None else schedule_for(options.schedule, node.name, node.writes[0].tensor)
        )
        if schedule is None:
            continue
        op = memory_bound_op(node, buffers)
        if op is None or len(group.nodes) > 1 or not isinstance(schedule, Schedule):
            raise ArgumentError(
                f"the schedule for '{node.writes[0].tensor}' does not apply: it runs fused with others",
                suggestion="CpuOptions(fusion='min') keeps statements apart",
            )
        try:
            found = memory_bound_plan(schedule, op, target, parallel=options.grain_size > 0)
        except CannotLower as refusal:
            raise ArgumentError(f"the schedule for '{node.writes[0].tensor}' does not apply: {refusal}") from refusal
        return _strip_prefix(found, node)
    return None


def with_prefixed_names(movement: MemoryBoundPlan, node: ScopStatement) -> MemoryBoundPlan:
    """`movement` with the names of the op's iterators."""
    tiles = tuple((internal_name(node.name, name), size) for name, size in movement.tiles)
    return replace(movement, tiles=tiles, vector=internal_name(node.name, movement.vector))


def _strip_prefix(movement: MemoryBoundPlan, node: ScopStatement) -> MemoryBoundPlan:
    """`movement` with the names of the node's indices."""
    prefix = internal_name(node.name, "")
    tiles = tuple((name.removeprefix(prefix), size) for name, size in movement.tiles)
    return replace(movement, tiles=tiles, vector=movement.vector.removeprefix(prefix))


def tile_sizes_of(movement: MemoryBoundPlan, group: FusionGroup) -> tuple[int, ...]:
    """The tile size of each row. Raises ArgumentError for a loop that cannot be tiled."""
    wanted = dict(movement.tiles)
    rows = {row.places[0][1][0]: row for row in group.rows}
    if unknown := [name for name in wanted if name not in rows]:
        raise ArgumentError(f"tile: the iterations of {unknown[0]} depend on each other")
    return tuple(wanted.get(name, row.extent) for name, row in rows.items())


def row_order_of(movement: MemoryBoundPlan, group: FusionGroup) -> tuple[int, ...]:
    """The order of the rows in the loop over tiles, outermost first."""
    names = [row.places[0][1][0] for row in group.rows]
    cut = [names.index(name) for name, _ in movement.tiles]
    return (*(k for k in range(len(names)) if k not in cut), *cut)
