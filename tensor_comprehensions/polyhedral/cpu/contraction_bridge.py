"""Contractions inside a fusion group: the structured op of each on a tile of its domain, and its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.errors import ArgumentError, CannotLower
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.buffer_view import BufferView
from ...loop_ir.nodes import Buffer
from ...options import CpuOptions
from ...structured.language.schedule_types import schedule_for
from ...structured.language.select_schedule import make_contraction_plan
from ...structured.match.bf16_pairs import pack_bf16_pairs
from ...structured.match.match_contraction import MatchedContraction
from ...structured.op import StructuredOp, accumulator_var
from ...structured.plan import Plan
from ...target import CpuTarget
from ..schedule.fusion import FusionGroup
from ..scop.scop import ScopStatement
from .tile_loops import TileRange


def cluster_op(
    node: ScopStatement,
    cluster: MatchedContraction,
    buffers: Mapping[str, Buffer | BufferView[int]],
    group: FusionGroup,
    tiles: Sequence[TileRange],
    target: CpuTarget,
) -> StructuredOp:
    """The structured op of `cluster` on the part of its domain that lies in `tiles`.

    If `node` sums over the serial row of `group`, the op adds its sum to that of earlier tiles. Sums of sums round less
    than a single long sum.
    """
    parts: dict[str, tuple[ir.Expr, int]] = {}
    for tile in tiles:
        index, shift = tile.row.index_and_shift(node)
        parts[index] = (build.sub(tile.start, shift), min(tile.size, tile.row.extent))
    if not group.adds_up(node):
        return pack_bf16_pairs(cluster.op(node.name, buffers, parts), target)
    op = cluster.without_epilogue().op(node.name, buffers, parts)
    total = build.add(op.output, accumulator_var(op.dtype))
    return pack_bf16_pairs(replace(op, epilogue=total), target)


def cluster_plan(
    node: ScopStatement,
    cluster: MatchedContraction,
    op: StructuredOp,
    group: FusionGroup,
    tiles: Sequence[TileRange],
    options: CpuOptions,
    target: CpuTarget,
) -> Plan:
    """The plan of `op` inside `tiles`. Raises ArgumentError if the requested schedule does not apply.

    Its loops may be parallel only if the group has no other node, and no loop over tiles encloses it.
    """
    schedule = schedule_for(options.schedule, node.name, cluster.output.tensor)
    alone = len(group.nodes) == 1
    whole = all(t.size >= t.row.extent for t in tiles)
    try:
        return make_contraction_plan(schedule, op, target, parallel=alone and whole and options.grain_size > 0)
    except CannotLower as refusal:
        if schedule is None:
            raise
        raise ArgumentError(
            f"the schedule for '{cluster.output.tensor}' does not apply: {refusal}",
            suggestion="" if alone else "the contraction is fused with others; CpuOptions(fusion='min') keeps it alone",
        ) from refusal
