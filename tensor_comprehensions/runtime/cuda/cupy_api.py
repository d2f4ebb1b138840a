"""`CudaApi` by means of CuPy, which loads the driver of this machine.

`cupy_backends` is the layer of CuPy that calls CUDA. It is imported in some milliseconds, the whole of CuPy in 150.
It has no function that encodes tensor maps: see `tensor_maps`.
"""

from __future__ import annotations

import functools
from typing import Any

from ...core.errors import ArgumentError
from . import nvrtc
from .cuda_api import CudaApi, DeviceAttributes, FunctionAttributes
from .nvrtc import INSTALL_CUDA
from .tensor_maps import encode_tensor_map

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""cudaDevAttrComputeCapability..., which CuPy has no names for."""


class CupyApi:
    """`CudaApi` by CuPy's modules `driver` and `runtime`.

    Every launch calls `current_context` and `launch`, so these are CuPy's functions themselves.
    """

    def __init__(self, driver: Any, runtime: Any) -> None:
        self._driver, self._runtime = driver, runtime
        self.errors: tuple[type[Exception], ...] = (driver.CUDADriverError, runtime.CUDARuntimeError)
        self.current_context, self.set_context = driver.ctxGetCurrent, driver.ctxSetCurrent
        # cupy.cuda.Module unloads its code when it dies, which a captured graph may outlive.
        self.load_module, self.get_function = driver.moduleLoadData, driver.moduleGetFunction
        self.launch, self.synchronize = driver.launchKernel, runtime.streamSynchronize
        self.encode_tensor_map = encode_tensor_map

    def primary_context(self, device: int) -> int:
        before = self.current_context()
        self._runtime.setDevice(device)  # makes the primary context, and makes it the current one
        try:
            return int(self.current_context())
        finally:
            self.set_context(before)

    def device_attributes(self, device: int) -> DeviceAttributes:
        runtime = self._runtime

        def ask(attribute: int) -> int:
            return int(runtime.deviceGetAttribute(attribute, device))

        return DeviceAttributes(
            capability=10 * ask(_CAPABILITY_MAJOR) + ask(_CAPABILITY_MINOR),
            num_sms=ask(runtime.cudaDevAttrMultiProcessorCount),
            l2=ask(runtime.cudaDevAttrL2CacheSize),
            max_shared_optin=ask(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin),
        )

    def allow_shared_bytes(self, function: int, count: int) -> None:
        driver = self._driver
        driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, count)

    def function_attributes(self, function: int) -> FunctionAttributes:
        driver = self._driver

        def ask(attribute: int) -> int:
            return int(driver.funcGetAttribute(attribute, function))

        return FunctionAttributes(
            registers=ask(driver.CU_FUNC_ATTRIBUTE_NUM_REGS),
            local_bytes=ask(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
            shared_bytes=ask(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
            max_threads=ask(driver.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        )


@functools.cache
def cuda_api() -> CudaApi:
    """CUDA on this machine.

    Raises ArgumentError if CuPy or NVIDIA's driver is missing, or if the driver is older than CuPy or NVRTC.
    """
    try:
        from cupy_backends.cuda.api import driver, runtime
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("cupy_backends")
        raise ArgumentError(
            "CuPy, which launches CUDA kernels, is not installed" if missing else "CuPy cannot be imported",
            found="" if missing else str(error),
            suggestion=INSTALL_CUDA,
        ) from error
    check_driver(runtime.driverGetVersion(), runtime.runtimeGetVersion())
    if nvrtc.is_nvrtc_available():
        check_compiler(runtime.driverGetVersion(), nvrtc.find_toolchain().version)
    return CupyApi(driver, runtime)


def check_driver(driver: int, cuda: int) -> None:
    """Check that the driver supports CuPy's release of CUDA. Raises ArgumentError.

    driver: the newest release of CUDA that the driver supports, 0 without a driver. cuda: that of CuPy. 13020 is 13.2.
    """
    if not driver:
        raise ArgumentError(
            "launching CUDA kernels needs NVIDIA's driver", suggestion="nvidia-smi tells whether it is there"
        )
    old, new = driver // 1000, cuda // 1000
    if old < new:
        raise ArgumentError(
            "NVIDIA's driver is too old for the CuPy that is installed",
            expected=f"a driver for CUDA {new}",
            found=f"one for CUDA {old}.{driver % 1000 // 10}",
            suggestion=f"update the driver, or install cupy-cuda{old}x in the place of cupy-cuda{new}x",
        )


def check_compiler(driver: int, compiler: tuple[int, int]) -> None:
    """Check that the driver loads the machine code of NVRTC: of its own major release or an older one.

    Raises ArgumentError. driver: as in `check_driver`. compiler: the release of NVRTC.
    """
    known = driver // 1000
    if known < compiler[0]:
        raise ArgumentError(
            "NVIDIA's driver is too old for the NVRTC that is installed",
            expected=f"a driver for CUDA {compiler[0]}",
            found=f"one for CUDA {known}.{driver % 1000 // 10}",
            suggestion=f"update the driver, or install nvidia-cuda-nvrtc-cu{known}",
        )
