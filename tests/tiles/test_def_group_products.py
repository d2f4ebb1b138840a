"""Products of defs on sm_90 by warpgroups: boxes of any index structure, roles, barriers, `wgmma`."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.codegen.gpu.ptx import architecture_for
from tensor_comprehensions.dispatch.cuda.gpu_kernels import GpuKernel
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.options import TileOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang.transforms.legalize import legalize
from tensor_comprehensions.tiles.check.check_program import check_program
from tensor_comprehensions.tiles.check.shared_accesses import bank_turns
from tensor_comprehensions.tiles.lower.lower_tiles import lower_program
from tensor_comprehensions.tiles.products.lower_def import (
    DividedDef,
    buffers_of,
    divide_def,
    lower_divided,
    region_program,
)

from ..helpers.def_products import (
    COMPUTED,
    GELU,
    GROUP_CASES,
    SWIGLU,
    WINDOW,
    ProductCase,
    cuda_text,
    emulate_all,
    matmul,
    random_group_options,
    same,
    whole,
)

needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
TARGET = "cuda:sm_90"
SM90 = parse_gpu_target(TARGET)
SMALL = TileOptions((64, 16, 64), stages=3, instruction="wgmma")


def divide_case(case: ProductCase, options: TileOptions) -> DividedDef:
    return divide_def(case.bind(), options, SM90)


def compile_with_fitting_options(case: ProductCase, rng: random.Random) -> tuple[GpuKernel, TileOptions]:
    """The kernel with random options that the case has room, and boxes, for."""
    for _ in range(20):
        options = SMALL if case.name == "many_tiles" else random_group_options(rng)
        try:
            return case.compile(options, TARGET), options
        except tc.ArgumentError:
            continue
    return case.compile(SMALL, TARGET), SMALL


@needs_compiler
def test_random_options_equal_the_reference() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    chosen = [(case, *compile_with_fitting_options(case, rng)) for case in GROUP_CASES]
    results = emulate_all([(case, kernel) for case, kernel, _ in chosen])
    for (case, kernel, options), found in zip(chosen, results, strict=True):
        assert "wgmma" in cuda_text(kernel), case.name
        assert torch.equal(found, case.expected()), f"{case.name} {options} seed {seed}"


@pytest.mark.parametrize("name", ["nt", "tn", "tt", "several", "window", "sliced", "diagonal", "same_way"])
def test_decompositions_are_proven(name: str) -> None:
    case = next(c for c in GROUP_CASES if c.name == name)
    found = divide_case(case, SMALL)
    for piece in found.regions:
        assert check_program(region_program(piece, buffers_of(found.function), "f", SM90)) >= 3


def test_interpreter_equals_the_reference() -> None:
    case = same("window", WINDOW, (1, 9, 9, 64), (10, 2, 2, 64))
    module = lower_divided(divide_case(case, SMALL), SM90)
    given = [*(x.numpy() for x in case.arguments()), np.zeros((1, 8, 8, 10), np.float16)]
    arrays = {b.name: x.reshape(b.shape) for b, x in zip(module.arguments, given, strict=True)}
    assert interpret(module, arrays) == []
    expected = case.expected().numpy()
    np.testing.assert_array_equal(arrays[module.arguments[-1].name].reshape(expected.shape), expected)


@needs_compiler
def test_right_factors_that_are_computed_become_left_ones() -> None:
    text = COMPUTED.replace("float(half(P(m,k) * s(m))) * float(V(n,k))", "float(V(n,k)) * float(half(P(m,k) * s(m)))")
    text = text.replace("O(m,n)", "O(n,m)")
    case = ProductCase("right", text, ((70, 72), (48, 72), (70,)), ("float32", "float16", "float32"))
    kernels = [case.compile(TileOptions(instruction="wgmma", warps=(w, 1)), TARGET) for w in (4, 8)]
    assert all("registers" in k.source() and "wgmma" in k.source() for k in kernels)
    for found in emulate_all([(case, k) for k in kernels]):
        assert torch.equal(found, case.expected())
    large = ProductCase("large", text, ((4096, 4096), (4096, 4096), (4096,)), ("float32", "float16", "float32"))
    arguments = [torch.empty(s, dtype=getattr(torch, d)) for s, d in zip(large.shapes, large.dtypes, strict=True)]
    assert "wgmma" in large.op.compile(*arguments, target=TARGET).source()


# --- what large products become ----------------------------------------------------------------------------------

LARGE = {
    "plain": (matmul("m,k", "n,k", "m,n", "bfloat16"), ("NN", "NN"), {4096: 0.85, 8192: 0.85}),
    "gelu": (GELU, ("NN", "NN", "N", "NN"), {4096: 0.85, 8192: 0.85}),
}
"""Defs, their arguments, and the least part of the time that tensor cores multiply, by the model. The
arithmetic of an epilogue adds to the time of the products, but for the steps that one warpgroup leads the other."""


@pytest.mark.sampled  # sizes for each product
@needs_nvrtc
@pytest.mark.parametrize("n", [4096, 8192])
@pytest.mark.parametrize("name", LARGE)
def test_large_products_are_limited_by_tensor_cores(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text, shapes, least = LARGE[name]
    arguments = [torch.empty((n,) * len(s), dtype=torch.bfloat16) for s in shapes]
    kernel = tc.define(text).f.compile(*arguments, target=TARGET)
    found = divide_def(legalize(kernel.compiled.bound), TileOptions(), SM90)
    (piece,) = found.regions
    rate = 2 * n**3 / (SM90.num_sms * SM90.group_ops) / piece.price.cycles
    assert (piece.price.limiter, rate >= least[n]) == ("tensor cores", True), piece
    assert piece.tiles.stages >= 3
    program = region_program(piece, buffers_of(found.function), "f", SM90)
    assert bank_turns(lower_program(program)) == 0
    check_assembled(kernel, monkeypatch)
    with suppress(tc.ArgumentError):  # the disassembler is not installed
        within, border = count_between_products(kernel.source("sass"))
        assert max(within) <= 12
        assert max(border) <= 16  # with the wait for a stage and the release of another


def count_between_products(sass: str) -> tuple[list[int], list[int]]:
    """Instructions between products of a step, which ends with the product that commits (gsb0), and between steps."""
    lines = [line for line in sass.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]
    at = [n for n, line in enumerate(lines) if "HGMMA" in line]
    gaps = [(b - a - 1, "gsb0" in lines[a]) for a, b in pairwise(at)]
    return [n for n, ends in gaps if not ends], [n for n, ends in gaps if ends]


def check_assembled(kernel: GpuKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembler has registers for all, and does not put products one after another."""
    logs: list[str] = []
    original = nvrtc._resources
    monkeypatch.setattr(nvrtc, "_resources", lambda log: (logs.append(log), original(log))[1])
    source = kernel.compiled.code.source
    (report,) = nvrtc.compile_text(source, architecture_for(source, "sm_90")).resources.values()
    assert (report.local, report.spill_stores, report.spill_loads) == (0, 0, 0)
    assert report.registers * prod(kernel.compiled.code.kernels[0].launch.block) <= SM90.registers_per_sm
    assert not re.search(r"C75\d\d|warning", logs[0]), logs[0]


N = 2048
OTHERS = {
    "bytes": (matmul("m,k", "n,k", "m,n", "int8"), ((N, N), (N, N)), ("int8", "int8")),
    "across": (matmul("k,m", "k,n", "m,n", "bfloat16"), ((N, N), (N, N)), ("bfloat16", "bfloat16")),
    "pair": (SWIGLU, ((N, N),) * 3, ("float16",) * 3),
    "computed": (COMPUTED, ((N, N), (N, N), (N,)), ("float32", "float16", "float32")),
    "window": (WINDOW, ((16, 58, 58, 128), (256, 3, 3, 128)), ("float16",) * 2),
    "batch": (matmul("z,m,k", "z,k,n", "z,m,n"), ((16, 512, 512), (16, 512, 512)), ("float16",) * 2),
}


@pytest.mark.sampled  # products
@needs_nvrtc
@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_assembled_without_spills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, shapes, dtypes = OTHERS[name]
    arguments = [torch.empty(s, dtype=getattr(torch, d)) for s, d in zip(shapes, dtypes, strict=True)]
    kernel = tc.define(text).f.compile(*arguments, target=TARGET)
    assert "wgmma" in cuda_text(kernel)
    check_assembled(kernel, monkeypatch)


ODD = {
    "rows of no whole 16 bytes": (matmul("m,k", "n,k", "m,n"), ((1024, 1025), (1024, 1025))),
    "bytes across": (matmul("k,m", "k,n", "m,n", "int8"), ((1024, 1024), (1024, 1024))),
}


@pytest.mark.parametrize("name", ODD)
def test_what_boxes_do_not_take_is_for_warps(name: str) -> None:
    text, shapes = ODD[name]
    arguments = [torch.empty(s, dtype=torch.int8 if name == "bytes across" else torch.float16) for s in shapes]
    assert "mma.sync" in cuda_text(tc.define(text).f.compile(*arguments, target=TARGET))


@needs_compiler
def test_misaligned_arguments_are_for_warps() -> None:
    a, b = whole((64, 64), "float16", 1), whole((24, 64), "float16", 2)
    moved = torch.empty(a.numel() + 1, dtype=a.dtype)[1:].view(a.shape).copy_(a)
    op = tc.define(matmul("m,k", "n,k", "m,n")).f
    kernel = op.compile(a, b, target=TARGET, options=TileOptions())
    assert torch.equal(kernel.emulate(moved, b), (a.float() @ b.float().T).half())
    with pytest.raises(tc.ArgumentError, match="no tiles of"):
        op.compile(a, b, target=TARGET, options=SMALL).emulate(moved, b)


@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        (SMALL, "cuda:sm_80", "the option instruction"),
        (TileOptions(warps=(2, 2), instruction="wgmma"), TARGET, "the option warps"),
        (TileOptions(tile=(32, 64, 64), instruction="wgmma"), TARGET, "no tiles of tile"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: TileOptions, target: str, message: str) -> None:
    a = torch.empty(256, 256, dtype=torch.float16)
    with pytest.raises(tc.ArgumentError, match=message):
        tc.define(matmul("m,k", "n,k", "m,n")).f.compile(a, a, target=target, options=options)


def test_bytes_have_instructions_of_fewer_widths() -> None:
    a = torch.empty(64, 64, dtype=torch.int8)
    op = tc.define(matmul("m,k", "n,k", "m,n", "int8")).f
    for columns in (8, 24, 48):
        options = TileOptions((64, columns, 64), instruction="wgmma")
        assert "wgmma" in op.compile(a, a, target=TARGET, options=options).source("cuda")
    with pytest.raises(tc.ArgumentError, match="no instruction multiplies bytes by 40 columns"):
        op.compile(a, a, target=TARGET, options=TileOptions((64, 40, 64), instruction="wgmma"))


def test_refusals_say_why_there_are_no_boxes() -> None:
    a = torch.empty(64, 37, dtype=torch.float16)
    with pytest.raises(tc.ArgumentError, match="a stride of A is no multiple of 16 bytes"):
        tc.define(matmul("m,k", "n,k", "m,n")).f.compile(a, a, target=TARGET, options=SMALL)
