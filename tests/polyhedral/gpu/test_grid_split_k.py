"""Long sums with few results run in parts, in as many blocks as fill the processors, and are right."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from tensor_comprehensions.codegen.gpu import cuda_printer
from tensor_comprehensions.codegen.gpu import opencl_printer as opencl_text
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Buffer, Load, Module, Space, Store
from tensor_comprehensions.loop_ir.rewrite import allocated_buffers, walk_stmt_exprs, walk_stmts
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.polyhedral.gpu.lower_gpu import default_options, lower_gpu
from tensor_comprehensions.runtime import opencl
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

from ...helpers.gpu_suite import Case, case_of, check, map_case, memory_of

H200 = parse_gpu_target("cuda:sm_90")
SMALL = replace(H200, num_sms=16, clock=1e8)
"""One that few blocks fill, and that starts kernels at once beside the time that they take."""
IN_FOUR = MappingOptions(tile=(4, 8, 16), threads=(8, 4), shared_memory=True, private_memory=True, split_k=4)

MM = "def f(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
TMM = "def f(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }"
MTM = "def f(float(K,M) A, float(K,N) B) -> (C) { C(m,n) +=! A(k,m) * B(k,n) }"
BMM = "def f(float(B,M,K) X, float(B,K,N) Y) -> (C) { C(b,m,n) +=! X(b,m,k) * Y(b,k,n) }"
MV = "def f(float(M,K) A, float(K) x) -> (y) { y(m) +=! A(m,k) * x(k) }"
MTV = "def f(float(K,M) A, float(K) x) -> (y) { y(m) +=! A(k,m) * x(k) }"
HALF = MM.replace("float", "float16")
LARGEST = "def f(float(M,K) A, float(K,N) B) -> (C) { C(m,n) max=! A(m,k) + B(k,n) }"
SMALLEST = "def f(float(M,K) A, float(K,N) B) -> (C) { C(m,n) min=! A(m,k) * B(k,n) }"
FACTORS = "def f(float(M,K) A, float(K,N) B) -> (C) { C(m,n) *=! 1.0 + 0.01 * A(m,k) * B(k,n) }"
LAYER = """
def f(float(M,K) A, float(N,K) W, float(N) b) -> (C) {
    C(m,n) = b(n)
    C(m,n) += A(m,k) * W(n,k)
    C(m,n) = fmaxf(C(m,n), 0)
}"""
TWO = """
def f(float(M,K) A, float(K,N) B) -> (C, D) {
    C(m,n) +=! A(m,k) * B(k,n)
    D(n) +=! B(k,n) * C(0,n)
}"""
WEIGHTS = """
def f(float(S,C,H,W) I, float(S,O,P,Q) G) -> (D) {
    D(o,c,i,j) +=! I(s,c,p+i,q+j) * G(s,o,p,q) where i in 0:3, j in 0:3
}"""

CASES = {
    "product": (MM, {"M": 9, "N": 10, "K": 4000}),
    "product with terms left over": (MM, {"M": 9, "N": 10, "K": 4003}),
    "first transposed": (MTM, {"M": 33, "N": 10, "K": 4001}),
    "second transposed": (TMM, {"M": 5, "N": 7, "K": 16001}),
    "batch": (BMM, {"B": 3, "M": 4, "N": 5, "K": 4000}),
    "rows": (MV, {"M": 3, "K": 60000}),
    "columns": (MTV, {"M": 40, "K": 4001}),
    "half": (HALF, {"M": 9, "N": 10, "K": 4000}),
    "largest": (LARGEST, {"M": 9, "N": 10, "K": 4001}),
    "smallest": (SMALLEST, {"M": 9, "N": 10, "K": 4000}),
    "factors": (FACTORS, {"M": 9, "N": 10, "K": 4001}),
    "layer": (LAYER, {"M": 9, "N": 17, "K": 4001}),
    "short layer": (LAYER, {"M": 2, "N": 3, "K": 130}),
    "two": (TWO, {"M": 9, "N": 10, "K": 4001}),
    "weights": (WEIGHTS, {"S": 20, "C": 2, "O": 3, "H": 16, "W": 15, "P": 14, "Q": 13}),
}


def case(name: str) -> Case:
    source, sizes = CASES[name]
    (function,) = compile_source(source)
    rng = np.random.default_rng(len(name))

    arrays = {
        p.name: rng.uniform(-1, 1, [sizes[str(getattr(e, "name", e))] for e in p.extents or ()]).astype(p.dtype.name)
        for p in (*function.parameters, *function.inouts)
    }
    return case_of(name, source, None, arrays, {p.name for p in function.inouts})


def right_everywhere(cases: list[Case], modules: list[Module]) -> None:
    """In the emulator; some on OpenCL, where there is a device, and accepted by NVRTC, where that is installed."""
    codes = [cuda_printer.emit_cuda(m) for m in modules]
    for n, (c, m, code, emulated) in enumerate(zip(cases, modules, codes, emulator.build_emulated(codes), strict=True)):
        arrays = memory_of(c, m)
        assert emulator.run_emulated_module(emulated, m, arrays) == (0, 0), c.name
        check(c, arrays)
        if n % 3 == 0 and nvrtc.is_nvrtc_available():
            assert nvrtc.compile_text(code.source, "sm_90").binary
        if n % 3 == 1 and opencl.is_opencl_available():
            arrays = memory_of(c, m)
            assert opencl.run_opencl(opencl_text.emit_opencl(m), m, arrays) == (0, 0)
            check(c, arrays)


def parts_of(m: Module) -> list[Buffer]:
    return [b for b in m.temporaries if "part" in b.name]


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
def test_by_default() -> None:
    cases = [case(name) for name in CASES if name not in ("short layer", "weights")]
    modules = [map_case(c, None, SMALL) for c in cases]
    for c, m in zip(cases, modules, strict=True):
        assert parts_of(m), c.name
        assert {b.type.dtype.name for b in parts_of(m)} == {"float32"}
        assert blocks(m)[0] > SMALL.num_sms // 2, c.name
    right_everywhere(cases, modules)


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
def test_by_options() -> None:
    pairs = [(case(name), fusion) for name in ("layer", "half", "weights") for fusion in ("preserve3", "max", "min")]
    modules = [map_case(c, replace(IN_FOUR, outer_fusion=fusion), H200) for c, fusion in pairs]
    for (_, fusion), m in zip(pairs, modules, strict=True):
        assert fusion == "max" or [b.shape[0] for b in parts_of(m)] == [4]
    right_everywhere([c for c, _ in pairs], modules)


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
def test_windows_are_staged_a_row_at_a_time() -> None:
    """As much of an image as there is room for, where not all of it fits."""
    c = case("weights")
    modules = [map_case(c, None, replace(H200, max_shared=shared)) for shared in (2048, 1024)]
    for m, shared in zip(modules, (2048, 1024), strict=True):
        staged = [b for k in m.kernels for b in allocated_buffers(k.body)]
        used = sum(4 * prod(b.shape) for b in staged if b.space is Space.SHARED)
        assert 0 < used <= shared
    right_everywhere([c, c], modules)


def test_by_the_loop_program() -> None:
    c = case("short layer")
    m = map_case(c, IN_FOUR, H200)
    assert [b.shape for b in parts_of(m)] == [(4, 2, 3)]
    memory = memory_of(c, m)
    assert interpret(m, memory) == []
    check(c, memory)


# --- where ---------------------------------------------------------------------------------------------------------


def module(source: str, options: MappingOptions | None, name: str = "sm_90", **sizes: int) -> Module:
    (function,) = compile_source(source)
    return lower_gpu(legalize(bind(function, sizes)), options, parse_gpu_target(f"cuda:{name}"))


def blocks(m: Module) -> list[int]:
    return [prod(k.launch.grid) for k in m.kernels if k.launch is not None]


@pytest.mark.parametrize("name", ["sm_75", "sm_90"])
@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        (MM, {"M": 32, "N": 32, "K": 65536}),
        (MM, {"M": 32, "N": 32, "K": 65537}),
        (MM, {"M": 128, "N": 128, "K": 16384}),
        (TMM, {"M": 64, "N": 64, "K": 20000}),
        (MTM, {"M": 64, "N": 64, "K": 100_000}),
        (BMM, {"B": 2, "M": 64, "N": 32, "K": 16384}),
        (MV, {"M": 8, "K": 1 << 20}),
        (MTV, {"M": 256, "K": 100_000}),
        (WEIGHTS, {"S": 32, "C": 8, "O": 16, "H": 58, "W": 58, "P": 56, "Q": 56}),
    ],
)
def test_parts_fill_the_processors(source: str, sizes: dict[str, int], name: str) -> None:
    m = module(source, None, name, **sizes)
    (parts,) = m.temporaries
    processors = parse_gpu_target(f"cuda:{name}").num_sms
    assert len(m.kernels) == 2
    assert processors // 2 < blocks(m)[0] <= 16 * processors
    assert 4 * prod(parts.shape) < sum(4 * prod(b.shape) for b in m.arguments) / 2, "more is written than saved"


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        (MM, {"M": 1024, "N": 1024, "K": 1024}),
        (MM, {"M": 1024, "N": 1024, "K": 8192}),
        (MM, {"M": 32, "N": 32, "K": 512}),
        (TMM, {"M": 128, "N": 256, "K": 32}),
        (MV, {"M": 4096, "K": 4096}),
        (MV, {"M": 10, "K": 1000}),
        (MTV, {"M": 8192, "K": 4096}),
    ],
)
def test_tiles_enough_or_few_terms_stay_one_kernel(source: str, sizes: dict[str, int]) -> None:
    assert len(module(source, None, **sizes).kernels) == 1


def test_options_cut_where_threads_would_idle() -> None:
    options = replace(MappingOptions.naive(), split_k=16)
    assert len(module(MM, options, M=64, N=64, K=4096).kernels) == 2
    assert len(module(MM, options, M=64, N=64, K=100).kernels) == 1, "parts of a few terms"
    assert len(module(MM, options, M=1024, N=1024, K=1024).kernels) == 1, "as many results as threads"


@pytest.mark.parametrize(
    ("source", "sizes"),
    [(MM, {"M": 32, "N": 32, "K": 65536}), (MTV, {"M": 256, "K": 100_000}), (MM, {"M": 512, "N": 512, "K": 512})],
)
def test_a_search_starts_with_as_many_parts(source: str, sizes: dict[str, int]) -> None:
    (function,) = compile_source(source)
    options = default_options(legalize(bind(function, sizes)), H200)
    assert blocks(module(source, options, **sizes))[0] == blocks(module(source, None, **sizes))[0]


def test_what_begins_and_what_follows_a_product_is_with_the_second_stage() -> None:
    m = module(LAYER, None, M=32, N=64, K=16384)
    first, second = m.kernels
    written = {s.buffer.name for s in walk_stmts(first.body) if isinstance(s, Store) and s.buffer.space is Space.GLOBAL}
    read = {e.buffer.name for e in walk_stmt_exprs(second.body) if isinstance(e, Load)}
    assert written == {b.name for b in m.temporaries}
    assert written | {"b"} <= read
    assert not {"A", "W"} & read
