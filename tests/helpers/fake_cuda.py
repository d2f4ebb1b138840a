"""A CUDA device that is the CPU: tensors in its memory are those of the CPU, and what is launched runs in the emulator.

Everything between a call and `CudaApi` is as it is on a device; behind that is a stand-in, which is handed the text in
the place of machine code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tensor_comprehensions.compiler.gpu_passes import CompiledGpuKernel
from tensor_comprehensions.compiler.sparse_gpu_passes import CompiledSparseGpuKernel
from tensor_comprehensions.core.dtypes import INT8
from tensor_comprehensions.dispatch.cuda import device_arguments as gpu_arguments
from tensor_comprehensions.dispatch.cuda import gpu_kernel_cache
from tensor_comprehensions.dispatch.kernel_table import KernelTable
from tensor_comprehensions.dispatch.sparse import sparse_gpu_kernels, sparse_kernels
from tensor_comprehensions.dispatch.sparse.sparse_gpu_kernels import with_length
from tensor_comprehensions.loop_ir.nodes import Buffer, Type
from tensor_comprehensions.runtime.cuda import cubins, launch
from tensor_comprehensions.runtime.cuda.cuda_api import DeviceAttributes, FunctionAttributes
from tensor_comprehensions.runtime.cuda.launch import Launches
from tensor_comprehensions.runtime.cuda.nvrtc import Cubin
from tensor_comprehensions.runtime.cuda.tensor_maps import MAP_ALIGNMENT, TiledMap
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.runtime.emulate.emulator import EmulatedTensor
from tensor_comprehensions.target import parse_gpu_target


class FakeCudaError(RuntimeError):
    """As the errors of CuPy."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR_{status}: something is wrong")
        self.status = status


@dataclass
class FakeCuda:
    """`CudaApi` on the CPU: it runs what is launched in the emulator and writes down what is called.

    Attributes:
        code: the status of the next launch, 0 for success. wait_code: the same of waiting.
        log: the names of the functions that were called, in order.
        launches: kernel, grid, block, dynamic shared bytes and stream of each launch.
        stream, capturing: what torch would say.
        waits: how often the device was waited for.
        lengths: of arrays whose kernels do not depend on them, elements by address.
    """

    code: int = 0
    wait_code: int = 0
    context: int = 0
    stream: int = 7
    capturing: bool = False
    log: list[str] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)
    known: dict[str, CompiledGpuKernel | CompiledSparseGpuKernel] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)
    waits: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    errors: tuple[type[Exception], ...] = (FakeCudaError,)

    def _handle(self, value: Any) -> int:
        self.handles.append(value)
        return len(self.handles)

    def current_context(self) -> int:
        self.log.append("current_context")
        return self.context

    def set_context(self, context: int, /) -> None:
        self.log.append("set_context")
        self.context = context

    def primary_context(self, device: int | None, /) -> int:
        """The CPU, which has no number, is device 0."""
        return 100 + (device or 0)

    def device_attributes(self, device: int, /) -> DeviceAttributes:
        return DeviceAttributes(capability=90, num_sms=132, l2=50 << 20, max_shared_optin=227 << 10)

    def load_module(self, image: bytes, /) -> int:
        self.log.append("load_module")
        return self._handle(self.known[image.decode()])

    def get_function(self, module: int, name: str, /) -> int:
        made = self.handles[module - 1]
        (kernel,) = (k for k in made.code.kernels if k.name == name)
        code = replace(made.code, kernels=(kernel,))
        return self._handle((made, kernel, emulator.build_emulated([code])[0]))

    def allow_shared_bytes(self, function: int, count: int, /) -> None:
        self.shared[self.handles[function - 1][1].name] = count

    def function_attributes(self, function: int, /) -> FunctionAttributes:
        return FunctionAttributes(registers=40, local_bytes=8, shared_bytes=0, max_threads=64)

    def launch(self, function: int, *given: int) -> None:
        made, kernel, emulated = self.handles[function - 1]
        *dims, dynamic, stream, parameters, extra = given
        if self.code:
            raise FakeCudaError(self.code)
        self.log.append("launch")
        assert self.context == 100
        assert not extra
        self.launches.append((kernel.name, tuple(dims[:3]), tuple(dims[3:]), dynamic, stream))
        addresses = read_arguments(parameters, len(kernel.buffers) + kernel.status + len(kernel.parameters))
        values = dict(zip(kernel.parameters, addresses[len(addresses) - len(kernel.parameters) :], strict=True))
        del addresses[len(addresses) - len(values) :]
        assert kernel.bind_parameters(values).launch.grid == tuple(dims[:3])
        status = addresses.pop() if kernel.status else 0
        if status and ctypes.c_int64.from_address(status).value:
            return
        count = len(addresses) + kernel.status + len(values) + len(kernel.maps)
        pointers = (ctypes.c_void_p * count).from_address(parameters)
        nothing = EmulatedTensor(0, Buffer("nothing", Type(INT8), (0,), (1,)), False)
        memories = [nothing] * (len(made.arguments) + len(made.temporaries))
        everything = (*made.arguments, *made.temporaries)
        for position, address in zip(kernel.buffers, addresses, strict=True):
            b = everything[position].bind_parameters(values)
            b = with_length(b, self.lengths[address]) if b.dynamic else b
            memories[position] = EmulatedTensor(address, b, True)
        for position, place in zip(kernel.mapped, pointers[len(pointers) - len(kernel.maps) :], strict=True):
            address = ctypes.c_uint64.from_address(place or 0).value
            memories[position] = EmulatedTensor(address, everything[position], True)
        for number, value in enumerate((emulated.bind_parameters(values) if values else emulated)(memories)):
            if value:
                ctypes.c_int64.from_address(status + 8 * number).value = value

    def encode_tensor_map(self, m: TiledMap, address: int, place: int, /) -> None:
        """A map is its address here."""
        self.log.append("encode_tensor_map")
        assert place % MAP_ALIGNMENT == 0
        ctypes.c_uint64.from_address(place).value = address

    def synchronize(self, stream: int, /) -> None:
        assert (self.context, stream) == (100, self.stream)
        self.waits += 1
        if self.wait_code:
            raise FakeCudaError(self.wait_code)


def read_arguments(parameters: int, count: int) -> list[int]:
    """The first `count` arguments of a launch, which are addresses, by the array of pointers to them."""
    pointers = (ctypes.c_void_p * count).from_address(parameters)
    return [ctypes.c_uint64.from_address(p or 0).value for p in pointers]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The CPU as the device that operators run on."""
    stand_in = FakeCuda()
    original = gpu_kernel_cache.load_or_compile_gpu

    def kernel(*arguments: Any, **more: Any) -> CompiledGpuKernel:
        made = original(*arguments, **more)
        stand_in.known[made.code.source] = made
        return made

    original_range = gpu_kernel_cache.load_or_compile_gpu_range

    def range_kernel(*arguments: Any, **more: Any) -> CompiledGpuKernel:
        made = original_range(*arguments, **more)
        stand_in.known[made.code.source] = made
        return made

    monkeypatch.setattr(gpu_kernel_cache, "load_or_compile_gpu", kernel)
    monkeypatch.setattr(gpu_kernel_cache, "load_or_compile_gpu_range", range_kernel)
    compile_sparse, launch_on_arrays = sparse_gpu_kernels.compile_sparse_gpu, sparse_gpu_kernels.launch_on_arrays

    def sparse_kernel(*arguments: Any) -> CompiledSparseGpuKernel:
        made = compile_sparse(*arguments)
        stand_in.known[made.code.source] = made
        return made

    def launch_with_lengths(launches: Launches, arrays: Sequence[Tensor]) -> None:
        stand_in.lengths.update({x.data_ptr(): x.numel() for x in arrays})
        launch_on_arrays(launches, arrays)

    monkeypatch.setattr(sparse_gpu_kernels, "compile_sparse_gpu", sparse_kernel)
    monkeypatch.setattr(sparse_gpu_kernels, "launch_on_arrays", launch_with_lengths)
    monkeypatch.setattr(sparse_kernels, "find_device", lambda values: torch.device("cpu"))
    monkeypatch.setattr(launch, "cuda_api", lambda: stand_in)
    monkeypatch.setattr(launch, "device_target", lambda index: parse_gpu_target("cuda:sm_90"))
    monkeypatch.setattr(launch, "current_stream", lambda device: stand_in.stream)
    monkeypatch.setattr(launch, "is_capturing", lambda: stand_in.capturing)
    monkeypatch.setattr(cubins, "cubin_of", lambda source, architecture: Cubin(architecture, source.encode(), {}))
    monkeypatch.setattr(gpu_arguments, "KIND", "cpu")
    monkeypatch.setattr(KernelTable, "any_cuda", lambda self, values: gpu_arguments.is_any_on_device(values))
    return stand_in
