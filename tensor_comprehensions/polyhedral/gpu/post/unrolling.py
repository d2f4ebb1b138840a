"""Unroll innermost loops with few iterations, up to a limit on statement instances."""

from __future__ import annotations

from dataclasses import replace

from ....loop_ir import build, linear_forms
from ....loop_ir.intervals import Interval, Ranges, index_interval
from ....loop_ir.nodes import Allocate, Block, Check, If, Invoke, Let, Loop, LoopKind, Stmt, Store
from ....loop_ir.rewrite import map_stmt


def unroll_innermost(s: Stmt, limit: int, ranges: Ranges) -> Stmt:
    """`s` with innermost loops, and loops around them, UNROLLED while that gives at most `limit` statement instances.

    A loop of varying length is unrolled to its maximum length, with guarded iterations.
    ranges: intervals of the launch variables.
    """
    return s if limit <= 1 else _written_out(s, limit, ranges)[0]


def _written_out(s: Stmt, limit: int, ranges: Ranges) -> tuple[Stmt, int]:
    """`s` with loops unrolled, and its number of instances, which exceeds `limit` if a loop remains in it."""
    match s:
        case Store() | Invoke() | Check():
            return s, 1
        case Loop():
            return _unroll_short_loop(s, limit, ranges)
    counts: list[int] = []

    def visit(c: Stmt) -> Stmt:
        new, count = _written_out(c, limit, ranges)
        counts.append(count)
        return new

    new = map_stmt(s, lambda e: e, visit)
    match s:
        case Block() | If() | Let() | Allocate():
            return new, sum(counts)
    return new, limit + 1


def _unroll_short_loop(s: Loop, limit: int, ranges: Ranges) -> tuple[Stmt, int]:
    first, last = index_interval(s.start, ranges), index_interval(s.stop, ranges)
    values = Interval(first.low, None if last.high is None else last.high - 1)
    body, count = _written_out(s.body, limit, {**ranges, s.var: values})
    s = s if body is s.body else replace(s, body=body)
    length = index_interval(linear_forms.subtract(s.stop, s.start), ranges).high
    if s.kind is not LoopKind.SERIAL or length is None or count * -(-length // s.step) > limit:
        return s, limit + 1
    if linear_forms.difference(s.stop, s.start) is None:
        guarded = build.when(build.lt(build.var(s.var), s.stop), body)
        s = replace(s, stop=build.add(s.start, max(0, length)), body=guarded)
    return replace(s, kind=LoopKind.UNROLLED), count * max(0, -(-length // s.step))
