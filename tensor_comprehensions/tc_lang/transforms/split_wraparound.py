"""`BoundFunction` -> `BoundFunction` with periodic reads along rows split into selects among contiguous reads.

`u((j + 1) % M)` would be a division and a gather for each element; `j + 1 < M ? u(j + 1) : u(j + 1 - M)` is two vector
loads with complementary masks. A window around `j` that wraps at both ends takes three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...core.dtypes import BOOL, INT64
from ..affine import Affine, Interval, Remainder, Variable, affine_interval, affine_to_expression, to_affine
from ..ir import Access, Binary, BoundFunction, BoundStatement, Const, Expr, Select, map_operands, walk_expr

MOST_READS = 8
"""Maximum periodic reads of a statement that are split; each becomes one read per period."""
MOST_PERIODS = 3
"""Maximum periods of a read that is split."""


def split_wraparound(function: BoundFunction) -> BoundFunction:
    """The same function without remainders in the last subscripts of rows; `function` itself if none can be removed."""
    rows = {t.name for t in function.tensors if t.shape and t.strides[-1] == 1}
    statements = tuple(_split_reads(s, rows) for s in function.statements)
    changed = any(new is not s for new, s in zip(statements, function.statements, strict=True))
    return replace(function, statements=statements) if changed else function


def _split_reads(s: BoundStatement, rows: set[str]) -> BoundStatement:
    box: dict[str, Interval] = {i.name: (i.lower, i.upper - 1) for i in s.indices}
    reads = {e for e in walk_expr(s.value) if isinstance(e, Access) and e.tensor in rows and _is_periodic(e)}
    if not 0 < len(reads) <= MOST_READS:
        return s
    new = {read: _split_read(read, box) for read in reads}
    return replace(s, value=_replace_reads(s.value, new))


def _replace_reads(e: Expr, new: Mapping[Access, Expr]) -> Expr:
    if isinstance(e, Access):
        return new.get(e, e)
    return map_operands(e, lambda x: _replace_reads(x, new))


def _is_periodic(read: Access) -> bool:
    return _remainder(read) is not None


def _remainder(read: Access) -> Remainder | None:
    """The last subscript if it is the remainder of a sum of indices, else None."""
    match to_affine(read.subscripts[-1], {}):
        case Affine(constant=0, terms=((Remainder(inner=inner) as found, 1),)) if inner.terms:
            return found if all(isinstance(atom, Variable) for atom, _ in inner.terms) else None
    return None


def _split_read(read: Access, box: Mapping[str, Interval]) -> Expr:
    """A select among reads without remainders, one per period; `read` itself if there are too many periods."""
    found = _remainder(read)
    assert found is not None
    period = found.divisor
    low, high = affine_interval(found.inner, box)
    if not isinstance(period, int) or period <= 0 or high // period - low // period >= MOST_PERIODS:
        return read
    if low % period == 0 and (high + 1) % period == 0 and len(found.inner.terms) == 1:
        return read  # a digit of an index: loops over digits need no remainder

    def place_in(number: int) -> Expr:
        return affine_to_expression(found.inner.shift(-number * period))

    def read_period(number: int, *, guarded: bool) -> Access:
        return replace(read, subscripts=(*read.subscripts[:-1], place_in(number)), guarded=guarded or read.guarded)

    first, last = low // period, high // period
    value: Expr = read_period(last, guarded=first != last)
    for number in reversed(range(first, last)):
        inside = Binary("<", place_in(number), Const(period, INT64), BOOL)
        value = Select(inside, read_period(number, guarded=True), value, read.dtype)
    return value
