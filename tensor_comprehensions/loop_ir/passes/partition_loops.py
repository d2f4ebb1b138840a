"""Split pointwise loops of known lengths where a condition of a select changes, so that no iteration evaluates it.

Padding `i >= 1 && i < 65 ? x(i - 1) : 0` becomes a loop over the elements of `x`, which needs no masks, and single
zeros. A condition that a whole nest shares, such as the part of a concatenation, selects one of two nests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from .. import build
from ..intervals import Interval
from ..nodes import Binary, Block, Cast, Const, Expr, If, Let, Loop, LoopKind, Select, Stmt, Store, Var
from ..rewrite import map_expr, map_stmt, walk_expr, walk_stmt_exprs, walk_stmts
from .simplify import simplify
from .split_masks import find_border

MAX_BORDERS = 3
"""The maximum number of places where a loop is split."""
MAX_CHOICES = 3
"""The maximum number of conditions by which a nest is chosen: each may double the code."""
MAX_STORES = 2
"""The maximum number of stores in a loop that is split."""
NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}

_Ranges = Mapping[str, Interval]


def partition_loops(s: Stmt) -> Stmt:
    """`s` with pointwise loops split; the same object if no loop is."""
    return _partition(s, {}, MAX_CHOICES)


def _partition(s: Stmt, ranges: _Ranges, choices: int) -> Stmt:
    """`s`, whose free variables are in `ranges`, with at most `choices` selections of a nest inside one another."""
    if not isinstance(s, Loop):
        inner = {**ranges, s.name: Interval(None, None)} if isinstance(s, Let) else ranges
        return map_stmt(s, lambda e: e, lambda c: _partition(c, inner, choices))
    if s.kind in (LoopKind.SERIAL, LoopKind.VECTOR) and s.step == 1 and _is_small_and_pointwise(s):
        if choices and (condition := next(_shared_conditions(s), None)) is not None:
            nests = (simplify(_assume(s, condition, value), ranges) for value in (True, False))
            then, otherwise = (_partition(nest, ranges, choices - 1) for nest in nests)
            return If(condition, then, otherwise)
        if pieces := _split_at_borders(s):
            return build.block(*(_partition(simplify(p, ranges), ranges, choices) for p in pieces))
    start, stop = build.integer(s.start), build.integer(s.stop)
    own = Interval(start, None if stop is None else stop - 1)
    return map_stmt(s, lambda e: e, lambda c: _partition(c, {**ranges, s.var: own}, choices))


def _is_small_and_pointwise(loop: Loop) -> bool:
    inner = list(walk_stmts(loop))
    stores = [c for c in inner if isinstance(c, Store)]
    plain = all(isinstance(c, Loop | Block | Store | If) for c in inner)
    return plain and len(stores) <= MAX_STORES and all(c.op is None for c in stores)


def _conditions(s: Stmt) -> Iterator[Binary]:
    """The comparisons that conditions of selects in `s` consist of, each once."""
    found = (x.condition for e in walk_stmt_exprs(s) for x in walk_expr(e) if isinstance(x, Select))
    return iter(dict.fromkeys(x for condition in found for x in _comparisons(condition)))


def _comparisons(condition: Expr) -> Iterator[Binary]:
    if not isinstance(condition, Binary):
        return
    if condition.op in ("and", "or"):
        yield from _comparisons(condition.left)
        yield from _comparisons(condition.right)
    elif condition.op in NEGATED and condition.left.type.dtype.is_integer:
        yield condition


def _shared_conditions(loop: Loop) -> Iterator[Binary]:
    """The comparisons of indices in `loop` that have the same value in all iterations."""
    bound = {c.var for c in walk_stmts(loop) if isinstance(c, Loop)}
    for condition in _conditions(loop):
        parts = list(walk_expr(condition))
        names = {x.name for x in parts if isinstance(x, Var)}
        if all(map(_may_run_early, parts)) and names and bound.isdisjoint(names):
            yield condition


def _may_run_early(e: Expr) -> bool:
    """Whether `e` reads no memory and cannot fail, its operands aside, so that it may run where it did not before."""
    if isinstance(e, Binary) and e.op in ("div", "mod"):
        return bool(build.integer(e.right))
    return isinstance(e, Var | Const | Cast | Binary)


def _assume(s: Stmt, condition: Binary, value: bool) -> Stmt:
    """`s` where `condition`, a comparison of integers, has a known value."""
    known = {condition: value, Binary(NEGATED[condition.op], condition.left, condition.right): not value}

    def choose(e: Expr) -> Expr:
        return build.const(known[e], e.type.dtype) if e in known else map_expr(e, choose)

    def change(s: Stmt) -> Stmt:
        return map_stmt(s, choose, change)

    return change(s)


def _split_at_borders(loop: Loop) -> list[Loop]:
    """`loop` in parts in which no condition changes; empty if there is none that changes."""
    start, stop = build.integer(loop.start), build.integer(loop.stop)
    if start is None or stop is None:
        return []
    borders: dict[Binary, tuple[int, bool]] = {}
    for condition in _conditions(loop):
        border = find_border(_widen_constants(condition), loop, set())
        if border is None or not build.is_true(border.small):
            continue
        at = build.integer(border.at)
        if at is not None and start < at < stop:
            borders[condition] = at, border.first
    places = sorted({at for at, _ in borders.values()})
    if not 0 < len(places) <= MAX_BORDERS:
        return []
    pieces = []
    for first, last in pairwise((start, *places, stop)):
        body = loop.body
        for condition, (at, holds_before) in borders.items():
            body = _assume(body, condition, (last <= at) == holds_before)
        pieces.append(replace(loop, start=build.const(first), stop=build.const(last), body=body))
    return pieces


def _widen_constants(condition: Binary) -> Binary:
    """`condition` with constants of 64 bits, as indices have."""

    def widen(e: Expr) -> Expr:
        value = build.integer(e)
        return e if value is None else build.const(value)

    return Binary(condition.op, widen(condition.left), widen(condition.right))
