"""Loop partitioning: blocks whose tiles are full run code without guards.

A kernel gets two bodies, and each block runs one of them. In the body for full tiles, the last iteration of a loop over
tiles of terms is peeled if that tile is partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ....loop_ir import build, linear_forms
from ....loop_ir.intervals import Interval
from ....loop_ir.nodes import BLOCK, Expr, If, Loop, LoopKind, Stmt
from ....loop_ir.passes.simplify import simplify
from ....loop_ir.rewrite import map_stmt, substitute_stmt, walk_stmts
from ....thresholds import GPU_MAX_DUPLICATED_STATEMENTS
from ..plan.mapping import KernelPlan


def split_full_tiles(body: Stmt, plan: KernelPlan, ranges: Mapping[str, Interval]) -> Stmt:
    """`body` with a copy for full tiles if that removes guards in loops. ranges: intervals of launch variables."""
    if sum(1 for _ in walk_stmts(body)) > GPU_MAX_DUPLICATED_STATEMENTS:
        return body
    plain = simplify(body, ranges)
    if not (there := count_guards(plain)):
        return body
    partial = tuple(_find_partial_blocks(plan))
    inside = {**ranges, **{name: Interval(0, last - 1) for name, last in partial}}
    full = _peel_last_iteration(simplify(body, inside) if partial else plain, inside)
    if count_guards(full) >= there:
        return body
    condition: Expr = build.TRUE
    for name, last in partial:
        condition = build.logical_and(condition, build.lt(build.var(name), last))
    return build.when(condition, full, body) if partial else full


def _find_partial_blocks(plan: KernelPlan) -> Iterator[tuple[str, int]]:
    """The block variables along which the last tile is known to be partial, each with its last value."""
    rows = zip(BLOCK, plan.group.rows, plan.sizes, plan.tiles, plan.blocks, plan.variables, strict=False)
    for name, row, size, tiles, blocks, variable in rows:
        if tiles == blocks > 1 and row.extent % size and not variable:
            yield name, tiles - 1


def count_guards(s: Stmt) -> int:
    """The number of guards in loops: conditions, and inner loops of varying length."""
    return _count_guards_in_loops(s, inside=False)


def _count_guards_in_loops(s: Stmt, *, inside: bool) -> int:
    own, below = 0, inside
    if isinstance(s, Loop):
        below = True
        own = int(inside and linear_forms.difference(s.stop, s.start) is None)
    elif isinstance(s, If):
        own = int(inside)
    return own + sum(_count_guards_in_loops(c, inside=below) for c in _list_child_statements(s))


def _list_child_statements(s: Stmt) -> Sequence[Stmt]:
    found: list[Stmt] = []

    def visit(c: Stmt) -> Stmt:
        found.append(c)
        return c

    map_stmt(s, lambda e: e, visit)
    return found


def _peel_last_iteration(s: Stmt, ranges: Mapping[str, Interval]) -> Stmt:
    """`s` with the last iterations of outermost loops peeled, where the other iterations then have fewer guards."""
    if not isinstance(s, Loop):
        return map_stmt(s, lambda e: e, lambda c: _peel_last_iteration(c, ranges))
    start, stop = build.integer(s.start), build.integer(s.stop)
    if s.kind is not LoopKind.SERIAL or s.step != 1 or start is None or stop is None or stop - start < 2:
        return s
    others = simplify(Loop(s.var, s.start, build.const(stop - 1), s.body), ranges)
    if count_guards(others) >= count_guards(s) - _count_removable_guards(s):
        return s
    last = simplify(substitute_stmt(s.body, {s.var: build.const(stop - 1)}), ranges)
    return build.block(others, last)


def _count_removable_guards(s: Loop) -> int:
    """The guards that peeling the last iteration removes in any case, such as those around copies of the next tile."""
    return sum(1 for c in _list_child_statements(s.body) if isinstance(c, If))
