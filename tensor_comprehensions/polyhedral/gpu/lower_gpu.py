"""The polyhedral lowering for GPUs: any def as kernels with blocks and threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...core.decisions import close_book
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...core.pass_steps import run_step
from ...loop_ir.nodes import Buffer, CheckSite, Kernel, Module, Parameter, Type
from ...machine import GPU_LAUNCH_SECONDS
from ...options import MappingOptions, check_mapping
from ...target import GpuTarget
from ...tc_lang.ir import BoundFunction, Role, Tensor
from ..cpu.lower import split_initialization
from ..schedule.fusion import (
    APART,
    FusionGroup,
    FusionObjection,
    ObjectionFn,
    fuse_consecutive,
    fuse_independent,
    partition_statements,
    record_groups,
)
from ..schedule.storage import fits_register, local_temporaries
from ..scop.collapse import collapse
from ..scop.isl_affine import readable_isl
from ..scop.scop import LOCK, Scop, ScopStatement, node_name
from .emit.lower_kernel import KernelLowering, collective_names
from .plan.grid_split_k import split_grid_reductions
from .plan.mapping import KernelPlan, kernel_tree, plan_kernel
from .plan.mapping_heuristics import choose_mapping, group_cycles, heaviest_group, is_launch_bound, object_to_fusion
from .post.bounds_checks import check_kernels
from .tree.barrier_placement import kernel_barriers
from .tree.schedule_tree import format_tree


def lower_gpu(
    function: BoundFunction, options: MappingOptions | None, target: GpuTarget, *, collapsed: bool = False
) -> Module:
    """The module of `function` (legalized): one kernel per fused group, in order.

    options: None chooses them for each kernel. collapsed: whether dimensions are fused already.

    Raises:
        ArgumentError: an option is illegal, or beyond the limits of the target.
        CannotLower: this lowering cannot express the function.
    """
    if options is not None:
        check_mapping(options, target)
    with LOCK:
        return _lower_function(function, options, target, collapsed=collapsed)


def lower_gpu_range(functions: Sequence[BoundFunction], options: MappingOptions | None, target: GpuTarget) -> Module:
    """The module for all values of the variables of a def (legalized).

    The mapping is chosen for the first of `functions`, which have different typical extents. A number in the code that
    follows from these would be wrong for others, so all of them must give the same module.

    Raises:
        ArgumentError: as `lower_gpu`.
        CannotLower: the code depends on these extents in some other way than by loops up to them.
    """
    if options is not None:
        check_mapping(options, target)
    with LOCK:
        first, *others = functions
        scop, plans = _plan_function(first, options, target)
        module = _lower_plans(scop, plans, target)
        for other in others:
            scop, again = _plan_function(other, options, target, plans)
            if _lower_plans(scop, again, target) != module:
                raise CannotLower("other extents are computed by other code")
    return module


def explain_gpu_range(function: BoundFunction, options: MappingOptions | None, target: GpuTarget) -> str:
    """The mapped schedule trees of `lower_gpu_range`, of which `function` is the first."""
    with LOCK:
        scop, plans = _plan_function(function, options, target)
        return _format_plans(scop, plans, with_options=options is None)


def _plan_function(
    function: BoundFunction,
    options: MappingOptions | None,
    target: GpuTarget,
    like: Sequence[KernelPlan] | None = None,
) -> tuple[Scop, tuple[KernelPlan, ...]]:
    """The plans of a def. like: plans for other extents, whose choices these repeat; None chooses.

    Raises CannotLower if the same statements cannot be one kernel.
    """
    scop = _scop(function, options, target)
    if like is None:
        return scop, _plans(scop, options, target)
    names = [{n.name for n in p.group.nodes} for p in like]

    def is_one_kernel(*groups: FusionGroup) -> bool:
        nodes = {n.name for g in groups for n in g.nodes}
        return any(nodes <= together for together in names)

    groups = _fuse_groups(scop, "preserve3", lambda before, alone, joined: None if is_one_kernel(joined) else APART)
    groups = _fuse_neighbors(groups, is_one_kernel)
    if [{n.name for n in g.nodes} for g in groups] != names:
        raise CannotLower("other extents are computed by other kernels")
    return scop, tuple(plan_kernel(scop, g, p.options) for g, p in zip(groups, like, strict=True))


def estimate_cycles(function: BoundFunction, target: GpuTarget, *, collapsed: bool = False) -> float:
    """The predicted cycles of the kernels of `function` (legalized) with default options, including launches."""
    with LOCK, close_book():
        scop = _scop(function, None, target, collapsed=collapsed)
        groups = _make_fusion_groups(scop, None, target)
        return sum(group_cycles(scop, group, target) + GPU_LAUNCH_SECONDS * target.clock for group in groups)


def explain_gpu(
    function: BoundFunction, options: MappingOptions | None, target: GpuTarget, *, collapsed: bool = False
) -> str:
    """The mapped schedule trees of `function` (legalized), kernel by kernel, as indented text."""
    if options is not None:
        check_mapping(options, target)
    with LOCK:
        scop = _scop(function, options, target, collapsed=collapsed)
        return _format_plans(scop, _plans(scop, options, target), with_options=options is None)


def _format_plans(scop: Scop, plans: Sequence[KernelPlan], *, with_options: bool = True) -> str:
    lines = []
    for plan in plans:
        launch = plan.launch
        sides = zip(launch.grid, launch.counts or launch.grid, strict=True)
        blocks = " x ".join(str(count or n) for n, count in sides)
        lines.append(f"kernel: {blocks} blocks of {_format_sizes(launch.block)} threads")
        if with_options:
            lines.append(f"  chosen: {plan.options}")
        lines.append("  domain: " + "; ".join(u.domain for u in plan.units))
        tree = format_tree(kernel_tree(plan, collective_names(kernel_barriers(scop, plan))))
        lines += ["  " + line for line in tree]
    return readable_isl("\n".join(lines))


def default_options(function: BoundFunction, target: GpuTarget) -> MappingOptions:
    """The default options for the kernel of `function` (legalized) with most work; a search starts from them."""
    with LOCK:
        scop = _scop(function, None, target)
        parts = max((scop.function.tensor(name).shape[0] for name in scop.parts), default=1)
        return replace(
            choose_mapping(scop, heaviest_group(scop, _make_fusion_groups(scop, None, target)), target), split_k=parts
        )


def _format_sizes(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _scop(
    function: BoundFunction, options: MappingOptions | None, target: GpuTarget, *, collapsed: bool = False
) -> Scop:
    if not collapsed and (options is None or options.collapse_loops):
        function = collapse(function)
    whole, function = function, split_grid_reductions(function, options, target)
    pieces = [p for s in function.statements for p in split_initialization(function, s)]
    alive = [p for p in pieces if all(i.extent for i in p.free)]
    parts = frozenset(t.name for t in function.tensors) - frozenset(t.name for t in whole.tensors)
    return Scop(function, tuple(ScopStatement(node_name(p), (p,)) for p in alive), parts)


def _make_fusion_groups(scop: Scop, options: MappingOptions | None, target: GpuTarget) -> tuple[FusionGroup, ...]:
    def object_to(before: FusionGroup, alone: FusionGroup, joined: FusionGroup) -> FusionObjection | None:
        return object_to_fusion(scop, target, before, alone, joined)

    fusion = options.outer_fusion if options is not None else "preserve3"
    groups = _fuse_groups(scop, fusion, object_to)
    if fusion != "min" and options is None:  # into one kernel if they take hardly longer than a launch
        groups = _fuse_neighbors(groups, lambda *neighbors: is_launch_bound(scop, target, *neighbors))
    record_groups(scop, groups, fusion, object_to)
    return groups


def _fuse_groups(scop: Scop, fusion: str, object_to: ObjectionFn) -> tuple[FusionGroup, ...]:
    with close_book():  # groups may still change: decisions are recorded later
        groups = partition_statements(scop, fusion, object_to)
    return groups if fusion == "min" else _chain_groups(scop, groups, object_to if fusion == "preserve3" else _agree)


def _agree(*_: FusionGroup) -> None:
    """No objection to fusing."""


def _fuse_neighbors(
    groups: Sequence[FusionGroup], should_fuse: Callable[[FusionGroup, FusionGroup], bool]
) -> tuple[FusionGroup, ...]:
    """Fuse consecutive independent groups into one kernel."""
    found: list[FusionGroup] = []
    for group in groups:
        whole = fuse_independent(found[-1], group) if found and should_fuse(found[-1], group) else None
        if whole is not None:
            found[-1] = whole
        else:
            found.append(group)
    return tuple(found)


def _chain_groups(scop: Scop, groups: Sequence[FusionGroup], object_to: ObjectionFn) -> tuple[FusionGroup, ...]:
    """Fuse consecutive groups as a whole: the first node of a later layer may share no tensor with the earlier one."""
    found: list[FusionGroup] = []
    for group in groups:
        whole = fuse_consecutive(scop, found[-1], group) if found else None
        if whole is not None and object_to(found[-1], group, whole) is None:
            found[-1] = whole
        else:
            found.append(group)
    return tuple(found)


def _plans(scop: Scop, options: MappingOptions | None, target: GpuTarget) -> tuple[KernelPlan, ...]:
    groups = _make_fusion_groups(scop, options, target)
    return tuple(plan_kernel(scop, g, options or choose_mapping(scop, g, target)) for g in groups)


def _lower_function(
    function: BoundFunction, options: MappingOptions | None, target: GpuTarget, *, collapsed: bool
) -> Module:
    scop = run_step("scop", lambda: _scop(function, options, target, collapsed=collapsed), lambda s: repr(s.function))

    def show_plans(found: Sequence[KernelPlan]) -> str:
        with LOCK:
            return _format_plans(scop, found)

    return _lower_plans(scop, run_step("map", lambda: _plans(scop, options, target), show_plans), target)


def _lower_plans(scop: Scop, plans: Sequence[KernelPlan], target: GpuTarget) -> Module:
    function = scop.function
    buffers = {t.name: _make_buffer(t) for t in function.tensors}
    kernels: list[Kernel] = []
    sites: list[CheckSite] = []
    contracted: set[str] = set()
    groups = [p.group for p in plans]
    for plan in plans:
        statements = [s for n in plan.group.nodes for s in n.statements]
        verifying, meanings = check_kernels(statements, buffers, function.name, len(sites))
        kernels += verifying
        sites += meanings
        registers = _find_register_temporaries(function, groups, plan)
        contracted |= {t.name for t in registers}
        name = function.name if len(plans) == 1 else internal_name(function.name, len(kernels))
        local = frozenset(t.name for t in local_temporaries(function, groups, plan.group))
        kernel, promoted = KernelLowering(scop, plan, buffers, registers, local, target).kernel(name)
        kernels.append(kernel)
        contracted |= promoted
    return _make_module(function, buffers, contracted, kernels, sites)


def _make_buffer(t: Tensor) -> Buffer:
    dynamic = tuple(d for d, name in enumerate(t.extent_variables) if name is not None)
    shape = tuple(0 if d in dynamic else n for d, n in enumerate(t.shape))
    held = (t.stride_variables, t.extent_variables) if dynamic or any(t.stride_variables) else ((), ())
    return Buffer(
        t.name, Type(t.dtype), shape, t.strides, dynamic=dynamic, stride_variables=held[0], extent_variables=held[1]
    )


def _find_register_temporaries(
    function: BoundFunction, groups: list[FusionGroup], plan: KernelPlan
) -> tuple[Tensor, ...]:
    """The temporaries that fit a register, because a thread needs one element at a time."""
    local = local_temporaries(function, groups, plan.group)
    return tuple(t for t in local if any(fits_register(t, plan.group, p.leaf) for p in plan.leaves))


def _make_module(
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
    parameters = _list_parameters(function, (*arguments, *temporaries))
    return Module(function.name, arguments, temporaries, tuple(kernels), tuple(sites), written, parameters=parameters)


def _list_parameters(function: BoundFunction, buffers: Sequence[Buffer]) -> tuple[Parameter, ...]:
    """The variables that extents of indices, and extents and strides of buffers, are read from."""
    extents = [i.variable for s in function.statements for i in s.indices if i.variable]
    extents += [v for b in buffers for v in b.extent_variables if v is not None]
    strides = [v for b in buffers for v in b.stride_variables if v is not None]
    return (*(Parameter(v) for v in dict.fromkeys(extents)), *(Parameter(v, None) for v in dict.fromkeys(strides)))
