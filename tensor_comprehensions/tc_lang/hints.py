"""What somebody who writes another language here probably means, and how it is written in this one."""

from __future__ import annotations

import re

from ..dtypes import ALIASES, DTYPES

NEAR = 1000
"""Characters around a mistake that a hint looks at: some of what it looks for takes quadratic time."""
_BRACKETS = "subscripts and sizes stand in round brackets: x(i), float(N) x"
_RANGE = "a range is written first:end, as in `where k in 0:3`"
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
    (r"\bfor\s+", r"\w", "a statement runs for all values of its indices; `where i in 0:3` gives a range"),
    (r"\bin\s+[^,\n:]+:[^,\n:]+", ":", "ranges have no step: write 2 * i in the subscripts instead"),
    (r"\bin\s+[\w(][^,\n]*", r"\.", _RANGE),
    (r"\bin\s+range\s*\([^)\n]*\)\s*", "", _RANGE),
    (r"=\s*if\b[^\n]*|\sif\s+", "", "a choice is written condition ? this : that"),
    (r"\band\s*", "", "'and' is written &&"),
    (r"\bor\s*", "", "'or' is written ||"),
)
"""What stands before the place of the mistake, what begins there, and what is meant."""
_FUNCTIONS = {
    "silu": "x * sigmoid(x)", "swish": "x * sigmoid(x)", "softplus": "log1p(exp(x))", "square": "x * x",
    "gelu": "0.5 * x * (1 + erf(x * 0.70710678))", "clamp": "min(max(x, low), high)", "clip": "min(max(x, low), high)",
    "sum": "a statement of its own: s(i) +=! x(i,j)", "mean": "two statements: s(i) +=! x(i,j), then s(i) / N",
    "where": "condition ? this : that", "dot": "s +=! x(i) * y(i)", "matmul": "C(m,n) +=! A(m,k) * B(k,n)",
    "softmax": "statements: m(n) max=! x(n,d), e(n,d) = exp(x(n,d) - m(n)), s(n) +=! e(n,d), y(n,d) = e(n,d) / s(n)",
}  # fmt: skip


def of_syntax(text: str, start: int) -> str:
    """A hint for a mistake at the offset `start`; "" where none comes to mind."""
    before, here = text[max(0, start - NEAR) : start], text[start : start + NEAR]
    if declared := re.search(r"\bdef\s+\w+\s*\((?:[^{}]*,)?\s*(\w+)\s*$", before):
        name = declared[1]
        if here[:1] in ("(", "[") and name not in (*DTYPES, *ALIASES):
            return f"'{name}' is no type: write one of {', '.join(sorted({*ALIASES, *DTYPES}))}"
    if text.strip().endswith(".tc") and "\n" not in text.strip():
        return "pass the text of the program: Path(...).read_text()"
    for left, right, said in _SYNTAX:
        if re.search(f"(?:{left})$", before) and re.match(right, here):
            return said
    return ""


def of_function(name: str) -> str:
    """How what `name` computes elsewhere is written here; "" where nobody knows."""
    return f"{name} is written as {_FUNCTIONS[name]}" if name in _FUNCTIONS else ""
