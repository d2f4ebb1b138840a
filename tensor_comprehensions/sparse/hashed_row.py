"""A hash table as the workspace of a row of a sparse result that is too wide for an array.

The table has open addressing with linear probing, and at most half of its slots are used. Each used slot is also in a
list, which is sorted by coordinates when the row is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..core.dtypes import INT64
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.instructions import BIT_AND, SHIFT_RIGHT
from ..loop_ir.names import Names
from ..loop_ir.nodes import Allocate, Buffer, Expr, If, Let, Load, Loop, Stmt, Store, While
from ..tc_lang.ir import Access
from .emit import StatementEmitter
from .row_workspace import AppendElement, RowWorkspace
from .state import Body, State

EMPTY = build.const(-1)
"""The coordinate of an unused slot."""
HASH_BITS = 31
"""Coordinates are folded to about so many bits, so that their product with `HASH_FACTOR` does not overflow int64."""
HASH_FACTOR = 0x4F1BBCDD
"""An odd number of 31 bits whose products spread adjacent coordinates (half of 2^32 over the golden ratio)."""
HASH_SHIFT = 20
"""The low bits of the product to drop: they depend on few bits of the coordinate."""
_CAPACITY, _MOST, _TERMS = (build.register(internal_name(x), INT64) for x in ("capacity", "most", "terms"))
_COUNT, _SOURCE = (build.register(internal_name(x), INT64) for x in ("entries", "source"))
_SLOTS, _LENGTH = internal_name("slots"), internal_name("length")


@dataclass(frozen=True, slots=True)
class HashedRow(RowWorkspace):
    """Slots with a coordinate and an element each, and a list of the used slots."""

    @property
    def _coordinates(self) -> Buffer:
        return self.row.buffer("coordinates", INT64)

    @property
    def _elements(self) -> Buffer:
        return self.row.buffer("row", self.row.dtype)

    @property
    def _used_slots(self) -> Buffer:
        """The used slots, and as much memory to sort them."""
        return self.row.buffer("used", INT64)

    def allocate_around(self, body: Stmt, measure: Callable[[], Stmt]) -> Stmt:
        slots, length = build.var(_SLOTS), build.var(_LENGTH)
        body = build.block(self.row.fill(self._coordinates, slots, EMPTY), body)
        body = Allocate((self._used_slots,), body, (build.mul(length, 2),))
        if not self.row.counts:
            body = Allocate((self._elements,), body, (slots,))
        body = Allocate((self._coordinates,), body, (slots,))
        body = Let(_SLOTS, Load(_CAPACITY, ()), Allocate((_COUNT, _SOURCE), body))
        double = Store(_CAPACITY, (), build.mul(Load(_CAPACITY, ()), 2))
        grow = While(build.lt(Load(_CAPACITY, ()), build.mul(length, 2)), double)
        body = Allocate((_CAPACITY,), build.block(Store(_CAPACITY, (), build.const(8)), grow, body))
        most = build.maximum(build.minimum(Load(_MOST, ()), self.row.extent), 1)
        found = build.block(Store(_MOST, (), build.const(0)), measure())
        return Allocate((_MOST, _TERMS), build.block(found, Let(_LENGTH, most, body)))

    def begin(self) -> Stmt:
        return Store(_COUNT, (), build.const(0))

    def combine(self, at: Expr, value: Expr) -> Stmt:
        def enter(slot: Expr) -> Stmt:
            if self.row.counts:
                return self._use(slot, at)
            update = Store(self._elements, (slot,), build.cast(value, self.row.dtype), self.row.reduction)
            return build.block(self._use(slot, at), update)

        return self._find(at, enter)

    def _use(self, slot: Expr, at: Expr) -> Stmt:
        """Use the slot for the coordinate `at` if it is empty."""
        count = Load(_COUNT, ())
        start = [] if self.row.counts else [Store(self._elements, (slot,), self.row.identity)]
        new = build.block(
            Store(self._coordinates, (slot,), at), *start, Store(self._used_slots, (count,), slot),
            Store(_COUNT, (), build.const(1), "+"),
        )  # fmt: skip
        return If(build.eq(build.load(self._coordinates, slot), EMPTY), new)

    def _find(self, at: Expr, then: Callable[[Expr], Stmt]) -> Stmt:
        """Emit `then` with the slot of the coordinate `at`, or an empty slot for it."""
        names = self.row.names
        wanted, found = (names.fresh(internal_name(x)) for x in ("wanted", "slot"))
        probe, last = build.register(names.fresh(internal_name("probe"))), build.sub(build.var(_SLOTS), 1)
        here = build.load(self._coordinates, Load(probe, ()))
        is_other = build.logical_and(build.ne(here, build.var(wanted)), build.ne(here, EMPTY))
        step = Store(probe, (), build.call(BIT_AND, build.add(Load(probe, ()), 1), last))
        search = build.block(Store(probe, (), _hash(build.var(wanted), last)), While(is_other, step))
        return Let(
            wanted, at, Allocate((probe,), build.block(search, Let(found, Load(probe, ()), then(build.var(found)))))
        )

    def append(self, element: AppendElement) -> Stmt:
        names = self.row.names
        number, slot, at = (names.fresh(internal_name(x)) for x in ("entry", "slot", "at"))
        held = build.var(slot)
        clear = Store(self._coordinates, (held,), EMPTY)
        one = build.block(element(build.var(at), build.load(self._elements, held)), clear)
        one = Let(at, build.load(self._coordinates, held), one)
        first = build.const(0) if self.row.counts else Load(_SOURCE, ())
        one = Let(slot, build.load(self._used_slots, build.add(first, build.var(number))), one)
        loop = Loop(number, build.const(0), Load(_COUNT, ()), one)
        return loop if self.row.counts else build.block(_sort_slots(self._used_slots, self._coordinates, names), loop)

    # --- rows whose coordinates are known ------------------------------------------------------------------------

    def enter(self, at: Expr) -> Stmt:
        """Add a coordinate to the row."""
        return self._find(at, lambda slot: self._use(slot, at))

    def update(self, at: Expr, value: Expr) -> Stmt:
        """Combine the element at the coordinate `at`, which is in the row, with a value."""
        stored = build.cast(value, self.row.dtype)
        return self._find(at, lambda slot: Store(self._elements, (slot,), stored, self.row.reduction))

    def remove(self, number: Expr, then: Callable[[Expr], Stmt]) -> Stmt:
        """Emit `then` with the element that was added to the row as the one with this number, and remove it."""
        slot = self.row.names.fresh(internal_name("slot"))
        held = build.var(slot)
        clear = Store(self._coordinates, (held,), EMPTY)
        return Let(
            slot, build.load(self._used_slots, number), build.block(then(build.load(self._elements, held)), clear)
        )


def _hash(at: Expr, mask: Expr) -> Expr:
    """The first slot to try for a coordinate."""
    low = build.call(BIT_AND, at, build.const(2**HASH_BITS - 1))
    folded = build.add(low, build.call(SHIFT_RIGHT, at, build.const(HASH_BITS)))
    return build.call(BIT_AND, build.call(SHIFT_RIGHT, build.mul(folded, HASH_FACTOR), build.const(HASH_SHIFT)), mask)


def _sort_slots(used: Buffer, coordinates: Buffer, names: Names) -> Stmt:
    """Sort the first `_COUNT` elements of `used` by `coordinates[used]`, by merging; they then start at `_SOURCE`."""
    width, first = (build.register(names.fresh(internal_name(x))) for x in ("width", "first"))
    count, source = Load(_COUNT, ()), Load(_SOURCE, ())
    runs = build.block(
        _merge_two_runs(used, coordinates, names, Load(width, ()), Load(first, ())),
        Store(first, (), build.mul(Load(width, ()), 2), "+"),
    )
    merge = build.block(
        Store(first, (), build.const(0)),
        While(build.lt(Load(first, ()), count), runs),
        Store(_SOURCE, (), build.sub(build.var(_LENGTH), source)),
        Store(width, (), build.mul(Load(width, ()), 2)),
    )
    start = (Store(_SOURCE, (), build.const(0)), Store(width, (), build.const(1)))
    return Allocate((width, first), build.block(*start, While(build.lt(Load(width, ()), count), merge)))


def _merge_two_runs(used: Buffer, coordinates: Buffer, names: Names, width: Expr, first: Expr) -> Stmt:
    """Merge two adjacent sorted runs of `used`, in one half of it, into the other half; the second may be empty."""
    left, right = (build.register(names.fresh(internal_name(x))) for x in ("left", "right"))
    middle, end, out, one, other, takes = (
        names.fresh(internal_name(x)) for x in ("middle", "end", "out", "one", "other", "takes")
    )
    stop, behind, source = build.var(middle), build.var(end), Load(_SOURCE, ())
    target = build.sub(build.var(_LENGTH), source)
    at_left = build.minimum(Load(left, ()), build.sub(stop, 1))
    at_right = build.minimum(Load(right, ()), build.sub(behind, 1))
    is_before = build.le(build.load(coordinates, build.var(one)), build.load(coordinates, build.var(other)))
    is_alone = build.ge(Load(right, ()), behind)
    takes_left = build.logical_and(build.lt(Load(left, ()), stop), build.logical_or(is_alone, is_before))
    taken = build.var(takes, INT64)
    step: Stmt = build.block(
        Store(
            used,
            (build.add(target, build.var(out)),),
            build.select(build.ne(taken, 0), build.var(one), build.var(other)),
        ),
        Store(left, (), taken, "+"),
        Store(right, (), build.sub(1, taken), "+"),
    )
    step = Let(takes, build.cast(takes_left, INT64), step)
    step = Let(other, build.load(used, build.add(source, at_right)), step)
    step = Let(one, build.load(used, build.add(source, at_left)), step)
    start = (Store(left, (), first), Store(right, (), stop))
    body: Stmt = Allocate((left, right), build.block(*start, Loop(out, first, behind, step)))
    body = Let(end, build.minimum(build.add(stop, width), Load(_COUNT, ())), body)
    return Let(middle, build.minimum(build.add(first, width), Load(_COUNT, ())), body)


@dataclass(frozen=True, slots=True)
class RowMeasurer(StatementEmitter):
    """Emits the loops that find the most terms that one row combines.

    row_depth: the depth of the loops at which the row is known. known: the number of elements of a row, if that is
    known; None counts the terms.
    """

    row_depth: int
    known: Callable[[State], Expr] | None = None

    def kernels(self) -> Iterator[tuple[str, Stmt]]:
        yield "measure", self.walk()

    def vectorization_candidates(self) -> Iterator[tuple[int, int]]:
        """None: each loop only counts its iterations."""
        yield from ()

    @property
    def reads_values(self) -> bool:
        return False

    @property
    def is_unordered(self) -> bool:
        return True

    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        if depth != self.row_depth:
            return then(state)
        if self.known is not None:
            return Store(_MOST, (), self.known(state), "max")
        start, end = Store(_TERMS, (), build.const(0)), Store(_MOST, (), Load(_TERMS, ()), "max")
        return build.block(start, then(state), end)

    def leaf(self, state: State) -> Stmt:
        return Store(_TERMS, (), build.const(1), "+")

    def choose(self, state: State, here: Mapping[Access, Expr]) -> Stmt:
        return self.leaf(state)

    def combine(self, state: State, value: Expr) -> Stmt:
        return self.leaf(state)
