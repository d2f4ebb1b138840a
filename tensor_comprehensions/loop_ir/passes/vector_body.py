"""Vectorize the body of a loop: ramps for its variable, masks for its conditions, vectors for its bindings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

from ...core.dtypes import BOOL
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...machine import CACHE_LINE_BYTES
from .. import build
from ..intrinsics import is_hint
from ..names import Names
from ..nodes import (
    Allocate,
    Binary,
    Block,
    Broadcast,
    Buffer,
    Call,
    Cast,
    Const,
    Expr,
    If,
    Invoke,
    Let,
    Load,
    Loop,
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
from .reductions import VectorAccumulator, in_accumulator_type


@dataclass(frozen=True, slots=True)
class VectorBody:
    """Vectorizes a loop body for one piece of the iteration space.

    values: for each interleaved copy, the vectors that replace names. tail: the mask of lanes inside the loop's bounds.
    branch: for each copy, the mask of lanes for which the enclosing conditions hold.
    """

    lanes: int
    values: tuple[dict[str, Expr], ...]
    accumulators: dict[int, VectorAccumulator]
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
        return build.and_masks(self.tail, self.condition(c))

    # Statements: every leaf is repeated for each copy in place, so that the copies interleave.

    def vectorize_stmt(self, s: Stmt) -> Stmt:
        match s:
            case Block(body):
                return build.block(*[self.vectorize_stmt(c) for c in body])
            case Store():
                if id(s) in self.accumulators:
                    return build.block(*[self.accumulate(s, c) for c in self.copies])
                return build.block(*[self.store(s, c) for c in self.copies])
            case Loop(name, start, stop):
                bounds = (self.vectorize_expr(start, 0), self.vectorize_expr(stop, 0))
                if any(b.type.lanes > 1 for b in bounds):
                    raise CannotLower(f"the bounds of loop {name} differ between the lanes of a vector loop")
                return replace(s, start=bounds[0], stop=bounds[1], body=self.vectorize_stmt(s.body))
            case If():
                return self.conditional(s)
            case Let():
                return self.let(s)
            case Allocate():
                return self.allocate(s)
            case Invoke() if is_hint(s):
                return build.block(*[self.hint(s, c) for c in self.copies])
        raise CannotLower(f"{type(s).__name__} has no vector form")

    def store(self, s: Store, c: int) -> Stmt:
        where, value = tuple(self.vectorize_expr(i, c) for i in s.indices), self.vectorize_expr(s.value, c)
        own = self.vectorize_expr(s.mask, c) if s.mask is not None else None
        if s.buffer.name in self.private:
            target, where = self.privatize(s.buffer, where, c)
            guard = build.and_masks(own, self.condition(c))
        else:
            target, guard = s.buffer, build.and_masks(own, self.mask(c))
            _require_distinct(s, where)
        vector, mask = build.broadcast(value, self.lanes), self.to_vector(guard)
        return Store(target, where, vector, s.op, mask, s.nontemporal, origin=s.origin)

    def hint(self, s: Invoke, c: int) -> Stmt:
        """`s` once for each cache line that begins in the vector of copy `c`; nothing if lanes are not contiguous.

        If the hint is the same in all lanes, only the first copy has it.
        """
        ((buffer, indices),) = s.operands
        where = tuple(self.vectorize_expr(i, c) for i in indices)
        wide = [d for d, i in enumerate(where) if i.type.lanes > 1]
        if not wide:
            return Invoke(s.name, ((buffer, where),), s.attributes, origin=s.origin) if c == 0 else build.NOTHING
        (d, *others), size = wide, buffer.type.dtype.size
        along = where[d]
        if others or not isinstance(along, Ramp) or along.stride * buffer.strides[d] != 1:
            return build.NOTHING
        first = -(c * self.lanes * size) % CACHE_LINE_BYTES
        lines = range(first, self.lanes * size, CACHE_LINE_BYTES)
        places = [(*where[:d], build.add(along.base, byte // size), *where[d + 1 :]) for byte in lines]
        return build.block(*[Invoke(s.name, ((buffer, place),), s.attributes, origin=s.origin) for place in places])

    def accumulate(self, s: Store, c: int) -> Stmt:
        accumulator = self.accumulators[id(s)]
        reduction = accumulator.reduction
        value = build.broadcast(self.vectorize_expr(in_accumulator_type(s.value, reduction.dtype), c), self.lanes)
        own = self.vectorize_expr(s.mask, c) if s.mask is not None else None
        guard = self.to_vector(build.and_masks(own, self.mask(c)))
        if guard is not None:
            value = build.select(guard, value, reduction.neutral)
        return Store(accumulator.buffer, (build.const(c),), value, s.op, origin=s.origin)

    def conditional(self, s: If) -> Stmt:
        conditions = [self.vectorize_expr(s.condition, c) for c in self.copies]
        if all(e.type.lanes == 1 for e in conditions):
            otherwise = self.vectorize_stmt(s.otherwise) if s.otherwise is not None else None
            return build.when(conditions[0], self.vectorize_stmt(s.then), otherwise)
        # The condition gets a name, because the branches may overwrite its operands.
        bound = [self.names.fresh(internal_name("mask")) for _ in self.copies]
        held: list[Expr] = [build.var(n, BOOL, self.lanes) for n in bound]
        then = self.with_conditions(held).vectorize_stmt(s.then)
        parts = [then]
        if s.otherwise is not None:
            parts.append(self.with_conditions([build.logical_not(h) for h in held]).vectorize_stmt(s.otherwise))
        inner = build.block(*parts)
        for name, e in zip(reversed(bound), reversed(conditions), strict=True):
            inner = Let(name, build.broadcast(e, self.lanes), inner)
        return inner

    def with_conditions(self, conditions: list[Expr]) -> VectorBody:
        return replace(self, branch=tuple(build.and_masks(self.condition(c), e) for c, e in enumerate(conditions)))

    def let(self, s: Let) -> Stmt:
        bound = [self.vectorize_expr(s.value, c) for c in self.copies]
        if all(e.type.lanes == 1 for e in bound):
            return Let(s.name, bound[0], self.vectorize_stmt(s.body))
        chosen = [s.name if len(bound) == 1 else self.names.fresh(s.name) for _ in bound]
        types = [Type(e.type.dtype, self.lanes) for e in bound]
        values = tuple({**self.values[c], s.name: Var(chosen[c], types[c])} for c in self.copies)
        inner = replace(self, values=values).vectorize_stmt(s.body)
        for name, e in zip(reversed(chosen), reversed(bound), strict=True):
            inner = Let(name, e, inner)
        return inner

    def allocate(self, s: Allocate) -> Stmt:
        private = {b.name: tuple(self.widened_buffer(b) for _ in self.copies) for b in s.buffers}
        inner = replace(self, private=self.private | private).vectorize_stmt(s.body)
        return build.allocate(chain.from_iterable(private.values()), inner)

    def widened_buffer(self, b: Buffer) -> Buffer:
        """A buffer for `lanes` private instances of `b`: vector registers, or memory with one more dimension."""
        name = b.name if len(self.values) == 1 else self.names.fresh(b.name)
        if b.space is Space.REGISTER:
            return Buffer(name, Type(b.type.dtype, self.lanes), b.shape, b.strides, b.space)
        strides = (*(x * self.lanes for x in b.strides), 1)
        return Buffer(name, b.type, (*b.shape, self.lanes), strides, b.space)

    def privatize(self, b: Buffer, where: tuple[Expr, ...], c: int) -> tuple[Buffer, tuple[Expr, ...]]:
        target = self.private[b.name][c]
        if b.space is not Space.REGISTER:
            return target, (*where, build.ramp(0, 1, self.lanes))
        if any(i.type.lanes > 1 for i in where):
            raise CannotLower(f"the registers {b.name} are indexed differently by the lanes of a vector loop")
        return target, where

    def to_vector(self, mask: Expr | None) -> Expr | None:
        return None if build.is_true(mask) or mask is None else build.broadcast(mask, self.lanes)

    # Expressions: values that are the same in all lanes stay scalar until they meet a vector.

    def vectorize_expr(self, e: Expr, c: int) -> Expr:
        match e:
            case Const():
                return e
            case Var(name):
                return self.values[c].get(name, e)
            case Binary(op, left, right):
                a, b = self.vectorize_expr(left, c), self.vectorize_expr(right, c)
                if op in ("div", "mod") and a.type.dtype.is_integer and type(b) is not Const:
                    b = self.safe_divisor(b, c)
                return build.binary(op, a, b)
            case Load():
                return self.load(e, c)
            case Unary(op, operand):
                return build.unary(op, self.vectorize_expr(operand, c))
            case Select(condition, then, otherwise):
                return build.select(
                    self.vectorize_expr(condition, c), self.vectorize_expr(then, c), self.vectorize_expr(otherwise, c)
                )
            case Cast(operand, dtype):
                return build.cast(self.vectorize_expr(operand, c), dtype)
            case Call(function, arguments):
                return build.call(function, *[self.vectorize_expr(a, c) for a in arguments])
            case Ramp() | Broadcast() | Shuffle() | ReduceLanes():
                raise CannotLower("a vector loop contains explicit vectors")

    def load(self, e: Load, c: int) -> Expr:
        where = tuple(self.vectorize_expr(i, c) for i in e.indices)
        own = self.vectorize_expr(e.mask, c) if e.mask is not None else None
        if e.buffer.name in self.private:
            target, where = self.privatize(e.buffer, where, c)
            return Load(target, where, self.to_vector(build.and_masks(own, self.condition(c))))
        if any(i.type.lanes > 1 for i in where):
            return Load(e.buffer, where, self.to_vector(build.and_masks(own, self.mask(c))))
        if own is not None and own.type.lanes > 1:
            own = build.reduce_lanes("or", own)
        branch = self.condition(c)
        if branch is not None:  # if no lane is active, the element may not exist
            own = build.and_masks(own, build.reduce_lanes("or", branch))
        return Load(e.buffer, where, None if build.is_true(own) else own)

    def safe_divisor(self, divisor: Expr, c: int) -> Expr:
        """`divisor` with 1 in inactive lanes, where masked loads would give 0."""
        mask = self.mask(c)
        return divisor if mask is None else build.select(mask, divisor, build.const(1, divisor.type.dtype))


def _require_distinct(s: Store, where: tuple[Expr, ...]) -> None:
    """Refuse stores in which several lanes may access the same element."""
    wide = [i for i in where if i.type.lanes > 1]
    if not wide:
        raise CannotLower(f"all lanes of a vector loop store to one element of {s.buffer.name}")
    if s.buffer.space is Space.REGISTER:
        raise CannotLower(f"the registers {s.buffer.name} are indexed by the variable of a vector loop")
    if s.op is not None and not any(isinstance(i, Ramp) for i in wide):
        raise CannotLower(f"lanes of a vector loop may update one element of {s.buffer.name} together")
