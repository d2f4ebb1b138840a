"""The functions of CUDA that launches call, behind one interface, and their errors as the package's own.

`cupy_api.CupyApi` implements it on a machine with a device; tests use a fake.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ...core.errors import ArgumentError, DeviceError, InternalError
from .tensor_maps import TiledMap

NO_MEMORY = 2
BROKEN = frozenset((4, 214, 219, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
"""Errors that make a device unusable in this process: an illegal address, a failed assertion, a fault."""
UNUSABLE = frozenset((34, 35, 46, 100, 101, 802, 803, 804))
"""Errors of a machine without a device, or whose driver is too old, does not fit, or gives the device to others."""


@dataclass(frozen=True, slots=True)
class FunctionAttributes:
    """The driver's report on a loaded kernel.

    Attributes:
        registers: per thread. local_bytes: per thread, including spills. shared_bytes: per block, as declared.
        max_threads: the maximum threads per block of a launch.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    max_threads: int


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """CUDA's facts about a device. capability: 90 for sm_90. The others are as in `GpuTarget`."""

    capability: int
    num_sms: int
    l2: int
    max_shared_optin: int


class CudaApi(Protocol):
    """Functions of CUDA. Handles and addresses are numbers; contexts are those of torch.

    Attributes:
        errors: the exceptions that the functions raise; their `status` is CUDA's error number.
    """

    @property
    def errors(self) -> tuple[type[Exception], ...]: ...

    def current_context(self) -> int:
        """The context of this thread, 0 if it has none."""

    def set_context(self, context: int, /) -> None:
        """Make a context current in this thread; 0: none."""

    def primary_context(self, device: int, /) -> int:
        """The context that torch uses on a device. This thread keeps the context that it has."""

    def device_attributes(self, device: int, /) -> DeviceAttributes: ...

    def load_module(self, image: bytes, /) -> int:
        """Load machine code into the current context, for good: a captured graph may launch it at any time."""

    def get_function(self, module: int, name: str, /) -> int: ...

    def allow_shared_bytes(self, function: int, count: int, /) -> None:
        """Let launches of a kernel ask for `count` bytes of shared memory, which may be more than 48 KiB."""

    def function_attributes(self, function: int, /) -> FunctionAttributes: ...

    def launch(
        self,
        function: int,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        block_x: int,
        block_y: int,
        block_z: int,
        shared_bytes: int,
        stream: int,
        parameters: int,
        extra: int,
        /,
    ) -> None:
        """`cuLaunchKernel`. parameters: the address of an array of pointers to arguments. extra: 0."""  # fmt: skip

    def encode_tensor_map(self, m: TiledMap, address: int, place: int, /) -> None:
        """Encode the map of a tensor at a device address into host memory at `place`."""

    def synchronize(self, stream: int, /) -> None:
        """Wait for a stream of the current context."""


def to_tc_error(error: Exception, doing: str) -> Exception:
    """The package's error for one of CUDA's.

    DeviceError if the device is broken or exhausted, ArgumentError if the machine has no usable one, else
    InternalError.
    """
    status = getattr(error, "status", 0)
    if status in BROKEN:
        return DeviceError(
            f"CUDA can do no more in this process: {doing}: {error}",
            suggestion="a kernel that ran before this one failed; CUDA_LAUNCH_BLOCKING=1 tells which",
        )
    if status == NO_MEMORY:
        return DeviceError(f"the device has no memory left: {doing}: {error}")
    if status in UNUSABLE:
        return ArgumentError(
            f"the CUDA device cannot be used: {doing}: {error}", suggestion="nvidia-smi lists devices and the driver"
        )
    return InternalError(f"{doing}: {error}")


@contextmanager
def in_context(api: CudaApi, context: int) -> Iterator[None]:
    """Run the block in a context, then restore the context of this thread."""
    before = api.current_context()
    if before == context:
        yield
        return
    api.set_context(context)
    try:
        yield
    finally:
        api.set_context(before)
