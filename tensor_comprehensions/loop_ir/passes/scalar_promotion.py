"""Scalar promotion: elements that a serial loop only updates are kept in registers during the loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from ...core.internal_names import internal_name
from .. import build, linear_forms
from ..bounds import BoundsContext, runs_at_least_once
from ..intrinsics import is_hint
from ..names import Names
from ..nodes import Block, Buffer, Expr, If, Invoke, Let, Load, Loop, LoopKind, Ramp, Space, Stmt, Store, Type
from ..rewrite import allocated_buffers, map_stmt, mentions, stmt_expressions, walk_expr, walk_stmts
from .reductions import in_accumulator_type, unconditional_stores


def hoist_accumulators(s: Stmt) -> Stmt:
    """`s` with updates `buffer[indices] op= value` in serial loops made in registers, loaded before and stored after.

    This applies to scalars and vectors whose indices are loop-invariant, if the loop accesses the buffer in no other
    way. Run it after `vectorize_loops` and `unroll_loops`. float16 and bfloat16 elements accumulate in float32.
    """
    if not any(
        isinstance(c, Store) and c.op is not None and c.buffer.space is not Space.REGISTER for c in walk_stmts(s)
    ):
        return s
    return _hoist_accumulators(s, Names.of(s), BoundsContext.empty())


def _hoist_accumulators(s: Stmt, names: Names, scope: BoundsContext) -> Stmt:
    match s:
        case Store() | Loop(kind=LoopKind.VECTOR):  # `vectorize_loops` handles its reductions
            return s
        case Block(body):
            return _hoist_in_block(s, body, names, scope)
        case Loop(kind=LoopKind.SERIAL):
            return _hoist_loop(s, [], names, scope)
        case Loop():
            scope = scope.in_loop(s)
        case Let(name, value):
            scope = scope.in_let(name, value)
    return map_stmt(s, lambda e: e, lambda c: _hoist_accumulators(c, names, scope))


def _hoist_in_block(s: Block, body: tuple[Stmt, ...], names: Names, scope: BoundsContext) -> Stmt:
    done: list[Stmt] = []
    for c in body:
        done.append(_hoist_after(c, done, names, scope))  # which may take stores from the end of `done`
    same = len(done) == len(body) and all(a is b for a, b in zip(done, body, strict=True))
    return s if same else build.block(*done)


def _hoist_after(s: Stmt, before: list[Stmt], names: Names, scope: BoundsContext) -> Stmt:
    """Hoist in `s`, a loop perhaps inside bindings; initializing stores at the end of `before` may move into these."""
    match s:
        case Loop(kind=LoopKind.SERIAL):
            return _hoist_loop(s, before, names, scope)
        case Let(name, value, body) if not _is_used_by_stores(name, value, before):
            inner = _hoist_after(body, before, names, scope.in_let(name, value))
            return s if inner is body else replace(s, body=inner)
    return _hoist_accumulators(s, names, scope)


def _is_used_by_stores(name: str, value: Expr, before: list[Stmt]) -> bool:
    """Whether the last stores of `before` must not move into a binding: they mention `name`, or `value` reads them."""
    run = _last_stores(before)
    return _has_load_from(value, {s.buffer.name for s in run}) or any(
        mentions(e, {name}) for s in run for e in stmt_expressions(s)
    )


def _last_stores(before: list[Stmt]) -> list[Store]:
    """The consecutive non-updating stores at the end of `before`, in order."""
    run: list[Store] = []
    for s in reversed(before):
        if not isinstance(s, Store) or s.op is not None:
            break
        run.append(s)
    return run[::-1]


def _hoist_loop(loop: Loop, before: list[Stmt], names: Names, scope: BoundsContext) -> Stmt:
    """`loop` with its accumulators in registers; stores at the end of `before` that initialize them are moved there."""
    inside = scope.in_loop(loop)
    found = _find_promotable_updates(loop, inside)
    if not found:
        body = _hoist_accumulators(loop.body, names, inside)
        return loop if body is loop.body else replace(loop, body=body)
    registers = [u.register(names) for u in found]
    by_store = {id(s): r for u, r in zip(found, registers, strict=True) for s in u.stores}
    body = _hoist_accumulators(_redirect_stores(loop.body, by_store), names, inside)
    certain = runs_at_least_once(loop, scope)
    initial = _take_initial_values(found, before, certain)
    parts: list[Stmt] = []
    for n, (u, r) in enumerate(zip(found, registers, strict=True)):
        value = initial.get(n, Load(u.buffer, u.indices, u.mask))
        parts.append(Store(r, (), in_accumulator_type(value, r.type.dtype), origin=u.stores[0].origin))
    parts.append(replace(loop, body=body))
    for u, r in zip(found, registers, strict=True):
        total = build.cast(Load(r, ()), u.buffer.type.dtype)
        parts.append(Store(u.buffer, u.indices, total, None, u.mask, origin=u.stores[0].origin))
    whole = build.allocate(registers, build.block(*parts))
    return whole if certain or initial else If(build.lt(loop.start, loop.stop), whole)


@dataclass(frozen=True, slots=True)
class _Update:
    """All the updates of one element (or vector) in a loop."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    mask: Expr | None
    op: str
    stores: tuple[Store, ...]

    def register(self, names: Names) -> Buffer:
        lanes = max((i.type.lanes for i in self.indices), default=1)
        name = names.fresh(internal_name(self.buffer.name, "sum" if self.op == "+" else "acc"))
        return Buffer(name, Type(self.buffer.type.dtype.accumulator, lanes), (), (), Space.REGISTER)


def _find_promotable_updates(loop: Loop, scope: BoundsContext) -> list[_Update]:
    """The updates in `loop` that can be promoted to registers, in order of appearance."""
    inside = list(walk_stmts(loop.body))
    bound = {loop.var} | {s.var for s in inside if isinstance(s, Loop)} | {s.name for s in inside if isinstance(s, Let)}
    stored = {s.buffer.name for s in inside if isinstance(s, Store)}
    private = {b.name for b in allocated_buffers(loop.body)}
    refused = private | set(_read_or_invoked_buffers(inside))
    certain = {id(s) for s in unconditional_stores(loop.body, scope)}
    groups: dict[str, dict[object, _Update]] = {}
    for s in inside:
        if not isinstance(s, Store) or s.buffer.name in refused:
            continue
        where = (*s.indices, s.mask) if s.mask is not None else s.indices
        fixed = not any(mentions(i, bound) or _has_load_from(i, stored | private) for i in where)
        if s.op is None or not fixed or id(s) not in certain or s.buffer.space is Space.REGISTER:
            refused.add(s.buffer.name)
            continue
        group = groups.setdefault(s.buffer.name, {})
        known = group.get(key := (s.op, *where))
        stores = (s,) if known is None else (*known.stores, s)
        group[key] = _Update(s.buffer, s.indices, s.mask, s.op, stores)
    kept = (list(g.values()) for name, g in groups.items() if name not in refused)
    return [u for updates in kept if _are_updates_disjoint(updates) for u in updates]


def _read_or_invoked_buffers(inside: list[Stmt]) -> Iterator[str]:
    """The buffers that are read, or are operands of an intrinsic."""
    for s in inside:
        if isinstance(s, Invoke) and not is_hint(s):
            yield from (b.name for b, _ in s.operands)
        for e in stmt_expressions(s):
            yield from (x.buffer.name for x in walk_expr(e) if isinstance(x, Load))


def _has_load_from(e: Expr, names: set[str]) -> bool:
    return any(isinstance(x, Load) and x.buffer.name in names for x in walk_expr(e))


def _are_updates_disjoint(updates: list[_Update]) -> bool:
    """Whether no two of the updates, all of one buffer, can access the same element."""
    spans = [[_compute_index_span(i) for i in u.indices] for u in updates]
    return all(_are_apart(a, b) for n, a in enumerate(spans) for b in spans[:n])


_Span = tuple[linear_forms.Terms, int, int] | None


def _compute_index_span(index: Expr) -> _Span:
    """(terms, first, last): the lanes of `index` are in `terms + first .. terms + last`; None if that is not known."""
    base, reach = index, 0
    if isinstance(index, Ramp):
        base, reach = index.base, index.stride * (index.lanes - 1)
    if base.type.lanes > 1:
        return None
    terms, constant = linear_forms.linear_terms(base)
    return terms, constant + min(reach, 0), constant + max(reach, 0)


def _are_apart(a: list[_Span], b: list[_Span]) -> bool:
    for x, y in zip(a, b, strict=True):
        if x is not None and y is not None and (x[1] > y[2] or y[1] > x[2]) and x[0] == y[0]:
            return True
    return False


def _redirect_stores(s: Stmt, by_store: dict[int, Buffer]) -> Stmt:
    """`s` with the stores in `by_store` redirected to registers. Masks are dropped: the final store applies them."""
    if isinstance(s, Store):
        r = by_store.get(id(s))
        return s if r is None else Store(r, (), in_accumulator_type(s.value, r.type.dtype), s.op, origin=s.origin)
    return map_stmt(s, lambda e: e, lambda c: _redirect_stores(c, by_store))


def _take_initial_values(found: list[_Update], before: list[Stmt], some: bool) -> dict[int, Expr]:
    """Remove stores at the end of `before` that initialize accumulators in `found`; returns their values by position.

    some: whether they may initialize only some of the accumulators; otherwise all or none.
    """
    names = {u.buffer.name for u in found}
    run = list(takewhile(lambda s: s.buffer.name in names, reversed(_last_stores(before))))
    if any(_has_load_from(e, names) for s in run for e in stmt_expressions(s)):
        return {}
    taken: dict[int, Expr] = {}
    keys = {(u.buffer.name, u.indices, u.mask): n for n, u in enumerate(found)}
    for s in run:
        n = keys.get((s.buffer.name, s.indices, s.mask))
        if n is None or n in taken:
            return {}
        taken[n] = s.value
    if not some and len(taken) < len(found):
        return {}
    del before[len(before) - len(run) :]
    return taken
