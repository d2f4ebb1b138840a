"""Products of matrices in fragments: by the interpreter everywhere, and by the instruction where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llvm_harness import assembly, compare, module, random_array
from test_bf16_pairs import DOTS, matmul

from tensor_comprehensions.codegen.c import c_printer
from tensor_comprehensions.core.dtypes import BFLOAT16, FLOAT32, UINT32
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.intrinsics import (
    FRAGMENT_DOT_BFLOAT16,
    FRAGMENT_LOAD,
    FRAGMENT_STORE,
    FRAGMENT_ZERO,
)
from tensor_comprehensions.loop_ir.nodes import Allocate, Buffer, Expr, Invoke, Module, Space, Stmt
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.structured.language.apply_primitives import plan_of_schedule
from tensor_comprehensions.structured.language.plan_to_schedule import plan_to_schedule
from tensor_comprehensions.structured.language.primitives import (
    Schedule,
    matrix_instruction,
    pack,
    pad,
    parallel,
    parse_schedule,
    peel,
    tile,
    unroll,
)
from tensor_comprehensions.structured.lower.contraction import generate_contraction
from tensor_comprehensions.structured.match.bf16_pairs import pack_bf16_pairs
from tensor_comprehensions.structured.match.drop_unit_dims import drop_unit_dims
from tensor_comprehensions.structured.op import Iterator, IteratorKind, StructuredOp, accumulator_var
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import CpuTarget

TILES = replace(DOTS, name="sapphirerapids", features=f"{DOTS.features},+amx-tile,+amx-bf16")


def lower_checked(op: StructuredOp, p: Schedule) -> Module:
    """The module that `p` makes of `op`, verified, and the same by the instruction where the processor has it."""
    op = drop_unit_dims(pack_bf16_pairs(op, TILES))
    m = module(generate_contraction(op, plan_of_schedule(p, op, TILES)))
    verify(m)
    return m


def runs(m: Module, expected: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    """The interpreter computes `expected` in C, and so does the processor if it can."""
    found = {name: array.copy() for name, array in arrays.items()}
    assert interpret(m, found) == []
    np.testing.assert_allclose(found["C"], expected, rtol=1e-4, atol=1e-4)
    compare(m, arrays, TILES, rtol=1e-5, atol=1e-4)


def arrays_of(m: Module) -> dict[str, np.ndarray]:
    return {b.name: random_array(b.type.dtype, b.shape, seed) for seed, b in enumerate(m.arguments)}


PIPELINES = {
    "in place": (32, 32, 64, tile(m=32, n=32) >> pack(B="n1") >> matrix_instruction()),
    "in place, one fragment": (16, 16, 32, tile(m=16, n=16) >> pack("B") >> matrix_instruction()),
    "in place, short tiles": (48, 40, 32, tile(m=32, n=32) >> pack("B") >> matrix_instruction()),
    "both packed": (32, 32, 64, tile(m=32, n=32) >> pack("A", "B") >> matrix_instruction()),
    "odd sizes": (33, 35, 37, tile(m=32, n=32) >> pack("A", "B") >> peel("m", "n") >> matrix_instruction()),
    "blocks": (70, 70, 33, tile(n=64) >> tile(m=32, n=32) >> pack("A") >> pack(B="n1") >> matrix_instruction()),
    "three by one": (48, 16, 32, tile(m=48, n=16) >> pack("B") >> matrix_instruction()),
    "one by three": (16, 48, 32, tile(m=16, n=48) >> pack("B") >> matrix_instruction()),
    "few rows": (3, 50, 20, tile(m=3, n=32) >> pack("A", "B") >> matrix_instruction()),
    "padded columns": (32, 40, 32, tile(m=32, n=32) >> pack("B") >> pad("B") >> matrix_instruction()),
    "padded rows": (40, 40, 31, tile(m=32, n=32) >> pack("A", "B") >> pad("A", "B") >> matrix_instruction()),
    "together": (64, 96, 64, tile(n=64) >> tile(m=32, n=32) >> pack(B="n1") >> parallel("n1") >> matrix_instruction()),
}


@pytest.mark.sampled  # orders of the operands of each schedule
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("orders", [("mk", "kn"), ("km", "nk")])
def test_products_of_matrices(name: str, orders: tuple[str, str]) -> None:
    m, n, k, pipeline = PIPELINES[name]
    if orders[0] == "km":  # not in place then
        packed = any("A" in str(piece) for piece in pipeline.primitives)
        pipeline = pipeline if packed else pipeline >> pack("A")
    program = lower_checked(matmul(m, n, k, a=orders[0], b=orders[1]), pipeline)
    arrays = arrays_of(program)
    expected = np.einsum(f"{orders[0]},{orders[1]}->mn", arrays["A"].astype(float), arrays["B"].astype(float))
    runs(program, expected, arrays)


def test_an_epilogue_and_what_the_output_starts_from() -> None:
    op = matmul(40, 33, 32)
    bias = ir.load(ir.buffer("bias", FLOAT32, (33,)), ir.var("n"))
    op = replace(op, initial=op.output, epilogue=ir.maximum(ir.add(accumulator_var(FLOAT32), bias), 0.0))
    program = lower_checked(op, tile(m=32, n=32) >> pack("A", "B") >> matrix_instruction())
    arrays = arrays_of(program)
    expected = arrays["C"] + arrays["A"].astype(float) @ arrays["B"] + arrays["bias"]
    runs(program, np.maximum(expected, 0), arrays)


def test_several_sums_and_batches() -> None:
    """C[b, m, n] = sum over t, k of A[b, t, m, k] B[b, t, k, n]."""
    sizes = {"b": 2, "t": 3, "m": 20, "n": 24, "k": 34}

    def read(name: str, indices: str) -> Expr:
        buffer = ir.buffer(name, BFLOAT16, tuple(sizes[i] for i in indices))
        return ir.cast(ir.load(buffer, *map(ir.var, indices)), FLOAT32)

    kinds = {i: IteratorKind.REDUCTION if i in "tk" else IteratorKind.PARALLEL for i in "bmntk"}
    iterators = tuple(Iterator(i, sizes[i], kind) for i, kind in kinds.items())
    out = ir.load(ir.buffer("C", FLOAT32, (2, 20, 24)), *map(ir.var, "bmn"))
    op = StructuredOp("c", iterators, out, read("A", "btmk"), read("B", "btkn"))
    program = lower_checked(op, tile(b=1, m=32, n=32) >> pack(A="b1", B="b1") >> matrix_instruction())
    arrays = arrays_of(program)
    expected = np.einsum("btmk,btkn->bmn", arrays["A"].astype(float), arrays["B"].astype(float))
    runs(program, expected, arrays)


def test_the_instruction_is_used_and_the_registers_are_given_back() -> None:
    text = assembly(lower_checked(matmul(64, 64, 64), tile(m=32, n=32) >> pack("B") >> matrix_instruction()), TILES)
    assert text.count("tdpbf16ps") == 4
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1
    assert "vdpbf16ps" not in text


def test_the_model_chooses_it_for_all_but_tiny_ones() -> None:
    for size in (32, 64, 129, 256, 1024):
        op = drop_unit_dims(pack_bf16_pairs(matmul(size, size, size), TILES))
        plan = select_plan(op, TILES, parallel=True)
        assert plan.instruction == FRAGMENT_DOT_BFLOAT16
        text = plan_to_schedule(plan, op)
        assert plan_of_schedule(parse_schedule(repr(text)), op, TILES) == plan
        assert not select_plan(op, DOTS, parallel=True).instruction
    small = drop_unit_dims(pack_bf16_pairs(matmul(4, 4, 4), TILES))
    assert not select_plan(small, TILES, parallel=True).instruction


@pytest.mark.parametrize(
    ("pipeline", "why"),
    [
        (tile(m=32, n=32) >> matrix_instruction(), "right factor is not packed"),
        (tile(m=64, n=32) >> pack("B") >> matrix_instruction(), "exceed 8 registers"),
        (tile(n=32) >> pack("B") >> matrix_instruction(), "needs rows"),
        (tile(k=16) >> tile(m=32, n=32) >> pack("B") >> matrix_instruction(), "leave reductions untiled"),
        (tile(m=32, n=32) >> pack("B") >> matrix_instruction() >> unroll(k=2), "many steps"),
        (tile(m=32, n=32) >> pack("B") >> matrix_instruction("other"), "no such instruction"),
        (
            tile(m=32, n=32) >> pack("B", "A") >> parse_schedule("vectorize('n', lanes=8)") >> matrix_instruction(),
            "vectors of 16",
        ),
    ],
)
def test_what_cannot_be(pipeline: Schedule, why: str) -> None:
    op = drop_unit_dims(pack_bf16_pairs(matmul(64, 64, 64), TILES))
    with pytest.raises(CannotLower, match=why):
        plan_of_schedule(pipeline, op, TILES)


def test_only_where_memory_holds_fragments_or_panels_do() -> None:
    pipeline = tile(m=32, n=32) >> pack("B") >> matrix_instruction()
    for sizes, order in (((40, 64, 64), "mk"), ((64, 64, 33), "mk"), ((64, 64, 64), "km")):
        with pytest.raises(CannotLower, match="left factor is not packed, nor stored in tiles"):
            plan_of_schedule(pipeline, drop_unit_dims(pack_bf16_pairs(matmul(*sizes, a=order), TILES)), TILES)
    with pytest.raises(CannotLower, match="no such instruction"):
        plan_of_schedule(pipeline, drop_unit_dims(pack_bf16_pairs(matmul(64, 64, 64), DOTS)), DOTS)


def test_it_prints_and_c_refuses() -> None:
    m = lower_checked(matmul(16, 16, 32), tile(m=16, n=16) >> pack("B") >> matrix_instruction())
    text = format_program(m)
    assert "allocate fragment float32 c.acc[1][16][16]" in text
    assert "fragment_load(&c.rows[0, 0, 0], &A[0, k.r * 16 * 2], 0)" in text
    assert "fragment_dot_bfloat16(&c.acc[0, 0, 0], &c.rows[0, 0, 0], &c.columns[0, 0, 0])" in text
    with pytest.raises(CannotLower, match="no spelling of the intrinsic fragment_"):
        c_printer.emit_c(m)


SUMS = ir.buffer("sums", FLOAT32, (1, 16, 16), Space.FRAGMENT)
MEMORY = ir.buffer("memory", FLOAT32, (24, 16))
ORIGIN = (ir.const(0), ir.const(0), ir.const(0))


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        (ir.store(SUMS, (0, 0, 0), ir.const(0.0, FLOAT32)), "only intrinsics reach them"),
        (Invoke(FRAGMENT_ZERO, ((MEMORY, (ir.const(0), ir.const(0))),)), "no fragment"),
        (Invoke(FRAGMENT_STORE, ((MEMORY, (ir.const(9), ir.const(0))), (SUMS, ORIGIN)), (0,)), "not proved inside"),
        (Invoke(FRAGMENT_LOAD, ((SUMS, ORIGIN), (MEMORY, (ir.const(0), ir.const(0)))), (1,)), "other ranks"),
    ],
)
def test_the_verifier_knows_fragments(statement: Stmt, why: str) -> None:
    with pytest.raises(InternalError, match=why):
        verify(module(Allocate((SUMS,), statement)))


def test_the_interpreter_sees_what_is_undefined() -> None:
    m = module(Allocate((SUMS,), Invoke(FRAGMENT_STORE, ((MEMORY, (ir.const(0), ir.const(0))), (SUMS, ORIGIN)), (0,))))
    with pytest.raises(InternalError, match="undefined"):
        interpret(m, {"memory": np.zeros((24, 16), np.float32)})


@pytest.mark.parametrize(("count", "target"), [(9, TILES), (1, DOTS)])
def test_there_are_only_so_many_registers(count: int, target: CpuTarget) -> None:
    buffer: Buffer = ir.buffer("many", UINT32, (count, 16, 16), Space.FRAGMENT)
    zero = Invoke(FRAGMENT_ZERO, ((buffer, ORIGIN),))
    with pytest.raises(InternalError, match="registers for"):
        assembly(module(Allocate((buffer,), zero)), target)
