"""The repetitions in a graph, such as the layers of a network.

A region that holds one or several whole repetitions has the def of all others like it, and equal defs compile and race
once. Regions that are cut by their length alone are all different.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from .graph_nodes import is_compute, num_products, op_flops, op_weight, users_through_views

LONGEST_PERIOD = 1024
"""The maximum operations of a repetition: the time to find one grows with this number."""
ENOUGH_FLOPS = 16_000_000
"""The flops of a region above which it takes no further repetitions: a call costs little in comparison."""


def number_repetitions(graph: fx.Graph, most_weight: int) -> dict[fx.Node, int]:
    """For each operation of `graph` in a repetition, the number of the group of repetitions that may be one region.

    Graphs, or parts of them, that fit into one region of `most_weight` operations have no groups, nor have repetitions
    without a product.
    """
    nodes = [n for n in graph.nodes if is_compute(n)]
    if sum(map(op_weight, nodes)) <= most_weight:
        return {}
    known: dict[str, int] = {}
    keys = [known.setdefault(_signature(n), len(known)) for n in nodes]
    groups = enumerate(_list_groups(nodes, keys, most_weight))
    return {n: k for k, group in groups for n in group}


def _list_groups(nodes: Sequence[fx.Node], keys: Sequence[int], most_weight: int) -> Iterator[Sequence[fx.Node]]:
    """Yield groups of whole repetitions: those of the longest periodic range, then those on its two sides."""
    rest = [(0, len(nodes))]
    while rest:
        first, last = rest.pop()
        if sum(map(op_weight, nodes[first:last])) <= most_weight:
            continue
        begin, end, period = _find_longest_repetition(keys[first:last])
        if not period:
            continue
        begin, end = begin + first, end + first
        rest += [(first, begin), (end, last)]
        if sum(map(op_weight, nodes[begin:end])) <= most_weight or not any(map(num_products, nodes[begin:end])):
            continue
        start = _best_start(nodes, begin, end, period)
        size = period * _repetitions_of_a_group(nodes[start : start + period], most_weight)
        for k in range(start, end - period + 1, size):
            yield nodes[k : min(k + size, start + (end - start) // period * period)]


def _find_longest_repetition(keys: Sequence[int]) -> tuple[int, int, int]:
    """(begin, end, period) of the longest range of at least two repetitions; zeros if there is none."""
    best = (0, 0, 0)
    for period in range(1, min(LONGEST_PERIOD, len(keys) // 2) + 1):
        run = 0
        for k, (key, later) in enumerate(zip(keys, keys[period:], strict=False)):
            run = run + 1 if key == later else 0
            if run >= period and run + period > best[1] - best[0]:
                best = (k - run + 1, k + 1 + period, period)
    return best


def _best_start(nodes: Sequence[fx.Node], begin: int, end: int, period: int) -> int:
    """The start in a periodic range for which most repetitions fit, and then the fewest bytes pass between them."""
    place = {n: k for k, n in enumerate(nodes)}
    passed = {n: max((place[u] for u in users_through_views(n) if u in place), default=-1) for n in nodes[:end]}

    def bytes_between(start: int) -> int:
        cut = start + period
        return sum(_num_bytes(n) for n in nodes[max(0, cut - period) : cut] if passed[n] >= cut)

    return min(range(begin, begin + (end - begin) % period + 1), key=bytes_between)


def _num_bytes(node: fx.Node) -> int:
    """The bytes of the result of `node`, if its sizes are known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return 0
    return value.numel() * value.element_size()


def _repetitions_of_a_group(period: Sequence[fx.Node], most_weight: int) -> int:
    """The number of repetitions in a group: enough for a call to cost little, if they fit into a region."""
    enough = math.ceil(ENOUGH_FLOPS / max(1, sum(map(op_flops, period))))
    return max(1, min(enough, most_weight // max(1, sum(map(op_weight, period)))))


def _signature(node: fx.Node) -> str:
    """A text that is the same for operations that differ only in their operands."""
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda _: "")
    return f"{node.target} {arguments} {_describe_layout(node.meta.get('val'))}"


def _describe_layout(value: object) -> str:
    if isinstance(value, tuple | list):
        return str([_describe_layout(x) for x in value])
    return str((value.shape, value.stride(), value.dtype)) if isinstance(value, torch.Tensor) else str(value)
