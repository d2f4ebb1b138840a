"""Machine code on CUDA devices, on torch's current stream.

Always holds: nothing here waits for a device, except to tell why a module with checks failed.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codegen.gpu.gpu_printer import GpuCode
from ...core.errors import ArgumentError, InternalError
from ...loop_ir import nodes as ir
from ...target import GPUS, GpuTarget
from ..cpu.python_launch import OperandSpec, arena_offsets
from .driver import Driver, driver
from .nvrtc import Cubin

ALIGNMENT = 16
"""Bytes that the address of a tensor must be a multiple of for vectors to be read from it at once."""
_PLAIN = (Tensor, torch.nn.Parameter)


@functools.cache
def device_target(index: int) -> GpuTarget:
    """What the device `index` is: the nearest row of the table, with the numbers that the device tells."""
    known = torch.cuda.get_device_properties(index)
    number = known.major * 10 + known.minor
    older = [t for t in GPUS.values() if t.capability <= number]
    if not older:
        raise ArgumentError(f"the device cuda:{index} is too old", found=f"sm_{number}", expected="sm_75 or newer")
    nearest = max(older, key=lambda t: t.capability)
    optin = getattr(known, "shared_memory_per_block_optin", nearest.max_shared_optin)
    return replace(
        nearest,
        name=f"sm_{number}",
        num_sms=known.multi_processor_count,
        l2=getattr(known, "L2_cache_size", nearest.l2),
        max_shared_optin=min(nearest.max_shared_optin, optin) if optin else nearest.max_shared_optin,
    )


def current_stream(device: int) -> int:
    """torch's current stream of a device, as the driver calls it."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device))


def is_capturing() -> bool:
    """Is what is launched now written down for a graph?"""
    return torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, slots=True)
class Launches:
    """The kernels of a module on one device."""

    device: int
    code: GpuCode
    functions: tuple[int, ...]
    driver: Driver
    _rooms: threading.local = field(default_factory=threading.local)

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch all kernels, in order, on the addresses of arguments, temporaries and, if it checks, the status.

        Raises DeviceError where the device can do no more, InternalError with the text of a kernel that it refuses.
        """
        slots, parameters = self._room(len(addresses))
        slots[:] = addresses
        stream = current_stream(self.device)
        with self.driver.on(self.device):
            for kernel, function, taken in zip(self.code.kernels, self.functions, parameters, strict=True):
                launch = kernel.launch
                code = self.driver.launch(function, *launch.grid, *launch.block, kernel.dynamic, stream, taken, None)
                if code:
                    self._explain(code, kernel.name)

    def _room(self, count: int) -> tuple[Any, tuple[Any, ...]]:
        """Memory of this thread for the addresses, and for each kernel pointers to those that it takes."""
        known = getattr(self._rooms, "known", None)
        if known is not None:
            slots, parameters = known
            return slots, parameters
        slots = (ctypes.c_uint64 * max(1, count))()
        start = ctypes.addressof(slots)
        taken = []
        for kernel in self.code.kernels:
            numbers = [*kernel.buffers, *([count - 1] if kernel.status else [])]
            taken.append((ctypes.c_void_p * max(1, len(numbers)))(*(start + 8 * n for n in numbers)))
        self._rooms.known = slots, tuple(taken)
        return slots, tuple(taken)

    def _explain(self, code: int, name: str) -> None:
        try:
            self.driver.check(code, f"{name} is not launched")
        except InternalError as error:
            raise InternalError(f"{error}\n{self.code.source}") from error


def load_launches_on(code: GpuCode, cubin: Cubin, device: int) -> Launches:
    """Put machine code on a device. Raises InternalError, which quotes the text, where the driver refuses it."""
    cuda = driver()
    with cuda.on(device):
        try:
            module = cuda.load(cubin.binary)
            functions = tuple(cuda.function(module, k.name, k.dynamic) for k in code.kernels)
        except InternalError as error:
            raise InternalError(f"the driver refuses what we compiled: {error}\n{code.source}") from error
    return Launches(device, code, functions, cuda)


def run_on_device(
    code: GpuCode, cubin: Cubin, module: ir.Module, arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device
) -> tuple[int, int]:
    """Run a module on copies of arrays on a device, and leave there what it wrote, as `emulator.run_emulated_module`
    does."""

    def room(size: int) -> Tensor:
        return torch.empty(max(1, size), dtype=torch.uint8, device=device)

    bits = [torch.from_numpy(arrays[b.name].reshape(-1).view(np.uint8)) for b in module.arguments]
    there = [room(x.numel()) for x in bits]
    for x, y in zip(bits, there, strict=True):
        y[: x.numel()].copy_(x)
    rooms = [room(int(np.prod(b.shape)) * b.type.dtype.size) for b in module.temporaries]
    status = [torch.zeros(2, dtype=torch.int64, device=device)] if module.sites else []
    load_launches_on(code, cubin, device.index)([x.data_ptr() for x in (*there, *rooms, *status)])
    for x, y in zip(bits, there, strict=True):
        x.copy_(y[: x.numel()])
    return failed_check(status[0]) if status else (0, 0)


class CudaRunner:
    """A loaded kernel with the memory that a call provides."""

    __slots__ = ("_arena", "_device", "_fail", "_launches", "_offsets", "_order")

    def __init__(
        self,
        launches: Launches,
        device: torch.device,
        order: Sequence[int],
        temporaries: Sequence[int],
        fail: Callable[[int, int], BaseException] | None,
    ) -> None:
        """Prepare calls.

        Args:
            order, temporaries: as of `python_launch.CpuLauncher`.
            fail: makes the exception for a failed check; None where the module checks nothing.
        """
        self._launches, self._device, self._fail, self._order = launches, device, fail, tuple(order)
        self._offsets, self._arena = arena_offsets(temporaries)

    def __call__(self, *tensors: Tensor) -> None:
        """Run on the inputs followed by the outputs, which must fit the kernel and not overlap."""
        addresses = [tensors[n].data_ptr() for n in self._order]
        if self._arena:
            room = torch.empty(self._arena, dtype=torch.uint8, device=self._device)  # until all is launched
            addresses += [room.data_ptr() + offset for offset in self._offsets]
        if self._fail is None:
            self._launches(addresses)
            return
        status = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._launches([*addresses, status.data_ptr()])
        number, value = failed_check(status)
        if number:
            raise self._fail(number, value)


class CudaLauncher:
    """What runs on a device, with the tensors that it takes: what `python_launch.CpuLauncher` is for the CPU.

    Its guards are in Python: some 0.4 us for each tensor, beside which a launch takes a few.
    """

    __slots__ = ("_device", "_grain", "_guards", "_makers", "run")

    def __init__(
        self,
        run: Callable[..., None],
        device: torch.device,
        inputs: Sequence[OperandSpec],
        outputs: Sequence[OperandSpec],
        *,
        aligned: bool,
    ) -> None:
        """Prepare calls.

        Args:
            run: computes the outputs, which come after the inputs, fit the operands and do not overlap.
            inputs, outputs: as of `python_launch.CpuLauncher`.
            aligned: whether tensors must start at multiples of `ALIGNMENT`.
        """
        self._grain, self._device, self.run = ALIGNMENT if aligned else 1, device, run
        self._guards = [(getattr(torch, o.dtype.name), o.sizes, o.strides) for o in inputs]
        self._makers = [
            functools.partial(
                torch.empty_strided, o.sizes, o.strides, dtype=getattr(torch, o.dtype.name), device=device
            )
            for o in outputs
        ]

    def accepts(self, *tensors: Any) -> bool:
        """Are these ordinary dense tensors on the device, of the right types, sizes and strides, and aligned?"""
        if len(tensors) != len(self._guards):
            return False
        device = self._device
        try:
            for x, (dtype, sizes, strides) in zip(tensors, self._guards, strict=True):
                if type(x) not in _PLAIN or x.dtype is not dtype or x.shape != sizes or x.device != device:
                    return False
                address = x.data_ptr()
                if x.stride() != strides or not address or address % self._grain or x.is_neg():
                    return False
        except RuntimeError:  # of tensors without strides, or without memory
            return False
        return True

    def call(self, *inputs: Any) -> Any:
        """The launcher's result, or NotImplemented where `accepts` says no."""
        return self(*inputs) if self.accepts(*inputs) else NotImplemented

    def __call__(self, *inputs: Tensor) -> Any:
        """The output, or a tuple when there are several or none. The inputs must have been accepted."""
        outputs = self.fresh()
        self.run(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def fresh(self) -> list[Tensor]:
        """New outputs."""
        return [allocate() for allocate in self._makers]


def failed_check(status: Tensor) -> tuple[int, int]:
    """The number of the failed check and what it found; (0, 0) also while a graph is captured, when nobody can tell."""
    if is_capturing():
        return 0, 0
    number, value = status.tolist()
    return int(number), int(value)
