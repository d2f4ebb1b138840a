"""Launches on a CUDA device, with a stand-in for CuPy that writes down what it is asked for."""

from __future__ import annotations

from contextlib import nullcontext
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
from tensor_comprehensions.runtime import cuda
from tensor_comprehensions.runtime.nvrtc import Cubin

from ..gpu_programs import TX, gather, kernel, tiled_matmul


class DriverError(Exception):
    """As CuPy's."""


class Function:
    """A loaded kernel: remembers its launches."""

    def __init__(self, name: str, launches: list[Any]) -> None:
        self.name, self.launches = name, launches
        self.max_dynamic_shared_size_bytes = 0

    def __call__(self, grid: Any, block: Any, arguments: tuple[Any, ...], *, shared_mem: int) -> None:
        if self.name == "refused":
            raise DriverError("too many resources")
        self.launches.append((self.name, grid, block, tuple(map(int, arguments)), shared_mem))


class CuPy:
    """The parts of CuPy that are used."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.functions: dict[str, Function] = {}
        self.binary = b""
        self.cuda = SimpleNamespace(
            Device=lambda index: nullcontext(),
            Stream=SimpleNamespace(from_external=lambda stream: nullcontext()),
            driver=SimpleNamespace(CUDADriverError=DriverError),
        )

    def RawModule(self, path: str) -> Any:
        self.binary = Path(path).read_bytes()
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Function:
        return self.functions.setdefault(name, Function(name, self.launches))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> CuPy:
    stand_in = CuPy()
    monkeypatch.setattr(cuda, "_cupy", lambda: stand_in)
    monkeypatch.setattr(cuda, "_Stream", lambda device: None)
    return stand_in


def tensors(m: ir.Module) -> list[torch.Tensor]:
    return [torch.zeros(x.shape) for x in m.arguments]


def test_a_launch(cupy: CuPy) -> None:
    code = emit(tiled_matmul(40).module)
    memories = tensors(tiled_matmul(40).module)
    cuda.load(code, Cubin("sm_90", b"binary", {}), 0)(memories, None)
    assert cupy.binary == b"binary"
    assert cupy.launches == [("matmul", (3, 3, 1), (16, 4, 1), tuple(x.data_ptr() for x in memories), 0)]


def test_kernels_in_order_with_what_they_use_and_the_status(cupy: CuPy) -> None:
    m = gather().module
    memories, status = tensors(m), torch.zeros(2, dtype=torch.int64)
    cuda.load(emit(m), Cubin("sm_90", b"", {}), 0)(memories, status)
    first, second = cupy.launches
    assert first == ("check", (1, 1, 1), (6, 1, 1), (memories[1].data_ptr(), status.data_ptr()), 0)
    assert second[3] == (*(x.data_ptr() for x in memories), status.data_ptr())


def test_shared_memory_beyond_what_is_free_for_all(cupy: CuPy) -> None:
    big, out = b.buffer("big", FLOAT32, (20000,), ir.Space.SHARED), b.buffer("out", FLOAT32, (32,))
    body = ir.Allocate(big, b.block(b.store(big, (TX,), 1.0), b.store(out, (TX,), b.load(big, TX))))
    m = ir.Module("k", (out,), (), (kernel("k", body, (1, 1, 1), (32, 1, 1)),), (), ("out",))
    cuda.load(emit(m), Cubin("sm_90", b"", {}), 0)(tensors(m), None)
    assert cupy.functions["k"].max_dynamic_shared_size_bytes == 80000
    assert cupy.launches[0][-1] == 80000


def test_what_the_driver_refuses_is_told_with_the_text(cupy: CuPy) -> None:
    out = b.buffer("out", FLOAT32, (32,))
    m = ir.Module("k", (out,), (), (kernel("refused", b.store(out, (TX,), 1.0), (1, 1, 1), (32, 1, 1)),), (), ("out",))
    with pytest.raises(InternalError, match=r"(?s)refused is not launched: too many resources.*__global__"):
        cuda.load(emit(m), Cubin("sm_90", b"", {}), 0)(tensors(m), None)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    cuda._cupy.cache_clear()
    with pytest.raises(ArgumentError, match="needs CuPy"):
        cuda._cupy()
    cuda._cupy.cache_clear()


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
