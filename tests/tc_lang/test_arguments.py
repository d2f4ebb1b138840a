"""Sizes from arguments, and what is wrong with them."""

from __future__ import annotations

import pytest
from helpers import compile_last_def

from tensor_comprehensions.core.dtypes import FLOAT32, FLOAT64, INT32
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.core.memory_layout import contiguous_strides
from tensor_comprehensions.tc_lang.binding.match_arguments import Binding, TensorType, match_arguments


def f32(*shape: int) -> TensorType:
    return TensorType(FLOAT32, shape, contiguous_strides(shape))


F = compile_last_def(
    "def f(float(N,M) A, float(N) x, int s, float(4) w) -> (y) { y(i) += A(i,j) * x(s*i) where exists w(0) }"
)
S = TensorType(INT32, (), ())
GOOD = (f32(3, 5), f32(3), S, f32(4))


def test_match() -> None:
    types = (TensorType(FLOAT32, (3, 5), (1, 3)), *GOOD[1:])
    assert match_arguments(F, types, {"y": f32(3)}, {"s": 1}) == Binding(
        {"N": 3, "M": 5}, {"s": 1}, {"A": (1, 3), "x": (1,), "s": (), "w": (1,), "y": (1,)}
    )


@pytest.mark.parametrize(
    ("position", "type_", "message", "expected", "found"),
    [
        (0, f32(3), "'A' has another number of dimensions", "2", "1, shape (3,)"),
        (0, TensorType(FLOAT64, (3, 5), (5, 1)), "'A' has another type", "float32", "float64"),
        (1, f32(4), "dimension 0 of 'x' has another size than dimension 0 of 'A'", "N = 3", "4"),
        (3, f32(5), "dimension 0 of 'w' has another size than declared", "4", "5"),
        (2, f32(), "'s' has another type", "int32", "float32"),
    ],
)
def test_wrong_tensor(position: int, type_: TensorType, message: str, expected: str, found: str) -> None:
    types = list(GOOD)
    types[position] = type_
    with pytest.raises(ArgumentError) as e:
        match_arguments(F, types, {"y": f32(3)}, {"s": 1})
    assert message in e.value.message
    assert expected in e.value.expected
    assert e.value.found == found


@pytest.mark.parametrize(
    ("types", "initial", "scalars", "message"),
    [
        (GOOD[:2], {"y": f32(3)}, {"s": 1}, "takes 4 argument(s)"),
        ((*GOOD, f32()), {"y": f32(3)}, {"s": 1}, "takes 4 argument(s)"),
        (GOOD, {}, {"s": 1}, "reads its output 'y' before it defines it"),
        (GOOD, {"y": f32(3), "z": f32(3)}, {"s": 1}, "no in/out output 'z'"),
        (GOOD, {"y": f32(4)}, {"s": 1}, "dimension 0 of the initial value of 'y'"),
        (GOOD, {"y": f32(3, 1)}, {"s": 1}, "'y' has another number of dimensions"),
        (GOOD, {"y": f32(3)}, {}, "needs the value of 's'"),
    ],
)
def test_wrong_call(
    types: tuple[TensorType, ...], initial: dict[str, TensorType], scalars: dict[str, int], message: str
) -> None:
    with pytest.raises(ArgumentError) as e:
        match_arguments(F, types, initial, scalars)
    assert message in e.value.message


def test_sizes_of_declared_outputs_come_from_the_call() -> None:
    f = compile_last_def("def h(int32(N) I) -> (int32(B) H) { H(I(n)) += 1 }")
    i = TensorType(INT32, (7,), (1,))
    assert match_arguments(f, [i], {"H": TensorType(INT32, (9,), (1,))}).sizes == {"N": 7, "B": 9}
