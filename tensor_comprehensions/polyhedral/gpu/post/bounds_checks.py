"""Kernels that check data-dependent subscripts before another kernel uses them: a thread per subscript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod

from ....core.internal_names import internal_name
from ....loop_ir import build
from ....loop_ir import nodes as ir
from ....loop_ir.nodes import BLOCK, THREAD, BlockCount, Buffer, CheckSite, Kernel, Launch
from ....lower_expr import LoweringScope, lower_expr, lower_subscript
from ....tc_lang import ir as tc
from ....tc_lang.ir import BoundIndex, BoundsCheck, BoundStatement
from ....thresholds import GPU_CHECK_THREADS, GPU_MAX_CHECK_BLOCKS
from ...cpu.subscript_checks import is_inside


def check_kernels(
    statements: Sequence[BoundStatement], buffers: Mapping[str, Buffer], name: str, first_site: int
) -> tuple[list[Kernel], list[CheckSite]]:
    """Kernels that perform the checks of `statements`, and their check sites, numbered from `first_site`.

    Consecutive checks that depend on no other check share a kernel, because a launch costs more than a few checks.
    """
    found = [(s, c) for s in statements if all(i.extent for i in s.indices) for c in dict.fromkeys(s.checks)]
    numbered = [(site, s, c) for site, (s, c) in enumerate(found, first_site)]
    kernels = []
    for _, run in groupby(numbered, key=lambda n: -1 if _is_direct(n[2]) and _find_rows(*n[1:]) is None else n[0]):
        together = list(run)
        site, s, check = together[0]
        rows = _find_rows(s, check)
        if rows is not None:
            kernels.append(_check_rows(s, check, rows, buffers, site, internal_name(name, f"check{site}")))
            continue
        points = [_count_check_points(s, check) for _, s, check in together]
        blocks = min(GPU_MAX_CHECK_BLOCKS, -(-max(points) // GPU_CHECK_THREADS))
        bodies = [_check_all_points(s, check, buffers, site, blocks) for site, s, check in together]
        launch = Launch((blocks, 1, 1), (GPU_CHECK_THREADS, 1, 1))
        kernels.append(Kernel(internal_name(name, f"check{together[0][0]}"), build.block(*bodies), launch))
    return kernels, [CheckSite(c.tensor, c.dimension, c.extent, c.origin) for _, c in found]


def _is_direct(check: BoundsCheck) -> bool:
    """Whether `check` reads only at subscripts that do not depend on data, so it depends on no other check."""
    roots = [e for e in (check.subscript, check.guard) if e is not None]
    reads = [x for e in roots for x in tc.walk_expr(e) if isinstance(x, tc.Access)]
    return not any(isinstance(x, tc.Access) for r in reads for e in r.subscripts for x in tc.walk_expr(e))


def _find_used_indices(s: BoundStatement, check: BoundsCheck) -> tuple[BoundIndex, ...]:
    """The indices that a check depends on."""
    roots = [e for e in (check.subscript, check.guard) if e is not None]
    used = {x.name for e in roots for x in tc.walk_expr(e) if isinstance(x, tc.Index)}
    return tuple(i for i in s.indices if i.name in used)


def _find_rows(s: BoundStatement, check: BoundsCheck) -> BoundIndex | None:
    """The first index that a check depends on whose extent only a call tells, or None."""
    return next((i for i in _find_used_indices(s, check) if i.variable), None)


def _check_rows(
    s: BoundStatement, check: BoundsCheck, rows: BoundIndex, buffers: Mapping[str, Buffer], site: int, name: str
) -> Kernel:
    """The kernel that performs `check` for all values of `rows`; a block takes several if they have few points."""
    others = tuple(i for i in _find_used_indices(s, check) if i is not rows)
    each: ir.Expr = build.const(1)
    for i in others:
        each = build.mul(each, _extent_of(i))
    known = build.integer(each)
    together = 1 if known is None else max(1, GPU_CHECK_THREADS // max(1, known))
    block, point = internal_name(f"block{site}"), internal_name(f"point{site}")
    inside = build.var(point)
    row = build.add(build.mul(build.var(block), together), build.div(inside, each) if together > 1 else 0)
    place = _unravel_point(build.mod(inside, each) if together > 1 else inside, others)
    place[rows.name] = build.add(row, rows.lower)
    body = _lower_bounds_check(check, place, buffers, site)
    if together > 1:
        body = build.when(build.lt(row, build.var(rows.variable)), body)
    body = ir.Loop(point, build.var(THREAD[0]), build.mul(each, together), body, step=GPU_CHECK_THREADS)
    count = build.div(build.add(build.var(rows.variable), together - 1), together)
    body = ir.Loop(block, build.var(BLOCK[0]), count, body, step=GPU_MAX_CHECK_BLOCKS)
    counts = BlockCount(rows.variable, together, GPU_MAX_CHECK_BLOCKS), None, None
    return Kernel(name, body, Launch((GPU_MAX_CHECK_BLOCKS, 1, 1), (GPU_CHECK_THREADS, 1, 1), counts=counts))


def _extent_of(i: BoundIndex) -> ir.Expr:
    return build.var(i.variable) if i.variable else build.const(i.extent)


def _count_check_points(s: BoundStatement, check: BoundsCheck) -> int:
    return prod(i.extent for i in _find_used_indices(s, check))


def _check_all_points(
    s: BoundStatement, check: BoundsCheck, buffers: Mapping[str, Buffer], site: int, blocks: int
) -> ir.Stmt:
    """The loop of one thread that performs its share of `check` over the indices that the check depends on."""
    first = build.add(build.mul(build.var(BLOCK[0]), GPU_CHECK_THREADS), build.var(THREAD[0]))
    point = internal_name(f"point{site}")
    body = _lower_bounds_check(check, _unravel_point(build.var(point), _find_used_indices(s, check)), buffers, site)
    return ir.Loop(point, first, build.const(_count_check_points(s, check)), body, step=blocks * GPU_CHECK_THREADS)


def _unravel_point(point: ir.Expr, indices: Sequence[BoundIndex]) -> dict[str, ir.Expr]:
    """The values of `indices` at the point with the linear index `point`; the last index varies fastest."""
    values: dict[str, ir.Expr] = {}
    for i in reversed(indices[1:]):
        values[i.name] = build.add(build.mod(point, _extent_of(i)), i.lower)
        point = build.div(point, _extent_of(i))
    for i in indices[:1]:
        values[i.name] = build.add(point, i.lower)
    return values


def _lower_bounds_check(
    check: BoundsCheck, place: Mapping[str, ir.Expr], buffers: Mapping[str, Buffer], site: int
) -> ir.Stmt:
    scope, guard = LoweringScope(place, buffers), check.guard
    value = lower_subscript(check.subscript, scope.with_guard(guard) if guard is not None else scope)
    condition = is_inside(value, check.extent)
    if guard is not None:
        condition = build.logical_or(build.logical_not(lower_expr(guard, scope)), condition)
    return ir.Check(condition, site, value)
