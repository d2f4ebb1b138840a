"""The strategy for graphics processors: any def as kernels of blocks and threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import islpy as isl

from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.affine import Interval
from ...loop_ir.intrinsics import BARRIER, WARP_BARRIER
from ...loop_ir.nodes import BLOCK, THREAD, Buffer, CheckSite, Kernel, Launch, Module, Type
from ...options import MappingOptions, check_mapping
from ...target import GpuTarget
from ...tc_lang.function import BoundFunction, Role, Tensor
from ...translate import View
from ..collapse import collapse
from ..schedule import Group, partition
from ..scop import CONTEXT, LOCK, Node, Scop
from ..storage import in_register, local_temporaries
from ..strategy import split_initialisation
from .checks import check_kernels
from .generate import generate
from .mapping import KernelPlan, plan_kernel, tree
from .promote import Promotion
from .promotion import promote
from .reductions import Sum, combine
from .references import moved
from .statements import Emitter, register_view, sum_register
from .sync import Level, barriers
from .tree import BLOCK_IDS, THREAD_IDS, schedule, show
from .units import Part


def lower(function: BoundFunction, options: MappingOptions, target: GpuTarget) -> Module:
    """The module of `function` (legalised): one kernel per fused group, in order.

    Raises:
        ArgumentError: an option is illegal, or beyond the limits of the target.
        CannotLower: the function is outside what this strategy can express.
    """
    check_mapping(options, target)
    with LOCK:
        return _lower(function, options, target)


def explain(function: BoundFunction, options: MappingOptions, target: GpuTarget) -> str:
    """The mapped schedule trees of `function` (legalised), kernel by kernel, as indented text."""
    check_mapping(options, target)
    with LOCK:
        scop = _scop(function, options)
        lines = []
        for plan in _plans(scop, options):
            launch = plan.launch
            lines.append(f"kernel: {_times(launch.grid)} blocks of {_times(launch.block)} threads")
            lines.append("  domain: " + "; ".join(u.domain for u in plan.units))
            lines += ["  " + line for line in show(tree(plan, _names(barriers(scop, plan))))]
        return "\n".join(lines)


def _times(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _scop(function: BoundFunction, options: MappingOptions) -> Scop:
    if options.collapse:
        function = collapse(function)
    parts = [p for s in function.statements for p in split_initialisation(function, s)]
    alive = [p for p in parts if all(i.extent for i in p.free)]
    return Scop(function, tuple(Node(f"S{k}", (p,)) for k, p in enumerate(alive)))


def _plans(scop: Scop, options: MappingOptions) -> tuple[KernelPlan, ...]:
    groups = partition(scop, options.outer_fusion, _worth)
    return tuple(plan_kernel(scop, group, options) for group in groups)


def _worth(before: Group, alone: Group, joined: Group) -> bool:
    """Does fusion keep the parallelism of the rows that nodes have apart, or enough of it for all processors?"""
    apart = min(before.parallelism, alone.parallelism)
    return joined.parallelism > 1 and joined.parallelism >= min(apart, ENOUGH_BLOCKS)


ENOUGH_BLOCKS = 128


def _lower(function: BoundFunction, options: MappingOptions, target: GpuTarget) -> Module:
    scop = _scop(function, options)
    function = scop.function
    plans = _plans(scop, options)
    buffers = {t.name: Buffer(t.name, Type(t.dtype), t.shape, t.strides) for t in function.tensors}
    kernels: list[Kernel] = []
    sites: list[CheckSite] = []
    contracted: set[str] = set()
    groups = [p.group for p in plans]
    for plan in plans:
        statements = [s for n in plan.group.nodes for s in n.statements]
        for kernel, site in check_kernels(statements, buffers, function.name, len(sites)):
            kernels.append(kernel)
            sites.append(site)
        registers = _registers(function, groups, plan)
        contracted |= {t.name for t in registers}
        name = function.name if len(plans) == 1 else f"{function.name}_{len(kernels)}"
        local = frozenset(t.name for t in local_temporaries(function, groups, plan.group))
        emission = _Kernel(scop, plan, buffers, registers, local, options, target)
        kernel, promoted = emission.kernel(name)
        kernels.append(kernel)
        contracted |= promoted
    return _module(function, buffers, contracted, kernels, sites)


def _registers(function: BoundFunction, groups: list[Group], plan: KernelPlan) -> tuple[Tensor, ...]:
    """The temporaries of which a thread needs one element at a time."""
    local = local_temporaries(function, groups, plan.group)
    return tuple(t for t in local if any(in_register(t, plan.group, p.leaf) for p in plan.leaves))


def _module(
    function: BoundFunction,
    buffers: dict[str, Buffer],
    contracted: set[str],
    kernels: list[Kernel],
    sites: list[CheckSite],
) -> Module:
    arguments = tuple(buffers[t.name] for t in function.tensors if t.role is not Role.TEMPORARY)
    temporaries = tuple(
        buffers[t.name] for t in function.tensors if t.role is Role.TEMPORARY and t.name not in contracted
    )
    written = tuple(t.name for t in function.tensors if t.role in (Role.OUTPUT, Role.INOUT))
    return Module(function.name, arguments, temporaries, tuple(kernels), tuple(sites), written)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What the emission of one kernel needs."""

    scop: Scop
    plan: KernelPlan
    buffers: dict[str, Buffer]
    registers: tuple[Tensor, ...]
    local: frozenset[str]
    options: MappingOptions
    target: GpuTarget

    def kernel(self, name: str) -> tuple[Kernel, frozenset[str]]:
        """The kernel, and the tensors that need no memory because it keeps them in shared memory or registers."""
        views: dict[str, View] = {t.name: register_view(t) for t in self.registers}
        sums = {
            u.node.name: sum_register(u, self.scop.function.tensor(u.statement.target))
            for u in self.plan.units
            if u.part is Part.TERM
        }
        collectives, shared = self.collectives(sums)
        launch = self.plan.launch
        mapped = tree(self.plan, _names(barriers(self.scop, self.plan)))
        isl_tree, promotion = self.promotion(schedule(CONTEXT, self.plan.units, mapped), views.keys(), shared)
        emitter = Emitter({**self.buffers, **views, **{b.name: b for b in promotion.buffers}}, sums)
        units = {u.name: moved(u, promotion.ranks) for u in self.plan.units}

        def instance(name: str, values: tuple[ir.Expr, ...]) -> ir.Stmt:
            if name in units:
                count = len(units[name].indices)
                further = dict(zip(promotion.names(name), values[count:], strict=True))
                return emitter.statement(units[name], values[:count], further)
            if name in promotion.stagings:
                return promotion.stagings[name].statement(values, launch)
            return collectives[name]

        functions = {name: promotion.functions(name) for name in units}
        ranges = {name: Interval(0, count - 1) for name, count in launch.ranges()}
        body = generate(isl_tree, _context(launch), identifiers(launch), instance, functions, ranges)
        held = [*shared, *promotion.buffers, *(v.buffer for v in views.values()), *sums.values()]
        return Kernel(name, build.allocate(held, body), launch), promotion.contracted

    def promotion(
        self, isl_tree: isl.Schedule, elsewhere: Collection[str], shared: Sequence[Buffer]
    ) -> tuple[isl.Schedule, Promotion]:
        """The tree with copies to shared memory and registers, and what they promote."""
        tensors = {n: b for n, b in self.buffers.items() if n not in elsewhere}
        return promote(isl_tree, self.plan, self.scop.function, tensors, self.local, shared, self.options, self.target)

    def collectives(self, sums: Mapping[str, Buffer]) -> tuple[dict[str, ir.Stmt], list[Buffer]]:
        """What the threads do together in cooperative leaves, by name, and the shared arrays that this takes."""
        meanings: dict[str, ir.Stmt] = {
            f"{b}{k}": ir.Invoke(b, (), ()) for b in (BARRIER, WARP_BARRIER) for k in range(len(self.plan.leaves))
        }
        shared: list[Buffer] = []
        for number, leaf in enumerate(self.plan.leaves):
            terms = leaf.part(Part.TERM)
            if not terms:
                continue
            found = [Sum(sums[u.node.name], u.statement.reduction or "+", u.node.name) for u in terms]
            again = self.plan.repeats or any(a.tiles * a.trips > 1 for a in leaf.parallel)
            combined = combine(found, self.plan.launch, leaf.reduced_over, again=again)
            shared += combined.shared
            meanings[f"combine{number}"] = combined.body
            meanings[f"clear{number}"] = build.block(
                *(ir.Store(s.register, (), build.neutral(s.op, s.register.type.dtype)) for s in found)
            )
        return meanings, shared


def _names(levels: Sequence[Level]) -> tuple[str, ...]:
    """The collectives before the leaves of a kernel."""
    kinds = {Level.NONE: "", Level.WARP: WARP_BARRIER, Level.BLOCK: BARRIER}
    return tuple(f"{kinds[level]}{k}" if level else "" for k, level in enumerate(levels))


def identifiers(launch: Launch) -> dict[str, ir.Expr]:
    """What the parameters of a tree are worth; those that take one value are 0."""
    names = zip((*BLOCK_IDS, *THREAD_IDS), (*BLOCK, *THREAD), (*launch.grid, *launch.block), strict=True)
    return {p: build.var(name) if count > 1 else build.const(0) for p, name, count in names}


def _context(launch: Launch) -> isl.Set:
    ids = (*BLOCK_IDS, *THREAD_IDS)
    sizes = (*launch.grid, *launch.block)
    conditions = " and ".join(f"0 <= {p} < {count}" for p, count in zip(ids, sizes, strict=True))
    return isl.Set(f"[{', '.join(ids)}] -> {{ : {conditions} }}", CONTEXT)
