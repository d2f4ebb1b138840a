"""Kernels that check data-dependent subscripts before another kernel uses them: a thread per subscript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod

from ....core.errors import CannotLower
from ....core.internal_names import internal_name
from ....loop_ir import build
from ....loop_ir import nodes as ir
from ....loop_ir.nodes import BLOCK, THREAD, Buffer, CheckSite, Kernel, Launch
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
    if any(i.variable for s, c in found for i in _find_used_indices(s, c)):
        raise CannotLower("subscripts that are data are checked")
    numbered = [(site, s, c) for site, (s, c) in enumerate(found, first_site)]
    kernels = []
    for _, run in groupby(numbered, key=lambda n: -1 if _is_direct(n[2]) else n[0]):
        together = list(run)
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
        values[i.name] = build.add(build.mod(point, i.extent), i.lower)
        point = build.div(point, i.extent)
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
