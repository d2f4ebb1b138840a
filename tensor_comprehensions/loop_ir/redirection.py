"""Replace the buffers that statements use by others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .nodes import Buffer, Expr, Invoke, Load, Stmt, Store, Window
from .rewrite import map_expr, map_stmt
from .uses import UseTable, has_body


@dataclass(frozen=True, slots=True)
class Redirect:
    """Replaces buffers, and loads of scalar buffers by expressions; both are given by name.

    uses: finds statements that use none of these.
    """

    buffers: Mapping[str, Buffer]
    scalars: Mapping[str, Expr]
    uses: UseTable = field(default_factory=UseTable)

    def expr(self, e: Expr) -> Expr:
        if isinstance(e, Load) and e.buffer.name in self.scalars:
            return self.scalars[e.buffer.name]
        new = map_expr(e, self.expr)
        if not isinstance(new, Load) or (buffer := self.of(new.buffer)) is new.buffer:
            return new
        return Load(buffer, new.indices, new.mask)

    def of(self, b: Buffer) -> Buffer:
        return self.buffers.get(b.name, b)

    def stmt(self, s: Stmt) -> Stmt:
        if has_body(s) and not self._uses_replaced(s):
            return s
        if isinstance(s, Window) and s.source.name in self.buffers:
            return self.window(s)
        new = map_stmt(s, self.expr, self.stmt)
        match new:
            case Store(buffer) if (other := self.of(buffer)) is not buffer:
                return replace(new, buffer=other)
            case Invoke(_, operands):
                return replace(new, operands=tuple((self.of(b), where) for b, where in operands))
        return new

    def window(self, s: Window) -> Window:
        """The window `s` with its source replaced; the window takes over the memory space of the new source."""
        source = self.of(s.source)
        buffer = replace(s.buffer, space=source.space)
        inner = replace(self, buffers={**self.buffers, buffer.name: buffer})
        return replace(s, buffer=buffer, source=source, body=inner.stmt(s.body))

    def _uses_replaced(self, s: Stmt) -> bool:
        """Whether `s` uses a scalar buffer, or one that is to be replaced by a different one."""
        uses = self.uses.find(s)
        if not uses.accessed.keys().isdisjoint(self.scalars):
            return True
        return any(form != new for name, new in self.buffers.items() for form in uses.forms(name))
