"""A region in a graph: its kernel, or torch's operations where those turn out faster."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..api import Op
from ..core.diagnostics import get_logger
from .fallback import falls_back, report_fallback
from .race import least_times, may_race


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

    A kernel that fails, which is a fault of this package, gives way to the graph.

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
        self._finite = finite
        self.uses_kernel: bool | None = None
        self._choosing = threading.Lock()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the region."""
        if self.uses_kernel is None:
            with self._choosing:
                if self.uses_kernel is None:
                    self._choose(inputs)
        if self.uses_kernel and all(is_finite(inputs[n]) for n in self._finite):
            try:  # no context manager: this is the way of every call
                return self._kernel(*inputs)
            except Exception as error:
                report_fallback("a kernel fails", error)
                self.uses_kernel = False
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
        """Race the kernel against torch; whatever fails loses. What torch refuses is the program's mistake."""
        log = get_logger("graph")
        if not may_race(lambda: self._torch(*inputs)):
            log.debug("%s: too expensive to repeat: torch stays", self.op)
            self.uses_kernel = False
            return
        ours = theirs = math.inf
        with falls_back("a kernel cannot be compiled"):
            ours, theirs = least_times((self._kernel, self._torch), inputs)
        faster = ours < math.inf and kernel_is_faster(ours, theirs)
        log.debug(
            "%s: %.1f us here, %.1f us in torch: %s", self.op, ours * 1e6, theirs * 1e6,
            "the kernel stays" if faster else "smaller kernels are tried" if self._parts else "torch stays",
        )  # fmt: skip
        if not faster and self._parts is not None:
            with falls_back("smaller kernels cannot be compiled"):
                faster = self._try_parts(self._parts(), inputs)
        self.uses_kernel = faster

    def _try_parts(self, parts: fx.GraphModule, inputs: tuple[Tensor, ...]) -> bool:
        """Keep the fastest of the kernel, torch's operations and smaller kernels between such operations."""
        ours, theirs, mixed = least_times((self._kernel, self._torch, parts), inputs)
        get_logger("graph").debug(
            "%s: %.1f us here, %.1f us in torch, %.1f us in parts", self.op, ours * 1e6, theirs * 1e6, mixed * 1e6
        )
        if mixed < theirs:
            self.graph = parts
        return kernel_is_faster(ours, min(theirs, mixed))


def kernel_flops(graph: fx.GraphModule) -> int:
    """Floating-point operations that kernels do in a graph that has run."""
    return sum(part.flops for part in graph.children() if isinstance(part, KernelOrEager))


def is_finite(x: Tensor) -> bool:
    """Has `x` neither infinities nor NaN? Looked up anew in every call: not every change of a tensor is counted."""
    total = x.detach().sum().item()  # of finite numbers it may overflow, of others it is never finite
    return math.isfinite(total) or bool(x.isfinite().all())
