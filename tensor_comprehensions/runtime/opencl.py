"""Runs OpenCL kernels through PyOpenCL on the first device that can; PoCL makes the CPU a device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codegen.gpu.gpu_printer import GpuCode
from ..core.errors import ArgumentError, InternalError
from ..loop_ir import nodes as ir

_HOW = "pip install 'tensor-comprehensions[opencl]'"


@dataclass(frozen=True, slots=True)
class OpenClDevice:
    """A device with its PyOpenCL context."""

    opencl: Any
    context: Any
    queue: Any

    @property
    def name(self) -> str:
        return str(self.queue.device.name)


def is_opencl_available() -> bool:
    """Whether there is a device that builds kernels."""
    try:
        opencl_device()
    except ArgumentError:
        return False
    return True


@functools.cache
def opencl_device() -> OpenClDevice:
    """The first device that builds kernels. Raises ArgumentError if there is none."""
    try:
        import pyopencl
    except ImportError as error:
        raise ArgumentError("running OpenCL kernels needs PyOpenCL", suggestion=_HOW) from error
    try:
        devices = [d for p in pyopencl.get_platforms() for d in p.get_devices()]
    except pyopencl.Error:
        devices = []
    if not devices:
        raise ArgumentError("there is no OpenCL device", suggestion=_HOW)
    for device in devices:
        context = pyopencl.Context([device])
        with suppress(pyopencl.Error), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pyopencl.Program(context, "__kernel void empty() {}").build()
            return OpenClDevice(pyopencl, context, pyopencl.CommandQueue(context))
    names = ", ".join(str(d.name) for d in devices)
    raise ArgumentError(f"no OpenCL device builds kernels; PoCL 3.0 does not know Zen 5: {names}", suggestion=_HOW)


def run_opencl(
    code: GpuCode,
    module: ir.Module,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    parameters: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Build and run the source of `module` on arrays, one per argument by name, which receive the results.

    Arrays have the layout of the buffers, with half-precision numbers as their own type or their bits.
    parameters: the values of the module's parameters.

    Returns:
        (0, 0), or the number of a failed check and its value.

    Raises:
        ArgumentError: there is no device.
        InternalError: the device's compiler refuses the source, which is quoted.
    """
    found, values = opencl_device(), parameters or {}
    cl, flags = found.opencl, found.opencl.mem_flags
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = cl.Program(found.context, code.source).build()
    except cl.Error as error:
        raise InternalError(f"OpenCL refuses our code: {error}\n{code.source}") from error
    memories = [
        cl.Buffer(found.context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=arrays[b.name])
        if arrays[b.name].size
        else cl.Buffer(found.context, flags.READ_WRITE, 16)
        for b in module.arguments
    ]
    memories += [
        cl.Buffer(found.context, flags.READ_WRITE, max(16, b.bind_parameters(values).bytes)) for b in module.temporaries
    ]
    status = np.zeros(2, np.int64)
    failed = cl.Buffer(found.context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=status)
    for kernel in (k.bind_parameters(values) for k in code.kernels):
        if 0 in kernel.launch.grid:
            continue
        given = [memories[n] for n in kernel.buffers] + ([failed] if kernel.status else [])
        given += map(np.int64, kernel.values)
        size = tuple(g * b for g, b in zip(kernel.launch.grid, kernel.launch.block, strict=True))
        cl.Kernel(program, kernel.name)(found.queue, size, kernel.launch.block, *given)
    for b, memory in zip(module.arguments, memories, strict=False):
        if b.name in module.written and arrays[b.name].size:
            cl.enqueue_copy(found.queue, arrays[b.name], memory)
    cl.enqueue_copy(found.queue, status, failed)
    found.queue.finish()
    return int(status[0]), int(status[1])
