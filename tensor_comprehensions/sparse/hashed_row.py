"""A hash table as the workspace of a row of a sparse result that is too wide for an array.

The table has open addressing with linear probing, and at most half of its slots are used. The coordinates of a row are
also in a list, which is sorted when the row is complete: blocks by a network of comparators, then runs by merging.
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
LAST = build.const(2**63 - 1)
"""Greater than all coordinates."""
COMPARATORS = (
    (0, 2), (1, 3), (4, 6), (5, 7), (0, 4), (1, 5), (2, 6), (3, 7), (0, 1), (2, 3), (4, 5), (6, 7), (2, 4), (3, 5),
    (1, 4), (3, 6), (1, 2), (3, 4), (5, 6),
)  # fmt: skip
"""Pairs of elements to compare, in order, to sort a block ("The Art of Computer Programming", volume 3, 5.3.4)."""
BLOCK = 8
"""Elements of a block."""
_SLOTS, _LENGTH = internal_name("slots"), internal_name("length")


@dataclass(frozen=True, slots=True)
class HashedRow(RowWorkspace):
    """Slots with a coordinate and an element each, and a list of the entries of the row in the order they came.

    An entry is a coordinate. It is a slot if the row is not to be sorted: if it is only counted, or its coordinates are
    known.
    """

    @property
    def _coordinates(self) -> Buffer:
        return self.row.buffer("coordinates", INT64)

    @property
    def _elements(self) -> Buffer:
        return self.row.buffer("row", self.row.dtype)

    @property
    def _entries(self) -> Buffer:
        """The entries of the row, and as much memory to sort them."""
        return self.row.buffer("entries", INT64)

    def allocate_around(self, body: Stmt, measure: Callable[[], Stmt]) -> Stmt:
        slots, length = build.var(_SLOTS), build.var(_LENGTH)
        body = build.block(self.row.fill(self._coordinates, slots, EMPTY), body)
        body = Allocate((self._entries,), body, (build.mul(length, 2),))
        if not self.row.counts:
            body = Allocate((self._elements,), body, (slots,))
        body = Allocate((self._coordinates,), body, (slots,))
        body = Let(_SLOTS, Load(_CAPACITY, ()), Allocate((_COUNT, _SOURCE), body))
        double = Store(_CAPACITY, (), build.mul(Load(_CAPACITY, ()), 2))
        grow = While(build.lt(Load(_CAPACITY, ()), build.mul(length, 2)), double)
        body = Allocate((_CAPACITY,), build.block(Store(_CAPACITY, (), build.const(8)), grow, body))
        most = _round_to_blocks(build.maximum(build.minimum(Load(_MOST, ()), self.row.extent), 1))
        found = build.block(Store(_MOST, (), build.const(0)), measure())
        return Allocate((_MOST, _TERMS), build.block(found, Let(_LENGTH, most, body)))

    def begin(self) -> Stmt:
        return Store(_COUNT, (), build.const(0))

    def combine(self, at: Expr, value: Expr) -> Stmt:
        def enter(slot: Expr) -> Stmt:
            if self.row.counts:
                return self._use(slot, at, slot)
            update = Store(self._elements, (slot,), build.cast(value, self.row.dtype), self.row.reduction)
            return build.block(self._use(slot, at, at), update)

        return self._find(at, enter)

    def _use(self, slot: Expr, at: Expr, entry: Expr) -> Stmt:
        """Use the slot for the coordinate `at` if it is empty, and add an entry to the list."""
        count = Load(_COUNT, ())
        start = [] if self.row.counts else [Store(self._elements, (slot,), self.row.identity)]
        new = build.block(
            Store(self._coordinates, (slot,), at), *start, Store(self._entries, (count,), entry),
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
        if self.row.counts:
            held = build.var(slot)
            one = Let(at, build.load(self._coordinates, held), element(build.var(at), held))
            one = Let(slot, build.load(self._entries, build.var(number)), one)
            return build.block(Loop(number, build.const(0), Load(_COUNT, ()), one), self._clear(build.const(0)))
        target = build.sub(build.var(_LENGTH), Load(_SOURCE, ()))

        def append_one(slot: Expr) -> Stmt:
            use = Store(self._entries, (build.add(target, build.var(number)),), slot)
            return build.block(use, element(build.var(at), build.load(self._elements, slot)))

        entry = build.load(self._entries, build.add(Load(_SOURCE, ()), build.var(number)))
        one = Let(at, entry, self._find(build.var(at), append_one))
        # Only then are slots emptied: a search for a coordinate ends at an empty one.
        each = Loop(number, build.const(0), Load(_COUNT, ()), one)
        return build.block(_sort(self._entries, names), each, self._clear(target))

    def _clear(self, first: Expr) -> Stmt:
        """Empty the slots in the list, which starts at `first`."""
        number = self.row.names.fresh(internal_name("entry"))
        slot = build.load(self._entries, build.add(first, build.var(number)))
        return Loop(number, build.const(0), Load(_COUNT, ()), Store(self._coordinates, (slot,), EMPTY))

    # --- rows whose coordinates are known ------------------------------------------------------------------------

    def enter(self, at: Expr) -> Stmt:
        """Add a coordinate to the row."""
        return self._find(at, lambda slot: self._use(slot, at, slot))

    def update(self, at: Expr, value: Expr) -> Stmt:
        """Combine the element at the coordinate `at`, which is in the row, with a value."""
        stored = build.cast(value, self.row.dtype)
        return self._find(at, lambda slot: Store(self._elements, (slot,), stored, self.row.reduction))

    def remove(self, number: Expr, then: Callable[[Expr], Stmt]) -> Stmt:
        """Emit `then` with the element that was added to the row as the one with this number, and remove it."""
        slot = self.row.names.fresh(internal_name("slot"))
        held = build.var(slot)
        clear = Store(self._coordinates, (held,), EMPTY)
        return Let(slot, build.load(self._entries, number), build.block(then(build.load(self._elements, held)), clear))


def _hash(at: Expr, mask: Expr) -> Expr:
    """The first slot to try for a coordinate."""
    low = build.call(BIT_AND, at, build.const(2**HASH_BITS - 1))
    folded = build.add(low, build.call(SHIFT_RIGHT, at, build.const(HASH_BITS)))
    return build.call(BIT_AND, build.call(SHIFT_RIGHT, build.mul(folded, HASH_FACTOR), build.const(HASH_SHIFT)), mask)


def _round_to_blocks(count: Expr) -> Expr:
    return build.mul(build.div(build.add(count, BLOCK - 1), BLOCK), BLOCK)


def _sort(entries: Buffer, names: Names) -> Stmt:
    """Sort the first `_COUNT` entries; they then start at `_SOURCE`, and those of the other half of memory are lost."""
    width, first = (build.register(names.fresh(internal_name(x))) for x in ("width", "first"))
    total, number = names.fresh(internal_name("total")), names.fresh(internal_name("entry"))
    count = build.var(total)
    fill = Loop(number, Load(_COUNT, ()), count, Store(entries, (build.var(number),), LAST))
    runs = build.block(
        _merge_two_runs(entries, names, Load(width, ()), Load(first, ()), count),
        Store(first, (), build.mul(Load(width, ()), 2), "+"),
    )
    merge = build.block(
        Store(first, (), build.const(0)),
        While(build.lt(Load(first, ()), count), runs),
        Store(_SOURCE, (), build.sub(build.var(_LENGTH), Load(_SOURCE, ()))),
        Store(width, (), build.mul(Load(width, ()), 2)),
    )
    start = (fill, _sort_blocks(entries, names, count), Store(_SOURCE, (), build.const(0)))
    body = build.block(*start, Store(width, (), build.const(BLOCK)), While(build.lt(Load(width, ()), count), merge))
    return Allocate((width, first), Let(total, _round_to_blocks(Load(_COUNT, ())), body))


def _sort_blocks(entries: Buffer, names: Names, count: Expr) -> Stmt:
    """Sort each block of the first `count` entries."""
    block = names.fresh(internal_name("block"))
    places = [build.add(build.var(block), n) for n in range(BLOCK)]
    held = [names.fresh(internal_name("held")) for _ in range(BLOCK)]
    values = [build.var(name) for name in held]
    bound: list[tuple[str, Expr]] = [
        (name, build.load(entries, place)) for name, place in zip(held, places, strict=True)
    ]
    for left, right in COMPARATORS:
        low, high = (names.fresh(internal_name(x)) for x in ("low", "high"))
        bound += [(low, build.minimum(values[left], values[right])), (high, build.maximum(values[left], values[right]))]
        values[left], values[right] = build.var(low), build.var(high)
    body: Stmt = build.block(*(Store(entries, (place,), value) for place, value in zip(places, values, strict=True)))
    for name, value in reversed(bound):
        body = Let(name, value, body)
    return Loop(block, build.const(0), count, body, step=BLOCK)


def _merge_two_runs(entries: Buffer, names: Names, width: Expr, first: Expr, count: Expr) -> Stmt:
    """Merge two adjacent sorted runs, in one half of the memory, into the other half; the second may be empty."""
    left, right, out = (build.register(names.fresh(internal_name(x))) for x in ("left", "right", "out"))
    middle, end, one, other, takes = (names.fresh(internal_name(x)) for x in ("middle", "end", "one", "other", "takes"))
    source = Load(_SOURCE, ())
    stop, behind = build.var(middle), build.var(end)
    taken = build.var(takes, INT64)
    step: Stmt = build.block(
        Store(entries, (Load(out, ()),), build.select(build.ne(taken, 0), build.var(one), build.var(other))),
        Store(left, (), taken, "+"),
        Store(right, (), build.sub(1, taken), "+"),
        Store(out, (), build.const(1), "+"),
    )
    step = Let(takes, build.cast(build.le(build.var(one), build.var(other)), INT64), step)
    step = Let(other, build.load(entries, Load(right, ())), step)
    step = Let(one, build.load(entries, Load(left, ())), step)
    both = build.logical_and(build.lt(Load(left, ()), stop), build.lt(Load(right, ()), behind))
    starts = (
        Store(left, (), build.add(source, first)),
        Store(right, (), stop),
        Store(out, (), build.add(build.sub(build.var(_LENGTH), source), first)),
    )
    rest = (
        _copy_entries(entries, names, Load(r, ()), last, Load(out, ())) for r, last in ((left, stop), (right, behind))
    )
    body: Stmt = Allocate((left, right, out), build.block(*starts, While(both, step), *rest))
    body = Let(end, build.minimum(build.add(stop, width), build.add(source, count)), body)
    return Let(middle, build.add(source, build.minimum(build.add(first, width), count)), body)


def _copy_entries(entries: Buffer, names: Names, first: Expr, last: Expr, target: Expr) -> Stmt:
    """Copy the entries at [first, last) to `target`."""
    number, start, shift = (names.fresh(internal_name(x)) for x in ("entry", "start", "shift"))
    copy = Store(entries, (build.add(build.var(number), build.var(shift)),), build.load(entries, build.var(number)))
    return Let(start, first, Let(shift, build.sub(target, first), Loop(number, build.var(start), last, copy)))


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
