"""The common parts of the kernels of all statements: reading operands and computing the value of an instance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..core.errors import CannotLower
from ..loop_ir import build, linear_forms
from ..loop_ir.names import Names
from ..loop_ir.nodes import Buffer, Const, Expr, Load, Stmt
from ..loop_ir.passes.vectorize import vectorize_loops
from ..options import SparseOptions
from ..target import CpuTarget
from ..tc_lang.binding.bind import neutral_element
from ..tc_lang.ir import Access, Index, Statement, operands_of
from ..tc_lang.ir import Expr as TcExpr
from .absent_operands import reads
from .chunks import parallelize_outer_loop
from .coiteration import CoiterationEmitter
from .expr_translator import Translator
from .graph import Nest
from .levels import Place, flat_position, sum_run
from .operand_buffers import Sizes, SparseOperand
from .row_prefetch import RowPrefetcher
from .shared_sparsity import list_dense_dims
from .sparse_problem import SparseProblem
from .state import Appended, Body, Jammed, State

GATHERED_BYTES = {4, 8}
"""Sizes of the elements that gather instructions load."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared context of the statements of a problem."""

    problem: SparseProblem
    operands: Mapping[str, SparseOperand]
    sizes: Sizes
    target: CpuTarget

    def extents(self, tensor: str) -> list[Expr]:
        """The extents of a tensor's dimensions."""
        return [self.sizes.value(x) for x in self.problem.ranges.shape(tensor)]

    def dense_dims(self, tensor: str) -> tuple[int, ...]:
        """The dimensions of `tensor` that the operand whose pattern it shares lacks; () if it shares none."""
        source = dict(self.problem.shared).get(tensor)
        return () if source is None else list_dense_dims(self.problem.function, tensor, source)

    def stored_position(self, tensor: str, place: Place, subscripts: tuple[Expr, ...]) -> Expr:
        """The index among the values of `tensor` of the element at `place` of the operand whose pattern it shares."""
        index = flat_position(place.low, place)
        if dims := self.dense_dims(tensor):
            extents, ranges = self.extents(tensor), self.problem.ranges.tensors[tensor]
            for d in dims:
                offset = build.sub(subscripts[d], self.sizes.value(ranges[d][0]))
                index = build.add(build.mul(index, extents[d]), offset)
        return index

    def element(self, tensor: str, subscripts: tuple[Expr, ...]) -> tuple[Buffer, Expr]:
        """The buffer of a dense tensor, and the index of an element in it."""
        operand, extents = self.operands[tensor], self.extents(tensor)
        starts = [self.sizes.value(lower) for lower, _ in self.problem.ranges.tensors[tensor]]
        order = range(len(extents)) if operand.format is None else operand.format.order
        index: Expr = build.const(0)
        for d in order:
            index = build.add(build.mul(index, extents[d]), build.sub(subscripts[d], starts[d]))
        return operand.values, index


@dataclass(frozen=True, slots=True)
class StatementEmitter(ABC):
    """Emits the kernels of one statement. part: bounds of the outermost loop, instead of those of its index."""

    shared: Shared
    nest: Nest
    order: tuple[str, ...]
    names: Names = field(default_factory=Names, kw_only=True)
    part: tuple[Expr, Expr] | None = field(default=None, kw_only=True)

    @property
    def s(self) -> Statement:
        return self.nest.statement

    @property
    def options(self) -> SparseOptions:
        """The options of the problem."""
        return self.shared.problem.options

    @property
    def values(self) -> Buffer:
        """The values of the target."""
        return self.shared.operands[self.s.target].values

    @property
    def starts(self) -> list[Expr]:
        """The least index of each dimension of the target, which is stored as coordinate 0."""
        return [self.shared.sizes.value(lower) for lower, _ in self.shared.problem.ranges.tensors[self.s.target]]

    @property
    def neutral(self) -> Const:
        """The identity of the reduction; 0 for `=`."""
        dtype = self.values.type.dtype
        return build.const(0 if self.s.reduction is None else neutral_element(self.s.reduction, dtype), dtype)

    @property
    def final_depth(self) -> int | None:
        """The loop depth at which the written element is known and only reduced loops remain; None if there is none."""
        free = [n for n, name in enumerate(self.order) if self.nest.loops[name].is_free]
        depth = len(free)
        return depth if free == list(range(depth)) else None

    @abstractmethod
    def kernels(self) -> Iterator[tuple[str, Stmt]]:
        """The kernels in order, each as a name and a body."""

    @abstractmethod
    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        """Emit `then`, which makes the loops from `depth` on, with the code before and after them."""

    @abstractmethod
    def combine(self, state: State, value: Expr) -> Stmt:
        """Combine the value of an instance with the result."""

    # --- the loops -----------------------------------------------------------------------------------------------

    def walk(self) -> Stmt:
        """The loops, with the innermost one vectorized if possible."""
        for lanes in self.vectorization_candidates():
            body = self._loops(lanes)
            try:
                vectorize_loops(body)
            except CannotLower:
                continue
            return body
        return self._loops((1, 1))

    def _loops(self, lanes: tuple[int, int]) -> Stmt:
        common = self.shared
        distance = self.options.prefetch_distance
        ahead = RowPrefetcher(
            self.nest, self.order, common.operands, common.sizes, common.element, distance, self.reads_values
        )
        walker = CoiterationEmitter(
            self.nest, self.order, common.operands, common.sizes, self.names,
            self.leaf, self.wrap_loops, self.choose, lanes, ahead if distance else None, self.gathers,
            self.is_unordered, self.copies, self.options.branchless_merge, self.append_run, self.part,
            self.jam if lanes[0] > 1 else None,
        )  # fmt: skip
        return walker.nest_loops()

    @property
    def is_unordered(self) -> bool:
        """Whether coordinates of the result may come in any order and repeatedly."""
        return False

    @property
    def copies(self) -> int:
        """Stored positions per iteration of the innermost loop."""
        return 1

    @property
    def append_run(self) -> Appended | None:
        """A function that emits adjacent elements of the result at once; None if that is not possible."""
        return None

    @property
    def jam(self) -> Jammed | None:
        """How to compute the sums of several stored elements in one loop; None if that is not possible."""
        return None

    @property
    def reads_values(self) -> bool:
        """Whether the loops read values, and do not only count stored elements."""
        return True

    @property
    def gathers(self) -> bool:
        """Whether to vectorize an innermost loop over stored positions.

        So are sums and stores by position if no load needs a gather, and other sums if gathers are fast.
        """
        if not self.order:
            return False
        is_sum = not self.nest.loops[self.order[-1]].is_free
        sizes = {a.dtype.size for a in reads(self.nest.term.value)}
        in_lanes = is_sum or self.stores_by_position
        return in_lanes and (self.reads_by_position or (is_sum and self.gathers_fast and sizes <= GATHERED_BYTES))

    @property
    def stores_by_position(self) -> bool:
        """Whether an innermost loop over stored positions only stores one value at each of these positions."""
        return False

    @property
    def reads_by_position(self) -> bool:
        """Whether the value depends on the innermost coordinate only through the position of one operand."""
        inner = self.order[-1]
        walked = [p for p in self.nest.paths.values() if any(step.loop == inner for step in p.iterated)]
        return len(walked) == 1 and not self._mentions(self.nest.term.value, inner)

    def _mentions(self, e: TcExpr, loop: str) -> bool:
        """Whether `e` depends on `loop` other than through positions of operands."""
        if isinstance(e, Index):
            return e.name == loop
        if isinstance(e, Access) and self.nest.term.pattern_access(e) in self.nest.paths:
            return any(self._mentions(e.subscripts[d], loop) for d in self.shared.dense_dims(e.tensor))
        return any(self._mentions(x, loop) for x in operands_of(e))

    @property
    def gathers_fast(self) -> bool:
        """Whether to use gather instructions."""
        wanted = self.options.gather
        return wanted == "always" or (wanted == "auto" and self.shared.target.has_fast_gather)

    def parallelize_outer_loop(self, body: Stmt) -> Stmt:
        """The loops `body` with the outermost one split among threads."""
        size = self.options.chunk_positions
        return (
            parallelize_outer_loop(body, self.nest, self.order, self.shared.operands, self.names, size)
            if size
            else body
        )

    def vectorization_candidates(self) -> Iterator[tuple[int, int]]:
        """Pairs of lanes and interleaved vectors to try for the innermost loop."""
        lanes = self.lanes
        if not self.order or lanes == 1:
            return
        loop, sizes = self.nest.loops[self.order[-1]], self.shared.sizes
        known = linear_forms.difference(sizes.value(loop.upper), sizes.value(loop.lower))
        if known is None:
            yield lanes, 1
        elif known >= lanes // 2:
            yield lanes, min(self.options.max_vectors, max(1, known // lanes))

    @property
    def lanes(self) -> int:
        """The number of elements of a vector."""
        return max(1, self.shared.target.vector_bits // 8 // self.values.type.dtype.accumulator.size)

    def leaf(self, state: State) -> Stmt:
        """Compute the value of an instance and combine it with its element."""
        runs: dict[Access, Buffer] = {}
        for a, place in state.places.items():
            if place.high is not None and a in state.term.uses:
                runs[a] = build.register(self.names.fresh(f"{a.tensor}.sum"), a.dtype.accumulator)
        sums = [sum_run(state.places[a], self.shared.operands[a.tensor].values, r, self.names) for a, r in runs.items()]
        return build.allocate(runs.values(), build.block(*sums, self.combine(state, self.value(state, runs))))

    def value(self, state: State, runs: Mapping[Access, Buffer]) -> Expr:
        """The value of an instance. runs: registers that hold the sums of repeated coordinates of operands."""

        def read(access: Access, subscripts: tuple[Expr, ...], mask: Expr | None) -> Expr:
            if access in runs:
                return build.cast(Load(runs[access], ()), access.dtype)
            place = state.places.get(state.term.pattern_access(access))
            if place is not None:
                position = self.shared.stored_position(access.tensor, place, subscripts)
                return build.load(self.shared.operands[access.tensor].values, position, mask=mask)
            values, index = self.shared.element(access.tensor, subscripts)
            return build.load(values, index, mask=mask)

        return Translator(state.indices, self.shared.sizes, read).value(state.term.value)

    def choose(self, state: State, here: Mapping[Access, Expr]) -> Stmt:
        """The same as `leaf`, with 0 for the operands whose condition in `here` does not hold."""

        def read(access: Access, subscripts: tuple[Expr, ...], mask: Expr | None) -> Expr:
            if access not in here:
                values, index = self.shared.element(access.tensor, subscripts)
                return build.load(values, index, mask=mask)
            place = state.places[access]
            present = build.and_masks(mask, here[access])  # a masked load is 0 elsewhere
            return build.load(self.shared.operands[access.tensor].values, flat_position(place.low, place), mask=present)

        value = Translator(state.indices, self.shared.sizes, read).value(state.term.value)
        return self.combine(state, value)

    def subscripts(self, state: State) -> tuple[Expr, ...]:
        """The subscripts of the target."""
        translator = Translator(state.indices, self.shared.sizes, _refuse_read)
        return tuple(translator.subscript(e) for e in self.s.subscripts)

    def enter_reduction(self, state: State) -> State:
        """The state inside the reduced loops, where the identity of the reduction contributes nothing."""
        return replace(state, term=replace(state.term, void=self.nest.identity)) if self.nest.keeps_places else state

    def total(self, number: int = 0) -> Buffer:
        """The register that accumulates the reduction of one element, the one with this number of those at once."""
        name = f"{self.s.target}.total.{number}" if number else f"{self.s.target}.total"
        return build.register(name, self.values.type.dtype.accumulator)


def _refuse_read(access: Access, _: tuple[Expr, ...], __: Expr | None) -> Expr:
    raise CannotLower(f"a subscript on the left reads '{access.tensor}'")
