"""VECTOR loops made explicit: ramps, masks, vector registers that accumulate, and nothing left to guess.

A loop of `factor == (L, V)` becomes a loop over blocks of V interleaved vectors of L lanes, then single vectors, then
one masked vector. There is no scalar remainder.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..dtypes import BOOL
from ..errors import CannotLower
from . import affine, build
from .names import Names
from .nodes import (
    Allocate,
    Binary,
    Block,
    Broadcast,
    Buffer,
    Call,
    Cast,
    Check,
    Const,
    Expr,
    If,
    Invoke,
    Let,
    Load,
    Loop,
    LoopKind,
    Ramp,
    ReduceLanes,
    Select,
    Shuffle,
    Space,
    Stmt,
    Store,
    Type,
    Unary,
    Var,
)
from .reductions import Reduction, find_reductions, widened
from .rewrite import map_stmt, walk
from .unroll import unroll


def vectorize(s: Stmt) -> Stmt:
    """`s` without VECTOR loops.

    Raises:
        CannotLower: a VECTOR loop contains what has no vector form; the message says what.
    """
    if not any(isinstance(c, Loop) and c.kind is LoopKind.VECTOR for c in walk(s)):
        return s
    return _vectorize(s, Names.of(s))


def _vectorize(s: Stmt, names: Names) -> Stmt:
    if isinstance(s, Store):
        return s
    if isinstance(s, Loop) and s.kind is LoopKind.VECTOR:
        return _vectorize_loop(s, names)
    return map_stmt(s, lambda e: e, lambda c: _vectorize(c, names))


def _vectorize_loop(loop: Loop, names: Names) -> Stmt:
    lanes = loop.factor[0]
    if lanes == 1:
        return _vectorize(replace(loop, kind=LoopKind.SERIAL, factor=(1, 1)), names)
    if loop.step != 1:
        raise CannotLower(f"vector loop {loop.var} has step {loop.step}, not 1")
    body = unroll(loop.body)
    for inner in walk(body):
        if isinstance(inner, Check | Invoke):
            raise CannotLower(f"vector loop {loop.var} contains a {type(inner).__name__}, which has no vector form")
        if isinstance(inner, Loop) and inner.kind not in (LoopKind.SERIAL, LoopKind.UNROLLED):
            raise CannotLower(f"vector loop {loop.var} contains the {inner.kind.value} loop {inner.var}")
    reductions = find_reductions(loop.var, body)
    pieces = _pieces(loop, names)
    used = max((p.copies for p in pieces), default=1)
    accumulators = [_Accumulator(r, r.accumulator(names, lanes, used)) for r in reductions]
    steps = [_emit_piece(p, body, loop, accumulators, names) for p in pieces]
    parts = [a.reduction.initialise(a.buffer) for a in accumulators]
    parts += [build.block(*_bind_ends(pieces, steps))] if steps else []
    parts += [a.reduction.finish(a.buffer) for a in accumulators]
    return build.allocate([a.buffer for a in accumulators], build.block(*parts))


@dataclass(frozen=True, slots=True)
class _Accumulator:
    reduction: Reduction
    buffer: Buffer  # one vector register per interleaved copy


# --- the pieces of the iteration space ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch `[start, stop)` of the loop handled by `copies` vectors at a time.

    lets: variables to bind before this piece, for it and later ones. count: active lanes, when this is the masked
    tail. once: whether the stretch is exactly one trip.
    """

    start: Expr
    stop: Expr
    copies: int
    count: Expr | None = None
    once: bool = False
    lets: tuple[tuple[str, Expr], ...] = ()


def _pieces(loop: Loop, names: Names) -> list[_Piece]:
    trips = affine.difference(loop.stop, loop.start)
    if trips is None:
        return _dynamic_pieces(loop, names)
    lanes, copies = loop.factor
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
    lanes, copies = loop.factor
    name = names.fresh(f"{loop.var}_count")
    trips = build.var(name)
    lets: tuple[tuple[str, Expr], ...] = ((name, build.maximum(affine.subtract(loop.stop, loop.start), 0)),)
    pieces: list[_Piece] = []
    at = loop.start
    for count in (copies, 1) if copies > 1 else (1,):
        width = lanes * count
        name = names.fresh(f"{loop.var}_stop")
        end = build.add(loop.start, build.mul(build.div(trips, width), width))
        pieces.append(_Piece(at, build.var(name), count, lets=(*lets, (name, end))))
        at, lets = build.var(name), ()
    pieces.append(_Piece(at, loop.stop, 1, build.mod(trips, lanes), once=True))
    return pieces


def _bind_ends(pieces: list[_Piece], steps: list[Stmt]) -> tuple[Stmt, ...]:
    """The emitted pieces in order, its `lets` around its own piece and all later ones."""
    rest: tuple[Stmt, ...] = ()
    for piece, step in zip(reversed(pieces), reversed(steps), strict=True):
        rest = (step, *rest)
        for name, value in reversed(piece.lets):
            rest = (Let(name, value, build.block(*rest)),)
    return rest


def _emit_piece(piece: _Piece, body: Stmt, loop: Loop, accumulators: list[_Accumulator], names: Names) -> Stmt:
    lanes = loop.factor[0]
    base = piece.start if piece.once else build.var(loop.var)
    values = tuple({loop.var: build.ramp(build.add(base, c * lanes), 1, lanes)} for c in range(piece.copies))
    tail, let = _tail_mask(piece, lanes, names)
    by_store = {id(s): a for a in accumulators for s in a.reduction.stores}
    widened = _Widened(lanes, values, by_store, names, tail)
    inner = widened.stmt(body)
    if not piece.once:
        return Loop(loop.var, piece.start, piece.stop, inner, step=lanes * piece.copies)
    if let is not None:
        inner = Let(*let, inner)
    return inner if piece.count is None else build.when(build.gt(piece.count, 0), inner)


def _tail_mask(piece: _Piece, lanes: int, names: Names) -> tuple[Expr | None, tuple[str, Expr] | None]:
    """The lanes of the tail that run, and the binding of their name when they are not constant."""
    if piece.count is None:
        return None, None
    mask = Binary("lt", build.ramp(0, 1, lanes), build.broadcast(piece.count, lanes))
    if type(piece.count) is Const:
        return mask, None
    name = names.fresh("mask")
    return build.var(name, BOOL, lanes), (name, mask)


# --- statements and expressions over lanes -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Widened:
    """How the body reads for one piece: what each name is in each interleaved copy, and which lanes run.

    tail: lanes inside the loop's bounds. branch: per copy, lanes for which the enclosing conditions hold.
    """

    lanes: int
    values: tuple[dict[str, Expr], ...]
    accumulators: dict[int, _Accumulator]
    names: Names
    tail: Expr | None
    branch: tuple[Expr | None, ...] = ()
    private: dict[str, tuple[Buffer, ...]] = field(default_factory=dict)

    @property
    def copies(self) -> range:
        return range(len(self.values))

    def condition(self, c: int) -> Expr | None:
        return self.branch[c] if self.branch else None

    def mask(self, c: int) -> Expr | None:
        return build.both(self.tail, self.condition(c))

    # Statements: every leaf is repeated for each copy in place, so that the copies interleave.

    def stmt(self, s: Stmt) -> Stmt:
        match s:
            case Block(body):
                return build.block(*[self.stmt(c) for c in body])
            case Store():
                if id(s) in self.accumulators:
                    return build.block(*[self.accumulate(s, c) for c in self.copies])
                return build.block(*[self.store(s, c) for c in self.copies])
            case Loop(name, start, stop):
                bounds = (self.expr(start, 0), self.expr(stop, 0))
                if any(b.type.lanes > 1 for b in bounds):
                    raise CannotLower(f"the bounds of loop {name} differ between the lanes of a vector loop")
                return replace(s, start=bounds[0], stop=bounds[1], body=self.stmt(s.body))
            case If():
                return self.conditional(s)
            case Let():
                return self.let(s)
            case Allocate():
                return self.allocate(s)
        raise CannotLower(f"{type(s).__name__} has no vector form")

    def store(self, s: Store, c: int) -> Stmt:
        where, value = tuple(self.expr(i, c) for i in s.indices), self.expr(s.value, c)
        own = self.expr(s.mask, c) if s.mask is not None else None
        if s.buffer.name in self.private:
            target, where = self.privatised(s.buffer, where, c)
            guard = build.both(own, self.condition(c))
        else:
            target, guard = s.buffer, build.both(own, self.mask(c))
            _require_distinct(s, where)
        return Store(target, where, build.broadcast(value, self.lanes), s.op, self.wide(guard), s.streaming)

    def accumulate(self, s: Store, c: int) -> Stmt:
        accumulator = self.accumulators[id(s)]
        reduction = accumulator.reduction
        value = build.broadcast(self.expr(widened(s.value, reduction.dtype), c), self.lanes)
        own = self.expr(s.mask, c) if s.mask is not None else None
        guard = self.wide(build.both(own, self.mask(c)))
        if guard is not None:
            value = build.select(guard, value, reduction.neutral)
        return Store(accumulator.buffer, (build.const(c),), value, s.op)

    def conditional(self, s: If) -> Stmt:
        conditions = [self.expr(s.condition, c) for c in self.copies]
        if all(e.type.lanes == 1 for e in conditions):
            otherwise = self.stmt(s.otherwise) if s.otherwise is not None else None
            return build.when(conditions[0], self.stmt(s.then), otherwise)
        # The condition gets a name: the branches may overwrite what it reads.
        bound = [self.names.fresh("mask") for _ in self.copies]
        held: list[Expr] = [build.var(n, BOOL, self.lanes) for n in bound]
        then = self.where(held).stmt(s.then)
        parts = [then]
        if s.otherwise is not None:
            parts.append(self.where([build.logical_not(h) for h in held]).stmt(s.otherwise))
        inner = build.block(*parts)
        for name, e in zip(reversed(bound), reversed(conditions), strict=True):
            inner = Let(name, build.broadcast(e, self.lanes), inner)
        return inner

    def where(self, conditions: list[Expr]) -> _Widened:
        return replace(self, branch=tuple(build.both(self.condition(c), e) for c, e in enumerate(conditions)))

    def let(self, s: Let) -> Stmt:
        bound = [self.expr(s.value, c) for c in self.copies]
        if all(e.type.lanes == 1 for e in bound):
            return Let(s.name, bound[0], self.stmt(s.body))
        chosen = [s.name if len(bound) == 1 else self.names.fresh(s.name) for _ in bound]
        types = [Type(e.type.dtype, self.lanes) for e in bound]
        values = tuple({**self.values[c], s.name: Var(chosen[c], types[c])} for c in self.copies)
        inner = replace(self, values=values).stmt(s.body)
        for name, e in zip(reversed(chosen), reversed(bound), strict=True):
            inner = Let(name, e, inner)
        return inner

    def allocate(self, s: Allocate) -> Stmt:
        buffers = tuple(self.widened_buffer(s.buffer) for _ in self.copies)
        inner = replace(self, private={**self.private, s.buffer.name: buffers}).stmt(s.body)
        return build.allocate(buffers, inner)

    def widened_buffer(self, b: Buffer) -> Buffer:
        """What holds `lanes` private instances of `b`: vector registers, or one more dimension in memory."""
        name = b.name if len(self.values) == 1 else self.names.fresh(b.name)
        if b.space is Space.REGISTER:
            return Buffer(name, Type(b.type.dtype, self.lanes), b.shape, b.strides, b.space)
        strides = (*(x * self.lanes for x in b.strides), 1)
        return Buffer(name, b.type, (*b.shape, self.lanes), strides, b.space)

    def privatised(self, b: Buffer, where: tuple[Expr, ...], c: int) -> tuple[Buffer, tuple[Expr, ...]]:
        target = self.private[b.name][c]
        if b.space is not Space.REGISTER:
            return target, (*where, build.ramp(0, 1, self.lanes))
        if any(i.type.lanes > 1 for i in where):
            raise CannotLower(f"the registers {b.name} are indexed differently by the lanes of a vector loop")
        return target, where

    def wide(self, mask: Expr | None) -> Expr | None:
        return None if build.is_true(mask) or mask is None else build.broadcast(mask, self.lanes)

    # Expressions: what is the same in all lanes stays scalar until it meets a vector.

    def expr(self, e: Expr, c: int) -> Expr:
        match e:
            case Const():
                return e
            case Var(name):
                return self.values[c].get(name, e)
            case Binary(op, left, right):
                a, b = self.expr(left, c), self.expr(right, c)
                if op in ("div", "mod") and a.type.dtype.is_integer and type(b) is not Const:
                    b = self.safe_divisor(b, c)
                return build.binary(op, a, b)
            case Load():
                return self.load(e, c)
            case Unary(op, operand):
                return build.unary(op, self.expr(operand, c))
            case Select(condition, then, otherwise):
                return build.select(self.expr(condition, c), self.expr(then, c), self.expr(otherwise, c))
            case Cast(operand, dtype):
                return build.cast(self.expr(operand, c), dtype)
            case Call(function, arguments):
                return build.call(function, *[self.expr(a, c) for a in arguments])
            case Ramp() | Broadcast() | Shuffle() | ReduceLanes():
                raise CannotLower("a vector loop contains explicit vectors")

    def load(self, e: Load, c: int) -> Expr:
        where = tuple(self.expr(i, c) for i in e.indices)
        own = self.expr(e.mask, c) if e.mask is not None else None
        if e.buffer.name in self.private:
            target, where = self.privatised(e.buffer, where, c)
            return Load(target, where, self.wide(build.both(own, self.condition(c))))
        if any(i.type.lanes > 1 for i in where):
            return Load(e.buffer, where, self.wide(build.both(own, self.mask(c))))
        if own is not None and own.type.lanes > 1:
            own = build.reduce_lanes("or", own)
        branch = self.condition(c)
        if branch is not None:  # no lane may run at all, and then the element may not exist
            own = build.both(own, build.reduce_lanes("or", branch))
        return Load(e.buffer, where, None if build.is_true(own) else own)

    def safe_divisor(self, divisor: Expr, c: int) -> Expr:
        """1 in the lanes that do not run, whose masked loads give 0."""
        mask = self.mask(c)
        return divisor if mask is None else build.select(mask, divisor, build.const(1, divisor.type.dtype))


def _require_distinct(s: Store, where: tuple[Expr, ...]) -> None:
    """Refuse stores in which lanes would meet in one element."""
    wide = [i for i in where if i.type.lanes > 1]
    if not wide:
        raise CannotLower(f"all lanes of a vector loop store to one element of {s.buffer.name}")
    if s.buffer.space is Space.REGISTER:
        raise CannotLower(f"the registers {s.buffer.name} are indexed by the variable of a vector loop")
    if s.op is not None and not any(isinstance(i, Ramp) for i in wide):
        raise CannotLower(f"lanes of a vector loop may update one element of {s.buffer.name} together")
