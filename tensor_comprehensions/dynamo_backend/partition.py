"""Which nodes of a graph become one def, and the def.

A region is a set of nodes that a table of operations can express and that may run as one: nothing outside of it comes
between two of its nodes. Views are free, so they belong to nobody: each side makes its own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..dispatch.arguments import TYPES
from . import convolution, matmul  # noqa: F401 (for what they enter into the tables)
from .def_builder import DefBuilder
from .index_views import Value, permute_value
from .op_table import (
    FLOPS,
    MULTI_OUTPUT_OPS,
    TABLE,
    VIEWS,
    TranslationContext,
    Unsupported,
    aten,
    cast_to_result,
    split_part,
)

SPLIT = aten.split_with_sizes.default
WORTH = 1_000_000
"""Operations that make a region of one node worth a kernel: a product, a convolution."""
LARGEST = 48
"""Nodes of a region: a def of more statements takes long to compile."""


@dataclass(slots=True)
class FusedRegion:
    """Nodes that become one def, in the order of the graph.

    Attributes:
        text: the def. inputs, outputs: the nodes that it takes and gives, in order.
        finite: which of the inputs may hold no infinity and no NaN for the def to give what torch gives.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    text: str = ""
    inputs: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()
    finite: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class UnsupportedArguments(Exception):
    """The formulas of an operation do not fit its arguments."""

    node: fx.Node
    why: str


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """What a region may be: at most `matmul` operations such as products; one of them is `alone`, or not."""

    products: int = 1 << 30
    alone: bool = False

    def allow(self, nodes: Sequence[fx.Node]) -> bool:
        heavy = sum(n.target in FLOPS for n in nodes)
        return len(nodes) <= LARGEST and heavy <= self.products and not (self.alone and heavy and len(nodes) > 1)


ANY = RegionLimits()


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in VIEWS or _is_piece(node, (SPLIT,)))


def _is_piece(node: fx.Node, of: Collection[Any] = MULTI_OUTPUT_OPS) -> bool:
    """Is this one of the results of an operation with several?"""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    return node.args[0].target in of


def is_expressible(node: fx.Node) -> bool:
    """Is there a formula for `node`, if its arguments allow it, on CPU tensors of known sizes?"""
    if node.op != "call_function" or not (
        node.target in TABLE or node.target in MULTI_OUTPUT_OPS or _is_piece(node, (SPLIT,))
    ):
        return False
    return all(_is_plain(n.meta.get("val")) for n in (node, *node.all_input_nodes) if n.target is not SPLIT)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(x is None or _is_plain(x) for x in value)
    if not isinstance(value, torch.Tensor):
        return False
    sizes = all(isinstance(n, int) and n > 0 for n in value.shape)
    return sizes and value.device.type == "cpu" and value.dtype in TYPES and value.layout is torch.strided


def find_regions(graph: fx.Graph, refused: Collection[fx.Node] = (), bounds: RegionLimits = ANY) -> list[FusedRegion]:
    """The regions of `graph`, each node in the last of those before it that it can join; without defs yet."""
    found: dict[int, list[fx.Node]] = {}
    of: dict[fx.Node, int] = {}
    needs: dict[fx.Node | int, set[fx.Node | int]] = {}
    for node in graph.nodes:
        if is_view(node) or _is_piece(node):
            continue
        units = {of.get(n, n) for n in _sources(node)}
        unit: fx.Node | int = node
        if is_expressible(node) and node not in refused:
            near = (u for u in units if isinstance(u, int) and bounds.allow([*found[u], node]))
            open_ones = sorted(near, reverse=True)
            unit = of[node] = next((r for r in open_ones if not _reaches(units - {r}, r, needs)), len(of))
            found.setdefault(unit, []).append(node)
        needs.setdefault(unit, set()).update(units - {unit})
    _merge(found, needs, bounds)
    position = {node: k for k, node in enumerate(graph.nodes)}
    return [FusedRegion(sorted(nodes, key=position.__getitem__)) for nodes in found.values()]


def _merge(
    found: dict[int, list[fx.Node]], needs: dict[fx.Node | int, set[fx.Node | int]], bounds: RegionLimits
) -> None:
    """Put regions into those that need them, where nothing comes between and there is room."""
    for region in sorted(found):
        for source in sorted((u for u in needs[region] if isinstance(u, int)), reverse=True):
            both = [*found[region], *found[source]]
            if not bounds.allow(both) or _reaches(needs[region] - {source}, source, needs):
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
        if is_view(n) or n.target is SPLIT or _is_piece(n):
            yield from _sources(n)
        else:
            yield n


# --- a region as a def -------------------------------------------------------------------------------------------


def emit_def(region: FusedRegion) -> FusedRegion:
    """`region` with its def. Raises UnsupportedArguments where an operation has no formula for its arguments."""
    writer = _Writer(frozenset(region.nodes))
    for node in region.nodes:
        try:
            writer.write(node)
        except Unsupported as refusal:
            raise UnsupportedArguments(node, str(refusal)) from None
    results = [piece for n in region.nodes for piece in (n.users if n.target in MULTI_OUTPUT_OPS else (n,))]
    outputs = tuple(n for n in results if any(user not in writer.inside for user in _users(n)))
    for node in outputs:
        order = memory_order(node)
        value = writer.values[node]
        writer.body.add_output(value if order == sorted(order) else permute_value(value, order))
    finite = tuple(writer.finite())
    return FusedRegion(region.nodes, writer.body.text, tuple(writer.inputs), outputs, finite)


def memory_order(node: fx.Node) -> list[int]:
    """The dimensions of what `node` gives in the order of memory, which views of it rely on."""
    meta = node.meta["val"]
    order = sorted(range(meta.ndim), key=lambda d: (meta.shape[d] != 1 and -meta.stride(d), d))
    dense = meta.permute(order).is_contiguous()
    return order if dense else list(range(meta.ndim))


def is_profitable(region: FusedRegion) -> bool:
    """Is there enough in `region` that one kernel may beat torch's?"""
    return len(region.nodes) > 1 or sum(map(op_flops, region.nodes)) >= WORTH


def is_compute(node: fx.Node) -> bool:
    """Is `node` work, rather than a view or a part of what another node gives?"""
    return node.op == "call_function" and not (is_view(node) or node.target is SPLIT or node.target is operator.getitem)


def op_flops(node: fx.Node) -> int:
    """Floating-point operations of a product or a convolution, one for each element of anything else; 0 of views."""
    value = node.meta.get("val")
    if not is_compute(node) or not isinstance(value, torch.Tensor | tuple | list):
        return 0
    if node.target in FLOPS:
        return FLOPS[node.target](node)
    return math.prod(value.shape) if isinstance(value, torch.Tensor) else 0


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """What computes from `node`, through views."""
    for user in node.users:
        if is_view(user) or user.target is SPLIT:
            yield from _users(user)
        else:
            yield user


class _Writer:
    """Translates nodes in order. Attributes: the def; the value of each node; the nodes that are parameters."""

    def __init__(self, inside: frozenset[fx.Node]) -> None:
        self.inside, self.body = inside, DefBuilder()
        self.values: dict[fx.Node, Value] = {}
        self.inputs: list[fx.Node] = []

    def write(self, node: fx.Node) -> None:
        if node.target in MULTI_OUTPUT_OPS:
            self._write_parts(node)
        else:
            self._define(node, self._translated(node))

    def finite(self) -> Iterator[int]:
        """Which parameters are weights that have to be finite."""
        for node in sorted(self.inside, key=lambda n: n.name):
            for weight in convolution.padded_weights(node):
                if weight not in self.inputs:
                    raise UnsupportedArguments(node, "its weights are computed, and there is padding")
                yield self.inputs.index(weight)

    def _define(self, node: fx.Node, value: Value) -> None:
        users = list(_users(node))
        shared = len(users) > 1 or any(user not in self.inside for user in users)
        if shared and not (value.access or value.constant):
            value = self.body.materialize(value)
        self.values[node] = value

    def _write_parts(self, node: fx.Node) -> None:
        first = next(x for x in node.meta["val"] if x is not None)
        parts = MULTI_OUTPUT_OPS[node.target](
            self._context(first), *self._mapped(node.args), **self._mapped(node.kwargs)
        )
        for piece in node.users:
            place: Any = piece.args[1]
            make = parts[place]
            if make is None:
                raise Unsupported(f"its result {place} is needed")
            self._define(piece, _fitting(self._context(piece.meta["val"]), make(), node))

    def _context(self, meta: torch.Tensor) -> TranslationContext:
        return TranslationContext(self.body, tuple(meta.shape), TYPES[meta.dtype])

    def _translated(self, node: fx.Node) -> Value:
        context = self._context(node.meta["val"])
        if _is_piece(node, (SPLIT,)):
            value = self._piece(context, node)
        else:
            value = TABLE[node.target](context, *self._mapped(node.args), **self._mapped(node.kwargs))
        return _fitting(context, value, node)

    def _mapped(self, arguments: Any) -> Any:
        value: Any = self._value
        return fx.node.map_arg(arguments, value)

    def _piece(self, context: TranslationContext, node: fx.Node) -> Value:
        split: Any = node.args[0]
        source, sizes, dimension = (*split.args, 0)[:3]
        return split_part(context, self._value(source), sizes, dimension, int(node.args[1]))  # type: ignore[arg-type]

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


def _fitting(context: TranslationContext, value: Value, node: fx.Node) -> Value:
    if value.shape != context.shape:
        raise Unsupported(f"{node.target} gives {value.shape} instead of {context.shape}")
    return cast_to_result(context, value)
