"""Lower a scheduled group to loops: parallel tile loops around its loop nests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.buffer_view import BufferView
from ...loop_ir.nodes import Buffer, LoopKind
from ...loop_ir.origins import with_origin
from ...lower_expr import LoweringScope, lower_access, lower_expr
from ...options import CpuOptions
from ...structured.language.plan_to_schedule import plan_to_schedule
from ...structured.language.primitives import Schedule
from ...structured.match.drop_unit_dims import drop_unit_dims
from ...structured.match.match_contraction import MatchedContraction
from ...structured.memory_bound.nest_plan import memory_bound_schedule
from ...structured.op import ACCUMULATOR
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, Tensor
from ..schedule.access_cost import is_fully_parallel, total_op_count, transposed_read_dim, vector_dim
from ..schedule.contraction_chain import with_chain_layouts
from ..schedule.fusion import FusionGroup
from ..schedule.legality import ScheduledGroup
from ..schedule.storage import (
    BufferExtent,
    find_storage_reuse,
    fits_register,
    needs_line_staging,
    nontemporal_outputs,
    temporary_footprint,
)
from ..schedule.tile_sizes import tile_order
from ..scop.scop import ScopStatement, statements_of
from .contraction_bridge import cluster_op, cluster_plan
from .lower_nest import INITIAL_VALUES, NestLowering
from .memory_bound_bridge import memory_bound_op, row_order_of, with_prefixed_names
from .tile_loops import TileRange, localized_buffer, tile_loops, tiles_of, with_remainders


def lower_group(
    function: BoundFunction,
    scheduled: ScheduledGroup,
    local: Sequence[Tensor],
    buffers: Mapping[str, Buffer],
    options: CpuOptions,
    target: CpuTarget,
) -> ir.Stmt:
    """The loop program of a scheduled group, with `local` temporaries in thread-private buffers."""
    group = scheduled.group
    function, local = _with_layouts(function, scheduled, local)
    tiles, counts = tiles_of(group, scheduled.sizes)

    sums = _stage_sums(function, scheduled, tiles)
    local = [t for t in local if t.name not in sums]
    within: dict[str, Buffer | BufferView[int]] = {**buffers, **sums}

    def body(tiles: tuple[TileRange, ...]) -> ir.Stmt:
        return _lower_group_body(function, scheduled, tiles, local, within, options, target)

    movement = scheduled.movement
    turned = _is_transposition(function, scheduled, target) if movement is None else movement.transposed
    static = any(n.cluster is not None for n in group.nodes) or turned
    inside = with_remainders(tiles, body) if static else body(tiles)
    if movement is None:
        order = tile_order(function, group, scheduled.leaves, target)
    else:
        order = row_order_of(movement, group)
        options = options if movement.shared else replace(options, grain_size=0)
    if group.serial is not None:
        start = _initialize_sums(function, scheduled, tiles, within, options, target)
        inside = tile_loops([tiles[group.serial]], [counts[group.serial]], inside, 0, options, "serial_tile")
        finish = [
            _copy_sums(function, cluster, sums[name], scheduled, tiles, buffers, target)
            for name, cluster in _list_sums(group)
            if name in sums
        ]
        inside = build.allocate([view.buffer for view in sums.values()], build.block(*start, inside, *finish))
        order = tuple(k for k in order if k != group.serial)
    walked = [tiles[k] for k in order], [counts[k] for k in order]
    return tile_loops(*walked, inside, total_op_count(function, scheduled.leaves), options)


def _initialize_sums(
    function: BoundFunction,
    scheduled: ScheduledGroup,
    tiles: Sequence[TileRange],
    buffers: Mapping[str, Buffer | BufferView[int]],
    options: CpuOptions,
    target: CpuTarget,
) -> list[ir.Stmt]:
    """Statements that initialize the sums over the serial row; they run before its first tile."""
    emitter = NestLowering(function, scheduled.group, tuple(tiles), buffers, options, target)
    sums = [leaf for leaf in scheduled.leaves if scheduled.group.adds_up(leaf.nodes[0])]
    return [with_origin(emitter.initialize_sums(leaf), statements_of(leaf.nodes), INITIAL_VALUES) for leaf in sums]


def _list_sums(group: FusionGroup) -> list[tuple[str, MatchedContraction]]:
    """The contractions that sum over the serial row, with the tensors that hold their sums."""
    clusters = (n.cluster for n in group.nodes if group.adds_up(n))
    return [(c.without_epilogue().output.tensor, c) for c in clusters if c is not None]


def _stage_sums(
    function: BoundFunction, scheduled: ScheduledGroup, tiles: Sequence[TileRange]
) -> dict[str, BufferView[int]]:
    """Private buffers for sums over the serial row that have an epilogue, or whose rows lie apart in memory.

    Every tile reads and writes all of such a sum, and rows that are a large power of two apart share few sets of a
    cache. After the last tile, the sums are copied out, and an epilogue is applied.
    """
    group, found = scheduled.group, dict[str, BufferView[int]]()
    for name, cluster in _list_sums(group):
        tensor = function.tensor(name)
        extents = temporary_footprint(tensor, group, scheduled.sizes)
        if cluster.epilogue is not None or not _is_dense(tensor, extents):
            own = replace(tensor, name=internal_name(name, "sums"), dtype=cluster.left.dtype)
            found[name] = localized_buffer(own, extents, tiles)
    return found


def _is_dense(tensor: Tensor, extents: Sequence[BufferExtent]) -> bool:
    """Whether a part of `tensor` has no gaps in memory."""
    distance = 1
    for stride, size in sorted((s, e.size) for s, e in zip(tensor.strides, extents, strict=True) if e.size > 1):
        if stride != distance:
            return False
        distance *= size
    return True


def _copy_sums(
    function: BoundFunction,
    cluster: MatchedContraction,
    view: BufferView[int],
    scheduled: ScheduledGroup,
    tiles: Sequence[TileRange],
    buffers: Mapping[str, Buffer],
    target: CpuTarget,
) -> ir.Stmt:
    """The loops that apply the epilogue of `cluster` to its sums in `view`, and store the results in their place."""
    sums = cluster.without_epilogue().output
    extents = temporary_footprint(function.tensor(sums.tensor), scheduled.group, scheduled.sizes)
    inner = [build.var(internal_name(sums.tensor, d.axis)) for d in view.digits]
    point = {d.axis: build.add(view.first[d.axis], i) for d, i in zip(view.digits, inner, strict=True)}
    for d, e in enumerate(extents):
        point.setdefault(d, build.const(0) if e.row is None else build.add(tiles[e.row].start, e.offset))
    total: ir.Expr = ir.Load(view.buffer, tuple(inner))
    values = {e.name: point[d] for d, e in enumerate(sums.subscripts) if isinstance(e, tc.Index)}
    scope = LoweringScope({**values, ACCUMULATOR: total}, buffers)
    value = total if cluster.epilogue is None else lower_expr(cluster.epilogue, scope)
    buffer, place = lower_access(cluster.output.tensor, cluster.output.subscripts, scope)
    nest: ir.Stmt = ir.Store(buffer, place, build.cast(value, buffer.type.dtype))
    factors = [(1, 1)] * (len(inner) - 1) + [(target.lanes(32), 1)]
    for digit, index, factor in reversed(list(zip(view.digits, inner, factors, strict=True))):
        kind = LoopKind.VECTOR if index is inner[-1] else LoopKind.SERIAL
        nest = ir.Loop(index.name, build.const(0), build.const(digit.extent), nest, kind, vector_factors=factor)
    return nest


def contraction_schedule(
    function: BoundFunction,
    scheduled: ScheduledGroup,
    node: ScopStatement,
    local: Sequence[Tensor],
    buffers: Mapping[str, Buffer],
    options: CpuOptions,
    target: CpuTarget,
) -> Schedule | None:
    """The schedule by which the contraction of `node`, or a group's only statement, is lowered; None if none is."""
    tiles, _ = tiles_of(scheduled.group, scheduled.sizes)
    function, local = _with_layouts(function, scheduled, local)
    if node.cluster is None:
        op = memory_bound_op(node, buffers) if len(scheduled.group.nodes) == 1 else None
        streams, through = _choose_nontemporal_tensors(function, scheduled, target)
        emitter = NestLowering(function, scheduled.group, tiles, buffers, options, target, streams, staged=through)
        found = scheduled.movement or (emitter.default_plan(scheduled) if op is not None else None)
        return None if op is None or found is None else memory_bound_schedule(with_prefixed_names(found, node), op)
    views: dict[str, Buffer | BufferView[int]] = {
        **buffers,
        **_allocate_local_buffers(local, scheduled, tiles),
        **_stage_sums(function, scheduled, tiles),
    }
    op = cluster_op(node, node.cluster, views, scheduled.group, tiles, target)
    plan = cluster_plan(node, node.cluster, op, scheduled.group, tiles, options, target)
    return plan_to_schedule(plan, drop_unit_dims(op))


def _lower_group_body(
    function: BoundFunction,
    scheduled: ScheduledGroup,
    tiles: tuple[TileRange, ...],
    local: Sequence[Tensor],
    buffers: Mapping[str, Buffer | BufferView[int]],
    options: CpuOptions,
    target: CpuTarget,
) -> ir.Stmt:
    """The nests of a group in order, inside given tiles, with buffers for `local` temporaries."""
    group = scheduled.group
    views = _allocate_local_buffers(local, scheduled, tiles)
    streams, through = _choose_nontemporal_tensors(function, scheduled, target)
    moved = scheduled.movement
    emitter = NestLowering(
        function, group, tiles, {**buffers, **views}, options, target, streams - views.keys(), moved, through
    )
    nests = [with_origin(emitter.leaf(leaf), statements_of(leaf.nodes)) for leaf in scheduled.leaves]
    registers = {t.name for leaf in scheduled.leaves for t in local if fits_register(t, group, leaf)}
    memory = dict.fromkeys(v.buffer for n, v in views.items() if n not in registers)
    return build.allocate(list(memory), build.block(*nests))


def _with_layouts(
    function: BoundFunction, scheduled: ScheduledGroup, local: Sequence[Tensor]
) -> tuple[BoundFunction, tuple[Tensor, ...]]:
    """`function` and its `local` temporaries with the layouts that a chain of contractions prefers."""
    function = with_chain_layouts(function, scheduled.group, scheduled.sizes, local)
    return function, tuple(function.tensor(t.name) for t in local)


def _allocate_local_buffers(
    local: Sequence[Tensor], scheduled: ScheduledGroup, tiles: Sequence[TileRange]
) -> dict[str, BufferView[int]]:
    """Buffers for the parts of `local` temporaries in `tiles`; some reuse the buffer of a temporary that is dead."""
    group, sizes = scheduled.group, scheduled.sizes
    extents = {t.name: temporary_footprint(t, group, sizes) for t in local}
    views = {t.name: localized_buffer(t, extents[t.name], tiles) for t in local}
    if not any(n.cluster is not None for n in group.nodes):
        return views
    registers = {t.name for leaf in scheduled.leaves for t in local if fits_register(t, group, leaf)}
    for name, other in find_storage_reuse(group, [t for t in local if t.name not in registers]).items():
        if extents[name] == extents[other] and not _reads_before(scheduled, other, name):
            views[name] = views[other]
    return views


def _reads_before(scheduled: ScheduledGroup, tensor: str, written: str) -> bool:
    """Whether, in the nest that writes `written`, an earlier statement accesses `tensor`, perhaps at other points."""
    for leaf in scheduled.leaves:
        writers = [k for k, n in enumerate(leaf.nodes) if any(w.tensor == written for w in n.writes)]
        if writers and any(tensor in n.tensors for n in leaf.nodes[: writers[0]]):
            return True
    return False


def _choose_nontemporal_tensors(
    function: BoundFunction, scheduled: ScheduledGroup, target: CpuTarget
) -> tuple[frozenset[str], bool]:
    """The tensors that a group stores non-temporally, and whether it transposes through a buffer."""
    group, movement = scheduled.group, scheduled.movement
    if movement is not None:
        return frozenset(w.tensor for n in group.nodes for w in n.writes if movement.nontemporal), movement.staged
    if _is_transposition(function, scheduled, target) and (through := needs_line_staging(function, group, target)):
        return through, True
    return nontemporal_outputs(function, group, target), False


def _is_transposition(function: BoundFunction, scheduled: ScheduledGroup, target: CpuTarget) -> bool:
    """Whether the group is a single pointwise nest that transposes; its blocks need no masks in static tiles."""
    if len(scheduled.leaves) > 1 or not is_fully_parallel(scheduled.leaves[0]):
        return False
    lanes = vector_dim(function, scheduled.leaves[0], target)
    return lanes is not None and transposed_read_dim(function, scheduled.leaves[0], lanes) is not None
