"""What is chosen for products and convolutions, as the compiler of CUDA reports it."""

from __future__ import annotations

import pytest

from tensor_comprehensions.codegen.gpu import cuda_printer
from tensor_comprehensions.compiler.gpu_passes import GPU_PASSES, GpuPassContext
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

SM90 = parse_gpu_target("cuda:sm_90")
MATMUL = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
CONVOLUTION = """def conv(float(N,C,H,W) I, float(M,C,KH,KW) F) -> (O) {
    O(n,m,h,w) +=! I(n,c,h+kh,w+kw) * F(m,c,kh,kw)
}"""
LARGE = {"M": 4096, "N": 4096, "K": 4096}
WIDE = {"N": 32, "C": 64, "H": 58, "W": 58, "M": 64, "KH": 3, "KW": 3}
NARROW = {"N": 32, "C": 256, "H": 16, "W": 16, "M": 256, "KH": 3, "KW": 3}


def map_source(source: str, sizes: dict[str, int]) -> Module:
    (function,) = compile_source(source)
    value = legalize(bind(function, sizes))
    for step in GPU_PASSES[2:4]:
        value = step.run(value, GpuPassContext(None, SM90))
    assert isinstance(value, Module)
    return value


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("source", "sizes"),
    [(MATMUL, LARGE), (CONVOLUTION, WIDE), (CONVOLUTION, NARROW)],
    ids=["matmul", "convolution", "narrow convolution"],
)
def test_two_blocks_have_room_on_a_processor(source: str, sizes: dict[str, int], architecture: str) -> None:
    """No spills, at most half of the registers and of the shared memory that both architectures have."""
    (used,) = nvrtc.compile_text(
        cuda_printer.emit_cuda(map_source(source, sizes)).source, architecture
    ).resources.values()
    assert (used.local, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers <= 128
    assert used.shared <= 48 << 10


def test_a_short_side_leaves_the_other_long() -> None:
    (kernel,) = map_source(CONVOLUTION, NARROW).kernels
    assert kernel.launch is not None
    assert kernel.launch.grid == (32, 2, 14)
    assert kernel.launch.block == (14, 16, 1)
