"""Split loops where a condition on their variable changes, so that no iteration evaluates it.

A causal mask `u <= t ? x : 0` in a loop over `u` holds in the first iterations, and fails in the others. Only loops for
any number of rows need this: for known extents, the domains of statements are restricted before they become loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...core.dtypes import INT32, INT64
from ...core.internal_names import internal_name
from .. import build
from ..linear_forms import linear_terms, subtract
from ..nodes import Binary, Block, Cast, Const, Expr, If, Let, Load, Loop, LoopKind, Select, Stmt, Store, Var
from ..rewrite import map_expr, map_stmt, walk_expr, walk_stmt_exprs, walk_stmts

LARGEST_INDEX = 1 << 29
"""Largest index for which conditions are certain to be the same with 32 and with 64 bits."""
MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}


@dataclass(frozen=True, slots=True)
class Border:
    """The iteration at which a condition changes: it is true before (or, if not `first`, from there on).

    small: a condition under which that is certain; None if it always is.
    """

    at: Expr
    first: bool
    small: Expr | None


def split_masked_loops(s: Stmt) -> Stmt:
    """`s` with each innermost loop split where a condition of a select on its variable changes."""
    new = map_stmt(s, lambda e: e, split_masked_loops)
    if not isinstance(new, Loop) or new.kind not in (LoopKind.SERIAL, LoopKind.VECTOR) or new.step != 1:
        return new
    if any(isinstance(c, Loop) for c in walk_stmts(new.body)):
        return new
    bound = {c.name for c in walk_stmts(new.body) if isinstance(c, Let)}
    for condition in _list_conditions(new.body):
        border = find_border(condition, new, bound)
        if border is not None:
            return _split(new, condition, border)
    return new


def _list_conditions(s: Stmt) -> Iterator[Expr]:
    found = (x.condition for e in walk_stmt_exprs(s) for x in walk_expr(e) if isinstance(x, Select))
    return iter(dict.fromkeys(found))


def find_border(condition: Expr, loop: Loop, bound: set[str]) -> Border | None:
    """Where `condition` changes in `loop`; None unless it compares the variable with a loop invariant.

    bound: the names that the body binds.
    """
    if not isinstance(condition, Binary) or condition.op not in MIRRORED:
        return None
    left, right = _widen(condition.left), _widen(condition.right)
    if left.type != build.const(0).type or right.type != left.type:
        return None
    op, terms, constant = condition.op, *linear_terms(subtract(left, right))
    factor = terms.pop(build.var(loop.var), 0)
    if factor not in (1, -1) or not all(isinstance(a, Var) and a.name not in bound for a in terms):
        return None
    if factor == 1:
        terms, constant = {a: -c for a, c in terms.items()}, -constant
    else:
        op = MIRRORED[op]
    edge: Expr = build.const(constant)  # the condition is `variable op edge`
    for atom, c in terms.items():
        edge = build.add(edge, build.mul(atom, c))
    at = build.add(edge, 1) if op in ("le", "gt") else edge
    is_narrow = left is not condition.left or right is not condition.right
    small = _all_small(loop, terms, constant) if is_narrow else None
    return None if is_narrow and small is None else Border(at, op in ("le", "lt"), small)


def _widen(e: Expr) -> Expr:
    """`e` without casts of indices from 64 to 32 bits."""
    if isinstance(e, Cast) and e.dtype == INT32 and e.operand.type.dtype == INT64:
        return _widen(e.operand)
    return e


def _all_small(loop: Loop, terms: Mapping[Expr, int], constant: int) -> Expr | None:
    """A condition under which no index needs more than 32 bits; None if there is none that is simple."""
    if sum(map(abs, terms.values())) > 2 or abs(constant) > LARGEST_INDEX:
        return None
    small = build.le(loop.stop, LARGEST_INDEX)
    for atom in terms:
        small = build.logical_and(small, build.le(atom, LARGEST_INDEX))
    return small


def _split(loop: Loop, condition: Expr, border: Border) -> Stmt:
    middle = build.var(internal_name(loop.var, "border"))
    at = build.maximum(loop.start, build.minimum(loop.stop, border.at))
    before, after = (_decide(loop.body, condition, holds) for holds in (border.first, not border.first))
    parts = [replace(loop, stop=middle, body=before), replace(loop, start=middle, body=after)]
    body: Stmt = Let(middle.name, at, build.block(*(part for part in parts if part.body != build.NOTHING)))
    if border.small is None:
        return body
    return If(border.small, body, replace(loop, kind=LoopKind.SERIAL))  # short code for what hardly any call has


def _decide(s: Stmt, condition: Expr, holds: bool) -> Stmt:
    """`s` where `condition` is known, without updates by neutral elements."""

    def choose(e: Expr) -> Expr:
        if isinstance(e, Select) and e.condition == condition:
            return choose(e.then if holds else e.otherwise)
        return map_expr(e, choose)

    def change(s: Stmt, known: dict[tuple[str, tuple[Expr, ...]], Const]) -> Stmt:
        match s:
            case Block(body):
                return build.block(*(change(c, known) for c in body))
            case Store(buffer, indices, value, op, None):
                value = choose(value)
                if isinstance(value, Load) and value.mask is None:
                    value = known.get((value.buffer.name, value.indices), value)
                if op is not None and isinstance(value, Const) and value == build.neutral(op, value.type.dtype):
                    return build.NOTHING
                for place in [place for place in known if place[0] == buffer.name]:
                    del known[place]
                if op is None and isinstance(value, Const):
                    known[buffer.name, indices] = value
                return replace(s, value=value)
        known.clear()
        return map_stmt(s, choose, lambda inner: change(inner, {}))

    return change(s, {})
