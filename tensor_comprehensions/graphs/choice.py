"""A region in a graph: its kernel, or torch's operations where those turn out faster."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor, fx

from ..api import Op
from ..inspection import logger

ROUNDS, SECONDS = (5, 50), 0.05
"""How often at least and at most each side runs in turns before one is chosen, and for about how long together."""


def faster(ours: float, theirs: float) -> bool:
    """Does the kernel stay, given both times?"""
    return ours <= theirs


class Choice(torch.nn.Module):
    """Runs an operator on its inputs; on the first ones also the graph that it replaces, and keeps the faster."""

    def __init__(self, op: Op, graph: fx.GraphModule, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.op, self.graph, self._shapes = op, graph, shapes
        self.uses_kernel: bool | None = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the region."""
        if self.uses_kernel is None:
            self._choose(inputs)
        return self._kernel(*inputs) if self.uses_kernel else self._torch(*inputs)

    def _kernel(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.op(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        return tuple(x.view(shape) for x, shape in zip(outputs, self._shapes, strict=True))

    def _torch(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.graph(*inputs)
        return outputs

    @torch.no_grad()
    def _choose(self, inputs: tuple[Tensor, ...]) -> None:
        times: tuple[list[float], list[float]] = ([], [])
        fewest, most = ROUNDS
        while len(times[0]) <= fewest or (len(times[0]) <= most and sum(map(sum, times)) < SECONDS):
            for run, taken in zip((self._kernel, self._torch), times, strict=True):
                start = perf_counter()
                run(*inputs)
                taken.append(perf_counter() - start)
        ours, theirs = (min(taken[1:]) for taken in times)  # the least: whatever else the machine does only adds
        self.uses_kernel = faster(ours, theirs)
        logger("graph").debug(
            "%s: %.1f us here, %.1f us in torch: %s", self.op, ours * 1e6, theirs * 1e6,
            "the kernel stays" if self.uses_kernel else "torch stays",
        )  # fmt: skip
