"""Calls of split defs: dense contractions run as dense kernels, between the sparse kernels of other statements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...options import CpuOptions
from ...runtime.cpu.host import host
from ...tc_lang.ir import Function
from ...tc_lang.transforms.split_dense import DefPart
from ..inline_cache import MISS, InlineCache
from ..kernel_table import CompileConfig, KernelTable
from .sparse_run import SparseCall, StoredCounts
from .sparse_tensor import SparseTensor

RunSparse = Callable[[SparseCall, StoredCounts | None], dict[str, Any]]
"""Runs the kernels of a part with sparse tensors."""


class DenseStep:
    """A part of a def without sparse tensors."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._table = KernelTable(function)
        self._inline_cache = InlineCache(self._table.call_signature)
        self._config = CompileConfig(CpuOptions(), host())

    def run(self, operands: list[Tensor], device: torch.device | None) -> dict[str, Any]:
        """The results by name. device: the GPU of the call; None: the CPU."""
        if device is not None:
            return self._name_results(self._table.gpu.call(operands, None, {}, None))
        found = self._inline_cache.call(operands, None, {})
        if found is MISS:
            found = self._table.call(operands, None, {}, self._config, self._inline_cache)
        return self._name_results(found)

    def _name_results(self, found: Any) -> dict[str, Any]:
        results = found if isinstance(found, tuple) else (found,)
        return dict(zip(self.function.returns, results, strict=True))


class SplitRun:
    """Runs the parts of a def in order. make: returns the function that runs a part with sparse tensors."""

    def __init__(self, function: Function, parts: tuple[DefPart, ...], make: Callable[[Function], RunSparse]) -> None:
        self._returns = function.returns
        self._steps: list[tuple[Function, DenseStep | RunSparse]] = [
            (p.function, DenseStep(p.function) if p.is_dense else make(p.function)) for p in parts
        ]

    def run(self, call: SparseCall, counts: StoredCounts | None) -> dict[str, Any]:
        """The results of the def, by name."""
        known: dict[str, Any] = {n: x.detach() for n, x in call.dense.items()}
        known |= call.sparse
        for number, (function, step) in enumerate(self._steps):
            operands = {p.name: known[p.name] for p in function.parameters}
            if isinstance(step, DenseStep):
                known |= step.run(list(operands.values()), call.device)
                continue
            sparse = {n: x for n, x in operands.items() if isinstance(x, SparseTensor)}
            dense = {n: x for n, x in operands.items() if n not in sparse}
            structures = {n: call.structures[n] for n in sparse if n in call.structures}
            mine = None if counts is None else counts.parts.setdefault(number, StoredCounts())
            found = step(SparseCall(sparse, dense, structures, call.device), mine)
            if mine is not None:
                mine.levels.update({n: x.levels for n, x in found.items() if isinstance(x, SparseTensor)})
            known |= found
        return {name: known[name] for name in self._returns}
