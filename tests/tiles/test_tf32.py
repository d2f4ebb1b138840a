"""Products of float32 rounded to tf32: where the def rounds or options allow it, and nowhere else."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions import tiles as t
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.options import TileOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.cuda.tensor_maps import TiledMap
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang.transforms.legalize import legalize
from tensor_comprehensions.tiles.check.check_program import check_program
from tensor_comprehensions.tiles.products.lower_def import buffers_of, divide_def, lower_divided, region_program

from ..helpers.def_products import random_group_options, random_options

needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
PLAIN = "def f(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }"
ROUNDED = "def f(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! tf32(A(m,k)) * tf32(B(n,k)) }"
MMA, WGMMA = "m16n8k8.row.col.f32.tf32", "wgmma.mma_async"
ALLOWED = TileOptions(products="tf32")
WIDE = TileOptions((64, 16, 32), stages=3, instruction="wgmma", products="tf32")


def factors(m: int = 70, n: int = 50, k: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    return a, b


def rounded_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By float64, of factors whose last 13 bits are rounded away in integer arithmetic."""

    def round_bits(x: torch.Tensor) -> torch.Tensor:
        bits = x.numpy().view(np.uint32)
        return torch.from_numpy(((bits + 0x1000) & 0xFFFFE000).view(np.float32)).double()

    return round_bits(a) @ round_bits(b).T


@needs_compiler
@pytest.mark.parametrize(
    ("text", "options", "target", "opcode"),
    [
        (ROUNDED, TileOptions(), "cuda:sm_80", MMA),
        (ROUNDED, TileOptions(), "cuda:sm_90", MMA),
        (PLAIN, ALLOWED, "cuda:sm_80", MMA),
        (PLAIN, WIDE, "cuda:sm_90", WGMMA),
    ],
)
def test_factors_are_rounded_and_sums_are_not(text: str, options: TileOptions, target: str, opcode: str) -> None:
    a, b = factors()
    kernel = tc.define(text).f.compile(a, b, target=target, options=options)
    assert opcode in kernel.source()
    found, exact = kernel.emulate(a, b).double(), a.double() @ b.double().T
    torch.testing.assert_close(found, rounded_product(a, b), rtol=0, atol=1e-5)
    assert (found - exact).abs().max() > 1e-3


@needs_compiler
def test_random_options() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    a, b = factors(130, 72, 72)
    for n in range(6):
        options = replace((random_group_options if n % 2 else random_options)(rng), products="tf32")
        try:
            kernel = tc.define(PLAIN).f.compile(a, b, target="cuda:sm_90", options=options)
        except tc.ArgumentError as error:
            assert "no tiles of" in str(error), options  # noqa: PT017
            continue
        torch.testing.assert_close(
            kernel.emulate(a, b).double(), rounded_product(a, b), rtol=0, atol=2e-5, msg=f"{options} seed {seed}"
        )


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
def test_the_interpreter_rounds_alike_and_decompositions_are_proven(target: str) -> None:
    a, b = factors(64, 16, 40)
    options, gpu = WIDE if target == "cuda:sm_90" else replace(ALLOWED, tile=(32, 16, 32)), parse_gpu_target(target)
    kernel = tc.define(PLAIN).f.compile(a, b, target=target, options=options)
    divided = divide_def(legalize(kernel.compiled.bound), options, gpu)
    module = lower_divided(divided, gpu)
    arrays = dict(
        zip((x.name for x in module.arguments), (a.numpy(), b.numpy(), np.zeros((64, 16), np.float32)), strict=True)
    )
    assert interpret(module, arrays) == []
    np.testing.assert_allclose(arrays[module.arguments[2].name], rounded_product(a, b).numpy(), rtol=0, atol=1e-5)
    (piece,) = divided.regions
    assert check_program(region_program(piece, buffers_of(divided.function), "f", gpu)) >= 3


def test_boxes_are_of_the_type_that_rounds() -> None:
    a, b = factors()
    kernel = tc.define(PLAIN).f.compile(a, b, target="cuda:sm_90", options=WIDE)
    maps = kernel.compiled.code.kernels[0].maps
    assert [(m.rounds, TiledMap.of(m).dtype) for m in maps] == [(True, 11)] * 2


def test_tf32_of_the_text_needs_no_option_and_float32_gets_none() -> None:
    x = torch.empty(1024, 1024)
    for target in ("cuda:sm_80", "cuda:sm_90"):
        rounded = tc.define(ROUNDED).f.compile(x, x, target=target)
        assert MMA in rounded.source()
        if nvrtc.is_nvrtc_available():
            assert (rounded.resources["spill_bytes"], rounded.resources["local_bytes"]) == (0, 0)
        exact = tc.define(PLAIN).f.compile(x, x, target=target)
        assert "mma" not in exact.source()


def test_halves_of_the_last_digit_are_not_left_to_tma() -> None:
    with pytest.raises(tc.ArgumentError, match="not documented how TMA rounds"):
        tc.define(ROUNDED).f.compile(*factors(), target="cuda:sm_90", options=TileOptions(instruction="wgmma"))


@tc.tile_kernel("C:[M,N].fp32 <- A:[M,K].fp32, B:[N,K].fp32")
def gemm(k, C, A, B, products="tf32", across=False):  # type: ignore[no-untyped-def]
    m, n = k.blocks(C.tile(32, 16))
    warp = k.threads(64).tile(32)
    sA, sB = k.shared("sA", (2, 32, 16), t.fp32), k.shared("sB", (2, 16, 16), t.fp32)
    a, b = A.tile(32, 16)[m], B.tile(16, 16)[n]
    acc = k.init(k.accumulator("acc", (32, 16), A, B, by=warp), 0)

    def fill(s, i):  # type: ignore[no-untyped-def]
        k.move(sA[s], a[i])
        k.move(sB[s], b[i])

    def use(s, i):  # type: ignore[no-untyped-def]
        k.matmul(acc, sA[s], sB[s].T if across else sB[s], by=warp, products=products)

    k.ring(a.count, 2, fill, use)
    k.move(C.tile(32, 16)[m, n], acc)


@needs_compiler
def test_tile_kernels_ask_for_it() -> None:
    a, b = factors()
    kernel = gemm.compile(a, b, target="cuda:sm_80")
    kernel.check()
    assert kernel.resources["bank_turns"] == 0
    torch.testing.assert_close(kernel.emulate(a, b).double(), rounded_product(a, b), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"products": ""}, "k.matmul.products='tf32'. rounds float32 factors"),
        ({"products": "fp8"}, "no such products"),
        ({"across": True}, "fp32 that lie along the columns"),
    ],
)
def test_other_products_of_float32_are_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(tc.ArgumentError, match=message):
        gemm.compile(*factors(), target="cuda:sm_80", **parameters)
