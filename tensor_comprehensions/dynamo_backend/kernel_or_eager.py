"""A region in a graph: its kernel, or torch's operations where those turn out faster."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, fx

from ..api import Op
from ..core.diagnostics import get_logger

ROUNDS, SECONDS = (5, 50), 0.05
"""How often at least and at most each side runs in turns before one is chosen, and for about how long together."""


def kernel_is_faster(ours: float, theirs: float) -> bool:
    """Does the kernel stay, given both times?"""
    return ours <= theirs


@dataclass(frozen=True, slots=True)
class OutputView:
    """How an output of a kernel is looked at: in `shape`, and then with its dimensions in another order, if any."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None

    @staticmethod
    def of(shape: Sequence[int], layout: Sequence[int]) -> OutputView:
        """Of a tensor of `shape` whose dimensions lie in memory in the order of `layout`."""
        moved = list(layout) != sorted(layout)
        inverse = tuple(layout.index(d) for d in range(len(layout))) if moved else None
        return OutputView(tuple(shape[d] for d in layout), inverse)

    def __call__(self, x: Tensor) -> Tensor:
        seen = x.view(self.shape)
        return seen if self.order is None else seen.permute(self.order)


class KernelOrEager(torch.nn.Module):
    """Runs an operator on its inputs; on the first ones also the graph that it replaces, and keeps the faster.

    Args:
        results: how the outputs are looked at.
        finite: inputs that must be finite for the operator to give what the graph gives; else the graph runs.
        parts: makes of the graph one with smaller kernels, which takes its place where the operator is slower.
        work: floating-point operations of the region.
    """

    def __init__(
        self,
        op: Op,
        graph: fx.GraphModule,
        results: tuple[OutputView, ...],
        finite: tuple[int, ...] = (),
        parts: Callable[[], fx.GraphModule] | None = None,
        work: int = 0,
    ) -> None:
        super().__init__()
        self._work = work
        self.op, self.graph, self._results, self._parts = op, graph, results, parts
        self._finite = tuple((n, FiniteCheck()) for n in finite)
        self.uses_kernel: bool | None = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the region."""
        if self.uses_kernel is None:
            self._choose(inputs)
        if self.uses_kernel and all(check(inputs[n]) for n, check in self._finite):
            return self._kernel(*inputs)
        return self._torch(*inputs)

    @property
    def flops(self) -> int:
        """Floating-point operations that kernels do here, now that a choice was made."""
        return self._work if self.uses_kernel else kernel_flops(self.graph)

    def _kernel(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.op(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        return tuple(result(x) for result, x in zip(self._results, outputs, strict=True))

    def _torch(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.graph(*inputs)
        return outputs

    @torch.no_grad()
    def _choose(self, inputs: tuple[Tensor, ...]) -> None:
        ours, theirs = _least((self._kernel, self._torch), inputs)
        self.uses_kernel = kernel_is_faster(ours, theirs)
        get_logger("graph").debug(
            "%s: %.1f us here, %.1f us in torch: %s", self.op, ours * 1e6, theirs * 1e6,
            "the kernel stays" if self.uses_kernel else "smaller kernels are tried" if self._parts else "torch stays",
        )  # fmt: skip
        if not self.uses_kernel and self._parts is not None:
            self._try_parts(self._parts(), inputs)

    def _try_parts(self, parts: fx.GraphModule, inputs: tuple[Tensor, ...]) -> None:
        """Keep the fastest of the kernel, torch's operations and smaller kernels between such operations."""
        ours, theirs, mixed = _least((self._kernel, self._torch, parts), inputs)
        self.uses_kernel = kernel_is_faster(ours, min(theirs, mixed))
        if mixed < theirs:
            self.graph = parts
        get_logger("graph").debug(
            "%s: %.1f us here, %.1f us in torch, %.1f us in parts", self.op, ours * 1e6, theirs * 1e6, mixed * 1e6
        )


def _least(runs: Sequence[Callable[..., object]], inputs: tuple[Tensor, ...]) -> list[float]:
    """The least time of each, in turns: whatever else the machine does only adds to it."""
    times: list[list[float]] = [[] for _ in runs]
    fewest, most = ROUNDS
    while len(times[0]) <= fewest or (len(times[0]) <= most and sum(map(sum, times)) < SECONDS):
        for run, taken in zip(runs, times, strict=True):
            start = perf_counter()
            run(*inputs)
            taken.append(perf_counter() - start)
    return [min(taken[1:]) for taken in times]


def kernel_flops(graph: fx.GraphModule) -> int:
    """Floating-point operations that kernels do in a graph that has run."""
    return sum(part.flops for part in graph.children() if isinstance(part, KernelOrEager))


class FiniteCheck:
    """Tells of tensors whether they have neither infinities nor NaN; of one that has not changed, without looking."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, bool] | None = None

    def __call__(self, x: Tensor) -> bool:
        if x.is_inference():  # torch does not count its changes
            return _is_finite(x)
        if self._last is not None and self._last[0]() is x and self._last[1] == x._version:
            return self._last[2]
        found = _is_finite(x)
        self._last = weakref.ref(x), x._version, found
        return found


def _is_finite(x: Tensor) -> bool:
    total = x.detach().sum().item()  # of finite numbers it may overflow, of others it is never finite
    return math.isfinite(total) or bool(x.isfinite().all())
