"""Loop-invariant code motion of packing out of a parallel loop: each thread packs once, for all of its iterations.

It hoists packed operands, such as the weights of fused layers that are tiled along the batch, as "Composable and
modular code generation in MLIR" does, but out of a loop that threads share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile

from .. import build
from ..nodes import Allocate, Block, Buffer, Check, If, Let, Loop, Space, Stmt, Var, While, Window
from ..rewrite import allocated_buffers, map_stmt, substatements, used_values, walk_stmts, written_buffers

Filled = tuple[Buffer, Stmt]
"""Scratch memory and the statement that fills it."""


def hoist_packing(loop: Loop) -> tuple[tuple[Filled, ...], Loop]:
    """The scratch buffers that each iteration of `loop` fills identically and then only reads, and the rest of `loop`.

    Each thread can fill them once, before its share of the iterations.
    """
    candidates = list(_find_scratch_allocations(loop.body, frozenset((loop.var,))))
    if not candidates:
        return (), loop
    written = {b.name for b in written_buffers((loop.body,))}
    fills = [(buffer, _leading_fill_statements(buffer, body, bound, written)) for buffer, body, bound in candidates]
    shared: dict[str, Filled] = {}
    for buffer, fill in fills:
        if fill is not None:
            shared.setdefault(buffer.name, (buffer, fill))
    for buffer, fill in fills:  # remainder tiles fill it differently, so it is not hoisted
        if shared.get(buffer.name) != (buffer, fill):
            shared.pop(buffer.name, None)
    if not shared:
        return (), loop
    made = Counter(b.name for b in allocated_buffers(loop.body))
    made.subtract(b.name for b, _ in fills)
    shared = {name: filled for name, filled in shared.items() if not made[name]}  # else inner loops allocate it, too
    return tuple(shared.values()), replace(loop, body=_drop_shared(loop.body, shared)) if shared else loop


def _find_scratch_allocations(s: Stmt, bound: frozenset[str]) -> Iterator[tuple[Buffer, Stmt, frozenset[str]]]:
    """The scratch buffers allocated in `s` outside of inner loops, each with the body of its allocation and the names
    that may vary by iteration there.

    Only single allocations are listed, because packed panels are allocated one by one.
    """
    match s:
        case Loop() | While():
            return
        case Let(name):
            bound |= {name}
        case Window(buffer):
            bound |= {buffer.name}
        case Allocate((buffer,), body, ()) if buffer.space is Space.SCRATCH:
            yield buffer, body, bound
    for c in substatements(s):
        yield from _find_scratch_allocations(c, bound)


def _leading_fill_statements(buffer: Buffer, body: Stmt, bound: frozenset[str], written: set[str]) -> Stmt | None:
    """The statements at the start of `body` that fill `buffer` identically in all iterations; None if others write it.

    written: the buffers that the loop writes.
    """
    parts = body.body if isinstance(body, Block) else ()
    first = tuple(takewhile(lambda p: _fills_identically(p, buffer, bound, written), parts))
    rest = parts[len(first) :]
    if not first or not rest or buffer.name in {b.name for b in written_buffers(rest)}:
        return None
    return build.block(*first)


def _fills_identically(s: Stmt, buffer: Buffer, bound: frozenset[str], written: set[str]) -> bool:
    """Whether `s` writes only `buffer`, identically in every iteration."""
    if any(b.name != buffer.name for b in written_buffers((s,))) or any(
        isinstance(c, Check | Allocate) for c in walk_stmts(s)
    ):
        return False
    own = {c.var if isinstance(c, Loop) else c.name for c in walk_stmts(s) if isinstance(c, Loop | Let)}
    others = bound - own
    if any(c.source.name in written | others for c in walk_stmts(s) if isinstance(c, Window)):
        return False
    return not any(
        x.name in others if isinstance(x, Var) else x.buffer.name in written | others for x in used_values(s)
    )


def _drop_shared(s: Stmt, shared: Mapping[str, Filled]) -> Stmt:
    """`s` without the allocations of the `shared` buffers and the statements that fill them."""
    match s:
        case Loop() | While():
            return s
        case Allocate((buffer,), Block(parts)) if buffer.name in shared:
            fill = shared[buffer.name][1]
            count = len(fill.body) if isinstance(fill, Block) else 1
            return build.block(*(_drop_shared(p, shared) for p in parts[count:]))
        case If() | Let() | Block() | Allocate() | Window():
            return map_stmt(s, lambda e: e, lambda c: _drop_shared(c, shared))
    return s
