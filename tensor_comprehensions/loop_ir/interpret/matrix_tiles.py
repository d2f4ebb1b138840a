"""Intrinsics on matrix tile registers in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import BFLOAT16, UINT32
from ..instructions import DOT_BFLOAT16, INSTRUCTIONS, PAIR_BFLOAT16
from ..intrinsics import FRAGMENT_DOT_BFLOAT16, FRAGMENT_LOAD, FRAGMENT_STORE, FRAGMENT_ZERO
from .memory import CheckedMemory, Race
from .ops import Value

View = tuple[CheckedMemory, tuple[Value, ...]]
"""A memory and the indices of the first element."""
Matrix = np.ndarray[Any, Any]
Meaning = Callable[[Sequence[View], Sequence[int], Sequence[Race]], None]


def zero_tile(views: Sequence[View], attributes: Sequence[int], races: Sequence[Race]) -> None:
    ((target, to),) = views
    _put_tile(target, to, np.zeros(target.buffer.shape[1:], target.data.dtype))


def load_tile(views: Sequence[View], attributes: Sequence[int], races: Sequence[Race]) -> None:
    (target, to), (source, first) = views
    if source.buffer.type.dtype == BFLOAT16 and target.buffer.type.dtype == UINT32:
        halves = [_make_region_indices(source, target, first, attributes[0], 2, start) for start in (0, 1)]
        values = INSTRUCTIONS[PAIR_BFLOAT16].evaluate(*(source.read(where, None, races) for where in halves))
    else:
        values = source.read(_make_region_indices(source, target, first, attributes[0]), None, races)
    _put_tile(target, to, values.reshape(target.buffer.shape[1:]))


def store_tile(views: Sequence[View], attributes: Sequence[int], races: Sequence[Race]) -> None:
    (target, to), (source, first) = views
    target.write(
        _make_region_indices(target, source, to, attributes[0]), _read_tile(source, first).ravel(), None, races
    )


def dot_tiles(views: Sequence[View], attributes: Sequence[int], races: Sequence[Race]) -> None:
    (total, to), *factors = views
    value, (left, right) = _read_tile(total, to), (_read_tile(*f) for f in factors)
    for k in range(left.shape[1]):
        value = INSTRUCTIONS[DOT_BFLOAT16].evaluate(value, left[:, k, np.newaxis], right[k])
    _put_tile(total, to, value)


MEANINGS: dict[str, Meaning] = {
    FRAGMENT_ZERO: zero_tile,
    FRAGMENT_LOAD: load_tile,
    FRAGMENT_STORE: store_tile,
    FRAGMENT_DOT_BFLOAT16: dot_tiles,
}


def _make_region_indices(
    memory: CheckedMemory,
    fragment: CheckedMemory,
    first: tuple[Value, ...],
    dimension: int,
    step: int = 1,
    start: int = 0,
) -> tuple[Value, ...]:
    """The indices in `memory` of all elements of `fragment`: column c is at `c * step + start` from `first`."""
    rows, columns = (i.ravel() for i in np.indices(fragment.buffer.shape[1:]))
    moved = list(first)
    moved[dimension] = moved[dimension] + rows
    moved[-1] = moved[-1] + columns * step + start
    return tuple(moved)


def _read_tile(memory: CheckedMemory, first: tuple[Value, ...]) -> Matrix:
    where = (0, int(first[0]))
    memory.require_defined(where)
    return np.asarray(memory.data[where])


def _put_tile(memory: CheckedMemory, first: tuple[Value, ...], value: Matrix) -> None:
    memory.data[0, int(first[0])] = value
    memory.written[0, int(first[0])] = True
