"""What a statement uses: asked before a function is printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..loop_ir.intrinsics import INTRINSICS
from ..loop_ir.nodes import Allocate, Const, Expr, Invoke, Load, Loop, LoopKind, Space, Stmt, Store, Var
from ..loop_ir.rewrite import children, expressions, substatements


@dataclass(slots=True)
class Usage:
    """Names, and facts about the statement. The sets are only asked for membership."""

    buffers: set[str] = field(default_factory=set)  # but those that it allocates itself
    written: set[str] = field(default_factory=set)
    indexed: set[str] = field(default_factory=set)  # register buffers with subscripts that are not constants
    variables: set[str] = field(default_factory=set)
    streams: bool = False  # has streaming stores

    def include(self, other: Usage) -> None:
        self.buffers |= other.buffers
        self.written |= other.written
        self.indexed |= other.indexed
        self.variables |= other.variables
        self.streams |= other.streams


def usage(s: Stmt, known: dict[int, Usage]) -> Usage:
    """Everything `s` mentions; `known` keeps what was found of parallel loops, by their `id`."""
    if id(s) in known:
        return known[id(s)]
    used, stack, own = Usage(), [s], set[str]()
    while stack:
        top = stack.pop()
        if isinstance(top, Loop) and top.kind is LoopKind.PARALLEL and top is not s:
            used.include(usage(top, known))
            continue
        if isinstance(top, Store):
            _access(used, top)
            used.written.add(top.buffer.name)
            used.streams |= top.streaming
        elif isinstance(top, Allocate):
            own.add(top.buffer.name)
        elif isinstance(top, Invoke):
            used.buffers.update(buffer.name for buffer, _ in top.operands)
            used.written.update(_written(top))
        for e in expressions(top):
            _expression(used, e)
        stack.extend(substatements(top))
    used.buffers -= own  # a statement before may have had others of these names
    if isinstance(s, Loop):
        known[id(s)] = used
    return used


def _expression(used: Usage, e: Expr) -> None:
    stack = [e]
    while stack:
        top = stack.pop()
        if isinstance(top, Load):
            _access(used, top)
        elif isinstance(top, Var):
            used.variables.add(top.name)
        stack.extend(children(top))


def _access(used: Usage, e: Load | Store) -> None:
    used.buffers.add(e.buffer.name)
    if e.buffer.space is Space.REGISTER and not all(map(_is_constant, e.indices)):
        used.indexed.add(e.buffer.name)


def _written(s: Invoke) -> Iterator[str]:
    """The buffers that an intrinsic writes."""
    known = INTRINSICS.get(s.name)
    yield from (s.operands[number][0].name for number in known.written) if known is not None else ()


def _is_constant(e: Expr) -> bool:
    return isinstance(e, Const)


def writes(s: Stmt) -> dict[int, frozenset[str]]:
    """The buffers that each loop in `s` writes, by the `id` of the loop."""
    found: dict[int, frozenset[str]] = {}
    _collect_writes(s, found)
    return found


def _collect_writes(s: Stmt, found: dict[int, frozenset[str]]) -> frozenset[str]:
    if isinstance(s, Loop) and id(s) in found:
        return found[id(s)]
    own = {s.buffer.name} if isinstance(s, Store) else set(_written(s)) if isinstance(s, Invoke) else set()
    all_writes = frozenset(own.union(*(_collect_writes(c, found) for c in substatements(s))))
    if isinstance(s, Loop):
        found[id(s)] = all_writes
    return all_writes
