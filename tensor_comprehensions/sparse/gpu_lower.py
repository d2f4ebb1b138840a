"""Lower a sparse problem to kernels for a GPU.

A statement whose result is dense, or has the sparsity pattern of an operand, becomes one kernel. Another kernel before
it fills the result if the loops do not reach every element. All loops over the result are outside, so that each element
belongs to one team of threads and needs no atomic operations.

A result with its own sparsity pattern is collected: one kernel counts the elements of each thread, the caller computes
the prefix sum of the counts, and another kernel writes the elements of each thread after those of earlier threads. The
caller sorts them if necessary and combines duplicates (the expansion, sorting and compression of Dalton, Olson and
Bell, TOMS 2015).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..core.dtypes import BOOL
from ..core.errors import CannotLower
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.cross_thread_reduction import CrossThreadSum, combine_across_threads
from ..loop_ir.nodes import Allocate, Expr, If, Kernel, Let, Load, Loop, Module, Stmt, Store
from ..loop_ir.origins import with_origin
from ..target import CpuTarget, GpuTarget
from ..tc_lang.formats import Format
from ..tc_lang.ir import Index
from ..thresholds import GPU_SPARSE_BLOCK_THREADS
from .call_plan import Version
from .convert import insert_conversions
from .emit import Shared, StatementEmitter
from .gpu_mapping import (
    Teams,
    count_blocks,
    distribute_in_order,
    distribute_in_uniform_rounds,
    distribute_loops_over_lanes,
    distribute_over_teams,
    split_outer_loops,
)
from .graph import Nest, build_nest, is_ordered, needs_row_workspace
from .lower import Program, Result, bind_size_names, collect_result, make_operand, result_format
from .operand_buffers import Collected, Sizes, totals_buffer
from .order import choose_order
from .results import COUNT, ELEMENT, CollectedEmitter, DenseEmitter, SharedEmitter, update_element, with_register_sum
from .sparse_problem import SparseProblem
from .state import Body, State

LEADS = internal_name("leads")
COUNTS = "count"
"""The role of a kernel that counts elements, after which the caller allocates memory for them."""
SHUFFLED_BYTES = {4, 8}
"""Sizes of the elements that warp shuffles exchange."""


@dataclass(frozen=True, slots=True)
class GpuMapping:
    """The mapping of a kernel to threads, for reports.

    name: the kernel. loops: the loops whose instances are distributed over `teams`. shared: the loop whose iterations
    the lanes of a team share, or "".
    """

    name: str
    teams: Teams
    loops: tuple[str, ...]
    shared: str


@dataclass(frozen=True, slots=True)
class GpuProgram:
    """A lowered problem, with the mapping of each of its kernels."""

    program: Program
    mappings: tuple[GpuMapping, ...]

    @property
    def module(self) -> Module:
        """The kernels of all phases."""
        first, *others = self.program.phases
        return replace(first, kernels=(*first.kernels, *(k for m in others for k in m.kernels)))

    @property
    def num_threads(self) -> int:
        """The number of threads that count or write elements of collected results."""
        return max((m.teams.count for m in self.mappings if m.name.endswith(COUNTS)), default=0)


def lower_for_gpu(problem: SparseProblem, target: GpuTarget, host: CpuTarget) -> GpuProgram:
    """Lower a problem whose `lanes` are set.

    Raises:
        CannotLower: a statement is of a kind that cannot run on a GPU; the message says which.
    """
    serial = replace(problem.options, prefetch_distance=0, gather="never", chunk_positions=0)
    problem, conversions, versions = insert_conversions(replace(problem, options=serial))
    function = problem.function
    operands = {
        t.name: make_operand(t, problem, dict(problem.shared)) for t in function.tensors if not t.is_compile_time
    }
    common = Shared(problem, operands, Sizes.of(problem), host)
    phases: list[list[Kernel]] = [[]]
    results: list[Result] = []
    complete: list[tuple[int, Version]] = []
    mappings: list[GpuMapping] = []
    orders: list[tuple[str, ...]] = []
    for number in range(len(function.statements)):
        nest = build_nest(problem, number)
        own = result_format(nest, problem)
        order = choose_order(nest, own, problem.options, free_first=own is None)
        orders.append(order)
        if ready := [v for v in versions if v.statement == number]:
            phases.append([])
            complete += [(len(phases) - 1, v) for v in ready]
        held = None
        if own is None:
            _check_subscripts(nest)
        else:
            held = replace(collect_result(function, number, by_threads=True), is_sorted=_is_sorted(nest, order, own))
            results.append(Result(held, len(phases), 0))
        for what, body, teams, loops, sharing in _lower_statement_kernels(
            common, nest, order, held, count_blocks(target)
        ):
            name = f"{function.name}.{number}.{what}"
            bound = bind_size_names(with_origin(body, (nest.statement.name,)), common)
            phases[-1].append(Kernel(name, bound, teams.launch))
            mappings.append(GpuMapping(name, teams, loops, sharing))
            if what == COUNTS:
                phases.append([])
    buffers = tuple(b for r in results for b in r.arrays.buffers)
    arguments = (common.sizes.buffer, totals_buffer(0), *(b for o in operands.values() for b in o.buffers), *buffers)
    targets = {s.target for s in function.statements} - {r.arrays.tensor for r in results}
    written = (*(o.values.name for o in operands.values() if o.name in targets), *(b.name for b in buffers))
    modules = tuple(Module(function.name, arguments, (), tuple(kernels), (), written) for kernels in phases)
    program = Program(
        problem, modules, tuple(operands.values()), conversions, tuple(results), 0, tuple(orders), tuple(complete)
    )
    return GpuProgram(program, tuple(mappings))


def _is_sorted(nest: Nest, order: tuple[str, ...], format: Format) -> bool:
    """Whether threads, in order, produce each element of a result once and in storage order."""
    return is_ordered(nest, order, format) and not needs_row_workspace(nest, order, format)


def _check_subscripts(nest: Nest) -> None:
    s = nest.statement
    names = [e.name for e in s.subscripts if isinstance(e, Index)]
    if len(set(names)) < len(s.subscripts) and not _is_single(nest):
        raise CannotLower(f"the subscripts of '{s.target}' on the left are not distinct indices")


def _is_single(nest: Nest) -> bool:
    """Whether a statement writes one element: no loop is over its target."""
    return not nest.free


Parts = tuple[str, Stmt, Teams, tuple[str, ...], str]


def _lower_statement_kernels(
    common: Shared, nest: Nest, order: tuple[str, ...], held: Collected | None, blocks: int
) -> Iterator[Parts]:
    """The kernels of a statement: role, body, teams, the loops that the teams share, and the loop that lanes share."""
    emitter: GpuDenseEmitter | GpuSharedEmitter
    if held is not None:
        yield from _collect(GpuCollectedEmitter(common, nest, order, held, totals_buffer(0), 0), Teams(blocks, 1))
        return
    if nest.statement.target in dict(common.problem.shared):
        emitter = GpuSharedEmitter(common, nest, order)
        if emitter.needs_zeros:
            zero = build.const(0, emitter.values.type.dtype)
            yield _fill(emitter, emitter.num_places, zero, blocks)
    else:
        emitter = GpuDenseEmitter(common, nest, order)
        if emitter.needs_identity_fill:
            yield _fill(emitter, emitter.num_elements, emitter.neutral, blocks)
        if (summed := _share_sums(emitter, blocks)) is not None:
            yield summed
            return
    outer = split_outer_loops(emitter.walk())
    if not outer.loops and nest.free:
        teams = Teams(blocks, 1)
        yield "walk", _walk_parts(emitter, teams), teams, order[:1], ""
        return
    teams = Teams(blocks, common.problem.lanes if outer.is_row else 1)
    row = order[len(outer.loops)] if outer.is_row else ""
    yield "walk", distribute_over_teams(outer, teams, emitter.names), teams, order[: len(outer.loops)], row


def _collect(emitter: GpuCollectedEmitter, teams: Teams) -> Iterator[Parts]:
    """The kernel that counts the elements and the one that writes them."""
    for what, one in ((COUNTS, replace(emitter, counts=True)), ("collect", emitter)):
        yield what, one.in_order(teams), teams, emitter.order[:1], ""


def _walk_parts(emitter: StatementEmitter, teams: Teams) -> Stmt:
    """The loops for one part of the outermost index per thread; each thread searches the operands for its start."""
    loop, sizes, names = emitter.nest.loops[emitter.order[0]], emitter.shared.sizes, emitter.names
    lower, upper = sizes.value(loop.lower), sizes.value(loop.upper)
    extent, bounds = build.maximum(build.sub(upper, lower), 0), [names.fresh(internal_name(n)) for n in ("from", "to")]
    first, last = map(build.var, bounds)
    body = replace(emitter, part=(first, last)).walk()
    for name, number in zip(bounds, (teams.number, teams.next), strict=True):
        body = Let(name, build.add(lower, build.div(build.mul(number, extent), teams.count)), body)
    return body


def _fill(emitter: StatementEmitter, total: Expr, value: Expr, blocks: int) -> Parts:
    """The kernel that sets all `total` elements of the target to `value`."""
    teams = Teams(blocks, 1)
    loop = Loop(ELEMENT, build.const(0), total, build.store(emitter.values, (build.var(ELEMENT),), value))
    body = distribute_over_teams(split_outer_loops(loop), teams, emitter.names)
    return "fill", body, teams, ("every element",), ""


def _share_sums(emitter: GpuDenseEmitter, blocks: int) -> Parts | None:
    """The kernel of a statement whose sums the lanes of a team share; None if one thread must compute each sum."""
    nest, order = emitter.nest, emitter.order
    on_paths = {step.loop for p in nest.paths.values() for step in p.steps}
    dtype = emitter.total().type.dtype
    is_summed = emitter.final_depth not in (None, len(order)) and all(n in on_paths for n in nest.free)
    if not is_summed or dtype.is_bool or dtype.size not in SHUFFLED_BYTES:
        return None
    teams = Teams(blocks, emitter.shared.problem.lanes) if nest.free else Teams(1, GPU_SPARSE_BLOCK_THREADS)
    sharing = replace(emitter, teams=teams)
    try:
        outer = split_outer_loops(sharing.walk())
    except CannotLower:
        return None
    if (nest.free and not outer.loops) or not (
        isinstance(outer.rest, Allocate) and sharing.total() in outer.rest.buffers
    ):
        return None  # not all lanes reach the shuffles
    loops = order[: len(outer.loops)] or ("the one element",)
    return "walk", distribute_in_uniform_rounds(outer, teams, sharing.names, LEADS), teams, loops, order[len(nest.free)]


@dataclass(frozen=True, slots=True)
class _InThreads(StatementEmitter):
    """An emitter without vector loops: a GPU forms vectors from threads."""

    def vectorization_candidates(self) -> Iterator[tuple[int, int]]:
        yield from ()

    @property
    def lanes(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class GpuDenseEmitter(_InThreads, DenseEmitter):
    """Emits a statement into a dense tensor; the loops inside the last index of the target sum in a register.

    teams: the teams whose lanes share these loops and combine their registers; None: one thread runs them all.
    """

    teams: Teams | None = None

    @property
    def needs_identity_fill(self) -> bool:
        depth = self.final_depth
        if depth is None or depth > self.num_complete_outer_loops:
            return self.has_undefined_target and not self.has_one_instance
        searched = self._operands_lacking_coordinates(self.order[:depth])
        return self.has_undefined_target and not self.has_one_instance and self.nest.term.drop_absent(searched) is None

    def wrap_loops(self, depth: int, state: State, then: Body) -> Stmt:
        if depth != self.final_depth or depth == len(self.order):
            return then(state)
        values, where = self._place(state)
        total = self.total()
        first = Store(total, (), build.cast(self.neutral, total.type.dtype))
        sums, teams = then(with_register_sum(state)), self.teams
        is_first = self.has_undefined_target and not self.needs_identity_fill
        last = update_element(values, where, Load(total, ()), None if is_first else self.s.reduction)
        if teams is None:
            return Allocate((total,), build.block(first, sums, last))
        shares = distribute_loops_over_lanes(sums, teams)
        parts = CrossThreadSum(total, self.s.reduction or "+", f"{self.s.target}.total")
        combined = combine_across_threads((parts,), teams.launch, frozenset((0,)), again=True)
        body = build.block(first, shares, combined.body, If(build.var(LEADS, BOOL), last))
        return build.allocate((total, *combined.shared), body)


@dataclass(frozen=True, slots=True)
class GpuSharedEmitter(_InThreads, SharedEmitter):
    """Emits a statement into the values of a tensor with the pattern of an operand; the memory holds zeros."""


@dataclass(frozen=True, slots=True)
class GpuCollectedEmitter(_InThreads, CollectedEmitter):
    """Emits a result as a list of elements: those of each thread after those of earlier threads."""

    def in_order(self, teams: Teams) -> Stmt:
        """The loops that count or write the elements of each thread."""
        starts = self.result.starts
        assert starts is not None
        outer = split_outer_loops(self.walk())
        walk = distribute_in_order(outer, teams, self.names) if outer.loops else _walk_parts(self, teams)
        if self.counts:
            first: Expr = build.const(0)
            last = Store(starts, (teams.next,), Load(COUNT, ()))
            return Allocate((COUNT,), build.block(Store(COUNT, (), first), walk, last))
        first = build.load(starts, teams.number)
        return Allocate((COUNT,), build.block(Store(COUNT, (), first), walk))
