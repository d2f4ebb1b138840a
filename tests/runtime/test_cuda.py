"""Launches on a CUDA device, with a stand-in for the driver that writes down what it is asked for."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensor_comprehensions.codegen.cuda import emit
from tensor_comprehensions.dtypes import FLOAT32
from tensor_comprehensions.errors import ArgumentError, InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.runtime import cuda, cuda_driver, nvrtc
from tensor_comprehensions.runtime.cuda_driver import Driver
from tensor_comprehensions.runtime.nvrtc import Cubin

from ..fake_cuda import FakeCuda
from ..gpu_programs import TX, gather, kernel, tiled_matmul


class Recorder(FakeCuda):
    """Remembers the addresses that kernels get, and runs nothing."""

    def _cuModuleLoadData(self, out: Any, image: bytes) -> int:
        self.image = image
        return 0

    def _cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> None:
        out._obj.value = self._handle((None, SimpleNamespace(name=name.decode())))

    def _cuLaunchKernel(self, function: int, *given: Any) -> int:
        *dims, dynamic, stream, parameters, _ = given
        name = self.handles[function - 1][1].name
        taken = tuple(ctypes.c_uint64.from_address(parameters[n]).value for n in range(len(parameters)))
        self.launches.append((name, tuple(dims[:3]), tuple(dims[3:]), taken, dynamic, stream))
        return 701 if name == "refused" else 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    stand_in = Recorder()
    driver = Driver(stand_in)
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "current_stream", lambda device: 7)
    return stand_in


def test_a_launch(recorder: Recorder) -> None:
    launches = cuda.load(emit(tiled_matmul(40).module), Cubin("sm_90", b"binary", {}), 0)
    launches([11, 22, 1 << 40])
    launches([44, 55, 66])
    assert recorder.image == b"binary"
    assert recorder.launches == [
        ("matmul", (3, 3, 1), (16, 4, 1), (11, 22, 1 << 40), 0, 7),
        ("matmul", (3, 3, 1), (16, 4, 1), (44, 55, 66), 0, 7),
    ]


def test_kernels_in_order_with_what_they_use_and_the_status(recorder: Recorder) -> None:
    cuda.load(emit(gather().module), Cubin("sm_90", b"", {}), 0)([1, 2, 3, 4, 5])
    first, second = recorder.launches
    assert first == ("check", (1, 1, 1), (6, 1, 1), (2, 5), 0, 7)
    assert second[3] == (1, 2, 3, 4, 5)


def test_threads_do_not_share_their_arguments(recorder: Recorder) -> None:
    launches = cuda.load(emit(tiled_matmul(40).module), Cubin("sm_90", b"", {}), 0)

    def run(start: int) -> None:
        for _ in range(200):
            launches([start, start + 1, start + 2])

    threads = [threading.Thread(target=run, args=(1000 * n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(recorder.launches) == 800
    assert {x[3] for x in recorder.launches} == {(n, n + 1, n + 2) for n in (0, 1000, 2000, 3000)}


def test_shared_memory_beyond_what_is_free_for_all(recorder: Recorder) -> None:
    big, out = b.buffer("big", FLOAT32, (20000,), ir.Space.SHARED), b.buffer("out", FLOAT32, (32,))
    body = ir.Allocate(big, b.block(b.store(big, (TX,), 1.0), b.store(out, (TX,), b.load(big, TX))))
    m = ir.Module("k", (out,), (), (kernel("k", body, (1, 1, 1), (32, 1, 1)),), (), ("out",))
    cuda.load(emit(m), Cubin("sm_90", b"", {}), 0)([1])
    assert recorder.shared == {"k": 80000}
    assert recorder.launches[0][-2] == 80000


def test_what_the_driver_refuses_is_told_with_the_text(recorder: Recorder) -> None:
    out = b.buffer("out", FLOAT32, (32,))
    m = ir.Module("k", (out,), (), (kernel("refused", b.store(out, (TX,), 1.0), (1, 1, 1), (32, 1, 1)),), (), ("out",))
    with pytest.raises(InternalError, match=r"(?s)refused is not launched: CUDA_ERROR_701.*__global__"):
        cuda.load(emit(m), Cubin("sm_90", b"", {}), 0)([1])


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "NAMES", ("libthere_is_no_such_thing.so",))
    cuda_driver.driver.cache_clear()
    with pytest.raises(ArgumentError, match="needs NVIDIA's driver"):
        cuda_driver.driver()
    cuda_driver.driver.cache_clear()


def test_the_compiler_that_goes_with_torch() -> None:
    """A driver loads what the compiler of its own release of CUDA made."""
    paths = [Path("cu13/libnvrtc.so.13"), Path("cuda_nvrtc/libnvrtc.so.12")]
    assert [nvrtc.preferred(paths, cuda) for cuda in ("13.0", "12.8", "11.8", None)] == [paths[n] for n in (0, 1, 0, 0)]


def test_what_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest row of the table with the device's own numbers."""
    known = SimpleNamespace(
        major=9, minor=0, multi_processor_count=114, L2_cache_size=1 << 25, shared_memory_per_block_optin=232448
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
    cuda.device_target.cache_clear()
    found = cuda.device_target(0)
    assert (found.name, found.processors, found.l2, found.shared_optin) == ("sm_90", 114, 1 << 25, 232448)
    known.major, known.minor = 8, 7
    cuda.device_target.cache_clear()
    assert (cuda.device_target(0).name, cuda.device_target(0).threads_per_processor) == ("sm_87", 1536)
    known.major = 6
    cuda.device_target.cache_clear()
    with pytest.raises(ArgumentError, match="too old"):
        cuda.device_target(0)
    cuda.device_target.cache_clear()
