"""Simplifies captured graphs: merges equal operations, omits copies, and makes constants independent of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .graph_nodes import has_fixed_order, writes_in_place

aten = torch.ops.aten

FILLS: dict[Any, int | None] = {
    aten.full_like.default: None, aten.zeros_like.default: 0, aten.ones_like.default: 1,
    aten.new_zeros.default: 0, aten.new_ones.default: 1,
}  # fmt: skip
"""Operations that use only a tensor's shape and type, with the number they fill with; None: it is an argument."""
ALIASES = frozenset((aten.detach.default, aten.alias.default))
"""Operations that return their argument as another tensor on the same memory."""


def simplify_graph(graph: fx.Graph) -> None:
    """Merge equal operations, omit needless copies and aliases, and give constants sizes instead of tensors."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in FILLS:
            _fill_by_shape(graph, node)
    _omit_aliases(graph)
    _merge_equal_nodes(graph)
    _omit_copies(graph)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or not _is_functional(n))


def _fill_by_shape(graph: fx.Graph, node: fx.Node) -> None:
    """Replace `zeros_like(x)` and the like by a constant of that shape, if its layout is that of new tensors."""
    number: Any = FILLS[node.target]
    if number is None and len(node.args) > 1:
        number = node.args[1]
    value = node.meta.get("val")
    if not isinstance(number, int | float) or not isinstance(value, Tensor) or not _is_new_in_memory(value):
        return
    if value.dtype is torch.bool:
        number = bool(number)
    with graph.inserting_before(node):
        options: Any = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
        made = graph.call_function(aten.full.default, (list(value.shape), number), options)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is_new_in_memory(value: Tensor) -> bool:
    """Whether `value` is a contiguous CPU tensor of known sizes."""
    known = all(isinstance(n, int) for n in value.shape)
    return known and value.device.type == "cpu" and value.layout is torch.strided and value.is_contiguous()


def _merge_equal_nodes(graph: fx.Graph) -> None:
    """Replace equal operations by the first of them. Each result of the graph keeps its own memory.

    Constant tensors are not merged: one can be written in place only if nothing else reads it.
    """
    kept = _aliases_of_outputs(graph)
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if not _is_functional(node):
            first.clear()  # what was read before an effect may differ from what is read after it
        elif node not in kept and node.target is not aten.full.default:
            key = _equality_key(node)
            other = first.setdefault(key, node) if key else node
            if other is not node:
                node.replace_all_uses_with(other)
                graph.erase_node(node)


def _omit_aliases(graph: fx.Graph) -> None:
    """Use a tensor instead of its `detach`, which only matters to autograd. Results of the graph remain apart."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    results = set(output.all_input_nodes)
    for node in list(graph.nodes):
        if node.target in ALIASES and node not in results:
            node.replace_all_uses_with(node.args[0])


def _omit_copies(graph: fx.Graph) -> None:
    """Use the source of a copy, such as a dropout leaves in inference, if neither is written nor seen through views.

    The results of the graph keep memory of their own.
    """
    kept = _aliases_of_outputs(graph)
    written = {storage_id(x) for n in graph.nodes if not _is_functional(n) for x in n.all_input_nodes}
    for node in list(graph.nodes):
        if node.target is not aten.clone.default or node in kept or not _has_same_layout(node, node.args[0]):
            continue
        own, source = storage_id(node), storage_id(node.args[0])
        known = own is not None and source is not None and written.isdisjoint((own, source, None))
        if known and all(storage_id(user) not in (own, None) for user in node.users):
            node.replace_all_uses_with(node.args[0])


def _has_same_layout(node: fx.Node, other: Any) -> bool:
    """Whether the results of both are tensors of the same known sizes and strides."""
    value, of_other = (x.meta.get("val") if isinstance(x, fx.Node) else None for x in (node, other))
    if not isinstance(value, Tensor) or not isinstance(of_other, Tensor) or value.dtype != of_other.dtype:
        return False
    if not all(isinstance(n, int) for x in (value, of_other) for n in (*x.shape, *x.stride())):
        return False
    return value.shape == of_other.shape and value.stride() == of_other.stride()


def _is_functional(node: fx.Node) -> bool:
    """Whether `node` has neither effects nor random results."""
    return not has_fixed_order(node) and not writes_in_place(node)


def _equality_key(node: fx.Node) -> str:
    """A text that is the same for operations with the same arguments; "" if an argument has no unique text."""
    plain = True

    def format_argument(x: Any) -> str:
        nonlocal plain
        if isinstance(x, fx.Node):
            return f"%{x.name}"
        if isinstance(x, tuple | list):
            return f"[{', '.join(map(format_argument, x))}]"
        plain = plain and (x is None or isinstance(x, _PLAIN))
        return f"{type(x).__name__} {x!r}"

    texts = [format_argument(x) for x in node.args]
    texts += [f"{name}={format_argument(x)}" for name, x in sorted(node.kwargs.items())]
    return f"{node.target} {', '.join(texts)}" if plain else ""


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _aliases_of_outputs(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that share their memory with a result of `graph`."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    stored = {storage_id(n) for n in output.all_input_nodes} - {None}
    return {n for n in graph.nodes if storage_id(n) in stored} | set(output.all_input_nodes)


def storage_id(node: fx.Node) -> int | None:
    """An identifier of the storage of the result of `node`, the same for its views; None if it is unknown."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
