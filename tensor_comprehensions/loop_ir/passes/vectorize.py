"""Make VECTOR loops explicit: ramps, masks, and vector registers as accumulators.

A loop with vector_factors (L, V) becomes a loop over blocks of V interleaved vectors of L lanes, then single vectors,
then one masked vector. There is no scalar remainder. With V = 0 it becomes a loop over masked vectors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import is_

from typing_extensions import assert_never

from ...core.dtypes import BOOL
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from .. import build, linear_forms
from ..bounds import BoundsContext, lower_bound, runs_at_least_once, upper_bound
from ..intrinsics import is_hint
from ..names import Names
from ..nodes import (
    Allocate,
    Binary,
    Block,
    Check,
    Const,
    Expr,
    If,
    Invoke,
    Let,
    Load,
    Loop,
    LoopKind,
    Space,
    Stmt,
    Store,
    Var,
    While,
    Window,
)
from ..rewrite import stmt_expressions, walk_expr, walk_stmt_exprs, walk_stmts
from .reductions import Reduction, VectorAccumulator, find_reductions, unconditional_stores
from .unroll import unroll_loops
from .vector_body import VectorBody


def vectorize_loops(s: Stmt) -> Stmt:
    """`s` without VECTOR loops.

    Raises:
        CannotLower: a VECTOR loop contains a construct without a vector form; the message names it.
    """
    if not any(isinstance(c, Loop) and c.kind is LoopKind.VECTOR for c in walk_stmts(s)):
        return s
    return _materialize_accumulators(*_vectorize_statement(s, Names.of(s), BoundsContext.empty()))


# --- where accumulators live -------------------------------------------------------------------------------------
#
# A vector loop leaves its accumulators pending: they are initialized before and combined after the outermost enclosing
# serial loop that accesses the reduced element in no other way.

_Result = tuple[Stmt, tuple[VectorAccumulator, ...]]
"""A statement without vector loops, and the pending accumulators, which code around it must allocate and combine."""


def _vectorize_statement(s: Stmt, names: Names, scope: BoundsContext) -> _Result:
    match s:
        case Store() | Check() | Invoke():
            return s, ()
        case Loop(kind=LoopKind.VECTOR):
            return _vectorize_loop(s, names, scope)
        case Loop(body=body):
            inner, pending = _vectorize_statement(body, names, scope.in_loop(s))
            if s.kind is LoopKind.PARALLEL or not runs_at_least_once(s, scope):
                inner, pending = _materialize_accumulators(inner, pending), ()
            settled, pending = _materialize_before_leaving(s, {s.var}, inner, pending)
            return s if settled is body else replace(s, body=settled), pending
        case Let(name, value, body):
            inner, pending = _vectorize_statement(body, names, scope.in_let(name, value))
            settled, pending = _materialize_before_leaving(s, {name}, inner, pending)
            return s if settled is body else Let(name, value, settled), pending
        case Allocate(buffers, body):
            inner, pending = _vectorize_statement(body, names, scope)
            settled, pending = _materialize_before_leaving(s, {b.name for b in buffers}, inner, pending)
            return s if settled is body else replace(s, body=settled), pending
        case While(_, body):
            settled = _materialize_accumulators(*_vectorize_statement(body, names, scope))
            return s if settled is body else replace(s, body=settled), ()
        case Window(body=body):  # its body was vectorized before
            inner, pending = _vectorize_statement(body, names, scope)
            return (s if inner is body else replace(s, body=inner)), pending
        case Block(body):
            return _vectorize_block(s, body, names, scope)
        case If(condition, then, otherwise):
            yes = _materialize_accumulators(*_vectorize_statement(then, names, scope))
            no = (
                _materialize_accumulators(*_vectorize_statement(otherwise, names, scope))
                if otherwise is not None
                else None
            )
            return s if yes is then and no is otherwise else If(condition, yes, no), ()
        case _:
            assert_never(s)


def _vectorize_block(s: Block, body: tuple[Stmt, ...], names: Names, scope: BoundsContext) -> _Result:
    results = [_vectorize_statement(c, names, scope) for c in body]
    waits = any(pending for _, pending in results)
    reached = Counter(name for c in body for name in _reached_buffers(c)) if waits else Counter[str]()
    done: list[Stmt] = []
    leaving: list[VectorAccumulator] = []
    for inner, pending in results:
        stay = tuple(a for a in pending if reached[a.buffer_name] > 1)  # other statements access the buffer, too
        done.append(_materialize_accumulators(inner, stay))
        leaving.extend(a for a in pending if a not in stay)
    return s if all(map(is_, done, body)) else build.block(*done), tuple(leaving)


def _materialize_before_leaving(
    outer: Stmt, bound: set[str], inner: Stmt, pending: tuple[VectorAccumulator, ...]
) -> _Result:
    """`inner` with accumulators materialized that cannot live outside `outer`, which binds `bound`; and the others."""
    stay = tuple(a for a in pending if not _can_live_outside(a, outer, bound))
    return _materialize_accumulators(inner, stay), tuple(a for a in pending if a not in stay)


def _can_live_outside(a: VectorAccumulator, outer: Stmt, bound: set[str]) -> bool:
    indices = [x for i in a.reduction.indices for x in walk_expr(i)]
    free = not any(isinstance(x, Load) or (isinstance(x, Var) and x.name in bound) for x in indices)
    read = (x for e in stmt_expressions(outer) for x in walk_expr(e) if isinstance(x, Load))
    return free and a.buffer_name not in bound and all(x.buffer.name != a.buffer_name for x in read)


def _reached_buffers(s: Stmt) -> set[str]:
    """The names of the buffers that `s` accesses."""
    found = {e.buffer.name for e in walk_stmt_exprs(s) if isinstance(e, Load)}
    for c in walk_stmts(s):
        if isinstance(c, Store):
            found.add(c.buffer.name)
        elif isinstance(c, Invoke) and not is_hint(c):
            found.update(b.name for b, _ in c.operands)
    return found


def _materialize_accumulators(s: Stmt, accumulators: tuple[VectorAccumulator, ...]) -> Stmt:
    """`s` with `accumulators` allocated around it, initialized before and combined after it."""
    if not accumulators:
        return s
    first, last = [a.initialize() for a in accumulators], [a.finish() for a in accumulators]
    return build.allocate([a.buffer for a in accumulators], build.block(*first, s, *last))


def _vectorize_loop(loop: Loop, names: Names, scope: BoundsContext) -> _Result:
    lanes = loop.vector_factors[0]
    if lanes == 1:
        return _vectorize_statement(replace(loop, kind=LoopKind.SERIAL, vector_factors=(1, 1)), names, scope)
    if loop.step != 1:
        raise CannotLower(f"vector loop {loop.var} has step {loop.step}, not 1")
    body = unroll_loops(loop.body)
    _require_vector_form(loop, body)
    reductions = find_reductions(loop.var, body)
    _require_elements(reductions, body, scope)
    pieces = _split_vector_loop(loop, names)
    used = max((p.copies for p in pieces), default=1)
    accumulators = tuple(VectorAccumulator(r, r.registers(names, lanes, used)) for r in reductions)
    steps = [_emit_piece(p, body, loop, accumulators, names) for p in pieces]
    whole = build.block(*_bind_ends(pieces, steps))
    exist = not loop.vector_factors[1] and all(r.buffer.space is Space.REGISTER for r in reductions)
    if not accumulators or exist or runs_at_least_once(loop, scope):
        return whole, accumulators
    # If the loop does not run, the element may not exist.
    return build.when(build.lt(loop.start, loop.stop), _materialize_accumulators(whole, accumulators)), ()


def _require_vector_form(loop: Loop, body: Stmt) -> None:
    for inner in walk_stmts(body):
        if isinstance(inner, Check) or (isinstance(inner, Invoke) and not is_hint(inner)):
            raise CannotLower(f"vector loop {loop.var} contains a {type(inner).__name__}, which has no vector form")
        if isinstance(inner, While) or (isinstance(inner, Allocate) and inner.lengths):
            raise CannotLower(f"vector loop {loop.var} contains a {type(inner).__name__}, whose lanes would go apart")
        if isinstance(inner, Loop) and inner.kind not in (LoopKind.SERIAL, LoopKind.UNROLLED):
            raise CannotLower(f"vector loop {loop.var} contains the {inner.kind.value} loop {inner.var}")


def _require_elements(reductions: list[Reduction], body: Stmt, scope: BoundsContext) -> None:
    """Refuse reductions under a condition whose element may not exist if the condition is false."""
    certain = {id(s) for s in unconditional_stores(body, scope)}
    for r in reductions:
        if any(id(s) in certain for s in r.stores):
            continue
        for i, extent in zip(r.indices, r.buffer.shape, strict=True):  # dynamic extents are 0
            low, high = lower_bound(i, scope), upper_bound(i, scope)
            if low is None or high is None or low < 0 or high >= extent:
                raise CannotLower(f"{r.buffer.name} is reduced under a condition at an element that may not exist")


# --- the pieces of the iteration space ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """The iterations `[start, stop)` of a loop, executed by `copies` vectors at a time.

    lets: variables to bind before this piece, for it and later ones. count: the active lanes of a masked tail, else
    None. once: whether the piece is a single step.
    """

    start: Expr
    stop: Expr
    copies: int
    count: Expr | None = None
    once: bool = False
    lets: tuple[tuple[str, Expr], ...] = ()


def _split_vector_loop(loop: Loop, names: Names) -> list[_Piece]:
    if not loop.vector_factors[1]:
        return [_Piece(loop.start, loop.stop, 1, build.sub(loop.stop, build.var(loop.var)))]
    trips = linear_forms.difference(loop.stop, loop.start)
    if trips is None:
        return _dynamic_pieces(loop, names)
    lanes, copies = loop.vector_factors
    block = lanes * copies
    pieces: list[_Piece] = []
    done = trips // block * block if trips > 0 else 0
    if done:
        pieces.append(_Piece(loop.start, build.add(loop.start, done), copies, once=done == block))
    singles = max(trips - done, 0) // lanes
    if singles:
        at = build.add(loop.start, done)
        pieces.append(_Piece(at, build.add(at, singles * lanes), singles, once=True))
        done += singles * lanes
    if trips > done:
        pieces.append(_Piece(build.add(loop.start, done), loop.stop, 1, build.const(trips - done), once=True))
    return pieces


def _dynamic_pieces(loop: Loop, names: Names) -> list[_Piece]:
    lanes, copies = loop.vector_factors
    name = names.fresh(internal_name(loop.var, "count"))
    trips = build.var(name)
    lets: tuple[tuple[str, Expr], ...] = ((name, build.maximum(linear_forms.subtract(loop.stop, loop.start), 0)),)
    pieces: list[_Piece] = []
    at = loop.start
    for count in (copies, 1) if copies > 1 else (1,):
        width = lanes * count
        name = names.fresh(internal_name(loop.var, "stop"))
        end = build.add(loop.start, build.mul(build.div(trips, width), width))
        pieces.append(_Piece(at, build.var(name), count, lets=(*lets, (name, end))))
        at, lets = build.var(name), ()
    pieces.append(_Piece(at, loop.stop, 1, build.mod(trips, lanes), once=True))
    return pieces


def _bind_ends(pieces: list[_Piece], steps: list[Stmt]) -> tuple[Stmt, ...]:
    """The emitted pieces `steps` in order, with the `lets` of each around itself and all later ones."""
    rest: tuple[Stmt, ...] = ()
    for piece, step in zip(reversed(pieces), reversed(steps), strict=True):
        rest = (step, *rest)
        for name, value in reversed(piece.lets):
            rest = (Let(name, value, build.block(*rest)),)
    return rest


def _emit_piece(
    piece: _Piece, body: Stmt, loop: Loop, accumulators: tuple[VectorAccumulator, ...], names: Names
) -> Stmt:
    lanes = loop.vector_factors[0]
    base = piece.start if piece.once else build.var(loop.var)
    values = tuple({loop.var: build.ramp(build.add(base, c * lanes), 1, lanes)} for c in range(piece.copies))
    tail, let = _tail_mask(piece, lanes, names)
    by_store = {id(s): a for a in accumulators for s in a.reduction.stores}
    widened = VectorBody(lanes, values, by_store, names, tail)
    inner = widened.vectorize_stmt(body)
    if let is not None:
        inner = Let(*let, inner)
    if not piece.once:
        return Loop(loop.var, piece.start, piece.stop, inner, step=lanes * piece.copies)
    return inner if piece.count is None else build.when(build.gt(piece.count, 0), inner)


def _tail_mask(piece: _Piece, lanes: int, names: Names) -> tuple[Expr | None, tuple[str, Expr] | None]:
    """The mask of the tail's active lanes (None: all), and the name to bind it to if it is not constant."""
    if piece.count is None:
        return None, None
    mask = Binary("lt", build.ramp(0, 1, lanes), build.broadcast(piece.count, lanes))
    if type(piece.count) is Const:
        return mask, None
    name = names.fresh(internal_name("mask"))
    return build.var(name, BOOL, lanes), (name, mask)
