"""Names that passes introduce."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.internal_names import internal_name
from .nodes import Allocate, Invoke, Let, Load, Loop, Stmt, Store, Window
from .rewrite import stmt_expressions, walk_expr, walk_stmts


@dataclass(frozen=True, slots=True)
class Names:
    """The names taken in a program; `fresh` adds one."""

    taken: set[str] = field(default_factory=set)
    _next: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(s: Stmt) -> Names:
        """All names that occur in `s`."""
        taken: set[str] = set()
        for c in walk_stmts(s):
            match c:
                case Loop(name) | Let(name):
                    taken.add(name)
                case Allocate(buffers):
                    taken.update(b.name for b in buffers)
                case Window(buffer, source):
                    taken |= {buffer.name, source.name}
                case Store(buffer):
                    taken.add(buffer.name)
                case Invoke(_, operands):
                    taken.update(b.name for b, _ in operands)
            taken.update(e.buffer.name for x in stmt_expressions(c) for e in walk_expr(x) if isinstance(e, Load))
        return Names(taken)

    def fresh(self, stem: str) -> str:
        """The name `stem.n` for the first n that is free; marks it as taken."""
        n = self._next.get(stem, 0)  # all names below are taken
        while (name := internal_name(stem, n)) in self.taken:
            n += 1
        self._next[stem] = n + 1
        self.taken.add(name)
        return name


def is_fresh(name: str, stem: str) -> bool:
    """Whether `fresh(stem)` could have returned `name`."""
    head, _, number = name.rpartition(".")
    return head == stem and number.isdigit()
