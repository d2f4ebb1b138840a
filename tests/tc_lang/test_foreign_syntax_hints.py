"""A def with the syntax of another language is refused with a hint at ours."""

from __future__ import annotations

import re

import pytest

import tensor_comprehensions as tc
from tensor_comprehensions.tc_lang.syntax.foreign_syntax_hints import _FUNCTIONS

BODIES = {
    "y[i] = x(i)": "round brackets",
    "y(i) = x(i);": "need no end",
    "// twice\n y(i) = x(i)": "starts with '#'",
    "y(i) = x(i)**2": "pow(x, 2)",
    "y(i) = x(i)^2": "pow(x, 2)",
    "y(i) = x(i) // 2": "rounds down",
    "y(i) = x(i) /* twice */": "starts with '#'",
    "y(i) := x(i)": "written with '='",
    "y(i) -= x(i)": "y(i) += -x(i)",
    "y(i) /= x(i)": "y(i) = y(i) / x(i)",
    "y(i) = i << 3": "x * 8",
    "y(i) = i >> 3": "x / 8",
    "y(i) = i & 7": "x % 8",
    "y(i) = i | 7": "joined by ||",
    "y(i) = x(i).exp()": "exp(x(i))",
    "y = x": "y(i) = x(i)",
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
    "y(i) = 0.5f * x(i)": "write 0.5, which is a float32 already",
    "y(i) = 1.f * x(i)": "write 1.0",
    "y(i) = .5e3F * x(i)": "write .5e3,",
    "y(i) = 10u * x(i)": "uint32(10)",
    "y(i) = 0.1L * x(i)": "double(0.1)",
    "y(i) = 2x(i)": "written 2 * x",
    "y +=! x(i) where x(i) > 0": "condition ? x : 0",
    "y +=! x(i) where i in 0:N, x(i) > 0": "condition ? x : 0",
    "y +=! x(i) where i > 0": "a range is `i in 0:N`",
    "y +=! x(i) where i == 0": "condition ? x : 0",
    "y +=! x(i) where !x(i)": "condition ? x : 0",
    "y(i) = leaky_relu(x(i))": "x > 0 ? x : 0.01 * x",
    "y(i) = isnan(x(i)) ? 0 : x(i)": "x != x",
    "y(i) = max(x(i), -INFINITY)": "written inf",
    "y(i) = x(i) * M_PI": "3.14159265",
    "y(i) = x(i) * 1e999": "write `inf`",
    "y(inf) = x(inf)": "call the index otherwise",
    "y(i) = w(i)": "did you mean 'x'?",
}
PROGRAMS = {
    "def f(float[N] x) -> (y) { y(i) = x(i) }": "round brackets",
    "def f(tensor(N) x) -> (y) { y(i) = x(i) }": "'tensor' is not a type: write one of bfloat16, bool",
    "def f(float(N) x, f32(N) z) -> (y) { y(i) = x(i) }": "'f32' is not a type",
    "matmul.tc": "Path(...).read_text()",
}


@pytest.mark.parametrize("program", [*PROGRAMS, *BODIES])
def test_a_hint(program: str) -> None:
    hint = PROGRAMS.get(program) or BODIES[program]
    text = program if program in PROGRAMS else f"def f(float(N) x) -> (y) {{ {program} }}"
    with pytest.raises((tc.ParseError, tc.CheckError)) as caught:
        tc.define(text)
    assert hint in caught.value.suggestion


def test_the_caret_stands_under_the_whole_number() -> None:
    text = "def f(float(N) x) -> (y) { y(i) = 0.5f * x(i) }"
    with pytest.raises(tc.ParseError, match=r"'0\.5f' is not a number") as caught:
        tc.define(text)
    assert caught.value.span is not None
    assert text[caught.value.span.start : caught.value.span.end] == "0.5f"
    with pytest.raises(tc.ParseError, match="unexpected"):
        tc.define("def f(float(N) x) -> (y) { y(i) = x.0.5f * x(i) }")


@pytest.mark.parametrize("name", [name for name in _FUNCTIONS if re.fullmatch(r"[^:]*", _FUNCTIONS[name])])
def test_what_is_suggested_for_a_function_is_in_the_language(name: str) -> None:
    for way in _FUNCTIONS[name].split(", or "):
        if "+=!" in way or "(i,j)" in way:
            continue
        value = re.sub(r"\b([xyatcn])\b(?!\()", r"\1(i)", way)
        value = re.sub(r"\bc\(i\)", "(c(i) > 0)", re.sub(r"\b(low|high)\b", "0", value)).replace("%", "/")
        tc.define(
            f"def f(float(N) x, float(N) y, float(N) a, float(N) t, float(N) c, float(N) n) -> (o) {{ o(i) = {value} }}"
        )


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
