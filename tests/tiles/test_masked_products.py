"""Masked sums of products on tensor cores: tiles with masked terms are zeroed in part, steps without terms skipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.codegen.gpu.ptx import architecture_for
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.options import TileOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang.transforms.legalize import legalize
from tensor_comprehensions.tiles.check.check_program import check_program
from tensor_comprehensions.tiles.products.lower_def import (
    DividedDef,
    buffers_of,
    divide_def,
    lower_divided,
    region_program,
)

from ..helpers.def_products import ProductCase, cuda_text, emulate_all, matmul

needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
TARGETS = {
    "cuda:sm_80": TileOptions((32, 32, 32), (2, 1), stages=2),
    "cuda:sm_90": TileOptions((64, 16, 64), (4, 1), stages=2, instruction="wgmma"),
}


def masked_def(condition: str, left: str = "m,k", right: str = "k,n", out: str = "m,n", dtype: str = "float16") -> str:
    wide, zero = ("float", "0.0") if "float" in dtype else ("int32", "0")
    sizes = [s.upper() for s in (left, right)]
    value = f"{condition} ? {wide}(A({left})) * {wide}(B({right})) : {zero}"
    return f"def f({dtype}({sizes[0]}) A, {dtype}({sizes[1]}) B) -> (C) {{ C({out}) +=! {value} }}"


FINISHED = """def f(float16(M,K) A, float16(K,N) B, float(M,N) R) -> (C) {
    S(m,n) +=! k + 3 >= m ? float(A(m,k)) * float(B(k,n)) : 0.0
    C(m,n) = float16(fmax(S(m,n), R(m,n)))
}"""
TWO = ((104, 72), (72, 40))
CASES = (
    ProductCase("rows", masked_def("k <= m"), TWO),
    ProductCase("columns", masked_def("k <= n"), TWO),
    ProductCase("terms", masked_def("k >= 5 && k < 50"), TWO),
    ProductCase("results", masked_def("m <= n + 20"), TWO),
    ProductCase("several", masked_def("k <= m && m <= k + 40 && 2 * n <= k + 30"), TWO),
    ProductCase("across", masked_def("k <= m", "k,m", "n,k"), ((72, 104), (40, 72))),
    ProductCase("batch", masked_def("k <= m + 8 * z", "z,m,k", "z,k,n", "z,m,n"), ((2, 40, 72), (2, 72, 24))),
    ProductCase("bytes", masked_def("k <= m", "m,k", "n,k", dtype="int8"), ((104, 80), (40, 80)), ("int8",) * 2),
    ProductCase("finished", FINISHED, (*TWO, (104, 40)), ("float16", "float16", "float32")),
)


def divide(case: ProductCase, target: str) -> DividedDef:
    options = TARGETS[target]
    return divide_def(case.bind(), options, parse_gpu_target(target))


@pytest.mark.sampled  # two architectures
@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_masked_sums_equal_the_reference(target: str) -> None:
    """Infinite values of masked terms do not reach a sum."""
    kernels = [(case, case.compile(TARGETS[target], target)) for case in CASES]
    for (case, kernel), found in zip(kernels, emulate_all(kernels), strict=True):
        assert "mma" in cuda_text(kernel), case.name
        assert torch.equal(found, case.expected()), case.name
    for case, kernel in kernels[:2]:
        a, b = case.arguments()
        a[3, 70], b[60, 7], b[11, 5], b[69, 38] = (float(x) for x in ("nan", "inf", "nan", "-inf"))
        wanted = case.op.reference(a, b)
        assert wanted.isfinite().all() == (case.name == "columns")
        torch.testing.assert_close(kernel.emulate(a, b), wanted, equal_nan=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["rows", "columns", "results", "batch"])
def test_decompositions_are_proven(name: str, target: str) -> None:
    found = divide(next(c for c in CASES if c.name == name), target)
    (piece,) = found.regions
    assert piece.region.domain
    gpu = parse_gpu_target(target)
    assert check_program(region_program(piece, buffers_of(found.function), "f", gpu)) >= 2


@pytest.mark.parametrize("target", TARGETS)
def test_interpreter_equals_the_reference(target: str) -> None:
    case = ProductCase("small", masked_def("k <= m"), ((64, 72), (72, 16)))
    module = lower_divided(divide(case, target), parse_gpu_target(target))
    given = [*(x.numpy() for x in case.arguments()), np.zeros((64, 16), np.float32)]
    arrays = dict(zip((b.name for b in module.arguments), given, strict=True))
    assert interpret(module, arrays) == []
    np.testing.assert_array_equal(given[-1], case.expected().numpy())


@pytest.mark.sampled  # two architectures
@needs_nvrtc
@pytest.mark.parametrize("target", TARGETS)
def test_large_masked_products_are_on_tensor_cores_without_spills(target: str) -> None:
    """By themselves, in about half of the time of the whole product, by the model."""
    x = torch.empty(4096, 4096, dtype=torch.float16)
    cycles = []
    for text in (masked_def("k <= m"), matmul("m,k", "k,n", "m,n")):
        kernel = tc.define(text).f.compile(x, x, target=target)
        source = cuda_text(kernel)
        assert "mma" in source
        found = divide_def(legalize(kernel.compiled.bound), TileOptions(), parse_gpu_target(target))
        cycles.append(found.regions[0].price.cycles)
        if found.regions[0].region.domain:
            (report,) = nvrtc.compile_text(source, architecture_for(source, target[5:])).resources.values()
            assert (report.local, report.spill_stores, report.spill_loads) == (0, 0, 0)
    assert cycles[0] < 0.7 * cycles[1]


def test_masks_that_no_factor_takes_are_refused() -> None:
    a, b = ProductCase("", "", TWO).arguments()
    op = tc.define(masked_def("k + m <= n")).f
    with pytest.raises(tc.ArgumentError, match="its mask depends on rows, columns and terms together"):
        op.compile(a, b, target="cuda:sm_80", options=TileOptions())
    assert "mma" not in op.compile(a, b, target="cuda:sm_80").source("cuda")
