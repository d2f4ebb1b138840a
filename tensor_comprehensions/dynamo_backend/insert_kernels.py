"""Graphs with kernels in place of regions, and the operations of a region as a graph of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import graph as fx_graph

from .direct_calls import call_directly, merge_views
from .graph_nodes import has_fixed_order, is_compute, topological_order, writes_in_place
from .partition import FusedRegion
from .reuse_memory import reuse_memory
from .simplify_graph import storage_id


def insert_kernels(
    module: fx.GraphModule,
    kernels: Sequence[tuple[FusedRegion, torch.nn.Module]],
    computes: Callable[[fx.Node], bool] = is_compute,
) -> fx.GraphModule:
    """A new module with a call of its kernel in place of each region.

    Nodes keep their order, so that tensors live no longer than before, and effects keep theirs. A region takes the
    place of its last node, or an earlier one if another node needs an output. Views, and other nodes for which
    `computes` is false, are inserted before their users, unless a write to their source could come between.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    attributes: dict[str, Any] = {}
    number = {n: k for k, (region, _) in enumerate(kernels) for n in (*region.nodes, *region.outputs)}
    anchors = [region.outputs[0] for region, _ in kernels]

    def representative(node: fx.Node) -> fx.Node:
        return anchors[number[node]] if node in number else node

    ordered = [n for n in module.graph.nodes if has_fixed_order(n)]
    before = dict(pairwise(ordered[::-1]))

    def needs(node: fx.Node) -> Iterable[fx.Node]:
        inputs = kernels[number[node]][0].inputs if node in number else tuple(node.all_input_nodes)
        return map(representative, (*inputs, before[node]) if node in before else inputs)

    saves = _copies_of_written_tensors(module.graph)

    def stays_in_place(node: fx.Node) -> bool:
        if node.op in ("placeholder", "output") or has_fixed_order(node) or computes(node) or node in number:
            return True
        return node in saves and not all(user in number for user in node.users)

    last = {number[n]: n for region, _ in kernels for n in region.nodes}
    wanted = [n for n in module.graph.nodes if stays_in_place(n) and (n not in number or last[number[n]] is n)]
    for node in topological_order(map(representative, wanted), needs):
        if node not in number:
            made[node] = graph.node_copy(node, made.__getitem__)
            if node.op in ("get_attr", "call_module"):
                attributes[str(node.target)] = _get_nested_attribute(module, str(node.target))
            continue
        region, kernel = kernels[number[node]]
        name = f"region_{number[node]}"
        attributes[name] = kernel
        result = graph.call_module(name, tuple(made[n] for n in region.inputs))
        for k, n in enumerate(region.outputs):
            made[n] = graph.call_function(operator.getitem, (result, k))
            made[n].meta = {"val": n.meta["val"]}
    return fx.GraphModule(attributes, _finish_graph(graph))


def _copies_of_written_tensors(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that copy a tensor which the graph changes later; other copies may be made where they are used."""
    written = {storage_id(x) for n in graph.nodes if writes_in_place(n) for x in n.all_input_nodes[:1]} - {None}
    shows_written = {n for n in graph.nodes if storage_id(n) in written}
    return {n for n in graph.nodes if n not in shows_written and not shows_written.isdisjoint(n.all_input_nodes)}


def _finish_graph(graph: fx.Graph) -> fx.Graph:
    """Reuse memory, merge views and call operations directly in `graph`, which cannot be partitioned afterwards."""
    reuse_memory(graph)
    merge_views(graph)
    call_directly(graph)
    graph.lint()
    return graph


def finished_module(module: fx.GraphModule) -> fx.GraphModule:
    """An optimized copy of `module` to run; `module` itself can still be partitioned."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, _finish_graph(graph))


def _get_nested_attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def eager_module(region: FusedRegion) -> fx.GraphModule:
    """The operations of `region` as torch runs them: from its inputs to a tuple of its outputs."""
    graph = fx.Graph()
    made = {n: graph.placeholder(f"x{k}") for k, n in enumerate(region.inputs)}
    for n, placeholder in made.items():
        placeholder.meta = {"val": n.meta["val"]}
    for node in _list_region_nodes(region):
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[n] for n in region.outputs))
    return fx.GraphModule({}, graph)


def _list_region_nodes(region: FusedRegion) -> Iterable[fx.Node]:
    """The nodes between the inputs and the outputs of `region`, views among them."""
    inputs = frozenset(region.inputs)
    order = topological_order(region.outputs, lambda n: () if n in inputs else n.all_input_nodes)
    return (n for n in order if n not in inputs)


def region_key(region: FusedRegion) -> str:
    """A text that is the same for regions with the same def and the same operations on tensors in the same layout."""
    numbers = {n: k for k, n in enumerate(region.inputs)}
    lines = [_layout_text(n.meta["val"]) for n in region.inputs]
    for node in _list_region_nodes(region):
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        lines.append(f"{node.target} {arguments}")
        numbers[node] = len(numbers)
    return "\n".join((region.text, *lines, str([numbers[n] for n in region.outputs])))


def _layout_text(x: Any) -> str:
    return str((x.shape, x.stride(), x.dtype)) if isinstance(x, torch.Tensor) else str(x)


def to_boxed_call(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`module`, called as torch calls compiled graphs: with a list, which is emptied so that tensors are freed early.

    This changes how `module` itself is called, too.
    """
    codegen = getattr(fx_graph, "_BoxedCodeGen", None)
    if codegen is None:
        boxed: Callable[[list[Any]], Any] = make_boxed_func(module.forward)
        return boxed
    module.graph.set_codegen(codegen())
    module.recompile()
    return mark_as_boxed(module.forward)


def mark_as_boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`run`, marked so that torch calls it with a list."""

    def call(arguments: list[Any]) -> Any:
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
