"""The loops of a nest: operands are traversed index by index, and merged if they meet (TACO, section 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.dtypes import INT64, DType
from ..loop_ir import build
from ..loop_ir.names import Names
from ..loop_ir.nodes import Allocate, Buffer, Expr, If, Let, Load, Loop, LoopKind, Stmt, Store, While
from ..loop_ir.rewrite import walk_expr
from ..tc_lang.ir import Access
from .absent import Term, is_additive
from .graph import Nest, Step, inner, outer
from .lattice import Lattice, Point, build_lattice
from .levels import ROOT, Cursor, Place, cursor, first_not_below, locate, name_of_position, run_end
from .row_prefetch import RowPrefetcher
from .sparse_problem import Sizes, SparseOperand


@dataclass(frozen=True, slots=True)
class State:
    """The state inside the loops so far.

    term: the rest of the value. places: the positions of the occurrences. indices: the values of loops and of indices.
    """

    term: Term
    places: Mapping[Access, Place]
    indices: Mapping[str, Expr] = field(default_factory=dict)


Body = Callable[[State], Stmt]
Chosen = Callable[[State, Mapping[Access, Expr]], Stmt]
"""Emits an instance in which an operand counts if a condition holds, and is 0 otherwise."""


def _end(index: DType) -> Expr:
    """The coordinate of an operand that has none left: more than all others, as extents are of the type `index`."""
    return build.const(2 ** (8 * index.size - 1) - 1, index)


@dataclass(frozen=True, slots=True)
class _Head:
    """Registers of an operand in a merge: its position, the coordinate there, and the next coordinate."""

    position: Buffer
    coordinate: Buffer
    following: Buffer

    @staticmethod
    def of(a: Access, index: DType, names: Names) -> _Head:
        """With coordinates of the type `index`."""
        types = {"at": INT64, "crd": index, "next": index}
        return _Head(*(build.register(names.fresh(f"{a.tensor}.{x}"), t) for x, t in types.items()))

    @property
    def registers(self) -> tuple[Buffer, ...]:
        return self.position, self.coordinate, self.following

    @property
    def here(self) -> Expr:
        """The coordinate at the position."""
        return Load(self.coordinate, ())

    def start(self, c: Cursor) -> list[Stmt]:
        """At the first position of `c`."""
        return [
            Store(self.position, (), c.start),
            Store(self.coordinate, (), self._read(c, c.start)),
            Store(self.following, (), self._read(c, build.add(c.start, 1))),
        ]

    def advance(self, c: Cursor, here: Expr) -> list[Stmt]:
        """One position further if `here` holds."""
        return [
            Store(self.position, (), build.cast(here, INT64), "+"),
            Store(self.coordinate, (), build.select(here, Load(self.following, ()), self.here)),
            Store(self.following, (), self._read(c, build.add(Load(self.position, ()), 1))),
        ]

    def step(self, c: Cursor) -> list[Stmt]:
        """One position further, with a branch on whether the end is near, which it hardly ever is."""
        behind, index = build.add(Load(self.position, ()), 1), self.coordinate.type.dtype
        load = Store(self.following, (), build.cast(build.load(c.crd, behind), index))
        return [
            Store(self.position, (), build.const(1), "+"),
            Store(self.coordinate, (), Load(self.following, ())),
            If(build.lt(behind, c.stop), load, Store(self.following, (), _end(index))),
        ]

    def _read(self, c: Cursor, position: Expr) -> Expr:
        live, index = build.lt(position, c.stop), self.coordinate.type.dtype
        return build.select(live, build.cast(build.load(c.crd, position, mask=live), index), _end(index))


@dataclass(frozen=True, slots=True)
class Walker:
    """Prints the loops of one nest.

    leaf: emits each instance that is not void. wrap_loops: adds the code around the loop of a depth.
    choose: the same as `leaf` without a branch, if operands may be absent.
    lanes: of vectors along the innermost loop, and how many at once. ahead: prefetches rows.
    gathers: whether to vectorize an innermost loop over stored positions. is_unordered: whether the coordinates
    of operands that are added may come in any order, and several times. copies: of the body of an innermost loop over
    stored positions. branchless: whether sums at one index are computed without branches on presence.
    """

    nest: Nest
    order: tuple[str, ...]
    operands: Mapping[str, SparseOperand]
    sizes: Sizes
    names: Names
    leaf: Body
    wrap_loops: Callable[[int, State, Body], Stmt]
    choose: Chosen
    lanes: tuple[int, int] = (1, 1)
    ahead: RowPrefetcher | None = None
    gathers: bool = False
    is_unordered: bool = False
    copies: int = 1
    branchless: bool = True

    def nest_loops(self) -> Stmt:
        """All loops, from the outermost one on."""
        state = State(self.nest.term, dict.fromkeys(self.nest.paths, ROOT))
        return self._enter(state, None, lambda s: self.loops(0, s))

    def loops(self, depth: int, state: State) -> Stmt:
        """The loops from a depth of the order on."""
        if depth == len(self.order):
            return self.leaf(state)
        return self.wrap_loops(depth, state, lambda s: self._loop(depth, s))

    # --- one loop ------------------------------------------------------------------------------------------------

    def _loop(self, depth: int, state: State) -> Stmt:
        name = self.order[depth]
        iterators = [a for a in self._live(state.term) if self._iterates(a, state, name)]
        lattice = build_lattice(state.term, iterators)
        if not lattice.points:
            return self.emit_dense_loop(depth, state, lattice.default) if lattice.default is not None else build.NOTHING

        def emit_body(cursors: Mapping[Access, Cursor]) -> Stmt:
            if lattice.default is not None:
                return self._scan(depth, state, lattice, lattice.default, cursors)
            (*others, last) = lattice.points
            if not others and len(last.present) == 1:
                return self._follow(depth, state, last, cursors)
            return self._merge(depth, state, lattice, cursors)

        return self._cursors(iterators, state, name, {}, emit_body)

    def _live(self, term: Term) -> list[Access]:
        uses = term.uses
        return [a for a in self.nest.paths if a in uses]

    def _step(self, a: Access, place: Place) -> Step | None:
        steps = self.nest.paths[a].steps
        return steps[place.depth] if place.depth < len(steps) else None

    def _iterates(self, a: Access, state: State, name: str) -> bool:
        step = self._step(a, state.places[a])
        return step is not None and step.loop == name and not step.level.is_dense

    def bounds(self, name: str) -> tuple[Expr, Expr]:
        """The range of a loop."""
        loop = self.nest.loops[name]
        return self.sizes.value(loop.lower), self.sizes.value(loop.upper)

    def emit_dense_loop(self, depth: int, state: State, term: Term, bounds: tuple[Expr, Expr] | None = None) -> Stmt:
        """A loop over all coordinates."""
        name = self.names.fresh(self.order[depth])
        body = self._child(depth, replace(state, term=term), build.var(name), {})
        start, stop = self.bounds(self.order[depth]) if bounds is None else bounds
        if depth + 1 == len(self.order) and self.lanes[0] > 1:
            return Loop(name, start, stop, body, LoopKind.VECTOR, vector_factors=self.lanes)
        return Loop(name, start, stop, body)

    # --- iterators -----------------------------------------------------------------------------------------------

    def _cursors(
        self,
        iterators: Sequence[Access],
        state: State,
        name: str,
        found: dict[Access, Cursor],
        then: Callable[[Mapping[Access, Cursor]], Stmt],
    ) -> Stmt:
        """`then` with a cursor for each iterator, cut to the range of the loop where that is no whole dimension."""
        if len(found) == len(iterators):
            return then(found)
        a = iterators[len(found)]
        step = self._step(a, state.places[a])
        assert step is not None
        plain = cursor(self.operands[a.tensor], step, state.places[a])

        def with_bounds(start: Expr, stop: Expr) -> Stmt:
            c = replace(plain, start=start, stop=stop)
            return self._cursors(iterators, state, name, {**found, a: c}, then)

        loop = self.nest.loops[name]
        if loop.window:
            lower, upper = self.bounds(name)
            return first_not_below(
                plain, lower, self.names,
                lambda start: first_not_below(
                    replace(plain, start=start), upper, self.names, lambda stop: with_bounds(start, stop)
                ),
            )  # fmt: skip
        return self._bind_value(
            plain.start, lambda start: self._bind_value(plain.stop, lambda stop: with_bounds(start, stop))
        )

    def _bind_value(self, value: Expr, then: Callable[[Expr], Stmt]) -> Stmt:
        """`then` of a value that is computed once."""
        if not any(isinstance(x, Load) for x in walk_expr(value)):
            return then(value)
        name = self.names.fresh("at")
        return Let(name, value, then(build.var(name)))

    def _follow(self, depth: int, state: State, point: Point, cursors: Mapping[Access, Cursor]) -> Stmt:
        """A loop over the stored elements of one operand."""
        (a,) = point.present
        c = cursors[a]
        if not c.is_unique and not self._is_alone(a, depth):
            return self._merge(depth, state, Lattice((point,), None), cursors)
        name, coordinate = self.names.fresh(name_of_position(a)), self.names.fresh(self.order[depth])
        position = build.var(name)
        body = self._child(depth, replace(state, term=point.term), build.var(coordinate), {a: c.place_at(position)})
        if c.stop == build.add(c.start, 1):
            return Let(name, c.start, Let(coordinate, c.coordinate(position), body))
        if self.ahead is not None:
            indices = {**state.indices, self.order[depth]: build.var(coordinate)}
            hints = self.ahead.fetch_ahead(depth, a, c, position, point.term, state.places, indices)
            body = build.block(hints, body)
        body = Let(coordinate, c.coordinate(position), body)
        if self.gathers and depth + 1 == len(self.order) and self.lanes[0] > 1:
            return Loop(name, c.start, c.stop, body, LoopKind.VECTOR, vector_factors=(self.lanes[0], 0))
        if self.copies > 1 and depth + 1 == len(self.order):
            return self._repeat(name, c, body)
        return Loop(name, c.start, c.stop, body)

    def _repeat(self, name: str, c: Cursor, body: Stmt) -> Stmt:
        """A loop over the positions of `c` with several of them per iteration, and one over the remaining ones."""
        middle, first, copy = (self.names.fresh(f"{name}.{what}") for what in ("middle", "first", "copy"))
        left = build.mod(build.sub(c.stop, c.start), self.copies)
        one = Let(name, build.add(build.var(first), build.var(copy)), body)
        trip = Loop(copy, build.const(0), build.const(self.copies), one, LoopKind.UNROLLED)
        main = Loop(first, c.start, build.var(middle), trip, step=self.copies)
        return Let(middle, build.sub(c.stop, left), build.block(main, Loop(name, build.var(middle), c.stop, body)))

    def _is_alone(self, a: Access, depth: int) -> bool:
        """Whether the elements below repeated coordinates of `a` may be walked one by one.

        Not where another operand has to be merged with them further inside, nor where they are stored several times.
        """
        inside = set(self.order[depth + 1 :])
        others = (s.loop for b, p in self.nest.paths.items() if b != a for s in p.iterated)
        own = {s.loop for s in self.nest.paths[a].steps}
        return self.nest.paths[a].format.is_unique and not any(n in inside and n in own for n in others)

    def _merge(self, depth: int, state: State, lattice: Lattice, cursors: Mapping[Access, Cursor]) -> Stmt:
        """A `While` per point: as long as its operands all have coordinates, the least of these is next."""
        if self._is_union(depth, state, lattice, cursors):
            if self.is_unordered:
                return self._visit_each(depth, state, lattice, cursors)
            if self.branchless:
                return self._merge_union(depth, state, lattice.points[0], cursors)
        cells = {a: build.register(self.names.fresh(f"{a.tensor}.at")) for a in cursors}
        parts: list[Stmt] = [Store(cells[a], (), c.start) for a, c in cursors.items()]
        for point in lattice.points:
            here = _list_present(point, cursors)
            if len(here) == 1 and cursors[here[0]].is_unique:
                parts.append(self._rest(depth, state, point, cursors[here[0]], cells[here[0]]))
                continue
            live = [build.lt(Load(cells[a], ()), cursors[a].stop) for a in here]
            parts.append(While(_all(live), self._merge_step(depth, state, lattice, point, cursors, cells)))
        return Allocate(tuple(cells.values()), build.block(*parts))

    def _rest(self, depth: int, state: State, point: Point, c: Cursor, cell: Buffer) -> Stmt:
        """A loop over the remaining stored elements of one operand, behind the end of the others."""
        (a,) = point.present
        name, coordinate = self.names.fresh(name_of_position(a)), self.names.fresh(self.order[depth])
        position = build.var(name)
        body = self._child(depth, replace(state, term=point.term), build.var(coordinate), {a: c.place_at(position)})
        return Loop(name, Load(cell, ()), c.stop, Let(coordinate, c.coordinate(position), body))

    def _merge_step(
        self,
        depth: int,
        state: State,
        lattice: Lattice,
        point: Point,
        cursors: Mapping[Access, Cursor],
        cells: Mapping[Access, Buffer],
    ) -> Stmt:
        """One coordinate: the least of those at which the operands of a point stand."""
        here = _list_present(point, cursors)
        names = {a: self.names.fresh(f"{a.tensor}.crd") for a in here}
        value = self.names.fresh(self.order[depth])
        least: Expr = build.var(names[here[0]])
        for a in here[1:]:
            least = build.minimum(least, build.var(names[a]))
        at = {a: build.eq(build.var(names[a]), build.var(value)) for a in here}

        def ends(rest: Sequence[Access], stops: dict[Access, Expr]) -> Stmt:
            if rest:
                a, c = rest[0], cursors[rest[0]]
                position = Load(cells[a], ())
                return run_end(
                    c, position, c.stop, build.var(names[a]), self.names, lambda e: ends(rest[1:], {**stops, a: e})
                )
            return self._cases(depth, state, lattice.list_subpoints(point), build.var(value), at, cells, cursors, stops)

        body: Stmt = Let(value, least, ends(here, {}))
        for a in reversed(here):
            body = Let(names[a], cursors[a].coordinate(Load(cells[a], ())), body)
        return body

    def _cases(
        self,
        depth: int,
        state: State,
        points: Sequence[Point],
        value: Expr,
        at: Mapping[Access, Expr],
        cells: Mapping[Access, Buffer],
        cursors: Mapping[Access, Cursor],
        stops: Mapping[Access, Expr],
    ) -> Stmt:
        """The first of `points` whose operands are all at the coordinate; then these move on."""
        moves = [self._advance(cells[a], at[a], stops[a]) for a in at]
        chain: Stmt | None = None
        for p in reversed(points):
            present = {
                a: cursors[a].place_at(Load(cells[a], ()), None if cursors[a].is_unique else stops[a])
                for a in p.present
            }
            held = {a: self.names.fresh(name_of_position(a)) for a in present}
            places = {a: replace(x, low=build.var(held[a])) for a, x in present.items()}
            child = self._child(depth, replace(state, term=p.term), value, places)
            for a, n in held.items():
                child = Let(n, Load(cells[a], ()), child)
            condition = _all([at[a] for a in p.present if a in at])
            needs_test = chain is not None or p.present != frozenset(at) or len(at) > 1
            chain = build.when(condition, child, chain) if needs_test else child
        return build.block(*([chain] if chain is not None else []), *moves)

    def _is_union(self, depth: int, state: State, lattice: Lattice, cursors: Mapping[Access, Cursor]) -> bool:
        """Whether an instance at the innermost loop is a sum of the present operands; one of the operands always is."""
        if depth + 1 < len(self.order) or not all(c.is_unique for c in cursors.values()):
            return False
        term, paths = lattice.points[0].term, self.nest.paths
        alone = {next(iter(p.present)) for p in lattice.points if len(p.present) == 1}
        complete = all(state.places[a].depth + 1 == len(paths[a].steps) for a in cursors)
        others = [a for a in self._live(term) if a not in cursors]
        plain = not term.exists and not term.aliases and not others
        return alone == set(cursors) and complete and plain and is_additive(term.value, set(cursors))

    def _merge_union(self, depth: int, state: State, point: Point, cursors: Mapping[Access, Cursor]) -> Stmt:
        """One `While` over every coordinate of any operand, the least one next, without branches on presence.

        If all of them are present at most coordinates, or hardly ever, a branch is faster: positions then do not wait
        for coordinates. Besides its position, each operand keeps the coordinate there and the next one, so that
        coordinates are loaded one step before they are compared.
        """
        types = {c.crd.type.dtype for c in cursors.values()}
        index = types.pop() if len(types) == 1 else INT64
        heads = {a: _Head.of(a, index, self.names) for a in cursors}
        name, least = self.names.fresh(self.order[depth]), build.fold_minimum(h.here for h in heads.values())
        least_here = build.var(name, index)
        here = {a: build.eq(h.here, least_here) for a, h in heads.items()}
        places = {a: cursors[a].place_at(Load(h.position, ())) for a, h in heads.items()}
        indices = {**state.indices, self.order[depth]: build.cast(least_here, INT64)}
        instance = State(point.term, {**state.places, **places}, indices)
        together = build.block(self.leaf(instance), *(s for a, c in cursors.items() for s in heads[a].step(c)))
        moves = [s for a, c in cursors.items() for s in heads[a].advance(c, here[a])]
        heads_here = [h.here for h in heads.values()]
        together_at = heads_here[0] if len(heads_here) == 2 else least_here
        are_together = build.eq(build.fold_maximum(heads_here[1:] if len(heads_here) == 2 else heads_here), together_at)
        step = If(are_together, together, build.block(self.choose(instance, here), *moves))
        loop = While(build.lt(least, _end(index)), Let(name, least, step))
        first = [s for a, c in cursors.items() for s in heads[a].start(c)]
        return Allocate(tuple(b for h in heads.values() for b in h.registers), build.block(*first, loop))

    def _visit_each(self, depth: int, state: State, lattice: Lattice, cursors: Mapping[Access, Cursor]) -> Stmt:
        """A loop over the stored elements of each operand, one after the other."""
        alone = [p for p in lattice.points if len(p.present) == 1]
        return build.block(*(self._follow(depth, state, p, cursors) for p in alone))

    @staticmethod
    def _advance(cell: Buffer, here: Expr, stop: Expr) -> Stmt:
        if stop == build.add(Load(cell, ()), 1):  # processors add a condition faster than they choose by it
            return Store(cell, (), build.cast(here, INT64), "+")
        return Store(cell, (), build.select(here, stop, Load(cell, ())))

    def _scan(
        self, depth: int, state: State, lattice: Lattice, default: Term, cursors: Mapping[Access, Cursor]
    ) -> Stmt:
        """A loop over all coordinates that the operands accompany."""
        cells = {a: build.register(self.names.fresh(f"{a.tensor}.at")) for a in cursors}
        name = self.names.fresh(self.order[depth])
        value = build.var(name)
        at: dict[Access, Expr] = {}
        bound: list[tuple[str, Expr]] = []
        for a, c in cursors.items():
            here, position = self.names.fresh(f"{a.tensor}.here"), Load(cells[a], ())
            live = build.lt(position, c.stop)
            test = build.and_masks(live, build.eq(c.coordinate(position, live), value))
            assert test is not None
            bound.append((here, test))
            at[a] = build.var(here, test.type.dtype)

        def ends(rest: Sequence[Access], stops: dict[Access, Expr]) -> Stmt:
            if rest:
                a, c = rest[0], cursors[rest[0]]
                position = Load(cells[a], ())
                return run_end(c, position, c.stop, value, self.names, lambda e: ends(rest[1:], {**stops, a: e}))
            plain = self._child(depth, replace(state, term=default), value, {})
            chain: Stmt = plain
            for p in reversed(lattice.points):
                held = {a: self.names.fresh(name_of_position(a)) for a in p.present}
                places = {
                    a: cursors[a].place_at(build.var(n), None if cursors[a].is_unique else stops[a])
                    for a, n in held.items()
                }
                child = self._child(depth, replace(state, term=p.term), value, places)
                for a, n in held.items():
                    child = Let(n, Load(cells[a], ()), child)
                chain = build.when(_all([at[a] for a in p.present]), child, chain)
            moves = [self._advance(cells[a], at[a], stops[a]) for a in at]
            return build.block(chain, *moves)

        body = ends(list(cursors), {})
        for here, test in reversed(bound):
            body = Let(here, test, body)
        start, stop = self.bounds(self.order[depth])
        first = [Store(cells[a], (), c.start) for a, c in cursors.items()]
        return Allocate(tuple(cells.values()), build.block(*first, Loop(name, start, stop, body)))

    # --- inside a loop -------------------------------------------------------------------------------------------

    def _child(self, depth: int, state: State, value: Expr, places: Mapping[Access, Place]) -> Stmt:
        """The body of the loop at `depth` at the coordinate `value`, with the iterators at `places`."""
        name = self.order[depth]
        indices = {**state.indices, name: value}
        for index, block in self.nest.blocks.items():
            if name in (outer(index), inner(index)) and outer(index) in indices and inner(index) in indices:
                indices[index] = build.add(build.mul(indices[outer(index)], block), indices[inner(index)])
        inside = State(state.term, {**state.places, **places}, indices)
        return self._enter(inside, name, lambda s: self.loops(depth + 1, s))

    def _enter(self, state: State, name: str | None, then: Body) -> Stmt:
        """`then` where all occurrences have gone through the levels whose coordinate is known by now."""
        for a in self._live(state.term):
            place = state.places[a]
            step = self._step(a, place)
            if step is None or not (isinstance(step.loop, int) or step.loop in state.indices):
                continue
            value = build.const(step.loop) if isinstance(step.loop, int) else state.indices[step.loop]
            if step.level.is_dense:
                moved = locate(place, self.sizes.value(step.extent), value)
                return self._enter(replace(state, places={**state.places, a: moved}), name, then)
            return self._search(a, step, value, state, name, then)
        return then(state)

    def _search(self, a: Access, step: Step, value: Expr, state: State, name: str | None, then: Body) -> Stmt:
        """`then` with `a` at the stored coordinate `value`, or without it if that is not stored."""
        c = cursor(self.operands[a.tensor], step, state.places[a])
        without = state.term.drop_absent([a])

        def emit_hit(position: Expr) -> Stmt:
            live = build.lt(position, c.stop)
            here = build.and_masks(live, build.eq(c.coordinate(position, live), value))
            assert here is not None

            def enter(end: Expr) -> Stmt:
                place = c.place_at(position, None if c.is_unique else end)
                return self._enter(replace(state, places={**state.places, a: place}), name, then)

            there = run_end(c, position, c.stop, value, self.names, enter)
            otherwise = None if without is None else self._enter(replace(state, term=without), name, then)
            return build.when(here, there, otherwise)

        return first_not_below(c, value, self.names, emit_hit)


def _list_present(point: Point, cursors: Mapping[Access, Cursor]) -> list[Access]:
    return [a for a in cursors if a in point.present]


def _all(conditions: Sequence[Expr]) -> Expr:
    total: Expr | None = None
    for c in conditions:
        total = build.and_masks(total, c)
    return build.TRUE if total is None else total
