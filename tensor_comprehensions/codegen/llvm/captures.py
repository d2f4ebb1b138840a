"""The buffers and variables that a statement uses, collected before its function is printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...loop_ir.intrinsics import INTRINSICS
from ...loop_ir.nodes import (
    Allocate,
    Buffer,
    Const,
    Expr,
    Invoke,
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
from ...loop_ir.rewrite import children, stmt_expressions, substatements


@dataclass(slots=True)
class Usage:
    """The buffers and variables that a statement uses, by name. The sets serve membership tests only."""

    buffers: set[str] = field(default_factory=set)  # except those that it allocates itself
    written: set[str] = field(default_factory=set)
    indexed: set[str] = field(default_factory=set)  # register buffers with subscripts that are not constants
    variables: set[str] = field(default_factory=set)
    streams: bool = False  # contains non-temporal stores

    def include(self, other: Usage) -> None:
        self.buffers |= other.buffers
        self.written |= other.written
        self.indexed |= other.indexed
        self.variables |= other.variables
        self.streams |= other.streams


def usage_of(s: Stmt, known: dict[int, Usage]) -> Usage:
    """All uses of `s`. known: caches the uses of loops by their `id`."""
    if id(s) in known:
        return known[id(s)]
    used, stack, own, seen = Usage(), [s], set[str](), set[int]()
    windows: list[Window] = []
    while stack:
        top = stack.pop()
        if isinstance(top, Loop) and top.kind is LoopKind.PARALLEL and top is not s:
            used.include(usage_of(top, known))
            continue
        if isinstance(top, Store):
            _collect_access_uses(used, top)
            used.written.add(top.buffer.name)
            used.streams |= top.nontemporal
        elif isinstance(top, Allocate):
            own.update(b.name for b in top.buffers)
        elif isinstance(top, Window):
            windows.append(top)
            _stride_variables(used, top.source)
        elif isinstance(top, Invoke):
            used.buffers.update(buffer.name for buffer, _ in top.operands)
            for buffer, _ in top.operands:
                _stride_variables(used, buffer)
            used.written.update(_written_operands(top))
        for e in stmt_expressions(top):
            _collect_expr_uses(used, e, seen)
        stack.extend(substatements(top))
    for w in windows:
        own.add(w.buffer.name)
        used.buffers.add(w.source.name)
        if w.buffer.name in used.written:
            used.written.add(w.source.name)
    used.buffers -= own  # another statement may use an outer buffer of the same name
    if isinstance(s, Loop):
        known[id(s)] = used
    return used


def _collect_expr_uses(used: Usage, e: Expr, seen: set[int]) -> None:
    """Add the uses of `e` to `used`. seen: ids of visited expressions, because statements share some."""
    stack = [e]
    while stack:
        top = stack.pop()
        if type(top) is Const:
            continue
        if type(top) is Var:
            used.variables.add(top.name)
        elif id(top) not in seen:
            seen.add(id(top))
            if type(top) is Load:
                _collect_access_uses(used, top)
            stack.extend(children(top))


def _collect_access_uses(used: Usage, e: Load | Store) -> None:
    used.buffers.add(e.buffer.name)
    _stride_variables(used, e.buffer)
    if e.buffer.space is Space.REGISTER and not all(map(_is_constant, e.indices)):
        used.indexed.add(e.buffer.name)


def _stride_variables(used: Usage, buffer: Buffer) -> None:
    if buffer.stride_variables:
        used.variables.update(v for v in buffer.stride_variables if v is not None)


def _written_operands(s: Invoke) -> Iterator[str]:
    """The buffers that an intrinsic writes."""
    known = INTRINSICS.get(s.name)
    yield from (s.operands[number][0].name for number in known.written) if known is not None else ()


def _is_constant(e: Expr) -> bool:
    return isinstance(e, Const)


def loop_writes(s: Stmt) -> dict[int, frozenset[str]]:
    """The buffers that each loop in `s` writes, by the `id` of the loop."""
    found: dict[int, frozenset[str]] = {}
    _collect_writes(s, found, set())
    return found


def _collect_writes(s: Stmt, found: dict[int, frozenset[str]], around: set[str]) -> None:
    """Add the buffers that `s` writes to `around`, and those that each of its loops writes to `found`."""
    if type(s) is Store:
        around.add(s.buffer.name)
    elif type(s) is Invoke:
        around.update(_written_operands(s))
    elif type(s) is Loop or type(s) is While:
        if id(s) not in found:
            inside: set[str] = set()
            _collect_writes(s.body, found, inside)
            found[id(s)] = frozenset(inside)
        around |= found[id(s)]
    else:
        for c in substatements(s):
            _collect_writes(c, found, around)
