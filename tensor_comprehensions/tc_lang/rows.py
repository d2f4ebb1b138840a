"""Sizes of a def that are only numbers of rows: defs that map rows to rows, or sum over them, for any number of them.

A statement maps rows if every row of its target depends on the same row of other tensors, and on tensors without rows:
norms, pointwise defs, layers, batched products. It sums over rows if it reduces them into a target without rows:
gradients of weights, statistics of a batch. A third kind has nothing to do with rows. This is decided before the sizes
are known: with formulas for the sizes in question, range inference says which dimensions and indices depend on them.
The rows can then be computed, and added up, in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from ..core.errors import TCError
from ..core.internal_names import internal_name
from .affine import to_affine
from .ir import (
    INDEX_TYPE,
    Access,
    Cast,
    Expr,
    Function,
    Index,
    Role,
    Size,
    Statement,
    Symbol,
    map_operands,
    operands_of,
    walk_expr,
)
from .ranges import Bounds, Ranges, infer_ranges, symbolic_ranges
from .size_polynomial import SizeOperation, SizePolynomial, Value, to_polynomial


class CannotGeneralize(Exception):
    """A kernel for all values of a size is not made. name: of the size. reason: why, as a sentence without its end."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"'{name}' stays part of the kernel: {reason}")
        self.name, self.reason = name, reason


COUNT = internal_name("count")
"""The operand that holds the number of rows, of defs whose values depend on it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a def: its first sizes, outermost first, with an index for each.

    tensors: those that have rows, by name; their first dimensions are the sizes, in order.
    counts: the names of extents in the values of statements that are the number of rows.
    """

    sizes: tuple[str, ...]
    tensors: tuple[str, ...]
    counts: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        """The dimensions that rows take."""
        return len(self.sizes)

    def sizes_for(self, count: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """`sizes` with values that make `count` rows."""
        return {**sizes, **dict.fromkeys(self.sizes[:-1], 1), self.sizes[-1]: count}


def list_row_size_candidates(function: Function, names: Iterable[str]) -> list[tuple[str, ...]]:
    """The combinations of the sizes `names` that may count rows: the first dimensions of a tensor, outputs first."""
    try:
        ranges = symbolic_ranges(function)
    except TCError:
        return []
    asked, found = set(names), dict.fromkeys([*function.returns, *(t.name for t in function.tensors)])
    leading = {tuple(map(_plain_name, ranges.shape(name))): None for name in found}
    prefixes = [tuple(map(str, takewhile(asked.__contains__, shape))) for shape in leading]
    return list(dict.fromkeys(names[:d] for names in prefixes for d in range(len(names), 0, -1)))


def add_row_count_operand(function: Function, rows: Rows) -> Function:
    """`function` with one more operand, `COUNT`, where values depend on the number of rows."""
    if not rows.counts:
        return function

    def read_count(e: Expr) -> Expr:
        if isinstance(e, Size) and e.name in rows.counts:
            count = Access(COUNT, (), INDEX_TYPE)
            return count if e.dtype == INDEX_TYPE else Cast(count, e.dtype)
        return map_operands(e, read_count)

    at = len(function.parameters)
    operand = Symbol(COUNT, INDEX_TYPE, 0, Role.INPUT, ())
    return replace(
        function,
        tensors=(*function.tensors[:at], operand, *function.tensors[at:]),
        statements=tuple(replace(s, value=read_count(s.value)) for s in function.statements),
    )


def find_rows(function: Function, names: Iterable[str], sizes: Mapping[str, int]) -> Rows:
    """The rows that the sizes `names` of a def count, where all others have the values of `sizes`.

    Args:
        sizes: also of scalars that are part of the kernel.

    Raises:
        CannotGeneralize: the def does more with one of these sizes than to map rows and to sum over them.
    """
    asked = tuple(dict.fromkeys(names))
    symbols = {name: SizePolynomial.name(name) for name in asked}
    try:
        ranges = infer_ranges(function, {**sizes, **symbols})
    except TCError as error:
        raise CannotGeneralize(asked[0], f"its shapes do not follow from it ({error.message})") from error
    finder = _Finder(function, asked, ranges)
    order = finder.order()
    for s, indices in zip(function.statements, ranges.statements, strict=True):
        finder.check_statement(s, indices, order)
    finder.check_constraints()
    counts = sorted({name for s in function.statements for name in finder.read_counts(s)})
    return Rows(order, tuple(t.name for t in function.tensors if t.name in finder.with_rows), tuple(counts))


@dataclass(slots=True)
class _Finder:
    """Looks at a def with formulas for `names`."""

    function: Function
    names: tuple[str, ...]
    ranges: Ranges

    @property
    def with_rows(self) -> dict[str, tuple[str, ...]]:
        """The sizes that the first dimensions of each tensor are, where it has any."""
        return {
            name: sizes for name, bounds in self.ranges.tensors.items() if (sizes := self._leading_sizes(name, bounds))
        }

    def _leading_sizes(self, tensor: str, bounds: Sequence[Bounds]) -> tuple[str, ...]:
        found = [self._size_of(b, f"a dimension of '{tensor}'") for b in bounds]
        sizes = tuple(name for name in found if name is not None)
        for d, name in enumerate(found):
            if name is not None and d >= len(sizes):
                raise CannotGeneralize(name, f"it is not the outermost dimension of '{tensor}'")
        return sizes

    def _size_of(self, bounds: Bounds, what: str) -> str | None:
        """The size that a range counts from 0; None where it depends on none."""
        used = [name for b in bounds for name in self._used_names(b)]
        if not used:
            return None
        if to_polynomial(bounds[0]).terms or (name := _plain_name(bounds[1])) is None:
            raise CannotGeneralize(used[0], f"{what} goes from {bounds[0]} to {bounds[1]}")
        return name

    def _used_names(self, value: Value) -> list[str]:
        return [name for name in _names_in(value) if name in self.names]

    def order(self) -> tuple[str, ...]:
        """The sizes in the order of the dimensions, the same in all tensors that have rows."""
        found = self.with_rows
        for tensor, sizes in found.items():
            if missing := [name for name in self.names if name not in sizes]:
                raise CannotGeneralize(missing[0], f"'{tensor}' has {' and '.join(sizes)}, and not {missing[0]}")
        orders = set(found.values())
        if len(orders) != 1:
            raise CannotGeneralize(self.names[0], "its dimensions come in another order in another tensor")
        order = orders.pop()
        if len(set(order)) < len(order):
            raise CannotGeneralize(order[0], "a tensor has it twice")
        if not any(t.role is Role.INPUT and t.name in found for t in self.function.tensors):
            raise CannotGeneralize(order[0], "no operand has it as its outermost dimension")
        return order

    def check_statement(self, s: Statement, indices: Mapping[str, Bounds], order: tuple[str, ...]) -> None:
        """Whether the statement reads one row at a time, and writes the same one or adds to what all have in common."""
        size_of = {name: self._size_of(b, f"the range of '{name}'") for name, b in indices.items()}
        rows = {size: name for name, size in size_of.items() if size is not None}
        if len(rows) < sum(size is not None for size in size_of.values()):
            raise CannotGeneralize(order[0], f"a statement of '{s.target}' has two indices that go over it")
        row = tuple(Index(rows.get(size, ""), INDEX_TYPE) for size in order)
        accesses = [x for x in self._accesses(s) if x.tensor in self.with_rows]
        for access in accesses:
            if access.subscripts[: len(order)] != row:
                raise CannotGeneralize(order[0], f"'{s.target}' is computed from other rows of '{access.tensor}'")
        if s.target in self.with_rows:
            self._check_row(s, size_of, row)
        elif rows:
            self._check_sum(s, rows, order, any(x not in s.exists for x in accesses))
        self._check_other_uses(s, order, {x.name for x in row})

    def _check_row(self, s: Statement, size_of: Mapping[str, str | None], row: tuple[Index, ...]) -> None:
        """Check that a statement writes one row at a time."""
        for index in s.indices[s.num_free :]:
            if (size := size_of[index]) is not None:
                raise CannotGeneralize(size, f"'{s.target}' is reduced over '{index}', which goes over it")
        if s.subscripts[: len(row)] != row:
            raise CannotGeneralize(self.with_rows[s.target][0], f"'{s.target}' is not written row by row")

    def _check_sum(self, s: Statement, rows: Mapping[str, str], order: tuple[str, ...], reads_rows: bool) -> None:
        """Check that a statement adds rows to a tensor without rows, in any parts."""
        if missing := [name for name in order if name not in rows]:
            raise CannotGeneralize(missing[0], f"'{s.target}' is computed once, and not for each row")
        if s.reduction is None:
            raise CannotGeneralize(order[0], f"'{s.target}' is written once, and not for each row")
        if not reads_rows:
            raise CannotGeneralize(order[0], f"'{s.target}' is reduced over it without a row to read")
        if any(x.tensor == s.target for x in self._accesses(s)):
            raise CannotGeneralize(order[0], f"'{s.target}' is reduced over it, and is itself an operand")

    def _accesses(self, s: Statement) -> Iterator[Access]:
        for e in (*s.subscripts, s.value, *s.exists):
            yield from (x for x in walk_expr(e) if isinstance(x, Access))

    def _check_other_uses(self, s: Statement, order: tuple[str, ...], row: set[str]) -> None:
        """Check that rows are used only to select a row, and their number only in values."""
        depth = len(order) if s.target in self.with_rows else 0
        parts = [*s.subscripts[depth:], s.value, *s.exists]
        counts = set(self.read_counts(s)) if len(order) == 1 else set()
        for e in (x for part in parts for x in self._walk_within_row(part, len(order))):
            if isinstance(e, Index) and e.name in row:
                raise CannotGeneralize(order[0], f"the value of '{e.name}', which goes over it, decides '{s.target}'")
            if isinstance(e, Size) and (used := self._used_names(self.ranges.sizes[e.name])) and e.name not in counts:
                raise CannotGeneralize(used[0], f"its value decides '{s.target}'")

    def read_counts(self, s: Statement) -> list[str]:
        """The extents in the value of a statement, outside of subscripts, that are one of `names`."""
        sizes = [e for e in walk_expr(s.value) if isinstance(e, Size)]
        inside = [x for a in self._accesses(s) for e in a.subscripts for x in walk_expr(e)]
        inside += [x for e in s.subscripts for x in walk_expr(e)]
        return [e.name for e in sizes if _plain_name(self.ranges.sizes[e.name]) in self.names and e not in inside]

    def _walk_within_row(self, e: Expr, depth: int) -> Iterator[Expr]:
        """`e` and its subexpressions, without the subscripts that select the row of a tensor."""
        yield e
        parts = operands_of(e)
        if isinstance(e, Access) and e.tensor in self.with_rows:
            parts = parts[depth:]
        for part in parts:
            yield from self._walk_within_row(part, depth)

    def check_constraints(self) -> None:
        """Whether the sizes that have to agree do so for any number of rows, or do not depend on it."""
        pairs = [
            (to_affine(c.left, self.ranges.sizes).constant, to_affine(c.right, self.ranges.sizes).constant)
            for c in self.function.constraints
        ]
        for t in self.function.tensors:
            if t.role is not Role.INPUT and t.extents is not None:
                declared = (to_affine(e, self.ranges.sizes).constant for e in t.extents)
                pairs += zip(declared, self.ranges.shape(t.name), strict=True)
        for left, right in pairs:
            if (used := [*self._used_names(left), *self._used_names(right)]) and to_polynomial(left) != to_polynomial(
                right
            ):
                raise CannotGeneralize(used[0], f"{left} has to be {right}")


def _plain_name(value: Value) -> str | None:
    """The name that a formula is, if it is no more than that."""
    name = str(value)
    return name if value == SizePolynomial.name(name) else None


def _names_in(value: Value) -> Iterator[str]:
    """The names in a formula."""
    for monomial, _ in to_polynomial(value).terms:
        for atom in monomial:
            if isinstance(atom, SizeOperation):
                yield from (*_names_in(atom.left), *_names_in(atom.right))
            else:
                yield atom.name
