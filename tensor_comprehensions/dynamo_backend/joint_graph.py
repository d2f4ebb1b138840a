"""Split a joint graph into forward and backward, and choose the values that the forward graph saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from .op_table import VIEWS, aten

COMPARISONS = (
    aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
    aten._cdist_backward.default, aten._pdist_backward.default, aten._segment_reduce_backward.default,
)  # fmt: skip
"""Operations that compare tensors. The gradients of a maximum and of an infinity norm look for elements equal to it."""


def split_joint_graph(
    module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of `module`.

    The backward graph may compute values of the forward graph again instead of loading them, by another kernel, which
    may round differently. Floats that are compared are not among these values: the gradient of `gelu(x).amax(1)`
    divides by the number of elements that are equal to the maximum, and there might be none.
    """
    for node in _find_compared(module.graph, num_fwd_outputs):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def _find_compared(graph: fx.Graph, num_fwd_outputs: int) -> Iterator[fx.Node]:
    """The values of the forward graph that are compared, or from which values are computed that are compared."""
    forward = _find_ancestors(_find_outputs(graph)[:num_fwd_outputs])
    gradients = _find_gradients(graph)
    compared = [n for node in graph.nodes if node.target in COMPARISONS for n in node.all_input_nodes]
    stack = [n for n in compared if _is_float(n) and n not in gradients]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in forward and node.target not in VIEWS:  # views are always made again
            yield node
        else:
            stack += node.all_input_nodes


def _find_outputs(graph: fx.Graph) -> tuple[Any, ...]:
    (output,) = (n for n in graph.nodes if n.op == "output")
    return tuple(output.args[0])


def _find_ancestors(roots: Iterable[Any]) -> set[fx.Node]:
    """The nodes among `roots`, and all that they are computed from."""
    found: set[fx.Node] = set()
    stack = [n for n in roots if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _find_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on gradients of results; only the backward graph can compute them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and "tangents" in str(node.target)
        if is_gradient or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
