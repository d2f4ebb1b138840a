"""The few functions of CUDA's driver that load machine code and launch it, through ctypes.

The driver comes with the graphics card; torch has started it when there is a tensor to compute with. Nothing here waits
for a device.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...core.errors import ArgumentError, DeviceError, InternalError

NAMES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
NO_MEMORY = 2
BROKEN = frozenset((4, 214, 219, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
"""Errors after which a process can do nothing more on its device: an illegal address, a failed assertion, a fault."""

_pointer, _unsigned = ctypes.c_void_p, ctypes.c_uint
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_pointer), ctypes.c_int),
    "cuCtxGetCurrent": (ctypes.POINTER(_pointer),),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_pointer),),
    "cuModuleLoadData": (ctypes.POINTER(_pointer), ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.POINTER(_pointer), _pointer, ctypes.c_char_p),
    "cuFuncSetAttribute": (_pointer, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernel": (_pointer, *[_unsigned] * 7, _pointer, _pointer, _pointer),
}


class Driver:
    """The driver's functions, whose errors are exceptions.

    Attributes:
        launch: `cuLaunchKernel` itself, which gives a code: a call is no place for more.
    """

    def __init__(self, library: Any) -> None:
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._library = library
        self._contexts: dict[int, int] = {}
        self.launch = library.cuLaunchKernel

    def check(self, code: int, doing: str) -> None:
        """Raises DeviceError for what breaks a device or exhausts it, else InternalError, where `code` is an error."""
        if not code:
            return
        name, text = (self._told(code, f) for f in (self._library.cuGetErrorName, self._library.cuGetErrorString))
        if code in BROKEN:
            raise DeviceError(
                f"CUDA can do no more in this process: {doing}: {name}, {text}",
                suggestion="a kernel that ran before this one failed; CUDA_LAUNCH_BLOCKING=1 tells which",
            )
        if code == NO_MEMORY:
            raise DeviceError(f"the device has no memory left: {doing}: {name}")
        raise InternalError(f"{doing}: {name}, {text}")

    def load(self, image: bytes) -> int:
        """Machine code on the current device, which stays there: a graph that was captured may launch it any time."""
        module = _pointer()
        self.check(self._library.cuModuleLoadData(ctypes.byref(module), image), "loading machine code")
        return module.value or 0

    def function(self, module: int, name: str, shared: int) -> int:
        """A kernel of a module, which may ask for `shared` bytes of shared memory."""
        found = _pointer()
        self.check(self._library.cuModuleGetFunction(ctypes.byref(found), module, name.encode()), f"looking up {name}")
        if shared:
            code = self._library.cuFuncSetAttribute(found, SHARED_SIZE, shared)
            self.check(code, f"giving {name} {shared} bytes of shared memory")
        return found.value or 0

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """A device as the current one of this thread, in the context that torch uses too."""
        wanted, now = self._context(device), _pointer()
        self.check(self._library.cuCtxGetCurrent(ctypes.byref(now)), "asking for the context")
        if now.value == wanted:
            yield
            return
        self.check(self._library.cuCtxPushCurrent_v2(wanted), "taking the context")
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(now))

    def _context(self, device: int) -> int:
        if device not in self._contexts:
            number, context = ctypes.c_int(), _pointer()
            self.check(self._library.cuDeviceGet(ctypes.byref(number), device), "looking for the device")
            code = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number.value)
            self.check(code, "looking for the context")
            self._contexts[device] = context.value or 0
        return self._contexts[device]

    @staticmethod
    def _told(code: int, function: Any) -> str:
        text = ctypes.c_char_p()
        return text.value.decode() if not function(code, ctypes.byref(text)) and text.value else f"error {code}"


@functools.cache
def driver() -> Driver:
    """The driver of this machine. Raises ArgumentError where there is none."""
    for name in NAMES:
        try:
            return Driver(ctypes.CDLL(name))
        except OSError:
            continue
    raise ArgumentError("launching CUDA kernels needs NVIDIA's driver", expected=" or ".join(NAMES))
