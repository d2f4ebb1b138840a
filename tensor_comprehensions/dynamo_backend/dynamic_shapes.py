"""Graphs whose sizes are symbols: new sizes run a graph for all sizes, sizes that recur get kernels of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from ..core.diagnostics import get_logger
from .fallback import falls_back
from .insert_kernels import to_boxed_call

LIMIT = 64
"""The maximum number of sizes for which one graph keeps kernels."""
Key = tuple[Any, ...]
Boxed = Callable[[list[Any]], Any]


def has_symbolic_shapes(graph: fx.Graph) -> bool:
    """Whether `graph` takes a symbolic integer, or a tensor with symbolic sizes or strides."""
    return any(_has_symbols(n.meta.get("val")) for n in graph.nodes if n.op == "placeholder")


def _has_symbols(value: object) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt)


class CompileBudget:
    """Bounds the share of time that is spent on compiling.

    Args:
        seconds: the maximum time of compilation in the last `window` seconds.
    """

    def __init__(self, seconds: float, window: float, clock: Callable[[], float] = monotonic) -> None:
        self.seconds, self.window, self._clock = seconds, window, clock
        self._spent: deque[tuple[float, float]] = deque()

    def has_time(self) -> bool:
        now = self._clock()
        while self._spent and self._spent[0][0] < now - self.window:
            self._spent.popleft()
        return sum(seconds for _, seconds in self._spent) < self.seconds

    def spend(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the budget; returns its result."""
        start = self._clock()
        try:
            return call()
        finally:
            end = self._clock()
            self._spent.append((end, end - start))


budget = CompileBudget(20.0, 60.0)
"""The budget that all graphs with symbolic sizes in the process share."""


class PerShapeCache:
    """Runs a graph with symbolic sizes: `general` for new sizes, kernels for exact sizes that recur.

    The more sizes have kernels already, the more often further ones have to occur, but at least twice. Called, like
    torch's compiled graphs, with a list of arguments, which is emptied.

    Args:
        graph: the graph to run. general: runs it for new sizes.
        fuse: turns a graph without symbols into one with kernels.
    """

    def __init__(
        self, graph: fx.GraphModule, fuse: Callable[[fx.GraphModule], fx.GraphModule], general: fx.GraphModule
    ) -> None:
        self._graph, self._fuse = graph, fuse
        self._places = _symbolic_places([n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"])
        self._counts: dict[Key, int] = {}
        self._fused: dict[Key, Boxed] = {}
        self._made = 0
        self._lock = threading.Lock()
        self._eager = to_boxed_call(general)

    def __call__(self, values: list[Any]) -> Any:
        key = self._key(values)
        fused = self._fused.get(key)
        if fused is not None:
            return fused(values)
        if not self._count_and_check_worth_compiling(key):
            return self._eager(values)
        return budget.spend(lambda: self._compile_for_sizes(key, values)(values))  # kernels compile when they first run

    def _key(self, values: list[Any]) -> Key:
        """The values of the symbolic sizes in a call."""
        key: list[Any] = []
        for k in self._places:
            x = values[k]
            if isinstance(x, Tensor):
                key += (x.shape, x.stride())
            else:
                key.append(x)
        return tuple(key)

    def _count_and_check_worth_compiling(self, key: Key) -> bool:
        """Whether these sizes have occurred often enough for kernels."""
        with self._lock:
            if len(self._counts) >= 16 * LIMIT:
                self._counts.clear()
            count = self._counts[key] = self._counts.get(key, 0) + 1
            return count > 1 + self._made // 4 and budget.has_time()

    def _compile_for_sizes(self, key: Key, values: list[Any]) -> Boxed:
        get_logger("graph").debug(
            "sizes that came again: %s", [tuple(x.shape) for x in values if isinstance(x, Tensor)]
        )
        fused = self._eager
        with torch.no_grad(), torch._C._DisableAutocast(), falls_back("sizes cannot be compiled"):
            fused = to_boxed_call(self._fuse(make_fx(self._graph, tracing_mode="fake")(*values)))
        with self._lock:
            self._made += 1
            self._fused[key] = fused
            if len(self._fused) > LIMIT:
                self._fused.pop(next(iter(self._fused)))
        return fused


def _symbolic_places(values: Sequence[object]) -> list[int]:
    """The indices of the arguments that determine a graph's symbols: numbers, and tensors with further symbols."""
    numbers = [k for k, x in enumerate(values) if isinstance(x, torch.SymInt)]
    known = set().union(*(free_symbols(values[k]) for k in numbers))
    tensors = [k for k, x in enumerate(values) if isinstance(x, Tensor) and _has_symbols(x)]
    return [*numbers, *(k for k in tensors if not free_symbols(values[k]) <= known)]
