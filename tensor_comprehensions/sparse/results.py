"""Emitters by kind of result: a dense tensor, values with the pattern of an operand, or a list of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..core.dtypes import BOOL, INT64
from ..core.errors import CannotLower
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.nodes import Allocate, Buffer, Expr, If, Let, Load, Loop, LoopKind, Stmt, Store
from ..loop_ir.rewrite import mentions
from ..tc_lang.ir import Access, Index, walk_expr
from ..thresholds import FILL_THREAD_ELEMENTS, JAMMED_ELEMENTS
from .absent_operands import reads
from .chunks import CHUNK
from .emit import StatementEmitter
from .operand_buffers import Collected
from .row_prefetch import count_positions
from .state import Body, Jammed, State

ELEMENT = internal_name("element")
IN_REGISTER = "in a register"
"""The key in `State.indices` that marks a state whose element accumulates in a register."""


@dataclass(frozen=True, slots=True)
class DenseEmitter(StatementEmitter):
    """Emits a statement into a dense tensor, all of whose elements get a value."""

    @property
    def num_complete_outer_loops(self) -> int:
        """The number of outermost loops that are over indices of the target and reach all of their coordinates."""
        if not self._has_distinct_target_indices:
            return 0
        for n, name in enumerate(self.order):
            outside = self.order[: n + 1]
            absent = self._operands_lacking_coordinates(outside)
            if not self.nest.loops[name].is_free or self.nest.term.drop_absent(absent) is None:
                return n
        return len(self.order)

    def _operands_lacking_coordinates(self, loops: Sequence[str]) -> list[Access]:
        """Operands that may lack a coordinate of these loops, or a constant coordinate in their subscripts."""
        paths = self.nest.paths.items()
        return [a for a, p in paths if any(isinstance(x.loop, int) or x.loop in loops for x in p.iterated)]

    @property
    def _has_distinct_target_indices(self) -> bool:
        """Whether the subscripts of the target are distinct plain indices, none of them blocked."""
        names = [e.name for e in self.s.subscripts if isinstance(e, Index)]
        return len(names) == len(self.s.subscripts) == len(set(names)) and not self.nest.blocks

    @property
    def has_undefined_target(self) -> bool:
        """Whether the target has no value before the statement."""
        return self.s.reduction is None or self.s.initialize

    @property
    def inside(self) -> tuple[str, ...]:
        """The loops over indices of the target that are inside the complete ones."""
        return tuple(n for n in self.order[self.num_complete_outer_loops :] if self.nest.loops[n].is_free)

    @property
    def needs_identity_fill(self) -> bool:
        """Whether the whole target is initialized before the loops, because these do not reach every element."""
        covers_all = bool(self.num_complete_outer_loops) or self._is_one_element
        return self.has_undefined_target and not self.has_one_instance and not covers_all

    @property
    def _is_one_element(self) -> bool:
        """Whether the target is a single element that is combined in a register and always stored.

        It is not stored if an operand lacks a constant coordinate of its subscripts, and the term is then void.
        """
        is_entered = self.nest.term.drop_absent(self._operands_lacking_coordinates(())) is not None
        return bool(self.order) and not self.s.subscripts and is_entered

    @property
    def has_one_instance(self) -> bool:
        """Whether each element is written by exactly one instance of the statement."""
        if not self.has_undefined_target or self.num_complete_outer_loops < len(self.order):
            return False
        searched = self._operands_lacking_coordinates(())
        return self._has_distinct_target_indices and self.nest.term.drop_absent(searched) is not None

    def kernels(self) -> Iterator[tuple[str, Stmt]]:
        if self.needs_identity_fill:
            yield "fill", self.fill()
        body = self.walk()
        yield (
            "walk",
            self.parallelize_outer_loop(body)
            if self.num_complete_outer_loops or self._has_disjoint_outer_writes
            else body,
        )

    @property
    def _has_disjoint_outer_writes(self) -> bool:
        """Whether different iterations of the outermost loop write different elements."""
        first = self.order[0] if self.order else ""
        steps = [step for p in self.nest.paths.values() for step in p.iterated if step.loop == first]
        return self._has_distinct_target_indices and first in self.inside and all(step.level.unique for step in steps)

    def fill(self) -> Stmt:
        """Set every element of the target to the identity of the reduction."""
        return fill_in_vectors(self.values, self.num_elements, self.neutral, self.lanes)

    @property
    def num_elements(self) -> Expr:
        """The number of elements of the target."""
        total: Expr = build.const(1)
        for extent in self.shared.extents(self.s.target):
            total = build.mul(total, extent)
        return total

    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        """Initialize the elements inside the complete loops, or accumulate an element in a register."""
        if depth != self.num_complete_outer_loops or depth == len(self.order) or self.needs_identity_fill:
            return then(state)
        if self.inside:
            return build.block(self._emit_identity(state), then(state)) if self.has_undefined_target else then(state)
        return self._in_register(state, then)

    def _in_register(self, state: State, then: Body) -> Stmt:
        """Accumulate an element in a register inside the reduced loops, and store it once."""
        values, where = self._place(state)
        total = self.total()
        start = self.neutral if self.has_undefined_target else Load(values, where)
        first = Store(total, (), build.cast(start, total.type.dtype))
        last = Store(values, where, build.cast(Load(total, ()), values.type.dtype))
        return Allocate((total,), build.block(first, then(with_register_sum(state)), last))

    def _emit_identity(self, state: State) -> Stmt:
        """Store the identity to every element inside the complete loops."""
        names = self.inside
        indices = {**state.indices, **{n: build.var(f"{n}.first") for n in names}}
        store = Store(*self._place(replace(state, indices=indices)), self.neutral)
        body: Stmt = store
        depends = any(mentions(i, {f"{names[-1]}.first"}) for i in store.indices)  # not below a dimension of extent 0
        widths = list(self.vectorization_candidates()) if names[-1] == self.order[-1] and depends else []
        for n, name in enumerate(reversed(names)):
            loop = self.nest.loops[name]
            bounds = (self.shared.sizes.value(loop.lower), self.shared.sizes.value(loop.upper))
            kind = LoopKind.VECTOR if n == 0 and widths else LoopKind.SERIAL
            factor = widths[0] if kind is LoopKind.VECTOR else (1, 1)
            body = Loop(f"{name}.first", *bounds, body, kind, vector_factors=factor)
        return body

    def _place(self, state: State) -> tuple[Buffer, tuple[Expr, ...]]:
        values, index = self.shared.element(self.s.target, self.subscripts(state))
        return values, (index,)

    def combine(self, state: State, value: Expr) -> Stmt:
        if IN_REGISTER in state.indices:
            return add_to(self.total(), value, self.s.reduction)
        return update_element(*self._place(state), value, None if self.has_one_instance else self.s.reduction)


@dataclass(frozen=True, slots=True)
class SharedEmitter(StatementEmitter):
    """Emits a statement into the values of a tensor with the pattern of an operand; the memory holds zeros."""

    def kernels(self) -> Iterator[tuple[str, Stmt]]:
        if self.final_depth is None and self.s.reduction != "+":
            raise CannotLower(f"'{self.s.reduction}=' into '{self.s.target}' in another order than it is stored")
        if self.needs_zeros:
            zero = build.const(0, self.values.type.dtype)
            yield "clear", fill_in_vectors(self.values, self.num_places, zero, self.lanes)
        body = self.walk()
        yield (
            "walk",
            self.parallelize_outer_loop(body) if self.order and self.nest.loops[self.order[0]].is_free else body,
        )

    @property
    def stores_by_position(self) -> bool:
        first = self.s.reduction is None or self.s.initialize
        return self.final_depth == len(self.order) and first and not (self.nest.blocks or self._dense_dims)

    @property
    def needs_zeros(self) -> bool:
        """Whether the statement redefines the target and skips elements that an earlier statement may have written."""
        statements = self.shared.problem.function.statements
        is_first = next(s for s in statements if s.target == self.s.target) is self.s
        return not is_first and (self.s.reduction is None or self.s.initialize) and not self.writes_every_place

    @property
    def num_places(self) -> Expr:
        """The number of values of the target."""
        a, extents = self.operand_access, self.shared.extents(self.s.target)
        path = self.nest.paths[a]
        total = count_positions(path, self.shared.operands[a.tensor], self.shared.sizes, len(path.steps))
        for d in self._dense_dims:
            total = build.mul(total, extents[d])
        return total

    @property
    def writes_every_place(self) -> bool:
        """Whether the statement overwrites every stored element of the target."""
        nest = self.nest
        in_order = self.final_depth is not None and not nest.blocks
        if not in_order or not (self.s.reduction is None or self.s.initialize):
            return False
        others = [a for a in nest.paths if a != self.operand_access]
        is_whole = not any(loop.window for loop in nest.loops.values())
        all_indices = all(isinstance(e, Index) for e in self.s.subscripts)
        return is_whole and all_indices and nest.term.drop_absent(others) is not None

    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        if depth != self.final_depth or depth == len(self.order):
            return then(state)
        return self._sum_in_registers([state], lambda states: then(states[0]))

    def _sum_in_registers(self, states: Sequence[State], then: Callable[[Sequence[State]], Stmt]) -> Stmt:
        """Emit `then`, which sums the elements at `states` in registers, with the code before and after it."""
        totals = [self.total(n) for n in range(len(states))]
        places = [self._place(state) for state in states]
        firsts, lasts = [], []
        for total, where in zip(totals, places, strict=True):
            start = self.neutral if self.s.reduction is None or self.s.initialize else Load(*where)
            firsts.append(Store(total, (), build.cast(start, total.type.dtype)))
            lasts.append(Store(*where, build.cast(Load(total, ()), self.values.type.dtype)))
        inside = [with_register_sum(self.enter_reduction(state), n) for n, state in enumerate(states)]
        return Allocate(tuple(totals), build.block(*firsts, then(inside), *lasts))

    @property
    def jam(self) -> Jammed | None:
        """For a sum over a dense index at each stored element of a single operand, with a row that elements share."""
        inner, outer = self.order[-1:], self.order[:-1]
        if self.final_depth != len(outer) or not inner or not outer or len(self.nest.paths) > 1 or self.nest.blocks:
            return None
        if any(step.loop in inner for path in self.nest.paths.values() for step in path.iterated):
            return None
        used = [{e.name for s in a.subscripts for e in walk_expr(s) if isinstance(e, Index)} for a in self._dense_reads]
        shares_rows = any(inner[0] in names and outer[-1] not in names for names in used)
        return Jammed(JAMMED_ELEMENTS, self._sum_in_registers) if shares_rows else None

    @property
    def _dense_reads(self) -> list[Access]:
        return [a for a in reads(self.nest.term.value) if self.nest.term.pattern_access(a) not in self.nest.paths]

    @property
    def operand_access(self) -> Access:
        """The access of the operand whose pattern the target has."""
        assert self.nest.own is not None
        return self.nest.own

    @property
    def _dense_dims(self) -> tuple[int, ...]:
        """The dimensions of the target that the operand lacks."""
        return self.shared.dense_dims(self.s.target)

    def _place(self, state: State) -> tuple[Buffer, tuple[Expr, ...]]:
        place = state.places[self.operand_access]
        return self.values, (self.shared.stored_position(self.s.target, place, self.subscripts(state)),)

    def combine(self, state: State, value: Expr) -> Stmt:
        if (number := state.indices.get(IN_REGISTER)) is not None:
            return add_to(self.total(build.integer(number) or 0), value, self.s.reduction)
        only = self.final_depth == len(self.order) and (self.s.reduction is None or self.s.initialize)
        return update_element(*self._place(state), value, None if only else self.s.reduction)


def writes_every_place(emitter: StatementEmitter) -> bool:
    """Whether a statement overwrites every stored element of a target with the pattern of an operand."""
    return isinstance(emitter, SharedEmitter) and emitter.writes_every_place


@dataclass(frozen=True, slots=True)
class CollectedEmitter(StatementEmitter):
    """Emits a result as a list of coordinates and values, counted first; the caller sorts it and combines duplicates.

    counts: whether this pass only counts.
    """

    result: Collected
    totals: Buffer
    number: int
    counts: bool = False

    def kernels(self) -> Iterator[tuple[str, Stmt]]:
        yield "count", self.count()
        yield "collect", self.collect()

    @property
    def values(self) -> Buffer:
        return self.result.values

    def count(self) -> Stmt:
        """Write the number of elements to `totals`."""
        emitter = replace(self, counts=True)
        last = Store(self.totals, (build.const(self.number),), Load(COUNT, ()))
        return Allocate((COUNT,), build.block(Store(COUNT, (), build.const(0)), emitter.walk(), last))

    def collect(self) -> Stmt:
        """Write the elements to the list."""
        return Allocate((COUNT,), build.block(Store(COUNT, (), build.const(0)), self.walk()))

    def vectorization_candidates(self) -> Iterator[tuple[int, int]]:
        """None: elements come one at a time because each moves the end of the list."""
        yield from ()

    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        """Accumulate the reduced loops in a register, and record whether there was any term.

        A sum over dense operands only is stored if it is not 0.
        """
        if depth != self.final_depth or depth == len(self.order):
            return then(state)
        total, found = self.total(), build.register(f"{self.s.target}.found", BOOL)
        held = build.TRUE if self.nest.keeps_places else build.FALSE
        first = (Store(total, (), build.cast(self.neutral, total.type.dtype)), Store(found, (), held))
        append = self._append(state, build.cast(Load(total, ()), self.values.type.dtype))
        wanted: Expr = Load(found, ())
        if not (self.nest.paths or self.nest.keeps_places):
            wanted = build.ne(Load(total, ()), build.const(0, total.type.dtype))
        return Allocate(
            (total, found),
            build.block(*first, then(with_register_sum(self.enter_reduction(state))), If(wanted, append)),
        )

    def combine(self, state: State, value: Expr) -> Stmt:
        if IN_REGISTER in state.indices:
            found = Store(build.register(f"{self.s.target}.found", BOOL), (), build.TRUE)
            return build.block(add_to(self.total(), value, self.s.reduction), found)
        if self.nest.paths or self.nest.keeps_places:
            return self._append(state, build.cast(value, self.values.type.dtype))
        name = self.names.fresh("value")
        held = build.var(name, value.type.dtype)
        append = self._append(state, build.cast(held, self.values.type.dtype))
        return Let(name, value, If(build.ne(held, build.const(0, value.type.dtype)), append))

    def _append(self, state: State, value: Expr) -> Stmt:
        end = Load(COUNT, ())
        move = Store(COUNT, (), build.const(1), "+")
        if self.counts:
            return move
        places = [
            Store(crd, (end,), build.sub(subscript, start))
            for crd, subscript, start in zip(self.result.coordinates, self.subscripts(state), self.starts, strict=True)
        ]
        return build.block(*places, Store(self.values, (end,), value), move)


COUNT = build.register(internal_name("count"), INT64)
"""The number of elements that a pass has counted or written so far."""


def fill_in_vectors(values: Buffer, total: Expr, value: Expr, lanes: int) -> Stmt:
    """Set all `total` elements of `values` to `value`."""
    chunk, i = build.var(CHUNK), build.var(ELEMENT)
    first = build.mul(chunk, FILL_THREAD_ELEMENTS)
    last = build.minimum(build.add(first, FILL_THREAD_ELEMENTS), total)
    inner = Loop(ELEMENT, first, last, build.store(values, (i,), value), LoopKind.VECTOR, vector_factors=(lanes, 1))
    chunks = build.add(build.div(total, FILL_THREAD_ELEMENTS), 1)
    return Loop(CHUNK, build.const(0), chunks, inner, LoopKind.PARALLEL)


def with_register_sum(state: State, number: int = 0) -> State:
    """The state with the mark that an element accumulates in a register, the one with this number."""
    return replace(state, indices={**state.indices, IN_REGISTER: build.const(number)})


def add_to(total: Buffer, value: Expr, reduction: str | None) -> Stmt:
    """Combine a value with a register."""
    return Store(total, (), build.cast(value, total.type.dtype), reduction)


def update_element(values: Buffer, where: tuple[Expr, ...], value: Expr, reduction: str | None) -> Stmt:
    """Set `values[where]` to `value`, or combine both by `reduction`; 16-bit floats are combined in float32."""
    dtype = values.type.dtype
    if reduction is None:
        return Store(values, where, build.cast(value, dtype))
    if dtype.accumulator == dtype:
        return Store(values, where, value, reduction)
    old = build.cast(Load(values, where), dtype.accumulator)
    return Store(values, where, build.cast(build.binary(build.combiner(reduction, dtype), old, value), dtype))
