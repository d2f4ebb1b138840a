"""Tile kernels of the language: equal to torch in the emulator, compiled without spills, mistakes explained."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.tiles.library.product import gemm80

SEED = 20
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
TARGET = "cuda:sm_80"


def halves(*shape: int, seed: int = SEED, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def check_gemm(m: int, n: int, k: int, **parameters: Any) -> None:
    a, b = halves(m, k), halves(n, k, seed=SEED + 1)
    kernel = gemm80.compile(a, b, target=TARGET, **parameters)
    expected = (a.float() @ b.float().T).half()
    assert torch.equal(kernel.emulate(a, b), expected), f"{(m, n, k)} {parameters} seed {SEED}"


SMALL = {"tile": (64, 32, 32), "warps": (2, 1), "depth": 2}


@needs_compiler
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (65, 34, 40), (33, 31, 20), (70, 40, 37)])
def test_gemm_equals_torch(m: int, n: int, k: int) -> None:
    check_gemm(m, n, k, **SMALL)


def random_choice(rng: random.Random) -> tuple[tuple[int, int, int], dict[str, Any]]:
    warps = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    tile = (16 * warps[0] * rng.choice([1, 2]), 8 * warps[1] * rng.choice([1, 2, 3, 4]), rng.choice([16, 32, 64]))
    sizes = rng.randint(1, 2 * tile[0]), rng.randint(1, 2 * tile[1]), rng.choice([rng.randint(1, 150), 64, 96])
    return sizes, {"tile": tile, "warps": warps, "depth": rng.randint(2, 4)}


@needs_compiler
def test_random_tiles_equal_torch() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(4):
        sizes, parameters = random_choice(rng)
        check_gemm(*sizes, **parameters)


@needs_nvrtc
@pytest.mark.parametrize(
    ("target", "size", "parameters"),
    [("cuda:sm_80", 1024, {}), ("cuda:sm_90", 1024, {}), ("cuda:sm_90", 1000, {}), ("cuda:sm_80", 77, SMALL)],
)
def test_gemm_has_no_spills_and_no_conflicts(target: str, size: int, parameters: dict[str, Any]) -> None:
    a = torch.empty(size, size, dtype=torch.float16)
    found = gemm80.compile(a, a, target=target, **parameters).resources
    assert (found["spill_bytes"], found["local_bytes"]) == (0, 0)
    assert found["bank_turns"] == 0 or size == 77  # whose rows begin at odd addresses: each element alone


def test_sources() -> None:
    a = torch.empty(256, 64, dtype=torch.float16)
    kernel = gemm80.compile(a, a, target=TARGET)
    tiles = kernel.source("tiles")
    assert "%acc:[128,128].fp32.RF <- MatMul<<<#[(2,2):(64,32)].[32:1].thread>>>(%sA:[(128,32):(32,1)]" in tiles
    assert "// ldmatrix_x4" in tiles
    assert "// cp.async 16" in tiles
    assert "mma_m16n8k16_f32_f16" in kernel.source("cuda")
    assert "copy_async" in kernel.source("loops")
    with pytest.raises(tc.ArgumentError, match="there is no source 'ptx'"):
        kernel.source("ptx")
