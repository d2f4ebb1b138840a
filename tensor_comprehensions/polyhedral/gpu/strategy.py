"""The strategy for graphics processors: any def as kernels of blocks and threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...loop_ir.nodes import Buffer, CheckSite, Kernel, Module, Type
from ...naming import mint
from ...options import MappingOptions, check_mapping
from ...target import GpuTarget
from ...tc_lang.function import BoundFunction, Role, Tensor
from ..affine import readable_isl
from ..collapse import collapse
from ..schedule import Group, beside, joined, partition
from ..scop import LOCK, Node, Scop, node_name
from ..storage import in_register, local_temporaries
from ..strategy import split_initialisation
from .checks import check_kernels
from .defaults import choose, fits, heaviest, light
from .kernel import Emission, collective_names
from .mapping import KernelPlan, plan_kernel, tree
from .stages import in_parts
from .sync import barriers
from .tree import show


def lower(function: BoundFunction, options: MappingOptions | None, target: GpuTarget) -> Module:
    """The module of `function` (legalised): one kernel per fused group, in order.

    options: None chooses them for each kernel.

    Raises:
        ArgumentError: an option is illegal, or beyond the limits of the target.
        CannotLower: the function is outside what this strategy can express.
    """
    if options is not None:
        check_mapping(options, target)
    with LOCK:
        return _lower(function, options, target)


def explain(function: BoundFunction, options: MappingOptions | None, target: GpuTarget) -> str:
    """The mapped schedule trees of `function` (legalised), kernel by kernel, as indented text."""
    if options is not None:
        check_mapping(options, target)
    with LOCK:
        scop = _scop(function, options, target)
        lines = []
        for plan in _plans(scop, options, target):
            launch = plan.launch
            lines.append(f"kernel: {_times(launch.grid)} blocks of {_times(launch.block)} threads")
            if options is None:
                lines.append(f"  chosen: {plan.options}")
            lines.append("  domain: " + "; ".join(u.domain for u in plan.units))
            lines += ["  " + line for line in show(tree(plan, collective_names(barriers(scop, plan))))]
        return readable_isl("\n".join(lines))


def default_options(function: BoundFunction, target: GpuTarget) -> MappingOptions:
    """The mapping that is chosen for the kernel of `function` (legalised) with most work: where a search starts."""
    with LOCK:
        scop = _scop(function, None, target)
        parts = max((scop.function.tensor(name).shape[0] for name in scop.parts), default=1)
        return replace(choose(scop, heaviest(scop, _groups(scop, None, target)), target), split_reductions=parts)


def _times(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _scop(function: BoundFunction, options: MappingOptions | None, target: GpuTarget) -> Scop:
    if options is None or options.collapse:
        function = collapse(function)
    whole, function = function, in_parts(function, options, target)
    pieces = [p for s in function.statements for p in split_initialisation(function, s)]
    alive = [p for p in pieces if all(i.extent for i in p.free)]
    parts = frozenset(t.name for t in function.tensors) - frozenset(t.name for t in whole.tensors)
    return Scop(function, tuple(Node(node_name(p), (p,)) for p in alive), parts)


def _groups(scop: Scop, options: MappingOptions | None, target: GpuTarget) -> tuple[Group, ...]:
    def worth(before: Group, alone: Group, joined: Group) -> bool:
        return fits(scop, target, before, alone, joined)

    fusion = options.outer_fusion if options is not None else "preserve3"
    groups = partition(scop, fusion, worth)
    if fusion == "min":
        return groups
    groups = _chained(scop, groups, worth if fusion == "preserve3" else lambda *_: True)
    return groups if options is not None else _side_by_side(scop, groups, target)


def _side_by_side(scop: Scop, groups: Sequence[Group], target: GpuTarget) -> tuple[Group, ...]:
    """Neighbours that touch nothing in common in one kernel, where they take hardly longer than a launch."""
    found: list[Group] = []
    for group in groups:
        whole = beside(found[-1], group) if found and light(scop, target, found[-1], group) else None
        if whole is not None:
            found[-1] = whole
        else:
            found.append(group)
    return tuple(found)


def _chained(scop: Scop, groups: Sequence[Group], worth: Callable[[Group, Group, Group], bool]) -> tuple[Group, ...]:
    """Groups that follow one another joined: what starts a later layer need not touch what the earlier one wrote."""
    found: list[Group] = []
    for group in groups:
        whole = joined(scop, found[-1], group) if found else None
        if whole is not None and worth(found[-1], group, whole):
            found[-1] = whole
        else:
            found.append(group)
    return tuple(found)


def _plans(scop: Scop, options: MappingOptions | None, target: GpuTarget) -> tuple[KernelPlan, ...]:
    groups = _groups(scop, options, target)
    return tuple(plan_kernel(scop, g, options or choose(scop, g, target)) for g in groups)


def _lower(function: BoundFunction, options: MappingOptions | None, target: GpuTarget) -> Module:
    scop = _scop(function, options, target)
    function = scop.function
    plans = _plans(scop, options, target)
    buffers = {t.name: Buffer(t.name, Type(t.dtype), t.shape, t.strides) for t in function.tensors}
    kernels: list[Kernel] = []
    sites: list[CheckSite] = []
    contracted: set[str] = set()
    groups = [p.group for p in plans]
    for plan in plans:
        statements = [s for n in plan.group.nodes for s in n.statements]
        verifying, meanings = check_kernels(statements, buffers, function.name, len(sites))
        kernels += verifying
        sites += meanings
        registers = _registers(function, groups, plan)
        contracted |= {t.name for t in registers}
        name = function.name if len(plans) == 1 else mint(function.name, len(kernels))
        local = frozenset(t.name for t in local_temporaries(function, groups, plan.group))
        kernel, promoted = Emission(scop, plan, buffers, registers, local, target).kernel(name)
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
