"""Which nodes of a graph become one def, and the def.

A region is a set of nodes that a table of operations can express and that may run as one: nothing outside of it comes
between two of its nodes. Views are free, so they belong to nobody: each side makes its own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..calling.arguments import TYPES
from .aten import INNER, TABLE, VIEWS, Context, Unsupported, aten, part, retyped
from .body import Body
from .values import Value

WORTH = 1_000_000
"""Operations that make a region of one node worth a kernel: a product, a convolution."""
LARGEST = 48
"""Nodes of a region: a def of more statements takes long to compile."""


@dataclass(slots=True)
class Region:
    """Nodes that become one def, in the order of the graph.

    Attributes:
        text: the def. inputs, outputs: the nodes that it takes and gives, in order.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    text: str = ""
    inputs: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in VIEWS or _is_piece(node))


def _is_piece(node: fx.Node) -> bool:
    """Is this one of the tensors of a split?"""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    return node.args[0].target is aten.split_with_sizes.default


def is_expressible(node: fx.Node) -> bool:
    """Is there a formula for `node`, if its arguments allow it, on CPU tensors of known sizes?"""
    if node.op != "call_function" or not (node.target in TABLE or _is_piece(node)):
        return False
    tensors = [n for n in (node, *node.all_input_nodes) if n.target is not aten.split_with_sizes.default]
    return all(_is_plain(n.meta.get("val")) for n in tensors)


def _is_plain(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    sizes = all(isinstance(n, int) and n > 0 for n in value.shape)
    return sizes and value.device.type == "cpu" and value.dtype in TYPES and value.layout is torch.strided


def regions(graph: fx.Graph) -> list[Region]:
    """The regions of `graph`, each node in the last of those before it that it can join; without defs yet."""
    found: dict[int, list[fx.Node]] = {}
    of: dict[fx.Node, int] = {}
    needs: dict[fx.Node | int, set[fx.Node | int]] = {}
    for node in graph.nodes:
        if is_view(node):
            continue
        units = {of.get(n, n) for n in _sources(node)}
        unit: fx.Node | int = node
        if is_expressible(node):
            open_ones = sorted((u for u in units if isinstance(u, int) and len(found[u]) < LARGEST), reverse=True)
            unit = of[node] = next((r for r in open_ones if not _reaches(units - {r}, r, needs)), len(of))
            found.setdefault(unit, []).append(node)
        needs.setdefault(unit, set()).update(units - {unit})
    _merge(found, needs)
    position = {node: k for k, node in enumerate(graph.nodes)}
    return [Region(sorted(nodes, key=position.__getitem__)) for nodes in found.values()]


def _merge(found: dict[int, list[fx.Node]], needs: dict[fx.Node | int, set[fx.Node | int]]) -> None:
    """Put regions into those that need them, where nothing comes between and there is room."""
    for region in sorted(found):
        for source in sorted((u for u in needs[region] if isinstance(u, int)), reverse=True):
            if len(found[region]) + len(found[source]) > LARGEST or _reaches(needs[region] - {source}, source, needs):
                continue
            found[region] += found.pop(source)
            needs[region] |= needs.pop(source)
            for units in needs.values():
                if source in units:
                    units.remove(source)
                    units.add(region)
            needs[region].discard(region)


def _reaches(units: Iterable[fx.Node | int], region: int, needs: Mapping[fx.Node | int, set[fx.Node | int]]) -> bool:
    """Does one of `units` need `region`?"""
    seen: set[fx.Node | int] = set()
    rest = list(units)
    while rest:
        unit = rest.pop()
        if unit == region:
            return True
        if unit not in seen:
            seen.add(unit)
            rest += needs.get(unit, ())
    return False


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """What `node` computes from, through views."""
    for n in node.all_input_nodes:
        if is_view(n) or _is_split(n):
            yield from _sources(n)
        else:
            yield n


def _is_split(node: fx.Node) -> bool:
    return node.target is aten.split_with_sizes.default


# --- a region as a def -------------------------------------------------------------------------------------------


def described(region: Region) -> Region:
    """`region` with its def. Raises Unsupported where an operation has no formula for its arguments."""
    writer = _Writer(frozenset(region.nodes))
    for node in region.nodes:
        writer.write(node)
    outputs = tuple(n for n in region.nodes if any(user not in writer.inside for user in _users(n)))
    for node in outputs:
        writer.body.returned(writer.values[node])
    return Region(region.nodes, writer.body.text, tuple(writer.inputs), outputs)


def is_worth_it(region: Region) -> bool:
    """Is there enough in `region` that one kernel may beat torch's?"""
    return len(region.nodes) > 1 or sum(map(operations, region.nodes)) >= WORTH


def computes(node: fx.Node) -> bool:
    """Is `node` work, rather than a view or a part of what another node gives?"""
    return node.op == "call_function" and not (is_view(node) or _is_split(node) or node.target is operator.getitem)


def operations(node: fx.Node) -> int:
    """Floating-point operations of a product or a convolution, one for each element of anything else; 0 of views."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not computes(node):
        return 0
    elements = math.prod(value.shape)
    return 2 * elements * INNER[node.target](node) if node.target in INNER else elements


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """What computes from `node`, through views."""
    for user in node.users:
        if is_view(user) or _is_split(user):
            yield from _users(user)
        else:
            yield user


class _Writer:
    """Translates nodes in order. Attributes: the def; the value of each node; the nodes that are parameters."""

    def __init__(self, inside: frozenset[fx.Node]) -> None:
        self.inside, self.body = inside, Body()
        self.values: dict[fx.Node, Value] = {}
        self.inputs: list[fx.Node] = []

    def write(self, node: fx.Node) -> None:
        value = self._translated(node)
        users = list(_users(node))
        shared = len(users) > 1 or any(user not in self.inside for user in users)
        if shared and not (value.access or value.constant):
            value = self.body.kept(value)
        self.values[node] = value

    def _translated(self, node: fx.Node) -> Value:
        meta = node.meta["val"]
        context = Context(self.body, tuple(meta.shape), TYPES[meta.dtype])
        if _is_piece(node):
            value = self._piece(context, node)
        else:
            arguments: Any = fx.node.map_arg(node.args, self._argument)
            named: Any = fx.node.map_arg(node.kwargs, self._argument)
            value = TABLE[node.target](context, *arguments, **named)
        if value.shape != context.shape:
            raise Unsupported(f"{node.target} gives {value.shape} instead of {context.shape}")
        return retyped(context, value)

    def _piece(self, context: Context, node: fx.Node) -> Value:
        split: Any = node.args[0]
        source, sizes, dimension = (*split.args, 0)[:3]
        return part(context, self._value(source), sizes, dimension, int(node.args[1]))  # type: ignore[arg-type]

    def _argument(self, node: fx.Node) -> Any:
        return self._value(node)

    def _value(self, node: fx.Node) -> Value:
        if node not in self.values:
            if is_view(node) and self._is_mine(node):
                self.values[node] = self._translated(node)
            else:
                meta = node.meta["val"]
                self.inputs.append(node)
                self.values[node] = self.body.parameter(tuple(meta.shape), TYPES[meta.dtype])
        return self.values[node]

    def _is_mine(self, node: fx.Node) -> bool:
        """Does a view show something that is made here, or nothing at all?"""
        sources = list(_sources(node))
        return all(n in self.inside for n in sources) and is_expressible(node)
