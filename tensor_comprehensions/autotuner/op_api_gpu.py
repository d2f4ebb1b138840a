"""Tuning of GPU options for the arguments of a call, in a worker process that may crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch

from ..compiler.gpu_passes import prefers_tensor_cores
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from ..dispatch.call_steps import canonical_strides, normalize_detached, shapes_of, with_strides
from ..dispatch.cuda.library_calls import find_library_matmuls
from ..dispatch.kernel_table import KernelTable
from ..options import GpuOptions, MappingOptions, TileOptions, check_gpu_options
from ..target import GpuTarget
from ..tc_lang.ir import BoundFunction
from ..tc_lang.transforms.legalize import legalize
from . import tuner_pb2 as pb
from .device import TuningDevice
from .evaluators import is_tainted
from .op_api import store_of
from .problem import problem_message
from .report import write_report
from .search_loop import SearchBudget, TuningResult
from .session import Spaced, TuningTask, tune
from .space_gpu import mapping_space
from .space_tiles import tile_space
from .worker import phase_limits
from .worker_gpu import gpu_fingerprint, gpu_target_of, is_modeled
from .worker_pool import ForkServer, WorkerConfig, WorkerPool

SERVICE = "tensor_comprehensions.autotuner.worker_gpu:handle_gpu_request"


class GpuWorkers:
    """A process that maps, compiles and runs on one device; it is replaced when a candidate breaks the device."""

    separate, width = False, 4

    def __init__(self, device: str) -> None:
        self._device, self.fingerprint = device, gpu_fingerprint(device)
        self._fork_server: ForkServer | None = None
        self._group: WorkerPool | None = None

    def begin(self) -> None:
        """Start the process that the worker is forked from, without waiting for it."""
        if self._fork_server is None:
            self._fork_server = ForkServer()
            self._group = WorkerPool(self._fork_server, [WorkerConfig(SERVICE)], is_tainted)

    def submit(self, request: pb.Request) -> Future[bytes]:
        """Submit a request to the worker."""
        self.begin()
        assert self._fork_server is not None
        assert self._group is not None
        request.device, request.folder = self._device, str(self._fork_server.folder)
        return self._group.submit(request.SerializeToString(), phase_limits(request))

    def close(self) -> None:
        """End every process."""
        if self._fork_server is not None and self._group is not None:
            self._group.close()
            self._fork_server.close()
            self._fork_server = self._group = None


def autotune_gpu(
    kernels: KernelTable,
    tensors: Sequence[object],
    initial: Mapping[str, object],
    start: object,
    trying: SearchBudget,
    *,
    devices: Sequence[object],
    executor: object = None,
    store: object = None,
    report: str | Path | None = None,
) -> TuningResult[GpuOptions]:
    """Search for options for calls with these tensors on a GPU; later calls of this process use them.

    Args:
        start: the options to start from and to beat; None: those of the cost model. `TileOptions` search tiles for
            tensor cores, `MappingOptions` mappings without them.
        devices: exactly one, such as "cuda:0" or "emulated:sm_90".
        report: as for `op_api.autotune`.

    Raises ArgumentError, also if the device does not exist.
    """
    if len(devices) != 1 or executor is not None:
        raise ArgumentError(f"the devices are {list(devices)!r}", expected="one graphics processor, and no executor")
    name = str(devices[0])
    machine = gpu_target_of(name)
    here = [x.cpu() if isinstance(x, torch.Tensor) else x for x in tensors]
    arguments = normalize_detached(kernels.call_signature, here, {k: _to_host(x) for k, x in initial.items()})
    sizes, strides = shapes_of(kernels.function, arguments), tuple(map(canonical_strides, arguments.inputs))
    bound = with_strides(kernels.bind(sizes), strides)
    if start is None:
        start = _default_options(bound, machine)
    if not isinstance(start, MappingOptions | TileOptions):
        raise ArgumentError(f"options is {type(start).__name__}", expected="MappingOptions(...) or TileOptions(...)")
    check_gpu_options(start, machine)
    modeled, calls = is_modeled(name), find_library_matmuls(bound)
    if modeled and calls and _matches_calls(start):
        raise ArgumentError(
            f"the search starts with calls of torch, and {name} cannot model their time",
            suggestion="search on a device, or from options without match_library_calls",
        )
    spaced = cast(
        "Spaced",
        tile_space(machine, start)
        if isinstance(start, TileOptions)
        else mapping_space(bound, machine, start, calls=not modeled),
    )
    message = problem_message(kernels.function, arguments, trying.seed)
    subject = TuningTask(kernels.function, bound, message, cast("Any", machine), cast("Any", start), store_of(store))
    workers = GpuWorkers(name)
    try:
        found = tune(subject, trying, (TuningDevice(name, (), 0),), evaluator=workers, spaced=spaced)
    finally:
        workers.close()
    get_logger("tune").info(
        "%s on %s: %.3g s, %.2f times as fast as untuned (%.3g s), after %d candidates in %.0f s",
        kernels.function.name, name, found.seconds, found.speedup, found.default_seconds, len(found.outcomes),
        found.elapsed,
    )  # fmt: skip
    options = cast("GpuOptions", found.options)
    if _matches_calls(options):
        get_logger("tune").info("%s on %s: torch computes %s", kernels.function.name, name, "; ".join(map(str, calls)))
    if report is not None:
        write_report(Path(report), [(kernels.function.name, found)])
    kernels.gpu.set_tuned_options(sizes, strides, machine, options)
    return cast("TuningResult[GpuOptions]", found)


def _default_options(bound: BoundFunction, target: GpuTarget) -> GpuOptions:
    """Where a search starts: `TileOptions` if the def uses tensor cores by default, else its default mapping."""
    from ..polyhedral.gpu.lower_gpu import default_options

    function = legalize(bound)
    return TileOptions() if prefers_tensor_cores(function, target) else default_options(function, target)


def _matches_calls(options: GpuOptions) -> bool:
    return isinstance(options, MappingOptions) and options.match_library_calls


def _to_host(x: object) -> object:
    return x.cpu() if isinstance(x, torch.Tensor) else x
