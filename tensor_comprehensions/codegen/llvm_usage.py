"""What a statement uses: asked before a function is printed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..loop_ir.nodes import Const, Expr, Load, Loop, Space, Stmt, Store, Var
from ..loop_ir.rewrite import substatements, walk, walk_all


@dataclass(slots=True)
class Usage:
    """Names, and facts about the statement. The sets are only asked for membership."""

    buffers: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    indexed: set[str] = field(default_factory=set)  # register buffers with subscripts that are not constants
    variables: set[str] = field(default_factory=set)
    streams: bool = False  # has streaming stores


def usage(s: Stmt) -> Usage:
    """Everything `s` mentions, also in inner functions."""
    used = Usage()
    for e in walk_all(s):
        if isinstance(e, Load):
            _access(used, e)
        elif isinstance(e, Var):
            used.variables.add(e.name)
    for c in walk(s):
        if isinstance(c, Store):
            _access(used, c)
            used.written.add(c.buffer.name)
            used.streams |= c.streaming
    return used


def _access(used: Usage, e: Load | Store) -> None:
    used.buffers.add(e.buffer.name)
    if e.buffer.space is Space.REGISTER and not all(map(_is_constant, e.indices)):
        used.indexed.add(e.buffer.name)


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
    own = {s.buffer.name} if isinstance(s, Store) else set()
    all_writes = frozenset(own.union(*(_collect_writes(c, found) for c in substatements(s))))
    if isinstance(s, Loop):
        found[id(s)] = all_writes
    return all_writes
