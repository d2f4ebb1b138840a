"""Lower a sparse problem to a loop program, statement by statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..core.dtypes import INT32, INT64
from ..core.errors import CannotLower
from ..loop_ir.nodes import Buffer, Kernel, Let, Module, Stmt
from ..loop_ir.origins import with_origin
from ..target import CpuTarget
from ..tc_lang.formats import Format, can_store_any_pattern
from ..tc_lang.ir import Function, Role, Symbol
from .assemble import AssemblingEmitter
from .call_plan import AssembledLevels, CallPlan, Conversion, PlannedOperand, PlannedResult, Version
from .convert import insert_conversions
from .emit import Shared, StatementEmitter
from .graph import Nest, build_nest, is_ordered, needs_row_workspace
from .operand_buffers import (
    Assembled,
    Collected,
    Sizes,
    SparseOperand,
    assembled_of,
    declare_collected_list,
    operand_of,
    totals_buffer,
)
from .order import choose_order
from .refill import RefillEmitter, can_refill
from .results import CollectedEmitter, DenseEmitter, SharedEmitter, writes_every_place
from .sparse_problem import SparseProblem


@dataclass(frozen=True, slots=True)
class Result:
    """A sparse result that the caller allocates.

    phase: the phase before which it is allocated. first: the index of its first count in `totals`.
    """

    arrays: Assembled | Collected
    phase: int
    first: int

    @property
    def plan(self) -> PlannedResult:
        """The description of the result for the caller."""
        x = self.arrays
        place = (x.statement, x.tensor, self.phase, self.first, len(x.buffers))
        if isinstance(x, Collected):
            return PlannedResult(*place, None, x.is_sorted)
        return PlannedResult(*place, AssembledLevels(x.format, x.index, x.bound, x.counts_rows, x.is_known))


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered problem.

    Attributes:
        phases: modules to run in order, with the same arguments: `sizes`, `totals`, the arrays of the operands in
            order, and those of the sparse results.
        operands: parameters, results and temporaries. The caller allocates results and temporaries, with zeros if they
            share a sparsity pattern.
        conversions: operands that the caller converts from others.
        versions: operands that the caller makes from sparse results, each with the phase before which it does so.
        results: the results to allocate between phases, with sizes from `totals`.
        slots: the number of counts in `totals`.
        orders: the loops of each statement, outermost first, for reports.
        unfilled: tensors with a shared pattern that need no zeros, since the first statement writes each element.
    """

    problem: SparseProblem
    phases: tuple[Module, ...]
    operands: tuple[SparseOperand, ...]
    conversions: tuple[Conversion, ...]
    results: tuple[Result, ...]
    slots: int
    orders: tuple[tuple[str, ...], ...]
    versions: tuple[tuple[int, Version], ...] = ()
    unfilled: tuple[str, ...] = ()

    @property
    def call_plan(self) -> CallPlan:
        """The plan by which a caller runs the phases."""
        counting = (n for n, m in enumerate(self.phases) if all(k.name.endswith(".count") for k in m.kernels))
        operands = (PlannedOperand(o.name, o.role, bool(o.crd), len(o.buffers) - 1) for o in self.operands)
        return CallPlan(
            self.problem, tuple(operands), self.conversions, self.versions, tuple(r.plan for r in self.results),
            self.unfilled, len(self.phases), tuple(counting), self.slots,
        )  # fmt: skip


def lower(problem: SparseProblem, target: CpuTarget) -> Program:
    """Lower a problem for a CPU.

    Raises:
        CannotLower: a statement is of an unsupported kind; the message says which.
    """
    problem, conversions, versions = insert_conversions(problem)
    function, shared = problem.function, dict(problem.shared)
    operands = {t.name: make_operand(t, problem, shared) for t in function.tensors if not t.is_compile_time}
    common = Shared(problem, operands, Sizes.of(problem), target)
    nests = [build_nest(problem, n) for n in range(len(function.statements))]
    orders = [choose_order(nest, result_format(nest, problem), problem.options) for nest in nests]
    arrays = [_result_arrays(problem, *x) for x in zip(range(len(nests)), nests, orders, strict=True)]
    slots = sum(_count_slots(x) for x in arrays)
    totals = totals_buffer(slots)
    phases: list[list[Kernel]] = [[]]
    results: list[Result] = []
    first = 0
    complete: list[tuple[int, Version]] = []
    unfilled: list[str] = []
    for number, (nest, order, held) in enumerate(zip(nests, orders, arrays, strict=True)):
        emitter: StatementEmitter
        if ready := [v for v in versions if v.statement == number]:
            phases.append([])  # starts a phase after all earlier statements
            complete += [(len(phases) - 1, v) for v in ready]
        match held:
            case Assembled(is_known=True):
                emitter = RefillEmitter(common, nest, order, held)
            case Assembled():
                emitter = AssemblingEmitter(common, nest, order, held, totals, first)
            case Collected():
                emitter = CollectedEmitter(common, nest, order, held, totals, first)
            case None:
                emitter = _make_emitter(common, nest, order, shared)
        if number == first_definition(function, nest.statement.target) and writes_every_place(emitter):
            unfilled.append(nest.statement.target)
        origin = (nest.statement.name,)
        kernels = [
            Kernel(f"{number}.{what}", bind_size_names(with_origin(body, origin), common))
            for what, body in emitter.kernels()
        ]
        if held is not None:
            if len(kernels) > 1:  # the first one counts the elements that the second one writes
                phases[-1].append(kernels.pop(0))
                phases.append([])
            results.append(Result(held, len(phases) - 1, first))
            first += _count_slots(held)
        phases[-1] += kernels
    buffers = (b for r in results for b in r.arrays.buffers)
    arguments = (common.sizes.buffer, totals, *(b for o in operands.values() for b in o.buffers), *buffers)
    written = _list_outputs(tuple(operands.values()), results, totals)
    modules = tuple(
        Module(f"{function.name}.{n}", arguments, (), tuple(kernels), (), written) for n, kernels in enumerate(phases)
    )
    return Program(
        problem, modules, tuple(operands.values()), conversions, tuple(results), slots, tuple(orders), tuple(complete),
        tuple(unfilled),
    )  # fmt: skip


def gains_from_staging(problem: SparseProblem) -> bool:
    """Whether threads can share the rows of a result by writing them to a staging buffer."""
    converted, _, _ = insert_conversions(problem)
    for number in range(len(converted.function.statements)):
        nest = build_nest(converted, number)
        order = choose_order(nest, result_format(nest, converted), problem.options)
        arrays = _result_arrays(converted, number, nest, order)
        if isinstance(arrays, Assembled) and arrays.stages_rows:
            return True
    return False


def gains_from_refilling(problem: SparseProblem) -> bool:
    """Whether the values of a result can be computed faster if its sparsity pattern is already known."""
    converted, _, _ = insert_conversions(problem)
    nests = [build_nest(converted, n) for n in range(len(converted.function.statements))]
    formats = [result_format(nest, converted) for nest in nests]
    return any(
        f is not None and can_refill(nest, choose_order(nest, f, problem.options), f)
        for nest, f in zip(nests, formats, strict=True)
    )


def needs_row_workspaces(problem: SparseProblem) -> bool:
    """Whether rows of a result are combined in a workspace."""
    converted, _, _ = insert_conversions(problem)
    nests = [build_nest(converted, n) for n in range(len(converted.function.statements))]
    formats = [result_format(nest, converted) for nest in nests]
    return any(
        f is not None and needs_row_workspace(nest, choose_order(nest, f, problem.options), f)
        for nest, f in zip(nests, formats, strict=True)
    )


def result_format(nest: Nest, problem: SparseProblem) -> Format | None:
    """The format of a sparse target with its own levels; None if the target is dense or shares a pattern."""
    target = problem.function.tensor(nest.statement.target)
    return target.format if target.is_sparse and target.name not in dict(problem.shared) else None


def _result_arrays(
    problem: SparseProblem, number: int, nest: Nest, order: tuple[str, ...]
) -> Assembled | Collected | None:
    """The arrays that the caller allocates for the result of a statement, or None."""
    function, format = problem.function, result_format(nest, problem)
    if format is None:
        return None
    target = function.tensor(nest.statement.target)
    definitions = [n for n, x in enumerate(function.statements) if x.target == target.name]
    adds_dense = not nest.paths and not all(x.is_free for x in nest.loops.values())  # stores its final nonzeros
    repeats_tails = format.depth < len(format.levels) and not all(level.unique for level in format.levels)
    is_plain = can_store_any_pattern(format) and not repeats_tails
    if len(definitions) == 1 and is_ordered(nest, order, format) and not adds_dense and is_plain:
        index = INT64 if any(t == INT64 for _, t in problem.index_types) else INT32
        if problem.refills and can_refill(nest, order, format):
            return replace(assembled_of(number, target, index, (), False), is_known=True)
        bound, has_rows = _find_bounding_operands(nest, format), _has_rows(nest, order, format)
        arrays = assembled_of(number, target, index, bound, not bound and has_rows)
        stages = problem.threads > 1 and problem.options.chunk_positions > 0 and bool(bound) and has_rows
        return replace(arrays, stages_rows=stages and _have_rows(function, bound))
    return collect_result(function, number)


def collect_result(function: Function, number: int, *, by_threads: bool = False) -> Collected:
    """The list for the elements that a statement contributes to a sparse result. Several statements may contribute.

    Raises:
        CannotLower: the result is defined earlier, and this statement does not add to it by `+=`.
    """
    s = function.statements[number]
    if number != first_definition(function, s.target) and (s.reduction != "+" or s.initialize):
        raise CannotLower(f"a second definition of the sparse '{s.target}' with another operator than +=")
    return declare_collected_list(number, function.tensor(s.target), by_threads=by_threads)


def _find_bounding_operands(nest: Nest, format: Format) -> tuple[str, ...]:
    """Operands that together store an element wherever the result does; empty if that is not certain."""
    loops = set(nest.loops)
    whole = [a.tensor for a, p in nest.paths.items() if {s.loop for s in p.steps} == loops]
    certain = len(whole) == len(nest.paths) and all(x.is_free for x in nest.loops.values()) and whole
    if not certain or format.depth < len(format.levels) or nest.term.drop_absent(tuple(nest.paths)) is not None:
        return ()
    return tuple(whole)


def _has_rows(nest: Nest, order: tuple[str, ...], format: Format) -> bool:
    """Whether the outermost loop runs over all rows of a CSR-like result, so that threads can share them."""
    iterated = any(step.loop == order[0] for p in nest.paths.values() for step in p.iterated)
    return format.word == "ds" and not iterated and not nest.loops[order[0]].window


def _have_rows(function: Function, operands: tuple[str, ...]) -> bool:
    """Whether each operand is stored row by row, with one level of columns."""
    formats = (function.tensor(name).format for name in operands)
    return all(f is not None and f.word == "ds" for f in formats)


def first_definition(function: Function, target: str) -> int:
    """The index of the first statement that writes `target`."""
    return next(n for n, s in enumerate(function.statements) if s.target == target)


def _count_slots(x: Assembled | Collected | None) -> int:
    return 0 if x is None else 1 if isinstance(x, Collected) else x.format.depth


def make_operand(t: Symbol, problem: SparseProblem, shared: Mapping[str, str]) -> SparseOperand:
    """The arrays of a tensor. One that shares the pattern of another, or is not an input, has only values."""
    own = t.is_sparse and t.role is Role.INPUT and t.name not in shared
    return operand_of(t.name, t.dtype, t.role, t.format, problem.index_type(t.name) if own else None)


def _make_emitter(common: Shared, nest: Nest, order: tuple[str, ...], shared: Mapping[str, str]) -> StatementEmitter:
    if nest.statement.target in shared:
        return SharedEmitter(common, nest, order)
    return DenseEmitter(common, nest, order)


def bind_size_names(body: Stmt, common: Shared) -> Stmt:
    """`body` inside bindings of all sizes."""
    for name, value in reversed(list(common.sizes.list_variables())):
        body = Let(name, value, body)
    return body


def _list_outputs(operands: tuple[SparseOperand, ...], results: list[Result], totals: Buffer) -> tuple[str, ...]:
    dense = (o.values.name for o in operands if o.role is not Role.INPUT)
    return (totals.name, *dense, *(b.name for r in results for b in r.arrays.written_buffers))
