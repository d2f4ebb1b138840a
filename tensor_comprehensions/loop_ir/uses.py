"""Which buffers and variables statements use, found once for each statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .nodes import Allocate, Buffer, Const, Expr, If, Invoke, Load, Loop, LoopKind, Stmt, Store, Var, While, Window
from .rewrite import children, stmt_expressions, substatements


@dataclass(slots=True)
class Uses:
    """The buffers and variables that a statement and its substatements use.

    Attributes:
        accessed: the buffers that are read or written directly, by name; None for a name that several buffers have.
        viewed: the same for the sources of windows.
        windows: the name of the window on each source.
        variables: the variables that are read, and those that hold strides of `accessed` and `viewed`.
        has_parallel_loops: whether any loop is parallel.
    """

    accessed: dict[str, Buffer | None] = field(default_factory=dict)
    viewed: dict[str, Buffer | None] = field(default_factory=dict)
    windows: dict[str, str] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    has_parallel_loops: bool = False

    @property
    def buffers(self) -> set[str]:
        """The names of all buffers that it reads, writes or views."""
        return {*self.accessed, *self.viewed}

    def forms(self, name: str) -> tuple[Buffer | None, ...]:
        """The forms of the buffer `name`: none if it is not used."""
        return tuple(found[name] for found in (self.accessed, self.viewed) if name in found)

    def add(self, other: Uses) -> None:
        """Add what another statement uses."""
        _add_forms(self.accessed, other.accessed)
        _add_forms(self.viewed, other.viewed)
        self.windows |= other.windows
        self.variables |= other.variables
        self.has_parallel_loops |= other.has_parallel_loops


@dataclass(frozen=True, slots=True)
class UseTable:
    """Finds the uses of statements. Those of loops and other statements with bodies are found once.

    Programs that are joined from blocks ask for the same bodies at every level.
    """

    _known: dict[int, tuple[Stmt, Uses]] = field(default_factory=dict)

    def find(self, s: Stmt) -> Uses:
        """The uses of `s`, which are not to be changed."""
        known = self._known.get(id(s))
        if known is not None:
            return known[1]
        uses, seen, stack = Uses(), set[int](), [s]
        while stack:
            top = stack.pop()
            if top is not s and has_body(top):
                uses.add(self.find(top))
                continue
            _add_statement(uses, top, seen)
            stack += substatements(top)
        if has_body(s):
            self._known[id(s)] = (s, uses)  # with `s`, so that its id remains its own
        return uses


def has_body(s: Stmt) -> bool:
    """Whether `s` has a body whose uses are worth remembering. `Let`s are left out, because they form long chains."""
    return isinstance(s, Loop | Window | If | Allocate | While)


def used_buffers(s: Stmt) -> set[str]:
    """The names of the buffers that are read or written in `s`, or viewed by its windows."""
    return UseTable().find(s).buffers


def accessed_buffers(s: Stmt) -> set[str]:
    """The names of the buffers that are read or written in `s` directly."""
    return set(UseTable().find(s).accessed)


def _add_forms(found: dict[str, Buffer | None], new: Mapping[str, Buffer | None]) -> None:
    for name, b in new.items():
        if found.setdefault(name, b) != b:
            found[name] = None


def _add_form(found: dict[str, Buffer | None], variables: set[str], b: Buffer) -> None:
    known = found.setdefault(b.name, b)
    if known is not b and known != b:
        found[b.name] = None
    if b.stride_variables:
        variables.update(v for v in b.stride_variables if v is not None)


def _add_statement(uses: Uses, s: Stmt, seen: set[int]) -> None:
    """Add what `s` itself uses. seen: the ids of expressions that have been visited."""
    match s:
        case Store(buffer):
            _add_form(uses.accessed, uses.variables, buffer)
        case Invoke(_, operands):
            for b, _ in operands:
                _add_form(uses.accessed, uses.variables, b)
        case Window(buffer, source):
            _add_form(uses.viewed, uses.variables, source)
            uses.windows[source.name] = buffer.name
        case Loop(kind=kind):
            uses.has_parallel_loops |= kind is LoopKind.PARALLEL
    stack: list[Expr] = list(stmt_expressions(s))
    while stack:
        top = stack.pop()
        if type(top) is Const:
            continue
        if type(top) is Var:
            uses.variables.add(top.name)
        elif id(top) not in seen:
            seen.add(id(top))
            if type(top) is Load:
                _add_form(uses.accessed, uses.variables, top.buffer)
            stack += children(top)
