"""A table whose rare rows are built on first use: compilation for CPUs never needs the rows for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")


class LazyTable(Mapping[str, V]):
    """A mapping from names to rows.

    Args:
        rows: the initial rows.
        make: builds the other rows, which follow them, when a name is missing or the table is iterated.
    """

    def __init__(self, rows: Mapping[str, V], make: Callable[[], Mapping[str, V]]) -> None:
        self._rows, self._make = rows, make
        self._all: Mapping[str, V] | None = None

    def __getitem__(self, name: str) -> V:
        found = self._rows.get(name)
        return self._every_row()[name] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._every_row())

    def __len__(self) -> int:
        return len(self._every_row())

    def _every_row(self) -> Mapping[str, V]:
        if self._all is None:
            self._all = {**self._rows, **self._make()}
        return self._all
