"""Random loop programs, compiled and interpreted: what is kept in registers, hoisted or forwarded stays right."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llvm_harness import compare, module

from tensor_comprehensions.core.dtypes import INT64
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Binary,
    Block,
    Buffer,
    Expr,
    If,
    Let,
    Loop,
    LoopKind,
    Ramp,
    Select,
    Space,
    Stmt,
    Store,
)
from tests.helpers.anywhere import TARGETS

N = 8
GLOBALS = tuple(ir.buffer(name, INT64, (N,)) for name in ("A", "B", "C"))


class Programs:
    """Statements over a few small buffers; subscripts are taken modulo their size, so none leaves them."""

    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.names = 0

    def fresh(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def index(self, variables: tuple[str, ...]) -> Expr:
        if not variables or self.r.random() < 0.3:
            return ir.const(self.r.randrange(N))
        name = ir.var(self.r.choice(variables))
        shifted = ir.add(ir.mul(name, self.r.choice((1, 1, 2, 3))), self.r.randrange(N))
        return Binary("mod", shifted, ir.const(N))

    def read(self, buffers: tuple[Buffer, ...], variables: tuple[str, ...]) -> Expr:
        b = self.r.choice(buffers)
        where = ir.const(self.r.randrange(2)) if b.space is Space.REGISTER else self.index(variables)
        return ir.load(b, where)

    def value(self, buffers: tuple[Buffer, ...], variables: tuple[str, ...], depth: int = 0) -> Expr:
        kind = self.r.random()
        if depth > 2 or kind < 0.5:
            return self.read(buffers, variables)
        if kind < 0.6 and variables:
            return ir.var(self.r.choice(variables))
        left, right = (self.value(buffers, variables, depth + 1) for _ in range(2))
        if kind < 0.7:
            return Select(Binary("lt", left, right), right, left)
        return Binary(self.r.choice(("add", "sub", "mul", "min", "div", "mod")), left, right)

    def store(self, buffers: tuple[Buffer, ...], variables: tuple[str, ...]) -> Stmt:
        b = self.r.choice(buffers)
        where = ir.const(self.r.randrange(2)) if b.space is Space.REGISTER else self.index(variables)
        if b.space is not Space.REGISTER and self.r.random() < 0.3:
            start = ir.const(self.r.randrange(N - 3))
            source = self.r.choice([x for x in buffers if x.space is not Space.REGISTER])
            return Store(b, (Ramp(start, 1, 4),), ir.load(source, Ramp(ir.const(self.r.randrange(N - 3)), 1, 4)))
        return Store(b, (where,), self.value(buffers, variables), self.r.choice((None, None, "+", "max")))

    def statement(self, buffers: tuple[Buffer, ...], variables: tuple[str, ...], depth: int) -> Stmt:
        kind = self.r.random() if depth < 4 else 0.0
        if kind < 0.35:
            return self.store(buffers, variables)
        if kind < 0.5:
            return Block(tuple(self.statement(buffers, variables, depth + 1) for _ in range(3)))
        name = self.fresh()
        inner = (*variables, name)
        if kind < 0.75:
            stop = ir.const(self.r.randrange(4))
            if self.r.random() < 0.3:
                stop = Binary("mod", self.value(buffers, variables), ir.const(4))
            return Loop(name, ir.const(0), stop, self.statement(buffers, inner, depth + 1), LoopKind.SERIAL)
        if kind < 0.85:
            return Let(name, self.value(buffers, variables), self.statement(buffers, inner, depth + 1))
        condition = Binary("lt", self.value(buffers, variables), self.value(buffers, variables))
        other = self.statement(buffers, variables, depth + 1) if self.r.random() < 0.5 else None
        return If(condition, self.statement(buffers, variables, depth + 1), other)

    def program(self) -> Stmt:
        """Scratch and registers, set first, around a few statements; what they end with goes to `D`."""
        scratch = ir.buffer("scratch", INT64, (N,), Space.SCRATCH)
        registers = ir.buffer("registers", INT64, (2,), Space.REGISTER)
        i, out = ir.var("i"), ir.buffer("D", INT64, (N + 2,))
        start = [Loop("i", ir.const(0), ir.const(N), ir.store(scratch, (i,), i))]
        start += [ir.store(registers, (n,), ir.const(n + 5)) for n in range(2)]  # type: ignore[misc]
        buffers = (*GLOBALS, scratch, registers)
        middle = [self.statement(buffers, (), 0) for _ in range(4)]
        end = [Loop("i", ir.const(0), ir.const(N), ir.store(out, (i,), ir.load(scratch, i)))]
        end += [ir.store(out, (N + n,), ir.load(registers, ir.const(n))) for n in range(2)]  # type: ignore[misc]
        return Allocate((scratch,), Allocate((registers,), Block((*start, *middle, *end))))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False, note_method_calls=False))
def test_random_programs(r: random.Random) -> None:
    m = module(Programs(r).program())
    numbers = np.random.default_rng(r.randrange(2**32))
    arrays = {b.name: numbers.integers(-9, 10, b.shape) for b in m.arguments}
    compare(m, arrays, r.choice(TARGETS))
