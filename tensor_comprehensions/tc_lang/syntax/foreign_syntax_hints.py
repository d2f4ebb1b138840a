"""Hints for syntax of other languages: how to write what it probably means."""

from __future__ import annotations

import re

from ...core.dtypes import ALIASES, DTYPES

NEAR = 1000
"""Characters before and after a mistake that hints search: some of their patterns take quadratic time."""
_BRACKETS = "subscripts and sizes stand in round brackets: x(i), float(N) x"
_RANGE = "a range is written first:end, as in `where k in 0:3`"
_CLAUSE = r"\bwhere\s(?:[^{}]*,)?\s*\w+\s*"
_CONDITION = (
    "a condition stands in the value, `condition ? x : 0`, with what changes nothing where it does not hold: "
    "0 for +=, 1 for *=, inf for min=, -inf for max=; a range is `i in 0:N`"
)
_SYNTAX = (
    ("", r"[\[\]]", _BRACKETS),
    ("", r";", "statements need no end: one follows the other, on one line or on several"),
    ("", r"//|/\*", "a comment starts with '#'"),
    ("/", r"/", "'/' of integers rounds down; a comment starts with '#'"),
    ("/", r"\*", "a comment starts with '#'"),
    ("", r"@", "a product of matrices is C(m,n) +=! A(m,k) * B(k,n)"),
    (r"\*", r"\*", "a power is pow(x, 2), or x * x"),
    ("", r"\^", "a power is pow(x, 2), or x * x"),
    ("", r":=", "a definition is written with '='"),
    ("", r"-=", "a difference is written `y(i) += -x(i)`"),
    ("", r"/=", "a quotient is written `y(i) = y(i) / x(i)`"),
    ("<", r"<", "there are no operators on bits: x << 3 is written x * 8"),
    (">", r">", "there are no operators on bits: x >> 3 is written x / 8"),
    ("", r"&", "conditions are joined by &&; there are no operators on bits: x & 7 is written x % 8"),
    ("", r"\|", "conditions are joined by ||"),
    (r"\)", r"\.\s*[A-Za-z_]", "a function stands before its argument: exp(x(i))"),
    (r"\bfor\s+", r"\w", "a statement runs for all values of its indices; `where i in 0:3` gives a range"),
    (r"\bin\s+[^,\n:]+:[^,\n:]+", ":", "ranges have no step: write 2 * i in the subscripts instead"),
    (r"\bin\s+[\w(][^,\n]*", r"\.", _RANGE),
    (r"\bin\s+range\s*\([^)\n]*\)\s*", "", _RANGE),
    (r"=\s*if\b[^\n]*|\sif\s+", "", "a choice is written condition ? this : that"),
    (r"\band\s*", "", "'and' is written &&"),
    (r"\bor\s*", "", "'or' is written ||"),
    (_CLAUSE, r"\(|[<>!%&|*+-]", _CONDITION),
    (_CLAUSE + "=", "=", _CONDITION),
    (r"\bwhere\s(?:[^{}]*,)?\s*", r"[!(0-9]", _CONDITION),
)
"""Patterns for the text before a mistake and for the text from it on, each pair with a hint."""
_FUNCTIONS = {
    "silu": "x * sigmoid(x)", "swish": "x * sigmoid(x)", "softplus": "log1p(exp(x))", "square": "x * x",
    "gelu": "0.5 * x * (1 + erf(x * 0.70710678))", "clamp": "min(max(x, low), high)", "clip": "min(max(x, low), high)",
    "sum": "a statement of its own: s(i) +=! x(i,j)", "mean": "two statements: s(i) +=! x(i,j), then s(i) / N",
    "where": "condition ? this : that", "dot": "s +=! x(i) * y(i)", "matmul": "C(m,n) +=! A(m,k) * B(k,n)",
    "leaky_relu": "x > 0 ? x : 0.01 * x", "elu": "x > 0 ? x : expm1(x)", "relu6": "min(max(x, 0), 6)",
    "prelu": "x > 0 ? x : a * x", "selu": "1.0507010 * (x > 0 ? x : 1.6732632 * expm1(x))",
    "celu": "x > 0 ? x : a * expm1(x / a)", "hardtanh": "min(max(x, -1), 1)", "mish": "x * tanh(log1p(exp(x)))",
    "hardsigmoid": "min(max(x / 6 + 0.5, 0), 1)", "hardswish": "x * min(max(x + 3, 0), 6) / 6",
    "softsign": "x / (1 + fabs(x))", "logsigmoid": "-log1p(exp(-x))", "log_sigmoid": "-log1p(exp(-x))",
    "tanhshrink": "x - tanh(x)", "expit": "sigmoid(x)", "logistic": "sigmoid(x)", "logit": "log(x / (1 - x))",
    "sign": "x > 0 ? 1 : x < 0 ? -1 : 0", "sgn": "x > 0 ? 1 : x < 0 ? -1 : 0", "heaviside": "x > 0 ? 1 : 0",
    "reciprocal": "1 / x", "neg": "-x", "sqr": "x * x", "cube": "x * x * x", "power": "pow(x, y)",
    "ln": "log(x)", "exp10": "pow(10, x)", "maximum": "max(x, y)", "minimum": "min(x, y)", "select": "c ? x : y",
    "if": "c ? x : y", "lerp": "x + t * (y - x)", "frac": "x - trunc(x)", "mod": "x % y, or fmod(x, y)",
    "ldexp": "x * exp2(n)", "scalbn": "x * exp2(n)", "scalbln": "x * exp2(n)", "ilogb": "int32(logb(x))",
    "lrint": "int64(rint(x))", "llrint": "int64(rint(x))", "lround": "int64(round(x))", "llround": "int64(round(x))",
    "modf": "trunc(x), or x - trunc(x)", "frexp": "logb(x) + 1, or x / exp2(logb(x) + 1)",
    "remquo": "remainder(x, y)", "signbit": "copysign(1, x) < 0", "nexttoward": "nextafter(x, y)",
    "isnan": "x != x", "isinf": "fabs(x) == inf", "isfinite": "fabs(x) < inf", "float_power": "pow(x, y)",
    "arcsin": "asin(x)", "arccos": "acos(x)", "arctan": "atan(x)", "arctan2": "atan2(y, x)",
    "prod": "a statement of its own: p(i) *=! x(i,j)", "transpose": "y(i,j) = x(j,i)",
    "mm": "C(m,n) +=! A(m,k) * B(k,n)",
    "amax": "a statement of its own: m(i) max=! x(i,j)", "amin": "a statement of its own: m(i) min=! x(i,j)",
    "norm": "two statements: s(i) +=! x(i,j) * x(i,j), then sqrt(s(i))", "bmm": "C(b,m,n) +=! A(b,m,k) * B(b,k,n)",
    "var": "statements: m(i) +=! x(i,j), then v(i) +=! (x(i,j) - m(i) / N) * (x(i,j) - m(i) / N), then v(i) / N",
    "softmax": "statements: m(n) max=! x(n,d), e(n,d) = exp(x(n,d) - m(n)), s(n) +=! e(n,d), y(n,d) = e(n,d) / s(n)",
}  # fmt: skip


_NAMES = {
    **dict.fromkeys(("INFINITY", "Inf", "infinity", "Infinity", "INF", "HUGE_VAL"), "infinity is written inf"),
    **dict.fromkeys(("NAN", "NaN", "Nan"), "not-a-number is written nan"),
    **dict.fromkeys(("pi", "PI", "M_PI"), "write 3.14159265"), **dict.fromkeys(("True", "true"), "write bool(1)"),
    **dict.fromkeys(("False", "false"), "write bool(0)"), **dict.fromkeys(("None", "null"), "there is no such value"),
}  # fmt: skip
_WRONG_NUMBER = re.compile(
    r"(?<![\w.)])(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?P<rest>[A-Za-z_]\w*)", re.ASCII
)
_SUFFIXES = {
    **dict.fromkeys(("f", "F"), ""), **dict.fromkeys(("d", "D", "l", "L", "lf"), "double"), "h": "half", "H": "half",
    **dict.fromkeys(("u", "U"), "uint32"), **dict.fromkeys(("ul", "UL", "ull", "ULL"), "uint64"),
    **dict.fromkeys(("ll", "LL"), "long"),
}  # fmt: skip


def suggest_literal(text: str, at: int) -> tuple[int, int, str] | None:
    """The start and end of a number around `at` with a suffix, and how to write it; None if there is none."""
    first = max(0, at - 50)
    for found in _WRONG_NUMBER.finditer(text, first, at + 100):
        if found.start() <= at < found.end():
            number, rest = found["number"], found["rest"]
            if rest not in _SUFFIXES:
                return found.start(), found.end(), f"a product is written {number} * {rest}"
            way = _SUFFIXES[rest]
            typed = f"{way}({number}) for a {way}" if way else f"{number}, which is a float32 already"
            if not way and (number.isdigit() or number.endswith(".")):
                typed = number.rstrip(".") + ".0"
            return found.start(), found.end(), f"a literal has no suffix: write {typed}"
    return None


def suggest_syntax(text: str, start: int) -> str:
    """A hint for a mistake at the offset `start`; "" if none applies."""
    before, here = text[max(0, start - NEAR) : start], text[start : start + NEAR]
    if declared := re.search(r"\bdef\s+\w+\s*\((?:[^{}]*,)?\s*(\w+)\s*$", before):
        name = declared[1]
        if here[:1] in ("(", "[") and name not in (*DTYPES, *ALIASES):
            return f"'{name}' is not a type: write one of {', '.join(sorted({*ALIASES, *DTYPES}))}"
    if text.strip().endswith(".tc") and "\n" not in text.strip():
        return "pass the text of the program: Path(...).read_text()"
    for left, right, said in _SYNTAX:
        if re.search(f"(?:{left})$", before) and re.match(right, here):
            return said
    return ""


def suggest_name(name: str) -> str:
    """How to write the value that `name` has in other languages; "" if unknown."""
    return _NAMES.get(name, "")


def suggest_function(name: str) -> str:
    """How to write the function that is called `name` in other languages; "" if unknown."""
    return f"{name} is written as {_FUNCTIONS[name]}" if name in _FUNCTIONS else ""
