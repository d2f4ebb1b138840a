"""Lower one kernel: build its schedule tree, insert promotion copies, and generate its loop program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import islpy as isl

from ....core.errors import CannotLower, InternalError
from ....core.knobs import current_knobs
from ....core.pass_steps import run_step
from ....loop_ir import build
from ....loop_ir import nodes as ir
from ....loop_ir.buffer_view import BufferView, private_view
from ....loop_ir.cross_thread_reduction import CrossThreadSum, combine_across_threads
from ....loop_ir.intervals import Interval
from ....loop_ir.intrinsics import BARRIER, WARP_BARRIER
from ....loop_ir.nodes import MOST_EXTENT, Buffer, Kernel, Launch, Space
from ....loop_ir.origins import with_origin
from ....loop_ir.show import format_program
from ....target import GpuTarget
from ....tc_lang.ir import Tensor
from ....thresholds import GPU_RESIDENCY_REGISTERS
from ...cpu.lower_nest import INITIAL_VALUES
from ...scop.isl_affine import isl_parameter
from ...scop.scop import CONTEXT, Scop, statements_of
from ..plan.mapping import KernelPlan, kernel_tree
from ..plan.statement_phases import Phase
from ..post.double_buffer import double_buffer
from ..post.loop_partition import split_full_tiles
from ..post.unrolling import unroll_innermost
from ..promote.promote_shared import Promotion, shared_bytes_of
from ..promote.promotion_driver import promote_kernel
from ..promote.references import with_moved_accesses
from ..tree.barrier_placement import SyncLevel, kernel_barriers
from ..tree.schedule_tree import BLOCK_IDS, THREAD_IDS, Tree, declare_parameters, tree_to_isl, without_collectives
from ..tree.verify_kernel import check_kernel
from .ast_to_loops import generate_loops
from .isl_to_expr import launch_identifiers
from .statements import StatementLowering, sum_register

COPY, ACROSS_THREADS = "copy", "sum across threads"
"""Roles of stores: copies to and from shared memory or registers; combining values across threads."""


@dataclass(frozen=True, slots=True)
class KernelLowering:
    """Lowers one kernel."""

    scop: Scop
    plan: KernelPlan
    buffers: dict[str, Buffer]
    registers: tuple[Tensor, ...]
    local: frozenset[str]
    target: GpuTarget

    def kernel(self, name: str) -> tuple[Kernel, frozenset[str]]:
        """The kernel, and the tensors that need no global memory because shared memory or registers hold them."""
        views: dict[str, BufferView[int]] = {t.name: private_view(t.name, t.dtype) for t in self.registers}
        sums = {
            u.node.name: sum_register(u, self.scop.function.tensor(u.statement.target))
            for u in self.plan.units
            if u.phase is Phase.PARTIAL
        }
        collectives, shared = self.collectives(sums)
        launch = self.plan.launch
        levels = kernel_barriers(self.scop, self.plan)
        mapped = kernel_tree(self.plan, collective_names(levels))
        self.prove(mapped, levels)
        isl_tree, promotion = run_step(f"{name}.promote", lambda: self.promotion(mapped, views.keys(), shared))
        emitter = StatementLowering({**self.buffers, **views, **{b.name: b for b in promotion.buffers}}, sums)
        units = {u.name: with_moved_accesses(u, promotion.ranks) for u in self.plan.units}

        everything = statements_of(self.plan.group.nodes)

        def instance(name: str, values: tuple[ir.Expr, ...]) -> ir.Stmt:
            if name in units:
                count = len(units[name].indices)
                further = dict(zip(promotion.names(name), values[count:], strict=True))
                statement = emitter.statement(units[name], values[:count], further)
                return with_origin(statement, (units[name].statement.name,))
            if name in promotion.stagings:
                return with_origin(promotion.stagings[name].statement(values, launch), everything, COPY)
            return collectives[name]

        functions = {name: promotion.functions(name) for name in units}
        ranges = {name: Interval(0, count - 1) for name, count in launch.ranges()}
        ranges |= {name: Interval(0, MOST_EXTENT) for name in self.plan.parameters}
        where = _make_launch_context(launch, self.plan.parameters), launch_identifiers(launch)
        body = run_step(
            f"{name}.generate", lambda: generate_loops(isl_tree, *where, instance, functions, ranges), format_program
        )
        body = run_step(
            f"{name}.unroll", partial(unroll_innermost, body, self.plan.options.unroll, ranges), format_program
        )
        body, promoted = self.with_double_buffers(body, promotion, shared)
        body = run_step(f"{name}.partition", partial(split_full_tiles, body, self.plan, ranges), format_program)
        body = with_origin(body, everything)
        written = {u.statement.target for u in self.plan.units}
        kept = [*shared, *promoted, *(v.buffer for v in views.values()), *sums.values()]
        cached = tuple(n for n in self.buffers if n not in written) if self.plan.options.read_only_cache else ()
        kernel = Kernel(name, build.allocate(kept, body), launch, cached, self.choose_resident_blocks(promotion))
        return kernel, promotion.contracted

    def prove(self, mapped: Tree, levels: Sequence[SyncLevel]) -> None:
        """Prove the tree, if that is asked for, or if choices were made for typical extents but must hold for all.

        Raises CannotLower if it is not right for all extents.
        """
        if self.plan.parameters:
            try:
                check_kernel(self.scop, self.plan, mapped, levels)
            except InternalError as fault:
                raise CannotLower(f"its mapping is not right for all extents: {fault}") from fault
        elif current_knobs().verify:
            check_kernel(self.scop, self.plan, mapped, levels)

    def promotion(
        self, mapped: Tree, elsewhere: Collection[str], shared: Sequence[Buffer]
    ) -> tuple[isl.Schedule, Promotion]:
        """The schedule with copies to shared memory and registers, and the promotions that they implement."""
        tensors = {n: b for n, b in self.buffers.items() if n not in elsewhere}
        units = self.plan.units
        alone = without_collectives(mapped)
        whole = tree_to_isl(CONTEXT, units, mapped)
        plain = whole if alone == mapped else tree_to_isl(CONTEXT, units, alone)
        where = self.plan, self.scop.function, tensors, self.local, shared
        return promote_kernel(whole, plain, *where, self.plan.options, self.target)

    def with_double_buffers(
        self, body: ir.Stmt, promotion: Promotion, shared: Sequence[Buffer]
    ) -> tuple[ir.Stmt, tuple[Buffer, ...]]:
        """The body and its buffers with double buffering, if it is requested and fits into shared memory."""
        options = self.plan.options
        if not (options.double_buffer and self.target.async_copies):
            return body, promotion.buffers
        room = (
            (options.max_shared_memory or self.target.max_shared) - promotion.bytes - sum(map(shared_bytes_of, shared))
        )
        return double_buffer(body, promotion.buffers, room, self.plan.parameters)

    def choose_resident_blocks(self, promotion: Promotion) -> int:
        """The minimum of resident blocks, which limits the registers per thread to few more than needed.

        Without a limit, CUDA's compiler uses more registers than two resident blocks have, to hoist loads. Blocks of
        the largest size with few registers are limited, too: two of them keep memory busier than one.
        """
        threads = prod(self.plan.launch.block)
        words = sum(prod(b.shape) * b.type.dtype.size // 4 for b in promotion.buffers if b.space is Space.REGISTER)
        if not GPU_RESIDENCY_REGISTERS // 2 < words <= GPU_RESIDENCY_REGISTERS:
            return 2 if words <= GPU_RESIDENCY_REGISTERS // 4 and threads == self.target.max_threads_per_block else 1
        return max(1, self.target.registers_per_sm // GPU_RESIDENCY_REGISTERS // threads)

    def collectives(self, sums: Mapping[str, Buffer]) -> tuple[dict[str, ir.Stmt], list[Buffer]]:
        """The collective statements (barriers, and the steps of cooperative reductions) by name, and shared arrays."""
        meanings: dict[str, ir.Stmt] = {
            f"{b}{k}": with_origin(ir.Invoke(b, (), ()), statements_of(self.plan.group.nodes), BARRIER)
            for b in (BARRIER, WARP_BARRIER)
            for k in range(len(self.plan.leaves))
        }
        shared: list[Buffer] = []
        for number, leaf in enumerate(self.plan.leaves):
            terms = leaf.part(Phase.PARTIAL)
            if not terms:
                continue
            found = [CrossThreadSum(sums[u.node.name], u.statement.reduction or "+", u.node.name) for u in terms]
            again = self.plan.repeats or any(a.tiles * a.trips > 1 for a in leaf.parallel)
            combined = combine_across_threads(found, self.plan.launch, leaf.reduced_over, again=again)
            shared += combined.shared
            names = tuple(u.statement.name for u in terms)
            meanings[f"combine{number}"] = with_origin(combined.body, names, ACROSS_THREADS)
            clear = (ir.Store(s.register, (), build.neutral(s.op, s.register.type.dtype)) for s in found)
            meanings[f"clear{number}"] = with_origin(build.block(*clear), names, INITIAL_VALUES)
        return meanings, shared


def collective_names(levels: Sequence[SyncLevel]) -> tuple[str, ...]:
    """For each leaf, the name of the barrier before it; empty for none."""
    kinds = {SyncLevel.NONE: "", SyncLevel.WARP: WARP_BARRIER, SyncLevel.BLOCK: BARRIER}
    return tuple(f"{kinds[level]}{k}" if level else "" for k, level in enumerate(levels))


def _make_launch_context(launch: Launch, parameters: Sequence[str]) -> isl.Set:
    """The values of block and thread indices, and of the int64 variables `parameters`, which are extents."""
    ids = (*BLOCK_IDS, *THREAD_IDS)
    sizes = (*launch.grid, *launch.block)
    conditions = [f"0 <= {p} < {count}" for p, count in zip(ids, sizes, strict=True)]
    conditions += [f"0 <= {isl_parameter(v)} <= {MOST_EXTENT}" for v in parameters]
    conditions += [
        f"{c.tile}*{p} < {isl_parameter(c.parameter)}"
        for p, c in zip(BLOCK_IDS, launch.counts, strict=False)
        if c is not None
    ]
    return isl.Set(f"{declare_parameters(parameters)}{{ : {' and '.join(conditions)} }}", CONTEXT)
