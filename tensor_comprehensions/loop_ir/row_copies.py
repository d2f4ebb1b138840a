"""Loops that copy several rows per iteration, transposed in registers: the same copies row by row, and for fewer rows.

A panel whose rows are columns of an operand is filled by square tiles, which are loaded along the rows, so an iteration
has a fixed number of rows. The copy of a single row follows from the lanes of the vectors that are stored. If all rows
of an iteration are copied alike, the iteration may begin at any row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.errors import CannotLower
from . import build
from .linear_forms import linear_terms
from .nodes import (
    Block,
    Buffer,
    Cast,
    Expr,
    Let,
    Load,
    Loop,
    LoopKind,
    Ramp,
    Shuffle,
    Space,
    Stmt,
    Store,
    Var,
)
from .rewrite import map_expr, map_stmt, mentions

Windows = Mapping[str, tuple[Buffer, int]]
"""By the name of an operand, the window of it that has only the rows of an iteration, and the dimension of rows."""


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A loop whose iteration v copies `each` rows, from the row `v * each` on.

    part: the copy of its first `rows` rows. by_row: a loop over the same variable that copies one row per iteration.
    """

    loop: Loop
    each: int
    part: Stmt
    rows: int
    by_row: Loop

    def start_at(self, first: Expr, windows: Windows) -> Stmt:
        """The copy of `rows` rows from `first` on, which are read from `windows`."""

        def load(e: Load) -> Load:
            buffer, dimension = windows.get(e.buffer.name, (e.buffer, -1))
            starts = (build.const(0) if d == dimension else first for d in range(len(e.indices)))
            indices = (
                _replace_first_row(i, self.loop.var, self.each, s) for i, s in zip(e.indices, starts, strict=True)
            )
            return replace(e, buffer=buffer, indices=tuple(indices))

        def move(e: Expr) -> Expr:
            return load(e) if isinstance(e, Load) else map_expr(e, move)

        def change(s: Stmt) -> Stmt:
            new = map_stmt(s, move, change)
            if not isinstance(new, Store):
                return new
            indices = (_replace_first_row(i, self.loop.var, self.each, first) for i in new.indices)
            return replace(new, indices=tuple(indices))

        return change(self.part)


def find_row_copies(body: Stmt, rows: int, dimensions: Mapping[str, int]) -> tuple[Stmt, dict[int, RowCopy]]:
    """`body` with each loop that copies several rows per iteration made one that copies single rows, and these by id.

    rows: the number of rows that the loops copy. dimensions: the dimension of rows in each operand that has them.
    """
    found: dict[int, RowCopy] = {}

    def change(s: Stmt) -> Stmt:
        copy = _find_row_copy(s, rows, dimensions) if isinstance(s, Loop) else None
        if copy is None:
            return map_stmt(s, lambda e: e, change)
        found[id(s)] = copy
        return copy.by_row

    return change(body), found


Element = tuple[Expr, int]
"""An element of a row of an operand, where the variable of the loop is the row, and which row of an iteration it is."""


@dataclass(frozen=True, slots=True)
class _RowStore:
    """The store of a vector to a row, where the variable of the loop is the row. values: the elements."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    values: tuple[Expr, ...]

    def list_elements(self) -> list[Stmt]:
        """The stores of the elements."""
        return [
            Store(self.buffer, tuple(_take_lane(i, lane) for i in self.indices), value)
            for lane, value in enumerate(self.values)
        ]


@dataclass(frozen=True, slots=True)
class _Parser:
    """Finds the rows that a loop copies.

    var: the variable of the loop. each: the rows of an iteration. dimensions: as for `find_row_copies`.
    """

    var: str
    each: int
    dimensions: Mapping[str, int]

    def list_stores(self, s: Stmt, bound: Mapping[str, list[Element]]) -> Iterator[tuple[int, _RowStore]]:
        """The stores that `s` consists of, with the row of each. Raises CannotLower if `s` does more than copy rows.

        bound: the elements of vectors by name.
        """
        match s:
            case Let(name, value, body):
                yield from self.list_stores(body, {**bound, name: self.list_elements(value, bound)})
            case Block(body):
                for part in body:
                    yield from self.list_stores(part, bound)
            case Store(buffer, indices, value, None, None) if buffer.space is Space.SCRATCH and buffer.type.lanes == 1:
                numbers, moved = zip(*(_split_index(i, self.var, self.each) for i in indices), strict=True)
                elements = self.list_elements(value, bound)
                if {number for _, number in elements} != {n for n in numbers if n is not None}:
                    raise CannotLower("an element is copied to another row")
                yield elements[0][1], _RowStore(buffer, moved, tuple(e for e, _ in elements))
            case _:
                raise CannotLower("a loop does more than to copy")

    def list_elements(self, e: Expr, bound: Mapping[str, list[Element]]) -> list[Element]:
        """The elements of a vector. Raises CannotLower if they are not just loaded."""
        match e:
            case Var(name) if name in bound:
                return bound[name]
            case Shuffle(left, right, lanes):
                both = self.list_elements(left, bound) + self.list_elements(right, bound)
                return [both[lane] for lane in lanes]
            case Cast(operand, dtype):
                return [(build.cast(x, dtype), n) for x, n in self.list_elements(operand, bound)]
            case Load(buffer, indices, None) if buffer.name in self.dimensions:
                return self.list_loaded(buffer, indices)
        raise CannotLower("a vector is computed")

    def list_loaded(self, buffer: Buffer, indices: Sequence[Expr]) -> list[Element]:
        """The elements of a load along the rows of an operand."""
        numbers, moved = zip(*(_split_index(i, self.var, self.each) for i in indices), strict=True)
        row = self.dimensions[buffer.name]
        others = [d for d in range(len(indices)) if d != row]
        if numbers[row] is None or any(numbers[d] is not None or indices[d].type.lanes > 1 for d in others):
            raise CannotLower("a load is not along the rows of an iteration")
        index = indices[row]
        step = index.stride if isinstance(index, Ramp) else 0
        found = Load(buffer, moved)
        return [(found, numbers[row] + step * lane) for lane in range(index.type.lanes)]


def _find_row_copy(s: Loop, rows: int, dimensions: Mapping[str, int]) -> RowCopy | None:
    """The loop `s` as a copy of `rows` rows, several per iteration, from operands to memory; None if it is not one."""
    count = build.integer(s.stop)
    if count is None or s.kind is not LoopKind.SERIAL or (s.start, s.step) != (build.const(0), 1):
        return None
    if rows % max(count, 1) or rows <= count or not isinstance(s.body, Let | Block | Store):
        return None
    each = rows // count
    parts = s.body.body if isinstance(s.body, Block) else (s.body,)
    parser = _Parser(s.var, each, dimensions)
    try:
        found = [list(parser.list_stores(part, {})) for part in parts]
    except CannotLower:
        return None
    by_number = [[store for part in found for n, store in part if n == number] for number in range(each)]
    if not by_number[0] or any(stores != by_number[0] for stores in by_number):
        return None
    body = build.block(*(one for store in by_number[0] for one in store.list_elements()))
    numbers = [{number for number, _ in part} for part in found]
    first = len(numbers[0])
    is_apart = numbers[0] == set(range(first)) and numbers[0].isdisjoint(set[int]().union(*numbers[1:]))
    part, count = (parts[0], first) if is_apart else (s.body, each)
    return RowCopy(s, each, part, count, replace(s, stop=build.const(rows), body=body))


def _split_index(index: Expr, var: str, rows: int) -> tuple[int | None, Expr]:
    """k and `var` if `index` is, or begins at, the k-th row of the iteration `var`; else None and `index` itself."""
    start = index.base if isinstance(index, Ramp) else index
    if not mentions(start, {var}):
        return None, index
    terms, constant = linear_terms(start)
    if terms != {build.var(var): rows} or not 0 <= constant < rows:
        raise CannotLower("a row is not a part of its iteration")
    return constant, build.var(var)


def _take_lane(e: Expr, lane: int) -> Expr:
    """One lane of an index."""
    return build.add(e.base, e.stride * lane) if isinstance(e, Ramp) else e


def _replace_first_row(index: Expr, var: str, rows: int, first: Expr) -> Expr:
    """`index` with `first` instead of `var * rows`."""
    number, _ = _split_index(index, var, rows)
    if number is None:
        return index
    row = build.add(first, number)
    return replace(index, base=row) if isinstance(index, Ramp) else row
