"""Loops written out: those of few iterations, as far as a limit on statement instances goes."""

from __future__ import annotations

from dataclasses import replace

from ...loop_ir import affine, build
from ...loop_ir.nodes import Allocate, Binary, Block, Check, Expr, If, Invoke, Let, Loop, LoopKind, Stmt, Store
from ...loop_ir.rewrite import map_stmt


def written_out(s: Stmt, limit: int) -> Stmt:
    """`s` with its innermost loops UNROLLED, and those around them, while at most `limit` instances stand in a row.

    A loop may stop early in some threads: then it is written out up to the most iterations it can have, each guarded.
    """
    return s if limit <= 1 else _written_out(s, limit)[0]


def _written_out(s: Stmt, limit: int) -> tuple[Stmt, int]:
    """`s` with loops written out, and its instances; more than `limit` where a loop is left in it."""
    match s:
        case Store() | Invoke() | Check():
            return s, 1
        case Loop():
            return _loop(s, limit)
    counts: list[int] = []

    def visit(c: Stmt) -> Stmt:
        new, count = _written_out(c, limit)
        counts.append(count)
        return new

    new = map_stmt(s, lambda e: e, visit)
    match s:
        case Block() | If() | Let() | Allocate():
            return new, sum(counts)
    return new, limit + 1


def _loop(s: Loop, limit: int) -> tuple[Stmt, int]:
    body, count = _written_out(s.body, limit)
    s = s if body is s.body else replace(s, body=body)
    trips = _most_trips(s)
    if s.kind is not LoopKind.SERIAL or trips is None or trips * count > limit:
        return s, limit + 1
    if affine.difference(s.stop, s.start) is None:
        guarded = build.when(build.lt(build.var(s.var), s.stop), body)
        s = replace(s, stop=build.add(s.start, trips * s.step), body=guarded)
    return replace(s, kind=LoopKind.UNROLLED), trips * count


def _most_trips(s: Loop) -> int | None:
    """A constant that the trip count never exceeds, where the loop says one."""
    found = [n for n in _lengths(s.start, s.stop) if n is not None]
    return -(-max(0, min(found)) // s.step) if found else None


def _lengths(start: Expr, stop: Expr) -> list[int | None]:
    match stop:
        case Binary("min", a, b):
            return _lengths(start, a) + _lengths(start, b)
        case Binary("add", Binary("min", a, b), c):
            return _lengths(start, build.add(a, c)) + _lengths(start, build.add(b, c))
    return [affine.difference(stop, start)]
