"""The polyhedral strategy for CPUs: anything affine, and gathers, as fused and vectorised parallel loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from ..errors import CannotLower
from ..knobs import current
from ..loop_ir import build
from ..loop_ir.nodes import Buffer, Kernel, Module, Type
from ..naming import mint
from ..options import CpuOptions
from ..structured.op import StructuredOp
from ..structured.pairs import paired
from ..structured.recognise import Cluster, recognise, refusal
from ..structured.strategy import meant_for
from ..target import Target
from ..tc_lang import function as tc
from ..tc_lang.function import BoundFunction, BoundIndex, BoundStatement, Role, Tensor
from ..tc_lang.restrict import restrict
from . import movement
from .affine import affine
from .checks import Checks, check_loops
from .collapse import collapse
from .emit import emit, pipeline
from .leaf import leaves
from .legality import Scheduled, check
from .reorder import reorder
from .schedule import schedule
from .scop import LOCK, Node, Scop, node_name
from .show import show
from .split import in_parts
from .storage import local_temporaries
from .tiling import row_tiles

R = TypeVar("R")
SCOPS = 2
"""Scops that are kept: a search lowers one def again and again."""


def lower(function: BoundFunction, options: CpuOptions, target: Target) -> Module:
    """The module of `function` (legalised): one kernel per fused group, in order.

    Raises:
        CannotLower: the function is outside what this strategy can express.
    """
    return _with_or_without_clusters(options, lambda o: _lower(function, o, target))


def explain(function: BoundFunction, options: CpuOptions, target: Target) -> str:
    """The schedule tree of `function` (legalised) as indented text."""
    return _with_or_without_clusters(options, lambda o: _explain(function, o, target))


def _simplified(function: BoundFunction) -> BoundFunction:
    """`function` with as few dimensions, and as little of its domains, as it can do with."""
    return restrict(collapse(function))


def _with_or_without_clusters(options: CpuOptions, run: Callable[[CpuOptions], R]) -> R:
    """`run` with `options`; without `structured` where it refuses the tile that fusion leaves of a contraction."""
    with LOCK:
        try:
            return run(options)
        except CannotLower:
            if not options.structured or options.strategy is not None:
                raise
            return run(replace(options, structured=False))


def _explain(function: BoundFunction, options: CpuOptions, target: Target) -> str:
    function = in_parts(reorder(_simplified(function), options, target), options, target)
    plan = plan_schedule(_scop(function, nodes(function, options, target)), options, target)
    buffers = {t.name: _buffer(t) for t in function.tensors}
    return "\n".join(show(plan, lambda s, node: pipeline(function, s, node, buffers, options, target)))


def _lower(function: BoundFunction, options: CpuOptions, target: Target) -> Module:
    function = in_parts(reorder(_simplified(function), options, target), options, target)
    scop = _scop(function, nodes(function, options, target))
    plan = plan_schedule(scop, options, target)
    if current().verify:
        check(scop, plan)
    buffers = {t.name: _buffer(t) for t in function.tensors}
    groups = [s.group for s in plan]
    kernels: list[Kernel] = []
    checks = Checks()
    contracted: set[str] = set()
    for scheduled in plan:
        before = checks
        for s in (s for n in scheduled.group.nodes for s in n.statements):
            checks += check_loops(function, s, buffers, len(checks.sites), options, target)
        for nest in checks.loops[len(before.loops) :]:  # apart: one may read through what the one before verifies
            kernels.append(Kernel(mint(function.name, f"check{len(kernels)}"), nest))
        local = local_temporaries(function, groups, scheduled.group) if options.contract else ()
        contracted |= {t.name for t in local}
        body = emit(function, scheduled, local, buffers, options, target)
        kernels.append(Kernel(function.name if len(plan) == 1 else mint(function.name, len(kernels)), body))
    return _module(function, buffers, contracted, kernels, checks)


@lru_cache(SCOPS)
def _scop(function: BoundFunction, nodes: tuple[Node, ...]) -> Scop:
    """The scop, with what isl found out about it for other options."""
    return Scop(function, nodes)


def plan_schedule(scop: Scop, options: CpuOptions, target: Target) -> tuple[Scheduled, ...]:
    """Groups, tile sizes and nests: everything but the emission."""
    plan = []
    buffers = {t.name: _buffer(t) for t in scop.function.tensors}
    for group in schedule(scop, options, target):
        fuse = options.fusion != "min"
        wanted = movement.asked(group, buffers, options, target)
        if wanted is not None:
            sizes = movement.sizes(wanted, group)
        else:
            everything = leaves(scop, group, range(len(group.rows)), fuse=fuse)
            sizes = row_tiles(scop.function, group, everything, options, target)
        points = [k for k, size in enumerate(sizes) if size > 1]
        plan.append(Scheduled(group, sizes, leaves(scop, group, points, fuse=fuse), wanted))
    return tuple(plan)


def _module(
    function: BoundFunction,
    buffers: dict[str, Buffer],
    contracted: set[str],
    kernels: list[Kernel],
    checks: Checks,
) -> Module:
    arguments = tuple(buffers[t.name] for t in function.tensors if t.role is not Role.TEMPORARY)
    temporaries = tuple(
        buffers[t.name] for t in function.tensors if t.role is Role.TEMPORARY and t.name not in contracted
    )
    written = tuple(t.name for t in function.tensors if t.role in (Role.OUTPUT, Role.INOUT))
    memory = (*temporaries, *checks.temporaries)
    partial = frozenset(s.target for s in function.statements if s.elements)
    return Module(function.name, arguments, memory, tuple(kernels), checks.sites, written, partial)


def _buffer(tensor: Tensor) -> Buffer:
    return Buffer(tensor.name, Type(tensor.dtype), tensor.shape, tensor.strides)


def nodes(function: BoundFunction, options: CpuOptions, target: Target) -> tuple[Node, ...]:
    """The nodes of the scop: clusters for `structured`, else the statements that have an instance."""
    tensors = {t.name: t for t in function.tensors}
    buffers = {t.name: _buffer(t) for t in function.tensors}
    found: list[Node] = []
    position = 0
    while position < len(function.statements):
        cluster = recognise(function.statements, position, tensors) if options.structured else None
        name = node_name(function.statements[position])
        reason = _refusal(cluster, name, buffers, options, target)
        if cluster is not None and reason is None:
            found.append(Node(name, cluster.statements, cluster))
            position += len(cluster.statements)
            continue
        for part in split_initialisation(function, function.statements[position]):
            if all(i.extent for i in part.free):
                found.append(Node(node_name(part), (part,)))
        position += 1
    return tuple(found)


def _refusal(
    cluster: Cluster | None, name: str, buffers: dict[str, Buffer], options: CpuOptions, target: Target
) -> str | None:
    if cluster is None:
        return "not a contraction"
    asked = meant_for(options.strategy, name, cluster.output.tensor) is not None
    return refusal(cluster, buffers, target, asked=asked)


def contractions(
    function: BoundFunction, options: CpuOptions, target: Target
) -> tuple[tuple[str, str, StructuredOp], ...]:
    """What strategies are for in `function` (legalised): for each op its name, the tensor it defines, and itself.

    They are what `structured` lowers, or what the only statement does where that is no contraction.
    """
    given = _simplified(function)
    function = in_parts(given, options, target, products=False)
    buffers = {t.name: _buffer(t) for t in function.tensors}
    found = nodes(function, options, target)
    ops = tuple(
        (n.name, n.cluster.output.tensor, paired(n.cluster.op(n.name, buffers), target))
        for n in found
        if n.cluster is not None
    )
    alone = movement.op_of(found[0], buffers) if found and len(given.statements) == 1 and not ops else None
    return ops if alone is None else ((alone.name, given.statements[0].target, alone),)


def sums_in_parts(function: BoundFunction, options: CpuOptions, target: Target) -> bool:
    """Does `function` (legalised), where no strategy says how, sum products in parts? No pipeline says that."""
    whole = _simplified(function)
    untold = replace(options, strategy=None)
    return in_parts(reorder(whole, untold, target), untold, target) != in_parts(whole, untold, target, products=False)


def staged(function: BoundFunction, options: CpuOptions, target: Target) -> BoundFunction:
    """`function` (legalised) with its reductions in as many parts as it is lowered with."""
    return in_parts(_simplified(function), options, target)


def only_contractions(function: BoundFunction, options: CpuOptions, target: Target) -> bool:
    """Are there but contractions in `function` (legalised), and what `structured` does with their results?"""
    function = in_parts(_simplified(function), options, target, products=False)
    return all(n.cluster is not None for n in nodes(function, options, target))


def split_initialisation(function: BoundFunction, s: BoundStatement) -> tuple[BoundStatement, ...]:
    """`op!` through subscripts that are not the plain indices fills the whole tensor first."""
    if not s.initialise or s.reduction is None or _plain(s):
        return (s,)
    tensor = function.tensor(s.target)
    indices = tuple(BoundIndex(mint(f"d{k}"), 0, extent) for k, extent in enumerate(tensor.shape))
    neutral = build.neutral(s.reduction, s.value.dtype)
    fill = BoundStatement(
        name=mint(s.name, "init"),
        target=s.target,
        subscripts=tuple(tc.Index(i.name, tc.INDEX_TYPE) for i in indices),
        reduction=None,
        initialise=False,
        value=tc.Const(neutral.value, s.value.dtype),
        indices=indices,
        left=len(indices),
    )
    return (fill, replace(s, initialise=False, checks=s.checks))


def _plain(s: BoundStatement) -> bool:
    """Do the subscripts enumerate the target point by point?"""
    singles = []
    for e in s.subscripts:
        form = affine(e)
        singles.append(form.single if form is not None else None)
    return None not in singles and len(set(singles)) == len(s.free)
