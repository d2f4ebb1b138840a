"""Products of pairs of bfloat16: what they mean, on processors with and without the instruction, and in C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llvm_harness import assembly, compare, module, random_array, run

from tensor_comprehensions.codegen.c import c_printer
from tensor_comprehensions.core.dtypes import BFLOAT16, FLOAT32, UINT32
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.instructions import DOT_BFLOAT16, PAIR_BFLOAT16
from tensor_comprehensions.loop_ir.nodes import Block, Expr, Let, Loop, Stmt
from tensor_comprehensions.structured.lower.contraction import lower_contraction
from tensor_comprehensions.structured.match.bf16_pairs import pack_bf16_pairs
from tensor_comprehensions.structured.op import Iterator, IteratorKind, StructuredOp, accumulator_var
from tensor_comprehensions.structured.planners.select import rank_plans, register_tile_rankings, why_not_microkernel
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget
from tests.helpers.anywhere import TARGETS

DOTS = replace(AVX512, features=f"{AVX512.features},+avx512bf16")
MACHINES = (*TARGETS, DOTS)
on_machines = pytest.mark.parametrize("target", MACHINES, ids=lambda t: f"{t.name}{'_dots' * t.has_bf16_dot}")
ROWS = 5


def matmul(m: int, n: int, k: int, *, a: str = "mk", b: str = "kn", epilogue: Expr | None = None) -> StructuredOp:
    sizes = {"m": m, "n": n, "k": k}

    def read(name: str, indices: str) -> Expr:
        buffer = ir.buffer(name, BFLOAT16, tuple(sizes[i] for i in indices))
        return ir.cast(ir.load(buffer, *map(ir.var, indices)), FLOAT32)

    kinds = {"m": IteratorKind.PARALLEL, "n": IteratorKind.PARALLEL, "k": IteratorKind.REDUCTION}
    iterators = tuple(Iterator(name, sizes[name], kind) for name, kind in kinds.items())
    out = ir.load(ir.buffer("C", FLOAT32, (m, n)), ir.var("m"), ir.var("n"))
    return StructuredOp("c", iterators, out, read("A", a), read("B", b), epilogue=epilogue)


def lanes_of_pairs(lanes: int) -> Stmt:
    """OUT[r, l] += the products of the pairs (X[r, 2l], X[r, 2l + 1]) and (Y[2l], Y[2l + 1])."""
    x, y = ir.buffer("X", BFLOAT16, (ROWS, 32)), ir.buffer("Y", BFLOAT16, (32,))
    out = ir.buffer("OUT", FLOAT32, (ROWS, 16))
    r, even, odd = ir.var("r"), ir.ramp(0, 2, lanes), ir.ramp(1, 2, lanes)
    if lanes == 1:
        even, odd = ir.const(0), ir.const(1)
    where = (r, ir.ramp(0, 1, lanes) if lanes > 1 else ir.const(0))
    a = ir.call(PAIR_BFLOAT16, ir.load(x, r, even), ir.load(x, r, odd))
    b = ir.call(PAIR_BFLOAT16, ir.load(y, even), ir.load(y, odd))
    total = ir.call(DOT_BFLOAT16, ir.load(out, *where), ir.var("a", UINT32, lanes), ir.var("b", UINT32, lanes))
    body = Let("a", a, Let("b", b, ir.store(out, where, total)))
    return Loop("r", ir.const(0), ir.const(ROWS), body)


@on_machines
@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_pairs_and_their_products(lanes: int, target: CpuTarget) -> None:
    m = module(lanes_of_pairs(lanes))
    arrays = {b.name: random_array(b.type.dtype, b.shape, seed) for seed, b in enumerate(m.arguments)}
    compare(m, arrays, target, rtol=3e-7, atol=1e-6)
    got, _ = run(m, arrays, target)
    products = (arrays["X"] * arrays["Y"])[:, : 2 * lanes].reshape(ROWS, lanes, 2).sum(2)
    np.testing.assert_allclose(got["OUT"][:, :lanes], arrays["OUT"][:, :lanes] + products, rtol=1e-5, atol=1e-5)


@on_machines
def test_infinities_and_nan_pass_through(target: CpuTarget) -> None:
    m = module(lanes_of_pairs(16))
    arrays = {b.name: random_array(b.type.dtype, b.shape) for b in m.arguments}
    arrays["X"][0, :3] = np.inf, 1, np.nan
    arrays["Y"][:2] = 2, -np.inf
    arrays["OUT"][1, 0] = np.inf
    got, _ = run(m, arrays, target)
    assert np.isnan(got["OUT"][0, 0])
    assert np.isnan(got["OUT"][0, 1])
    assert np.isfinite(got["OUT"][1:, 1:]).all()


@pytest.mark.sampled  # orders for each processor
@on_machines
@pytest.mark.parametrize(
    ("sizes", "orders"),
    [
        ((14, 37, 11), ("mk", "kn")),
        ((30, 64, 8), ("mk", "nk")),
        ((9, 20, 33), ("km", "nk")),
        ((8, 16, 2), ("km", "kn")),
    ],
)
def test_products_of_matrices(sizes: tuple[int, int, int], orders: tuple[str, str], target: CpuTarget) -> None:
    """Pairs along contiguous rows and across them, an element without a partner, an epilogue."""
    op = matmul(*sizes, a=orders[0], b=orders[1], epilogue=ir.maximum(accumulator_var(FLOAT32), 0.0))
    pairs = pack_bf16_pairs(op, DOTS)
    assert pairs.pairs
    assert pairs.extent("k") == -(-sizes[2] // 2)
    m = module(lower_contraction(pairs, target, parallel=False))
    arrays = {b.name: random_array(b.type.dtype, b.shape, seed) for seed, b in enumerate(m.arguments)}
    compare(m, arrays, target, rtol=1e-5, atol=1e-4)
    got, _ = run(m, arrays, target)
    expected = np.einsum(f"{orders[0]},{orders[1]}->mn", arrays["A"].astype(float), arrays["B"].astype(float))
    np.testing.assert_allclose(got["C"], np.maximum(expected, 0), rtol=1e-4, atol=1e-4)


def test_only_where_the_machine_has_them_and_elements_are_reused() -> None:
    assert not pack_bf16_pairs(matmul(8, 32, 8), AVX512).pairs
    assert not pack_bf16_pairs(matmul(8, 32, 8), AVX2).pairs
    assert not pack_bf16_pairs(matmul(8, 32, 1), DOTS).pairs
    op = matmul(8, 32, 8)
    assert not pack_bf16_pairs(replace(op, left=ir.add(op.left, 1.0)), DOTS).pairs
    left = ir.cast(ir.load(ir.buffer("A", BFLOAT16, (8,)), ir.var("k")), FLOAT32)
    assert not pack_bf16_pairs(replace(op, left=left), DOTS).pairs  # a vector has no rows
    assert why_not_microkernel(pack_bf16_pairs(matmul(64, 64, 64), DOTS), DOTS) is None


def test_the_instruction_is_used() -> None:
    text = assembly(module(lower_contraction(pack_bf16_pairs(matmul(64, 64, 64), DOTS), DOTS, parallel=False)), DOTS)
    assert "vdpbf16ps" in text
    assert "vfmadd" not in text


def test_the_instruction_broadcasts_pairs_while_it_loads_them() -> None:
    pairs = pack_bf16_pairs(matmul(64, 16, 64, a="mk"), DOTS)
    assert "{1to16}" in assembly(module(lower_contraction(pairs, DOTS, parallel=False)), DOTS)


def test_vectors_without_a_register_are_aligned() -> None:
    text = assembly(module(lower_contraction(pack_bf16_pairs(matmul(64, 80, 64), DOTS), DOTS, parallel=False)), DOTS)
    assert "andq\t$-64, %rsp" in text


@pytest.mark.parametrize(("order", "considered"), [("nk", {"m", "n"}), ("kn", {"n"})])
def test_lanes_may_run_across_short_rows_if_pairs_are_neighbors(order: str, considered: set[str]) -> None:
    """Pairs of elements that lie apart are no scalars to broadcast: two loads would make each."""
    op = pack_bf16_pairs(matmul(2048, 16, 2048, b=order), DOTS)
    _, compared = rank_plans(register_tile_rankings(op, DOTS), DOTS, parallel=False)
    assert {plan.vector for plan in compared} == considered


@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiling the C text needs gcc")
def test_in_c(tmp_path: Path) -> None:
    m = module(Block((lower_contraction(pack_bf16_pairs(matmul(7, 20, 5), DOTS), AVX2, parallel=False),)))
    source, library = tmp_path / "kernel.c", tmp_path / "kernel.so"
    source.write_text(c_printer.emit_c(m))
    flags = ["-std=c99", "-Wall", "-Werror", "-O1", "-fopenmp", "-fwrapv", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, str(source), "-o", str(library), "-lm"], check=True)
    arrays = {b.name: random_array(b.type.dtype, b.shape, seed) for seed, b in enumerate(m.arguments)}
    memory = [
        (a.view(np.uint32) >> 16).astype(np.uint16) if b.type.dtype == BFLOAT16 else a
        for b, a in ((b, arrays[b.name]) for b in m.arguments)
    ]
    assert getattr(ctypes.CDLL(str(library)), m.name)(*(ctypes.c_void_p(a.ctypes.data) for a in memory)) == 0
    np.testing.assert_allclose(arrays["C"], arrays["A"] @ arrays["B"], rtol=1e-5, atol=1e-5)
