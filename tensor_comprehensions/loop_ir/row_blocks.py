"""One module for any number of rows, composed of modules for a few fixed numbers of rows.

A program maps rows if every row of its results depends on the same row of its operands alone. Then a module for 64
rows and one for a single row compose a module for any number: blocks of 64 rows as long as possible, the rest one by
one. Each block is a `Window` of the operands, so its code stays unchanged, and its proofs hold.

Only the number of blocks, and whether threads share them, depends on the number of rows at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.dtypes import INT64
from ..core.errors import CannotLower
from ..core.naming import compose_name
from . import build
from .nodes import (
    Allocate,
    Buffer,
    Check,
    Expr,
    If,
    Invoke,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Space,
    Stmt,
    Store,
    Type,
    Window,
)
from .passes.hoist_packing import hoist_packing
from .rewrite import map_expr, map_stmt, walk_stmt_exprs, walk_stmts

SIZES = compose_name("sizes")
"""The last argument: an array of int64, whose only element is the number of rows."""
ROWS, BLOCK = compose_name("rows"), compose_name("block")


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A module for this many rows.

    grain: number of blocks per thread; 0: threads share the work inside a block. overlap_from: if this many rows or
    more remain, a block that begins before them computes them, and some rows twice; 0: never.
    """

    rows: int
    module: Module
    grain: int
    overlap_from: int = 0


def join_row_blocks(blocks: Sequence[RowBlock], sources: Mapping[str, Buffer]) -> Module:
    """The module for any number of rows.

    Args:
        blocks: from many rows to one, each number a multiple of the next.
        sources: the arguments that have rows, dynamic, by name.

    Raises:
        CannotLower: the checks of blocks cannot run before them.
    """
    first = blocks[0].module
    arguments = tuple(sources.get(b.name, b) for b in first.arguments)
    for other in blocks:
        if tuple(sources.get(b.name, b) for b in other.module.arguments) != arguments:
            raise CannotLower("an argument without rows is laid out in another way for another number of rows")
    sizes = Buffer(SIZES, Type(INT64), (1,), (1,))
    kernels = []
    for name, parts in _phases(blocks):
        rows = build.maximum(Load(sizes, (build.const(0),)), 0)  # which proves that blocks start in their operands
        kernels.append(Kernel(compose_name(first.name, name), Let(ROWS, rows, _loops_over_blocks(parts, sources))))
    return Module(
        first.name, (*arguments, sizes), (), tuple(kernels), first.sites, first.written,
        frozenset().union(*(b.module.partial for b in blocks)),
    )  # fmt: skip


Part = tuple[RowBlock, RowBlock | None, tuple[Kernel, ...]]
"""A block, the next larger one, and the kernels of it that run one after another."""


def _phases(blocks: Sequence[RowBlock]) -> list[tuple[str, list[Part]]]:
    """The phases, each of which runs over all rows before the next: every check, and then the rest."""
    above = [None, *blocks[:-1]]
    split = [_split_checks(b.module) for b in blocks]
    counts = {len(checks) for checks, _ in split}
    if len(counts) > 1:
        raise CannotLower("blocks of different numbers of rows make different checks")
    phases: list[tuple[str, list[Part]]] = []
    for n in range(counts.pop()):
        parts: list[Part] = [(b, a, (checks[n],)) for b, a, (checks, _) in zip(blocks, above, split, strict=True)]
        phases.append((f"check{n}", parts))
    phases.append(("rows", [(b, a, rest) for b, a, (_, rest) in zip(blocks, above, split, strict=True)]))
    return phases


def _split_checks(module: Module) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The kernels that check, and the others. Raises CannotLower if a check reads the result of another kernel."""
    checks = tuple(k for k in module.kernels if any(isinstance(s, Check) for s in walk_stmts(k.body)))
    rest = tuple(k for k in module.kernels if k not in checks)
    made = {s.buffer.name for k in rest for s in walk_stmts(k.body) if isinstance(s, Store)}
    read = {e.buffer.name for k in checks for e in walk_stmt_exprs(k.body) if isinstance(e, Load)}
    if read & made:
        raise CannotLower("a subscript that is checked is computed from rows")
    return checks, rest


def _loops_over_blocks(parts: Sequence[Part], sources: Mapping[str, Buffer]) -> Stmt:
    """The loop over the blocks of the first size, and the loops over the remaining rows."""
    (block, above, kernels), *smaller = parts
    loop = _whole_blocks(block, above, kernels, sources)
    rest = _loops_over_blocks(smaller, sources) if smaller else build.NOTHING
    if not block.overlap_from:
        return build.block(loop, rest)
    # One iteration if there is a block; the verifier must prove that it starts at or after the first row.
    rows = build.var(ROWS)
    count, left = build.div(rows, block.rows), build.mod(rows, block.rows)
    start = build.add(build.mul(build.var(BLOCK), block.rows), left)
    last = Loop(BLOCK, build.maximum(build.sub(count, 1), 0), count, _body(block, kernels, sources, start))
    again = build.logical_and(build.gt(count, 0), build.ge(left, block.overlap_from))
    return build.block(loop, If(again, last, rest))


def _whole_blocks(
    block: RowBlock, above: RowBlock | None, kernels: Sequence[Kernel], sources: Mapping[str, Buffer]
) -> Loop:
    """The loop over whole blocks."""
    rows = build.var(ROWS)
    done = build.const(0) if above is None else build.mul(build.div(rows, above.rows), above.rows // block.rows)
    is_one_chunk = above is not None and above.rows // block.rows - 1 <= block.grain
    kind = LoopKind.PARALLEL if block.grain and not is_one_chunk else LoopKind.SERIAL
    body = _body(block, kernels, sources, build.mul(build.var(BLOCK), block.rows))
    grain = block.grain if kind is LoopKind.PARALLEL else 1
    return Loop(BLOCK, done, build.div(rows, block.rows), body, kind, grain=grain)


def _body(block: RowBlock, kernels: Sequence[Kernel], sources: Mapping[str, Buffer], start: Expr) -> Stmt:
    """The body of one block."""
    memory = {b.name: replace(b, space=Space.SCRATCH) for b in block.module.temporaries}
    windows = {
        b.name: replace(b, name=compose_name(b.name, "rows")) for b in block.module.arguments if b.name in sources
    }
    redirect = _Redirect({**memory, **windows})
    body = build.block(*(redirect.stmt(k.body) for k in kernels))
    if block.grain:
        body = _run_in_one_thread(body)
    used = _used_buffers(body)
    body = build.allocate([b for b in memory.values() if b.name in used], body)
    for name, window in windows.items():
        if window.name in used:
            body = Window(window, sources[name], start, block.rows, build.var(ROWS), body)
    return body


def _used_buffers(s: Stmt) -> set[str]:
    """The names of the buffers that are read or written in `s`."""
    found = {e.buffer.name for e in walk_stmt_exprs(s) if isinstance(e, Load)}
    for c in walk_stmts(s):
        if isinstance(c, Store):
            found.add(c.buffer.name)
        elif isinstance(c, Invoke):
            found.update(b.name for b, _ in c.operands)
    return found


@dataclass(frozen=True, slots=True)
class _Redirect:
    """Other buffers for those of some names."""

    buffers: Mapping[str, Buffer]

    def expr(self, e: Expr) -> Expr:
        new = map_expr(e, self.expr)
        return replace(new, buffer=self.of(new.buffer)) if isinstance(new, Load) else new

    def of(self, b: Buffer) -> Buffer:
        return self.buffers.get(b.name, b)

    def stmt(self, s: Stmt) -> Stmt:
        new = map_stmt(s, self.expr, self.stmt)
        match new:
            case Store(buffer):
                return replace(new, buffer=self.of(buffer))
            case Invoke(_, operands):
                return replace(new, operands=tuple((self.of(b), where) for b, where in operands))
        return new


def _run_in_one_thread(s: Stmt) -> Stmt:
    """`s` without parallel loops. Hoisted work that each thread would do once is done once for the loop."""
    if not isinstance(s, Loop) or s.kind is not LoopKind.PARALLEL:
        return map_stmt(s, lambda e: e, _run_in_one_thread)
    filled, rest = hoist_packing(s)
    body: Stmt = replace(rest, kind=LoopKind.SERIAL, grain=1)
    for buffer, fill in reversed(filled):
        body = Allocate((buffer,), build.block(fill, body))
    return body
