"""Traverse and rebuild loop programs. Unchanged parts are returned as the same object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_

from typing_extensions import assert_never

from . import build
from .intrinsics import is_hint
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
    Ramp,
    ReduceLanes,
    Select,
    Shuffle,
    Stmt,
    Store,
    Unary,
    Var,
    While,
    Window,
)

OnExpr = Callable[[Expr], Expr]
OnStmt = Callable[[Stmt], Stmt]


def map_tuple(items: tuple[Expr, ...], f: OnExpr) -> tuple[Expr, ...]:
    """`f` of each item; the same tuple if `f` changed none."""
    new = tuple([f(i) for i in items])
    return items if all(map(is_, items, new)) else new


def map_expr(e: Expr, f: OnExpr) -> Expr:
    """`e` with `f` applied to each direct child; nothing is folded."""
    match e:
        case Const() | Var():
            return e
        case Binary(op, left, right):
            a, b = f(left), f(right)
            return e if a is left and b is right else Binary(op, a, b)
        case Load(buffer, indices, mask):
            where, guard = map_tuple(indices, f), f(mask) if mask is not None else None
            return e if where is indices and guard is mask else Load(buffer, where, guard)
        case Call(function, arguments):
            return e if (new := map_tuple(arguments, f)) is arguments else Call(function, new)
        case Ramp(base, stride, lanes):
            return e if (a := f(base)) is base else Ramp(a, stride, lanes)
        case Broadcast(operand, lanes):
            return e if (a := f(operand)) is operand else Broadcast(a, lanes)
        case Unary(op, operand):
            return e if (a := f(operand)) is operand else Unary(op, a)
        case Select(condition, then, otherwise):
            c, a, b = f(condition), f(then), f(otherwise)
            return e if c is condition and a is then and b is otherwise else Select(c, a, b)
        case Cast(operand, dtype):
            return e if (a := f(operand)) is operand else Cast(a, dtype)
        case ReduceLanes(op, operand):
            return e if (a := f(operand)) is operand else ReduceLanes(op, a)
        case Shuffle(left, right, order):
            a, b = f(left), f(right)
            return e if a is left and b is right else Shuffle(a, b, order)
        case _:
            assert_never(e)


def map_stmt(s: Stmt, on_expr: OnExpr, on_stmt: OnStmt) -> Stmt:
    """`s` with `on_expr` applied to its expressions and `on_stmt` to its direct sub-statements."""
    match s:
        case Store(buffer, indices, value, op, mask):
            where, v = map_tuple(indices, on_expr), on_expr(value)
            guard = on_expr(mask) if mask is not None else None
            same = where is indices and v is value and guard is mask
            return s if same else Store(buffer, where, v, op, guard, s.nontemporal, s.atomic, s.origin)
        case Block(body):
            new = tuple([on_stmt(c) for c in body])
            return s if all(map(is_, body, new)) else Block(new)
        case Loop(name, start, stop, body):
            first, last, inner = on_expr(start), on_expr(stop), on_stmt(body)
            if first is start and last is stop and inner is body:
                return s
            return Loop(name, first, last, inner, s.kind, s.step, s.grain, s.vector_factors)
        case If(condition, then, otherwise):
            c, a = on_expr(condition), on_stmt(then)
            b = on_stmt(otherwise) if otherwise is not None else None
            return s if c is condition and a is then and b is otherwise else If(c, a, b)
        case Let(name, value, body):
            v, inner = on_expr(value), on_stmt(body)
            return s if v is value and inner is body else Let(name, v, inner)
        case While(condition, body):
            c, inner = on_expr(condition), on_stmt(body)
            return s if c is condition and inner is body else While(c, inner)
        case Allocate(buffers, body, lengths):
            counts, inner = map_tuple(lengths, on_expr), on_stmt(body)
            return s if counts is lengths and inner is body else Allocate(buffers, inner, counts)
        case Window(buffer, source, start, rows, length, body):
            first, count, inner = on_expr(start), on_expr(length), on_stmt(body)
            same = first is start and count is length and inner is body
            return s if same else Window(buffer, source, first, rows, count, inner, s.dimension, s.spare)
        case Check(condition, site, value):
            c, v = on_expr(condition), on_expr(value)
            return s if c is condition and v is value else Check(c, site, v)
        case Invoke(name, operands, attributes, values):
            views, given = tuple((b, map_tuple(w, on_expr)) for b, w in operands), map_tuple(values, on_expr)
            same = given is values and all(a[1] is b[1] for a, b in zip(operands, views, strict=True))
            return s if same else Invoke(name, views, attributes, given, s.origin)
        case _:
            assert_never(s)


def refold(e: Expr) -> Expr:
    """`e` rebuilt by the folding constructors of `build`, without visiting its children."""
    match e:
        case Binary(op, left, right):
            return build.binary(op, left, right)
        case Ramp(base, stride, lanes):
            return build.ramp(base, stride, lanes)
        case Broadcast(operand, lanes):
            return build.broadcast(operand, lanes)
        case Unary(op, operand):
            return build.unary(op, operand)
        case Select(condition, then, otherwise):
            return build.select(condition, then, otherwise)
        case Cast(operand, dtype):
            return build.cast(operand, dtype)
        case Load(buffer, indices, mask) if mask is not None and build.is_true(mask):
            return Load(buffer, indices)
    return e


def substitute(e: Expr, values: Mapping[str, Expr]) -> Expr:
    """`e` with variables replaced by the expressions in `values`, folding bottom-up."""
    if type(e) is Var:
        return values.get(e.name, e)
    if type(e) is Const:
        return e
    new = map_expr(e, lambda c: substitute(c, values))
    return e if new is e else refold(new)


def substitute_stmt(s: Stmt, values: Mapping[str, Expr]) -> Stmt:
    """`s` with variables replaced in all its expressions; names bound inside `s` must not be among `values`."""
    return map_stmt(s, lambda e: substitute(e, values), lambda c: substitute_stmt(c, values))


def stmt_expressions(s: Stmt) -> tuple[Expr, ...]:
    """The expressions directly in `s`, not those of its sub-statements."""
    match s:
        case Store(_, indices, value, _, mask):
            return (*indices, value) if mask is None else (*indices, value, mask)
        case Loop(_, start, stop):
            return (start, stop)
        case If(condition) | While(condition) | Check(condition, _, Const()):
            return (condition,)
        case Allocate(_, _, lengths):
            return lengths
        case Window(_, _, start, _, length):
            return (start, length)
        case Check(condition, _, value):
            return (condition, value)
        case Let(_, value):
            return (value,)
        case Invoke(_, operands, _, values):
            return (*(i for _, where in operands for i in where), *values)
        case Block():
            return ()
        case _:
            assert_never(s)


def substatements(s: Stmt) -> tuple[Stmt, ...]:
    """The direct sub-statements of `s`."""
    if type(s) is Store:  # the most frequent type: tested before the pattern match, which is slower
        return ()
    match s:
        case Block(body):
            return body
        case Loop(_, _, _, body) | Let(_, _, body) | Allocate(_, body) | While(_, body) | Window(body=body):
            return (body,)
        case If(_, then, otherwise):
            return (then,) if otherwise is None else (then, otherwise)
        case Check() | Invoke() | Store():
            return ()
        case _:
            assert_never(s)


def children(e: Expr) -> tuple[Expr, ...]:
    """The direct sub-expressions of `e`."""
    t = type(e)
    if t is Const or t is Var:  # the most frequent types: tested before the pattern match, which is slower
        return ()
    match e:
        case Binary(_, left, right) | Shuffle(left, right):
            return (left, right)
        case Load(_, indices, mask):
            return indices if mask is None else (*indices, mask)
        case Call(_, arguments):
            return arguments
        case Ramp() | Broadcast() | Unary() | Cast() | ReduceLanes():
            return (e.base,) if isinstance(e, Ramp) else (e.operand,)
        case Select(condition, then, otherwise):
            return (condition, then, otherwise)
        case Const() | Var():
            return ()
        case _:
            assert_never(e)


def walk_expr(e: Expr) -> Iterator[Expr]:
    """`e` and all its sub-expressions, in preorder."""
    stack = [e]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(children(top)[::-1])


def walk_stmts(s: Stmt) -> Iterator[Stmt]:
    """`s` and all its sub-statements, in preorder, which is program order."""
    stack = [s]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(substatements(top)[::-1])


def allocated_buffers(s: Stmt) -> list[Buffer]:
    """The buffers that are allocated in `s`, in order."""
    return [b for c in walk_stmts(s) if isinstance(c, Allocate) for b in c.buffers]


def written_buffers(parts: Iterable[Stmt]) -> list[Buffer]:
    """The buffers that stores or intrinsics write, in order."""
    found: list[Buffer] = []
    for c in (c for part in parts for c in walk_stmts(part)):
        if isinstance(c, Store):
            found.append(c.buffer)
        elif isinstance(c, Invoke) and not is_hint(c):
            found += [b for b, _ in c.operands]
    return found


def walk_stmt_exprs(s: Stmt) -> Iterator[Expr]:
    """Every expression of `s` and of its sub-statements, in program order."""
    for c in walk_stmts(s):
        for e in stmt_expressions(c):
            yield from walk_expr(e)


def used_values(s: Stmt) -> Iterator[Var | Load]:
    """The variables and loads in `s`; an expression object that occurs several times is visited once."""
    seen: set[int] = set()
    for c in walk_stmts(s):
        stack = list(stmt_expressions(c))
        while stack:
            top = stack.pop()
            if type(top) is Const:
                continue
            if type(top) is Var:
                yield top
            elif id(top) not in seen:
                seen.add(id(top))
                if type(top) is Load:
                    yield top
                stack += children(top)


def list_accesses(s: Stmt) -> Iterator[tuple[Buffer, tuple[Expr, ...]]]:
    """The accesses of loads, stores and intrinsics in `s`: buffers with their indices."""
    for e in used_values(s):
        if isinstance(e, Load):
            yield e.buffer, e.indices
    for c in walk_stmts(s):
        if isinstance(c, Store):
            yield c.buffer, c.indices
        elif isinstance(c, Invoke):
            yield from c.operands


def stride_variables(s: Stmt, values: Iterable[Var | Load]) -> frozenset[str]:
    """The variables that hold strides of the buffers that `s` accesses. values: the `used_values` of `s`."""
    buffers = [e.buffer for e in values if type(e) is Load]
    for c in walk_stmts(s):
        if type(c) is Store:
            buffers.append(c.buffer)
        elif type(c) is Window:
            buffers.append(c.source)
        elif type(c) is Invoke:
            buffers += [b for b, _ in c.operands]
    return frozenset(v for b in buffers if b.stride_variables for v in b.stride_variables if v is not None)


def mentions(e: Expr, names: frozenset[str] | set[str]) -> bool:
    """Whether a variable of `names` occurs in `e`."""
    return any(type(c) is Var and c.name in names for c in walk_expr(e))
