"""A problem as a loop program: one kernel or more for each statement, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import CannotLower
from ..loop_ir import build
from ..loop_ir.names import Names
from ..loop_ir.nodes import Allocate, Buffer, Const, Expr, Kernel, Let, Load, Loop, LoopKind, Module, Stmt, Store
from ..loop_ir.vectorize import vectorize
from ..target import Target
from ..tc_lang.bind import identity
from ..tc_lang.formula import Value
from ..tc_lang.function import Access, Index, Role, Statement, Symbol
from .graph import Nest, build_nest
from .levels import flat, sum_run
from .order import order_loops
from .problem import Operand, Problem, Sizes, operand_of
from .values import Translator
from .walk import State, Walker

CHUNK_POSITIONS = 16_384
"""Stored positions, and parents of them, that a chunk of a parallel loop has at least."""
MAX_CHUNKS = 1_024
GRAIN_ELEMENTS = 32_768
"""Elements that a thread fills at least."""


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered problem.

    Attributes:
        module: its kernels; the arguments are `sizes`, then the arrays of each operand in order.
        operands: parameters, results and temporaries; the caller allocates the last two.
        orders: the loops of each statement, outermost first, for people to read.
    """

    module: Module
    operands: tuple[Operand, ...]
    orders: tuple[tuple[str, ...], ...]


def lower(problem: Problem, target: Target) -> Program:
    """Raises CannotLower where a statement is of a kind that is not lowered yet; the message says which."""
    function = problem.function
    operands = {t.name: _operand(t, problem) for t in function.tensors if not t.specialised}
    sizes = Sizes.of(problem)
    lowering = _Lowering(problem, operands, sizes, target)
    kernels: list[Kernel] = []
    orders = []
    for n, s in enumerate(function.statements):
        nest = build_nest(problem, n)
        order = order_loops(nest)
        orders.append(order)
        kernels += lowering.statement(n, s, nest, order)
    arguments = (sizes.buffer, *(b for o in operands.values() for b in o.buffers))
    written = tuple(o.values.name for o in operands.values() if o.role is not Role.INPUT)
    return Program(
        Module(function.name, arguments, (), tuple(kernels), (), written), tuple(operands.values()), tuple(orders)
    )


def _operand(t: Symbol, problem: Problem) -> Operand:
    index = problem.index_type(t.name) if t.is_sparse else None
    return operand_of(t.name, t.dtype, t.role, t.format, index)


@dataclass(frozen=True, slots=True)
class _Lowering:
    """What the statements of a problem share."""

    problem: Problem
    operands: Mapping[str, Operand]
    sizes: Sizes
    target: Target

    def statement(self, number: int, s: Statement, nest: Nest, order: tuple[str, ...]) -> Iterator[Kernel]:
        """The kernels of one statement: it may have to fill its target first."""
        if self.operands[s.target].format is not None and not self._is_dense(s.target):
            raise CannotLower(f"the sparse result '{s.target}' is not assembled yet")
        emitter = _Statement(self, s, nest, order, Names())
        if emitter.fills_first:
            yield Kernel(f"{number}.fill", self._with_sizes(emitter.fill()))
        yield Kernel(f"{number}.walk", self._with_sizes(emitter.walk()))

    def _is_dense(self, name: str) -> bool:
        format = self.operands[name].format
        return format is None or format.is_dense

    def _with_sizes(self, body: Stmt) -> Stmt:
        for name, value in reversed(list(self.sizes.bound())):
            body = Let(name, value, body)
        return body

    def extents(self, tensor: str) -> list[Expr]:
        return [self.sizes.value(x) for x in self._shape(tensor)]

    def _shape(self, tensor: str) -> tuple[Value, ...]:
        return self.problem.ranges.shape(tensor)

    def starts(self, tensor: str) -> list[Expr]:
        return [self.sizes.value(lower) for lower, _ in self.problem.ranges.tensors[tensor]]

    def element(self, tensor: str, subscripts: tuple[Expr, ...]) -> tuple[Buffer, Expr]:
        """The buffer of a dense tensor, and the index in it of an element."""
        operand, extents, starts = self.operands[tensor], self.extents(tensor), self.starts(tensor)
        order = range(len(extents)) if operand.format is None else operand.format.order
        index: Expr = build.const(0)
        for d in order:
            index = build.add(build.mul(index, extents[d]), build.sub(subscripts[d], starts[d]))
        return operand.values, index


@dataclass(frozen=True, slots=True)
class _Statement:
    """One statement with a dense target."""

    shared: _Lowering
    s: Statement
    nest: Nest
    order: tuple[str, ...]
    names: Names

    # --- where the target is initialised -------------------------------------------------------------------------

    @property
    def covered(self) -> int:
        """How many of the outermost loops run over all coordinates of an index of the target, whatever is stored."""
        if not self.is_plain:
            return 0
        for n, name in enumerate(self.order):
            outside = self.order[: n + 1]
            absent = [a for a, p in self.nest.paths.items() if any(step.loop in outside for step in p.iterated)]
            if not self.nest.loops[name].is_free or (absent and self.nest.term.without(absent) is None):
                return n
        return len(self.order)

    @property
    def is_plain(self) -> bool:
        """Whether the target has each of its indices as one subscript."""
        names = [e.name for e in self.s.subscripts if isinstance(e, Index)]
        return len(names) == len(self.s.subscripts) == len(set(names)) and not self.nest.blocks

    @property
    def starts_anew(self) -> bool:
        """Whether the target has no value before the statement."""
        return self.s.reduction is None or self.s.initialise

    @property
    def inside(self) -> tuple[str, ...]:
        """The loops over indices of the target that are inside the covered ones."""
        return tuple(n for n in self.order[self.covered :] if self.nest.loops[n].is_free)

    @property
    def fills_first(self) -> bool:
        """Whether the whole target is initialised before the loops begin: where these do not come to every element."""
        is_complete = self.covered == len(self.order) and self.s.reduction is None
        return self.starts_anew and not is_complete and not self.covered

    @property
    def neutral(self) -> Const:
        dtype = self.shared.operands[self.s.target].values.type.dtype
        value = 0 if self.s.reduction is None else identity(self.s.reduction, dtype)
        return build.const(value, dtype)

    def fill(self) -> Stmt:
        """Every element of the target becomes the identity of the reduction."""
        values = self.shared.operands[self.s.target].values
        total: Expr = build.const(1)
        for extent in self.shared.extents(self.s.target):
            total = build.mul(total, extent)
        lanes = self._lanes
        chunks = build.add(build.div(total, GRAIN_ELEMENTS), 1)
        chunk, i = build.var("chunk"), build.var("i")
        first = build.mul(chunk, GRAIN_ELEMENTS)
        last = build.minimum(build.add(first, GRAIN_ELEMENTS), total)
        store = build.store(values, (i,), self.neutral)
        inner = Loop("i", first, last, store, LoopKind.VECTOR, factor=(lanes, 1))
        return Loop("chunk", build.const(0), chunks, inner, LoopKind.PARALLEL)

    @property
    def _lanes(self) -> int:
        size = self.shared.operands[self.s.target].values.type.dtype.accumulator.size
        return max(1, self.shared.target.vector_bits // 8 // size)

    # --- the loops -----------------------------------------------------------------------------------------------

    def walk(self) -> Stmt:
        """The loops, with the innermost one in vectors where it can be."""
        for lanes in self._widths():
            body = self._walk(lanes)
            try:
                vectorize(body)
            except CannotLower:
                continue
            return body
        return self._walk((1, 1))

    def _widths(self) -> Iterator[tuple[int, int]]:
        lanes = self._lanes
        if self.order and lanes > 1:
            loop = self.nest.loops[self.order[-1]]
            extent = loop.upper - loop.lower
            known = extent if isinstance(extent, int) else extent.value
            copies = 1 if known is None else min(8, max(1, known // lanes))
            if known is None or known >= lanes // 2:
                yield lanes, copies

    def _walk(self, lanes: tuple[int, int]) -> Stmt:
        walker = Walker(
            self.nest, self.order, self.shared.operands, self.shared.sizes, self.names, self._leaf, self._around, lanes
        )
        return _parallel(walker.nest_loops(), self)

    def _around(self, depth: int, state: State, then: object) -> Stmt:
        """Initialise what is below the covered loops, or keep it in a register until it is stored."""
        assert callable(then)
        if depth != self.covered or depth == len(self.order) or self.fills_first or not self.starts_anew:
            if depth == self.covered and depth < len(self.order) and not self.inside and self.is_plain and self._adds:
                return self._in_register(state, then, Load(*self._target(state)))
            found: Stmt = then(state)
            return found
        if self.inside:
            return build.block(self._initial(state), then(state))
        return self._in_register(state, then, self.neutral)

    @property
    def _adds(self) -> bool:
        return self.s.reduction is not None and self.covered > 0

    def _in_register(self, state: State, then: object, start: Expr) -> Stmt:
        """A sum whose element does not change any more: stored once."""
        assert callable(then)
        values, where = self._target(state)
        dtype = values.type.dtype
        total = build.register(f"{self.s.target}.total", dtype.accumulator)
        body: Stmt = then(replace(state, indices={**state.indices, _TOTAL: build.const(0)}))
        first = Store(total, (), build.cast(start, dtype.accumulator))
        last = Store(values, where, build.cast(Load(total, ()), dtype))
        return Allocate((total,), build.block(first, body, last))

    def _initial(self, state: State) -> Stmt:
        """The identity for every element below the covered loops."""
        names = self.inside
        indices = {**state.indices, **{n: build.var(f"{n}.first") for n in names}}
        body: Stmt = Store(*self._target(replace(state, indices=indices)), self.neutral)
        for n, name in enumerate(reversed(names)):
            loop = self.nest.loops[name]
            bounds = (self.shared.sizes.value(loop.lower), self.shared.sizes.value(loop.upper))
            kind = LoopKind.VECTOR if n == 0 and self._widest else LoopKind.SERIAL
            factor = self._widest[0] if kind is LoopKind.VECTOR else (1, 1)
            body = Loop(f"{name}.first", *bounds, body, kind, factor=factor)
        return body

    @property
    def _widest(self) -> list[tuple[int, int]]:
        return [w for w in self._widths() if self.inside and self.inside[-1] == self.order[-1]]

    def _target(self, state: State) -> tuple[Buffer, tuple[Expr, ...]]:
        translator = Translator(state.indices, self.shared.sizes, self._no_read)
        subscripts = tuple(translator.subscript(e) for e in self.s.subscripts)
        values, index = self.shared.element(self.s.target, subscripts)
        return values, (index,)

    @staticmethod
    def _no_read(access: Access, _: tuple[Expr, ...], __: Expr | None) -> Expr:
        raise CannotLower(f"a subscript on the left reads '{access.tensor}'")

    def _leaf(self, state: State) -> Stmt:
        """Combine the value of an instance with its element."""
        runs: dict[Access, Buffer] = {}
        for a, place in state.places.items():
            if place.high is not None and a in state.term.uses:
                name = self.names.fresh(f"{a.tensor}.sum")
                runs[a] = build.register(name, a.dtype.accumulator)

        def read(access: Access, subscripts: tuple[Expr, ...], mask: Expr | None) -> Expr:
            if access in runs:
                return build.cast(Load(runs[access], ()), access.dtype)
            if access in state.places:
                place = state.places[access]
                return build.load(self.shared.operands[access.tensor].values, flat(place.low, place), mask=mask)
            values, index = self.shared.element(access.tensor, subscripts)
            return build.load(values, index, mask=mask)

        value = Translator(state.indices, self.shared.sizes, read).value(state.term.value)
        body: Stmt = self._combine(state, value)
        sums = [sum_run(state.places[a], self.shared.operands[a.tensor].values, r, self.names) for a, r in runs.items()]
        return build.allocate(runs.values(), build.block(*sums, body))

    def _combine(self, state: State, value: Expr) -> Stmt:
        values, where = self._target(state)
        dtype = values.type.dtype
        if _TOTAL in state.indices:
            total = build.register(f"{self.s.target}.total", dtype.accumulator)
            return Store(total, (), build.cast(value, dtype.accumulator), self.s.reduction)
        if self.s.reduction is None:
            return Store(values, where, build.cast(value, dtype))
        if dtype.accumulator != dtype:
            old = build.cast(Load(values, where), dtype.accumulator)
            combined = build.binary(build.combiner(self.s.reduction, dtype), old, value)
            return Store(values, where, build.cast(combined, dtype))
        return Store(values, where, value, self.s.reduction)


_TOTAL = "the element is in a register"
"""Among the indices of a state where the sum is kept in a register."""


def _parallel(body: Stmt, emitter: _Statement) -> Stmt:
    """The outermost loop shared by threads, where its iterations write different elements."""
    if not (isinstance(body, Loop) and body.kind is LoopKind.SERIAL and emitter.covered > 0):
        return body
    chunks = build.minimum(build.maximum(build.div(build.sub(body.stop, body.start), 64), 1), MAX_CHUNKS)
    chunk, extent = build.var("chunk"), build.sub(body.stop, body.start)
    count = build.var("chunks")
    first = build.add(body.start, build.div(build.mul(chunk, extent), count))
    last = build.add(body.start, build.div(build.mul(build.add(chunk, 1), extent), count))
    inner = replace(body, start=first, stop=last)
    return Let("chunks", chunks, Loop("chunk", build.const(0), count, inner, LoopKind.PARALLEL))
