"""Launches on a CUDA device, with a stand-in for CUDA that writes down what it is asked for."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import ArgumentError, InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.runtime.cuda import launch, nvrtc
from tensor_comprehensions.runtime.cuda.cuda_api import DeviceAttributes
from tensor_comprehensions.runtime.cuda.nvrtc import Cubin
from tensor_comprehensions.target import GpuTarget
from tools.gpu_proof import prove

from ..helpers.fake_cuda import FakeCuda, FakeCudaError, fake, read_arguments
from ..helpers.gpu_programs import TX, gather, kernel, tiled_matmul
from ..helpers.gpu_suite import every

__all__ = ["fake"]


class Recorder(FakeCuda):
    """Remembers the addresses that kernels get, and runs nothing."""

    counts = {"matmul": 3, "check": 2, "gather": 5}  # noqa: RUF012

    def load_module(self, image: bytes, /) -> int:
        self.image = image
        return 1 << 40

    def get_function(self, module: int, name: str, /) -> int:
        assert module == 1 << 40
        return self._handle((None, SimpleNamespace(name=name)))

    def launch(self, function: int, *given: int) -> None:
        *dims, dynamic, stream, parameters, _ = given
        name = self.handles[function - 1][1].name
        taken = tuple(read_arguments(parameters, self.counts.get(name, 1)))
        self.launches.append((name, tuple(dims[:3]), tuple(dims[3:]), taken, dynamic, stream))
        if name == "refused":
            raise FakeCudaError(701)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    stand_in = Recorder()
    monkeypatch.setattr(launch, "cuda_api", lambda: stand_in)
    monkeypatch.setattr(launch, "current_stream", lambda device: 7)
    return stand_in


def test_a_launch(recorder: Recorder) -> None:
    launches = launch.load_launches_on(emit_cuda(tiled_matmul(40).module), Cubin("sm_90", b"binary", {}), 0)
    launches([11, 22, 1 << 40])
    launches([44, 55, 66])
    assert recorder.image == b"binary"
    assert recorder.launches == [
        ("matmul", (3, 3, 1), (16, 4, 1), (11, 22, 1 << 40), 0, 7),
        ("matmul", (3, 3, 1), (16, 4, 1), (44, 55, 66), 0, 7),
    ]


def test_kernels_in_order_with_what_they_use_and_the_status(recorder: Recorder) -> None:
    launch.load_launches_on(emit_cuda(gather().module), Cubin("sm_90", b"", {}), 0)([1, 2, 3, 4, 5])
    first, second = recorder.launches
    assert first == ("check", (1, 1, 1), (6, 1, 1), (2, 5), 0, 7)
    assert second[3] == (1, 2, 3, 4, 5)


def test_threads_do_not_share_their_arguments(recorder: Recorder) -> None:
    launches = launch.load_launches_on(emit_cuda(tiled_matmul(40).module), Cubin("sm_90", b"", {}), 0)

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
    body = ir.Allocate((big,), b.block(b.store(big, (TX,), 1.0), b.store(out, (TX,), b.load(big, TX))))
    m = ir.Module("k", (out,), (), (kernel("k", body, (1, 1, 1), (32, 1, 1)),), (), ("out",))
    launch.load_launches_on(emit_cuda(m), Cubin("sm_90", b"", {}), 0)([1])
    assert recorder.shared == {"k": 80000}
    assert recorder.launches[0][-2] == 80000


def test_what_cuda_refuses_is_reported_with_the_text(recorder: Recorder) -> None:
    out = b.buffer("out", FLOAT32, (32,))
    m = ir.Module("k", (out,), (), (kernel("refused", b.store(out, (TX,), 1.0), (1, 1, 1), (32, 1, 1)),), (), ("out",))
    with pytest.raises(InternalError, match=r"(?s)refused is not launched: CUDA_ERROR_701.*__global__"):
        launch.load_launches_on(emit_cuda(m), Cubin("sm_90", b"", {}), 0)([1])


def test_the_compiler_that_goes_with_torch() -> None:
    """A driver loads what the compiler of its own release of CUDA made."""
    paths = [Path("cu13/libnvrtc.so.13"), Path("cuda_nvrtc/libnvrtc.so.12")]
    assert [nvrtc.preferred_library(paths, cuda) for cuda in ("13.0", "12.8", "11.8", None)] == [
        paths[n] for n in (0, 1, 0, 0)
    ]


def test_headers_go_with_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Headers of another release of CUDA may not be what the compiler understands, and may come first."""
    for folder, number in (("cuda_runtime", 12080), ("cu99", 99010), ("none", 0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cuda_fp16.h").touch()
        if number:
            (tmp_path / folder / "cuda.h").write_text(f"#define CUDA_VERSION {number}\n")
    assert [nvrtc.cuda_release(tmp_path / f) for f in ("cuda_runtime", "cu99", "none")] == [12, 99, 0]
    if not nvrtc.is_nvrtc_available():
        return
    tools, original = nvrtc.find_toolchain(), nvrtc.find_cuda_folders
    assert nvrtc.cuda_release(tools.headers[0]) == tools.version[0]

    def folders(kind: str) -> list[Path]:
        others = [tmp_path / f for f in ("none", "cuda_runtime", "cu99")] if kind == "include" else []
        return [*others, *original(kind)]

    monkeypatch.setattr(nvrtc, "find_cuda_folders", folders)
    nvrtc.find_toolchain.cache_clear()
    try:
        assert nvrtc.find_toolchain().headers == tools.headers
    finally:
        nvrtc.find_toolchain.cache_clear()


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="the compiler is not installed")
def test_the_version_is_known_without_the_compiler(tmp_path: Path) -> None:
    """Machine code that is kept is found by it, and loading the compiler takes longer than all of that."""
    tools = nvrtc.find_toolchain()
    assert nvrtc._version_beside(tools.path) == nvrtc._version_of(tools.library) == tools.version
    assert nvrtc._version_beside(tmp_path / "libnvrtc.so.12") is None
    (tmp_path / "libnvrtc-builtins.so.12.8.93").touch()
    (tmp_path / "libnvrtc-builtins.so.13.0").touch()
    assert nvrtc._version_beside(tmp_path / "libnvrtc.so.12") == (12, 8)
    assert nvrtc._version_beside(tmp_path / "libnvrtc.so.11.2") is None
    (tmp_path / "libnvrtc-builtins.so.12.9").touch()
    assert nvrtc._version_beside(tmp_path / "libnvrtc.so.12") is None


def test_the_target_of_a_device(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest row of the table with the device's own numbers."""

    def target(capability: int) -> GpuTarget:
        known = DeviceAttributes(capability, num_sms=114, l2=1 << 25, max_shared_optin=232448)
        monkeypatch.setattr(recorder, "device_attributes", lambda index: known, raising=False)
        launch.device_target.cache_clear()
        return launch.device_target(0)

    try:
        found = target(90)
        assert (found.name, found.num_sms, found.l2, found.max_shared_optin) == ("sm_90", 114, 1 << 25, 232448)
        assert (target(87).name, target(87).threads_per_sm) == ("sm_87", 1536)
        with pytest.raises(ArgumentError, match="too old"):
            target(60)
    finally:
        launch.device_target.cache_clear()


def test_a_module_runs_on_copies_of_arrays(fake: FakeCuda) -> None:
    """As the proof on a device does it, on the CPU."""
    m = gather().module
    code = emit_cuda(m)
    fake.known[code.source] = SimpleNamespace(code=code, arguments=m.arguments, temporaries=m.temporaries)
    numbers = Random(0)
    for index, expected in ((5, (0, 0)), (99, (1, 99))):
        arrays = {b.name: np.zeros(b.shape, np.dtype(b.type.dtype.name)) for b in m.arguments}
        arrays["table"][:] = [numbers.random() for _ in arrays["table"]]
        arrays["index"][:] = index
        before = arrays["table"].copy()
        cubin = Cubin("sm_90", code.source.encode(), {})
        found = launch.run_on_device(code, cubin, m, arrays, torch.device("cpu"))
        assert found == expected
        assert np.array_equal(arrays["table"], before)
        assert np.array_equal(arrays["out"], np.full_like(arrays["out"], before[5] if index == 5 else 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_every_def_on_a_device() -> None:
    """The default and the naive mapping; `python -m tools.gpu_proof --way device` tries more."""
    tallies = [prove(case, "device", range(2)) for case in every()]
    assert [t.failures for t in tallies] == [[]] * len(tallies)
