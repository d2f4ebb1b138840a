"""Promotion: what goes to shared memory and registers, that values stay right, and that mistakes in it are caught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.codegen.gpu import cuda_printer, opencl_printer
from tensor_comprehensions.compiler.gpu_passes import GPU_PASSES, GpuPassContext
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import rewrite
from tensor_comprehensions.loop_ir.intrinsics import COPY_ASYNC, WAIT_ASYNC
from tensor_comprehensions.loop_ir.nodes import Buffer, Invoke, Load, Loop, LoopKind, Module, Space, Store
from tensor_comprehensions.loop_ir.rewrite import map_stmt, walk_stmts
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.polyhedral.gpu.post import double_buffer
from tensor_comprehensions.polyhedral.gpu.promote import promote_shared as promotion
from tensor_comprehensions.polyhedral.gpu.promote.copies import BlockCopy
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

SM90 = parse_gpu_target("cuda:sm_90")
needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")

MATMUL = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
TRANSPOSE = "def f(float(M,N) A) -> (O) { O(n,m) = A(m,n) }"
STENCIL = "def f(float(N) A) -> (O) { O(i) = A(i) + A(i+1) + A(i+2) }"
GATHER = "def f(float(E,D) T, int(N) I) -> (O) { O(n,d) = T(I(n),d) + T(n,d) }"
LOOKUP = "def f(float(V,D) T, int(B,L) I, float(D,K) W) -> (O) { O(b,l,k) +=! T(I(b,l),d) * W(d,k) }"
WINDOW = """def f(float(V,D) T, int(B,L) I, float(Q,D,K) W) -> (O) {
    O(b,l,k) +=! T(q + I(b,l),d) * W(q,d,k)
}"""
NESTED = "def f(float(V,D) T, int(N) I, int(B) J, float(D,K) W) -> (O) { O(b,k) +=! T(I(J(b)),d) * W(d,k) }"
PAIRS = "def f(float(V,D) T, int(B) I) -> (O) { O(b,c) +=! T(I(b),d) * T(I(c),d) }"
TURNED = "def f(float(V,D) T, int(B) I) -> (O) { O(d,b) = T(I(b),d) }"
LAYERS = """def f(float(M,K) A, float(K,N) B, float(N) b) -> (H, O) {
    H(m,n) +=! A(m,k) * B(k,n)
    O(m,n) = fmax(H(m,n) + b(n), 0)
}"""
UPDATE = "def f(float(M,K) A, float(K,N) B, float(M,N) D) -> (C) { C(m,n) = D(m,n) * 2  C(m,n) += A(m,k) * B(k,n) }"

SMALL = MappingOptions(tile=(8, 16, 8), threads=(4, 4), shared_memory=True)
BLOCKED = replace(SMALL, private_memory=True, vector_width=4)
DOUBLE = replace(BLOCKED, double_buffer=True)


def module(source: str, options: MappingOptions, **sizes: int) -> Module:
    """What is printed for a def at those sizes."""
    (function,) = compile_source(source)
    value: Any = legalize(bind(function, sizes))
    for step in GPU_PASSES[2:4]:
        value = step.run(value, GpuPassContext(options, SM90))
    assert isinstance(value, Module)
    return value


def find_allocations(m: Module, space: Space) -> dict[str, Buffer]:
    return {b.name: b for kernel in m.kernels for b in rewrite.allocated_buffers(kernel.body) if b.space is space}


def inputs(m: Module) -> dict[str, np.ndarray]:
    """Small integers, so that sums are exact in any order."""
    rng = np.random.default_rng(1)
    found = {}
    for b in m.arguments:
        kind = {"float32": np.float32, "int32": np.int32}[b.type.dtype.name]
        low = 0 if kind is np.int32 else -3
        found[b.name] = np.zeros(b.shape, kind) if b.name in m.written else rng.integers(low, 4, b.shape).astype(kind)
    return found


def run(m: Module) -> dict[str, np.ndarray]:
    arrays = inputs(m)
    assert emulator.run_emulated_code(cuda_printer.emit_cuda(m), m, arrays) == (0, 0)
    return arrays


def product(a: Mapping[str, np.ndarray]) -> np.ndarray:
    return a["A"] @ a["B"]


# --- what is promoted --------------------------------------------------------------------------------------------


def test_operands_of_a_matmul_are_shared_by_threads() -> None:
    shared = find_allocations(module(MATMUL, SMALL, M=32, N=32, K=16), Space.SHARED)
    assert {b.name: b.shape for b in shared.values() if b.name != "C.shared"} == {
        "A.shared": (8, 8),
        "B.shared": (8, 16),
    }


def test_accumulators_and_fragments_are_registers() -> None:
    m = module(MATMUL, BLOCKED, M=32, N=32, K=16)
    own = find_allocations(m, Space.REGISTER)
    assert {b.name: b.shape for b in own.values()} == {
        "C.own": (2, 4),
        "A.own": (2, 4),
        "B.own": (4, 4),
    }
    assert "C.shared" not in find_allocations(m, Space.SHARED)


def test_the_next_tile_is_on_its_way() -> None:
    m = module(MATMUL, DOUBLE, M=32, N=32, K=32)
    assert {b.name: b.shape[0] for b in find_allocations(m, Space.SHARED).values()} == {"A.shared": 2, "B.shared": 2}
    names = [s.name for k in m.kernels for s in walk_stmts(k.body) if isinstance(s, Invoke)]
    assert names.count(COPY_ASYNC) > 1
    tight = module(MATMUL, replace(DOUBLE, max_shared_memory=1024), M=32, N=32, K=32)
    assert all(s.name != COPY_ASYNC for k in tight.kernels for s in walk_stmts(k.body) if isinstance(s, Invoke))


def test_what_is_used_once_in_order_stays() -> None:
    copy = module("def f(float(M,N) A) -> (O) { O(m,n) = A(m,n) }", SMALL, M=32, N=32)
    assert not find_allocations(copy, Space.SHARED)


def test_what_is_read_across_goes_through_shared_memory() -> None:
    shared = find_allocations(
        module(TRANSPOSE, replace(SMALL, tile=(32, 32), threads=(32, 4)), M=64, N=64), Space.SHARED
    )
    (buffer,) = shared.values()
    assert buffer.strides[0] % 2 == 1  # a column lies in as many banks as it has elements


def test_neighbors_of_a_stencil_share_one_buffer() -> None:
    shared = find_allocations(module(STENCIL, replace(SMALL, tile=(16,), threads=(16,)), N=66), Space.SHARED)
    assert {b.name: b.shape for b in shared.values()} == {"A.shared": (18,)}


def test_a_gather_that_uses_rows_once_reads_the_tensor_itself() -> None:
    m = module(GATHER, replace(SMALL, tile=(8, 8)), E=20, D=16, N=16)
    assert all(not name.startswith("T.") for name in find_allocations(m, Space.SHARED))


def test_rows_that_are_looked_up_are_staged_through_the_staged_indices() -> None:
    m = module(LOOKUP, replace(SMALL, tile=(4, 4), threads=(8, 4)), V=50, D=16, B=8, L=8, K=8)
    shared = find_allocations(m, Space.SHARED)
    assert (shared["T.shared"].shape, shared["I.shared"].shape) == ((4, 4, 16), (4, 4))
    text = cuda_printer.emit_cuda(m).source
    gathered = [line for line in text.splitlines() if " &T[" in line or "&T[" in line]
    assert gathered
    assert all("T_shared[" in line and "float4" in line and "I_shared[" in line for line in gathered)


def test_a_window_that_data_moves_is_staged_as_the_paper_says() -> None:
    """`T[q + I[b][l]][d]` becomes `shared_T[q][b][l][d]`."""
    m = module(WINDOW, replace(SMALL, tile=(4, 2), threads=(8, 2, 2)), V=20, D=8, B=8, L=8, Q=3, K=8)
    assert find_allocations(m, Space.SHARED)["T.shared"].shape == (3, 4, 2, 8)


def test_what_is_looked_up_is_staged_only_while_nothing_writes_it() -> None:
    """The values of bytes need no check, so that both statements may be in one kernel."""
    source = """def f(float(V,D) T, uint8(B) I, float(D,K) W) -> (O, J) {
        J(b) = I(b)
        O(b,k) +=! T(J(b),d) * W(d,k)
    }"""
    fused = replace(SMALL, tile=(8,), threads=(8, 4), outer_fusion="max")
    assert "T.shared" not in find_allocations(module(source, fused, V=256, D=16, B=8, K=8), Space.SHARED)
    apart = module(source, replace(fused, outer_fusion="min"), V=256, D=16, B=8, K=8)
    assert "T.shared" in find_allocations(apart, Space.SHARED)


def test_what_follows_a_product_finds_it_in_registers() -> None:
    m = module(LAYERS, BLOCKED, M=32, N=32, K=32)
    assert {"H.own", "O.own"} <= find_allocations(m, Space.REGISTER).keys()
    assert {"A.shared", "B.shared", "b.shared"} == find_allocations(m, Space.SHARED).keys()
    hidden = LAYERS.replace("(H, O)", "(O)")
    assert module(hidden, BLOCKED, M=32, N=32, K=32).temporaries == ()


def test_what_all_tiles_of_terms_share_is_copied_once() -> None:
    scaled = "def f(float(M,K) A, float(K,N) B, float(N) s) -> (C) { C(m,n) +=! A(m,k) * B(k,n) * s(n) }"
    (kernel,) = module(scaled, SMALL, M=32, N=32, K=32).kernels
    loops = [s for s in walk_stmts(kernel.body) if isinstance(s, Loop) and s.kind is LoopKind.SERIAL]
    filled = {
        s.buffer.name for loop in loops for s in walk_stmts(loop) if isinstance(s, Store) and isinstance(s.value, Load)
    }
    assert "A.shared" in filled
    assert "s.shared" in {s.buffer.name for s in walk_stmts(kernel.body) if isinstance(s, Store)} - filled


@pytest.mark.parametrize(("limit", "count"), [(0, 3), (1024 + 256, 2), (600, 1), (100, 0)])
def test_the_budget_holds(limit: int, count: int) -> None:
    options = replace(SMALL, max_shared_memory=limit)
    shared = find_allocations(module(MATMUL, options, M=32, N=32, K=32), Space.SHARED)
    assert len(shared) <= count
    assert sum(promotion.shared_bytes_of(b) for b in shared.values()) <= (limit or SM90.max_shared)


def test_rows_are_padded_only_where_banks_conflict() -> None:
    across = find_allocations(
        module(TRANSPOSE, replace(SMALL, tile=(32, 32), threads=(32, 4)), M=64, N=64), Space.SHARED
    )
    along = find_allocations(
        module(MATMUL, replace(SMALL, tile=(32, 32, 32), threads=(32, 4)), M=64, N=64, K=64), Space.SHARED
    )
    assert across["A.shared"].strides == (33, 1)
    assert along["B.shared"].strides == (32, 1)


def test_temporaries_of_a_kernel_need_no_memory() -> None:
    chain = """def f(float(N,D) X) -> (O) {
        T(n,d) = X(n,d) * 2
        U(n) +=! T(n,d)
        O(n,d) = T(n,d) - U(n)
    }"""
    m = module(chain, replace(SMALL, tile=(4,), threads=(8, 4)), N=16, D=24)
    assert m.temporaries == ()


# --- what options say --------------------------------------------------------------------------------------------


def shapes(m: Module, space: Space) -> dict[str, tuple[int, ...]]:
    return {name: b.shape for name, b in find_allocations(m, space).items() if not name.startswith("C.")}


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, {"A.shared": (8, 32), "B.shared": (32, 32)}),
        (2, {"A.shared": (8, 32), "B.shared": (32, 16)}),
        (3, {"A.shared": (8, 8), "B.shared": (8, 16)}),
        (4, {}),  # threads are mapped above that
    ],
)
def test_copies_to_shared_memory_stand_at_the_depth_given(depth: int, expected: dict[str, tuple[int, ...]]) -> None:
    m = module(MATMUL, replace(SMALL, blocks=(4, 1), shared_depth=depth), M=32, N=32, K=32)
    assert shapes(m, Space.SHARED) == expected


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(2, {}), (3, {}), (4, {"A.own": (2, 4), "B.own": (4, 4)}), (6, {"A.own": (1, 1), "B.own": (1, 4)})],
)
def test_copies_to_registers_stand_at_the_depth_given(depth: int, expected: dict[str, tuple[int, ...]]) -> None:
    m = module(MATMUL, replace(BLOCKED, private_depth=depth), M=32, N=32, K=32)
    assert shapes(m, Space.REGISTER) == expected
    assert "C.own" in find_allocations(m, Space.REGISTER)


def test_loops_of_copies_are_written_out_where_options_say_so() -> None:
    kinds = []
    for unrolled in (False, True):
        options = replace(SMALL, unroll_copy_shared=unrolled)
        (kernel,) = module(MATMUL, options, M=32, N=32, K=32).kernels
        kinds.append({s.kind for s in walk_stmts(kernel.body) if isinstance(s, Loop) and s.var.endswith(".in")})
    assert kinds == [{LoopKind.SERIAL}, {LoopKind.UNROLLED}]


CHAIN = "def f(float(N) A) -> (O) { T(i) = A(i) * 2  O(i) = T(N - 1 - i) + A(i) }"


def test_what_a_kernel_does_not_write_is_read_through_the_cache_where_options_say_so() -> None:
    plain, cached = (
        module(CHAIN, replace(SMALL, tile=(16,), threads=(16,), shared_memory=False, read_only_cache=c), N=40)
        for c in (False, True)
    )
    assert "__ldg" not in cuda_printer.emit_cuda(plain).source
    text = cuda_printer.emit_cuda(cached).source
    assert all(f"__ldg(&{tensor}[" in text for tensor in "AT")  # the second kernel only reads T
    assert "= __ldg" not in opencl_printer.emit_opencl(cached).source


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        replace(SMALL, shared_depth=1),
        replace(SMALL, shared_depth=2, unroll=4, unroll_copy_shared=True),
        replace(BLOCKED, shared_depth=3, private_depth=2, read_only_cache=True),
        replace(BLOCKED, private_depth=4),
    ],
    ids=["outer", "whole rows", "both", "inner"],
)
def test_values_at_other_depths(options: MappingOptions) -> None:
    m = module(MATMUL, options, M=29, N=35, K=13)
    a = run(m)
    np.testing.assert_array_equal(a["C"], product(a))


# --- values ------------------------------------------------------------------------------------------------------

SIZES = ((32, 32, 16), (29, 35, 13), (7, 5, 3))


@needs_compiler
@pytest.mark.parametrize(
    "options", [SMALL, BLOCKED, replace(BLOCKED, shared_memory=False), DOUBLE], ids=["shared", "both", "own", "double"]
)
def test_matmul(options: MappingOptions) -> None:
    modules = [module(MATMUL, options, M=m, N=n, K=k) for m, n, k in SIZES]
    for m, built in zip(modules, emulator.build_emulated([cuda_printer.emit_cuda(m) for m in modules]), strict=True):
        arrays = inputs(m)
        assert emulator.run_emulated_module(built, m, arrays) == (0, 0)
        np.testing.assert_array_equal(arrays["C"], product(arrays))


@needs_compiler
def test_updates_start_from_what_is_there() -> None:
    for options in (SMALL, BLOCKED):
        a = run(module(UPDATE, options, M=13, N=18, K=9))
        np.testing.assert_array_equal(a["C"], 2 * a["D"] + product(a))


@needs_compiler
def test_what_other_leaves_read_is_written_back() -> None:
    for options in (SMALL, BLOCKED):
        a = run(module(LAYERS, options, M=13, N=18, K=9))
        np.testing.assert_array_equal(a["H"], product(a))
        np.testing.assert_array_equal(a["O"], np.maximum(product(a) + a["b"], 0))


@needs_compiler
def test_transposes_stencils_and_gathers() -> None:
    a = run(module(TRANSPOSE, SMALL, M=19, N=33))
    np.testing.assert_array_equal(a["O"], a["A"].T)
    a = run(module(STENCIL, replace(SMALL, tile=(16,), threads=(8,)), N=45))
    np.testing.assert_array_equal(a["O"], a["A"][:-2] + a["A"][1:-1] + a["A"][2:])
    a = run(module(GATHER, replace(SMALL, tile=(4, 8)), E=20, D=12, N=15))
    np.testing.assert_array_equal(a["O"], a["T"][a["I"]] + a["T"][:15])


LOOKED_UP = (
    (LOOKUP, (4, 4), {"V": 30, "D": 12, "B": 9, "L": 7, "K": 10}, lambda a: a["T"][a["I"]] @ a["W"]),
    (NESTED, (8, 8, 8), {"V": 30, "D": 12, "N": 11, "B": 19, "K": 10}, lambda a: a["T"][a["I"][a["J"]]] @ a["W"]),
    (PAIRS, (8, 8, 4), {"V": 30, "D": 13, "B": 19}, lambda a: a["T"][a["I"]] @ a["T"][a["I"]].T),
    (TURNED, (16, 16), {"V": 30, "D": 16, "B": 35}, lambda a: a["T"][a["I"]].T),
    (WINDOW, (4, 4), {"V": 30, "D": 5, "B": 9, "L": 7, "Q": 4, "K": 6},
     lambda a: sum(a["T"][q + a["I"]] @ a["W"][q] for q in range(4))),
)  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("options", [SMALL, replace(BLOCKED, double_buffer=True)], ids=["shared", "both"])
def test_looked_up_rows(options: MappingOptions) -> None:
    modules = [module(text, replace(options, tile=tile), **sizes) for text, tile, sizes, _ in LOOKED_UP]
    assert sum("T.shared" in find_allocations(m, Space.SHARED) for m in modules) >= 4
    built = emulator.build_emulated([cuda_printer.emit_cuda(m) for m in modules])
    for m, emulated, (*_, expected) in zip(modules, built, LOOKED_UP, strict=True):
        arrays = inputs(m)
        assert emulator.run_emulated_module(emulated, m, arrays) == (0, 0)
        np.testing.assert_array_equal(arrays["O"], expected(arrays))


# --- planted faults ----------------------------------------------------------------------------------------------


@needs_compiler
def test_a_missing_barrier_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "BARRIER_STATEMENT", Invoke("commit_async", ()))
    with pytest.raises(InternalError, match=r"race|undefined"):
        run(module(MATMUL, SMALL, M=16, N=16, K=16))


@needs_compiler
def test_a_shrunken_copy_is_an_undefined_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockCopy.statement

    def shrunken(self: BlockCopy, *arguments: Any, **named: Any) -> Any:
        loop = whole(self, *arguments, **named)
        return replace(loop, stop=replace(loop.stop, value=loop.stop.value - 1)) if named["into"] else loop

    monkeypatch.setattr(BlockCopy, "statement", shrunken)
    with pytest.raises(InternalError, match=r"undefined|nothing"):
        run(module(MATMUL, SMALL, M=16, N=16, K=16))


@needs_compiler
def test_a_wrong_box_is_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    real = promotion.bounding_box

    def narrow(footprint: Any) -> Any:
        found = real(footprint)
        if found is None or not found.sides:
            return found
        *rest, last = found.sides
        (stride, extent) = last.digits[-1]
        return replace(found, sides=(*rest, replace(last, digits=((stride, max(1, extent - 1)),))))

    monkeypatch.setattr(promotion, "bounding_box", narrow)
    with pytest.raises(InternalError):
        run(module(MATMUL, SMALL, M=16, N=16, K=16))


@needs_compiler
def test_waiting_for_one_group_too_few_is_an_undefined_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = double_buffer._pipeline_loop

    def hasty(*arguments: Any) -> Any:
        def on_stmt(s: Any) -> Any:
            s = map_stmt(s, lambda e: e, on_stmt)
            return replace(s, attributes=(1,)) if isinstance(s, Invoke) and s.name == WAIT_ASYNC else s

        return on_stmt(real(*arguments))

    monkeypatch.setattr(double_buffer, "_pipeline_loop", hasty)
    with pytest.raises(InternalError, match=r"race|undefined"):
        run(module(MATMUL, DOUBLE, M=16, N=16, K=16))


# --- the large one -----------------------------------------------------------------------------------------------

LARGE = MappingOptions(
    tile=(128, 128, 16),
    threads=(16, 16),
    blocks=(65535, 65535),
    vector_width=4,
    shared_memory=True,
    private_memory=True,
)
PIPELINED = replace(LARGE, double_buffer=True)


def test_large_matmul_moves_vectors() -> None:
    text = cuda_printer.emit_cuda(module(MATMUL, LARGE, M=1024, N=1024, K=1024)).source
    lines = [line for line in text.splitlines() if "A[" in line or "B[" in line or "C[" in line]
    assert lines
    assert all("float4" in line for line in lines)
    shared = [line for line in text.splitlines() if "_shared[" in line and "__shared__" not in line]
    assert all("float4" in line for line in shared)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("options", [LARGE, PIPELINED], ids=["staged", "pipelined"])
def test_large_matmul_fits_into_registers(options: MappingOptions, architecture: str) -> None:
    cubin = nvrtc.compile_text(
        cuda_printer.emit_cuda(module(MATMUL, options, M=1024, N=1024, K=1024)).source, architecture
    )
    (used,) = cubin.resources.values()
    assert (used.local, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers <= 168
