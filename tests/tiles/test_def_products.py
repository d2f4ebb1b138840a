"""Products of defs on tensor cores: the emulator gives what the reference evaluator gives, and what is not allowed
there never runs there."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from benchmarks import sources
from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.options import MappingOptions, TileOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang.transforms.legalize import legalize
from tensor_comprehensions.tiles.check.check_program import check_program
from tensor_comprehensions.tiles.check.shared_accesses import bank_turns
from tensor_comprehensions.tiles.lower.lower_tiles import lower_program
from tensor_comprehensions.tiles.products.lower_def import buffers_of, divide_def, region_program
from tools.gpu_proof import prove

from ..helpers.def_products import (
    BIAS,
    CASES,
    CHANNELS_LAST,
    CONVOLUTION,
    GELU,
    ROUNDED,
    ProductCase,
    count_kernels,
    cuda_text,
    emulate_all,
    matmul,
    random_options,
    whole,
)
from ..helpers.gpu_suite import check, map_case, memory_of, small_case
from ..helpers.product_suite import draw_product_cases

needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
MMA = "mma.sync.aligned"
SM80 = parse_gpu_target("cuda:sm_80")


@needs_compiler
def test_cases_equal_the_reference() -> None:
    kernels = [(case, case.compile(case.options)) for case in CASES]
    for (case, kernel), found in zip(kernels, emulate_all(kernels), strict=True):
        assert MMA in cuda_text(kernel), case.name
        assert torch.equal(found, case.expected()), case.name


@needs_compiler
def test_random_options_equal_the_reference() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    chosen = [(case, random_options(rng)) for case in rng.sample(CASES, 8)]
    kernels = [(case, case.compile(options)) for case, options in chosen]
    for (case, options), found in zip(chosen, emulate_all(kernels), strict=True):
        assert torch.equal(found, case.expected()), f"{case.name} {options} seed {seed}"


@needs_compiler
def test_benchmarks_in_half_equal_the_reference() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    names = ("TBMM", "C3", "KRONECKER", "MLP3", "GCONV", "CONV2D_STRIDE2")
    cases = [small_case(name, re.sub(r"\bfloat\b", "half", getattr(sources, name))) for name in names]
    modules = [map_case(case, random_options(rng), SM80) for case in cases]
    codes = [emit_cuda(m) for m in modules]
    for case, module, code, emulated in zip(cases, modules, codes, emulator.build_emulated(codes), strict=True):
        assert MMA in code.source, case.name
        arrays = memory_of(case, module)
        assert emulator.run_emulated_module(emulated, module, arrays) == (0, 0), f"{case.name} seed {seed}"
        check(case, arrays)


@needs_compiler
def test_defs_of_the_suite_with_random_options_equal_the_reference() -> None:
    """Some of the defs, and of 50 sets of options for each target, all of which `gpu_proof --way tiles` tries."""
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for case in draw_product_cases(rng, 2):
        number = rng.randrange(2, 100)
        assert prove(case, "tiles", range(number, number + 2)).failures == [], f"{case.name} {number} seed {seed}"


@needs_nvrtc
def test_epilogues_of_warps_have_registers_for_all() -> None:
    arguments = [torch.empty(s, dtype=torch.bfloat16) for s in ((4096, 4096), (4096, 4096), (4096,), (4096, 4096))]
    kernel = tc.define(GELU).f.compile(*arguments, target="cuda:sm_80")
    resources = kernel.resources
    assert (resources["local_bytes"], resources["spill_bytes"]) == (0, 0)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("epilogue", "mixed", "split")], ids=lambda c: c.name)
def test_sources_of_all_kinds(case: ProductCase) -> None:
    kernel = case.compile(TileOptions())
    assert MMA in kernel.source("cuda")
    assert "on tensor cores" in kernel.source("schedule")
    assert "MatMul<<<" in kernel.source("tiles")
    assert "mma" not in kernel.source("opencl")


def test_products_of_one_sum_are_one_kernel() -> None:
    names = ("two_products", "gates", "mlp")
    found = {c.name: count_kernels(c.compile(TileOptions())) for c in CASES if c.name in names}
    assert found == dict.fromkeys(names, (1, 0))


@needs_compiler
def test_checks_around_products_name_their_tensor() -> None:
    case = next(c for c in CASES if c.name == "checked")
    kernel, arguments = case.compile(case.options), case.arguments()
    for number, tensor in ((1, "T"), (3, "P")):
        wrong = list(arguments)
        wrong[number] = torch.full_like(wrong[number], 77)
        with pytest.raises(tc.RangeError, match=tensor):
            kernel.emulate(*wrong)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
def test_sums_of_one_left_factor_meet_in_registers(target: str) -> None:
    names = ("swiglu", "halves", "three")
    found = {c.name: count_kernels(c.compile(TileOptions(), target)) for c in CASES if c.name in names}
    assert found == dict.fromkeys(names, (1, 0))
    (other,) = (count_kernels(c.compile(TileOptions(), target)) for c in CASES if c.name == "elsewhere")
    assert other[1] > 0  # its sums are also read elsewhere


@needs_compiler
@pytest.mark.parametrize("name", ["checked_end", "checked_start"])
def test_checked_statements_leave_the_product_on_tensor_cores(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    kernel, arguments = case.compile(case.options), case.arguments()
    assert MMA in cuda_text(kernel)
    arguments[3] = torch.full_like(arguments[3], 77)
    with pytest.raises(tc.RangeError, match="t"):
        kernel.emulate(*arguments)


# --- what runs there by default ----------------------------------------------------------------------------------

LARGE = {
    "matmul": (matmul("m,k", "n,k", "m,n"), ((1024, 1024), (1024, 1024)), "float16"),
    "matmul_bfloat16": (matmul("m,k", "k,n", "m,n", "bfloat16"), ((1024, 1024), (1024, 2048)), "bfloat16"),
    "matmul_int8": (matmul("m,k", "n,k", "m,n", "int8"), ((1024, 2048), (1024, 2048)), "int8"),
    "uneven": (matmul("k,m", "k,n", "m,n"), ((1111, 1025), (1111, 1234)), "float16"),
    "batch": (matmul("z,m,k", "z,n,k", "z,m,n"), ((16, 512, 256), (16, 512, 256)), "float16"),
    "epilogue": (BIAS, ((1024, 1024), (1024, 1024), (1024,), (1024, 1024)), "float16"),
    "odd": (matmul("m,k", "k,n", "m,n"), ((1001, 1001), (1001, 999)), "float16"),
    "channels_first": (CONVOLUTION, ((16, 64, 30, 30), (256, 64, 3, 3)), "float16"),
    "convolution": (CHANNELS_LAST, ((32, 57, 57, 128), (256, 3, 3, 128)), "float16"),
}


@pytest.mark.sampled  # smaller ones run in the emulator, all of them
@pytest.mark.parametrize(
    ("name", "target"), [*((name, "cuda:sm_80") for name in LARGE), ("odd", "cuda:sm_90"), ("batch", "cuda:sm_86")]
)
def test_large_products_are_on_tensor_cores(name: str, target: str) -> None:
    text, shapes, dtype = LARGE[name]
    arguments = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape in shapes]
    kernel = tc.define(text).f.compile(*arguments, target=target)
    assert MMA in cuda_text(kernel)
    if nvrtc.is_nvrtc_available():
        assert (kernel.resources["spill_bytes"], kernel.resources["local_bytes"]) == (0, 0)


FLOAT = "def f(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }"
UNROUNDED = "def f(float(I,J) P, float16(J,D) V) -> (O) { O(i,d) +=! P(i,j) * float(V(j,d)) }"
COMPUTED = "def f(float16(I,J) P, float16(J,D) V) -> (O) { O(i,d) +=! float(P(i,j)) * 2.5 * (float(V(j,d)) + 1) }"


@pytest.mark.parametrize(
    ("text", "dtypes", "reason"),
    [
        (FLOAT, ("float32", "float32"), r"its factor A is float32: write it as float\(half\(A"),
        (UNROUNDED, ("float32", "float16"), "its factor P is float32"),
        (COMPUTED, ("float16", "float16"), r"computed in float32 from float16 and not rounded"),
        (ROUNDED.replace("half(P(i,j) * 2)", "P(i,j) + 2"), ("float32", "float16"), "computed in float32"),
    ],
    ids=["float32", "unrounded", "computed", "prologue"],
)
def test_what_the_text_does_not_round_is_not_on_tensor_cores(text: str, dtypes: tuple[str, str], reason: str) -> None:
    arguments = [torch.empty(1024, 1024, dtype=getattr(torch, d)) for d in dtypes]
    op = tc.define(text).f
    assert "mma" not in cuda_text(op.compile(*arguments, target="cuda:sm_80"))
    with pytest.raises(tc.ArgumentError, match=reason):
        op.compile(*arguments, target="cuda:sm_80", options=TileOptions())


def test_small_products_and_mapping_options_stay() -> None:
    small, large = (torch.empty(n, n, dtype=torch.float16) for n in (16, 1024))
    op = tc.define(matmul("m,k", "n,k", "m,n")).f
    assert "mma" not in cuda_text(op.compile(small, small, target="cuda:sm_80"))
    map_case = op.compile(large, large, target="cuda:sm_80", options=MappingOptions.naive())
    assert "mma" not in cuda_text(map_case)
    assert "mma" not in cuda_text(op.compile(large, large, target="cuda:sm_75"))


def test_text_is_the_same_in_every_compilation() -> None:
    case = CASES[0]
    assert case.compile(TileOptions()).source("cuda") == case.compile(TileOptions()).source("cuda")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tile": (20, 32, 32)}, "the option tile"),
        ({"tile": (32, 32)}, "the option tile"),
        ({"warps": (3, 1), "tile": (32, 32, 32)}, "the option tile"),
        ({"stages": 1}, "the option stages"),
        ({"warps": (8, 8)}, "the option warps"),
        ({"tile": (256, 256, 256), "stages": 6}, "no tiles of tile"),
        ({"split": 7}, "no sum has 7 parts"),
    ],
)
def test_options_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    a = torch.empty(256, 256, dtype=torch.float16)
    with pytest.raises(tc.ArgumentError, match=message):
        tc.define(matmul("m,k", "n,k", "m,n")).f.compile(a, a, target="cuda:sm_80", options=TileOptions(**values))


def test_tile_options_need_tensor_cores() -> None:
    a = whole((16, 16), "float16", 0)
    with pytest.raises(tc.ArgumentError, match="sm_75"):
        tc.define(matmul("m,k", "n,k", "m,n")).f.compile(a, a, target="cuda:sm_75", options=TileOptions())


@needs_compiler
def test_misaligned_arguments_are_copied_element_by_element() -> None:
    a, b = whole((33, 64), "float16", 1), whole((20, 64), "float16", 2)
    moved = torch.empty(a.numel() + 1, dtype=a.dtype)[1:].view(a.shape).copy_(a)
    op = tc.define(matmul("m,k", "n,k", "m,n")).f
    kernel = op.compile(a, b, target="cuda:sm_80", options=TileOptions())
    assert torch.equal(kernel.emulate(moved, b), (a.float() @ b.float().T).half())


@pytest.mark.parametrize("name", ["nt", "tn", "int8", "convolution", "split"])
def test_decompositions_are_proven(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    divided = divide_def(case.bind(), case.options, SM80)
    for piece in divided.regions:
        assert check_program(region_program(piece, buffers_of(divided.function), "f", SM80)) >= 4


@pytest.mark.parametrize("terms", [32, 64])
def test_neighbors_are_stored_together_without_bank_conflicts(terms: int) -> None:
    a = torch.empty(256, 256, dtype=torch.float16)
    options = TileOptions(tile=(128, 128, terms), warps=(2, 2), stages=2)
    kernel = tc.define(matmul("m,k", "n,k", "m,n")).f.compile(a, a, target="cuda:sm_80", options=options)
    assert "packed_half8 *>(&C[" in kernel.source("cuda")
    divided = divide_def(legalize(kernel.compiled.bound), options, SM80)
    (piece,) = divided.regions
    assert bank_turns(lower_program(region_program(piece, buffers_of(divided.function), "f", SM80))) == 0
