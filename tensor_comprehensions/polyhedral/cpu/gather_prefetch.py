"""Prefetch rows of large tables that data selects, since hardware prefetchers cannot predict their addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.intrinsics import PREFETCH
from ...loop_ir.nodes import Space
from ...lower_expr import LoweringScope, lower_access
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex
from ...thresholds import (
    GATHER_PREFETCH_BYTES,
    MAX_GATHER_PREFETCH_ROWS,
    MAX_PREFETCHED_ROW_BYTES,
    MIN_PREFETCHED_ROW_BYTES,
)
from ..schedule.access_cost import access_stride
from ..schedule.fusion import FusionGroup
from ..schedule.loop_nest import NestDim
from ..scop.isl_affine import to_isl_affine
from ..scop.scop import ScopStatement


def prefetch_hints(
    function: BoundFunction,
    group: FusionGroup,
    node: ScopStatement,
    lanes: NestDim,
    loops: Sequence[str],
    scope: LoweringScope,
    target: CpuTarget,
) -> tuple[ir.Invoke, ...]:
    """Prefetch hints for the body of a nest of `group`, vectorized along `lanes`, before the statement of `node`.

    Args:
        loops: the indices of `node` that loops around the body iterate, innermost first; `scope` has their values.
    """
    found: dict[ir.Invoke, None] = {}
    for access, writes in _list_reads_and_updates(node):
        row = lanes.extent * function.tensor(access.tensor).dtype.size
        if not MIN_PREFETCHED_ROW_BYTES <= row <= MAX_PREFETCHED_ROW_BYTES or not _is_selected_row(
            function, group, node, access, lanes, target
        ):
            continue
        ahead = _advance_scope(
            _moving_loops(access, loops),
            _map_names_to_indices(node),
            min(MAX_GATHER_PREFETCH_ROWS, -(-GATHER_PREFETCH_BYTES // row)),
            scope,
        )
        buffer, indices = lower_access(access.tensor, access.subscripts, ahead)
        if buffer.space is Space.GLOBAL and ahead is not scope:
            found[ir.Invoke(PREFETCH, ((buffer, indices),), (int(writes),))] = None
    return tuple(found)


def _list_reads_and_updates(node: ScopStatement) -> Iterator[tuple[tc.Access, bool]]:
    """The reads of `node`, each with False, and the elements that it updates, with True."""
    updated = [w for s, w in zip(node.statements, node.writes, strict=True) if s.reduction is not None]
    yield from ((a, False) for a in node.reads if a not in updated)
    yield from ((a, True) for a in updated)


def _is_selected_row(
    function: BoundFunction,
    group: FusionGroup,
    node: ScopStatement,
    access: tc.Access,
    lanes: NestDim,
    target: CpuTarget,
) -> bool:
    """Whether `access` is to rows along `lanes` of a tensor above L2, selected by data that the group only reads."""
    tensor = function.tensor(access.tensor)
    if tensor.size * tensor.dtype.size <= target.cache[min(1, len(target.cache) - 1)]:
        return False
    reads = [x for e in _list_nonaffine_subscripts(access) for x in tc.walk_expr(e) if isinstance(x, tc.Access)]
    written = {w.tensor for n in group.nodes for w in n.writes}
    if not reads or any(x.guarded or x.tensor in written for x in reads):
        return False
    return access_stride(function, access, lanes.index(node)) == 1


def _list_nonaffine_subscripts(access: tc.Access) -> list[tc.Expr]:
    return [e for e in access.subscripts if to_isl_affine(e) is None]


def _moving_loops(access: tc.Access, loops: Sequence[str]) -> list[str]:
    """The loops, innermost first, whose indices select the row."""
    names = {x.name for e in _list_nonaffine_subscripts(access) for x in tc.walk_expr(e) if isinstance(x, tc.Index)}
    return [name for name in loops if name in names]


def _map_names_to_indices(node: ScopStatement) -> dict[str, BoundIndex]:
    return {i.name: i for i in (*node.free, *node.reduction_indices)}


def _advance_scope(
    moving: Sequence[str], ranges: Mapping[str, BoundIndex], distance: int, scope: LoweringScope
) -> LoweringScope:
    """`scope` with the innermost index of `moving` `distance` iterations ahead, carrying into the loop around it.

    All indices stay in their ranges, so every read of the statement at the new indices is in bounds.
    """
    if not moving:
        return scope
    inner = ranges[moving[0]]
    here = scope.indices[inner.name]
    if len(moving) == 1:
        return _with_indices(scope, {inner.name: build.minimum(build.add(here, distance), inner.upper - 1)})
    outer = ranges[moving[1]]
    around, last = scope.indices[outer.name], outer.upper - 1
    if distance < inner.extent:
        there = build.add(here, distance)
        over = build.ge(there, inner.upper)
        position = build.select(over, build.sub(there, inner.extent), there)
        return _with_indices(
            scope,
            {
                inner.name: position,
                outer.name: build.select(over, build.minimum(build.add(around, 1), last), around),
            },
        )
    there = build.add(build.sub(here, inner.lower), distance)
    trips = build.div(there, inner.extent)
    return _with_indices(
        scope,
        {
            inner.name: build.add(build.mod(there, inner.extent), inner.lower),
            outer.name: build.minimum(build.add(around, trips), last),
        },
    )


def _with_indices(scope: LoweringScope, moved: Mapping[str, ir.Expr]) -> LoweringScope:
    return replace(scope, indices={**scope.indices, **moved})
