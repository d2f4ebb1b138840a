"""The search for one call: on CPUs, on a GPU, or over sparse operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ArgumentError
from ..core.interrupts import deferred_interrupts
from ..dispatch.call_steps import normalize_detached, shapes_of
from ..dispatch.kernel_table import CompileConfig, KernelTable
from .device import is_gpu
from .op_api import SCHEDULES, autotune, store_of
from .search_loop import SearchBudget, TuningResult

if TYPE_CHECKING:
    from ..options import CpuOptions, MappingOptions, SparseOptions, TileOptions


def autotune_call(
    kernels: KernelTable,
    machine: CompileConfig,
    tensors: Sequence[object],
    initial: Mapping[str, object],
    start: object,
    trying: SearchBudget,
    *,
    devices: object,
    executor: Executor | None,
    store: object,
    report: str | Path | None,
) -> TuningResult[CpuOptions | MappingOptions | TileOptions | SparseOptions]:
    """Search for options for calls with these tensors; later calls of this process use the winner.

    Args:
        machine: the processor, and the options to start from if `start` is None.
        devices, executor, store, report: as for `Op.autotune`.

    Raises ArgumentError.
    """
    devices = (devices,) if isinstance(devices, str) else devices
    if not isinstance(devices, Sequence):
        raise ArgumentError(f"the devices are {devices!r}", expected='a list such as ["cpu:0-3"]')
    if any(map(is_gpu, devices)):
        with deferred_interrupts():
            from .op_api_gpu import autotune_gpu
        return autotune_gpu(
            kernels, tensors, initial, start, trying, devices=devices, executor=executor, store=store, report=report
        )
    if kernels.has_sparse((*tensors, *initial.values())):
        if tuple(devices) != ("cpu",) or executor is not None or report is not None:
            raise ArgumentError("a search with sparse operands takes no devices, executor or report")
        if trying.search == SCHEDULES:
            raise ArgumentError(
                f"{kernels.function.name} has sparse operands, which no schedule applies to",
                suggestion="leave out search: SparseOptions are searched",
            )
        with deferred_interrupts():
            from .sparse_search import autotune_sparse
        return autotune_sparse(kernels.sparse, tensors, initial, start, trying, store_of(store))
    arguments = normalize_detached(kernels.call_signature, tensors, initial)
    found = autotune(
        kernels, arguments, machine.options if start is None else start, trying,
        devices=devices, executor=executor, store=store, report=report,
    )  # fmt: skip
    kernels.set_tuned_options(shapes_of(kernels.function, arguments), arguments, machine, found.options)
    return found
