"""Replace UNROLLED loops by copies of their bodies."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import CannotLower
from .. import build, linear_forms
from ..nodes import Block, Expr, Loop, LoopKind, Stmt
from ..rewrite import map_stmt, substitute


def unroll_loops(s: Stmt) -> Stmt:
    """`s` without UNROLLED loops; constant arithmetic on their variables is folded.

    Raises:
        CannotLower: the trip count of an UNROLLED loop is not constant.
    """
    return _unroll_statement(s, {})


def _unroll_statement(s: Stmt, values: Mapping[str, Expr]) -> Stmt:
    if isinstance(s, Loop) and s.kind is LoopKind.UNROLLED:
        return _unroll_loop(s, values)

    def on_expr(e: Expr) -> Expr:
        return substitute(e, values) if values else e

    new = map_stmt(s, on_expr, lambda c: _unroll_statement(c, values))
    if isinstance(new, Block) and new is not s:
        return build.block(*new.body)
    return new


def _unroll_loop(loop: Loop, values: Mapping[str, Expr]) -> Stmt:
    start, stop = substitute(loop.start, values), substitute(loop.stop, values)
    length = linear_forms.difference(stop, start)
    if length is None:
        raise CannotLower(f"loop {loop.var} cannot be unrolled: its trip count is not constant")
    offsets = range(0, length, loop.step)
    return build.block(*[_unroll_statement(loop.body, {**values, loop.var: build.add(start, o)}) for o in offsets])
