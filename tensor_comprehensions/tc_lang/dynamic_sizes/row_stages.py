"""Split a def with rows into stages that run one after another, each over all rows or once.

A statement that needs a sum over all rows is in a later stage than the sum. A stage over rows reads and writes one row
at a time, and adds rows to tensors without rows, which an earlier stage has initialized. So it can process the rows in
blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ...core.errors import InternalError
from ...core.internal_names import SEPARATOR, internal_name
from ..binding.bind import neutral_element
from ..ir import Access, BoundFunction, BoundStatement, Const, Expr, Role, Tensor, walk_expr


class StatementKind(Enum):
    """The role of a statement in a def with rows."""

    ONCE = "reads and writes no rows"
    ROWS = "maps rows to rows"
    SUM = "reduces rows into a tensor without rows"


@dataclass(frozen=True, slots=True)
class RowStage:
    """The statements of one stage as a def. Tensors of other stages are its inputs and outputs.

    has_rows: whether it runs over rows; if not, it runs once. sums: whether it adds to tensors without rows.
    """

    bound: BoundFunction
    has_rows: bool
    sums: bool

    @property
    def updates(self) -> bool:
        """Whether computing a row twice would give a wrong result."""
        return self.sums or any(t.role is Role.INOUT for t in self.bound.tensors)


def split_row_stages(bound: BoundFunction, with_rows: Collection[str]) -> tuple[RowStage, ...]:
    """Split a legalized def into stages, in order.

    Args:
        with_rows: the tensors that have rows; tensors that legalization has made for one of these may be left out.
    """
    splitter = _Splitter(bound, frozenset(t.name for t in bound.tensors if base_tensor(t.name, bound) in with_rows))
    statements = [new for s in bound.statements for new in splitter.split_sum(s)]
    levels = splitter.levels(statements)
    if len(set(levels)) == 1 and not any(splitter.kind(s) is StatementKind.SUM for s in statements):
        return (RowStage(bound, levels[0] % 2 == 1, False),)
    groups = [[s for s, level in zip(statements, levels, strict=True) if level == n] for n in sorted(set(levels))]
    return tuple(splitter.stage(groups, n) for n in range(len(groups)))


def shared_tensors(stages: Sequence[RowStage], bound: BoundFunction) -> tuple[Tensor, ...]:
    """The temporaries of a def that several stages use."""
    outer = {t.name for stage in stages for t in stage.bound.tensors if t.role is not Role.TEMPORARY}
    found = {t.name: t for stage in stages for t in stage.bound.tensors if t.name in outer}
    own = {t.name for t in bound.tensors if t.role is not Role.TEMPORARY}
    return tuple(found[name] for name in sorted(found.keys() - own))


def base_tensor(name: str, bound: BoundFunction) -> str:
    """The tensor that `name`, made by legalization, copies or accumulates; any other `name` itself."""
    names = {t.name for t in bound.tensors}
    parts = name.split(SEPARATOR)
    return next((x for n in range(1, len(parts)) if (x := SEPARATOR.join(parts[:n])) in names), name)


@dataclass(frozen=True, slots=True)
class _Splitter:
    bound: BoundFunction
    with_rows: frozenset[str]

    def kind(self, s: BoundStatement) -> StatementKind:
        if s.target in self.with_rows:
            return StatementKind.ROWS
        return (
            StatementKind.SUM
            if any(name in self.with_rows for name in _collect_read_tensors(s))
            else StatementKind.ONCE
        )

    def split_sum(self, s: BoundStatement) -> Iterator[BoundStatement]:
        """`s`, with the initialization of a sum over rows split off into a separate statement."""
        if self.kind(s) is StatementKind.SUM and s.initialize and s.reduction is not None:
            dtype = self.bound.tensor(s.target).dtype
            yield replace(
                s, name=internal_name(s.name, "start"), reduction=None, initialize=False, indices=s.free,
                value=Const(neutral_element(s.reduction, dtype), dtype), checks=(), exists=(), elements=(), terms=(),
            )  # fmt: skip
            s = replace(s, initialize=False)
        yield s

    def levels(self, statements: Sequence[BoundStatement]) -> list[int]:
        """The index of the earliest possible stage of each statement; stages that run once have even indices."""
        found: list[int] = []
        for s in statements:
            first = 0 if self.kind(s) is StatementKind.ONCE else 1
            earlier = zip(statements, found, strict=False)
            found.append(max((level + d for t, level in earlier for d in self._distances(t, s)), default=first))
            found[-1] = max(found[-1], first)
        return found

    def _distances(self, s: BoundStatement, later: BoundStatement) -> Iterator[int]:
        """The least number of stages between `s` and `later`, for each tensor through which they depend."""
        common = ({s.target} & {later.target, *_collect_read_tensors(later)}) | (
            {later.target} & set(_collect_read_tensors(s))
        )
        once = [self.kind(x) is StatementKind.ONCE for x in (s, later)]
        for tensor in common:
            if once[0] or once[1]:
                yield 0 if all(once) else 1
            else:
                yield 0 if tensor in self.with_rows or self._reduces_into_same_tensor(s, later) else 2

    def _reduces_into_same_tensor(self, s: BoundStatement, later: BoundStatement) -> bool:
        """Whether both reduce into the same tensor, so that their order does not matter."""
        reads = {*_collect_read_tensors(s), *_collect_read_tensors(later)}
        return s.target == later.target and s.reduction == later.reduction and s.target not in reads

    def stage(self, groups: Sequence[Sequence[BoundStatement]], n: int) -> RowStage:
        """The n-th group of statements as a def."""
        mine, kinds = groups[n], {self.kind(s) for s in groups[n]}
        before = {name for group in groups[:n] for s in group for name in (s.target, *_collect_read_tensors(s))}
        after = {name for group in groups[n + 1 :] for s in group for name in (s.target, *_collect_read_tensors(s))}
        used = {name for s in mine for name in (s.target, *_collect_read_tensors(s))}
        written = {s.target for s in mine}
        tensors = []
        for t in self.bound.tensors:
            if t.name in used:
                role = self._role(t, t.name in written, t.name in before, t.name in after)
                tensors.append(replace(t, role=role))
        tensors.sort(key=lambda t: (t.role is not Role.INPUT) + (t.role is Role.TEMPORARY))
        returns = [t for t in tensors if t.role in (Role.OUTPUT, Role.INOUT)]
        bound = BoundFunction(
            self.bound.name, tuple(tensors), tuple(mine), tuple(t.name for t in returns),
            tuple((0,) * len(t.shape) for t in returns),
        )  # fmt: skip
        return RowStage(bound, StatementKind.ONCE not in kinds, StatementKind.SUM in kinds)

    def _role(self, t: Tensor, is_written: bool, before: bool, after: bool) -> Role:
        """The role in one stage of a tensor that earlier and later stages may use, too."""
        if not is_written:
            if t.role is not Role.INPUT and not before and t.role is not Role.INOUT:
                raise InternalError(f"{t.name} is read before it is written")
            return Role.INPUT
        if before or t.role is Role.INOUT:
            return Role.INOUT
        return Role.TEMPORARY if t.role is Role.TEMPORARY and not after else Role.OUTPUT


def _collect_read_tensors(s: BoundStatement) -> set[str]:
    """The tensors that a statement reads, without the target of a reduction."""
    checked: list[Expr] = [e for c in s.checks for e in (c.subscript, *(() if c.guard is None else (c.guard,)))]
    parts = (*s.subscripts, s.value, *checked)
    return {e.tensor for part in parts for e in walk_expr(part) if isinstance(e, Access)}
