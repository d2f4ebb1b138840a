"""Merges of operands that are added, almost without data-dependent branches that are hard to predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..core.dtypes import INT64, DType
from ..loop_ir import build
from ..loop_ir.names import Names
from ..loop_ir.nodes import Allocate, Buffer, Expr, If, Let, Load, Stmt, Store, While
from ..tc_lang.ir import Access
from ..thresholds import COMPARED_COORDINATES
from .absent_operands import Term
from .levels import Cursor
from .state import Appended, Body, Chosen, State


def _make_end_coordinate(index: DType) -> Expr:
    """A sentinel coordinate for an exhausted operand: larger than all others, because extents have the type `index`."""
    return build.const(2 ** (8 * index.size - 1) - 1, index)


@dataclass(frozen=True, slots=True)
class _Head:
    """Registers of an operand in a merge: its position, the coordinate there, and the next coordinate."""

    position: Buffer
    coordinate: Buffer
    following: Buffer

    @staticmethod
    def of(a: Access, index: DType, names: Names) -> _Head:
        """New registers for `a`, with coordinates of the type `index`."""
        types = {"at": INT64, "crd": index, "next": index}
        return _Head(*(build.register(names.fresh(f"{a.tensor}.{x}"), t) for x, t in types.items()))

    @property
    def registers(self) -> tuple[Buffer, ...]:
        return self.position, self.coordinate, self.following

    @property
    def here(self) -> Expr:
        """The coordinate at the current position."""
        return Load(self.coordinate, ())

    def start(self, c: Cursor) -> list[Stmt]:
        """Initialize the registers to the first position of `c`."""
        return [
            Store(self.position, (), c.start),
            Store(self.coordinate, (), self._read(c, c.start)),
            Store(self.following, (), self._read(c, build.add(c.start, 1))),
        ]

    def advance(self, c: Cursor, here: Expr) -> list[Stmt]:
        """Advance by one position if `here` holds."""
        return [
            Store(self.position, (), build.cast(here, INT64), "+"),
            Store(self.coordinate, (), build.select(here, Load(self.following, ()), self.here)),
            Store(self.following, (), self._read(c, build.add(Load(self.position, ()), 1))),
        ]

    def step(self, c: Cursor) -> list[Stmt]:
        """Advance by one position, with a branch on whether the end is near, which is rare and well predicted."""
        behind, index = build.add(Load(self.position, ()), 1), self.coordinate.type.dtype
        load = Store(self.following, (), build.cast(build.load(c.crd, behind), index))
        return [
            Store(self.position, (), build.const(1), "+"),
            Store(self.coordinate, (), Load(self.following, ())),
            If(build.lt(behind, c.stop), load, Store(self.following, (), _make_end_coordinate(index))),
        ]

    def _read(self, c: Cursor, position: Expr) -> Expr:
        live, index = build.lt(position, c.stop), self.coordinate.type.dtype
        return build.select(
            live, build.cast(build.load(c.crd, position, mask=live), index), _make_end_coordinate(index)
        )


@dataclass(frozen=True, slots=True)
class UnionMerge:
    """Emits the loops over all coordinates that any operand stores, in increasing order.

    name: the name of the loop. leaf, choose: emit an instance with all operands, or with some of them.
    append_run: emits adjacent instances at once; None if that is impossible.
    """

    name: str
    names: Names
    leaf: Body
    choose: Chosen
    append_run: Appended | None = None

    def merge(self, state: State, term: Term, cursors: Mapping[Access, Cursor]) -> Stmt:
        """Emit the loops. term: the value with all operands present."""
        types = {c.crd.type.dtype for c in cursors.values()}
        index = types.pop() if len(types) == 1 else INT64
        if len(cursors) == 2 and self.append_run is not None:
            return self._merge_pair(replace(state, term=term), cursors, index)
        return self._merge_all(replace(state, term=term), cursors, index)

    # --- two operands --------------------------------------------------------------------------------------------

    def _merge_pair(self, state: State, cursors: Mapping[Access, Cursor], index: DType) -> Stmt:
        """A loop while both operands have coordinates, then one over the rest of either.

        If both are at the same coordinate, their next ones are likely equal, too, so several are compared at once.
        """
        cells = {a: build.register(self.names.fresh(f"{a.tensor}.at")) for a in cursors}
        crds = {a: self.names.fresh(f"{a.tensor}.crd") for a in cursors}
        one, other = (build.var(n, index) for n in crds.values())
        here = dict(zip(cursors, (build.lt(one, other), build.lt(other, one)), strict=True))
        instance = self._advance_state(state, cursors, cells, build.const(0), build.minimum(one, other))
        moves = [Store(cells[a], (), build.cast(here[a], INT64), "+") for a in cursors]
        apart = build.block(self.choose(instance, here), *moves)
        body: Stmt = If(build.eq(one, other), self._merge_equal_run(state, instance, cursors, cells), apart)
        for a, c in cursors.items():
            body = Let(crds[a], build.cast(build.load(c.crd, Load(cells[a], ())), index), body)
        (live, also_live) = (build.lt(Load(cells[a], ()), c.stop) for a, c in cursors.items())
        first = [Store(cells[a], (), c.start) for a, c in cursors.items()]
        rests = [self._append_rest(state, cursors, cells, a) for a in cursors]
        both = While(build.logical_and(live, also_live), body)
        return Allocate(tuple(cells.values()), build.block(*first, both, *rests))

    def _advance_state(
        self,
        state: State,
        cursors: Mapping[Access, Cursor],
        cells: Mapping[Access, Buffer],
        ahead: Expr,
        coordinate: Expr,
    ) -> State:
        """The state with each operand `ahead` positions after its current one."""
        places = {a: c.place_at(build.add(Load(cells[a], ()), ahead)) for a, c in cursors.items()}
        indices = {**state.indices, self.name: build.cast(coordinate, INT64)}
        return replace(state, places={**state.places, **places}, indices=indices)

    def _merge_equal_run(
        self, state: State, instance: State, cursors: Mapping[Access, Cursor], cells: Mapping[Access, Buffer]
    ) -> Stmt:
        """Emit a run of coordinates that both operands store, or only the instance of `instance`."""
        assert self.append_run is not None
        starts = {x: Load(cells[x], ()) for x in cursors}
        left, right = (build.load(c.crd, build.ramp(starts[x], 1, COMPARED_COORDINATES)) for x, c in cursors.items())
        same = build.reduce_lanes("and", build.eq(build.cast(left, INT64), build.cast(right, INT64)))
        (enough, also_enough) = (
            build.le(build.add(starts[x], COMPARED_COORDINATES), c.stop) for x, c in cursors.items()
        )
        crd = next(iter(cursors.values())).crd

        def state_of(ahead: Expr) -> State:
            coordinate = build.load(crd, build.add(starts[next(iter(cursors))], ahead))
            return self._advance_state(state, cursors, cells, ahead, coordinate)

        def one() -> Stmt:
            return build.block(self.leaf(instance), *(Store(c, (), build.const(1), "+") for c in cells.values()))

        moves = [Store(cells[x], (), build.const(COMPARED_COORDINATES), "+") for x in cursors]
        several = build.block(self.append_run(state_of, build.const(COMPARED_COORDINATES)), *moves)
        return If(build.logical_and(enough, also_enough), If(same, several, one()), one())

    def _append_rest(
        self, state: State, cursors: Mapping[Access, Cursor], cells: Mapping[Access, Buffer], alone: Access
    ) -> Stmt:
        """Append the rest of one operand after the end of the other."""
        assert self.append_run is not None
        term = state.term.drop_absent([a for a in cursors if a != alone])
        assert term is not None
        c, start = cursors[alone], Load(cells[alone], ())

        def state_of(ahead: Expr) -> State:
            position = build.add(start, ahead)
            indices = {**state.indices, self.name: c.coordinate(position)}
            return State(term, {**state.places, alone: c.place_at(position)}, indices)

        return self.append_run(state_of, build.sub(c.stop, start))

    # --- any number of operands ----------------------------------------------------------------------------------

    def _merge_all(self, state: State, cursors: Mapping[Access, Cursor], index: DType) -> Stmt:
        """Merge by one `While`, without branches on which operands are present.

        A branch on whether all operands are present is faster if that is true almost always or almost never, since
        positions then do not wait for coordinates. Besides its position, each operand keeps the coordinate there and
        the next one in registers, so that coordinates are loaded one step before they are compared.
        """
        heads = {a: _Head.of(a, index, self.names) for a in cursors}
        name, least = self.names.fresh(self.name), build.fold_minimum(h.here for h in heads.values())
        least_here = build.var(name, index)
        here = {a: build.eq(h.here, least_here) for a, h in heads.items()}
        places = {a: cursors[a].place_at(Load(h.position, ())) for a, h in heads.items()}
        indices = {**state.indices, self.name: build.cast(least_here, INT64)}
        instance = State(state.term, {**state.places, **places}, indices)
        together = build.block(self.leaf(instance), *(s for a, c in cursors.items() for s in heads[a].step(c)))
        moves = [s for a, c in cursors.items() for s in heads[a].advance(c, here[a])]
        heads_here = [h.here for h in heads.values()]
        together_at = heads_here[0] if len(heads_here) == 2 else least_here
        are_together = build.eq(build.fold_maximum(heads_here[1:] if len(heads_here) == 2 else heads_here), together_at)
        step = If(are_together, together, build.block(self.choose(instance, here), *moves))
        loop = While(build.lt(least, _make_end_coordinate(index)), Let(name, least, step))
        first = [s for a, c in cursors.items() for s in heads[a].start(c)]
        return Allocate(tuple(b for h in heads.values() for b in h.registers), build.block(*first, loop))
