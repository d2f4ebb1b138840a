"""A region of a graph as a def: its nodes translated in order, each by its formula or by its decomposition."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import fx

from ..dispatch.arguments import TYPES
from .convolution import padded_weights
from .decompositions import SPLIT, find_decomposition, used_results
from .def_builder import DefBuilder, selects_constants
from .graph_nodes import (
    is_compute,
    is_expressible,
    is_view,
    operands_through_views,
    topological_order,
    users_through_views,
)
from .index_views import Value
from .literals import Unsupported
from .matmul import ATTENTION
from .op_table import MULTI_OUTPUT_OPS, NAN_PASSING, TABLE, TranslationContext, cast_to_result, split_part
from .partition import FusedRegion


class UnsupportedArguments(Exception):
    """The formulas of an operation do not fit its arguments."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


aten = torch.ops.aten
PERMUTATIONS = frozenset(
    (aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
     aten.squeeze.dims)
)  # fmt: skip
"""Views with the extents of their source in another order, but for extents of 1."""
RESHAPES = frozenset((aten.view.default, aten._unsafe_view.default))
"""Views with the elements of their source in the same order, under another shape."""
MOST_EXACT = 1 << 19
"""The maximum number of elements of 16 bits that are stored in float32. Moving more takes longer than rounding them."""


def emit_def(region: FusedRegion) -> FusedRegion:
    """`region` with its def. Raises UnsupportedArguments if an operation has no formula for its arguments.

    The source of a permuted parameter is the parameter instead, because a call of a view costs a microsecond.
    """
    writer = _Writer(frozenset(region.nodes))
    for node in region.nodes:
        try:
            writer.write(node)
        except Unsupported as refusal:
            raise UnsupportedArguments(node, str(refusal)) from None
    results = [piece for n in region.nodes for piece in (n.users if _gives_several(n) else (n,))]
    outputs = tuple(n for n in results if any(user not in writer.inside for user in users_through_views(n)))
    writer.body.add_outputs([(writer.values[node], memory_order(node)) for node in outputs])
    finite = tuple(writer.finite())
    shown = all(_shows_nan(n, writer.inside) for n in region.nodes if any(True for _ in padded_weights(n)))
    return FusedRegion(region.nodes, writer.body.text, tuple(writer.inputs), outputs, finite, bool(finite) and shown)


def _shows_nan(node: fx.Node, inside: frozenset[fx.Node]) -> bool:
    """Whether a NaN in the result of `node` reaches every output of the region that depends on it."""
    after = topological_order([node], lambda n: [user for user in users_through_views(n) if user in inside])
    return all(n is node or _passes_nan(n) for n in after)


def _passes_nan(node: fx.Node) -> bool:
    found = find_decomposition(node)
    work = [node] if found is None else filter(is_compute, found.graph.nodes)
    return all(n.target in NAN_PASSING and n.meta["val"].is_floating_point() for n in work)


def _gives_several(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], tuple | list)


def memory_order(node: fx.Node) -> list[int]:
    """The dimensions of the result of `node`, outermost in memory first; in their own order if it is not dense.

    Dimensions of size 1 have places by their strides, too, so that kernels give them the strides that torch gives them.
    """
    return _memory_order(node.meta["val"])


def _memory_order(meta: torch.Tensor) -> list[int]:
    strides = meta.stride()
    order = sorted(range(meta.ndim), key=lambda d: (-strides[d], meta.shape[d] == 1, d))
    steps = [*accumulate((meta.shape[d] for d in reversed(order)), mul, initial=1)][-2::-1]
    dense = all(meta.shape[d] <= 1 or strides[d] == step for d, step in zip(order, steps, strict=True))
    return order if dense or 0 in meta.shape else list(range(meta.ndim))


class _Writer:
    """Translates nodes in order.

    Args:
        inside: the nodes to translate; any other is a parameter of the def.
        body: the def so far. known: the values of nodes that are not translated here.

    Attributes:
        values: the value of each node, or its values if it has several results. inputs: the nodes that are parameters.
    """

    def __init__(
        self,
        inside: frozenset[fx.Node],
        body: DefBuilder | None = None,
        known: Mapping[fx.Node, Any] | None = None,
    ) -> None:
        self.inside, self.body = inside, DefBuilder() if body is None else body
        self.known = frozenset(known or ())
        self.values: dict[fx.Node, Any] = dict(known or {})
        self.inputs: list[fx.Node] = []

    def write(self, node: fx.Node) -> None:
        if node.target in MULTI_OUTPUT_OPS:
            self._write_parts(node)
            return
        value = self._translate_node(node)
        if _gives_several(node):
            for piece in node.users:
                self._define(piece, value[piece.args[1]])
        else:
            self._define(node, value)

    def finite(self) -> list[int]:
        """The indices of the parameters that are weights which must be finite.

        Raises:
            UnsupportedArguments: the region computes weights. They become a parameter if their node stays with torch.
        """
        found: dict[int, None] = {}
        for node in sorted(self.inside, key=lambda n: n.name):
            for weight in map(_skip_permutations, padded_weights(node)):
                if weight in self.inside:
                    raise UnsupportedArguments(weight, "it computes the weights of a convolution with padding")
                if weight not in self.inputs:
                    raise UnsupportedArguments(node, "its weights are computed, and there is padding")
                found[self.inputs.index(weight)] = None
        return list(found)

    def _define(self, node: fx.Node, value: Value) -> None:
        after = users_through_views(node)
        shared = len(after) > 1 or any(user not in self.inside for user in after)
        if shared and selects_constants(value):
            shared = not self._is_only_attention_mask(after)
        if not (value.access or value.constant) and (shared or self.body.is_deep(value)):
            value = self._store_shared(value)
        self.values[node] = value

    def _store_shared(self, value: Value) -> Value:
        """`value` in a tensor, from which several operations read it; exact up to `MOST_EXACT` elements."""
        exact = math.prod(value.shape) <= MOST_EXACT
        return self.body.materialize(value) if exact else self.body.materialize_rounded(value)

    def _is_only_attention_mask(self, users: Iterable[fx.Node]) -> bool:
        """Whether, in the region, only attention uses a value, which then need not be in memory for it."""
        return all(user.target in ATTENTION for user in users if user in self.inside)

    def _write_parts(self, node: fx.Node) -> None:
        first = next(x for x in node.meta["val"] if x is not None)
        parts = MULTI_OUTPUT_OPS[node.target](
            self._context(first), *self._map_arguments(node.args), **self._map_arguments(node.kwargs)
        )
        for piece in node.users:
            place: Any = piece.args[1]
            make = parts[place]
            if make is None:
                raise Unsupported(f"its result {place} is needed")
            self._define(piece, _match_result(self._context(piece.meta["val"]), make(), node))

    def _context(self, meta: torch.Tensor) -> TranslationContext:
        order = tuple(_memory_order(meta)) if isinstance(meta, torch.Tensor) else ()
        return TranslationContext(self.body, tuple(meta.shape), TYPES[meta.dtype], order)

    def _translate_node(self, node: fx.Node) -> Any:
        """The value of `node`, or its values."""
        found = find_decomposition(node)
        meta = node.meta["val"]
        if found is not None:
            values = self._expand_decomposition(node, found.graph)
            if not isinstance(meta, torch.Tensor):
                return {k: _match_result(self._context(meta[k]), values[k], node) for k in used_results(node)}
            return _match_result(self._context(meta), values, node)
        if node.target is SPLIT:
            source, sizes, dimension = (*node.args, 0)[:3]
            x = self._value(source)  # type: ignore[arg-type]
            return [
                _match_result(self._context(part), split_part(self._context(part), x, sizes, dimension, k), node)  # type: ignore[arg-type]
                for k, part in enumerate(meta)
            ]
        value = TABLE[node.target](
            self._context(meta), *self._map_arguments(node.args), **self._map_arguments(node.kwargs)
        )
        return _match_result(self._context(meta), value, node)

    def _expand_decomposition(self, node: fx.Node, graph: fx.Graph) -> Any:
        """Translate `graph`, the decomposition of `node`; return the values of its outputs."""
        *inner, output = graph.nodes
        known = {}
        for placeholder, source in zip((n for n in inner if n.op == "placeholder"), node.all_input_nodes, strict=True):
            value = self._value(source)
            simple = value.access or value.constant or len(users_through_views(placeholder)) < 2
            known[placeholder] = value if simple else self.body.materialize(value)
        writer = _Writer(frozenset((*inner, output)) - known.keys(), self.body, known)
        for n in inner:
            if n.op == "call_function" and not is_view(n) and n.target is not operator.getitem:
                writer.write(n)
        to_value: Any = writer._value
        return fx.node.map_arg(output.args[0], to_value)

    def _map_arguments(self, arguments: Any) -> Any:
        value: Any = self._value
        return fx.node.map_arg(arguments, value)

    def _value(self, node: fx.Node) -> Any:
        if node not in self.values:
            for needed in topological_order([node], self._find_missing_views):
                self.values[needed] = (
                    self._view(needed) if self._is_view_inside_region(needed) else self._parameter(needed)
                )
        return self.values[node]

    def _find_missing_views(self, node: fx.Node) -> list[fx.Node]:
        """The views that a view needs and that have no value yet."""
        return [n for n in node.all_input_nodes if n not in self.values] if self._is_view_inside_region(node) else []

    def _view(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        return self._translate_node(node)

    def _parameter(self, node: fx.Node) -> Value:
        meta = node.meta["val"]
        self.inputs.append(node)
        return self.body.parameter(tuple(meta.shape), TYPES[meta.dtype])

    def _is_view_inside_region(self, node: fx.Node) -> bool:
        """Whether `node` is a view of values of this region only, or one whose source is the parameter instead."""
        if not is_view(node) or not is_expressible(node):
            return False
        if node.target in PERMUTATIONS or _merges_rows(node):
            return True
        return all(n in self.inside or n in self.known for n in operands_through_views(node))


def _merges_rows(node: fx.Node) -> bool:
    """Whether `node` is a matrix whose rows are those of a tensor of more dimensions."""
    if node.target not in RESHAPES:
        return False
    source, matrix = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(matrix.ndim == 2 < source.ndim and source.is_contiguous() and matrix.shape[1] == source.shape[-1])


def _skip_permutations(node: fx.Node) -> fx.Node:
    """The source of `node` if that is a permutation, else `node`."""
    while node.target in PERMUTATIONS:
        node = node.all_input_nodes[0]
    return node


def _match_result(context: TranslationContext, value: Value, node: fx.Node) -> Value:
    if value.shape != context.shape:
        raise Unsupported(f"{node.target} gives {value.shape} instead of {context.shape}")
    return cast_to_result(context, value)
