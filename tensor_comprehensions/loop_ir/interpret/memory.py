"""The interpreter's memory: arrays that know which elements are defined, and race detection between iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from ...core.errors import InternalError
from ..nodes import Buffer
from .ops import Value, storage_dtype

Array = np.ndarray[Any, Any]
Place = tuple[Any, ...]
"""An index into `CheckedMemory.data`: per dimension an array with an entry per active lane, or one number for all."""

ACTIONS = ("read", "write", "update")
CONFLICTS = {"read": (1, 2), "write": (0, 1, 2), "update": (0, 1)}
"""For each action, the positions in `ACTIONS` of the actions of other iterations that conflict with it."""


@dataclass(slots=True, eq=False)
class Race:
    """Detects conflicting accesses of iterations that must be independent; used for one loop after another.

    reduces: whether iterations may share an element that all of them update at a loop-invariant index.
    label: the label of the current iteration, unique across loops. Elements are marked with the label of the iteration
    that accessed them last: labels below `first` are of earlier loops, and `first` means several iterations.
    """

    var: str = ""
    reduces: bool = False
    iteration: int = 0
    first: int = 1
    label: int = 1

    def begin(self, var: str, reduces: bool) -> None:
        """Enter a loop."""
        self.var, self.reduces = var, reduces
        self.label += 1
        self.first = self.label

    def step(self, iteration: int) -> None:
        """Enter the loop's next iteration."""
        self.iteration = iteration
        self.label += 1

    def visit(self, memory: CheckedMemory, where: Place, action: str) -> None:
        """Record an `action` ("read", "write" or "update") of the current iteration; fails on a race."""
        marks = memory.marks.get(self)
        if marks is None:
            marks = memory.marks[self] = new_marks(memory)
        mine = marks[ACTIONS.index(action)]
        who = mine[where]
        several = isinstance(who, np.ndarray)
        if not several and who == self.label:
            return  # checked at the first access
        for other in CONFLICTS[action]:
            found = marks[other][where]
            if np.logical_or.reduce(self.races_with(found), axis=None) if several else self.races_with(found):
                self.fail(memory, where, action, other)
        mine[where] = self.mark(who)

    def fail(self, memory: CheckedMemory, where: Place, action: str, other: int) -> NoReturn:
        raise InternalError(
            f"race in loop {self.var}: iteration {self.iteration} does a {action} of {memory.name_of(where)}"
            f" and another iteration a {ACTIONS[other]}"
        )

    def mark(self, who: Any) -> Any:
        """The new mark of elements whose mark was `who` when the current iteration accesses them."""
        others = self.races_with(who)
        return (
            np.where(others, self.first, self.label)
            if isinstance(who, np.ndarray)
            else self.first
            if others
            else self.label
        )

    def races_with(self, who: Any) -> Any:
        """Whether (or where) the mark `who` is of another iteration of the current loop."""
        return (who >= self.first) & (who != self.label)


def new_marks(memory: CheckedMemory) -> tuple[Array, ...]:
    """The marks of `memory` for a new `Race`, one array per action."""
    return tuple(np.zeros(memory.data.shape, np.int64) for _ in ACTIONS)


def fix_dynamic_extents(b: Buffer, lengths: Sequence[int]) -> Buffer:
    """The dynamic buffer `b` with `lengths` as the extents of its dynamic dimensions."""
    if min(lengths) < 0:
        raise InternalError(f"{b.name} is allocated with the length {min(lengths)}")
    found = dict(zip(b.dynamic, lengths, strict=True))
    return replace(b, shape=tuple(found.get(d, n) for d, n in enumerate(b.shape)), dynamic=())


@dataclass(frozen=True, slots=True)
class AsyncAccess:
    """An access of an asynchronous operation: the region, its clock and the time on that clock."""

    region: tuple[slice, ...]
    clock: int
    turn: int
    action: str
    who: str

    def meets(self, where: Place) -> bool:
        """Whether the region contains one of the elements at `where`."""
        inside: Any = True
        for part, i in zip(self.region, where, strict=False):
            inside = inside & ((part.start <= i) & (i < part.stop))
        return bool(np.any(inside))


@dataclass(slots=True, eq=False)
class CheckedMemory:
    """The elements of a buffer.

    data: their values, shaped (1, *shape), with the lanes last if elements are vectors. written: which are defined.
    depth: the number of checked loops around the allocation; only those inside it are checked. marks: for each of
    these, the marks of the last accesses, by action (see `Race`).
    spans: asynchronous accesses. writers: 1 + the thread that last stored each element. fence_counts: how many fences
    that thread had executed before.
    """

    buffer: Buffer
    data: Array
    written: Array
    depth: int
    marks: dict[Race, tuple[Array, ...]] = field(default_factory=dict)
    spans: list[AsyncAccess] = field(default_factory=list)
    writers: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    fence_counts: Array = field(default_factory=lambda: np.zeros(0, np.int32))

    def note_stores(self) -> None:
        """Record from now on which thread stores each element."""
        self.writers, self.fence_counts = (np.zeros(self.data.shape, np.int32) for _ in range(2))

    @staticmethod
    def of_argument(b: Buffer, array: Array) -> CheckedMemory:
        """An argument of the module: all of it is defined."""
        return CheckedMemory(b, array[np.newaxis], np.ones((1, *b.shape), bool), 0)

    @staticmethod
    def allocate_undefined(b: Buffer, depth: int) -> CheckedMemory:
        shape = (1, *b.shape) if b.type.lanes == 1 else (1, *b.shape, b.type.lanes)
        return CheckedMemory(b, np.zeros(shape, storage_dtype(b.type.dtype)), np.zeros(shape, bool), depth)

    @staticmethod
    def allocate_poisoned(b: Buffer, depth: int) -> CheckedMemory:
        """Memory that may be read, but holds garbage: NaN, or an unlikely integer."""
        memory = CheckedMemory.allocate_undefined(b, depth)
        kind = memory.data.dtype
        memory.data[...] = np.iinfo(kind).max if kind.kind in "iu" else np.nan if kind.kind == "f" else True
        memory.written[...] = True
        return memory

    def window(self, b: Buffer, dimension: int, start: int, rows: int) -> CheckedMemory:
        """A view of rows `start` to `start + rows` along `dimension` as the buffer `b`; it shares values and marks."""
        if not 0 <= start <= self.buffer.shape[dimension] - rows:
            raise InternalError(f"{b.name} are the rows {start} .. {start + rows} of {self.name_of((0, start))}")
        inside = (*(slice(None),) * (dimension + 1), slice(start, start + rows))
        if b.dynamic:
            b = fix_dynamic_extents(b, [self.buffer.shape[d] for d in b.dynamic])

        def part(array: Array) -> Array:
            view = array[inside].view()
            view.shape = (1, *b.shape)  # raises if that needed a copy
            return view  # type: ignore[no-any-return]

        return CheckedMemory(b, part(self.data), part(self.written), self.depth, _WindowMarks(self, part))

    def read(self, indices: tuple[Value, ...], mask: Value | None, races: Sequence[Race]) -> Value:
        """The elements at `indices`; 0 where `mask` is false."""
        where, live = self.reach(indices, mask)
        self.require_defined(where)
        self.visit(where, "read", races)
        values = self.data[where]
        if live is None:
            return values if values.base is None else values.copy()
        lanes = np.zeros(live.shape, self.data.dtype)
        lanes[live] = values
        return lanes[()]

    def write(self, indices: tuple[Value, ...], value: Value, mask: Value | None, races: Sequence[Race]) -> None:
        """Set the elements at `indices` to `value` in lanes where `mask` is true."""
        where, live = self.reach(indices, mask)
        self.data[where] = value if live is None else np.broadcast_to(value, live.shape)[live]
        self.written[where] = True
        self.visit(where, "write", races)

    def update(
        self,
        indices: tuple[Value, ...],
        value: Value,
        mask: Value | None,
        combine: Callable[[Value, Value], Value],
        races: Sequence[Race],
        reducing: Sequence[bool],
    ) -> None:
        """Replace elements at `indices` by `combine(element, value)`. reducing: for each race, whether this reduces."""
        place = None if any(isinstance(i, np.ndarray) for i in indices) else self.place(indices, mask)
        if place is not None:
            where, active = place, value
        else:
            where, live = self.points(indices, mask)
            active = np.broadcast_to(value, live.shape)[live]
            self.require_distinct(where)
        self.require_defined(where)
        self.data[where] = combine(self.data[where], active)
        for race, reduces in zip(races[self.depth :], reducing[self.depth :], strict=True):
            race.visit(self, where, "update" if race.reduces and reduces else "write")

    def visit(self, where: Place, action: str, races: Sequence[Race]) -> None:
        if len(races) > self.depth:
            for race in races[self.depth :]:
                race.visit(self, where, action)

    def reach(self, indices: tuple[Value, ...], mask: Value | None) -> tuple[Place, Array | None]:
        """The position in `data` of the active lanes, and the mask (None if all lanes are active)."""
        if mask is not None and mask.ndim == 0 and mask:
            mask = None
        place = self.place(indices, mask)
        return self.points(indices, mask) if place is None else (place, mask)

    def place(self, indices: tuple[Value, ...], mask: Value | None) -> Place | None:
        """A fast path of `points` for simple accesses in bounds: a scalar, or vector indices; None for others."""
        b, vector = self.buffer, False
        if len(indices) != len(b.shape):
            return None
        where = [0]
        for i, extent in zip(indices, b.shape, strict=True):
            if isinstance(i, np.ndarray):
                vector, i = True, i if mask is None else i[mask]
                if b.type.lanes > 1 or i.size == 0 or np.minimum.reduce(i) < 0 or np.maximum.reduce(i) >= extent:
                    return None
            elif not 0 <= i < extent:
                return None
            where.append(i)
        return tuple(where) if mask is None or vector else None

    def points(self, indices: tuple[Value, ...], mask: Value | None) -> tuple[Place, Array]:
        """The position in `data` of the active lanes, and the mask at full width (0-d for a scalar); checks bounds."""
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

    def require_distinct(self, where: Place) -> None:
        if len(set(zip(*[i.tolist() for i in where], strict=True))) < len(where[0]):
            raise InternalError(f"lanes update one element of {self.name_of(where)} together")

    def require_defined(self, where: Place) -> None:
        found = self.written[where]
        if not (np.logical_and.reduce(found, axis=None) if isinstance(found, np.ndarray) else found):
            raise InternalError(f"{self.name_of(where)} is read but undefined")

    def name_of(self, where: Place) -> str:
        return f"{self.buffer.name}[{', '.join(str(np.unique(i).tolist()) for i in where[1:])}]"


class _WindowMarks(dict[Race, tuple[Array, ...]]):
    """The marks of a window: views of the marks of its source."""

    def __init__(self, source: CheckedMemory, part: Callable[[Array], Array]) -> None:
        super().__init__()
        self._source, self._part = source, part

    def get(self, race: Race, default: Any = None) -> tuple[Array, ...]:
        """The marks of `race` on these elements, created in the source if missing."""
        if race not in self:
            whole = self._source.marks.get(race)
            if whole is None:
                whole = self._source.marks[race] = new_marks(self._source)
            self[race] = tuple(map(self._part, whole))
        return self[race]
