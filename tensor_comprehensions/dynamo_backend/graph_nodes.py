"""Kinds of nodes of a captured graph: views, operations with formulas, parts of results, effects; and traversals.

Views are free, so they belong to no region: each region, and torch, makes its own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from .decompositions import SPLIT, find_decomposition, has_formula, has_plain_values, is_random, is_seeded
from .op_table import FLOPS, VIEWS


def is_view(node: fx.Node) -> bool:
    """Whether `node` is free: a view, a split into views, or one of these."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    if node.target in VIEWS or node.target is SPLIT:
        return has_formula(node)
    found = find_decomposition(node)
    return found is not None and found.is_view


def is_piece(node: fx.Node) -> bool:
    """Whether this is one of the results of an operation with several results that has formulas."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and not is_view(source) and is_expressible(source)


def is_expressible(node: fx.Node) -> bool:
    """Whether `node` has a formula, of its own or by its decomposition, and the arguments allow it."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_expressible(node.args[0])
    return has_formula(node) or find_decomposition(node) is not None


def is_compute(node: fx.Node) -> bool:
    """Whether `node` computes something, rather than being a view or a part of another node's result."""
    return node.op == "call_function" and node.target is not operator.getitem and not is_view(node)


def has_fixed_order(node: fx.Node) -> bool:
    """Whether `node` has an effect, or draws random numbers, so that it must keep its place in the program."""
    if node.op != "call_function":
        return False
    impure = isinstance(node.target, HigherOrderOperator) or (node.is_impure() and not is_seeded(node))
    return impure or is_random(node)


def writes_in_place(node: fx.Node) -> bool:
    """Whether `node` changes a tensor, such as an input of the graph."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def op_weight(node: fx.Node) -> int:
    """The number of operations of the table that `node` consists of."""
    found = find_decomposition(node)
    return 1 if found is None else found.weight


def num_products(node: fx.Node) -> int:
    """The number of products, convolutions and the like that `node` consists of."""
    found = find_decomposition(node)
    return sum(n.target in FLOPS for n in ([node] if found is None else found.graph.nodes))


def op_flops(node: fx.Node) -> int:
    """The floating-point operations of a product or convolution; one per element of anything else; 0 for views."""
    if not is_compute(node):
        return 0
    if node.target in FLOPS:
        return FLOPS[node.target](node) if has_plain_values(node) else 0
    found = find_decomposition(node)
    if found is not None:
        return sum(map(op_flops, found.graph.nodes))
    value = node.meta.get("val")
    return math.prod(value.shape) if isinstance(value, torch.Tensor) and _is_static(value) else 0


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in value.shape)


def operands_through_views(node: fx.Node) -> list[fx.Node]:
    """The operands of `node`, with views replaced by their sources."""
    return _through_views(node.all_input_nodes, lambda n: n.all_input_nodes)


def users_through_views(node: fx.Node) -> list[fx.Node]:
    """The users of `node`, with views replaced by their users."""
    return _through_views(list(node.users), lambda n: list(n.users))


def _through_views(first: list[fx.Node], further: Callable[[fx.Node], list[fx.Node]]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    rest = first[::-1]
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_view(node) or is_piece(node):
            rest += further(node)[::-1]
        else:
            found[node] = None
    return list(found)


def topological_order(wanted: Iterable[fx.Node], needs: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yield `wanted` and all that they need, each once and after its `needs`. Iterative: graphs may be deep."""
    done: set[fx.Node] = set()
    for last in wanted:
        stack = [(last, iter(needs(last)))]
        entered = {last}
        while stack:
            node, rest = stack[-1]
            following = next((n for n in rest if n not in done and n not in entered), None)
            if following is not None:
                entered.add(following)
                stack.append((following, iter(needs(following))))
                continue
            stack.pop()
            if node not in done:
                done.add(node)
                yield node
