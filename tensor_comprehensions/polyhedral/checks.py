"""Data-dependent subscripts verified before anything reads through them."""

from __future__ import annotations

from collections.abc import Mapping

from ..loop_ir import build
from ..loop_ir import nodes as ir
from ..loop_ir.nodes import Buffer, CheckSite
from ..tc_lang import function as tc
from ..tc_lang.function import BoundsCheck, BoundStatement
from ..translate import Scope, translate, translate_subscript


def check_loops(
    s: BoundStatement, buffers: Mapping[str, Buffer], first_site: int
) -> tuple[tuple[ir.Stmt, ...], tuple[CheckSite, ...]]:
    """For each check of `s` a nest over the indices it depends on, and what a failure of it means."""
    nests = tuple(_nest(s, check, buffers, first_site + k) for k, check in enumerate(s.checks))
    sites = tuple(CheckSite(c.tensor, c.dimension, c.extent, c.origin) for c in s.checks)
    return nests, sites


def check_reads(s: BoundStatement) -> frozenset[str]:
    """The tensors that the checks of `s` read."""
    roots = [e for c in s.checks for e in (c.subscript, c.guard) if e is not None]
    return frozenset(x.tensor for e in roots for x in tc.walk(e) if isinstance(x, tc.Access))


def _nest(s: BoundStatement, check: BoundsCheck, buffers: Mapping[str, Buffer], site: int) -> ir.Stmt:
    scope = Scope({i.name: build.var(i.name) for i in s.indices}, buffers)
    guarded = scope.under(check.guard) if check.guard is not None else scope
    value = translate_subscript(check.subscript, guarded)
    condition = build.logical_and(build.ge(value, 0), build.lt(value, check.extent))
    if check.guard is not None:
        condition = build.logical_or(build.logical_not(translate(check.guard, scope)), condition)
    body: ir.Stmt = ir.Check(condition, site, value)
    used = {
        x.name for e in (check.subscript, check.guard) if e is not None for x in tc.walk(e) if isinstance(x, tc.Index)
    }
    for i in reversed(s.indices):
        if i.name in used:
            body = ir.Loop(i.name, build.const(i.lower), build.const(i.upper), body)
        elif not i.extent:  # the statement has no instance at all
            return build.NOTHING
    return body
