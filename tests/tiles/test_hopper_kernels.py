"""Tile kernels with roles, barriers in memory, TMA and wgmma: equal to torch in the emulator, proven, compiled."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tiles.library.hopper import fmha, gemm90

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


LARGE: dict[str, tuple[Any, tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "gemm, 4096": (gemm90, ((4096, 4096), (4096, 4096)), {}),
    "gemm, sizes that do not divide": (gemm90, ((4104, 4104), (4104, 4104)), {}),
    "attention": (fmha, ((8, 4000, 128),) * 3, {}),
    "causal attention": (fmha, ((8, 4096, 128),) * 3, {"causal": True}),
}


@pytest.mark.sampled  # sizes
@needs_nvrtc
@pytest.mark.parametrize("name", LARGE)
def test_no_spills_and_no_warnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[str] = []
    original = nvrtc._resources
    monkeypatch.setattr(nvrtc, "_resources", lambda log: (logs.append(log), original(log))[1])
    program, shapes, parameters = LARGE[name]
    kernel = program.compile(*(empty(*s) for s in shapes), target=TARGET, **parameters)
    (report,) = nvrtc.compile_text(kernel.source("cuda"), "sm_90a").resources.values()
    assert (report.local, report.spill_stores, report.spill_loads) == (0, 0, 0)
    assert report.registers <= 168
    assert not re.search(r"C75\d\d|warning", logs[0]), logs[0]
    assert kernel.resources["bank_turns"] == 0


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, *, dtype: torch.dtype
) -> torch.Tensor:
    """As separate operators, each rounded to `dtype`."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    scores = (q @ k.transpose(1, 2)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return (torch.softmax(scores, -1) @ v).double()


ATTENTIONS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "whole": ((2, 256, 384, 128), {}),
    "sizes that do not divide": ((2, 100, 200, 64), {}),
    "causal": ((1, 300, 300, 64), {"causal": True, "columns": 64}),
    "one warpgroup": ((1, 70, 90, 32), {"rows": 64, "columns": 32, "depth": 3}),
}


@pytest.mark.sampled  # sizes
@needs_compiler
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_as_near_as_unfused(name: str) -> None:
    (z, i, j, d), parameters = ATTENTIONS[name]
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (torch.randn(z, n, d, generator=generator).bfloat16() for n in (i, j, j))
    scale, causal = d**-0.5, bool(parameters.get("causal"))
    kernel = fmha.compile(q, k, v, target=TARGET, scale=scale, **parameters)
    assert kernel.check() > 0
    exact, unfused = (attention(q, k, v, scale, causal, dtype=t) for t in (torch.float64, torch.bfloat16))
    error = (kernel.emulate(q, k, v).double() - exact).abs().max()
    assert error <= (unfused - exact).abs().max(), f"{name}, seed {SEED}"


@tc.tile_kernel("C:[M,N].fp16 <- A:[M,64].fp16, B:[N,K].fp16")
def ring_in_tiles(k: Any, C: Any, A: Any, B: Any, late: bool = False) -> None:
    """A ring of roles in a loop over tiles, all of whose steps use one left factor."""
    load, math = k.threads(256).tile(128).split(1, 1)
    kept, sB = k.shared("kept", (64, 64), A.dtype), k.shared("sB", (2, 32, 64), B.dtype)
    for m, n in k.each(C.tile(64, 32), persistent=True):
        b = B.tile(32, 64)[n]
        acc = k.init(k.accumulator("acc", (64, 32), A, B, by=math), 0)

        def use(stage: Any, j: Any, acc: Any = acc) -> None:
            k.matmul(acc, kept, sB[stage], by=math)

        def first(m: Any = m) -> None:
            k.move(kept, A.tile(64, 64)[m, 0])

        k.ring(b.count, 2, lambda stage, j, b=b: k.move(sB[stage], b[j]), use, load=load, first=first)
        if late:
            k.map(lambda x, f: x * f, acc, kept.tile(64, 1)[0, 0], out=acc)
        k.move(C.tile(64, 32)[m, n], acc)


@needs_compiler
def test_a_ring_in_a_loop_over_tiles() -> None:
    a, b = whole_numbers(192, 64).half(), whole_numbers(64, 192).half()
    found = ring_in_tiles.compile(a, b, target=FEW).emulate(a, b)
    assert torch.equal(found, (a.float() @ b.float().view(64, 3, 64).sum(1).T).half())
    kernel = ring_in_tiles.compile(a, b, target=FEW, late=True)  # reads it when the next tile's may have come
    with pytest.raises(tc.InternalError, match=r"(race|undefined): .*kept\["):
        kernel.emulate(a, b)


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


@tc.tile_kernel("Y:[M,N].bf16 <- X:[L,M,N].bf16")
def sum_in_ring(k: Any, Y: Any, X: Any) -> None:
    """Threads read what a ring loads themselves, without products."""
    load, math = k.threads(256).tile(128).split(1, 1)
    (m, n) = k.blocks(Y.tile(64, 64))
    stages = k.shared("s", (2, 64, 64), X.dtype)
    acc = k.init(k.accumulator("acc", (64, 64), X, X, by=math), 0)

    def use(stage: Any, j: Any) -> None:
        k.map(lambda a, x: a + x, acc, stages[stage], out=acc)

    k.ring(X.shape[0], 2, lambda stage, j: k.move(stages[stage], X[j].tile(64, 64)[m, n]), use, load=load)
    k.move(Y.tile(64, 64)[m, n], acc)


@needs_compiler
def test_threads_read_the_stages_of_a_ring() -> None:
    x = whole_numbers(5, 70, 136)
    kernel = sum_in_ring.compile(x, target=TARGET)
    assert torch.equal(kernel.emulate(x), x.float().sum(0).bfloat16())
    kernel.check()


def test_interpreter_equals_torch() -> None:
    a, b = whole_numbers(70, 24), whole_numbers(8, 24, seed=SEED + 1)
    kernel = gemm90.compile(a, b, target=TARGET, tile=(128, 8, 16), depth=2)
    arrays = {"A": a.float().numpy(), "B": b.float().numpy(), "C": np.zeros((70, 8), np.float32)}
    assert interpret(kernel.module, arrays) == []
    np.testing.assert_array_equal(arrays["C"], (a.float() @ b.float().T).bfloat16().float().numpy())


# --- bodies by hand ----------------------------------------------------------------------------------------------


@tc.tile_kernel("Y:[M,N].fp32 <- X:[M,N].fp32")
def rows_by_hand(k: Any, Y: Any, X: Any, fault: str = "") -> None:
    """Rows through registers, one after another; then neighboring lanes exchange theirs, twice."""
    (i,), warp = k.blocks(X.tile(8, None)), k.threads(32).tile(32)
    tile = k.shared("s", (8, X.shape[1]), X.dtype)
    x = X.tile(8, None)[i]
    with k.spec("Move", [tile], [x]):
        for j in k.loop(7 if fault == "too few" else 8):
            row = x.tile(1, None)[j]
            v = k.move(k.registers("v", (1, X.shape[1]), X.dtype, by=warp), row)
            k.move(tile.tile(1, None)[j % 4 if fault == "elsewhere" else j], v)
    k.sync()
    with k.spec("Twice", [Y.tile(8, None)[i]], [tile]):
        v = k.move(k.registers("w", (8, X.shape[1]), X.dtype, by=warp), tile)
        k.move(Y.tile(8, None)[i], k.shfl(k.shfl(v, 3), 3))


@needs_compiler
def test_bodies_by_hand_are_proven() -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(SEED))
    kernel = rows_by_hand.compile(x, target="cuda:sm_80")
    assert kernel.check() > 8
    assert torch.equal(kernel.emulate(x), x)
    assert "%s:[(8,64):(64,1)].fp32.SH <- Move<<<#[32:1].thread>>>(%X:[(8,64):(64,1)].fp32.GL) {" in kernel.source(
        "tiles"
    )
    assert "<- Twice<<<" in kernel.source("tiles")
    assert "// shfl.bfly 3  x16" in kernel.source("tiles")
    for fault in ("too few", "elsewhere"):
        with pytest.raises(tc.InternalError, match=r"%s.* row \d, column 0 holds another element"):
            rows_by_hand.compile(x, target="cuda:sm_80", fault=fault).check()
