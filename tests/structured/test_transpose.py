"""Transposition in registers: the butterfly alone, and blocks of it around stores."""

from __future__ import annotations

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import BOOL, DTYPES, FLOAT32, DType
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.interpret.ops import storage_dtype
from tensor_comprehensions.loop_ir.nodes import Buffer, Expr, Kernel, Module, Space, Stmt, Type
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.structured.lower.transpose import Axis, gather_transposed, transpose_loops, transpose_vectors

I, J = build.var("i"), build.var("j")  # noqa: E741


def module(body: Stmt, *buffers: Buffer) -> Module:
    m = Module("test", buffers, (), (Kernel("test", body),), written=(buffers[-1].name,))
    verify(m)
    return m


def values(dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    numbers = np.random.default_rng(0).integers(0, 2 if dtype.is_bool else 120, shape)
    return numbers.astype(storage_dtype(dtype))


@pytest.mark.parametrize("side", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [t for t in DTYPES.values() if t != BOOL], ids=str)
def test_columns_of_registers(dtype: DType, side: int) -> None:
    x, out = build.buffer("x", dtype, (side, side)), build.buffer("out", dtype, (side, side))
    along = build.ramp(0, 1, side)
    columns = transpose_vectors([build.load(x, k, along) for k in range(side)])
    body = build.block(*(build.store(out, (k, along), column) for k, column in enumerate(columns)))
    array, result = values(dtype, (side, side)), np.zeros((side, side), storage_dtype(dtype))
    interpret(module(body, x, out), {"x": array, "out": result})
    np.testing.assert_array_equal(result, array.T)


@pytest.mark.parametrize(("dtype", "side", "expected"), [("float32", 16, 64), ("float32", 8, 24), ("float64", 8, 24)])
def test_shuffles_per_block(dtype: str, side: int, expected: int) -> None:
    """log2(side) rounds of one shuffle per register."""
    x = build.buffer("x", DTYPES[dtype], (side, side))
    made: list[Expr] = []

    def pair(a: Expr, b: Expr, lanes: tuple[int, ...]) -> Expr:
        made.append(build.shuffle(a, b, lanes))
        return made[-1]

    transpose_vectors([build.load(x, k, build.ramp(0, 1, side)) for k in range(side)], pair)
    assert len(made) == expected


@pytest.mark.parametrize("dtype", [BOOL, FLOAT32], ids=str)
@pytest.mark.parametrize("shape", [(8, 16), (5, 3), (9, 8), (1, 17)])
def test_blocks_and_their_edges(dtype: DType, shape: tuple[int, int]) -> None:
    rows, lanes = shape
    x, out = build.buffer("x", dtype, (lanes, rows)), build.buffer("out", dtype, shape)
    read = build.load(x, J, I)
    axes = Axis("i", build.const(0), build.const(rows)), Axis("j", build.const(0), build.const(lanes))
    body = transpose_loops([build.store(out, (I, J), read)], [read], *axes, 8)
    array, result = values(dtype, (lanes, rows)), np.zeros(shape, storage_dtype(dtype))
    interpret(module(body, x, out), {"x": array, "out": result})
    np.testing.assert_array_equal(result, array.T)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
@pytest.mark.parametrize("shape", [(16, 16), (32, 48), (17, 33), (21, 10), (50, 12), (5, 31), (16, 1)])
def test_rows_in_pieces(dtype: str, shape: tuple[int, int]) -> None:
    """Whole blocks, and those of less columns, which read some anew, and of less rows, of which lanes are masked."""
    type, (rows, lanes) = DTYPES[dtype], shape
    side = 16 if rows >= 16 else 4
    x, out = build.buffer("x", type, (lanes, rows)), build.buffer("out", type, shape)
    axes = Axis("i", build.const(0), build.const(rows)), Axis("j", build.const(0), build.const(lanes))
    read = build.load(x, J, I)
    body = transpose_loops([build.store(out, (I, J), read, op="+")], [read], *axes, side, near=True)
    array, result = values(type, (lanes, rows)), np.ones(shape, storage_dtype(type))
    interpret(module(body, x, out), {"x": array, "out": result})
    np.testing.assert_array_equal(result, array.T + 1)


def test_pieces_leave_half_of_the_shuffles() -> None:
    x = build.buffer("x", FLOAT32, (16, 16))
    made: list[tuple[int, ...]] = []

    def pair(a: Expr, b: Expr, lanes: tuple[int, ...]) -> Expr:
        made.append(lanes)
        return build.shuffle(a, b, lanes)

    def part(row: int, first: int, count: int) -> Expr:
        return build.load(x, row, build.ramp(first, 1, count))

    gather_transposed(part, (16, 16), 16, FLOAT32, pair)
    joined = [lanes for lanes in made if lanes == tuple(range(len(lanes)))]
    assert (len(joined), len(made) - len(joined)) == (48, 32)


@pytest.mark.parametrize("near", [False, True])
def test_several_reads_and_values_in_between(near: bool) -> None:
    """A value kept in a register, a read along the lanes, one that all lanes share, and an update."""
    n, m = 11, 6
    x, y = build.buffer("x", FLOAT32, (m + 1, n)), build.buffer("y", FLOAT32, (m, n + 2))
    z, b = build.buffer("z", FLOAT32, (n, m)), build.buffer("b", FLOAT32, (n,))
    held, out = Buffer("held", Type(FLOAT32), (), (), Space.REGISTER), build.buffer("out", FLOAT32, (n, m))
    reads = [build.load(x, build.add(J, 1), I), build.load(y, J, build.add(I, 2))]
    stores = [
        build.store(held, (), build.mul(reads[0], reads[1])),
        build.store(out, (I, J), build.add(build.load(held), build.load(z, I, J)), op="+"),
        build.store(out, (I, J), build.sub(build.load(held), build.load(b, I)), op="max"),
    ]
    axes = Axis("i", build.const(0), build.const(n)), Axis("j", build.const(0), build.const(m))
    body = transpose_loops(stores, reads, *axes, 4, near=near)
    arrays = {c.name: values(FLOAT32, c.shape) for c in (x, y, z, b, out)}
    product = (arrays["x"][1:] * arrays["y"][:, 2:]).T
    expected = np.maximum(arrays["out"] + product + arrays["z"], product - arrays["b"][:, None])
    interpret(module(body, x, y, z, b, out), arrays)
    np.testing.assert_array_equal(arrays["out"], expected)
