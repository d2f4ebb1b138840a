"""The polyhedral lowering for CPUs: affine programs and gathers as fused, vectorized, parallel loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TypeVar

from ...core.decisions import Decision, is_recording, note_decision
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...core.knobs import current_knobs
from ...core.pass_steps import run_step
from ...loop_ir import build
from ...loop_ir.nodes import Buffer, Kernel, Module, Type
from ...options import CpuOptions
from ...structured.language.primitives import Schedule
from ...structured.language.schedule_types import schedule_for
from ...structured.match.bf16_pairs import pack_bf16_pairs
from ...structured.match.match_contraction import MatchedContraction, match_contraction, why_unprofitable
from ...structured.op import StructuredOp
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, Role, Tensor
from ...tc_lang.transforms.join_epilogues import join_epilogues
from ...tc_lang.transforms.restrict_domains import restrict_domains
from ...tc_lang.transforms.split_wraparound import split_wraparound
from ..schedule.fusion import FusionGroup
from ..schedule.legality import ScheduledGroup, check_legal
from ..schedule.loop_nest import build_nests
from ..schedule.profitable_fusion import fuse_statements
from ..schedule.schedule_printer import format_schedule
from ..schedule.storage import fits_register, local_temporaries, temporary_footprint
from ..schedule.tile_sizes import row_tiles
from ..scop.collapse import collapse
from ..scop.isl_affine import to_isl_affine
from ..scop.pair_factors import pair_factors
from ..scop.reorder_contractions import reorder
from ..scop.scop import LOCK, Scop, ScopStatement, node_name, statements_of
from ..scop.split_k import split_reductions
from . import memory_bound_bridge
from .lower_group import contraction_schedule, lower_group
from .subscript_checks import BoundsCheckLoops, build_check_loops

R = TypeVar("R")
SCOPS = 2
"""The number of cached scops: a search lowers the same def many times."""


def lower_cpu(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> Module:
    """The module of `function` (legalized): one kernel per fused group, in order.

    Raises:
        CannotLower: this lowering cannot express the function.
    """
    return _with_or_without_clusters(options, lambda o: _lower_function(function, o, target))


def explain_cpu(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> str:
    """The schedule tree of `function` (legalized) as indented text."""
    return _with_or_without_clusters(options, lambda o: _explain_plan(function, o, target))


def _simplify_domains(function: BoundFunction) -> BoundFunction:
    """`function` with products in steps of two factors, dimensions fused, masked domains restricted, epilogues behind
    their sums, and reads split to avoid remainders in subscripts of rows."""
    return split_wraparound(join_epilogues(restrict_domains(collapse(pair_factors(function)))))


def _with_or_without_clusters(options: CpuOptions, run: Callable[[CpuOptions], R]) -> R:
    """`run(options)`; if it refuses the tile of a fused contraction, retry without fusion, then without
    `use_microkernels`."""
    attempts = [(options, "all statements apart"), (replace(options, fusion="min"), "all contractions as loops")]
    with LOCK:
        for attempt, otherwise in attempts[options.fusion == "min" :]:
            try:
                return run(attempt)
            except CannotLower as refusal:
                if not options.use_microkernels or options.schedule is not None:
                    raise
                note_decision(Decision("lowering", (), otherwise, f"refused: {refusal}"))
        return run(replace(options, use_microkernels=False))


def _explain_plan(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> str:
    function = split_reductions(reorder(_simplify_domains(function), options, target), options, target)
    plan = plan_schedule(_make_scop(function, scop_nodes(function, options, target)), options, target)
    return _format_plan(function, plan, options, target)


def _format_plan(
    function: BoundFunction, plan: Sequence[ScheduledGroup], options: CpuOptions, target: CpuTarget
) -> str:
    buffers = {t.name: _make_buffer(t) for t in function.tensors}

    def describe_node(scheduled: ScheduledGroup, node: ScopStatement) -> Schedule | None:
        local = _local_tensors(function, plan, scheduled, options)
        return contraction_schedule(function, scheduled, node, local, buffers, options, target)

    return "\n".join(format_schedule(plan, describe_node))


def _lower_function(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> Module:
    domains = run_step("simplify_domains", lambda: _simplify_domains(function), repr)
    reordered = run_step("reorder", lambda: reorder(domains, options, target), repr)
    function = run_step("split_reductions", lambda: split_reductions(reordered, options, target), repr)

    def show_plan(plan: Sequence[ScheduledGroup]) -> str:
        with LOCK:
            return _format_plan(function, plan, options, target)

    scop = run_step("scop", lambda: _make_scop(function, scop_nodes(function, options, target)))
    plan = run_step("schedule", lambda: plan_schedule(scop, options, target), show_plan)
    if current_knobs().verify:
        check_legal(scop, plan)
    return run_step("generate", lambda: _generate_module(function, plan, options, target))


def _generate_module(
    function: BoundFunction, plan: Sequence[ScheduledGroup], options: CpuOptions, target: CpuTarget
) -> Module:
    """The module of a schedule: for each group a kernel, preceded by kernels that check its subscripts."""
    buffers = {t.name: _make_buffer(t) for t in function.tensors}
    kernels: list[Kernel] = []
    checks = BoundsCheckLoops()
    contracted: set[str] = set()
    for scheduled in plan:
        before = checks
        for s in (s for n in scheduled.group.nodes for s in n.statements):
            checks += build_check_loops(function, s, buffers, len(checks.sites), options, target)
        for nest in checks.loops[len(before.loops) :]:  # separate kernels, because a check may rely on an earlier one
            kernels.append(Kernel(internal_name(function.name, f"check{len(kernels)}"), nest))
        local = _local_tensors(function, plan, scheduled, options)
        contracted |= {t.name for t in local}
        if is_recording():
            _record_temporaries(function, plan, scheduled, local)
        body = lower_group(function, scheduled, local, buffers, options, target)
        kernels.append(Kernel(function.name if len(plan) == 1 else internal_name(function.name, len(kernels)), body))
    return _make_module(function, buffers, contracted, kernels, checks)


def _record_temporaries(
    function: BoundFunction, plan: Sequence[ScheduledGroup], scheduled: ScheduledGroup, local: Sequence[Tensor]
) -> None:
    """Record where the temporaries that a group writes are stored."""
    group = scheduled.group
    for node in group.nodes:
        for tensor in (function.tensor(w.tensor) for w in node.writes):
            if tensor.role is not Role.TEMPORARY:
                continue
            whole = float(tensor.size * tensor.dtype.size)
            names = statements_of(n for n in group.nodes if tensor.name in n.tensors)
            if tensor not in local:
                readers = sum(any(tensor.name in n.tensors for n in s.group.nodes) for s in plan)
                why = f"{readers} kernels use it" if readers > 1 else "temporaries are not to be made local"
                note_decision(Decision("temporary", names, f"{tensor.name} in memory", why, (("bytes", whole),)))
            elif any(fits_register(tensor, group, leaf) for leaf in scheduled.leaves):
                why = "it is written and read at one point of a loop"
                numbers = ("bytes", 0.0), ("bytes saved", whole)
                note_decision(Decision("temporary", names, f"{tensor.name} in a register", why, numbers))
            else:
                footprint = temporary_footprint(tensor, group, scheduled.sizes)
                kept = float(prod(e.size for e in footprint) * tensor.dtype.size)
                numbers = ("bytes", kept), ("bytes saved", whole)
                why = "only this kernel uses it: each thread keeps what a tile needs"
                note_decision(Decision("temporary", names, f"{tensor.name} in a buffer per thread", why, numbers))


def _local_tensors(
    function: BoundFunction, plan: Sequence[ScheduledGroup], scheduled: ScheduledGroup, options: CpuOptions
) -> tuple[Tensor, ...]:
    """The temporaries that are private to a thread in a group of `plan`."""
    if not options.localize_temporaries:
        return ()
    return local_temporaries(function, [s.group for s in plan], scheduled.group)


@lru_cache(SCOPS)
def _make_scop(function: BoundFunction, nodes: tuple[ScopStatement, ...]) -> Scop:
    """The scop of `function`, cached, so that compilations with other options reuse isl's results."""
    return Scop(function, nodes)


def plan_schedule(scop: Scop, options: CpuOptions, target: CpuTarget) -> tuple[ScheduledGroup, ...]:
    """The schedule: fusion groups in order, each with its tile sizes and nests."""
    plan = []
    buffers = {t.name: _make_buffer(t) for t in scop.function.tensors}
    for group in fuse_statements(scop, options, target):
        fuse = options.fusion != "min"
        wanted = memory_bound_bridge.requested_plan(group, buffers, options, target)
        if wanted is not None:
            sizes = memory_bound_bridge.tile_sizes_of(wanted, group)
        else:
            everything = build_nests(scop, group, range(len(group.rows)), fuse=fuse)
            sizes = row_tiles(scop.function, group, everything, options, target)
        if is_recording():
            _record_tiles(scop, group, sizes, options, wanted is not None)
        points = [k for k, size in enumerate(sizes) if size > 1]
        plan.append(ScheduledGroup(group, sizes, build_nests(scop, group, points, fuse=fuse), wanted))
    return tuple(plan)


def _record_tiles(
    scop: Scop, group: FusionGroup, sizes: Sequence[int], options: CpuOptions, is_scheduled: bool
) -> None:
    """Record the work of one iteration of a group's shared loops."""
    rows = ", ".join(
        f"{row.places[0][1][0]} {size} of {row.extent}" for row, size in zip(group.rows, sizes, strict=True)
    )
    if is_scheduled or options.tile:
        why = "the schedule says so" if is_scheduled else "the option tile says so"
    elif not group.rows:
        why = "iterations of each loop depend on one another"
    elif any(n.cluster is not None for n in group.nodes):
        alone = len(group.nodes) == 1
        why = "a contraction alone tiles itself" if alone else "a tile of what the chain hands on stays in half of L2"
    else:
        why = "long pieces along the lanes, and enough of them for the threads"
    counts = (-(-row.extent // size) for row, size in zip(group.rows, sizes, strict=True))
    numbers = (("tiles", float(prod(counts))), ("independent iterations", float(group.parallelism)))
    note_decision(Decision("tiles", statements_of(group.nodes), rows or "no shared loop", why, numbers))


def _make_module(
    function: BoundFunction,
    buffers: dict[str, Buffer],
    contracted: set[str],
    kernels: list[Kernel],
    checks: BoundsCheckLoops,
) -> Module:
    arguments = tuple(buffers[t.name] for t in function.tensors if t.role is not Role.TEMPORARY)
    temporaries = tuple(
        buffers[t.name] for t in function.tensors if t.role is Role.TEMPORARY and t.name not in contracted
    )
    written = tuple(t.name for t in function.tensors if t.role in (Role.OUTPUT, Role.INOUT))
    memory = (*temporaries, *checks.temporaries)
    partial = frozenset(s.target for s in function.statements if s.elements)
    return Module(function.name, arguments, memory, tuple(kernels), checks.sites, written, partial)


def _make_buffer(tensor: Tensor) -> Buffer:
    return Buffer(tensor.name, Type(tensor.dtype), tensor.shape, tensor.strides)


def scop_nodes(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> tuple[ScopStatement, ...]:
    """The nodes of the scop: contractions with their neighbors (clusters) if `use_microkernels`, and other statements.

    Statements without instances are dropped.
    """
    tensors = {t.name: t for t in function.tensors}
    buffers = {t.name: _make_buffer(t) for t in function.tensors}
    found: list[ScopStatement] = []
    position = 0
    while position < len(function.statements):
        cluster = match_contraction(function.statements, position, tensors) if options.use_microkernels else None
        name = node_name(function.statements[position])
        reason = _why_not_lowered_as_contraction(cluster, name, buffers, options, target)
        if options.use_microkernels and is_recording():
            _record_lowering(function.statements[position], cluster, reason)
        if cluster is not None and reason is None:
            found.append(ScopStatement(name, cluster.statements, cluster))
            position += len(cluster.statements)
            continue
        for part in split_initialization(function, function.statements[position]):
            if all(i.extent for i in part.free):
                found.append(ScopStatement(node_name(part), (part,)))
        position += 1
    return tuple(found)


def _record_lowering(s: BoundStatement, cluster: MatchedContraction | None, reason: str | None) -> None:
    """Record the lowering of a statement with a reduction."""
    if cluster is not None and reason is None:
        names = tuple(x.name for x in cluster.statements)
        note_decision(Decision("lowering", names, REGISTER_TILES, "a sum of products with statements around it"))
    elif s.reduction is not None and s.reduction_indices:
        note_decision(Decision("lowering", (s.name,), "loops", reason or ""))


REGISTER_TILES = "register tiles of a micro-kernel"


def _why_not_lowered_as_contraction(
    cluster: MatchedContraction | None, name: str, buffers: dict[str, Buffer], options: CpuOptions, target: CpuTarget
) -> str | None:
    if cluster is None:
        return "not a contraction"
    asked = schedule_for(options.schedule, name, cluster.output.tensor) is not None
    return why_unprofitable(cluster, buffers, target, asked=asked)


def find_contractions(
    function: BoundFunction, options: CpuOptions, target: CpuTarget
) -> tuple[tuple[str, str, StructuredOp], ...]:
    """The ops in `function` (legalized) that schedules apply to, as (name, tensor that it defines, op).

    These are the contractions that `use_microkernels` lowers; without any, the only statement of a def.
    """
    given = _simplify_domains(function)
    function = split_reductions(given, options, target, products=False)
    buffers = {t.name: _make_buffer(t) for t in function.tensors}
    found = scop_nodes(function, options, target)
    ops = tuple(
        (n.name, n.cluster.output.tensor, pack_bf16_pairs(n.cluster.op(n.name, buffers), target))
        for n in found
        if n.cluster is not None
    )
    alone = (
        memory_bound_bridge.memory_bound_op(found[0], buffers)
        if found and len(given.statements) == 1 and not ops
        else None
    )
    return ops if alone is None else ((alone.name, given.statements[0].target, alone),)


def splits_reductions_in(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> bool:
    """Whether `function` (legalized), without a schedule, is reordered or split-K, which no schedule can express."""
    whole = _simplify_domains(function)
    unscheduled = replace(options, schedule=None)
    return split_reductions(reorder(whole, unscheduled, target), unscheduled, target) != split_reductions(
        whole, unscheduled, target, products=False
    )


def with_split_stages(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> BoundFunction:
    """`function` (legalized) with reductions split as the lowering does."""
    return split_reductions(_simplify_domains(function), options, target)


def has_only_contractions(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> bool:
    """Whether `function` (legalized) has only contractions and statements that `use_microkernels` fuses with them."""
    function = split_reductions(_simplify_domains(function), options, target, products=False)
    return all(n.cluster is not None for n in scop_nodes(function, options, target))


def has_contractions(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> bool:
    """Whether `use_microkernels` lowers statements of `function` (legalized), unless a sum is split."""
    return any(n.cluster is not None for n in scop_nodes(_simplify_domains(function), options, target))


def split_initialization(function: BoundFunction, s: BoundStatement) -> tuple[BoundStatement, ...]:
    """`s`, preceded by a fill of its target if it initializes (`op!`) through subscripts that may skip elements."""
    if not s.initialize or s.reduction is None or _enumerates_target(s):
        return (s,)
    tensor = function.tensor(s.target)
    indices = tuple(BoundIndex(internal_name(f"d{k}"), 0, extent) for k, extent in enumerate(tensor.shape))
    neutral = build.neutral(s.reduction, s.value.dtype)
    fill = BoundStatement(
        name=internal_name(s.name, "init"),
        target=s.target,
        subscripts=tuple(tc.Index(i.name, tc.INDEX_TYPE) for i in indices),
        reduction=None,
        initialize=False,
        value=tc.Const(neutral.value, s.value.dtype),
        indices=indices,
        num_free=len(indices),
    )
    return (fill, replace(s, initialize=False, checks=s.checks))


def _enumerates_target(s: BoundStatement) -> bool:
    """Whether each subscript is a distinct index (plus a constant), so that the indices enumerate the target."""
    singles = []
    for e in s.subscripts:
        form = to_isl_affine(e)
        singles.append(form.single if form is not None else None)
    return None not in singles and len(set(singles)) == len(s.free)
