"""Make variables of the extents of a def that only a call tells: those of its rows, along all axes.

A def that is bound to typical numbers of rows looks like any other, so that every choice can be made on it. Which
numbers are extents of rows shows in a second binding, to other numbers: these differ, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...core.internal_names import internal_name
from ..ir import BoundFunction, BoundIndex, BoundStatement, Tensor
from .rows import CannotGeneralize, Rows

Strides = Callable[[Tensor], Sequence[int]]
"""Returns the dimensions of a tensor whose strides only a call tells."""
ODD_STRIDE = 65_537
"""The typical stride where a call tells it, so that no vector is known to divide it."""


def windows_variable(level: int) -> str:
    """The variable that holds the extent of operands of which each row along an axis has a window."""
    return internal_name("windows", *[level] * bool(level))


def stride_variable(tensor: str, dimension: int) -> str:
    """The variable that holds the stride of a dimension of a tensor, if only a call tells it."""
    return internal_name(tensor, "stride", dimension)


@dataclass(frozen=True, slots=True)
class OpenAxis:
    """An axis of a def that is bound to different numbers of rows. counts: these numbers.

    variable: holds the number of rows. windows: holds the extent of operands of which a row has a window.
    """

    rows: Rows
    counts: tuple[int, ...]
    variable: str
    windows: str

    def variable_of(self, extents: tuple[int, ...]) -> str | None:
        """The variable that holds an extent, which is one of `extents` in each binding; None if none does."""
        if extents == self.counts:
            return self.variable
        step, reach = self.rows.step, self.rows.reach
        return self.windows if extents == tuple(step * (n - 1) + reach for n in self.counts) else None


def open_extents(
    functions: Sequence[BoundFunction], axes: Sequence[OpenAxis], open_strides: Strides
) -> tuple[BoundFunction, ...]:
    """The bindings `functions` of a def (legalized) with variables in place of numbers of rows, which stay typical.

    axes: with as many counts as there are functions.

    Raises:
        CannotGeneralize: the functions differ in something else.
    """
    name = axes[0].rows.original_sizes[0]
    if len({(len(f.tensors), len(f.statements)) for f in functions}) > 1:
        raise CannotGeneralize(name, "other numbers of rows are computed by other statements")
    tensors = zip(*(f.tensors for f in functions), strict=True)
    statements = zip(*(f.statements for f in functions), strict=True)
    opened_tensors = [_open_tensors(ts, axes, open_strides) for ts in tensors]
    opened_statements = [_open_statements(ss, axes) for ss in statements]
    opened = tuple(
        replace(f, tensors=tuple(ts[k] for ts in opened_tensors), statements=tuple(ss[k] for ss in opened_statements))
        for k, f in enumerate(functions)
    )
    if len(set(map(_without_extents, opened))) > 1:
        raise CannotGeneralize(name, "its value decides more than the number of rows")
    return opened


def _find_variable(extents: tuple[int, ...], axes: Sequence[OpenAxis]) -> str | None:
    """The variable that holds an extent; None if it is a number, the same in all bindings."""
    if len(set(extents)) == 1:
        return None
    found = next((v for axis in axes if (v := axis.variable_of(extents)) is not None), None)
    if found is None:
        raise CannotGeneralize(axes[0].rows.original_sizes[0], "an extent depends on it that is no number of rows")
    return found


def _open_tensors(tensors: Sequence[Tensor], axes: Sequence[OpenAxis], open_strides: Strides) -> list[Tensor]:
    if len({len(t.shape) for t in tensors}) > 1:
        raise CannotGeneralize(axes[0].rows.original_sizes[0], f"'{tensors[0].name}' is computed in another shape")
    held = tuple(_find_variable(extents, axes) for extents in zip(*(t.shape for t in tensors), strict=True))
    extents = held if any(held) else ()
    found = []
    for t in tensors:
        given = set(open_strides(replace(t, extent_variables=extents)))
        strides = tuple(stride_variable(t.name, d) if d in given else None for d in range(len(t.shape)))
        numbers = tuple(ODD_STRIDE + 2 * d if d in given else n for d, n in enumerate(t.strides))
        variables = strides if given else ()
        found.append(replace(t, strides=numbers, extent_variables=extents, stride_variables=variables))
    return found


def _open_statements(statements: Sequence[BoundStatement], axes: Sequence[OpenAxis]) -> list[BoundStatement]:
    if len({len(s.indices) for s in statements}) > 1:
        raise CannotGeneralize(axes[0].rows.original_sizes[0], "other numbers of rows are computed by other loops")
    pairs = zip(*(s.indices for s in statements), strict=True)
    held = [_find_variable(tuple(i.extent for i in found), axes) or "" for found in pairs]
    return [
        replace(s, indices=tuple(replace(i, variable=v) for i, v in zip(s.indices, held, strict=True)))
        for s in statements
    ]


def _without_extents(f: BoundFunction) -> BoundFunction:
    """`f` with 0 for all typical numbers, to compare the rest."""

    def index(i: BoundIndex) -> BoundIndex:
        return replace(i, upper=i.lower) if i.variable else i

    tensors = tuple(
        replace(t, shape=tuple(0 if t.extent_variable(d) else n for d, n in enumerate(t.shape))) for t in f.tensors
    )
    return replace(
        f, tensors=tensors, statements=tuple(replace(s, indices=tuple(map(index, s.indices))) for s in f.statements)
    )


def make_open_axes(
    axes: Sequence[Rows], counts: Sequence[Sequence[int]], variable: Callable[[int], str]
) -> list[OpenAxis]:
    """The axes with the numbers of rows of each binding in `counts`. variable: of an axis, which holds its rows."""
    return [
        OpenAxis(rows, tuple(found[n] for found in counts), variable(n), windows_variable(n))
        for n, rows in enumerate(axes)
    ]
