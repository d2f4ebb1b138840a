"""The meaning of shuffles, what passes make of them and what the verifier refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32, FLOAT64
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Kernel, Loop, LoopKind, Module, Shuffle, Stmt
from tensor_comprehensions.loop_ir.passes.simplify import simplify
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.loop_ir.rewrite import substitute
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify

X, OUT = build.buffer("x", FLOAT32, (9,)), build.buffer("out", FLOAT32, (4,))
LEFT, RIGHT = build.load(X, build.ramp(0, 1, 4)), build.load(X, build.ramp(5, 1, 4))
WHERE = (build.ramp(0, 1, 4),)


def module(body: Stmt) -> Module:
    return Module("test", (X, OUT), (), (Kernel("test", body),), written=("out",))


def test_meaning() -> None:
    m = module(build.store(OUT, WHERE, build.shuffle(LEFT, RIGHT, (3, 4, 7, 0))))
    verify(m)
    x, out = np.arange(9, dtype=np.float32), np.zeros(4, np.float32)
    interpret(m, {"x": x, "out": out})
    np.testing.assert_array_equal(out, [3, 5, 8, 0])
    assert "shuffle(x[ramp(0, 1, 4)], x[ramp(5, 1, 4)], [3, 4, 7, 0])" in format_program(m)


def test_all_of_the_left_is_the_left() -> None:
    assert build.shuffle(LEFT, RIGHT, (0, 1, 2, 3)) is LEFT
    assert build.shuffle(LEFT, RIGHT, (0, 1)).type == build.shuffle(LEFT, RIGHT, (1, 0)).type


def test_passes_keep_it() -> None:
    e = build.shuffle(LEFT, build.var("v", FLOAT32, 4), (0, 4, 1, 5))
    assert substitute(e, {"v": RIGHT}) == build.shuffle(LEFT, RIGHT, (0, 4, 1, 5))
    s = build.store(OUT, WHERE, build.shuffle(LEFT, RIGHT, (0, 4, 1, 5)))
    assert simplify(s) is s


def test_vector_loops_refuse_it() -> None:
    body = build.store(OUT, (build.var("i"),), build.reduce_lanes("+", build.shuffle(LEFT, RIGHT, (1, 0))))
    with pytest.raises(CannotLower, match="explicit vectors"):
        vectorize_loops(Loop("i", build.const(0), build.const(4), body, LoopKind.VECTOR, vector_factors=(4, 1)))


@pytest.mark.parametrize(
    "wrong",
    [
        Shuffle(LEFT, RIGHT, (0, 1, 2, 8)),
        Shuffle(LEFT, RIGHT, (0, 1, 2, -1)),
        Shuffle(LEFT, build.load(X, build.ramp(0, 1, 2)), (0, 1, 2, 3)),
        Shuffle(LEFT, build.cast(RIGHT, FLOAT64), (0, 1, 2, 3)),
    ],
)
def test_verifier_refuses(wrong: Shuffle) -> None:
    with pytest.raises(InternalError, match="do not fit"):
        verify(module(build.store(OUT, WHERE, wrong)))
