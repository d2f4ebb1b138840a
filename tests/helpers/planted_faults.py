"""Faults put into loop programs on purpose, for the tests of what has to find them."""

from __future__ import annotations

from dataclasses import replace

from tensor_comprehensions.loop_ir.nodes import Allocate, Buffer, Expr, Invoke, Load, Stmt, Store
from tensor_comprehensions.loop_ir.rewrite import map_expr, map_stmt


def resize_buffer(s: Allocate, buffer: Buffer, shape: tuple[int, ...], strides: tuple[int, ...]) -> Allocate:
    """With another size of `buffer`: the box around what is copied is wrong."""
    smaller = replace(buffer, shape=shape, strides=strides)
    buffers = tuple(smaller if b is buffer else b for b in s.buffers)
    return Allocate(buffers, replace_buffer(s.body, buffer, smaller))


def replace_buffer(s: Stmt, old: Buffer, new: Buffer) -> Stmt:
    """`s` with every access of `old` (by name) made on `new` at the same indices."""

    def on_expr(e: Expr) -> Expr:
        e = map_expr(e, on_expr)
        return Load(new, e.indices, e.mask) if type(e) is Load and e.buffer.name == old.name else e

    def on_stmt(c: Stmt) -> Stmt:
        c = map_stmt(c, on_expr, on_stmt)
        match c:
            case Store(b, indices, value, op, mask) if b.name == old.name:
                return Store(new, indices, value, op, mask, c.nontemporal, c.atomic)
            case Invoke(operands=operands):
                return replace(c, operands=tuple((new if b.name == old.name else b, w) for b, w in operands))
        return c

    return on_stmt(s)
