"""Find the buffers that statements use, and replace them by others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .nodes import Buffer, Expr, Invoke, Load, Stmt, Store, Window
from .rewrite import map_expr, map_stmt, used_values, walk_stmts


def used_buffers(s: Stmt) -> set[str]:
    """The names of the buffers that are read or written in `s`, or viewed by its windows."""
    return accessed_buffers(s) | {c.source.name for c in walk_stmts(s) if isinstance(c, Window)}


def accessed_buffers(s: Stmt) -> set[str]:
    """The names of the buffers that are read or written in `s` directly."""
    found = {e.buffer.name for e in used_values(s) if isinstance(e, Load)}
    for c in walk_stmts(s):
        if isinstance(c, Store):
            found.add(c.buffer.name)
        elif isinstance(c, Invoke):
            found.update(b.name for b, _ in c.operands)
    return found


@dataclass(frozen=True, slots=True)
class Redirect:
    """Replaces buffers, and loads of scalar buffers by expressions; both are given by name."""

    buffers: Mapping[str, Buffer]
    scalars: Mapping[str, Expr]

    def expr(self, e: Expr) -> Expr:
        if isinstance(e, Load) and e.buffer.name in self.scalars:
            return self.scalars[e.buffer.name]
        new = map_expr(e, self.expr)
        return replace(new, buffer=self.of(new.buffer)) if isinstance(new, Load) else new

    def of(self, b: Buffer) -> Buffer:
        return self.buffers.get(b.name, b)

    def stmt(self, s: Stmt) -> Stmt:
        if isinstance(s, Window) and s.source.name in self.buffers:
            return self.window(s)
        new = map_stmt(s, self.expr, self.stmt)
        match new:
            case Store(buffer):
                return replace(new, buffer=self.of(buffer))
            case Invoke(_, operands):
                return replace(new, operands=tuple((self.of(b), where) for b, where in operands))
        return new

    def window(self, s: Window) -> Window:
        """The window `s` with its source replaced; the window takes over the memory space of the new source."""
        source = self.of(s.source)
        buffer = replace(s.buffer, space=source.space)
        inner = replace(self, buffers={**self.buffers, buffer.name: buffer})
        return replace(s, buffer=buffer, source=source, body=inner.stmt(s.body))
