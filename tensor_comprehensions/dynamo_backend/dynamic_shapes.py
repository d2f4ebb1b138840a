"""Graphs whose sizes are symbols: compiled for the sizes that come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..core.diagnostics import get_logger
from ..core.single_flight import SingleFlightCache
from .fallback import falls_back

LIMIT = 64
"""For how many sizes the kernels of one graph are kept."""
Key = tuple[Any, ...]


def has_symbolic_shapes(graph: fx.Graph) -> bool:
    """Does `graph` take a number, or a tensor some of whose sizes are not numbers?"""
    return any(_has_symbols(n.meta.get("val")) for n in graph.nodes if n.op == "placeholder")


def _has_symbols(value: object) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt)


class PerShapeCache:
    """A graph that torch runs on sizes that are new, and kernels on those that come again.

    Kernels are made for sizes that are numbers, and sizes that come only once are not worth them.

    Args:
        graph: what to run. fuse: gives a graph without symbols with kernels in it.
    """

    def __init__(self, graph: fx.GraphModule, fuse: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        self._graph, self._fuse = graph, fuse
        self._seen: SingleFlightCache[Key, None] = SingleFlightCache(16 * LIMIT)
        self._fused: SingleFlightCache[Key, fx.GraphModule] = SingleFlightCache(LIMIT)

    def __call__(self, *values: Any) -> Any:
        key = tuple([(x.shape, x.stride()) if isinstance(x, Tensor) else x for x in values])
        fresh: list[Key] = []
        self._seen.get(key, lambda: fresh.append(key))
        if fresh:
            return self._graph(*values)
        return self._fused.get(key, lambda: self._made(values))(*values)

    def _made(self, values: tuple[Any, ...]) -> fx.GraphModule:
        get_logger("graph").debug(
            "sizes that came again: %s", [tuple(x.shape) for x in values if isinstance(x, Tensor)]
        )
        with torch.no_grad(), falls_back("sizes cannot be compiled"):
            return self._fuse(make_fx(self._graph, tracing_mode="fake")(*values))
        return self._graph
