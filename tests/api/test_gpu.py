"""Operators compiled for a GPU that is not there: their text, what it takes, its results on the CPU, and mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.compiler.gpu_passes import check_limits, compile_gpu
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import ArgumentError, InternalError, RangeError, TCError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.options import CpuOptions, MappingOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.schedules import tile
from tensor_comprehensions.target import GPUS, parse_gpu_target

needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

OPS = tc.define("""
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def softmax(float(N,D) x) -> (out) {
    peak(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - peak(n))
    total(n) +=! e(n,d)
    out(n,d) = e(n,d) / total(n)
}
def axpy(float a, float(N) x) -> (y) { y(n) = a * x(n) + y(n) }
def lookup(float(V,D) table, int64(B) words) -> (out) { out(b,d) = table(words(b),d) }
def halves(half(N) x, half(N) y) -> (z, s) { z(n) = x(n) * y(n)  s +=! x(n) }
""")
SM90 = "cuda:sm_90"


@needs_compiler
@pytest.mark.parametrize(
    "options", [None, MappingOptions.naive(), MappingOptions.single_thread()], ids=["default", "naive", "single"]
)
def test_emulated(options: MappingOptions | None) -> None:
    A, B = torch.randn(20, 33), torch.randn(33, 17)
    kernel = OPS.matmul.compile(A, B, target=SM90, options=options)
    torch.testing.assert_close(kernel.emulate(A, B), A @ B, rtol=1e-4, atol=1e-4)
    x = torch.randn(5, 40)
    torch.testing.assert_close(OPS.softmax.compile(x, target=SM90, options=options).emulate(x), x.softmax(1))


@needs_compiler
def test_layouts_numbers_and_initial_values() -> None:
    A, wide = torch.randn(33, 20).t(), torch.randn(33, 40)[:, 3:37:2]
    kernel = OPS.matmul.compile(A, wide, target=SM90)
    assert [t.strides for t in kernel.compiled.bound.tensors[:2]] == [(1, 20), (40, 2)]
    torch.testing.assert_close(kernel.emulate(A, wide), A @ wide, rtol=1e-4, atol=1e-4)
    x, y = torch.randn(50), torch.randn(50)
    before = y.clone()
    axpy = OPS.axpy.compile(2.0, x, y=y, target=SM90)
    torch.testing.assert_close(axpy.emulate(2.0, x, y=y), 2 * x + y)
    torch.testing.assert_close(axpy.emulate(2.0, x[None, :].expand(2, 50)[1], y=y), 2 * x + y)
    assert torch.equal(y, before)
    assert isinstance(
        OPS.axpy.compile(2.0, x.numpy(), y=y.numpy(), target=SM90).emulate(2.0, x.numpy(), y=y.numpy()), np.ndarray
    )


@needs_compiler
def test_tensors_that_start_anywhere() -> None:
    """Vectors are read at once only where addresses allow it."""
    whole, w = torch.randn(32 * 32 + 1), torch.randn(32, 32)
    options = MappingOptions(tile=(16, 16, 16), threads=(8, 8), shared_memory=True)
    aligned, shifted = whole[:-1].view(32, 32), whole[1:].view(32, 32)
    kernel = OPS.matmul.compile(aligned, w, target=SM90, options=options)
    for x in (aligned, shifted):
        torch.testing.assert_close(kernel.emulate(x, w), x @ w, rtol=1e-4, atol=1e-4)
    made = kernel.compiled
    assert made.code.aligned
    assert "float4 *>(&A[" in kernel.source()
    assert "float4 *>(&A[" not in compile_gpu(made.bound, made.text, options, made.target, aligned=False).source("cuda")


@needs_compiler
@pytest.mark.parametrize(("dtype", "left"), [("float", {"4"}), ("half", set())])
def test_copies_past_registers_that_start_anywhere(dtype: str, left: set[str]) -> None:
    """Those of several elements are split where addresses may be no multiples of them, and count as relying on that."""
    text = f"def mm({dtype}(M,K) A, {dtype}(K,N) B) -> (C) {{ C(m,n) +=! A(m,k) * B(k,n) }}"
    kind = getattr(torch, dtype)
    whole, w = torch.randn(32 * 32 + 1).to(kind), torch.randn(32, 32).to(kind)
    aligned, shifted = whole[:-1].view(32, 32), whole[1:].view(32, 32)
    options = MappingOptions(tile=(16, 15, 16), threads=(8, 8), shared_memory=True, double_buffer=True)
    kernel = next(iter(tc.define(text))).compile(aligned, w, target=SM90, options=options)
    for x in (aligned, shifted):
        exact = x.float() @ w.float()
        torch.testing.assert_close(
            kernel.emulate(x, w).float(), exact, rtol=2e-2, atol=5e-1 if kind.itemsize < 4 else 1e-4
        )
    made = kernel.compiled
    begun = re.compile(r"memcpy_async\(&\w+_shared.*, &A\[.*, (\d+)\);")
    assert made.code.aligned
    assert "16" in begun.findall(kernel.source())
    anywhere = compile_gpu(made.bound, made.text, options, made.target, aligned=False)
    assert set(begun.findall(anywhere.source("cuda"))) == left
    assert not anywhere.code.aligned


@needs_compiler
def test_gather_and_its_check() -> None:
    table, words = torch.randn(9, 6), torch.tensor([1, 8, 0, 3])
    kernel = OPS.lookup.compile(table, words, target=SM90)
    assert torch.equal(kernel.emulate(table, words), table[words])
    with pytest.raises(RangeError, match="'table' is out of bounds in dimension 0"):
        kernel.emulate(table, torch.tensor([1, 9, 0, 3]))


@needs_compiler
def test_small_floats() -> None:
    x, y = torch.randn(2, 40).half()
    z, s = OPS.halves.compile(x, y, target=SM90).emulate(x, y)
    assert torch.equal(z, (x.float() * y.float()).half())
    torch.testing.assert_close(s, x.sum(), rtol=1e-2, atol=1e-2)


@needs_nvrtc
def test_resources() -> None:
    A, B = torch.randn(64, 64), torch.randn(64, 64)
    found = OPS.matmul.compile(A, B, target="cuda:sm_80", options=MappingOptions.naive()).resources
    assert found["kernels"] == 1
    assert found["threads"] == 256
    assert 8 < found["registers"] <= 255
    assert found["spill_bytes"] == found["local_bytes"] == 0


def test_sources() -> None:
    x = torch.randn(5, 40)
    kernel = OPS.softmax.compile(x, target=SM90)
    assert 'extern "C" __global__' in kernel.source()
    assert "def softmax" in kernel.source("cuda").split("*/")[0]
    assert "sizes: x(5, 40)" in kernel.source()
    assert "__kernel void" in kernel.source("opencl")
    assert "def matmul" not in kernel.source()
    assert "def softmax" in kernel.source("tc")
    assert "kernel" in kernel.source("loops")
    assert "blocks" in str(kernel.show())
    with pytest.raises(ArgumentError, match="no source of kind 'llvm'"):
        kernel.source("llvm")
    assert kernel.source() == OPS.softmax.compile(x, target=parse_gpu_target(SM90)).source()
    assert "sm_90" in repr(kernel)


def test_stages_are_dumped(tmp_path: Path) -> None:
    with knobs.override_knobs(dump=str(tmp_path)):
        OPS.matmul.compile(torch.randn(7, 5), torch.randn(5, 3), target=SM90)
    (folder,) = tmp_path.iterdir()
    names = sorted(p.name for p in folder.iterdir())
    assert names[0] == "00_def.tc"
    assert "06_emit.cu" in names
    assert "04_schedule.txt" in names


@pytest.mark.parametrize("name", GPUS)
def test_every_named_target(name: str) -> None:
    A, B = torch.randn(64, 64), torch.randn(64, 64)
    assert f"target: {name.removeprefix('cuda:')}" in OPS.matmul.compile(A, B, target=name).source()


A, B = torch.randn(8, 9), torch.randn(9, 7)
MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "no such target": (lambda: OPS.matmul.compile(A, B, target="cuda:sm_10"), ["no target 'cuda:sm_10'", "cuda:sm_90"]),
    "options for a CPU": (
        lambda: OPS.matmul.compile(A, B, target=SM90, options=CpuOptions()), ["CpuOptions", "MappingOptions"],
    ),
    "schedule": (lambda: OPS.matmul.compile(A, B, target=SM90, schedule=tile(m=4)), ["for CPUs"]),
    "too many threads": (
        lambda: OPS.matmul.compile(A, B, target=SM90, options=MappingOptions(threads=(1024, 2))), ["threads", "1024"],
    ),
    "too much shared memory": (
        lambda: OPS.matmul.compile(
            A, B, target=SM90, options=MappingOptions(shared_memory=True, max_shared_memory=300_000)
        ),
        ["max_shared_memory", "232448"],
    ),
    "tensors on the CPU": (lambda: OPS.matmul.compile(A, B, target=SM90)(A, B), ["on the CPU", "emulate"]),
    "other sizes": (lambda: OPS.matmul.compile(A, B, target=SM90).emulate(A[:4], B), ["other sizes"]),
    "dtype": (lambda: OPS.matmul.compile(A.to(torch.complex64), B, target=SM90), ["complex64"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(name: str) -> None:
    call, parts = MISTAKES[name]
    with pytest.raises(TCError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device() -> None:
    with pytest.raises(ArgumentError, match="there is no CUDA device"):
        OPS.matmul.compile(A, B, target="cuda")
    with pytest.raises(ArgumentError, match="there is no CUDA device"):
        OPS.matmul.compile(A, B, options=MappingOptions.naive())


def test_limits_of_a_device() -> None:
    """What a mapping may ask for is checked before anything is made; what a kernel needs, before it is printed."""
    big = b.buffer("big", FLOAT32, (60000,), ir.Space.SHARED)
    body = ir.Allocate((big,), b.store(big, (b.const(0),), 1.0))
    for kernel, message in (
        (ir.Kernel("k", body, ir.Launch((1, 1, 1), (32, 1, 1))), "240000 bytes of shared memory"),
        (ir.Kernel("k", b.NOTHING, ir.Launch((1, 1, 1), (64, 32, 1))), "2048 threads in a block"),
        (ir.Kernel("k", b.NOTHING, ir.Launch((1, 70000, 1), (1, 1, 1))), "70000 blocks along y"),
    ):
        with pytest.raises(ArgumentError, match=f"a kernel of f needs {message}"):
            check_limits("f", kernel, parse_gpu_target(SM90))


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is made all the same."""
    monkeypatch.setattr(nvrtc, "find_cuda_folders", lambda kind: iter(()))
    nvrtc.find_toolchain.cache_clear()
    try:
        kernel = OPS.matmul.compile(torch.randn(3, 4), torch.randn(4, 5), target=SM90)
        assert "registers" not in kernel.resources
        assert "__global__" in kernel.source()
        with pytest.raises(ArgumentError, match="NVRTC, which compiles CUDA, is not installed"):
            kernel.compiled.cubin  # noqa: B018
    finally:
        nvrtc.find_toolchain.cache_clear()


def test_faults_of_ours_are_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor_comprehensions.runtime.emulate.emulator.build_emulated", lambda codes: 1 / 0)
    kernel = OPS.matmul.compile(A, B, target=SM90)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        kernel.emulate(A, B)


# --- on a device -------------------------------------------------------------------------------------------------


@needs_gpu
def test_calls_on_a_device() -> None:
    """Values, streams, destinations, gradients and graphs, where there is a device."""
    a, w = torch.randn(64, 48, device="cuda"), torch.randn(48, 80, device="cuda")
    torch.testing.assert_close(OPS.matmul(a, w), a @ w, rtol=1e-4, atol=1e-4)
    with torch.cuda.stream(torch.cuda.Stream()):
        side = OPS.matmul(a, w)
    torch.cuda.synchronize()
    torch.testing.assert_close(side, a @ w, rtol=1e-4, atol=1e-4)
    out = torch.empty(64, 80, device="cuda")
    assert OPS.matmul(a, w, out=out) is out
    torch.testing.assert_close(out, a @ w, rtol=1e-4, atol=1e-4)
    shifted = torch.randn(65 * 48, device="cuda")[1 : 64 * 48 + 1].view(64, 48)
    torch.testing.assert_close(OPS.matmul(shifted, w), shifted @ w, rtol=1e-4, atol=1e-4)
    w.requires_grad_()
    OPS.matmul(a, w).sum().backward()
    torch.testing.assert_close(w.grad, a.sum(0)[:, None].expand(48, 80), rtol=1e-4, atol=1e-4)


@needs_gpu
def test_captured_in_a_graph() -> None:
    x = torch.randn(33, 70, device="cuda")
    OPS.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS.softmax(x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, x.softmax(1))


@needs_gpu
def test_products_that_are_torchs_on_a_device() -> None:
    """In calls, in a captured graph, and tried by the tuner."""
    layer = tc.define("""
def layer(float(M,K) A, float(K,N) B, float(N) bias) -> (out) {
    C(m,n) +=! A(m,k) * B(k,n)
    out(m,n) = fmax(C(m,n) + bias(n), 0)
}""").layer
    tensors = [torch.randn(*shape, device="cuda") for shape in ((512, 256), (256, 384), (384,))]
    a, w, bias = tensors
    kernel = layer.compile(*tensors, options=MappingOptions(match_library_calls=True))
    for _ in range(2):
        torch.testing.assert_close(kernel(*tensors), (a @ w + bias).relu(), rtol=1e-4, atol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(*tensors)
    a.normal_()
    graph.replay()
    torch.testing.assert_close(y, (a @ w + bias).relu(), rtol=1e-4, atol=1e-4)
    found = layer.autotune(*tensors, devices=["cuda:0"], budget=60, population=8, generations=1).options
    assert isinstance(found, MappingOptions)
    torch.testing.assert_close(layer(*tensors), (a @ w + bias).relu(), rtol=1e-4, atol=1e-4)


@needs_gpu
def test_mistakes_on_a_device_launch_nothing() -> None:
    a, w = torch.randn(6, 4, device="cuda"), torch.randn(4, 5, device="cuda")
    for call, message in (
        (lambda: OPS.matmul(a, w.cpu()), "is on the device cpu"),
        (lambda: OPS.matmul(a.double(), w), "float64"),
        (lambda: OPS.matmul(a, w[0]), "dimensions"),
        (lambda: OPS.matmul(a, w, out=torch.empty(6, 5)), "is on the device cpu"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(RangeError):
        OPS.lookup(torch.randn(4, 3, device="cuda"), torch.tensor([7], device="cuda"))
    torch.cuda.synchronize()
    torch.testing.assert_close(OPS.matmul(a, w), a @ w, rtol=1e-4, atol=1e-4)
