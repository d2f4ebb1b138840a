"""A scheduled group as a loop program: parallel tile loops around the nests of its leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..loop_ir import build
from ..loop_ir import nodes as ir
from ..loop_ir.nodes import Buffer
from ..options import CpuOptions
from ..structured.describe import pipeline_of
from ..structured.movement import pipeline_of_movement
from ..structured.normalise import normalise
from ..structured.pipeline import Pipeline
from ..target import Target
from ..tc_lang.function import BoundFunction, Tensor
from .clusters import cluster_op, cluster_plan
from .legality import Scheduled
from .locality import all_work, crossing, is_pointwise, vector_dim
from .movement import op_of, prefixed
from .movement import order as loops_of
from .nests import Emitter
from .scop import Node
from .storage import footprint, in_register, leaves_in_lines, streamed
from .tiles import Tile, contracted, tile_loops, tiles_of, with_remainders
from .tiling import tile_order


def emit(
    function: BoundFunction,
    scheduled: Scheduled,
    local: Sequence[Tensor],
    buffers: Mapping[str, Buffer],
    options: CpuOptions,
    target: Target,
) -> ir.Stmt:
    """The loop program of a scheduled group, with `local` temporaries in thread-private buffers."""
    group = scheduled.group
    tiles, counts = tiles_of(group, scheduled.sizes)

    def body(tiles: tuple[Tile, ...]) -> ir.Stmt:
        return _body(function, scheduled, tiles, local, buffers, options, target)

    movement = scheduled.movement
    turned = _is_transposition(function, scheduled, target) if movement is None else movement.turned
    static = any(n.cluster is not None for n in group.nodes) or turned
    inside = with_remainders(tiles, body) if static else body(tiles)
    if movement is None:
        order = tile_order(function, group, scheduled.leaves, target)
    else:
        order = loops_of(movement, group)
        options = options if movement.shared else replace(options, grain=0)
    walked = [tiles[k] for k in order], [counts[k] for k in order]
    return tile_loops(*walked, inside, all_work(function, scheduled.leaves), options)


def pipeline(
    function: BoundFunction,
    scheduled: Scheduled,
    node: Node,
    buffers: Mapping[str, Buffer],
    options: CpuOptions,
    target: Target,
) -> Pipeline | None:
    """How the cluster of `node`, or the only statement of a group, is lowered; None where no pieces say that."""
    tiles, _ = tiles_of(scheduled.group, scheduled.sizes)
    if node.cluster is None:
        op = op_of(node, buffers) if len(scheduled.group.nodes) == 1 else None
        streams, through = _streams(function, scheduled, target)
        emitter = Emitter(function, scheduled.group, tiles, buffers, options, target, streams, staged=through)
        found = scheduled.movement or (emitter.decided(scheduled) if op is not None else None)
        return None if op is None or found is None else pipeline_of_movement(prefixed(found, node), op)
    op = cluster_op(node, node.cluster, buffers, tiles, target)
    plan = cluster_plan(node, node.cluster, op, scheduled.group, tiles, options, target)
    return pipeline_of(plan, normalise(op))


def _body(
    function: BoundFunction,
    scheduled: Scheduled,
    tiles: tuple[Tile, ...],
    local: Sequence[Tensor],
    buffers: Mapping[str, Buffer],
    options: CpuOptions,
    target: Target,
) -> ir.Stmt:
    """The nests of a group in order, inside given tiles, with the temporaries that are local to them."""
    group = scheduled.group
    views = {t.name: contracted(t, footprint(t, group, scheduled.sizes), tiles) for t in local}
    streams, through = _streams(function, scheduled, target)
    moved = scheduled.movement
    emitter = Emitter(
        function, group, tiles, {**buffers, **views}, options, target, streams - views.keys(), moved, through
    )
    nests = [emitter.leaf(leaf) for leaf in scheduled.leaves]
    registers = {t.name for leaf in scheduled.leaves for t in local if in_register(t, group, leaf)}
    return build.allocate([v.buffer for n, v in views.items() if n not in registers], build.block(*nests))


def _streams(function: BoundFunction, scheduled: Scheduled, target: Target) -> tuple[frozenset[str], bool]:
    """The tensors that a group writes past the caches, and whether what it turns goes through a buffer."""
    group, movement = scheduled.group, scheduled.movement
    if movement is not None:
        return frozenset(w.tensor for n in group.nodes for w in n.writes if movement.streaming), movement.staged
    if _is_transposition(function, scheduled, target) and (through := leaves_in_lines(function, group, target)):
        return through, True
    return streamed(function, group, target), False


def _is_transposition(function: BoundFunction, scheduled: Scheduled, target: Target) -> bool:
    """Is the group one pointwise nest with reads to transpose, whose blocks need no masks in tiles of known size?"""
    if len(scheduled.leaves) > 1 or not is_pointwise(scheduled.leaves[0]):
        return False
    lanes = vector_dim(function, scheduled.leaves[0], target)
    return lanes is not None and crossing(function, scheduled.leaves[0], lanes) is not None
