"""What is said of neighboring threads holds for each of them, and is enough for what kernels do."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32, INT64
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.interpret.ops import binary_function
from tensor_comprehensions.loop_ir.intrinsics import ALL_THREADS
from tensor_comprehensions.loop_ir.nodes import (
    BLOCK,
    THREAD,
    Allocate,
    Expr,
    If,
    Invoke,
    Kernel,
    Launch,
    Let,
    Loop,
    Module,
    Space,
    Stmt,
    While,
)
from tensor_comprehensions.loop_ir.uniformity import Uniformity
from tensor_comprehensions.loop_ir.verify import verify

X, Y, Z = (b.var(n) for n in THREAD)
BX, K = b.var(BLOCK[0]), b.var("k")
OUT, ROW = b.buffer("out", FLOAT32, (4096,)), b.buffer("row", INT64, (4096,))
LINE = Launch((2, 1, 1), (256, 1, 1))
PLANE = Launch((2, 1, 1), (16, 16, 1))
BOX = Launch((1, 1, 1), (32, 2, 4))
ODD = Launch((1, 1, 1), (40, 1, 1))


@pytest.mark.parametrize(
    ("launch", "e", "group"),
    [
        (LINE, b.add(BX, K), ALL_THREADS),
        (LINE, X, 1),
        (LINE, b.div(X, 8), 8),
        (LINE, b.div(X, 32), 32),
        (LINE, b.div(X, 128), 128),
        (LINE, b.div(X, 256), ALL_THREADS),
        (LINE, b.lt(X, 128), 128),
        (LINE, b.lt(X, 96), 32),
        (LINE, b.lt(X, 100), 1),
        (LINE, b.eq(b.mod(X, 2), 0), 1),
        (LINE, b.eq(b.div(X, 32), K), 32),
        (LINE, b.div(b.add(b.mul(K, 64), X), 32), 32),
        (LINE, b.div(b.add(b.mul(b.mul(K, K), 64), X), 32), 32),
        (LINE, b.div(b.add(K, X), 32), 1),
        (LINE, b.mod(b.add(b.mul(X, 8), K), 8), ALL_THREADS),
        (LINE, b.div(b.add(b.mul(X, 8), K), 8), 1),
        (LINE, b.mod(b.add(b.mul(X, 8), b.mod(X, 8)), 8), 1),
        (LINE, b.select(b.lt(X, 128), b.div(X, 64), b.const(7)), 32),
        (LINE, b.load(ROW, b.const(0)), 1),
        (PLANE, Y, 8),
        (PLANE, X, 1),
        (PLANE, b.div(Y, 2), 32),
        (PLANE, b.lt(b.add(b.mul(Y, 16), X), 64), 32),
        (PLANE, Z, ALL_THREADS),
        (BOX, Y, 32),
        (BOX, b.div(Z, 2), 128),
        (BOX, b.add(Y, Z), 32),
        (ODD, b.lt(X, 32), 32),
        (ODD, b.lt(X, 40), ALL_THREADS),
    ],
)  # fmt: skip
def test_groups(launch: Launch, e: Expr, group: int) -> None:
    assert Uniformity.of(launch).agreement(e) == group


def random_expr(rng: random.Random, depth: int) -> Expr:
    if depth == 0:
        return rng.choice([X, Y, K, BX, b.const(rng.choice([1, 2, 8, 16, 32, 64]))])
    op = rng.choice(["add", "mul", "div", "mod", "min", "lt"])
    left = random_expr(rng, depth - 1)
    if op in ("div", "mod"):
        return b.binary(op, left, b.const(rng.choice([2, 4, 8, 16, 32, 128])))
    right = random_expr(rng, depth - 1)
    return b.select(b.lt(left, right), left, right) if op == "lt" else b.binary(op, left, right)


def value_of(e: Expr, values: dict[str, int]) -> int:
    match e:
        case b.Const(value):
            return int(value)
        case b.Var(name):
            return values[name]
        case b.Binary(op, left, right):
            f = binary_function(op, left.type.dtype)
            return int(f(np.int64(value_of(left, values)), np.int64(value_of(right, values))))
        case b.Select(c, x, y):
            return value_of(x, values) if value_of(c, values) else value_of(y, values)
    raise AssertionError(e)


def test_what_is_said_of_random_expressions_holds() -> None:
    rng, said = random.Random(5), set()
    points = [(x, y) for y in range(4) for x in range(64)]
    uniform = Uniformity.of(Launch((3, 1, 1), (64, 4, 1)))
    for _ in range(300):
        e = random_expr(rng, rng.choice([1, 2, 3]))
        group = uniform.agreement(e)
        said.add(group)
        for k, block in product((0, 5, 37), (0, 2)):
            found = [value_of(e, {THREAD[0]: x, THREAD[1]: y, "k": k, BLOCK[0]: block}) for x, y in points]
            size = min(group, len(points))
            assert all(found[n] == found[n // size * size] for n in range(len(points))), e
    assert said >= {1, 8, 32, 128, ALL_THREADS}


# --- what `verify` makes of it -----------------------------------------------------------------------------------

WARP_BARRIER, BARRIER = Invoke("warp_barrier", ()), Invoke("barrier", ())


def check(body: Stmt) -> None:
    verify(Module("m", (OUT, ROW), (), (Kernel("k", body, Launch((1, 1, 1), (128, 1, 1))),), (), ("out", "row")))


@pytest.mark.parametrize(
    "body",
    [
        If(b.lt(b.div(X, 32), 2), WARP_BARRIER),
        Let("warp", b.div(X, 32), If(b.eq(b.var("warp"), 1), WARP_BARRIER)),
        Loop("i", b.const(0), b.div(X, 32), WARP_BARRIER),
        Loop("i", b.const(0), b.div(X, 32), If(b.eq(b.var("i"), 1), WARP_BARRIER)),
        If(b.lt(X, 128), BARRIER),
        While(b.eq(b.load(ROW, b.const(0)), 0), BARRIER),
        Loop("i", b.load(ROW, b.div(X, 32)), b.load(ROW, b.const(0)), WARP_BARRIER),
    ],
)
def test_control_flow_that_agrees_in_the_group(body: Stmt) -> None:
    check(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (If(b.lt(b.div(X, 32), 2), BARRIER), "not all threads of a block come to barrier"),
        (If(b.lt(X, 40), WARP_BARRIER), "not all of 32 threads come to warp_barrier"),
        (Loop("i", b.const(0), b.mod(X, 32), WARP_BARRIER), "not all of 32 threads come to warp_barrier"),
        (If(b.eq(b.load(ROW, X), 0), WARP_BARRIER), "not all of 32 threads come to warp_barrier"),
        (If(b.eq(b.load(ROW, b.div(X, 32)), 0), BARRIER), "not all threads of a block come to barrier"),
        (
            Let("lane", b.mod(X, 32), If(b.eq(b.var("lane"), 0), WARP_BARRIER)),
            "not all of 32 threads come to warp_barrier",
        ),
        (
            While(b.eq(b.load(ROW, b.const(0)), 0), b.block(b.store(ROW, (b.const(0),), b.const(1)), WARP_BARRIER)),
            "not all of 32 threads come to warp_barrier",
        ),
        (
            If(b.lt(X, 64), Allocate((b.buffer("s", FLOAT32, (4,), Space.SHARED),), BARRIER)),
            "not all threads of a block allocate it",
        ),
    ],
)
def test_control_flow_that_does_not(body: Stmt, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check(body)
