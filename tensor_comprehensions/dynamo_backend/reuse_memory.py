"""Writes in place of copies: a captured graph has no effects, so it copies a tensor in order to change a part of it.

`x[1:3] = y` is captured as `slice_scatter(x, y)`, which is a copy of `x` with the part replaced. If nothing reads the
old `x` afterwards, only the part is written. An input may be written if its final state is copied to it anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx

from .simplify_graph import storage_id

aten = torch.ops.aten

VIEW_OF_SCATTER: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}  # fmt: skip
"""The view of the part that an operation replaces; both take the same arguments after the tensors."""
IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default, aten.index_add.default: aten.index_add_.default,
    aten.index_copy.default: aten.index_copy_.default, aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src, aten.scatter.value: aten.scatter_.value,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
}  # fmt: skip
"""Operations that copy their first argument to change some elements, and those that change it."""


@dataclass(frozen=True, slots=True)
class _Write:
    """A change of a part of `base`.

    Attributes:
        views: from `base` to the part, as (operation, arguments after the tensor). source: the new elements.
        replaced: the nodes that the write replaces, the last one first.
    """

    base: fx.Node
    views: Sequence[tuple[Any, tuple[Any, ...]]]
    source: fx.Node
    replaced: Sequence[fx.Node]


def reuse_memory(graph: fx.Graph) -> None:
    """Turn copies of tensors that are not read afterwards into writes to these tensors."""
    memory = _Memory(graph)
    for node in list(graph.nodes):
        if node.target in VIEW_OF_SCATTER and not node.kwargs:
            _write_part(graph, _find_write(node), memory)
        elif node.target in IN_PLACE and memory.is_free(node.args[0], node, node.args[1:]):
            base: Any = node.args[0]
            memory.join(node, base)
            node.target = IN_PLACE[node.target]
            node.replace_all_uses_with(base)
        elif node.target is aten.copy_.default and node.args[0] is node.args[1]:
            graph.erase_node(node)


class _Memory:
    """Which nodes of a graph share memory, with the writes that have been made so far."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {n: k for k, n in enumerate(graph.nodes)}
        storages: dict[object, set[fx.Node]] = {}
        for n in graph.nodes:
            storages.setdefault(storage_id(n) or n, set()).add(n)
        self._sharing = {n: nodes for nodes in storages.values() for n in nodes}
        self._results = {n for output in graph.nodes if output.op == "output" for n in output.all_input_nodes}

    def is_free(self, base: Any, write: fx.Node, operands: Any) -> bool:
        """Whether `write` may change `base`: nothing else reads its memory from there on, and the graph owns it."""
        if not _is_dense(base) or base.meta["val"].stride() != write.meta["val"].stride():
            return False
        shared = self._sharing[base]
        if not shared.isdisjoint(_nodes_in(operands)):
            return False
        inputs = [n for n in shared if n.op in ("placeholder", "get_attr")]
        if inputs and not self._sharing[write].isdisjoint(self._results):
            return False
        later = [u for n in shared for u in n.users if u is not write and self._position[u] >= self._position[write]]
        owned = all(any(_overwrites(user, n) for user in n.users if user in later) for n in inputs)
        return owned and all(any(_overwrites(user, n) for n in inputs) for user in later)

    def join(self, node: fx.Node, base: fx.Node) -> None:
        """Record that `node` shares the memory of `base` from now on."""
        both = self._sharing[base] | self._sharing.get(node, {node})
        self._sharing.update(dict.fromkeys(both, both))

    def add(self, node: fx.Node, write: fx.Node) -> None:
        """Record a new node at the position of `write`, with memory of its own."""
        self._position[node] = self._position[write]
        self._sharing[node] = {node}


def _overwrites(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` copies the final state of the input `node` into it, without reading it."""
    return user.target is aten.copy_.default and user.args[0] is node and user.args[1] is not node and not user.users


def _nodes_in(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, found.append)
    return found


def _is_dense(node: object) -> bool:
    """Whether a tensor has known sizes, and its elements neither overlap nor leave gaps in memory."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return False
    distance = 1
    for extent, stride in sorted(zip(value.shape, value.stride(), strict=True), key=itemgetter(1)):
        if extent != 1 and stride != distance:
            return False
        distance *= extent
    return True


def _find_write(node: fx.Node) -> _Write:
    """The write that `node` stands for: to a part of its base, or to a part of a part."""
    base: Any = node.args[0]
    source: Any = node.args[1]
    replaced, views = [node], [_view_of(node)]
    while source.target in VIEW_OF_SCATTER and len(source.users) == 1 and not source.kwargs:
        if not _shows(source.args[0], replaced[-1]):
            break
        replaced.append(source)
        views.append(_view_of(source))
        source = source.args[1]
    if source.target is aten.copy.default and len(source.users) == 1:
        replaced.append(source)
        source = source.args[1]
    return _Write(base, views, source, replaced)


def _view_of(scatter: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    return VIEW_OF_SCATTER[scatter.target], scatter.args[2:]


def _shows(node: fx.Node, scatter: fx.Node) -> bool:
    """Whether `node` is a view of the part that `scatter` replaces, before it does."""
    view, arguments = _view_of(scatter)
    return node.target is view and node.args == (scatter.args[0], *arguments) and not node.kwargs


def _write_part(graph: fx.Graph, write: _Write, memory: _Memory) -> None:
    """Replace the operations of a write by a copy of its source into the part of its base, or of a copy of its base."""
    last = write.replaced[0]
    free = memory.is_free(write.base, last, write.source)
    if not free and (len(write.replaced) == 1 or not _is_dense(write.base)):
        return
    whole = write.base
    with graph.inserting_before(last):
        if not free:
            whole = graph.call_function(aten.clone.default, (whole,))
            memory.add(whole, last)
        part = whole
        for view, arguments in write.views:
            part = graph.call_function(view, (part, *arguments))
            memory.add(part, last)
        memory.add(graph.call_function(aten.copy_.default, (part, write.source)), last)
    whole.meta.setdefault("val", last.meta["val"])
    memory.join(last, whole)
    last.replace_all_uses_with(whole)
    for node in write.replaced:
        _erase_unused(graph, node)


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase `node` if nothing uses it, and then the views that only it used."""
    rest = [node]
    while rest:
        node = rest.pop()
        if node.users or node.op != "call_function":
            continue
        views = [n for n in node.all_input_nodes if n.target in VIEW_OF_SCATTER.values()]
        graph.erase_node(node)
        rest += views
