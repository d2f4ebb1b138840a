"""Tensor maps: what the driver encodes, what launches hand to kernels, what the cache keeps."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.dtypes import FLOAT16, INT8
from tensor_comprehensions.dispatch.cuda import gpu_kernel_cache
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.nodes import TensorMap
from tensor_comprehensions.runtime.cuda import tensor_maps
from tensor_comprehensions.runtime.cuda.launch import load_launches_on
from tensor_comprehensions.runtime.cuda.nvrtc import Cubin
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.tiles.library.hopper import gemm90

from ..helpers.fake_cuda import FakeCuda, fake

__all__ = ["fake"]
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")

DRIVER = """
typedef unsigned long long u64; typedef unsigned int u32;
int cuTensorMapEncodeTiled(u64 *map, int type, u32 rank, void *address, const u64 *extents, const u64 *strides,
                           const u32 *box, const u32 *steps, int interleave, int swizzle, int promotion, int fill) {
    map[0] = type, map[1] = rank, map[2] = (u64)address;
    for (u32 n = 0; n < rank; ++n) map[3 + n] = extents[n] | (u64)box[n] << 32 | (u64)steps[n] << 48;
    for (u32 n = 0; n + 1 < rank; ++n) map[8 + n] = strides[n];
    map[12] = interleave | swizzle << 8 | promotion << 16 | fill << 24;
    return address == (void *)13;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library with the driver's function, that records its arguments."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "driver.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(tmp_path / "driver.c"), "-o", str(library)], check=True)
    monkeypatch.setattr(tensor_maps, "LIBRARY", str(library))
    tensor_maps._encoder.cache_clear()
    yield
    tensor_maps._encoder.cache_clear()


def encode_words(m: TensorMap, address: int) -> list[int]:
    words = (ctypes.c_uint64 * 16)()
    tensor_maps.encode_tensor_map(tensor_maps.TiledMap.of(m), address, ctypes.addressof(words))
    return list(words)


@pytest.mark.usefixtures("driver")
def test_the_driver_encodes_the_map() -> None:
    m = TensorMap("A", build.buffer("A", FLOAT16, (5, 100, 72)), (1, 64, 64), 128)
    sides = [72 | 64 << 32 | 1 << 48, 100 | 64 << 32 | 1 << 48, 5 | 1 << 32 | 1 << 48]
    assert encode_words(m, 4096) == [6, 3, 4096, *sides, 0, 0, 144, 14400, 0, 0, 0 | 3 << 8 | 2 << 16, 0, 0, 0]
    plain = TensorMap("b", build.buffer("b", INT8, (8, 32)), (8, 16), 0)
    assert encode_words(plain, 16)[:3] == [0, 2, 16]
    view = TensorMap("A", m.buffer, (1, 16, 64), 128, ((3, 14400), (50, 144), (64, 1)))
    sides = [64 | 64 << 32 | 1 << 48, 50 | 16 << 32 | 1 << 48, 3 | 1 << 32 | 1 << 48]
    assert encode_words(view, 4096) == [6, 3, 4096, *sides, 0, 0, 288, 28800, 0, 0, 0 | 3 << 8 | 2 << 16, 0, 0, 0]
    with pytest.raises(tc.InternalError, match="CUDA refuses a tensor map with error 1"):
        encode_words(plain, 13)


def test_a_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    m = TensorMap("A", build.buffer("A", FLOAT16, (64, 64)), (64, 64), 128)
    for library, message in (("no_such_library.so", "needs NVIDIA's driver"), (None, "cannot encode tensor maps")):
        monkeypatch.setattr(tensor_maps, "LIBRARY", library)
        tensor_maps._encoder.cache_clear()
        with pytest.raises(tc.ArgumentError, match=message):
            encode_words(m, 0)
    tensor_maps._encoder.cache_clear()


def small_gemm() -> tuple[Any, torch.Tensor, torch.Tensor]:
    a, b = (torch.randint(-3, 4, (n, 64)).bfloat16() for n in (128, 32))
    return gemm90.compile(a, b, target="cuda:sm_90", tile=(128, 32, 64), depth=2), a, b


@needs_compiler
def test_launches_hand_maps_to_kernels(fake: FakeCuda) -> None:
    """They are encoded when an address changes, and only then."""
    kernel, a, b = small_gemm()
    fake.known[kernel.code.source] = SimpleNamespace(  # type: ignore[assignment]
        code=kernel.code, arguments=kernel.module.arguments, temporaries=()
    )
    launches = load_launches_on(kernel.code, Cubin("sm_90a", kernel.code.source.encode(), {}), 0)
    fake.context = 100
    outputs = [torch.zeros(128, 32, dtype=torch.bfloat16) for _ in range(3)]
    expected = (a.float() @ b.float().T).bfloat16()
    counts = []
    for out in (outputs[0], outputs[0], outputs[1]):
        launches([x.data_ptr() for x in (out, a, b)])
        counts.append(fake.log.count("encode_tensor_map"))
        assert torch.equal(out, expected)
    assert counts == [3, 3, 4]
    fake.context, fake.log = 0, []
    launches([x.data_ptr() for x in (outputs[2], a, b)])
    assert torch.equal(outputs[2], expected)
    encoding = fake.log.index("encode_tensor_map")
    assert fake.log[:encoding].count("set_context") == 1  # the driver may need a context to encode


def test_the_cache_keeps_maps() -> None:
    kernel, _, _ = small_gemm()
    (source,) = kernel.code.kernels
    assert len(source.maps) == 3
    assert source.mapped == (1, 2, 0)
    view = replace(source.maps[0], dimensions=((16, 128), (64, 1)))
    for kept in (source, replace(source, maps=(view, *source.maps[1:]))):
        stored = json.loads(json.dumps(gpu_kernel_cache._kernel(kept)))
        assert gpu_kernel_cache._read_kernel(stored) == kept
