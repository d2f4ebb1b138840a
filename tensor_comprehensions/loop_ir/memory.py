"""The interpreter's memory: arrays that know which elements are defined, and loops that know who touched what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InternalError
from .nodes import Buffer
from .numbers import Value, storage

Array = np.ndarray[Any, Any]
Points = tuple[Any, ...]
"""Per dimension of the stored data an array with an entry per lane that takes part, or one number for a scalar."""

_NOBODY, MANY = -(1 << 62), -(1 << 62) + 1


@dataclass(slots=True)
class Race:
    """Who touched which element in a loop whose iterations must be independent.

    reduces: whether iterations may share an element that all of them update at an index the loop does not change.
    """

    var: str
    reduces: bool
    iteration: int = 0
    seen: dict[int, tuple[Memory, dict[str, Array]]] = field(default_factory=dict)

    def visit(self, memory: Memory, where: Points, action: str) -> None:
        """Note that the current iteration does `action` ("read", "write" or "update") to elements of `memory`."""
        if id(memory) not in self.seen:
            marks = {a: np.full(memory.data.shape, _NOBODY, np.int64) for a in ("read", "write", "update")}
            self.seen[id(memory)] = (memory, marks)
        marks = self.seen[id(memory)][1]
        for other, who in marks.items():
            shared = action == other and action != "write"
            if not shared and self.others(who[where]).any():
                raise InternalError(
                    f"race in loop {self.var}: iteration {self.iteration} does a {action} of {memory.name_of(where)}"
                    f" and another iteration a {other}"
                )
        who = marks[action]
        who[where] = np.where(self.others(who[where]), MANY, self.iteration)

    def others(self, who: Any) -> Any:
        """Where `who` is an iteration other than the current one."""
        return (who != _NOBODY) & (who != self.iteration)


@dataclass(slots=True, eq=False)
class Memory:
    """The elements of a buffer.

    data: shaped (1, *shape), and the lanes last where elements are vectors. written: which of them are defined.
    depth: how many checked loops were around the allocation.
    """

    buffer: Buffer
    data: Array
    written: Array
    depth: int

    @staticmethod
    def of_argument(b: Buffer, array: Array) -> Memory:
        """An argument of the module: all of it is defined."""
        return Memory(b, array[np.newaxis], np.ones((1, *b.shape), bool), 0)

    @staticmethod
    def undefined(b: Buffer, depth: int) -> Memory:
        shape = (1, *b.shape) if b.type.lanes == 1 else (1, *b.shape, b.type.lanes)
        return Memory(b, np.zeros(shape, storage(b.type.dtype)), np.zeros(shape, bool), depth)

    def read(self, indices: tuple[Value, ...], mask: Value | None, races: Sequence[Race]) -> Value:
        """The elements at `indices`; 0 where `mask` is false."""
        if mask is None and (point := self.point(indices)) is not None:
            self.require_defined(point)
            for race in races[self.depth :]:
                race.visit(self, point, "read")
            return self.data[point]
        where, live = self.points(indices, mask)
        self.require_defined(where)
        for race in races[self.depth :]:
            race.visit(self, where, "read")
        values = np.zeros(live.shape, self.data.dtype)
        values[live] = self.data[where]
        return values[()]

    def write(self, indices: tuple[Value, ...], value: Value, mask: Value | None, races: Sequence[Race]) -> None:
        """Set the elements at `indices` where `mask`."""
        if mask is None and (point := self.point(indices)) is not None:
            where, active = point, value
        else:
            where, live = self.points(indices, mask)
            active = np.broadcast_to(value, live.shape)[live]
        self.data[where] = active
        self.written[where] = True
        for race in races[self.depth :]:
            race.visit(self, where, "write")

    def update(
        self,
        indices: tuple[Value, ...],
        value: Value,
        mask: Value | None,
        combine: Callable[[Value, Value], Value],
        races: Sequence[tuple[Race, bool]],
    ) -> None:
        """Replace the elements at `indices` by `combine` of them and `value`; each race with whether this reduces."""
        if mask is None and (point := self.point(indices)) is not None:
            where, active = point, value
        else:
            where, live = self.points(indices, mask)
            active = np.broadcast_to(value, live.shape)[live]
            self.require_distinct(where)
        self.require_defined(where)
        self.data[where] = combine(self.data[where], active)
        for race, reducing in races[self.depth :]:
            race.visit(self, where, "update" if race.reduces and reducing else "write")

    def point(self, indices: tuple[Value, ...]) -> Points | None:
        """Where in the data the scalar `indices` point; None when the access is of a vector or would fail."""
        if self.buffer.type.lanes > 1 or len(indices) != len(self.buffer.shape):
            return None
        for i, extent in zip(indices, self.buffer.shape, strict=True):
            if np.ndim(i) or not 0 <= i < extent:
                return None
        return (0, *indices)

    def points(self, indices: tuple[Value, ...], mask: Value | None) -> tuple[Points, Array]:
        """Where in the data the lanes that `mask` lets through point, and the mask at full width (0-d for a scalar)."""
        b = self.buffer
        if len(indices) != len(b.shape):
            raise InternalError(f"{len(indices)} indices on {b.name} of rank {len(b.shape)}")
        lanes = (np.arange(b.type.lanes),) if b.type.lanes > 1 else ()
        known = np.asarray(True if mask is None else mask, bool)
        live, *wide = np.broadcast_arrays(known, 0, *indices, *lanes)
        where = tuple(w[live] for w in wide)
        for dimension, (i, extent) in enumerate(zip(where, self.data.shape, strict=True)):
            if np.any((i < 0) | (i >= extent)):
                raise InternalError(f"{self.name_of(where)}: dimension {dimension - 1} has extent {extent}")
        return where, live

    def require_distinct(self, where: Points) -> None:
        if len(set(zip(*[i.tolist() for i in where], strict=True))) < len(where[0]):
            raise InternalError(f"lanes update one element of {self.name_of(where)} together")

    def require_defined(self, where: Points) -> None:
        if not self.written[where].all():
            raise InternalError(f"{self.name_of(where)} is read but undefined")

    def name_of(self, where: Points) -> str:
        return f"{self.buffer.name}[{', '.join(str(np.unique(i).tolist()) for i in where[1:])}]"
