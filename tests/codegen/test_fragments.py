"""Products of matrices in fragments: by the interpreter everywhere, and by the instruction where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llvm_harness import assembly, compare, module, random_array
from test_pairs import DOTS, matmul

from tensor_comprehensions.codegen import c
from tensor_comprehensions.dtypes import BFLOAT16, FLOAT32, UINT32
from tensor_comprehensions.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.interpret import interpret
from tensor_comprehensions.loop_ir.intrinsics import (
    FRAGMENT_DOT_BFLOAT16,
    FRAGMENT_LOAD,
    FRAGMENT_STORE,
    FRAGMENT_ZERO,
)
from tensor_comprehensions.loop_ir.nodes import Allocate, Buffer, Expr, Invoke, Module, Space, Stmt
from tensor_comprehensions.loop_ir.show import show
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.structured.apply import plan_of
from tensor_comprehensions.structured.contraction import generate
from tensor_comprehensions.structured.describe import pipeline_of
from tensor_comprehensions.structured.expert import choose
from tensor_comprehensions.structured.normalise import normalise
from tensor_comprehensions.structured.op import Iterator, IteratorKind, StructuredOp, accumulator
from tensor_comprehensions.structured.pairs import paired
from tensor_comprehensions.structured.pipeline import (
    Pipeline,
    fragments,
    pack,
    pad,
    parallel,
    parse,
    peel,
    tile,
    unroll,
)
from tensor_comprehensions.target import Target

TILES = replace(DOTS, name="sapphirerapids", features=f"{DOTS.features},+amx-tile,+amx-bf16")


def checked(op: StructuredOp, p: Pipeline) -> Module:
    """The module that `p` makes of `op`, verified, and the same by the instruction where the processor has it."""
    op = normalise(paired(op, TILES))
    m = module(generate(op, plan_of(p, op, TILES)))
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
    "in place": (32, 32, 64, tile(m=32, n=32) >> pack(B="n1") >> fragments()),
    "in place, one fragment": (16, 16, 32, tile(m=16, n=16) >> pack("B") >> fragments()),
    "in place, short tiles": (48, 40, 32, tile(m=32, n=32) >> pack("B") >> fragments()),
    "both packed": (32, 32, 64, tile(m=32, n=32) >> pack("A", "B") >> fragments()),
    "odd sizes": (33, 35, 37, tile(m=32, n=32) >> pack("A", "B") >> peel("m", "n") >> fragments()),
    "blocks": (70, 70, 33, tile(n=64) >> tile(m=32, n=32) >> pack("A") >> pack(B="n1") >> fragments()),
    "three by one": (48, 16, 32, tile(m=48, n=16) >> pack("B") >> fragments()),
    "one by three": (16, 48, 32, tile(m=16, n=48) >> pack("B") >> fragments()),
    "few rows": (3, 50, 20, tile(m=3, n=32) >> pack("A", "B") >> fragments()),
    "padded columns": (32, 40, 32, tile(m=32, n=32) >> pack("B") >> pad("B") >> fragments()),
    "padded rows": (40, 40, 31, tile(m=32, n=32) >> pack("A", "B") >> pad("A", "B") >> fragments()),
    "together": (64, 96, 64, tile(n=64) >> tile(m=32, n=32) >> pack(B="n1") >> parallel("n1") >> fragments()),
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("orders", [("mk", "kn"), ("km", "nk")])
def test_products_of_matrices(name: str, orders: tuple[str, str]) -> None:
    m, n, k, pipeline = PIPELINES[name]
    if orders[0] == "km":  # not in place then
        packed = any("A" in str(piece) for piece in pipeline.pieces)
        pipeline = pipeline if packed else pipeline >> pack("A")
    program = checked(matmul(m, n, k, a=orders[0], b=orders[1]), pipeline)
    arrays = arrays_of(program)
    expected = np.einsum(f"{orders[0]},{orders[1]}->mn", arrays["A"].astype(float), arrays["B"].astype(float))
    runs(program, expected, arrays)


def test_an_epilogue_and_what_the_output_starts_from() -> None:
    op = matmul(40, 33, 32)
    bias = ir.load(ir.buffer("bias", FLOAT32, (33,)), ir.var("n"))
    op = replace(op, initial=op.output, epilogue=ir.maximum(ir.add(accumulator(FLOAT32), bias), 0.0))
    program = checked(op, tile(m=32, n=32) >> pack("A", "B") >> fragments())
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
    program = checked(op, tile(b=1, m=32, n=32) >> pack(A="b1", B="b1") >> fragments())
    arrays = arrays_of(program)
    expected = np.einsum("btmk,btkn->bmn", arrays["A"].astype(float), arrays["B"].astype(float))
    runs(program, expected, arrays)


def test_the_instruction_is_used_and_the_registers_are_given_back() -> None:
    text = assembly(checked(matmul(64, 64, 64), tile(m=32, n=32) >> pack("B") >> fragments()), TILES)
    assert text.count("tdpbf16ps") == 4
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1
    assert "vdpbf16ps" not in text


def test_the_model_chooses_it_for_all_but_tiny_ones() -> None:
    for size in (32, 64, 129, 256, 1024):
        op = normalise(paired(matmul(size, size, size), TILES))
        plan = choose(op, TILES, parallel=True)
        assert plan.instruction == FRAGMENT_DOT_BFLOAT16
        text = pipeline_of(plan, op)
        assert plan_of(parse(repr(text)), op, TILES) == plan
        assert not choose(op, DOTS, parallel=True).instruction
    small = normalise(paired(matmul(4, 4, 4), TILES))
    assert not choose(small, TILES, parallel=True).instruction


@pytest.mark.parametrize(
    ("pipeline", "why"),
    [
        (tile(m=32, n=32) >> fragments(), "right factor is not packed"),
        (tile(m=64, n=32) >> pack("B") >> fragments(), "exceed 8 registers"),
        (tile(n=32) >> pack("B") >> fragments(), "needs rows"),
        (tile(k=16) >> tile(m=32, n=32) >> pack("B") >> fragments(), "leave reductions untiled"),
        (tile(m=32, n=32) >> pack("B") >> fragments() >> unroll(k=2), "many steps"),
        (tile(m=32, n=32) >> pack("B") >> fragments("other"), "no such instruction"),
        (tile(m=32, n=32) >> pack("B", "A") >> parse("vectorize('n', lanes=8)") >> fragments(), "vectors of 16"),
    ],
)
def test_what_cannot_be(pipeline: Pipeline, why: str) -> None:
    op = normalise(paired(matmul(64, 64, 64), TILES))
    with pytest.raises(CannotLower, match=why):
        plan_of(pipeline, op, TILES)


def test_only_where_memory_holds_fragments_or_panels_do() -> None:
    pipeline = tile(m=32, n=32) >> pack("B") >> fragments()
    for sizes, order in (((40, 64, 64), "mk"), ((64, 64, 33), "mk"), ((64, 64, 64), "km")):
        with pytest.raises(CannotLower, match="left factor is neither packed nor lies in fragments"):
            plan_of(pipeline, normalise(paired(matmul(*sizes, a=order), TILES)), TILES)
    with pytest.raises(CannotLower, match="no such instruction"):
        plan_of(pipeline, normalise(paired(matmul(64, 64, 64), DOTS)), DOTS)


def test_it_prints_and_c_refuses() -> None:
    m = checked(matmul(16, 16, 32), tile(m=16, n=16) >> pack("B") >> fragments())
    text = show(m)
    assert "allocate fragment float32 c.acc[1][16][16]" in text
    assert "fragment_load(&c.rows[0, 0, 0], &A[0, k.r * 16 * 2], 0)" in text
    assert "fragment_dot_bfloat16(&c.acc[0, 0, 0], &c.rows[0, 0, 0], &c.columns[0, 0, 0])" in text
    with pytest.raises(CannotLower, match="no spelling of the intrinsic fragment_"):
        c.emit(m)


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
def test_there_are_only_so_many_registers(count: int, target: Target) -> None:
    buffer: Buffer = ir.buffer("many", UINT32, (count, 16, 16), Space.FRAGMENT)
    zero = Invoke(FRAGMENT_ZERO, ((buffer, ORIGIN),))
    with pytest.raises(InternalError, match="registers for"):
        assembly(module(Allocate((buffer,), zero)), target)
