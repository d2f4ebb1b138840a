"""The evaluator against a second one: plain Python loops over single elements."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from helpers import bound, run
from test_legalize import PROGRAMS, arrays

from tensor_comprehensions.core.errors import ArgumentError, RangeError
from tensor_comprehensions.tc_lang.ir import (
    Access,
    Binary,
    BoundFunction,
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Role,
    Select,
    Unary,
)
from tensor_comprehensions.tc_lang.reference import evaluator as reference
from tensor_comprehensions.tc_lang.reference.evaluator import evaluate_def

OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
}


def scalar(e: Expr, point: dict[str, int], memory: dict[str, Any]) -> Any:
    """One value of an expression, in Python numbers: floats in double precision."""
    match e:
        case Const(value=value):
            return value
        case Index(name=name):
            return point[name]
        case Access(tensor=tensor, subscripts=subscripts):
            at = tuple(scalar(x, point, memory) for x in subscripts)
            assert all(0 <= x < extent for x, extent in zip(at, memory[tensor].shape, strict=True))
            return memory[tensor][at]
        case Unary(op=op, operand=x):
            v = scalar(x, point, memory)
            return -v if op == "-" else not v
        case Binary(op="&&", left=a, right=b):
            return scalar(a, point, memory) and scalar(b, point, memory)
        case Binary(op="||", left=a, right=b):
            return scalar(a, point, memory) or scalar(b, point, memory)
        case Binary(op="/", left=a, right=b):
            x, y = scalar(a, point, memory), scalar(b, point, memory)
            return x / y if e.dtype.is_float else x // y
        case Binary(op=op, left=a, right=b):
            return OPERATORS[op](scalar(a, point, memory), scalar(b, point, memory))
        case Select(condition=c, then=a, otherwise=b):
            return scalar(a if scalar(c, point, memory) else b, point, memory)
        case Cast(operand=x, dtype=dtype):
            v = scalar(x, point, memory)
            return float(v) if dtype.is_float else bool(v) if dtype.is_bool else math.trunc(v)
        case Call(function=name, arguments=arguments):
            functions = {"exp": math.exp, "fmax": max, "sqrt": math.sqrt, "fabs": abs}
            return functions[name](*(scalar(x, point, memory) for x in arguments))
    raise AssertionError(e)


NEUTRAL = {"+": 0, "*": 1, "min": math.inf, "max": -math.inf}


def loops(b: BoundFunction, inputs: dict[str, Any]) -> dict[str, Any]:
    """The meaning of a function, one element at a time."""
    memory = {t.name: np.array(inputs.get(t.name, np.zeros(t.shape)).tolist(), dtype=object) for t in b.tensors}
    for s in b.statements:
        new = memory[s.target].copy()
        points = [
            dict(zip([i.name for i in s.indices], p, strict=True))
            for p in itertools.product(*(range(i.lower, i.upper) for i in s.indices))
        ]
        writes = [(tuple(scalar(x, p, memory) for x in s.subscripts), scalar(s.value, p, memory)) for p in points]
        if s.reduction is not None and s.initialize:
            new.fill(NEUTRAL[s.reduction])
        for at, value in writes:
            new[at] = value if s.reduction is None else OPERATORS[s.reduction](new[at], value)
        memory[s.target] = new
    return {name: memory[name] for name in b.returns}


MORE = [
    "def f(float(N,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) C(m,n) = fmax(C(m,n), 0) }",
    "def f(float(N,N) I) -> (O) { m(n) max=! I(n,d) O(n,d) = exp(I(n,d)-m(n)) s(n) +=! O(n,d) O(n,d) = O(n,d)/s(n) }",
    "def f(float(N) a, float(K) w) -> (b) { b(i) +=! a(i+k) * w(k) }",
    "def f(float(N) a) -> (b) { b(i) = (i >= 1 && i <= N) ? a(i-1) : 0.0 where i in 0:N+2 }",
    "def f(float(N) a) -> (b) { b(i) +=! j <= i ? a(j) : 0.0 where i in 0:N }",
    "def f(float(N) a, int32(N) I) -> (b) { b(i) = (I(i) > 2 || a(i) < 0) ? a(I(i)) : a(i/2) }",
    "def f(int32(N) a) -> (b, c) { b(i) = (a(i) - 3) / 2 c(i) = (a(i) - 3) % 4 }",
    "def f(float(N) a) -> (b) { b(2*i+j) = a(i) * j where j in 0:2 }",
    "def f(int32(N) a) -> (int32(N) h) { h(a(i)) +=! i + 1 }",
    "def f(float(N,N) a) -> (s, p, x, y) { s +=! a(i,i) p *=! a(i,0) x min=! a(i,j) y(j) max=! abs(a(i,j)) }",
]


@pytest.mark.parametrize("source", PROGRAMS + MORE)
def test_agrees_with_loops(source: str) -> None:
    sizes = {"N": 6} | ({"K": 3} if "K" in source else {})
    b = bound(source, **sizes)
    inputs = arrays(b)
    expected, found = loops(b, inputs), evaluate_def(b, inputs)
    for name in b.returns:
        np.testing.assert_allclose(found[name].astype("f8"), expected[name].astype("f8"), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("chunk", [1, 2, 7, 50])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in PROGRAMS + MORE:
        b = bound(source, **({"N": 6} | ({"K": 3} if "K" in source else {})))
        inputs = arrays(b)
        whole = evaluate_def(b, inputs)
        with monkeypatch.context() as m:
            m.setattr(reference, "CHUNK", chunk)
            pieces = evaluate_def(b, inputs)
        for name in b.returns:
            np.testing.assert_allclose(pieces[name].astype("f8"), whole[name].astype("f8"), rtol=1e-6)


def test_inputs_are_not_modified() -> None:
    source = "def f(float(N) a) -> (b) { b(i) += a(i) b(i) = b(i) * 2.0 }"
    a, b = np.ones(3, "f4"), np.full(3, 2, "f4")
    result = evaluate_def(bound(source, N=3), {"a": a, "b": b})
    assert result["b"].tolist() == [6, 6, 6]
    assert (a.tolist(), b.tolist()) == ([1, 1, 1], [2, 2, 2])


def test_bfloat16_rounds_to_nearest_even() -> None:
    a = np.array([1.0, 1.00390625, 1.01171875, 3.0e38, -np.inf, np.nan], "f4")
    out = run("def f(float(N) a) -> (b) { b(i) = bfloat16(a(i)) }", a=a)["b"]
    np.testing.assert_array_equal(out[[0, 1, 2, 4, 5]], [1.0, 1.0, 1.015625, -np.inf, np.nan])
    assert abs(out[3] - 3.0e38) <= 2**-9 * 3.0e38
    assert (out.view(np.uint32) & 0xFFFF).tolist() == [0] * 6


@pytest.mark.parametrize(
    ("source", "values", "expected"),
    [
        ("int8(a(i))", [1.9, -1.9, 127.0], [1, -1, 127]),
        ("uint8(int32(a(i)))", [256.0, 257.0, -1.0], [0, 1, 255]),
        ("int32(a(i) > 0.5)", [0.0, 1.0, 2.0], [0, 1, 1]),
        ("min(a(i), 0.0)", [math.nan, 1.0, -1.0], [math.nan, 0, -1]),
        ("fmin(a(i), 0.0)", [math.nan, 1.0, -1.0], [0, 0, -1]),
        ("relu(a(i))", [math.nan, 1.0, -1.0], [math.nan, 1, 0]),
        ("sigmoid(a(i))", [-200.0, 0.0, 200.0], [0, 0.5, 1]),
        ("round(a(i))", [0.5, -0.5, 2.5], [1, -1, 3]),
        ("abs(int32(a(i)))", [-3.0, 3.0, 0.0], [3, 3, 0]),
        ("7 / int32(a(i))", [0.0, 2.0, -2.0], [0, 3, -4]),
        ("7 % int32(a(i))", [0.0, 2.0, -2.0], [0, 1, -1]),
    ],
)
def test_values(source: str, values: list[float], expected: list[float]) -> None:
    out = run(f"def f(float(N) a) -> (b) {{ b(i) = {source} }}", a=np.array(values, "f4"))["b"]
    np.testing.assert_array_equal(out, np.array(expected, out.dtype))


def test_integers_wrap() -> None:
    out = run("def f(int8(N) a) -> (b, s) { b(i) = a(i) + a(i) s +=! a(i) }", a=np.full(3, 100, "i1"))
    assert out["b"].tolist() == [-56] * 3
    assert out["s"].item() == 300 - 256


def test_float_sums_round_once() -> None:
    a = np.full(100_000, 0.1, "f4")
    out = run("def f(float(N) a) -> (s) { s +=! a(i) }", a=a)["s"]
    assert out == np.float32(a.astype("f8").sum())


def test_out_of_bounds_names_tensor_dimension_and_value() -> None:
    source = "def f(float(N,M) a, int32(K) I) -> (b) { b(i,j) = a(j,I(i)) }"
    with pytest.raises(RangeError) as e:
        run(source, a=np.zeros((2, 3), "f4"), I=np.array([0, 2, -7, 9], "i4"))
    assert "'a'" in e.value.message
    assert "dimension 1" in e.value.message
    assert (e.value.expected, e.value.found) == ("0 to 2", "-7")


def test_no_check_for_an_empty_domain() -> None:
    out = run(
        "def f(float(N) a, int32(K) I, float(E) e) -> (b) { b(i) +=! a(I(i)) * e(k) }",
        a=np.zeros(0, "f4"),
        I=np.array([5], "i4"),
        e=np.zeros(0, "f4"),
    )
    assert out["b"].tolist() == [0.0]


@pytest.mark.parametrize(
    "wrong", [{}, {"a": np.zeros(4, "f4")}, {"a": np.zeros(3, "f8")}, {"a": np.zeros((3, 1), "f4")}]
)
def test_wrong_arrays(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        evaluate_def(bound("def f(float(N) a) -> (b) { b(i) = a(i) }", N=3), wrong)


def test_every_role() -> None:
    b = bound("def f(float(N) a) -> (b, c) { t(i) = a(i) b(i) = t(i) c(i) += t(i) }", N=3)
    assert [t.role for t in b.tensors] == [Role.INPUT, Role.OUTPUT, Role.INOUT, Role.TEMPORARY]
