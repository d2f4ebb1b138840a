"""GPU kernels for any number of rows: what they look like, which calls share them, and what stays exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.api import Op
from tensor_comprehensions.cli.main import main
from tensor_comprehensions.codegen.gpu import opencl_printer
from tensor_comprehensions.compiler.gpu_range_passes import CompiledGpuRangeKernel
from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.dispatch.call_steps import Arguments, shapes_of
from tensor_comprehensions.dispatch.cuda.gpu_kernels import GpuKernel
from tensor_comprehensions.loop_ir.nodes import BlockCount, Launch, Module
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.polyhedral.gpu.lower_gpu import lower_gpu_range
from tensor_comprehensions.runtime import opencl
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang.binding.bind import bind
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

from ..helpers.fake_cuda import FakeCuda, fake
from ..helpers.gpu_range_kernels import check_emulator, check_interpreter, compile_range_kernel
from ..helpers.gpu_suite import random_options
from ..helpers.row_programs import RowProgram, row_arguments, row_programs

__all__ = ["fake"]
needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)

SCALE = "def f(float(N,D) x, float(D) g) -> (y) { y(n,d) = x(n,d) * g(d) }"
SOFTMAX = """
def f(float(N,D) x) -> (y) {
    m(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - m(n))
    s(n) +=! e(n,d)
    y(n,d) = e(n,d) / s(n)
}
"""
PRODUCT = "def f(float(M,K) a, float(K,N) b) -> (c) { c(m,n) +=! a(m,k) * b(k,n) }"
MEAN = "def f(float(N,D) x) -> (y) { s(d) +=! x(n,d)  y(d) = s(d) / N }"
CAUSAL = "def f(float(T,U) s) -> (o) { o(t,u) = u <= t ? s(t,u) : 0.0 }"
LOOKUP = "def f(float(V,D) table, int32(N) words) -> (y) { y(n,d) = table(words(n),d) }"


def op_of(source: str, *dynamic: str) -> Op:
    return tc.define(source, dynamic=set(dynamic)).f


def require_range_kernel(op: Op, *arguments: Any, **further: Any) -> tuple[GpuKernel, CompiledGpuRangeKernel]:
    """The kernel for all sizes, which has to be one."""
    kernel = compile_range_kernel(op, arguments, {}, **further)
    assert kernel is not None
    assert isinstance(kernel.compiled, CompiledGpuRangeKernel)
    return kernel, kernel.compiled


def test_a_launch_evaluates_its_grid() -> None:
    launch = Launch((100, 7, 1), (32, 1, 1), counts=(BlockCount("n", 8, 100), None, None))
    grids = [launch.bind_parameters({"n": n}).grid for n in (0, 1, 8, 9, 800, 5000)]
    assert grids == [(0, 7, 1), (1, 7, 1), (1, 7, 1), (2, 7, 1), (100, 7, 1), (100, 7, 1)]
    assert not launch.bind_parameters({"n": 1}).counts


def test_kernels_take_sizes_and_strides_as_integers() -> None:
    _, compiled = require_range_kernel(op_of(SCALE, "N"), torch.ones(5, 64), torch.ones(64))
    text = compiled.source("cuda")
    assert "const long long rows" in text
    assert "float4" in text, "rows of 64 elements are aligned, whatever their number"
    assert "stride" not in text
    _, compiled = require_range_kernel(op_of(SCALE, "N", "D"), torch.ones(5, 64), torch.ones(64))
    text = compiled.source("cuda")
    assert "const long long x_stride_0" in text
    assert "float4" not in text, "nothing is known of the alignment of rows of any length"


def test_a_grid_follows_the_rows() -> None:
    _, compiled = require_range_kernel(op_of(SOFTMAX, "N"), torch.ones(5, 700))
    (kernel,) = compiled.code.kernels
    rows = kernel.launch.counts[0]
    assert rows is not None
    for n in (0, 1, 7, 1000):
        values = compiled.parameter_values({"N": n, "D": 700}, [(700, 1), (700, 1)])
        assert compiled.code.bind_parameters(values).kernels[0].launch.grid == (-(-n // rows.tile), 1, 1)


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize(
    ("source", "dynamic", "shapes"),
    [
        (SCALE, "ND", lambda n: ((n, n + 3), (n + 3,))),
        (SOFTMAX, "D", lambda n: ((4, n + 1),)),
        (SOFTMAX, "ND", lambda n: ((n, 2 * n + 1),)),
        (PRODUCT, "M", lambda n: ((n, 70), (70, 33))),
        (PRODUCT, "K", lambda n: ((40, n), (n, 33))),
        (PRODUCT, "MNK", lambda n: ((n, n // 2), (n // 2, 2 * n))),
        (MEAN, "N", lambda n: ((n + 1, 5),)),
        (CAUSAL, "TU", lambda n: ((n, n + 2),)),
    ],
)
def test_one_kernel_serves_all_sizes(source: str, dynamic: str, shapes: Any) -> None:
    op = op_of(source, *dynamic)
    kernel, compiled = require_range_kernel(op, *(torch.ones(s) for s in shapes(5)))
    for n in (0, 1, 2, 7, 64, 131):
        arguments = [torch.randn(s) for s in shapes(n)]
        check_emulator(op, kernel, arguments, {})
        if n < 8:
            check_interpreter(op, compiled, arguments, {})


@needs_compiler
def test_operands_with_other_strides_share_a_kernel() -> None:
    op = op_of(SCALE, "N", "D")
    whole, g = torch.randn(40, 90), torch.randn(90)
    kernel, _ = require_range_kernel(op, whole[:, :50], g[:50])
    for rows, columns in ((3, 50), (40, 89), (2, 7)):
        check_emulator(op, kernel, [whole[:rows, :columns], g[:columns]], {})
    with pytest.raises(tc.ArgumentError, match="other sizes or strides"):
        kernel.emulate(whole[:, ::2], g[:45])
    with pytest.raises(tc.ArgumentError, match="other sizes or strides"):
        require_range_kernel(op_of(SCALE, "N"), torch.ones(5, 64), torch.ones(64))[0].emulate(
            torch.ones(5, 63), torch.ones(63)
        )


@needs_compiler
def test_rows_that_start_anywhere_are_read_one_by_one() -> None:
    op = op_of(SCALE, "N")
    kernel, _ = require_range_kernel(op, torch.ones(5, 64), torch.ones(64))
    memory = torch.randn(1 + 9 * 64)
    check_emulator(op, kernel, [memory[1:].view(9, 64), torch.randn(64)], {})


@needs_compiler
def test_subscripts_that_are_data_are_checked_for_any_number_of_rows() -> None:
    op, table = op_of(LOOKUP, "N"), torch.randn(9, 6)
    kernel, _ = require_range_kernel(op, table, torch.zeros(3, dtype=torch.int32))
    for n in (0, 1, 300, 4000):
        words = torch.randint(0, 9, (n,), dtype=torch.int32)
        assert torch.equal(kernel.emulate(table, words), table[words.long()])
        if n:
            words[-1] = 9
            with pytest.raises(tc.RangeError, match="'table' is out of bounds"):
                kernel.emulate(table, words)


def test_sizes_beyond_the_parameters_stay_exact() -> None:
    """Together, sizes are an extent, too."""
    op = op_of("def f(int8(A,B) x) -> (y) { y(a,b) = x(a,b) }", "A", "B")
    large = torch.empty_strided((1 << 16, (1 << 14) + 1), ((1 << 14) + 1, 1), dtype=torch.int8, device="meta")
    table = op._kernels.gpu
    sizes = shapes_of(op.function, Arguments((large,), (), None))
    strides = (tuple(large.stride()),)
    key = op._kernels.find_range_key(sizes, (large,), strides, (), has_exact_options=False, is_call=False)
    assert key is not None
    assert not table._fits_parameters(key, sizes, (large,))
    few = shapes_of(op.function, Arguments((large[:3],), (), None))
    assert table._fits_parameters(key, few, (large[:3],))


def test_products_on_tensor_cores_stay_exact(caplog: pytest.LogCaptureFixture) -> None:
    op = op_of("def f(half(M,K) a, half(K,N) b) -> (c) { c(m,n) +=! a(m,k) * b(k,n) }", "M")
    half = torch.ones(2048, 2048, dtype=torch.float16)
    with caplog.at_level("DEBUG", "tensor_comprehensions.cache"):
        assert compile_range_kernel(op, (half, half), {}) is None
    assert "products on tensor cores are made for exact sizes" in caplog.text


def test_what_is_no_rows_stays_exact(caplog: pytest.LogCaptureFixture) -> None:
    op = op_of("def f(float(N,D) x) -> (o) { o(d) = x(N-1,d) }", "N")
    with caplog.at_level("DEBUG", "tensor_comprehensions.cache"):
        assert compile_range_kernel(op, (torch.ones(3, 4),), {}) is None
    assert "'N' stays part of the kernel: 'o' is computed from other rows of 'x'" in caplog.text


@needs_compiler
def test_the_third_value_of_a_size_makes_it_a_parameter(fake: FakeCuda) -> None:
    op, g = tc.define(SCALE).f, torch.randn(16)
    for n in (128, 77, 3, 1, 0, 500, 77):
        x = torch.randn(n, 16)
        assert torch.equal(op(x, g), x * g)
    assert fake.log.count("load_module") == 3
    assert len(fake.launches) == 6, "0 rows launch nothing"
    few, one, many = (launch[1] for launch in fake.launches[2:5])
    assert few == one == (1, 1, 1)
    assert many > one


@needs_compiler
def test_a_captured_call_keeps_its_sizes(fake: FakeCuda) -> None:
    """A graph has the arguments of its launches; later calls with other sizes have their own."""
    op, g = tc.define(SCALE, dynamic={"N"}).f, torch.randn(16)
    op(torch.ones(300, 16), g)
    (before,) = fake.launches
    (cache,) = op._kernels.gpu.inline_caches.values()
    launcher = next(iter(cache._known.values())).launcher
    op(torch.ones(2, 16), g)
    launcher(torch.ones(300, 16), g)
    assert fake.launches[-1][:4] == before[:4]
    assert fake.log.count("load_module") == 1


@needs_compiler
def test_kernels_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that a launch needs."""
    monkeypatch.setenv("TC_CACHE", str(tmp_path))
    first = op_of(SOFTMAX, "N", "D")
    _, made = require_range_kernel(first, torch.ones(5, 7))
    again = op_of(SOFTMAX, "N", "D")
    kernel, found = require_range_kernel(again, torch.ones(9, 3))
    assert found is not made
    assert (found.code, found.arguments, found.temporaries) == (made.code, made.arguments, made.temporaries)
    assert found.parameters == made.parameters
    check_emulator(again, kernel, [torch.randn(7, 70)], {})


def test_the_command_line_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.tc"
    file.write_text(SOFTMAX)
    assert main(["show", str(file), "--target", "cuda:sm_90", "--sizes", "N=*,D=300", "--emit", "schedule"]) == 0
    assert ".rows" in capsys.readouterr().out
    file.write_text("def f(float(N,D) x) -> (o) { o(d) = x(N-1,d) }")
    assert main(["show", str(file), "--target", "cuda:sm_90", "--sizes", "N=*,D=300"]) == 2


def test_numbers_that_stay_in_the_code_are_refused() -> None:
    """Two bindings to different sizes whose extents are no variables have different code."""
    functions = [legalize(bind(op_of(SCALE).function, {"N": n, "D": 64}, {})) for n in (1031, 2053)]
    with pytest.raises(CannotLower, match="other extents are computed by other code"):
        lower_gpu_range(functions, None, parse_gpu_target("cuda:sm_90"))


def test_a_kernel_for_any_number_of_rows_is_explained() -> None:
    kernel, _ = require_range_kernel(op_of(SOFTMAX, "N"), torch.ones(5, 100))
    text = str(kernel.explain())
    assert "min(" in text
    assert ".rows" in text


@needs_compiler
def test_a_pipelined_loop_that_does_not_run_copies_nothing() -> None:
    """Its first tile is copied before it. For a single term, only the loop's bound tells whether that exists."""
    options = MappingOptions(
        tile=(32, 32, 1),
        threads=(16, 16),
        blocks=(1 << 20, 65535),
        shared_memory=True,
        private_memory=True,
        double_buffer=True,
    )
    op = op_of(PRODUCT, "K")
    kernel, compiled = require_range_kernel(op, torch.ones(64, 5), torch.ones(5, 64), options=options)
    assert "__pipeline_wait_prior" in compiled.source("cuda")
    for k in (0, 1, 9):
        check_emulator(op, kernel, [torch.randn(64, k), torch.randn(k, 64)], {})


@needs_compiler
@pytest.mark.parametrize("seed", range(6))
def test_any_options_give_kernels_that_are_right(seed: int) -> None:
    """Or a refusal, if a size of the mapping decides more than loops up to the rows."""
    target = parse_gpu_target("cuda:sm_90")
    options = MappingOptions.naive() if not seed else random_options(Random(seed), target)
    options = replace(options, match_library_calls=False)
    for source, dynamic, shapes in (
        (SOFTMAX, "ND", lambda n: ((n, 2 * n + 1),)),
        (PRODUCT, "MNK", lambda n: ((n, n // 2), (n // 2, 2 * n))),
    ):
        op = op_of(source, *dynamic)
        kernel = compile_range_kernel(op, [torch.ones(s) for s in shapes(5)], {}, options=options)
        for n in (0, 1, 3, 40) if kernel is not None else ():
            check_emulator(op, kernel, [torch.randn(s) for s in shapes(n)], {})


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
@pytest.mark.parametrize(("source", "dynamic"), [(SOFTMAX, "ND"), (PRODUCT, "MNK"), (LOOKUP, "N")])
def test_nvidias_compiler_takes_the_text(source: str, dynamic: str) -> None:
    op = op_of(source, *dynamic)
    words = torch.zeros(5, dtype=torch.int32)
    arguments = {SOFTMAX: (torch.ones(5, 5),), PRODUCT: (torch.ones(5, 5),) * 2, LOOKUP: (torch.ones(5, 5), words)}
    _, compiled = require_range_kernel(op, *arguments[source])
    assert compiled.cubin.binary
    assert compiled.resources["registers"] > 0


@pytest.mark.skipif(not opencl.is_opencl_available(), reason="running OpenCL needs a device, such as PoCL")
@pytest.mark.parametrize(("source", "dynamic"), [(SOFTMAX, "ND"), (PRODUCT, "MNK")])
def test_opencl_runs_the_same_kernels(source: str, dynamic: str) -> None:
    op = op_of(source, *dynamic)
    _, compiled = require_range_kernel(op, *(torch.ones(5, 5),) * (1 + (source == PRODUCT)))
    module: Module = compiled.rerun_until("simplify")
    code = opencl_printer.emit_opencl(module)
    for n in (1, 7, 70):
        inputs = [np.random.default_rng(n).random((n, n), np.float32) for _ in module.arguments[:-1]]
        memories = [*inputs, np.zeros((n, n), np.float32)]
        values = compiled.parameter_values(dict.fromkeys(op.function.sizes, n), [(n, 1)] * len(memories))
        arrays = dict(zip((b.name for b in module.arguments), memories, strict=True))
        assert opencl.run_opencl(code, module, arrays, values) == (0, 0)
        expected = op.reference(*map(torch.from_numpy, inputs))
        torch.testing.assert_close(torch.from_numpy(memories[-1]), expected, rtol=1e-4, atol=1e-4)


@needs_compiler
@settings(max_examples=6)
@given(row_programs(3), st.sets(st.sampled_from("NDE"), min_size=1))
def test_random_programs(program: RowProgram, dynamic: set[str]) -> None:
    (op,) = tc.define(program.source, dynamic=dynamic)
    kernel = compile_range_kernel(op, row_arguments(program, 5, dynamic), {})
    for n in (5, 0, 1, 67):
        arguments = row_arguments(program, n, dynamic)
        if kernel is None or not takes(kernel, arguments):
            continue
        check_emulator(op, kernel, arguments, {})
        if n < 2:
            assert isinstance(kernel.compiled, CompiledGpuRangeKernel)
            check_interpreter(op, kernel.compiled, arguments, {})


def takes(kernel: GpuKernel, arguments: Sequence[Any]) -> bool:
    """Are the sizes that are part of a kernel those of arguments?"""
    sizes = {"N": len(arguments[0]), "D": arguments[0].shape[1], "E": arguments[1].shape[1]}
    assert isinstance(kernel.compiled, CompiledGpuRangeKernel)
    bound = kernel.compiled.bound.tensor("X").shape, kernel.compiled.bound.tensor("Z").shape
    fixed = {"N": bound[0][0], "D": bound[0][1], "E": bound[1][1]}
    return all(n in kernel.compiled.dynamic_sizes or sizes[n] == fixed[n] for n in fixed)
