"""What all iterations of a parallel loop would do alike: a thread may do it once, for all iterations of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from . import build
from .intrinsics import is_hint
from .nodes import Allocate, Block, Buffer, Check, Invoke, Let, Loop, Space, Stmt, Store, Var
from .rewrite import uses, walk

Filled = tuple[Buffer, Stmt]
"""Scratch memory and what fills it."""


def alike(loop: Loop) -> tuple[tuple[Filled, ...], Loop]:
    """Scratch memory that every iteration of `loop` fills alike and then only reads, and the loop without that.

    A thread that does this before its share of the iterations does the same as all of them would one after another.
    """
    if not _allocates(loop.body):
        return (), loop
    written = {b.name for b in _written((loop.body,))}
    found, body = _alike(loop.body, frozenset((loop.var,)), written)
    return found, replace(loop, body=body) if found else loop


def _allocates(s: Stmt) -> bool:
    """Whether the statement is scratch memory, but for names that it binds first."""
    while type(s) is Let:
        s = s.body
    return type(s) is Allocate and s.buffer.space is Space.SCRATCH


def _alike(s: Stmt, bound: frozenset[str], written: set[str]) -> tuple[tuple[Filled, ...], Stmt]:
    """`bound`: names that differ from iteration to iteration. `written`: buffers that the loop writes."""
    match s:
        case Let(name, value, body):
            found, inner = _alike(body, bound | {name}, written)
            return found, Let(name, value, inner) if found else s
        case Allocate(buffer, Block(parts)) if buffer.space is Space.SCRATCH:
            count = next((n for n, p in enumerate(parts) if not _fills(p, buffer, bound, written)), len(parts))
            first, rest = parts[:count], parts[count:]
            if not first or not rest or buffer.name in {b.name for b in _written(rest)}:
                return (), s
            found, inner = _alike(build.block(*rest), bound, written)
            return ((buffer, build.block(*first)), *found), inner
    return (), s


def _fills(s: Stmt, buffer: Buffer, bound: frozenset[str], written: set[str]) -> bool:
    """Whether `s` writes nothing but `buffer`, the same in every iteration."""
    if any(b.name != buffer.name for b in _written((s,))) or any(isinstance(c, Check | Allocate) for c in walk(s)):
        return False
    own = {c.var if isinstance(c, Loop) else c.name for c in walk(s) if isinstance(c, Loop | Let)}
    others = bound - own
    return not any(x.name in others if isinstance(x, Var) else x.buffer.name in written for x in uses(s))


def _written(parts: Iterable[Stmt]) -> list[Buffer]:
    """Whatever stores or intrinsics reach."""
    found: list[Buffer] = []
    for c in (c for part in parts for c in walk(part)):
        if isinstance(c, Store):
            found.append(c.buffer)
        elif isinstance(c, Invoke) and not is_hint(c):
            found += [b for b, _ in c.operands]
    return found
