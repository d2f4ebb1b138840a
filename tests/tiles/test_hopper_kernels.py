"""Tile kernels with roles, barriers in memory, TMA and wgmma: equal to torch in the emulator, proven, compiled."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tiles.library.hopper import gemm90

SEED = 90
TARGET = "cuda:sm_90"
FEW = replace(parse_gpu_target(TARGET), num_sms=2)
"""A processor of two: blocks walk over several tiles."""
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")


def whole_numbers(*shape: int, seed: int = SEED) -> torch.Tensor:
    """Small ones, whose sums are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


GEMMS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "whole": ((256, 512, 512), {}),
    "sizes that do not divide": ((200, 304, 328), {}),
    "several tiles a block": ((400, 72, 200), {"tile": (128, 32, 64), "depth": 3, "target": FEW}),
    "rows of C that boxes do not take": ((100, 37, 72), {"tile": (128, 64, 32), "depth": 2, "target": FEW}),
    "panels": ((128, 24, 256), {"tile": (128, 24, 128), "depth": 2}),
}


@needs_compiler
@pytest.mark.parametrize("name", GEMMS)
def test_gemm_equals_torch(name: str) -> None:
    (m, n, k), parameters = GEMMS[name]
    a, b = whole_numbers(m, k), whole_numbers(n, k, seed=SEED + 1)
    kernel = gemm90.compile(a, b, **{"target": TARGET, **parameters})
    assert kernel.check() >= 8
    assert torch.equal(kernel.emulate(a, b), (a.float() @ b.float().T).bfloat16()), f"{name}, seed {SEED}"


@needs_nvrtc
@pytest.mark.parametrize("size", [4096, 4104])
def test_gemm_has_no_spills_and_no_warnings(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[str] = []
    original = nvrtc._resources
    monkeypatch.setattr(nvrtc, "_resources", lambda log: (logs.append(log), original(log))[1])
    kernel = gemm90.compile(empty(size, size), empty(size, size), target=TARGET)
    (report,) = nvrtc.compile_text(kernel.source("cuda"), "sm_90a").resources.values()
    assert (report.local, report.spill_stores, report.spill_loads) == (0, 0, 0)
    assert report.registers <= 168
    assert not re.search(r"C75\d\d|warning", logs[0]), logs[0]
    assert kernel.resources["bank_turns"] == 0
    assert kernel.resources["blocks"] == 132


def test_gemm_reads_like_this() -> None:
    kernel = gemm90.compile(empty(512, 256), empty(512, 256), target=TARGET)
    tiles, cuda = kernel.source("tiles"), kernel.source("cuda")
    assert "role #[1:128].[128:1].thread, 40 registers {" in tiles
    assert "full[4] <- Barriers(1 arrivals)" in tiles
    assert "// wgmma_m64n256k16_f32_bf16  x4" in tiles
    assert re.search(r"Wait\(full\[.*\]", tiles)
    assert "tma_store_2" in cuda
    assert "stmatrix_x4" in cuda
    assert cuda.index("if (warpgroup == 0)") < cuda.index("tma_load_2(&sA") < cuda.index("if (warpgroup >= 1")


def test_what_boxes_do_not_take_is_refused_with_a_reason() -> None:
    with pytest.raises(tc.ArgumentError, match=r"no copy by itself does %sA.*: the strides of A are no"):
        gemm90.compile(empty(64, 37), empty(64, 37), target=TARGET)
    with pytest.raises(tc.ArgumentError, match=r"rows of 96 bytes are no 32, 64 or multiple of 128"):
        gemm90.compile(empty(64, 64), empty(64, 64), target=TARGET, tile=(128, 64, 48))
    with pytest.raises(tc.ArgumentError, match="need sm_90"):
        gemm90.compile(empty(64, 64), empty(64, 64), target="cuda:sm_80")
