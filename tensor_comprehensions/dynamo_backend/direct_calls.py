"""Calls of torch's operations as methods and functions of torch, which take half the time of calls of overloads.

A graph with small kernels spends most of its time calling views.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

METHODS = {
    aten.view.default: "view", aten._unsafe_view.default: "view", aten.permute.default: "permute",
    aten.transpose.int: "transpose", aten.unsqueeze.default: "unsqueeze", aten.squeeze.dim: "squeeze",
    aten.squeeze.dims: "squeeze", aten.select.int: "select", aten.t.default: "t", aten.expand.default: "expand",
    aten.as_strided.default: "as_strided", aten.clone.default: "clone", aten.copy_.default: "copy_",
    aten.detach.default: "detach",
}  # fmt: skip
"""Operations that are methods with the same arguments."""
FUNCTIONS = {
    aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm,
    aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub, aten.mul.Tensor: torch.mul, aten.div.Tensor: torch.div,
    aten.cat.default: torch.cat, aten.where.self: torch.where, aten.embedding.default: torch.embedding,
    aten.convolution.default: torch.convolution, aten.constant_pad_nd.default: torch.constant_pad_nd,
}  # fmt: skip
"""Operations that are functions with the same arguments."""
DEFAULTS_OF_SLICE = (0, None, None, 1)
"""The defaults of the arguments that follow the tensor."""


def call_directly(graph: fx.Graph) -> None:
    """Call operations of `graph` as methods and functions, where torch has them with the same arguments."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
        elif node.target is aten.slice.Tensor and not node.kwargs:
            _call_as_subscript(node)


def _call_as_subscript(node: fx.Node) -> None:
    """Replace `slice(x, 1, 1, 3)` by `x[:, 1:3]`, unless the dimension is negative."""
    given = node.args[1:]
    defaults: tuple[Any, ...] = DEFAULTS_OF_SLICE[len(given) :]
    dimension, start, end, step = given + defaults
    if isinstance(dimension, int) and dimension >= 0:
        node.target = operator.getitem
        node.args = (node.args[0], (*[slice(None)] * dimension, slice(start, end, step)))
