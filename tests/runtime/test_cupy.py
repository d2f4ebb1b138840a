"""CuPy as what launches: without it, without a driver, and with a driver that is played."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import ArgumentError, DeviceError, InternalError
from tensor_comprehensions.runtime.cuda import cuda_api, cupy_api, launch
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers.fake_cuda import FakeCuda, FakeCudaError, fake

__all__ = ["fake"]
HERE = Path(__file__).parent
has_cupy = importlib.util.find_spec("cupy_backends") is not None
needs_cupy = pytest.mark.skipif(not has_cupy, reason="CuPy is not installed")


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("cupy", "cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
        monkeypatch.setitem(sys.modules, name, None)
    cupy_api.cuda_api.cache_clear()
    yield
    cupy_api.cuda_api.cache_clear()


@pytest.mark.usefixtures("without_cupy")
@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
def test_without_cupy_only_launches_fail(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    op = tc.define("def scale(float a, float(N) x) -> (y) { y(n) = a * x(n) }").scale
    kernel = op.compile(2.0, torch.ones(8), target="cuda:sm_90")
    assert "__global__" in kernel.source()
    assert torch.equal(kernel.emulate(2.0, torch.ones(8)), torch.full((8,), 2.0))
    monkeypatch.setattr(launch, "cuda_api", cupy_api.cuda_api)
    for call in (lambda: op(2.0, torch.ones(8)), lambda: kernel(2.0, torch.ones(8))):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert "CuPy, which launches CUDA kernels, is not installed" in str(caught.value)
        assert "pip install 'tensor-comprehensions[cuda]'" in str(caught.value)


def test_a_cupy_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its import says is passed on."""
    for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    cupy_api.cuda_api.cache_clear()
    with pytest.raises(ArgumentError, match=r"CuPy cannot be imported\n  found: cannot import name 'driver'"):
        cupy_api.cuda_api()


def test_drivers_and_what_cupy_was_built_for() -> None:
    cupy_api.check_driver(13000, 13020)  # any of one major release
    cupy_api.check_driver(14000, 13020)
    with pytest.raises(ArgumentError, match="needs NVIDIA's driver"):
        cupy_api.check_driver(0, 13020)
    with pytest.raises(ArgumentError) as caught:
        cupy_api.check_driver(12080, 13020)
    for part in ("a driver for CUDA 13", "one for CUDA 12.8", "cupy-cuda12x in the place of cupy-cuda13x"):
        assert part in str(caught.value)


def test_drivers_and_what_nvrtc_compiles() -> None:
    """A driver loads machine code of its own major release of CUDA, and of older ones."""
    cupy_api.check_compiler(13000, (13, 2))
    cupy_api.check_compiler(14000, (13, 0))
    with pytest.raises(ArgumentError) as caught:
        cupy_api.check_compiler(12080, (13, 0))
    for part in ("a driver for CUDA 13", "one for CUDA 12.8", "nvidia-cuda-nvrtc-cu12"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (700, DeviceError, "CUDA can do no more in this process: loading: CUDA_ERROR_700"),
        (2, DeviceError, "the device has no memory left: loading"),
        (100, ArgumentError, "the CUDA device cannot be used: loading"),
        (35, ArgumentError, "the CUDA device cannot be used: loading"),
        (209, InternalError, "loading: CUDA_ERROR_209"),
    ],
)
def test_errors(status: int, kind: type[Exception], message: str) -> None:
    error = cuda_api.to_tc_error(FakeCudaError(status), "loading")
    assert type(error) is kind
    assert str(error).startswith(message)


class FakeRuntime:
    """Of CuPy's module `runtime` what is used. Attributes are ten times their numbers."""

    CUDARuntimeError = FakeCudaError
    cudaDevAttrMultiProcessorCount, cudaDevAttrL2CacheSize = 16, 38
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97

    def __init__(self) -> None:
        self.context = 0

    def streamSynchronize(self, stream: int) -> None: ...

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        assert device == 3
        return {75: 9, 76: 0}.get(attribute, 10 * attribute)

    def setDevice(self, device: int) -> None:
        self.context = 100 + device


def test_devices_and_their_contexts() -> None:
    """A thread keeps its context, where the device has none too."""
    runtime = FakeRuntime()
    driver: Any = SimpleNamespace(
        CUDADriverError=FakeCudaError,
        ctxGetCurrent=lambda: runtime.context,
        ctxSetCurrent=lambda context: setattr(runtime, "context", context),
        moduleLoadData=None, moduleGetFunction=None, launchKernel=None,
    )  # fmt: skip
    api: cuda_api.CudaApi = cupy_api.CupyApi(driver, runtime)
    for before in (0, 55, 103):
        runtime.context = before
        assert api.primary_context(3) == 103
        assert runtime.context == before
    assert api.device_attributes(3) == cuda_api.DeviceAttributes(
        capability=90, num_sms=160, l2=380, max_shared_optin=970
    )


def run_python(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_package_does_not_import_cupy() -> None:
    program = "import sys, tensor_comprehensions; print([m for m in sys.modules if m.startswith('cupy')])"
    assert run_python(program).strip() == "[]"


@needs_cupy
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cupy_without_a_driver() -> None:
    cupy_api.cuda_api.cache_clear()
    with pytest.raises(ArgumentError, match="needs NVIDIA's driver"):
        cupy_api.cuda_api()


LAUNCHES = """
import sys
from cupy_backends.cuda.api import driver, runtime
from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b, nodes as ir
from tensor_comprehensions.runtime.cuda import launch
from tensor_comprehensions.runtime.cuda.cupy_api import CupyApi
from tensor_comprehensions.runtime.cuda.nvrtc import Cubin
from tests.helpers.gpu_programs import TX, kernel

CupyApi.primary_context = lambda self, device: 0x7F0000000040
launch.cuda_api = lambda: CupyApi(driver, runtime)
launch.current_stream = lambda device: 0x7F0000000050
big = b.buffer("big", FLOAT32, (20000,), ir.Space.SHARED)
x, y = b.buffer("x", FLOAT32, (32,)), b.buffer("y", FLOAT32, (32,))
body = ir.Allocate((big,), b.block(b.store(big, (TX,), b.load(x, TX)), b.store(y, (TX,), b.load(big, TX))))

def load(name, image):
    made = ir.Module(name, (x, y), (), (kernel(name, body, (5, 3, 2), (32, 4, 1)),), (), ("y",))
    return launch.load_launches_on(emit_cuda(made), Cubin("sm_90", image, {}), 0)

load("scale", b"machine code")([0x7F0000001000, 0x7F0000002000])
for name, image in (("refused", b"machine code"), ("missing", b"machine code"), ("scale", b"other code")):
    try:
        load(name, image)([1, 2])
    except InternalError as error:
        print(str(error).partition("/*")[0], end="")
"""


PLAYED = "CUDA_ERROR_PLAYED: it is only played\n"


@needs_cupy
@pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="the driver that is played needs a C compiler"
)
def test_launches_reach_the_driver_through_cupy(tmp_path: Path) -> None:
    """CuPy itself calls a library that has the place of NVIDIA's: handles, arguments and errors cross unharmed."""
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, HERE / "fake_libcuda.c"], check=True, timeout=300)
    variables = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(HERE.parents[1]), "PYTHONUNBUFFERED": "1"}
    found = run_python(LAUNCHES, **variables)
    taken, given_back = "context 0x7f0000000040\n", "context (nil)\n"
    assert found.split(taken) == [
        "",
        f"attribute 8 of 0x7f0000000020 is 80000\n{given_back}",
        "launch 5 3 2, 32 4 1, 80000, 0x7f0000000050, 7f0000001000 7f0000002000, (nil)\n" + given_back,
        f"attribute 8 of 0x7f0000000030 is 80000\n{given_back}",
        f"{given_back}refused is not launched: {PLAYED}"
        "Launch(grid=(5, 3, 2), block=(32, 4, 1), cluster=1, counts=())\n"
        "FunctionAttributes(registers=104, local_bytes=103, shared_bytes=101, max_threads=100)\n",
        f"{given_back}CUDA refuses our code: loading machine code on cuda:0: {PLAYED}",
        f"{given_back}CUDA refuses our code: loading machine code on cuda:0: {PLAYED}",
    ]
