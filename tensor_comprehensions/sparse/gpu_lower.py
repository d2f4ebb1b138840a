"""A problem as kernels for a GPU: those whose results are dense, or beside the stored places of an operand.

Every statement is one kernel, after one that fills its result where the loops do not come to every element. All loops
over the result are outside, so that each element has one team of threads, and no two of them meet in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..core.dtypes import BOOL
from ..core.errors import CannotLower
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.cross_thread_reduction import CrossThreadSum, combine_across_threads
from ..loop_ir.nodes import Allocate, Expr, If, Kernel, Load, Loop, Module, Stmt, Store
from ..loop_ir.origins import with_origin
from ..target import CpuTarget, GpuTarget
from ..tc_lang.formats import Format
from ..tc_lang.ir import Index
from .convert import insert_conversions
from .emit import Shared, StatementEmitter
from .gpu_mapping import (
    THREADS,
    Teams,
    count_blocks,
    distribute_in_uniform_rounds,
    distribute_loops_over_lanes,
    distribute_over_teams,
    split_outer_loops,
)
from .graph import Nest, build_nest
from .lower import Program, bind_size_names, make_operand, result_format
from .order import choose_order
from .results import ELEMENT, DenseEmitter, SharedEmitter, update_element, with_register_sum
from .sparse_problem import Sizes, SparseProblem, totals_buffer
from .state import Body, State

LEADS = internal_name("leads")
SHUFFLED_BYTES = {4, 8}
"""The elements that lanes exchange."""


@dataclass(frozen=True, slots=True)
class GpuMapping:
    """The mapping of a kernel to threads, for people to read.

    name: of the kernel. loops: the loops whose instances the teams share, of so many lanes, which share `shared`.
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
        (module,) = self.program.phases
        return module


def lower_for_gpu(problem: SparseProblem, target: GpuTarget, host: CpuTarget) -> GpuProgram:
    """The kernels of a problem whose `lanes` are set.

    Raises:
        CannotLower: a statement has another kind of result, or no loop for threads to share; the message says which.
    """
    serial = replace(problem.options, prefetch_distance=0, gather="never", chunk_positions=0)
    problem, conversions, versions = insert_conversions(replace(problem, options=serial))
    function, shared = problem.function, dict(problem.shared)
    operands = {t.name: make_operand(t, problem, shared) for t in function.tensors if not t.is_compile_time}
    common = Shared(problem, operands, Sizes.of(problem), host)
    kernels: list[Kernel] = []
    mappings: list[GpuMapping] = []
    orders: list[tuple[str, ...]] = []
    for number in range(len(function.statements)):
        nest = build_nest(problem, number)
        _check_result(nest, problem)
        order = choose_order(nest, None, problem.options, free_first=True)
        orders.append(order)
        for what, body, teams, loops, sharing in _kernels(common, nest, order, shared, count_blocks(target)):
            name = f"{function.name}.{number}.{what}"
            kernels.append(
                Kernel(name, bind_size_names(with_origin(body, (nest.statement.name,)), common), teams.launch)
            )
            mappings.append(GpuMapping(name, teams, loops, sharing))
    if versions:
        raise CannotLower("a statement reads a sparse result that has stored places of its own")
    totals = totals_buffer(0)
    arguments = (common.sizes.buffer, totals, *(b for o in operands.values() for b in o.buffers))
    written = tuple(o.values.name for o in operands.values() if o.name in {s.target for s in function.statements})
    module = Module(function.name, arguments, (), tuple(kernels), (), written)
    program = Program(problem, (module,), tuple(operands.values()), conversions, (), 0, tuple(orders))
    return GpuProgram(program, tuple(mappings))


def _check_result(nest: Nest, problem: SparseProblem) -> None:
    s = nest.statement
    own: Format | None = result_format(nest, problem)
    if own is not None:
        raise CannotLower(
            f"'{s.target}' has stored places of its own: on GPUs results are dense, or have the places of an operand"
        )
    names = [e.name for e in s.subscripts if isinstance(e, Index)]
    if len(set(names)) < len(s.subscripts) and not _is_single(nest):
        raise CannotLower(f"the subscripts of '{s.target}' on the left are not distinct indices")


def _is_single(nest: Nest) -> bool:
    """Whether a statement writes one element: no loop is over its target."""
    return not nest.free


Parts = tuple[str, Stmt, Teams, tuple[str, ...], str]


def _kernels(
    common: Shared, nest: Nest, order: tuple[str, ...], shared: Mapping[str, str], blocks: int
) -> Iterator[Parts]:
    """The kernels of a statement: role, body, teams, and the loops that the teams and their lanes share."""
    emitter: GpuDenseEmitter | GpuSharedEmitter
    if nest.statement.target in shared:
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
        raise CannotLower(
            f"the outermost loop of '{nest.statement.target}', over {order[0]}, merges operands or searches one, so "
            "that threads cannot share it"
        )
    teams = Teams(blocks, common.problem.lanes if outer.is_row else 1)
    row = order[len(outer.loops)] if outer.is_row else ""
    yield "walk", distribute_over_teams(outer, teams, emitter.names), teams, order[: len(outer.loops)], row


def _fill(emitter: StatementEmitter, total: Expr, value: Expr, blocks: int) -> Parts:
    """The kernel after which all elements of the target, of which there are `total`, are `value`."""
    teams = Teams(blocks, 1)
    loop = Loop(ELEMENT, build.const(0), total, build.store(emitter.values, (build.var(ELEMENT),), value))
    body = distribute_over_teams(split_outer_loops(loop), teams, emitter.names)
    return "fill", body, teams, ("every element",), ""


def _share_sums(emitter: GpuDenseEmitter, blocks: int) -> Parts | None:
    """The kernel of a statement whose sums the lanes of a team share; None if each sum is for one thread."""
    nest, order = emitter.nest, emitter.order
    on_paths = {step.loop for p in nest.paths.values() for step in p.steps}
    dtype = emitter.total().type.dtype
    is_summed = emitter.final_depth not in (None, len(order)) and all(n in on_paths for n in nest.free)
    if not is_summed or dtype.is_bool or dtype.size not in SHUFFLED_BYTES:
        return None
    teams = Teams(blocks, emitter.shared.problem.lanes) if nest.free else Teams(1, THREADS)
    sharing = replace(emitter, teams=teams)
    try:
        outer = split_outer_loops(sharing.walk())
    except CannotLower:
        return None
    if (nest.free and not outer.loops) or not (
        isinstance(outer.rest, Allocate) and sharing.total() in outer.rest.buffers
    ):
        return None  # not all lanes come to where they meet
    loops = order[: len(outer.loops)] or ("the one element",)
    return "walk", distribute_in_uniform_rounds(outer, teams, sharing.names, LEADS), teams, loops, order[len(nest.free)]


@dataclass(frozen=True, slots=True)
class _InThreads(StatementEmitter):
    """Without vectors, which a GPU makes of threads."""

    def vectorization_candidates(self) -> Iterator[tuple[int, int]]:
        yield from ()

    @property
    def lanes(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class GpuDenseEmitter(_InThreads, DenseEmitter):
    """Into a dense tensor: the loops inside a fixed element sum in a register.

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
    """Beside the stored places of an operand, into memory that holds zeros."""
