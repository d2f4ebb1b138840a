"""A CUDA device that is the CPU: tensors in its memory are those of the CPU, and what is launched runs in the emulator.

Everything between a call and the driver is as it is on a device; the driver itself is a stand-in, which is handed the
text in the place of machine code.
"""

from __future__ import annotations

import ctypes
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tensor_comprehensions.compiler.gpu_passes import CompiledGpuKernel
from tensor_comprehensions.core.dtypes import INT8
from tensor_comprehensions.dispatch.cuda import device_arguments as gpu_arguments
from tensor_comprehensions.dispatch.cuda import gpu_kernel_cache
from tensor_comprehensions.dispatch.kernel_table import KernelTable
from tensor_comprehensions.loop_ir.nodes import Buffer, Type
from tensor_comprehensions.runtime.cuda import cubins, launch
from tensor_comprehensions.runtime.cuda.driver import Driver
from tensor_comprehensions.runtime.cuda.nvrtc import Cubin
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.runtime.emulate.emulator import EmulatedTensor
from tensor_comprehensions.target import parse_gpu_target

_handle, _unsigned = ctypes.c_void_p, ctypes.c_uint
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_handle), ctypes.c_int),
    "cuCtxGetCurrent": (ctypes.POINTER(_handle),),
    "cuCtxPushCurrent_v2": (_handle,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_handle),),
    "cuModuleLoadData": (ctypes.POINTER(_handle), _handle),
    "cuModuleGetFunction": (ctypes.POINTER(_handle), _handle, ctypes.c_char_p),
    "cuFuncSetAttribute": (_handle, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernel": (
        _handle, *[_unsigned] * 7, _handle, ctypes.POINTER(_handle), ctypes.POINTER(_handle),
    ),
}  # fmt: skip
"""What `cuda.h` says; a test reads it there."""
UNKNOWN = 999


@dataclass
class FakeCuda:
    """The driver's functions, which do what they are told on the CPU and write it down.

    Attributes:
        code: what the next launch gives, 0 for success.
        log: the names of the functions that were called, in order.
        launches: kernel, grid, block, dynamic shared bytes and stream of each launch.
        stream, capturing: what torch would say.
        waits: how often somebody waited for the device.
    """

    code: int = 0
    context: int = 0
    stream: int = 7
    capturing: bool = False
    log: list[str] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)
    known: dict[str, CompiledGpuKernel] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)
    waits: int = 0
    made: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """A function as machine code would call it: with arguments of its prototype, of which nothing else comes over.

        What goes wrong in it is told as an error that the driver does not know, for nothing else can be.
        """
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name != "cuLaunchKernel" or not self.code:
                self.log.append(name)
            try:
                return int(getattr(self, f"_{name}")(*arguments) or 0)
            except Exception:
                traceback.print_exc()
                return UNKNOWN

        if name not in self.made:
            self.made[name] = ctypes.CFUNCTYPE(ctypes.c_int, *PROTOTYPES[name])(call)
        return self.made[name]

    def _handle(self, value: Any) -> int:
        self.handles.append(value)
        return len(self.handles)

    def _cuGetErrorName(self, code: int, out: Any) -> None:
        self.told = f"CUDA_ERROR_{code}".encode()
        out[0] = self.told

    def _cuGetErrorString(self, code: int, out: Any) -> None:
        out[0] = b"something is wrong"

    def _cuDeviceGet(self, out: Any, index: int) -> None:
        out[0] = index

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out[0] = 100 + device

    def _cuCtxGetCurrent(self, out: Any) -> None:
        out[0] = self.context or None

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        self.before, self.context = self.context, context

    def _cuCtxPopCurrent_v2(self, out: Any) -> None:
        self.context = self.before

    def _cuModuleLoadData(self, out: Any, image: int) -> None:
        out[0] = self._handle(self.known[ctypes.string_at(image).decode()])

    def _cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> None:
        made = self.handles[module - 1]
        (kernel,) = (k for k in made.code.kernels if k.name == name.decode())
        code = replace(made.code, kernels=(kernel,))
        out[0] = self._handle((made, kernel, emulator.build_emulated([code])[0]))

    def _cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:
        assert attribute == 8
        self.shared[self.handles[function - 1][1].name] = value

    def _cuLaunchKernel(self, function: int, *given: Any) -> int:
        made, kernel, emulated = self.handles[function - 1]
        *dims, dynamic, stream, parameters, extra = given
        if self.code:
            return self.code
        assert self.context == 100
        assert not extra
        self.launches.append((kernel.name, tuple(dims[:3]), tuple(dims[3:]), dynamic, stream))
        count = len(kernel.buffers) + kernel.status
        addresses = [ctypes.c_uint64.from_address(parameters[n]).value for n in range(count)]
        status = addresses.pop() if kernel.status else 0
        if status and ctypes.c_int64.from_address(status).value:
            return 0
        nothing = EmulatedTensor(0, Buffer("nothing", Type(INT8), (0,), (1,)), False)
        memories = [nothing] * (len(made.arguments) + len(made.temporaries))
        everything = (*made.arguments, *made.temporaries)
        for position, address in zip(kernel.buffers, addresses, strict=True):
            memories[position] = EmulatedTensor(address, everything[position], True)
        for number, value in enumerate(emulated(memories)):
            if value:
                ctypes.c_int64.from_address(status + 8 * number).value = value
        return 0


class CpuDriver(Driver):
    """Takes the CPU, which has no number, for device 0."""

    def _context(self, device: int | None) -> int:
        return super()._context(device or 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The CPU as the device that operators run on."""
    stand_in = FakeCuda()
    driver = CpuDriver(stand_in)
    original, failed = gpu_kernel_cache.load_or_compile_gpu, launch.failed_check

    def kernel(*arguments: Any, **more: Any) -> CompiledGpuKernel:
        made = original(*arguments, **more)
        stand_in.known[made.code.source] = made
        return made

    def waiting(status: torch.Tensor) -> tuple[int, int]:
        stand_in.waits += not stand_in.capturing
        return failed(status)

    monkeypatch.setattr(gpu_kernel_cache, "load_or_compile_gpu", kernel)
    monkeypatch.setattr(launch, "failed_check", waiting)
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(launch, "device_target", lambda index: parse_gpu_target("cuda:sm_90"))
    monkeypatch.setattr(launch, "current_stream", lambda device: stand_in.stream)
    monkeypatch.setattr(launch, "is_capturing", lambda: stand_in.capturing)
    monkeypatch.setattr(cubins, "cubin_of", lambda source, architecture: Cubin(architecture, source.encode(), {}))
    monkeypatch.setattr(gpu_arguments, "KIND", "cpu")
    monkeypatch.setattr(KernelTable, "any_cuda", lambda self, values: any(isinstance(v, torch.Tensor) for v in values))
    return stand_in
