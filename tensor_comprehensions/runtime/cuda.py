"""Machine code on CUDA devices, through CuPy, on torch's current stream.

Always holds: nothing here waits for a device, except to tell why a module with checks failed.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..codegen.gpu import GpuCode
from ..errors import ArgumentError, InternalError
from ..target import GPUS, GpuTarget
from .nvrtc import Cubin

_HOW = "pip install 'tensor-comprehensions[cuda]'"


@functools.cache
def device_target(index: int) -> GpuTarget:
    """What the device `index` is: the nearest row of the table, with the numbers that the device tells."""
    known = torch.cuda.get_device_properties(index)
    number = known.major * 10 + known.minor
    older = [t for t in GPUS.values() if t.capability <= number]
    if not older:
        raise ArgumentError(f"the device cuda:{index} is too old", found=f"sm_{number}", expected="sm_75 or newer")
    nearest = max(older, key=lambda t: t.capability)
    optin = getattr(known, "shared_memory_per_block_optin", nearest.shared_optin)
    return replace(
        nearest,
        name=f"sm_{number}",
        processors=known.multi_processor_count,
        l2=getattr(known, "L2_cache_size", nearest.l2),
        shared_optin=min(nearest.shared_optin, optin) if optin else nearest.shared_optin,
    )


class _Stream:
    """torch's current stream of a device, as CuPy asks for it."""

    def __init__(self, device: int) -> None:
        self.address = torch.cuda.current_stream(device).cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@dataclass(frozen=True, slots=True)
class Launches:
    """The kernels of a module on one device."""

    device: int
    code: GpuCode
    functions: tuple[Any, ...]

    def __call__(self, memories: Sequence[Tensor], status: Tensor | None) -> None:
        """Launch all kernels, in order, on the module's arguments and temporaries and the status of its checks.

        Raises InternalError with the text of the kernel that the driver refuses.
        """
        cupy = _cupy()
        with cupy.cuda.Device(self.device), cupy.cuda.Stream.from_external(_Stream(self.device)):
            for kernel, function in zip(self.code.kernels, self.functions, strict=True):
                addresses = [memories[n].data_ptr() for n in kernel.buffers]
                if kernel.status and status is not None:
                    addresses.append(status.data_ptr())
                arguments = tuple(map(_pointer, addresses))
                try:
                    function(kernel.launch.grid, kernel.launch.block, arguments, shared_mem=kernel.dynamic)
                except cupy.cuda.driver.CUDADriverError as error:
                    raise InternalError(f"{kernel.name} is not launched: {error}\n{self.code.source}") from error


def load(code: GpuCode, cubin: Cubin, device: int) -> Launches:
    """Put machine code on a device. Raises InternalError, which quotes the text, where the driver refuses it."""
    cupy = _cupy()
    with cupy.cuda.Device(device), tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin.binary)
        try:
            module = cupy.RawModule(path=str(path))
            functions = tuple(module.get_function(k.name) for k in code.kernels)
            for kernel, function in zip(code.kernels, functions, strict=True):
                if kernel.dynamic:
                    function.max_dynamic_shared_size_bytes = kernel.dynamic
        except cupy.cuda.driver.CUDADriverError as error:
            raise InternalError(f"the driver refuses what we compiled: {error}\n{code.source}") from error
    return Launches(device, code, functions)


def failed(status: Tensor) -> tuple[int, int]:
    """The number of the failed check and what it found; (0, 0) also while a graph is captured, when nobody can tell."""
    if torch.cuda.is_current_stream_capturing():
        return 0, 0
    number, value = status.tolist()
    return int(number), int(value)


def _pointer(address: int) -> Any:
    import numpy as np

    return np.uint64(address)


@functools.cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ArgumentError("launching CUDA kernels needs CuPy", suggestion=_HOW) from error
    return cupy
