"""Contractions inside a group: each as a structured op on the part of its domain inside the tiles, and its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ArgumentError, CannotLower
from ..loop_ir import build
from ..loop_ir import nodes as ir
from ..loop_ir.nodes import Buffer
from ..loop_ir.promotion import View
from ..options import CpuOptions
from ..structured.op import StructuredOp
from ..structured.pairs import paired
from ..structured.plan import Plan
from ..structured.recognise import Cluster
from ..structured.settle import plan_for
from ..structured.strategy import meant_for
from ..target import Target
from .schedule import Group
from .scop import Node
from .tiles import Tile


def cluster_op(
    node: Node, cluster: Cluster, buffers: Mapping[str, Buffer | View[int]], tiles: Sequence[Tile], target: Target
) -> StructuredOp:
    """A cluster on the part of its domain that lies in `tiles`."""
    parts: dict[str, tuple[ir.Expr, int]] = {}
    for tile in tiles:
        index, shift = tile.row.place(node)
        parts[index] = (build.sub(tile.start, shift), min(tile.size, tile.row.extent))
    return paired(cluster.op(node.name, buffers, parts), target)


def cluster_plan(
    node: Node,
    cluster: Cluster,
    op: StructuredOp,
    group: Group,
    tiles: Sequence[Tile],
    options: CpuOptions,
    target: Target,
) -> Plan:
    """How `op`, inside `tiles`, is lowered. Raises ArgumentError where the strategy asked for does not apply.

    Its loops may be parallel only where nothing is around them: no other nodes, and no loop over tiles.
    """
    strategy = meant_for(options.strategy, node.name, cluster.output.tensor)
    alone = len(group.nodes) == 1
    whole = all(t.size >= t.row.extent for t in tiles)
    try:
        return plan_for(strategy, op, target, parallel=alone and whole and options.grain > 0)
    except CannotLower as refusal:
        if strategy is None:
            raise
        raise ArgumentError(
            f"the strategy for '{cluster.output.tensor}' does not apply: {refusal}",
            suggestion="" if alone else "the contraction is fused with others; CpuOptions(fusion='min') keeps it alone",
        ) from refusal
