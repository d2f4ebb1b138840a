"""A def that only reduces, permutes or copies as a structured op, and what the pipeline for it means in loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ArgumentError, CannotLower
from ..loop_ir import build
from ..loop_ir.nodes import Buffer, Load
from ..naming import mint
from ..options import CpuOptions
from ..structured.movement import Movement, movement_of
from ..structured.op import Iterator, IteratorKind, StructuredOp
from ..structured.pipeline import Pipeline
from ..structured.strategy import meant_for
from ..target import Target
from ..tc_lang import function as tc
from ..translate import Scope, element, translate
from .schedule import Group
from .scop import Node


def op_of(node: Node, buffers: Mapping[str, Buffer]) -> StructuredOp | None:
    """The statement of `node` as an op without a second factor, named as its cluster would be; None for others."""
    (s, *others) = node.statements
    if node.cluster is not None or others or s.checks or s.domain:
        return None
    if any(_moves_by_data(e) for e in (*s.subscripts, s.value)):
        return None
    pairs = [(IteratorKind.PARALLEL, i) for i in s.free] + [(IteratorKind.REDUCTION, i) for i in s.reduced]
    iterators = tuple(Iterator(mint(node.name, i.name), i.extent, kind) for kind, i in pairs)
    values = {i.name: build.add(build.var(mint(node.name, i.name)), i.lower) for _, i in pairs}
    scope = Scope(values, buffers)
    buffer, where = element(s.target, s.subscripts, scope)
    value = translate(s.value, scope)
    one = build.const(1, value.type.dtype)
    return StructuredOp(node.name, iterators, Load(buffer, where), value, one, reduction=s.reduction or "+")


def _moves_by_data(e: tc.Expr) -> bool:
    inner = (x for a in tc.walk(e) if isinstance(a, tc.Access) for sub in a.subscripts for x in tc.walk(sub))
    return any(isinstance(x, tc.Access) for x in inner)


def asked(group: Group, buffers: Mapping[str, Buffer], options: CpuOptions, target: Target) -> Movement | None:
    """What the strategy says about the only node of a group; None where it says nothing.

    Raises ArgumentError where it does not apply.
    """
    for node in group.nodes:
        strategy = None if node.cluster is not None else meant_for(options.strategy, node.name, node.writes[0].tensor)
        if strategy is None:
            continue
        op = op_of(node, buffers)
        if op is None or len(group.nodes) > 1 or not isinstance(strategy, Pipeline):
            raise ArgumentError(
                f"the strategy for '{node.writes[0].tensor}' does not apply: it runs fused with others",
                suggestion="CpuOptions(fusion='min') keeps statements apart",
            )
        try:
            found = movement_of(strategy, op, target, parallel=options.grain > 0)
        except CannotLower as refusal:
            raise ArgumentError(f"the strategy for '{node.writes[0].tensor}' does not apply: {refusal}") from refusal
        return _unprefixed(found, node)
    return None


def prefixed(movement: Movement, node: Node) -> Movement:
    """With the names of the op's iterators."""
    tiles = tuple((mint(node.name, name), size) for name, size in movement.tiles)
    return replace(movement, tiles=tiles, vector=mint(node.name, movement.vector))


def _unprefixed(movement: Movement, node: Node) -> Movement:
    """With the names of the node's indices."""
    prefix = mint(node.name, "")
    tiles = tuple((name.removeprefix(prefix), size) for name, size in movement.tiles)
    return replace(movement, tiles=tiles, vector=movement.vector.removeprefix(prefix))


def sizes(movement: Movement, group: Group) -> tuple[int, ...]:
    """The tile size of each row. Raises ArgumentError for a loop that cannot be cut."""
    wanted = dict(movement.tiles)
    rows = {row.places[0][1][0]: row for row in group.rows}
    if unknown := [name for name in wanted if name not in rows]:
        raise ArgumentError(f"tile: the iterations of {unknown[0]} depend on one another")
    return tuple(wanted.get(name, row.extent) for name, row in rows.items())


def order(movement: Movement, group: Group) -> tuple[int, ...]:
    """The rows as the loop over tiles walks them, outermost first."""
    names = [row.places[0][1][0] for row in group.rows]
    cut = [names.index(name) for name, _ in movement.tiles]
    return (*(k for k in range(len(names)) if k not in cut), *cut)
