"""Emit the loops of a nest: operands are traversed index by index, and merged if they share one (TACO, section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations

from ..core.dtypes import INT64
from ..loop_ir import build
from ..loop_ir.names import Names
from ..loop_ir.nodes import Allocate, Buffer, Expr, Let, Load, Loop, LoopKind, Stmt, Store, Var, While
from ..loop_ir.rewrite import walk_expr
from ..tc_lang.ir import Access
from .absent_operands import Term, is_additive, is_proportional
from .graph import Nest, Step, inner_block_loop, outer_block_loop
from .lattice import Lattice, Point, build_lattice
from .levels import ROOT, Cursor, Place, cursor, first_not_below, locate, name_of_position, run_end
from .operand_buffers import Sizes, SparseOperand
from .row_prefetch import RowPrefetcher
from .state import Appended, Body, Chosen, Jammed, State
from .union_merge import UnionMerge

MAX_POINTS = 7
"""Maximum lattice points of an index that get separate loops: a sum of three operands has this many."""


@dataclass(frozen=True, slots=True)
class CoiterationEmitter:
    """Emits the loops of one nest.

    leaf: emits each instance that is not void. wrap_loops: adds the code around the loop at a depth.
    choose: the same as `leaf` without a branch, if operands may be absent.
    lanes: the lanes, and the number of interleaved vectors, of a vectorized innermost loop. ahead: prefetches rows.
    gathers: whether to vectorize an innermost loop over stored positions. is_unordered: whether the coordinates of
    added operands may come in any order and repeatedly. copies: the unroll factor of an innermost loop over stored
    positions. branchless: whether sums at one index are computed without branches on which operands are present.
    append_run: appends adjacent elements at once. part: bounds of the outermost loop, instead of those of its index.
    jam: how to compute the sums of several stored elements in one loop; None computes them one by one.
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
    append_run: Appended | None = None
    part: tuple[Expr, Expr] | None = None
    jam: Jammed | None = None

    def nest_loops(self) -> Stmt:
        """All loops of the nest."""
        state = State(self.nest.term, dict.fromkeys(self.nest.paths, ROOT))
        return self._enter(state, None, lambda s: self.loops(0, s))

    def loops(self, depth: int, state: State) -> Stmt:
        """The loops of the order from `depth` on."""
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
                return self._scan(depth, state, lattice, cursors)
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
        if self._is_in_parts(name):
            assert self.part is not None
            return self.part
        loop = self.nest.loops[name]
        return self.sizes.value(loop.lower), self.sizes.value(loop.upper)

    def _is_in_parts(self, name: str) -> bool:
        return self.part is not None and name == self.order[0]

    def emit_dense_loop(self, depth: int, state: State, term: Term, bounds: tuple[Expr, Expr] | None = None) -> Stmt:
        """A loop over all coordinates."""
        name = self.names.fresh(self.order[depth])
        body = self._child(depth, replace(state, term=term), build.var(name), {})
        start, stop = self.bounds(self.order[depth]) if bounds is None else bounds
        if depth + 1 == len(self.order) and self.lanes[0] > 1:
            return Loop(name, start, stop, body, LoopKind.VECTOR, vector_factors=self.lanes)
        if self.ahead is not None and bounds is None:
            last = build.sub(stop, 1)
            hints = self.ahead.fetch_rows_ahead(depth, build.var(name), last, term, state.indices)
            body = build.block(hints, body)
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
        """Emit `then` with a cursor for each iterator, clipped to the loop's range if that is not a whole dimension."""
        if len(found) == len(iterators):
            return then(found)
        a = iterators[len(found)]
        step = self._step(a, state.places[a])
        assert step is not None
        plain = cursor(self.operands[a.tensor], step, state.places[a])

        def with_bounds(start: Expr, stop: Expr) -> Stmt:
            c = replace(plain, start=start, stop=stop)
            return self._cursors(iterators, state, name, {**found, a: c}, then)

        if self.nest.loops[name].window or self._is_in_parts(name):
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
        """Emit `then` with `value`, bound to a name if it loads from memory, so that it is computed once."""
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
        if self.jam is not None and depth + 2 == len(self.order):
            return self._jam_sums(
                self.jam, depth, replace(state, term=point.term), a, c, Loop(name, c.start, c.stop, body)
            )
        return Loop(name, c.start, c.stop, body)

    def _jam_sums(self, jam: Jammed, depth: int, state: State, a: Access, c: Cursor, single: Loop) -> Stmt:
        """A loop over several positions of `c` at a time, with one inner loop, and `single` for the remaining ones."""
        first, middle = (self.names.fresh(f"{single.var}.{what}") for what in ("first", "middle"))
        numbers = range(jam.count)
        positions = [self.names.fresh(name_of_position(a)) for _ in numbers]
        coordinates = [self.names.fresh(self.order[depth]) for _ in numbers]

        def enter(states: tuple[State, ...]) -> Stmt:
            n = len(states)
            if n == jam.count:
                return jam.wrap(states, sum_over_inner)
            place = {a: c.place_at(build.var(positions[n]))}
            return self._child(depth, state, build.var(coordinates[n]), place, lambda s: enter((*states, s)))

        def sum_over_inner(states: Sequence[State]) -> Stmt:
            name = self.names.fresh(self.order[depth + 1])
            terms = (self._child(depth + 1, s, build.var(name), {}) for s in states)
            vectors = (self.lanes[0], max(1, self.lanes[1] // jam.count))
            return Loop(
                name, *self.bounds(self.order[-1]), build.block(*terms), LoopKind.VECTOR, vector_factors=vectors
            )

        body = enter(())
        for n in reversed(numbers):
            if self.ahead is not None:
                indices = {**state.indices, self.order[depth]: build.var(coordinates[n])}
                position = build.var(positions[n])
                hints = self.ahead.fetch_ahead(depth, a, c, position, state.term, state.places, indices)
                body = build.block(hints, body)
            body = Let(coordinates[n], c.coordinate(build.var(positions[n])), body)
            body = Let(positions[n], build.add(build.var(first), n), body)
        left = build.mod(build.sub(c.stop, c.start), jam.count)
        main = Loop(first, c.start, build.var(middle), body, step=jam.count)
        return Let(middle, build.sub(c.stop, left), build.block(main, replace(single, start=build.var(middle))))

    def _repeat(self, name: str, c: Cursor, body: Stmt) -> Stmt:
        """A loop over the positions of `c`, unrolled by `copies`, and a loop over the remaining positions."""
        middle, first, copy = (self.names.fresh(f"{name}.{what}") for what in ("middle", "first", "copy"))
        left = build.mod(build.sub(c.stop, c.start), self.copies)
        one = Let(name, build.add(build.var(first), build.var(copy)), body)
        trip = Loop(copy, build.const(0), build.const(self.copies), one, LoopKind.UNROLLED)
        main = Loop(first, c.start, build.var(middle), trip, step=self.copies)
        return Let(middle, build.sub(c.stop, left), build.block(main, Loop(name, build.var(middle), c.stop, body)))

    def _is_alone(self, a: Access, depth: int) -> bool:
        """Whether the elements below repeated coordinates of `a` may be visited one by one.

        They may not if another operand must be merged with them further inside. Elements that are stored several times
        must be added first, unless they are factors in a sum, which adds their products anyway.
        """
        inside = set(self.order[depth + 1 :])
        others = (s.loop for b, p in self.nest.paths.items() if b != a for s in p.iterated)
        own = {s.loop for s in self.nest.paths[a].steps}
        is_once = self.nest.paths[a].format.is_unique or self._is_factor_of_sum(a, self.order[depth])
        return is_once and not any(n in inside and n in own for n in others)

    def _is_factor_of_sum(self, a: Access, name: str) -> bool:
        """Whether the statement sums a value that is proportional to `a` over the loop `name`."""
        is_sum = self.nest.statement.reduction == "+" and not self.nest.loops[name].is_free
        return is_sum and a.dtype.is_float and is_proportional(self.nest.term.value, a)

    def _merge(self, depth: int, state: State, lattice: Lattice, cursors: Mapping[Access, Cursor]) -> Stmt:
        """Merge by one `While` per lattice point, which runs as long as all operands of the point have coordinates.

        Sums of the present operands use faster forms.
        """
        if self._is_union(depth, state, lattice, cursors):
            if self.is_unordered:
                return self._visit_each(depth, state, lattice, cursors)
            if self.branchless:
                union = UnionMerge(self.order[depth], self.names, self.leaf, self.choose, self.append_run)
                return union.merge(state, lattice.points[0].term, cursors)
        if len(lattice.points) > MAX_POINTS:
            return self._merge_at_once(depth, state, lattice, cursors)
        cells = {a: build.register(self.names.fresh(f"{a.tensor}.at")) for a in cursors}
        parts: list[Stmt] = [Store(cells[a], (), c.start) for a, c in cursors.items()]
        for point in lattice.points:
            here = _list_present(point, cursors)
            if len(here) == 1 and cursors[here[0]].is_unique:
                parts.append(self._rest(depth, state, point, cursors[here[0]], cells[here[0]]))
                continue
            live = [build.lt(Load(cells[a], ()), cursors[a].stop) for a in here]
            parts.append(While(_and_conditions(live), self._merge_step(depth, state, lattice, point, cursors, cells)))
        return Allocate(tuple(cells.values()), build.block(*parts))

    def _rest(self, depth: int, state: State, point: Point, c: Cursor, cell: Buffer) -> Stmt:
        """A loop over the remaining stored elements of one operand after the others have ended."""
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
        """The body of a merge at one coordinate, which is the least current coordinate of the point's operands."""
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
        """Emit the case of the first of `points` whose operands are all at the coordinate, and advance the operands."""
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
            condition = _and_conditions([at[a] for a in p.present if a in at])
            needs_test = chain is not None or p.present != frozenset(at) or len(at) > 1
            chain = build.when(condition, child, chain) if needs_test else child
        return build.block(*([chain] if chain is not None else []), *moves)

    def _is_union(self, depth: int, state: State, lattice: Lattice, cursors: Mapping[Access, Cursor]) -> bool:
        """Whether the innermost loop computes a sum of those operands that are present, at least one of them."""
        if depth + 1 < len(self.order) or not all(c.is_unique for c in cursors.values()):
            return False
        term, paths = lattice.points[0].term, self.nest.paths
        alone = {next(iter(p.present)) for p in lattice.points if len(p.present) == 1}
        complete = all(state.places[a].depth + 1 == len(paths[a].steps) for a in cursors)
        others = [a for a in self._live(term) if a not in cursors]
        plain = not term.exists and not term.aliases and not others
        return alone == set(cursors) and complete and plain and is_additive(term.value, set(cursors))

    def _visit_each(self, depth: int, state: State, lattice: Lattice, cursors: Mapping[Access, Cursor]) -> Stmt:
        """A separate loop over the stored elements of each operand."""
        alone = [p for p in lattice.points if len(p.present) == 1]
        return build.block(*(self._follow(depth, state, p, cursors) for p in alone))

    @staticmethod
    def _advance(cell: Buffer, here: Expr, stop: Expr) -> Stmt:
        if stop == build.add(Load(cell, ()), 1):  # adding a condition is faster than a select
            return Store(cell, (), build.cast(here, INT64), "+")
        return Store(cell, (), build.select(here, stop, Load(cell, ())))

    def _scan(self, depth: int, state: State, lattice: Lattice, cursors: Mapping[Access, Cursor]) -> Stmt:
        """A loop over all coordinates, along which the operands advance."""
        cells = {a: build.register(self.names.fresh(f"{a.tensor}.at")) for a in cursors}
        name = self.names.fresh(self.order[depth])
        body = self._compare(depth, state, lattice, build.var(name), cursors, cells)
        start, stop = self.bounds(self.order[depth])
        first = [Store(cells[a], (), c.start) for a, c in cursors.items()]
        return Allocate(tuple(cells.values()), build.block(*first, Loop(name, start, stop, body)))

    def _merge_at_once(self, depth: int, state: State, lattice: Lattice, cursors: Mapping[Access, Cursor]) -> Stmt:
        """Merge by one `While` for all points: a loop per point would contain bodies for most pairs of points."""
        cells = {a: build.register(self.names.fresh(f"{a.tensor}.at")) for a in cursors}
        name, end = self.names.fresh(self.order[depth]), build.const(2**63 - 1)
        live = {a: build.lt(Load(cells[a], ()), c.stop) for a, c in cursors.items()}
        coordinates = [
            build.select(live[a], c.coordinate(Load(cells[a], ()), live[a]), end) for a, c in cursors.items()
        ]
        step = self._compare(depth, state, lattice, build.var(name), cursors, cells)
        loop = While(reduce(build.logical_or, live.values()), Let(name, build.fold_minimum(coordinates), step))
        first = [Store(cells[a], (), c.start) for a, c in cursors.items()]
        return Allocate(tuple(cells.values()), build.block(*first, loop))

    def _compare(
        self,
        depth: int,
        state: State,
        lattice: Lattice,
        value: Expr,
        cursors: Mapping[Access, Cursor],
        cells: Mapping[Access, Buffer],
    ) -> Stmt:
        """Compute the case of the operands that store the coordinate `value`, then advance these."""
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
            found = {
                a: c.place_at(build.var(self.names.fresh(name_of_position(a))), None if c.is_unique else stops[a])
                for a, c in cursors.items()
            }
            body = self._choose_case(depth, state, lattice, value, at, found)
            for a, place in found.items():
                assert isinstance(place.low, Var)
                body = Let(place.low.name, Load(cells[a], ()), body)
            return build.block(body, *(self._advance(cells[a], at[a], stops[a]) for a in at))

        body = ends(list(cursors), {})
        for here, test in reversed(bound):
            body = Let(here, test, body)
        return body

    def _choose_case(
        self,
        depth: int,
        state: State,
        lattice: Lattice,
        value: Expr,
        at: Mapping[Access, Expr],
        found: Mapping[Access, Place],
    ) -> Stmt:
        """Branch to the child for the operands that are present.

        With many points, there is no branch on operands that have more levels inside. If such an operand is absent, its
        range in the same child is empty. So the number of children does not multiply from loop to loop.
        """
        inside = set(self.order[depth + 1 :])
        many = len(lattice.points) > MAX_POINTS
        later = [a for a in found if many and any(s.loop in inside for s in self._iterated_below(a, found[a]))]
        maybe = {a: replace(found[a], present=at[a]) for a in later}
        cases = [(p.present, p.term) for p in lattice.points]
        cases += [(frozenset(), lattice.default)] if lattice.default is not None else []
        if later:
            cases = list(_list_cases(state.term, [a for a in found if a not in later]))
        chain: Stmt | None = None
        for present, term in reversed(cases):
            places = {**maybe, **{a: found[a] for a in found if a in present}}
            child = self._child(depth, replace(state, term=term), value, places)
            chain = (
                build.when(_and_conditions([at[a] for a in found if a in present]), child, chain) if present else child
            )
        return build.NOTHING if chain is None else chain

    def _iterated_below(self, a: Access, place: Place) -> list[Step]:
        return [s for s in self.nest.paths[a].steps[place.depth :] if not s.level.is_dense]

    # --- inside a loop -------------------------------------------------------------------------------------------

    def _child(
        self, depth: int, state: State, value: Expr, places: Mapping[Access, Place], then: Body | None = None
    ) -> Stmt:
        """The body of the loop at `depth` for the coordinate `value`, with the iterators at `places`.

        then: emits the body; None stands for the loops from the next depth on.
        """
        name = self.order[depth]
        indices = {**state.indices, name: value}
        for index, block in self.nest.blocks.items():
            if (
                name in (outer_block_loop(index), inner_block_loop(index))
                and outer_block_loop(index) in indices
                and inner_block_loop(index) in indices
            ):
                indices[index] = build.add(
                    build.mul(indices[outer_block_loop(index)], block), indices[inner_block_loop(index)]
                )
        inside = State(state.term, {**state.places, **places}, indices)
        return self._enter(inside, name, then or (lambda s: self.loops(depth + 1, s)))

    def _enter(self, state: State, name: str | None, then: Body) -> Stmt:
        """Emit `then` after all occurrences have descended through the levels whose coordinate is already known."""
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
        """Search for the coordinate `value` in `a`, and emit `then` with `a` there or, if it is not stored, absent."""
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


def _list_cases(term: Term, operands: Sequence[Access]) -> Iterator[tuple[frozenset[Access], Term]]:
    """Yield each set of operands that may be present with `term` without the others, unless that is void."""
    for count in range(len(operands), -1, -1):
        for chosen in combinations(operands, count):
            left = term.drop_absent([a for a in operands if a not in chosen])
            if left is not None:
                yield frozenset(chosen), left


def _and_conditions(conditions: Sequence[Expr]) -> Expr:
    total: Expr | None = None
    for c in conditions:
        total = build.and_masks(total, c)
    return build.TRUE if total is None else total
