"""Find the axes of a def: the rows that sizes count, and the order of the loops over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir import Access, Function, Statement, walk_expr
from .rows import CannotGeneralize, Rows, find_rows, list_row_size_candidates
from .size_separation import original_size, separate_sizes


@dataclass(frozen=True, slots=True)
class FoundAxes:
    """The result of `find_axes`.

    Attributes:
        axes: the rows of all sizes that count rows, outermost first.
        reasons: why the other sizes do not count rows.
        separated: the sizes to pass to `separate_sizes`, because one name stands for several axes.
    """

    axes: tuple[Rows, ...] = ()
    reasons: tuple[CannotGeneralize, ...] = ()
    separated: tuple[str, ...] = ()

    @property
    def refused_sizes(self) -> tuple[str, ...]:
        """The sizes that count no rows."""
        return tuple(reason.name for reason in self.reasons)


def find_axes(function: Function, names: Sequence[str], sizes: Mapping[str, int], *, merge: bool = True) -> FoundAxes:
    """Find the rows that the sizes `names` count, together or one by one.

    A size that is several dimensions may become an axis for each of them. The reasons for sizes that do not count rows
    assume that the other sizes may have any value, too.

    Args:
        sizes: values of all other sizes, and of scalars that are part of the kernel.
        merge: whether several leading sizes may be one axis.
    """
    axes, reasons = _find_axes(function, names, sizes, merge=merge)
    if not reasons:
        return FoundAxes(axes)
    refused = [reason.name for reason in reasons]
    apart = separate_sizes(function, refused)
    if apart.sizes != function.sizes:
        wanted = [name for name in apart.sizes if original_size(name) in names]
        again, left = _find_axes(apart, wanted, sizes, merge=merge)
        kept = {original_size(reason.name): reason for reason in left}
        if len(kept) < len(refused):
            still = tuple(CannotGeneralize(name, reason.reason) for name, reason in kept.items())
            return FoundAxes(again, still, tuple(refused))
    # If all are rejected, the only cause may be that the others have no values: report one.
    return FoundAxes(axes, reasons[-1:] if len(reasons) == len(names) else reasons)


def _find_axes(
    function: Function, names: Sequence[str], sizes: Mapping[str, int], *, merge: bool = True
) -> tuple[tuple[Rows, ...], tuple[CannotGeneralize, ...]]:
    """The rows that the sizes `names` count, together or one by one, and the reasons for those that do not count rows.

    Loops over rows that are reduced go inside, and those over columns of a product around those over its rows: then a
    block of columns of the right factor stays in the cache. If a def maps rows by sums over them, as norms do, loops
    over the rows of other sizes go around, so that the second read hits the cache. There are then more axes than
    requested.

    Args:
        sizes: values of all other sizes, and of scalars that are part of the kernel.
        merge: whether several leading sizes may be one axis.
    """
    found: list[Rows] = []
    left = list(names)
    for candidate in list_row_size_candidates(function, names):
        if set(candidate) <= set(left) and (merge or len(candidate) == 1):
            rows = _try_rows(function, candidate, sizes, [name for name in names if name not in candidate])
            if isinstance(rows, Rows):
                found.append(rows)
                left = [name for name in left if name not in candidate]
    refused = [_try_rows(function, (name,), sizes, [n for n in names if n != name]) for name in left]
    if not left and any(rows.uses_sums for rows in found):
        found += _find_outer_rows(function, found, names, sizes)
    ordered = sorted(found, key=lambda rows: (rows.sums, min(place for _, place in rows.places)))
    return _put_columns_first(function, ordered), tuple(r for r in refused if isinstance(r, CannotGeneralize))


def _put_columns_first(function: Function, ordered: Sequence[Rows]) -> tuple[Rows, ...]:
    """The axes with those of the columns of each product directly before those of its rows."""
    found = list(ordered)
    for columns in (axis for axis in ordered if not axis.sums):
        rows = next((n for n, axis in enumerate(found) if _multiplies(function, axis, columns)), None)
        if rows is not None and rows < found.index(columns):
            found.insert(rows, found.pop(found.index(columns)))
    return tuple(found)


def _multiplies(function: Function, rows: Rows, columns: Rows) -> bool:
    """Whether a statement multiplies the rows of one tensor by the columns of another."""
    return any(
        s.reduction is not None
        and _is_before(rows.place(s.target), columns.place(s.target))
        and len({(rows.place(t) is None, columns.place(t) is None) for t in _list_operands(s)} & _ONE_EACH) == 2
        for s in function.statements
    )


_ONE_EACH = {(False, True), (True, False)}
"""Whether the left factor of a product lacks its rows and its columns, and whether the right factor does."""


def _is_before(place: int | None, other: int | None) -> bool:
    return place is not None and other is not None and place < other


def _list_operands(s: Statement) -> set[str]:
    return {e.tensor for e in walk_expr(s.value) if isinstance(e, Access)}


def _find_outer_rows(
    function: Function, found: Sequence[Rows], names: Sequence[str], sizes: Mapping[str, int]
) -> list[Rows]:
    """Rows of a size that was not requested and that no statement reduces, if `found` stay rows beside them."""
    if not all(rows.sums for rows in found):
        return []
    for candidate in list_row_size_candidates(function, [name for name in function.sizes if name not in names]):
        rows = _try_rows(function, candidate, sizes, names)
        symbols = [*names, *candidate]
        if isinstance(rows, Rows) and not rows.sums:
            again = [_try_rows(function, r.sizes, sizes, [n for n in symbols if n not in r.sizes]) for r in found]
            return [rows] if again == list(found) else []
    return []


def _try_rows(
    function: Function, names: Sequence[str], sizes: Mapping[str, int], others: Sequence[str]
) -> Rows | CannotGeneralize:
    try:
        return find_rows(function, names, sizes, others)
    except CannotGeneralize as reason:
        return reason
