"""A region in a graph: its kernel, or torch's operations where those turn out faster."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from ..api import Op
from ..core.decisions import Decision, note_decision
from ..core.diagnostics import get_logger
from ..dispatch.call_steps import normalize_arguments
from .fallback import falls_back, report_fallback
from .insert_kernels import finished_module
from .matmul import PRODUCTS
from .race import LONGEST_RUN_SECONDS, least_times, race_kernel, time_first_run
from .symbolic_regions import DimensionOf, Extent


def kernel_is_faster(ours: float, theirs: float) -> bool:
    """Whether to keep the kernel, given both times."""
    return ours <= theirs


@dataclass(frozen=True, slots=True)
class OutputView:
    """The view of a kernel's output that the graph uses: reshaped to `shape`, then permuted to `order` if given.

    varies: whether some extents are those of arguments.
    """

    shape: tuple[Extent, ...]
    order: tuple[int, ...] | None
    varies: bool = False

    @staticmethod
    def of(in_memory: Sequence[Extent], layout: Sequence[int]) -> OutputView:
        """For a tensor whose dimensions are `layout` in memory order, with the extents `in_memory`."""
        moved = list(layout) != sorted(layout)
        inverse = tuple(layout.index(d) for d in range(len(layout))) if moved else None
        return OutputView(tuple(in_memory), inverse, any(isinstance(n, DimensionOf) for n in in_memory))

    def __call__(self, x: Tensor, arguments: Sequence[Tensor]) -> Tensor:
        shape: Any = self.shape
        if self.varies:
            shape = [arguments[n.argument].shape[n.dimension] if isinstance(n, DimensionOf) else n for n in self.shape]
        seen = x if x.shape == shape else x.view(shape)
        return seen if self.order is None else seen.permute(self.order)


@dataclass(frozen=True, slots=True)
class Symbols:
    """The inputs of a region of a graph with symbolic sizes.

    takes: the number of inputs of the operator; numbers that only the graph takes follow. fixed: the sizes that kernels
    are specialized for.
    """

    takes: int
    fixed: tuple[DimensionOf, ...] = ()

    def fixed_sizes(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        """The values of `fixed` in a call."""
        return tuple(inputs[p.argument].shape[p.dimension] for p in self.fixed)


MOST_FIXED = 4
"""The maximum number of combinations of fixed sizes that have kernels; torch runs others."""
_racing = threading.RLock()
"""One race at a time, so that they do not disturb each other. A race may be part of another."""


def _forget_races() -> None:
    global _racing
    _racing = threading.RLock()


os.register_at_fork(after_in_child=_forget_races)


class KernelOrEager(torch.nn.Module):
    """Runs an operator, and on the first inputs also the graph that it replaces; keeps the faster one.

    If a kernel fails, which is a fault of this package, the graph replaces it.

    Args:
        results: the views of the outputs.
        finite: inputs that must be finite for the operator to agree with the graph; otherwise the graph runs.
        shows_nan: whether an output of the operator is NaN if one of these is not finite.
        parts: makes the graph with smaller kernels, to try if the operator is slower.
        work: floating-point operations of the region.
        symbols: the inputs, if sizes may change from call to call.
    """

    def __init__(
        self,
        op: Op,
        graph: fx.GraphModule,
        results: tuple[OutputView, ...],
        finite: tuple[int, ...] = (),
        shows_nan: bool = False,
        parts: Callable[[], fx.GraphModule] | None = None,
        work: int = 0,
        symbols: Symbols | None = None,
    ) -> None:
        super().__init__()
        self._work, self._symbols, self._takes = work, symbols, None if symbols is None else symbols.takes
        self._fixed: set[tuple[int, ...]] = set()
        self.op, self._results, self._parts = op, results, parts
        self._multiplies = any(n.target in PRODUCTS for n in graph.graph.nodes)
        self.graph = finished_module(graph)
        self._finite, self._shows_nan = finite, shows_nan
        placeholders = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        self._announced = self._describe(placeholders)
        self.uses_kernel: bool | None = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the region."""
        if self.uses_kernel is None:
            # In the first call of a graph, a mode of torch intercepts every operation, which would distort the race.
            with _racing, _disable_current_modes(), torch.no_grad():
                if self.uses_kernel is None:
                    self._choose(inputs)
        if self.uses_kernel and (self._symbols is None or not self._symbols.fixed or self._admits_fixed_sizes(inputs)):
            try:  # no context manager: every call takes this path
                if not self._finite:
                    return self._kernel(*inputs)
                if (outputs := self._run_if_finite(inputs)) is not None:
                    return outputs
            except Exception as error:
                report_fallback("a kernel fails", error)
                self.uses_kernel = False
        return self._torch(*inputs)

    __call__ = forward
    """Skips the hooks of a module, which take as long as a small kernel."""

    def _describe(self, inputs: Sequence[Any]) -> list[object]:
        """What each input of the region has to have: the type, and the shape unless sizes may change."""
        return [(getattr(x, "dtype", None), None if self._symbols else getattr(x, "shape", None)) for x in inputs]

    def _admits_fixed_sizes(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether the fixed sizes of a call have kernels, or may still get them."""
        assert self._symbols is not None
        sizes = self._symbols.fixed_sizes(inputs)
        if len(self._fixed) < MOST_FIXED:
            self._fixed.add(sizes)
        return sizes in self._fixed

    @property
    def flops(self) -> int:
        """The floating-point operations that kernels do in this region, once the race is decided."""
        return self._work if self.uses_kernel else kernel_flops(self.graph)

    def _run_if_finite(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The outputs, or None if inputs that must be finite may not be.

        If outputs would show that as NaN and are smaller, they are checked instead of the inputs.
        """
        checked = [inputs[n] for n in self._finite]
        if self._shows_nan:
            outputs = self._kernel(*inputs)
            if _total_elements(outputs) < _total_elements(checked):
                checked = [x for x in outputs if x.is_floating_point()]
            return outputs if all(map(is_finite, checked)) else None
        return self._kernel(*inputs) if all(map(is_finite, checked)) else None

    def _kernel(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.op(*inputs[: self._takes])
        if not isinstance(found, tuple):
            return (self._results[0](found, inputs),)
        return tuple([result(x, inputs) for result, x in zip(self._results, found, strict=True)])

    def _torch(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.graph(*inputs)
        return outputs

    def _choose(self, inputs: tuple[Tensor, ...]) -> None:
        """Race the kernel against torch. A kernel that fails loses; an error of torch is raised to the user."""
        log = get_logger("graph")
        expected: list[Layout] = []
        first = time_first_run(lambda: _note_layouts(self._torch(*inputs), expected))
        if first is None or (self._symbols is not None and first > LONGEST_RUN_SECONDS):
            log.debug("%s: too expensive to repeat: torch stays", self.op)
            note_decision(Decision("graph", (), "torch runs a region", "it is too expensive to run twice for a race"))
            self.uses_kernel = False
            return
        if self._describe(inputs) != self._announced:
            log.debug("%s: a tensor is not what torch announced: torch stays", self.op)
            self.uses_kernel = False
            return
        if self._symbols is not None and self._loses_at_these_sizes(inputs):
            self.uses_kernel = False
            return
        ours = theirs = math.inf
        with falls_back("a kernel cannot be compiled"):
            if _layouts_of(self._kernel(*inputs)) == expected:
                ours, theirs = race_kernel(self._kernel, self._torch, inputs, first)
        if self._symbols is not None and not any(k.is_range for k in self.op.kernels):
            log.debug("%s: there is no kernel for all sizes: torch stays", self.op)
            ours = math.inf
        faster = ours < math.inf and kernel_is_faster(ours, theirs)
        log.debug(
            "%s: %.1f us here, %.1f us in torch: %s", self.op, ours * 1e6, theirs * 1e6,
            "the kernel stays" if faster else "smaller kernels are tried" if self._parts else "torch stays",
        )  # fmt: skip
        numbers = ("us here", ours * 1e6), ("us in torch", theirs * 1e6)
        chosen = "a kernel runs a region" if faster else "torch runs a region, or smaller kernels do"
        note_decision(Decision("graph", (), chosen, "it was the faster one on the first tensors", numbers))
        if not faster and self._parts is not None:
            with falls_back("smaller kernels cannot be compiled"):
                self._try_parts(self._parts(), inputs)
        self.uses_kernel = faster

    def _loses_at_these_sizes(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether torch beats even a kernel for exactly these sizes, if one for all sizes takes long to compile."""
        taken = inputs[: self._takes]
        if not self._multiplies:
            return False
        with falls_back("a kernel cannot be compiled"):
            table = self.op._kernels
            if not table.has_several_axes(normalize_arguments(table.call_signature, taken, {})):
                return False
            ours, theirs = least_times((self.op.compile(*taken, dynamic=False), self._torch_of(inputs)), taken)
            if kernel_is_faster(ours, theirs):
                return False
            get_logger("graph").debug(
                "%s: %.1f us for these sizes alone, %.1f us in torch: torch stays", self.op, ours * 1e6, theirs * 1e6
            )
            numbers = ("us here", ours * 1e6), ("us in torch", theirs * 1e6)
            why = "a kernel for exactly the first sizes was slower"
            note_decision(Decision("graph", (), "torch runs a region", why, numbers))
        return True

    def _torch_of(self, inputs: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
        """Torch's side of a race whose runs are passed only the inputs of the operator."""
        return lambda *_: self._torch(*inputs)

    def _try_parts(self, parts: fx.GraphModule, inputs: tuple[Tensor, ...]) -> None:
        """Use `parts`, torch's operations with smaller kernels between, if it is faster than torch alone."""
        parts(*inputs)
        theirs, mixed = least_times((self._torch, parts), inputs)
        get_logger("graph").debug("%s: %.1f us in torch, %.1f us in parts", self.op, theirs * 1e6, mixed * 1e6)
        if mixed < theirs:
            self.graph = parts


def _total_elements(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() for x in tensors)


Layout = tuple[torch.Size, torch.dtype]


def _layouts_of(tensors: Sequence[Tensor]) -> list[Layout]:
    return [(x.shape, x.dtype) for x in tensors]


def _note_layouts(tensors: tuple[Tensor, ...], layouts: list[Layout]) -> tuple[Tensor, ...]:
    layouts += _layouts_of(tensors)
    return tensors


def kernel_flops(graph: fx.GraphModule) -> int:
    """The floating-point operations that kernels do in a graph that has run; shared regions count once per call."""
    called = (graph.get_submodule(str(n.target)) for n in graph.graph.nodes if n.op == "call_module")
    return sum(part.flops for part in called if isinstance(part, KernelOrEager))


def is_finite(x: Tensor) -> bool:
    """Whether `x` has neither infinities nor NaN. Not cached: not every change of a tensor raises its version."""
    total = x.detach().sum().item()  # of finite numbers it may overflow, of others it is never finite
    return math.isfinite(total) or bool(x.isfinite().all())
