"""Find sizes of a def that only count rows, so that one kernel can serve any number of rows.

A statement maps rows if every row of its target depends on the same row of other tensors, and on tensors without rows:
norms, pointwise defs, layers, batched products. It sums over rows if it reduces them into a target without rows:
gradients of weights, statistics of a batch. A third kind does not involve rows. This is decided before the sizes are
known: with formulas for the sizes in question, range inference shows which dimensions and indices depend on them. The
rows can then be computed, and added up, in blocks.

Several sizes can count rows independently of each other: a product c(m,n) += a(m,k) * b(k,n) maps rows by M and by N
and sums over rows by K. Each size then has its own axis, a `Rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from ...core.errors import TCError
from ...core.internal_names import internal_name
from ..affine import to_affine
from ..binding.ranges import Bounds, Ranges, infer_ranges, symbolic_ranges
from ..ir import (
    INDEX_TYPE,
    Access,
    Binary,
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
from ..size_polynomial import SizeOperation, SizePolynomial, Value, to_polynomial
from .size_separation import original_size
from .window_forms import WHOLE, RangeForm, is_in_window, parse_range_form


class CannotGeneralize(Exception):
    """No kernel can serve all values of the size `name`. reason: why, as a sentence without a final period."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"'{name}' stays part of the kernel: {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True, slots=True)
class Rows:
    """An axis of a def: the rows that one size counts, or several sizes that are adjacent dimensions in all tensors.

    One value of the index of each size selects a row: of x(N,D), a row by N or a column by D.

    sizes: outermost first. places: the tensors that have rows, each with the first of its dimensions that are `sizes`.
    counts: the names of extents in the values of statements that are the number of rows.
    positions: whether a value depends on the index of its row, as a causal mask does.
    sums: whether a statement reduces over rows. uses_sums: whether another one maps rows by the result.
    step, reach: as in convolutions, a row is computed from `reach` elements of each operand in `windowed`, and the
        elements of the next row are `step` further. Of all other tensors, a row is one element of the dimension.
    """

    sizes: tuple[str, ...]
    places: tuple[tuple[str, int], ...]
    counts: tuple[str, ...] = ()
    sums: bool = False
    uses_sums: bool = False
    positions: bool = False
    step: int = 1
    reach: int = 1
    windowed: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that have rows."""
        return tuple(name for name, _ in self.places)

    def place(self, tensor: str) -> int | None:
        """The first dimension of a tensor that is one of the sizes; None if it has no rows."""
        return dict(self.places).get(tensor)

    @property
    def original_sizes(self) -> tuple[str, ...]:
        """The names of the sizes in the original def."""
        return tuple(map(original_size, self.sizes))

    @property
    def depth(self) -> int:
        """The number of dimensions that select a row."""
        return len(self.sizes)

    def sizes_for(self, count: int) -> dict[str, int]:
        """Values of the sizes that make `count` rows."""
        return {**dict.fromkeys(self.sizes[:-1], 1), self.sizes[-1]: self.step * (count - 1) + self.reach}

    def counts_rows(self, sizes: Mapping[str, int]) -> bool:
        """Whether these values of the sizes give a non-negative number of rows."""
        return sizes[self.original_sizes[-1]] >= self.reach - self.step


def count_operand(name: str) -> str:
    """The name of the operand that holds the number of rows, in defs whose values depend on it."""
    return internal_name("count", name)


def first_row_operand(name: str) -> str:
    """The name of the operand with the index of a block's first row, in defs whose values depend on row indices."""
    return internal_name("first", name)


def list_row_operands(axes: Iterable[Rows]) -> dict[str, tuple[int, bool]]:
    """The possible operands of defs of blocks, by name: the index of the axis, and whether it is a first row."""
    found: dict[str, tuple[int, bool]] = {}
    for n, rows in enumerate(axes):
        found |= {count_operand(rows.sizes[0]): (n, False), first_row_operand(rows.sizes[0]): (n, True)}
    return found


def list_dynamic_sizes(axes: Iterable[Rows]) -> tuple[str, ...]:
    """The original sizes of the axes, in order, without duplicates."""
    return tuple(dict.fromkeys(name for rows in axes for name in rows.original_sizes))


def list_row_size_candidates(function: Function, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Combinations of the sizes `names` that may count rows: the leading dimensions of a tensor, outputs first.

    Each size alone follows.
    """
    try:
        ranges = symbolic_ranges(function)
    except TCError:
        return []
    asked, tensors = set(names), dict.fromkeys([*function.returns, *(t.name for t in function.tensors)])
    shapes = [tuple(map(_plain_name, ranges.shape(name))) for name in tensors]
    prefixes = [tuple(map(str, takewhile(asked.__contains__, shape))) for shape in dict.fromkeys(shapes)]
    leading = [sizes[:d] for sizes in prefixes for d in range(len(sizes), 0, -1)]
    return list(dict.fromkeys([*leading, *((name,) for name in names)]))


def add_row_operands(function: Function, axes: Sequence[Rows]) -> Function:
    """`function` with an operand for each row count, and each first row of a block, that values depend on."""
    counts = {name: count_operand(rows.sizes[0]) for rows in axes for name in rows.counts}
    firsts = [first_row_operand(rows.sizes[0]) for rows in axes if rows.positions]
    operands = dict.fromkeys([*counts.values(), *firsts])
    if not operands:
        return function
    at = len(function.parameters)
    added = [Symbol(name, INDEX_TYPE, 0, Role.INPUT, ()) for name in operands]

    def read_operands(s: Statement) -> Statement:
        rows = {e.name: x for x in axes if x.positions for e in _list_row_indices(s, x)}
        return replace(s, value=_read_operands(s.value, counts, rows))

    return replace(
        function,
        tensors=(*function.tensors[:at], *added, *function.tensors[at:]),
        statements=tuple(map(read_operands, function.statements)),
    )


def _read_operands(e: Expr, counts: Mapping[str, str], rows: Mapping[str, Rows]) -> Expr:
    """`e` with operands instead of the sizes `counts`, and added to row indices, except in subscripts."""
    if isinstance(e, Access):
        return e
    if isinstance(e, Size) and e.name in counts:
        count = Access(counts[e.name], (), INDEX_TYPE)
        return count if e.dtype == INDEX_TYPE else Cast(count, e.dtype)
    if isinstance(e, Index) and e.name in rows:
        first = Access(first_row_operand(rows[e.name].sizes[0]), (), INDEX_TYPE)
        number = Binary("+", replace(e, dtype=INDEX_TYPE), first, INDEX_TYPE)
        return number if e.dtype == INDEX_TYPE else Cast(number, e.dtype)
    return map_operands(e, lambda x: _read_operands(x, counts, rows))


def _list_row_indices(s: Statement, rows: Rows) -> Iterator[Index]:
    """The indices of a statement that select a row along an axis of one dimension."""
    for tensor, subscripts in ((s.target, s.subscripts), *((a.tensor, a.subscripts) for a in _accesses(s))):
        place = rows.place(tensor)
        if place is not None and isinstance(index := subscripts[place], Index):
            yield index


def find_rows(function: Function, names: Iterable[str], sizes: Mapping[str, int], others: Iterable[str] = ()) -> Rows:
    """Find the rows that the sizes `names` of a def count together.

    Args:
        sizes: values of the other sizes, and of scalars that are part of the kernel.
        others: sizes that may have any value, too.

    Raises:
        CannotGeneralize: the def uses one of these sizes for more than mapping rows and summing over them.
    """
    asked = tuple(dict.fromkeys(names))
    symbols = {name: SizePolynomial.name(name) for name in (*asked, *others)}
    try:
        ranges = infer_ranges(function, {**sizes, **symbols})
    except TCError as error:
        raise CannotGeneralize(asked[0], f"its shapes do not follow from it ({error.message})") from error
    finder = _Finder(function, asked, ranges)
    order = finder.order()
    for s, indices in zip(function.statements, ranges.statements, strict=True):
        finder.check_statement(s, indices, order)
    finder.check_constraints()
    form = finder.form
    counts = sorted({name for s in function.statements for name in finder.read_counts(s)})
    places = tuple((t.name, finder.with_rows[t.name][0]) for t in function.tensors if t.name in finder.with_rows)
    sums = finder.list_sums()
    uses = any(a.tensor in sums for s in function.statements if s.target in finder.with_rows for a in _accesses(s))
    rows = Rows(order, places, tuple(counts), bool(sums), uses, finder.positions)
    windowed = tuple(t.name for t in function.tensors if t.name in finder.with_rows and t.role is Role.INPUT)
    return rows if form == WHOLE else replace(rows, step=form.step, reach=form.reach, windowed=windowed)


@dataclass
class _Finder:
    """Analyzes a def with formulas for the sizes `names`."""

    function: Function
    names: tuple[str, ...]
    ranges: Ranges
    positions: bool = False

    @cached_property
    def with_rows(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """For each tensor with rows, the first dimension that is one of the sizes, and the sizes from there on."""
        places = {name: self._find_place(name, bounds) for name, bounds in self.ranges.tensors.items()}
        return {name: place for name, place in places.items() if place is not None}

    def _find_place(self, tensor: str, bounds: Sequence[Bounds]) -> tuple[int, tuple[str, ...]] | None:
        found = [self._size_of(b, f"a dimension of '{tensor}'") for b in bounds]
        places = [d for d, name in enumerate(found) if name is not None]
        sizes = tuple(name for name in found if name is not None)
        if len(set(sizes)) < len(sizes):
            raise CannotGeneralize(sizes[0], f"'{tensor}' has it twice")
        if places and places[-1] - places[0] >= len(places):
            raise CannotGeneralize(sizes[-1], f"its dimension of '{tensor}' is not beside that of {sizes[0]}")
        return (places[0], sizes) if places else None

    def _row_of(self, tensor: str, subscripts: Sequence[Expr]) -> tuple[Expr, ...]:
        """The subscripts that select a row of a tensor."""
        place, sizes = self.with_rows[tensor]
        return tuple(subscripts[place : place + len(sizes)])

    def _within_row(self, tensor: str, subscripts: Sequence[Expr]) -> tuple[Expr, ...]:
        """The subscripts of a tensor other than those that select a row."""
        if tensor not in self.with_rows:
            return tuple(subscripts)
        place, sizes = self.with_rows[tensor]
        return (*subscripts[:place], *subscripts[place + len(sizes) :])

    def list_sums(self) -> set[str]:
        """The tensors without rows that rows are reduced into."""
        reads = [(s.target, {a.tensor for a in _accesses(s)}) for s in self.function.statements]
        return {target for target, read in reads if target not in self.with_rows and read & self.with_rows.keys()}

    def _size_of(self, bounds: Bounds, what: str) -> str | None:
        """The size that a range depends on, or None. Raises CannotGeneralize if the range has no `RangeForm`."""
        used = [name for b in bounds for name in self._used_names(b)]
        if not used:
            return None
        if parse_range_form(bounds, used[0]) is None:
            raise CannotGeneralize(used[0], f"{what} goes from {bounds[0]} to {bounds[1]}")
        return used[0]

    @cached_property
    def form(self) -> RangeForm:
        """The form of all ranges that depend on the sizes, except dimensions of operands, which are whole."""
        ranges = [(s.target, r.values()) for s, r in zip(self.function.statements, self.ranges.statements, strict=True)]
        written = sorted({s.target for s in self.function.statements})
        found = {
            form: (target, name)
            for target, several in [*ranges, *((target, self.ranges.tensors[target]) for target in written)]
            for bounds in several
            if (name := self._size_of(bounds, f"a range of '{target}'")) is not None
            and (form := parse_range_form(bounds, name)) is not None
        }
        changed = [place for form, place in found.items() if form != WHOLE]
        if changed and (len(found) > 1 or len(self.names) > 1):
            raise CannotGeneralize(changed[0][1], f"'{changed[0][0]}' has another number of rows than other tensors")
        return next(iter(found), WHOLE)

    def _used_names(self, value: Value) -> list[str]:
        return [name for name in _names_in(value) if name in self.names]

    def order(self) -> tuple[str, ...]:
        """The sizes in the order of the dimensions, the same in all tensors that have rows."""
        found = self.with_rows
        for tensor, (_, sizes) in found.items():
            if missing := [name for name in self.names if name not in sizes]:
                raise CannotGeneralize(missing[0], f"'{tensor}' has {' and '.join(sizes)}, and not {missing[0]}")
        orders = {sizes for _, sizes in found.values()}
        if len(orders) != 1:
            raise CannotGeneralize(self.names[0], "its dimensions come in another order in another tensor")
        order = orders.pop()
        if not any(t.role is Role.INPUT and t.name in found for t in self.function.tensors):
            raise CannotGeneralize(order[0], "no operand has it as a dimension")
        return order

    def check_statement(self, s: Statement, indices: Mapping[str, Bounds], order: tuple[str, ...]) -> None:
        """Check that a statement reads one row at a time, and writes the same row or adds to a tensor without rows."""
        size_of = {name: self._size_of(b, f"the range of '{name}'") for name, b in indices.items()}
        rows = {size: name for name, size in size_of.items() if size is not None}
        if len(rows) < sum(size is not None for size in size_of.values()):
            raise CannotGeneralize(order[0], f"a statement of '{s.target}' has two indices that go over it")
        row = tuple(Index(rows.get(size, ""), INDEX_TYPE) for size in order)
        accesses = [x for x in _accesses(s) if x.tensor in self.with_rows]
        for access in accesses:
            if not self._is_row(access, row, indices):
                raise CannotGeneralize(order[0], f"'{s.target}' is computed from other rows of '{access.tensor}'")
        if s.target in self.with_rows:
            self._check_row(s, size_of, row)
        elif rows:
            self._check_sum(s, rows, order, any(x not in s.exists for x in accesses))
        self._check_other_uses(s, order, {x.name for x in row})

    def _is_row(self, access: Access, row: tuple[Index, ...], indices: Mapping[str, Bounds]) -> bool:
        """Whether an access reads the row itself or, from an operand, an element in the window of the row."""
        found = self._row_of(access.tensor, access.subscripts)
        if self.function.tensor(access.tensor).role is not Role.INPUT or len(row) > 1 or not row[0].name:
            return found == row
        return is_in_window(found[0], row[0].name, self.form, indices, self.ranges.sizes)

    def _has_plain_row(self, s: Statement) -> bool:
        """Whether some subscript of a statement is just the index of the row."""
        accesses = ((s.target, s.subscripts), *((a.tensor, a.subscripts) for a in _accesses(s)))
        return any(isinstance(self._row_of(t, x)[0], Index) for t, x in accesses if t in self.with_rows)

    def _check_row(self, s: Statement, size_of: Mapping[str, str | None], row: tuple[Index, ...]) -> None:
        """Check that a statement writes one row at a time."""
        for index in s.indices[s.num_free :]:
            if (size := size_of[index]) is not None:
                raise CannotGeneralize(size, f"'{s.target}' is reduced over '{index}', which goes over it")
        if self._row_of(s.target, s.subscripts) != row:
            raise CannotGeneralize(self.with_rows[s.target][1][0], f"'{s.target}' is not written row by row")

    def _check_sum(self, s: Statement, rows: Mapping[str, str], order: tuple[str, ...], reads_rows: bool) -> None:
        """Check that a statement reduces rows into a tensor without rows, which is possible block by block."""
        if missing := [name for name in order if name not in rows]:
            raise CannotGeneralize(missing[0], f"'{s.target}' is computed once, and not for each row")
        if s.reduction is None:
            raise CannotGeneralize(order[0], f"'{s.target}' is written once, and not for each row")
        if not reads_rows:
            raise CannotGeneralize(order[0], f"'{s.target}' is reduced over it without a row to read")
        if any(x.tensor == s.target for x in _accesses(s)):
            raise CannotGeneralize(order[0], f"'{s.target}' is reduced over it, and is itself an operand")

    def _check_other_uses(self, s: Statement, order: tuple[str, ...], row: set[str]) -> None:
        """Check that other uses of row indices and row counts are only in values, and are supported."""
        parts = [*self._within_row(s.target, s.subscripts), s.value, *s.exists]
        counts = set(self.read_counts(s)) if len(order) == 1 and self.form == WHOLE else set()
        positions = [e for e in _walk_outside_subscripts(s.value) if isinstance(e, Index) and e.name in row]
        walked = [e for part in parts for e in self._walk_within_row(part)]
        self.positions |= bool(positions)
        if positions and (len(order) > 1 or not self._has_plain_row(s)):
            raise CannotGeneralize(order[0], f"the value of '{positions[0].name}' decides '{s.target}'")
        for e in walked:
            if isinstance(e, Index) and e.name in row and walked.count(e) > positions.count(e):
                raise CannotGeneralize(order[0], f"the value of '{e.name}', which goes over it, decides '{s.target}'")
            if isinstance(e, Size) and (used := self._used_names(self.ranges.sizes[e.name])) and e.name not in counts:
                raise CannotGeneralize(used[0], f"its value decides '{s.target}'")

    def read_counts(self, s: Statement) -> list[str]:
        """The sizes in the value of a statement, outside of subscripts, that equal one of `names`."""
        sizes = [e for e in walk_expr(s.value) if isinstance(e, Size)]
        inside = [x for a in _accesses(s) for e in a.subscripts for x in walk_expr(e)]
        inside += [x for e in s.subscripts for x in walk_expr(e)]
        return [e.name for e in sizes if _plain_name(self.ranges.sizes[e.name]) in self.names and e not in inside]

    def _walk_within_row(self, e: Expr) -> Iterator[Expr]:
        """`e` and its subexpressions, without the subscripts that select the row of a tensor."""
        yield e
        for part in self._within_row(e.tensor, e.subscripts) if isinstance(e, Access) else operands_of(e):
            yield from self._walk_within_row(part)

    def check_constraints(self) -> None:
        """Check that sizes that must be equal are equal for any number of rows, or do not depend on it."""
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


def _accesses(s: Statement) -> Iterator[Access]:
    """All accesses of a statement except the target."""
    for e in (*s.subscripts, s.value, *s.exists):
        yield from (x for x in walk_expr(e) if isinstance(x, Access))


def _walk_outside_subscripts(e: Expr) -> Iterator[Expr]:
    """`e` and its subexpressions, without subscripts."""
    yield e
    if not isinstance(e, Access):
        for part in operands_of(e):
            yield from _walk_outside_subscripts(part)


def _plain_name(value: Value) -> str | None:
    """The name, if a formula is a single name, else None."""
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
