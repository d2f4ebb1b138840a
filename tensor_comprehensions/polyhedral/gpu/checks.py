"""Data-dependent subscripts verified before a kernel reads through them: one thread per subscript."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.nodes import BLOCK, THREAD, Buffer, CheckSite, Kernel, Launch
from ...tc_lang import function as tc
from ...tc_lang.function import BoundIndex, BoundsCheck, BoundStatement
from ...translate import Scope, translate, translate_subscript
from ..checks import is_inside

THREADS = 256
MOST_BLOCKS = 4096


def check_kernels(
    statements: Sequence[BoundStatement], buffers: Mapping[str, Buffer], name: str, first_site: int
) -> Iterator[tuple[Kernel, CheckSite]]:
    """For each check of `statements` a kernel that verifies it and what its failure means, numbered from there."""
    site = first_site
    for s in statements:
        if all(i.extent for i in s.indices):
            for check in dict.fromkeys(s.checks):
                body, launch = _everywhere(s, check, buffers, site)
                yield (
                    Kernel(f"{name}_check{site}", body, launch),
                    CheckSite(check.tensor, check.dimension, check.extent, check.origin),
                )
                site += 1


def _everywhere(
    s: BoundStatement, check: BoundsCheck, buffers: Mapping[str, Buffer], site: int
) -> tuple[ir.Stmt, Launch]:
    """`check` at all points of the indices that it depends on."""
    roots = [e for e in (check.subscript, check.guard) if e is not None]
    used = {x.name for e in roots for x in tc.walk(e) if isinstance(x, tc.Index)}
    indices = tuple(i for i in s.indices if i.name in used)
    points = prod(i.extent for i in indices)
    blocks = min(MOST_BLOCKS, -(-points // THREADS))
    step = blocks * THREADS
    first = build.add(build.mul(build.var(BLOCK[0]), THREADS), build.var(THREAD[0]))
    point = build.var("point")
    body = _check(check, _place(point, indices), buffers, site)
    loop = ir.Loop("point", first, build.const(points), body, step=step)
    return loop, Launch((blocks, 1, 1), (THREADS, 1, 1))


def _place(point: ir.Expr, indices: Sequence[BoundIndex]) -> dict[str, ir.Expr]:
    """The values of `indices`, the last of which runs fastest, at the point with a number."""
    values: dict[str, ir.Expr] = {}
    for i in reversed(indices[1:]):
        values[i.name] = build.add(build.mod(point, i.extent), i.lower)
        point = build.div(point, i.extent)
    for i in indices[:1]:
        values[i.name] = build.add(point, i.lower)
    return values


def _check(check: BoundsCheck, place: Mapping[str, ir.Expr], buffers: Mapping[str, Buffer], site: int) -> ir.Stmt:
    scope, guard = Scope(place, buffers), check.guard
    value = translate_subscript(check.subscript, scope.under(guard) if guard is not None else scope)
    condition = is_inside(value, check.extent)
    if guard is not None:
        condition = build.logical_or(build.logical_not(translate(guard, scope)), condition)
    return ir.Check(condition, site, value)
