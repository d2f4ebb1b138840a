"""Clusters of blocks: tiles that one block copies for all, arrivals in other blocks, and faults planted there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.codegen.gpu.opencl_printer import emit_opencl
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.rewrite import map_stmt
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.options import TileOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tiles import specs
from tensor_comprehensions.tiles.check.check_program import check_program
from tensor_comprehensions.tiles.library.hopper import gemm90
from tensor_comprehensions.tiles.products.lower_def import (
    DividedDef,
    buffers_of,
    divide_def,
    lower_divided,
    region_program,
)

from ..helpers.def_products import COMPUTED, SWIGLU, ProductCase, cuda_text, emulate_all, matmul, whole

needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
TARGET = "cuda:sm_90"
SM90 = parse_gpu_target(TARGET)
PAIRS = TileOptions((64, 16, 64), (4, 1), stages=2, instruction="wgmma", cluster=2)
SMALL = ProductCase("small", matmul("m,k", "n,k", "m,n"), ((128, 264), (16, 264)))
CASES = (
    SMALL,
    ProductCase("several", matmul("m,k", "n,k", "m,n"), ((250, 136), (40, 136))),
    ProductCase("across", matmul("k,m", "k,n", "m,n", "bfloat16"), ((136, 128), (136, 32)), ("bfloat16",) * 2),
    ProductCase("bytes", matmul("m,k", "n,k", "m,n", "int8"), ((128, 144), (32, 144)), ("int8",) * 2),
    ProductCase("batch", matmul("z,m,k", "z,n,k", "z,m,n"), ((2, 128, 72), (2, 16, 72))),
    ProductCase("pair", SWIGLU, ((128, 72), (16, 72), (16, 72))),
    ProductCase("computed", COMPUTED, ((128, 72), (32, 72), (128,)), ("float32", "float16", "float32")),
)


def divide(case: ProductCase, options: TileOptions = PAIRS) -> DividedDef:
    return divide_def(case.bind(), options, SM90)


def arguments_of(m: ir.Module, case: ProductCase) -> dict[str, np.ndarray[Any, Any]]:
    out = m.arguments[-1]
    given = [*(x.numpy() for x in case.arguments()), np.zeros(out.shape, np.float16)]
    return {x.name: y.reshape(x.shape) for x, y in zip(m.arguments, given, strict=True)}


@needs_compiler
def test_products_of_clusters_equal_the_reference() -> None:
    kernels = [(case, case.compile(PAIRS, TARGET)) for case in CASES]
    for (case, kernel), found in zip(kernels, emulate_all(kernels), strict=True):
        source = cuda_text(kernel)
        assert "__cluster_dims__(2, 1, 1)" in source, case.name
        assert "_multicast(" in source, case.name
        assert torch.equal(found, case.expected()), case.name


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_decompositions_are_proven(case: ProductCase) -> None:
    found = divide(case)
    for piece in found.regions:
        assert check_program(region_program(piece, buffers_of(found.function), "f", SM90)) >= 3


def test_parts_of_other_tiles_are_no_proof() -> None:
    """Blocks of a cluster must copy parts of the same tile."""
    found = divide(SMALL)
    program = region_program(found.regions[0], buffers_of(found.function), "f", SM90)

    def change(n: Any) -> Any:
        if isinstance(n, specs.Leaf) and n.atom.endswith("_multicast"):
            (tile, (source, at), done) = n.statement.operands  # type: ignore[union-attr]
            moved = (b.add(at[0], b.mul(b.mod(b.var(ir.BLOCK[0]), 2), 8)), *at[1:])
            return replace(n, statement=replace(n.statement, operands=(tile, (source, moved), done)))
        return replace(n, body=tuple(map(change, n.body))) if hasattr(n, "body") else n

    wrong = replace(program, body=tuple(map(change, program.body)))
    with pytest.raises(InternalError, match="holds another element"):
        check_program(wrong)


@needs_compiler
def test_gemm90_with_clusters() -> None:
    x, y = whole((256, 200), "bfloat16", 1), whole((72, 200), "bfloat16", 2)
    kernel = gemm90.compile(x, y, target=TARGET, tile=(128, 32, 64), depth=3, cluster=2)
    assert torch.equal(kernel.emulate(x, y), (x.float() @ y.float().T).bfloat16())
    assert kernel.check() >= 3
    assert "clusters of 2" in kernel.source("tiles")


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
def test_clusters_are_assembled_without_spills() -> None:
    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    source = gemm90.compile(x, x, target=TARGET, cluster=2).source("cuda")
    (found,) = nvrtc.compile_text(source, "sm_90a").resources.values()
    assert (found.local, found.spill_stores, found.spill_loads) == (0, 0, 0)


def test_interpreter_equals_the_reference() -> None:
    m = lower_divided(divide(SMALL), SM90)
    verify(m)
    arrays = arguments_of(m, SMALL)
    assert interpret(m, arrays) == []
    np.testing.assert_array_equal(arrays[m.arguments[-1].name], SMALL.expected().numpy())


# --- planted faults ----------------------------------------------------------------------------------------------

Change = Callable[[ir.Invoke, int], ir.Stmt]
"""Gets a call, and its number among those that are changed; gives what stands in its place."""


def edit_calls(m: ir.Module, name: str, change: Change) -> ir.Module:
    """The module with a change of the calls whose names begin like this."""
    count = 0

    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        nonlocal count
        s = map_stmt(s, lambda e: e, on_stmt)
        if not isinstance(s, ir.Invoke) or not s.name.startswith(name):
            return s
        count += 1
        return change(s, count - 1)

    (kernel,) = m.kernels
    return replace(m, kernels=(replace(kernel, body=on_stmt(kernel.body)),))


def with_attributes(*attributes: int) -> Change:
    return lambda s, _: replace(s, attributes=(*s.attributes[: -len(attributes)], *attributes))


def gone(s: ir.Invoke, _: int) -> ir.Stmt:
    return b.block()


def only(number: int, change: Change) -> Change:
    return lambda s, n: change(s, n) if n == number else s


def of_buffer(name: str, change: Change) -> Change:
    return lambda s, n: change(s, n) if s.operands[0][0].name == name else s


def as_barrier_of_block(s: ir.Invoke, _: int) -> ir.Stmt:
    return ir.Invoke("barrier", ())


def in_own_block(s: ir.Invoke, _: int) -> ir.Stmt:
    """Of the threads that arrive in one block each, only the first arrives, in the own block."""
    return ir.If(b.eq(s.values[0], 0), replace(s, name="barrier_arrive", values=()))


def at_block(number: int) -> Change:
    return lambda s, _: replace(s, values=(b.const(number),))


def both(m: ir.Module) -> ir.Module:
    """Arrivals of the own block only, and stages that wait for no others."""
    return edit_calls(edit_calls(m, "barrier_arrive_cluster", in_own_block), "barrier_init", with_attributes(1))


PART, WHOLE = 64 * 64 * 2 + 8 * 64 * 2, 64 * 64 * 2 + 16 * 64 * 2
FAULTS: dict[str, tuple[Callable[[ir.Module], ir.Module], str]] = {
    "to the first block only": (
        lambda m: edit_calls(m, "tma_load_2_multicast", with_attributes(1)),
        r"deadlock: .*full\[0\].*bytes|bytes: .*full",
    ),
    "to the second block only": (
        lambda m: edit_calls(m, "tma_load_2_multicast", with_attributes(2)),
        r"deadlock: .*full\[0\].*bytes|bytes: .*full",
    ),
    "no barrier at entry": (
        lambda m: edit_calls(m, "cluster_barrier", only(0, as_barrier_of_block)),
        r"(undefined|fence): .*full\[0\]",
    ),
    "no barrier at exit": (lambda m: edit_calls(m, "cluster_barrier", only(1, gone)), r"ended: "),
    "arrivals of the own block": (both, r"race: .* right\["),
    "fewer arrivals": (
        lambda m: edit_calls(m, "barrier_init", of_buffer("empty", with_attributes(1))),
        r"race: .* right\[|other arrivers: .*empty|lapped: .*empty|too many arrivals: .*(empty|full)",
    ),
    "bytes of the own part": (
        lambda m: edit_calls(m, "barrier_expect", with_attributes(PART)), r"bytes: .*full|undefined: .*(left|right)\[",
    ),
    "more bytes": (
        lambda m: edit_calls(m, "barrier_expect", with_attributes(WHOLE + 1024)),
        r"deadlock: .*full\[0\].*lacks 0 arrivals and 1024 bytes",
    ),
    "both arrive at the first block": (
        lambda m: edit_calls(m, "barrier_arrive_cluster", at_block(0)),
        r"deadlock: .*empty|other arrivers|too many arrivals|lapped|race: .* right\[",
    ),
    "a block that is none": (lambda m: edit_calls(m, "barrier_arrive_cluster", at_block(2)), r"block 2 of its cluster"),
    "no wait for both blocks": (
        lambda m: edit_calls(m, "barrier_wait", of_buffer("empty", gone)),
        r"race: .* (left|right)\[|too many arrivals: .*full",
    ),
}  # fmt: skip


@cache
def small_module() -> ir.Module:
    return lower_divided(divide(SMALL), SM90)


@cache
def built_faults() -> dict[str, emulator.Emulated]:
    made = {name: FAULTS[name][0](small_module()) for name in FAULTS}
    return dict(zip(made, emulator.build_emulated([emit_cuda(m) for m in made.values()]), strict=True))


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_emulator_reports(name: str) -> None:
    m = small_module()
    with pytest.raises(InternalError, match=FAULTS[name][1]):
        emulator.run_emulated_module(built_faults()[name], m, arguments_of(m, SMALL))


@pytest.mark.parametrize("name", FAULTS)
def test_interpreter_reports(name: str) -> None:
    m = FAULTS[name][0](small_module())
    with pytest.raises(InternalError, match=FAULTS[name][1]):
        interpret(m, arguments_of(m, SMALL))


def with_launch(m: ir.Module, **fields: Any) -> ir.Module:
    (kernel,) = m.kernels
    assert kernel.launch is not None
    return replace(m, kernels=(replace(kernel, launch=replace(kernel.launch, **fields)),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: edit_calls(m, "tma_load_2_multicast", with_attributes(4)), "to the blocks 100 of 2"),
        (lambda m: edit_calls(m, "tma_load_2_multicast", with_attributes(0)), "to the blocks 0 of 2"),
        (lambda m: with_launch(m, cluster=1), "in a kernel without clusters"),
        (lambda m: with_launch(m, grid=(3, 1, 1)), "3 blocks along x, in clusters of 2"),
        (lambda m: with_launch(m, cluster=16), "a cluster of 16 blocks"),
        (lambda m: with_launch(m, block=(192, 1, 1)), "no whole warpgroups"),
    ],
)
def test_verify_refuses(change: Callable[[ir.Module], ir.Module], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        verify(change(small_module()))


def test_other_languages_have_no_clusters() -> None:
    with pytest.raises(CannotLower):
        emit_opencl(small_module())


# --- warpgroups that lead ----------------------------------------------------------------------------------------

STAGGERED = replace(PAIRS, tile=(128, 32, 64), warps=(8, 1), stages=4, warpgroups="staggered")
EPILOGUE = """def f(bfloat16(M,K) A, bfloat16(N,K) B, bfloat16(N) b, bfloat16(M,N) R) -> (C) {
    S(m,n) +=! float(A(m,k)) * float(B(n,k))
    C(m,n) = bfloat16(fmax(S(m,n) + float(b(n)), 0.0) + float(R(m,n)))
}"""
LED = ProductCase("led", EPILOGUE, ((256, 264), (32, 264), (32,), (256, 32)), ("bfloat16",) * 4)


@needs_compiler
def test_staggered_warpgroups_equal_the_reference() -> None:
    """Also with fewer steps than the lead, several tiles in turn, and without clusters."""
    short = replace(LED, shapes=((256, 64), (32, 64), (32,), (256, 32)))
    many = ProductCase("many", matmul("m,k", "n,k", "m,n"), ((2560, 64), (64, 64)))
    pairs = [(LED, STAGGERED), (short, STAGGERED), (LED, replace(STAGGERED, cluster=1, stages=3))]
    pairs.append((many, replace(STAGGERED, tile=(128, 8, 64), cluster=1)))
    kernels = [(case, case.compile(options, TARGET)) for case, options in pairs]
    assert all("led[0]" in kernel.source("cuda") for _, kernel in kernels)
    assert "for (int i" in kernels[-1][1].source("cuda")
    for (case, _), found in zip(kernels, emulate_all(kernels), strict=True):
        assert torch.equal(found, case.expected()), case.name


def test_staggered_decompositions_are_proven() -> None:
    found = divide(LED, STAGGERED)
    assert check_program(region_program(found.regions[0], buffers_of(found.function), "f", SM90)) >= 3


LEADS: dict[str, tuple[Callable[[ir.Module], ir.Module], str]] = {
    "nothing leads": (
        lambda m: edit_calls(m, "barrier_arrive", of_buffer("led", gone)), r"deadlock: .*(led|empty)\[0\]"
    ),
    "slices are not waited for": (lambda m: edit_calls(m, "barrier_part", gone), r"(race|fence|undefined): .*staged"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", LEADS)
def test_faults_of_staggered_warpgroups_are_reported(name: str) -> None:
    m = LEADS[name][0](lower_divided(divide(LED, STAGGERED), SM90))
    arrays = {x.name: np.zeros(x.shape, np.uint16) for x in m.arguments}
    with pytest.raises(InternalError, match=LEADS[name][1]):
        emulator.run_emulated_code(emit_cuda(m), m, arrays)


# --- options, and refusals ---------------------------------------------------------------------------------------


def test_large_products_form_clusters_by_themselves() -> None:
    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    op = tc.define(matmul("m,k", "n,k", "m,n", "bfloat16")).f
    assert "__cluster_dims__(2, 1, 1)" in op.compile(x, x, target=TARGET).source("cuda")
    alone = op.compile(x, x, target=TARGET, options=TileOptions(cluster=1)).source("cuda")
    assert "cluster_dims" not in alone
    assert "_multicast(" not in alone


@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        (TileOptions(cluster=2), "cuda:sm_80", "the option cluster"),
        (TileOptions(cluster=2, instruction="mma"), TARGET, "the option cluster"),
        (replace(PAIRS, tile=(128, 16, 64), warps=(8, 1)), TARGET, "1 rows of tiles are no clusters of 2"),
        (replace(PAIRS, tile=(64, 8, 64)), TARGET, "cannot copy a part of a right factor each"),
        (replace(PAIRS, warpgroups="staggered"), TARGET, "the option warpgroups"),
        (TileOptions(warpgroups="staggered"), "cuda:sm_80", "the option warpgroups"),
        (TileOptions(warps=(8, 1), stages=2, warpgroups="staggered"), TARGET, "with three stages or more"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: TileOptions, target: str, message: str) -> None:
    with pytest.raises(tc.ArgumentError, match=message):
        SMALL.compile(options, target)


def refuse(message: str, function: Callable[..., None]) -> None:
    x = torch.empty(128, 64, dtype=torch.bfloat16)
    made = tc.tile_kernel("C:[M,N].bf16 <- A:[M,K].bf16, B:[N,K].bf16")(function)
    with pytest.raises(tc.ArgumentError, match=message):
        made.compile(x, x, target=TARGET)


def test_builder_refuses() -> None:
    def odd(k: Any, C: Any, A: Any, B: Any) -> None:
        k.clusters(3)

    def late(k: Any, C: Any, A: Any, B: Any) -> None:
        k.barriers("full", 2, 1)
        k.clusters(2)

    def single(k: Any, C: Any, A: Any, B: Any) -> None:
        k.threads(128)
        s, full = k.shared("s", (64, 64), A.dtype), k.barriers("full", 1, 1)
        (m, _) = k.blocks(C.tile(64, 128))
        with k.one():
            k.move(s, A.tile(64, 64)[m, 0], done=full[0], multicast=True)

    def uneven(k: Any, C: Any, A: Any, B: Any) -> None:
        k.threads(128)
        k.clusters(2)
        k.blocks(C.tile(128, 64))

    def leading(k: Any, C: Any, A: Any, B: Any) -> None:
        load = k.threads(256).tile(128).split(1, 1)[0]
        s = k.shared("s", (3, 64, 64), A.dtype)
        k.ring(4, 3, lambda i, n: k.move(s[i], A.tile(64, 64)[0, 0]), lambda i, n: None, load=load, lead=1)

    refuse("no warpgroup leads by 1 steps", leading)
    refuse("no cluster has so many blocks", odd)
    refuse("k.clusters comes too late", late)
    refuse("only blocks of a cluster copy for each other", single)
    refuse("1 rows of tiles are no whole clusters", uneven)
