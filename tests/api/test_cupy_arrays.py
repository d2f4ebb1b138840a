"""Arrays of CuPy as arguments: on the CPU, which plays the device, and on a device."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import ArgumentError, RangeError
from tensor_comprehensions.dispatch import arguments
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers.fake_cuda import FakeCuda, fake

__all__ = ["fake"]
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)

SOURCE = """
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def scale(float a, float(N) x) -> (y) { y(n) = a * x(n) }
def add(float(N) x) -> (y) { y(n) = x(n) + y(n) }
def pair(float(N,D) x) -> (s, t) { s(n) +=! x(n,d)  t(n) max=! x(n,d) }
def lookup(float(V,D) table, int64(B) words) -> (out) { out(b,d) = table(words(b),d) }
"""


@pytest.fixture
def ops() -> Any:
    return tc.define(SOURCE)


def on_host(x: np.ndarray) -> Any:
    """CuPy's own class over the memory of a NumPy array. DLPack takes it there: CuPy would ask the driver."""
    import cupy

    class Memory(cupy.cuda.memory.BaseMemory):
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.ptr, self.size, self.device_id = array, array.ctypes.data, array.nbytes, 0

    class HostArray(cupy.ndarray):
        def numpy(self) -> np.ndarray:
            whole = self.data.mem.array.view(np.uint8).reshape(-1)
            start = self.data.ptr - self.data.mem.ptr
            return np.ndarray(self.shape, self.dtype, whole, start, self.strides)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **how: Any) -> Any:
            how.pop("stream", None)
            return self.numpy().__dlpack__(**how)

    return HostArray(x.shape, x.dtype, cupy.cuda.MemoryPointer(Memory(x), 0), x.strides)


@pytest.fixture
def hosted(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The played device for arrays of CuPy, which it makes of outputs, too."""
    import cupy

    monkeypatch.setattr(arguments, "DLPACK_CUDA", {1})
    monkeypatch.setattr(cupy, "from_dlpack", lambda x: on_host(x.numpy()))
    return fake


@needs_cupy
@needs_compiler
def test_arrays_go_in_and_come_out(hosted: FakeCuda, ops: Any) -> None:
    import cupy

    a, w = np.random.rand(6, 4).astype(np.float32), np.random.rand(4, 5).astype(np.float32)
    for _ in range(3):
        c = ops.matmul(on_host(a), on_host(w))
        assert isinstance(c, cupy.ndarray)
        np.testing.assert_allclose(c.numpy(), a @ w, rtol=1e-5)
    assert len(hosted.launches) == 3
    assert hosted.log.count("load_module") == 1
    s, t = ops.pair(on_host(a))
    np.testing.assert_allclose(s.numpy(), a.sum(1), rtol=1e-5)
    np.testing.assert_array_equal(t.numpy(), a.max(1))
    x, y = a[0].copy(), w[:, 0].copy()
    np.testing.assert_array_equal(ops.scale(2.0, on_host(x)).numpy(), 2 * x)
    np.testing.assert_array_equal(ops.add(on_host(x), y=on_host(y)).numpy(), x + y)
    kernel = ops.matmul.compile(on_host(a), on_host(w), target="cuda:sm_90")
    np.testing.assert_allclose(kernel(on_host(a), on_host(w)).numpy(), a @ w, rtol=1e-5)


@needs_cupy
@needs_compiler
def test_layouts_are_read_where_they_lie(hosted: FakeCuda, ops: Any) -> None:
    a, w = np.random.rand(8, 12).astype(np.float32), np.random.rand(8, 5).astype(np.float32)
    view = on_host(a)[:, 2:10:2].T
    assert view.strides == (8, 48)
    np.testing.assert_allclose(ops.matmul(view, on_host(w)).numpy(), a[:, 2:10:2].T @ w, rtol=1e-5)


@needs_cupy
@needs_compiler
def test_tensors_among_arrays(hosted: FakeCuda, ops: Any) -> None:
    """They give tensors, as with NumPy's arrays, and are what `out` takes."""
    a, w = np.random.rand(6, 4).astype(np.float32), torch.rand(4, 5)
    found = ops.matmul(on_host(a), w)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, torch.from_numpy(a) @ w)
    out = torch.empty(6, 5)
    for _ in range(2):
        assert ops.matmul(on_host(a), on_host(w.numpy()), out=out) is out
        torch.testing.assert_close(out, torch.from_numpy(a) @ w)


@needs_cupy
@needs_compiler
def test_mistakes(hosted: FakeCuda, ops: Any) -> None:
    a, w = np.ones((6, 4), np.float32), np.ones((4, 5), np.float32)
    for call, message in (
        (lambda: ops.matmul(on_host(a)), "takes 2 arguments, not 1"),
        (lambda: ops.matmul(on_host(a), on_host(w.astype(np.float64))), "'B' of matmul has elements of type float64"),
        (lambda: ops.matmul(on_host(a), on_host(w[0].copy())), "'B' of matmul has 1 dimensions"),
        (lambda: ops.matmul(on_host(a), w), "'B' of matmul is not on the device"),
        (lambda: ops.matmul(on_host(a), on_host(w), out=on_host(w)), r"'out \(C\)' of matmul is a HostArray"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    assert not hosted.launches
    with pytest.raises(RangeError, match="'table' is out of bounds"):
        ops.lookup(on_host(a), on_host(np.array([9])))


@needs_cupy
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_array_whose_memory_cannot_be_asked_for(ops: Any) -> None:
    """Without a driver CuPy cannot say where an array is; what it says instead is passed on."""
    import cupy

    a = np.ones((2, 2), np.float32)
    array = on_host(a).view(cupy.ndarray)
    assert type(array) is cupy.ndarray
    assert not arguments.is_device_array(array)
    with pytest.raises(ArgumentError, match=r"(?s)'A' of matmul is an array that torch cannot read: .*Driver"):
        ops.matmul(array, array)


class OnlyInterface:
    """An array that says where it is as CUDA arrays did before DLPack."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class OnDevice:
    """An array that says it is on a CUDA device, where torch cannot read it."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **how: Any) -> Any:
        raise BufferError("lost")


def test_arrays_on_a_device_that_torch_cannot_read(ops: Any) -> None:
    described = SimpleNamespace(
        __cuda_array_interface__={"shape": (2, 2), "typestr": "<f4", "data": (0, True), "version": "none"}
    )
    for array in (OnDevice(), OnlyInterface(described)):
        for call in (ops.matmul, ops.matmul.compile):
            with pytest.raises(ArgumentError, match="'A' of matmul is an array that torch cannot read"):
                call(array, array)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_arrays_of_cupy_on_a_device(ops: Any) -> None:
    import cupy

    a, w = cupy.random.rand(64, 48, dtype=cupy.float32), cupy.random.rand(48, 80, dtype=cupy.float32)
    for _ in range(2):
        c = ops.matmul(a, w)
        assert type(c) is cupy.ndarray
        cupy.testing.assert_allclose(c, a @ w, rtol=1e-4)
    cupy.testing.assert_allclose(ops.matmul(w.T, a.T), (a @ w).T, rtol=1e-4)
    with cupy.cuda.Stream(non_blocking=True):
        late = a * 2
        found = ops.matmul(late, w)
        cupy.testing.assert_allclose(found, late @ w, rtol=1e-4)
    tensor = torch.rand(48, 80, device="cuda")
    mixed = ops.matmul(a, tensor)
    torch.testing.assert_close(mixed, torch.as_tensor(a, device="cuda") @ tensor, rtol=1e-4, atol=1e-4)
    mixed = ops.matmul(OnlyInterface(a), OnlyInterface(w))
    torch.testing.assert_close(mixed, torch.as_tensor(a @ w, device="cuda"), rtol=1e-4, atol=1e-4)
    cupy.testing.assert_allclose(cupy.asarray(mixed), a @ w, rtol=1e-4)
    with pytest.raises(ArgumentError, match="float64"):
        ops.matmul(a.astype(cupy.float64), w)
