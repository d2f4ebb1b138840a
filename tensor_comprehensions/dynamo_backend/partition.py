"""The partition of a graph into regions that become defs.

A region is a set of nodes with formulas that can run as one operation: no node outside of it comes between two of its
nodes, neither one that depends on them nor an effect with a fixed place in the program. It ends where a repetition
ends, such as a layer of a network, so that equal layers have equal regions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from .graph_nodes import (
    has_fixed_order,
    is_expressible,
    is_piece,
    is_view,
    num_products,
    op_flops,
    op_weight,
    operands_through_views,
)
from .repeated_layers import number_repetitions

WORTH = 1_000_000
"""The minimum flops of a region of one node for a kernel to pay: a product, a convolution, a normalization."""
LARGEST = 48
"""The maximum operations of a region: a def of more statements takes long to compile."""


@dataclass(slots=True)
class FusedRegion:
    """Nodes that become one def, in the order of the graph.

    Attributes:
        text: the def. inputs, outputs: its inputs and results as nodes, in order.
        finite: the inputs that must be finite for the def to agree with torch.
        shows_nan: whether an output of the def is NaN if one of these is not finite.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    text: str = ""
    inputs: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()
    finite: tuple[int, ...] = ()
    shows_nan: bool = False


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """Limits of a region: at most `products` products, convolutions and the like, each in its own region if `alone`."""

    products: int = 1 << 30
    alone: bool = False

    def allow(self, nodes: Sequence[fx.Node]) -> bool:
        heavy = sum(map(num_products, nodes))
        if heavy > self.products or (self.alone and heavy and len(nodes) > 1):
            return False
        return len(nodes) == 1 or sum(map(op_weight, nodes)) <= LARGEST


ANY = RegionLimits()


def find_regions(graph: fx.Graph, refused: Collection[fx.Node] = (), bounds: RegionLimits = ANY) -> list[FusedRegion]:
    """The regions of `graph`, without defs yet: each node joins the latest region of its operands that it may."""
    found: dict[int, list[fx.Node]] = {}
    of: dict[fx.Node, int] = {}
    needs: dict[fx.Node | int, set[fx.Node | int]] = {}
    last_effect: set[fx.Node | int] = set()
    groups = number_repetitions(graph, LARGEST)
    for node in graph.nodes:
        if is_view(node) or is_piece(node):
            continue
        units = {of.get(n, n) for n in operands_through_views(node)}
        unit: fx.Node | int = node
        if has_fixed_order(node):
            units |= last_effect
            last_effect = {node}
        elif is_expressible(node) and node not in refused:
            near = (u for u in units if isinstance(u, int) and _may_join([*found[u], node], bounds, groups))
            open_ones = sorted(near, reverse=True)
            unit = of[node] = next((r for r in open_ones if not _depends_on_region(units - {r}, r, needs)), len(of))
            found.setdefault(unit, []).append(node)
        needs.setdefault(unit, set()).update(units - {unit})
    _merge_regions(found, needs, lambda nodes: _may_join(nodes, bounds, groups))
    position = {node: k for k, node in enumerate(graph.nodes)}
    return [FusedRegion(sorted(nodes, key=position.__getitem__)) for nodes in found.values()]


def _may_join(nodes: Sequence[fx.Node], bounds: RegionLimits, groups: Mapping[fx.Node, int]) -> bool:
    """Whether the limits allow `nodes` in one region, and the first and the last are of the same repetition."""
    return groups.get(nodes[0]) == groups.get(nodes[-1]) and bounds.allow(nodes)


def _merge_regions(
    found: dict[int, list[fx.Node]],
    needs: dict[fx.Node | int, set[fx.Node | int]],
    may_join: Callable[[Sequence[fx.Node]], bool],
) -> None:
    """Merge regions into those that depend on them, if nothing comes between and `may_join` allows it."""
    for region in sorted(found):
        for source in sorted((u for u in needs[region] if isinstance(u, int)), reverse=True):
            both = [*found[region], *found[source]]
            if not may_join(both) or _depends_on_region(needs[region] - {source}, source, needs):
                continue
            found[region] += found.pop(source)
            needs[region] |= needs.pop(source)
            for units in needs.values():
                if source in units:
                    units.remove(source)
                    units.add(region)
            needs[region].discard(region)


def _depends_on_region(
    units: Iterable[fx.Node | int], region: int, needs: Mapping[fx.Node | int, set[fx.Node | int]]
) -> bool:
    """Whether one of `units` depends on `region`."""
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


def is_profitable(region: FusedRegion) -> bool:
    """Whether `region` has enough work for one kernel to beat torch's."""
    return len(region.nodes) > 1 or sum(map(op_flops, region.nodes)) >= WORTH
