"""Extract some statements of a bound def into a separate def, so that several lowerings can share the work.

Tensors that one piece passes to another are outputs of the first and inputs of the second, even if they are temporaries
of the whole def.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .. import ir as f
from ..ir import BoundFunction, BoundStatement, Role


@dataclass(frozen=True, slots=True)
class TouchedTensors:
    """The names of the tensors that a piece reads, and of those that it writes."""

    read: frozenset[str]
    written: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        return self.read | self.written


def tensors_of_statements(statements: Sequence[BoundStatement]) -> TouchedTensors:
    """The tensors that statements, including their checks, read and write."""
    read = frozenset(name for s in statements for name in _collect_read_tensors(s))
    return TouchedTensors(read, frozenset(s.target for s in statements))


def extract_statements_as_def(
    bound: BoundFunction,
    name: str,
    statements: tuple[BoundStatement, ...],
    before: Sequence[TouchedTensors],
    after: Sequence[TouchedTensors],
) -> BoundFunction:
    """`statements` of `bound` as a def. before, after: the tensors of the pieces that run before and after it."""
    own = tensors_of_statements(statements)
    earlier = frozenset(t for piece in before for t in piece.written)
    later = frozenset(t for piece in after for t in piece.all)
    tensors = []
    for t in bound.tensors:
        if t.name not in own.all:
            continue
        if t.name not in own.written:
            role = Role.INPUT
        elif t.role is Role.INOUT or t.name in earlier:
            role = Role.INOUT
        else:
            role = Role.OUTPUT if t.name in later or t.name in bound.returns else Role.TEMPORARY
        tensors.append(replace(t, role=role))
    rank = {Role.INPUT: 0, Role.OUTPUT: 1, Role.INOUT: 1, Role.TEMPORARY: 2}
    tensors.sort(key=lambda t: rank[t.role])
    returns = tuple(t.name for t in tensors if rank[t.role] == 1)
    return BoundFunction(name, tuple(tensors), statements, returns, ())


def _collect_read_tensors(s: BoundStatement) -> Iterator[str]:
    guards = [c.guard for c in s.checks if c.guard is not None]
    for root in (s.value, *s.subscripts, *(c.subscript for c in s.checks), *guards):
        yield from (e.tensor for e in f.walk_expr(root) if isinstance(e, f.Access))
    yield from (c.tensor for c in s.checks)
