"""Who writes another language in a def is told how this one says it."""

from __future__ import annotations

import pytest

import tensor_comprehensions as tc

BODIES = {
    "y[i] = x(i)": "round brackets",
    "y(i) = x(i);": "need no end",
    "// twice\n y(i) = x(i)": "starts with '#'",
    "y(i) = x(i)**2": "pow(x, 2)",
    "y(i) = x(i)^2": "pow(x, 2)",
    "y(i) = x(i) // 2": "rounds down",
    "y(i) = x(i) /* twice */": "starts with '#'",
    "y(i) := x(i)": "written with '='",
    "for i: y(i) = x(i)": "for all values of its indices",
    "y(i) = x(i) where i in 0:N:2": "2 * i",
    "y(i) = x(i) if x(i) > 0 else 0": "condition ? this : that",
    "y(i) +=! x(i+k) where k in 0..3": "0:3",
    "y(i) +=! x(i+k) where k in range(3)": "0:3",
    "y(i) = if x(i) > 0 then 1 else 0": "condition ? this : that",
    "y(i) = x(i) > 0 and x(i) < 1 ? 1 : 0": "&&",
    "y(i) = x(i) > 0 or x(i) < 1 ? 1 : 0": "||",
    "y(i) = silu(x(i))": "x * sigmoid(x)",
    "y(i) = sum(x(i))": "+=!",
    "y(i) = tnah(x(i))": "did you mean 'tanh'?",
}
PROGRAMS = {
    "def f(float[N] x) -> (y) { y(i) = x(i) }": "round brackets",
    "def f(tensor(N) x) -> (y) { y(i) = x(i) }": "'tensor' is no type: write one of bfloat16, bool",
    "def f(float(N) x, f32(N) z) -> (y) { y(i) = x(i) }": "'f32' is no type",
    "matmul.tc": "Path(...).read_text()",
}


@pytest.mark.parametrize("program", [*PROGRAMS, *BODIES])
def test_a_hint(program: str) -> None:
    hint = PROGRAMS.get(program) or BODIES[program]
    text = program if program in PROGRAMS else f"def f(float(N) x) -> (y) {{ {program} }}"
    with pytest.raises((tc.ParseError, tc.CheckError)) as caught:
        tc.define(text)
    assert hint in caught.value.suggestion


@pytest.mark.parametrize(
    "text", ["def f(float(N) x) -> (y) { y(i) = x(i) * }", "def f(float(N) x) -> (y) { y(i) x(i) }"]
)
def test_where_nobody_knows_nothing_is_said(text: str) -> None:
    with pytest.raises(tc.ParseError) as caught:
        tc.define(text)
    assert caught.value.suggestion == ""


def test_a_program_is_not_a_function() -> None:
    program = tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }")
    with pytest.raises(tc.ArgumentError, match="is called by the name of a def"):
        program(1)
