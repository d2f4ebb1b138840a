"""Loads and launches machine code on CUDA devices, on torch's current stream.

Invariant: nothing here waits for a device, except to learn whether a check of a module failed. Launches go through
`CudaApi`, which is CuPy; it is imported at the first use of a device.
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
from .cuda_api import CudaApi, in_context, to_tc_error
from .cupy_api import cuda_api
from .nvrtc import Cubin
from .tensor_maps import MAP_ALIGNMENT, MAP_BYTES, TiledMap

ALIGNMENT = 16
"""The alignment in bytes that vector loads and stores need of a tensor's address."""
_PLAIN = (Tensor, torch.nn.Parameter)


@functools.cache
def device_target(index: int) -> GpuTarget:
    """The target of the device `index`: the nearest row of the table, with attributes that the device reports.

    Raises ArgumentError if the device is too old, or its attributes cannot be read.
    """
    api = cuda_api()
    try:
        known = api.device_attributes(index)
    except api.errors as error:
        raise to_tc_error(error, f"asking for the attributes of cuda:{index}") from error
    older = [t for t in GPUS.values() if t.capability <= known.capability]
    if not older:
        raise ArgumentError(
            f"the device cuda:{index} is too old", found=f"sm_{known.capability}", expected="sm_75 or newer"
        )
    nearest = max(older, key=lambda t: t.capability)
    return replace(
        nearest,
        name=f"sm_{known.capability}",
        num_sms=known.num_sms,
        l2=known.l2 or nearest.l2,
        max_shared_optin=min(nearest.max_shared_optin, known.max_shared_optin),
    )


def current_stream(device: int) -> int:
    """torch's current stream of a device, as a number that CUDA takes."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device))


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_current_stream_capturing()


def check_not_capturing(name: str, device: torch.device) -> None:
    """Raise ArgumentError while a CUDA graph is being captured: CUDA loads no code then."""
    if is_capturing():
        raise ArgumentError(
            f"{name} has not run with these sizes on {device}, and a graph is being captured",
            suggestion="call it once before the capture",
        )


def check_runs_on(target: GpuTarget, device: torch.device) -> None:
    """Raise ArgumentError if machine code for a target does not run on a device: the major versions must be equal."""
    there = device_target(device.index or 0)
    same = target.capability // 10 == there.capability // 10 and target.capability <= there.capability
    if not same or (target.group_ops and target.capability != there.capability):
        raise ArgumentError(
            f"the kernel was compiled for {target.name}, and {device} is {there.name}",
            suggestion="compile it for the arguments' own device: leave target= out",
        )


@dataclass(frozen=True, slots=True)
class Launches:
    """The kernels of a module on one device.

    A launch makes two calls of CuPy, `current_context` and `launch`, and two in Python, this one and `current_stream`;
    each further kernel of the module adds one call.
    """

    device: int
    code: GpuCode
    functions: tuple[int, ...]
    context: int
    api: CudaApi
    _blocks: threading.local = field(default_factory=threading.local)

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch all kernels, in order, on addresses of arguments, temporaries and, if the module has checks, status.

        Raises DeviceError if the device is unusable, InternalError with the source of a kernel that CUDA refuses.
        """
        try:
            block: _ArgumentBlock = self._blocks.known
        except AttributeError:
            block = self._blocks.known = _ArgumentBlock(self.code, self.functions, len(addresses))
        api, stream = self.api, current_stream(self.device)
        number, launch = 0, api.launch
        try:
            if api.current_context() != self.context:
                with in_context(api, self.context):
                    return self(addresses)
            block.addresses[:] = addresses
            if block.maps:
                block.encode_maps(api)
            for number, head, parameters in block.launches:  # noqa: B007
                launch(*head, stream, parameters, 0)
        except api.errors as error:
            raise self._explain(error, number) from error

    def bind_parameters(self, values: Mapping[str, int]) -> Launches:
        """The launches of calls with these values of the module's parameters."""
        return Launches(self.device, self.code.bind_parameters(values), self.functions, self.context, self.api)

    def select(self, kernels: slice) -> Launches:
        """The launches of a slice of the module's kernels."""
        code = replace(self.code, kernels=self.code.kernels[kernels])
        return Launches(self.device, code, self.functions[kernels], self.context, self.api)

    def synchronize(self) -> None:
        """Wait for the launched kernels. Raises DeviceError if one of them failed."""
        try:
            with in_context(self.api, self.context):
                self.api.synchronize(current_stream(self.device))
        except self.api.errors as error:
            raise to_tc_error(error, f"waiting for {', '.join(k.name for k in self.code.kernels)}") from error

    def failed_check(self, status: Tensor) -> tuple[int, int]:
        """The number of the failed check and its value, which the device has written to `status`.

        (0, 0) also during a graph capture, when it cannot be known.
        """
        if is_capturing():
            return 0, 0
        self.synchronize()
        number, value = status.tolist()
        return int(number), int(value)

    def _explain(self, error: Exception, number: int) -> Exception:
        """The error where CUDA has refused to launch the kernel `number`."""
        kernel = self.code.kernels[number]
        explained = to_tc_error(error, f"{kernel.name} is not launched")
        if not isinstance(explained, InternalError):
            return explained
        try:
            with in_context(self.api, self.context):
                needs = str(self.api.function_attributes(self.functions[number]))
        except self.api.errors:
            needs = ""
        return InternalError("\n".join(filter(None, (str(explained), str(kernel.launch), needs, self.code.source))))


_Head = tuple[int, int, int, int, int, int, int, int]


class _ArgumentBlock:
    """The launch arguments of one thread, which CUDA copies at each launch.

    Attributes:
        addresses: the addresses of a call, to be filled in.
        launches: for each kernel that has blocks its position, its launch parameters before the stream, and the address
            of its array of pointers to addresses and values of parameters.
        maps: the tensor maps of all kernels, each with the index of its tensor's address.
    """

    __slots__ = ("_arrays", "_encoded", "_room", "addresses", "launches", "maps")

    def __init__(self, code: GpuCode, functions: Sequence[int], count: int) -> None:
        self.addresses: Any = (ctypes.c_uint64 * max(1, count))()
        start = ctypes.addressof(self.addresses)
        self._arrays: list[Any] = []
        self.launches: list[tuple[int, _Head, int]] = []
        self.maps = [(TiledMap.of(m), number) for k in code.kernels for m, number in zip(k.maps, k.mapped, strict=True)]
        self._encoded = [0] * len(self.maps)  # the addresses for which the maps are encoded now
        self._room = ctypes.create_string_buffer(MAP_BYTES * len(self.maps) + MAP_ALIGNMENT)
        places = iter(range(len(self.maps)))
        for number, (kernel, function) in enumerate(zip(code.kernels, functions, strict=True)):
            numbers = [*kernel.buffers, *([count - 1] if kernel.status else [])]
            values = (ctypes.c_int64 * len(kernel.values))(*kernel.values)
            pointers = [start + 8 * n for n in numbers]
            pointers += [ctypes.addressof(values) + 8 * n for n in range(len(values))]
            pointers += [self._map_place(next(places)) for _ in kernel.maps]
            array = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
            self._arrays += (array, values)  # keeps them alive while their addresses are used
            if 0 in kernel.launch.grid:
                continue
            head: _Head = (function, *kernel.launch.grid, *kernel.launch.block, kernel.dynamic)
            self.launches.append((number, head, ctypes.addressof(array)))

    def encode_maps(self, api: CudaApi) -> None:
        """Encode the maps of tensors that have other addresses than at the call before."""
        for n, (m, number) in enumerate(self.maps):
            address = self.addresses[number]
            if self._encoded[n] != address:
                api.encode_tensor_map(m, address, self._map_place(n))
                self._encoded[n] = address

    def _map_place(self, number: int) -> int:
        start = ctypes.addressof(self._room)
        return start + -start % MAP_ALIGNMENT + MAP_BYTES * number


def load_launches_on(code: GpuCode, cubin: Cubin, device: int) -> Launches:
    """Load machine code on a device.

    Raises DeviceError if the device is unusable, InternalError, which quotes the source, if CUDA refuses the code.
    """
    api = cuda_api()
    try:
        context = api.primary_context(device)
        with in_context(api, context):
            module = api.load_module(cubin.binary)
            functions = tuple(_load_function(api, module, k.name, k.dynamic) for k in code.kernels)
    except api.errors as error:
        explained = to_tc_error(error, f"loading machine code on cuda:{device}")
        if isinstance(explained, InternalError):
            raise InternalError(f"CUDA refuses our code: {explained}\n{code.source}") from error
        raise explained from error
    return Launches(device, code, functions, context, api)


def _load_function(api: CudaApi, module: int, name: str, shared: int) -> int:
    function = api.get_function(module, name)
    if shared:
        api.allow_shared_bytes(function, shared)
    return function


def run_on_device(
    code: GpuCode, cubin: Cubin, module: ir.Module, arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device
) -> tuple[int, int]:
    """Run a module on device copies of arrays, and copy its outputs back, as `emulator.run_emulated_module` does."""

    def allocate(size: int) -> Tensor:
        return torch.empty(max(1, size), dtype=torch.uint8, device=device)

    bits = [torch.from_numpy(arrays[b.name].reshape(-1).view(np.uint8)) for b in module.arguments]
    there = [allocate(x.numel()) for x in bits]
    for x, y in zip(bits, there, strict=True):
        y[: x.numel()].copy_(x)
    rooms = [allocate(int(np.prod(b.shape)) * b.type.dtype.size) for b in module.temporaries]
    status = [torch.zeros(2, dtype=torch.int64, device=device)] if module.sites else []
    launches = load_launches_on(code, cubin, device.index)
    launches([x.data_ptr() for x in (*there, *rooms, *status)])
    for x, y in zip(bits, there, strict=True):
        x.copy_(y[: x.numel()])
    return launches.failed_check(status[0]) if status else (0, 0)


class CudaRunner:
    """Runs a loaded kernel on the tensors of a call, with new temporaries."""

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
            order, temporaries: as in `python_launch.CpuLauncher`.
            fail: makes the exception for a failed check; None if the module has no checks.
        """
        self._launches, self._device, self._fail, self._order = launches, device, fail, tuple(order)
        self._offsets, self._arena = arena_offsets(temporaries)

    def __call__(self, *tensors: Tensor) -> None:
        """Run on the inputs followed by the outputs, which must fit the kernel and not overlap."""
        addresses = [tensors[n].data_ptr() for n in self._order]
        if self._arena:
            room = torch.empty(self._arena, dtype=torch.uint8, device=self._device)  # kept until all is launched
            addresses += [room.data_ptr() + offset for offset in self._offsets]
        if self._fail is None:
            self._launches(addresses)
            return
        status = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._launches([*addresses, status.data_ptr()])
        number, value = self._launches.failed_check(status)
        if number:
            raise self._fail(number, value)


class CudaLauncher:
    """Runs a kernel on a device with given tensors, as `python_launch.CpuLauncher` does on the CPU.

    Its guards are in Python: some 0.4 us for each tensor, while a launch takes a few.
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
            inputs, outputs: as in `python_launch.CpuLauncher`.
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
        """Whether these are dense tensors on the device, aligned, of the right types, sizes and strides."""
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
        except RuntimeError:  # from tensors without strides or memory
            return False
        return True

    def call(self, *inputs: Any) -> Any:
        """The result, or NotImplemented if the inputs are not accepted."""
        return self(*inputs) if self.accepts(*inputs) else NotImplemented

    def __call__(self, *inputs: Tensor) -> Any:
        """The output, or a tuple when there are several or none. The inputs must have been accepted."""
        outputs = self.allocate_outputs()
        self.run(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def allocate_outputs(self) -> list[Tensor]:
        """Allocate the outputs."""
        return [allocate() for allocate in self._makers]
