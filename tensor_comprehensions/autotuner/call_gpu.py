"""Tuning of mappings to a graphics processor: for the arguments of a call, by workers that may die."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch

from ..calling.calls import examples, normal_strides, sizes_of, with_strides
from ..calling.gpu.library import products
from ..calling.kernels import Kernels
from ..errors import ArgumentError
from ..inspection import logger
from ..options import MappingOptions, check_mapping
from ..tc_lang.legalise import legalise
from . import tuner_pb2 as pb
from .call import store_of
from .device import Device
from .evaluators import suspect
from .problem import describe
from .processes import Group, Settings, Zygote
from .report import write
from .service import limits
from .service_gpu import fingerprint, is_modelled, target_of
from .space_gpu import mapping_space
from .tune import Spaced, Subject, tune
from .tuner import Effort, Tuned

SERVICE = "tensor_comprehensions.autotuner.service_gpu:handle"


class GpuWorkers:
    """A process that maps, compiles and runs on one device; it is replaced when a candidate breaks the device."""

    separate, width = False, 4

    def __init__(self, device: str) -> None:
        self._device, self.fingerprint = device, fingerprint(device)
        self._zygote: Zygote | None = None
        self._group: Group | None = None

    def begin(self) -> None:
        """Start the process that the worker is forked from, without waiting for it."""
        if self._zygote is None:
            self._zygote = Zygote()
            self._group = Group(self._zygote, [Settings(SERVICE)], suspect)

    def submit(self, request: pb.Request) -> Future[bytes]:
        """Send a request away."""
        self.begin()
        assert self._zygote is not None
        assert self._group is not None
        request.device, request.folder = self._device, str(self._zygote.folder)
        return self._group.submit(request.SerializeToString(), limits(request))

    def close(self) -> None:
        """End every process."""
        if self._zygote is not None and self._group is not None:
            self._group.close()
            self._zygote.close()
            self._zygote = self._group = None


def autotune(
    kernels: Kernels,
    tensors: Sequence[object],
    initial: Mapping[str, object],
    start: object,
    trying: Effort,
    *,
    devices: Sequence[object],
    executor: object = None,
    store: object = None,
    report: str | Path | None = None,
) -> Tuned:
    """Search for a mapping for calls with these tensors; later calls of this process use it.

    Args:
        start: what to start from and must be beaten; None: the mapping that the cost model chooses.
        devices: one, "cuda:0" or "emulated:sm_90".
        report: as for `call.autotune`.

    Raises ArgumentError, also where there is no such device.
    """
    if len(devices) != 1 or executor is not None:
        raise ArgumentError(f"the devices are {list(devices)!r}", expected="one graphics processor, and no executor")
    name = str(devices[0])
    machine = target_of(name)
    here = [x.cpu() if isinstance(x, torch.Tensor) else x for x in tensors]
    arguments = examples(kernels.interface, here, {k: _here(x) for k, x in initial.items()})
    sizes, strides = sizes_of(kernels.function, arguments), tuple(map(normal_strides, arguments.inputs))
    bound = with_strides(kernels.bind(sizes), strides)
    if start is None:
        from ..polyhedral.gpu import default_options

        start = default_options(legalise(bound), machine)
    if not isinstance(start, MappingOptions):
        raise ArgumentError(f"options is {type(start).__name__}", expected="MappingOptions(...)")
    check_mapping(start, machine)
    modelled, calls = is_modelled(name), products(bound)
    if modelled and calls and start.match_library_calls:
        raise ArgumentError(
            f"the search starts with calls of torch, and {name} has no model of what they take",
            suggestion="search on a device, or from options without match_library_calls",
        )
    spaced = cast("Spaced", mapping_space(bound, machine, start, calls=not modelled))
    message = describe(kernels.function, arguments, trying.seed)
    subject = Subject(kernels.function, bound, message, cast("Any", machine), cast("Any", start), store_of(store))
    workers = GpuWorkers(name)
    try:
        found = tune(subject, trying, (Device(name, (), 0),), evaluator=workers, spaced=spaced)
    finally:
        workers.close()
    logger("tune").info(
        "%s on %s: %.3g s, %.2f times as fast as untuned (%.3g s), after %d candidates in %.0f s",
        kernels.function.name, name, found.seconds, found.speedup, found.default_seconds, len(found.outcomes),
        found.elapsed,
    )  # fmt: skip
    if cast("MappingOptions", found.options).match_library_calls:
        logger("tune").info("%s on %s: torch computes %s", kernels.function.name, name, "; ".join(map(str, calls)))
    if report is not None:
        write(Path(report), [(kernels.function.name, found)])
    kernels.gpu.tune(sizes, strides, machine, cast("MappingOptions", found.options))
    return found


def _here(x: object) -> object:
    return x.cpu() if isinstance(x, torch.Tensor) else x
