"""One program per mistake: the class of the error, part of its message, and what its caret points at."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from helpers import bound

from tensor_comprehensions.core.errors import CheckError, RangeError, TCError
from tensor_comprehensions.tc_lang.semantics.check import compile_source

SIZES = {"N": 5, "M": 6, "K": 3}


@dataclass(frozen=True)
class Mistake:
    """`program` between the def's braces, or a whole text when it starts with `def`."""

    error: type[TCError]
    program: str
    message: str
    caret: str
    help: str = ""

    @property
    def source(self) -> str:
        if self.program.startswith("def"):
            return self.program
        return f"def f(float(N) a, float(N,M) A, int32(N) I, int s, bool(N) z) -> (b) {{ {self.program} }}"


CHECKS = [
    ("b(i) = c(i)", "'c' is neither a tensor nor a builtin", "c(i)"),
    ("b(i) = fmx(a(i), 0)", "'fmx' is neither", "fmx(a(i), 0)", "did you mean 'fmax'?"),
    ("b(i) = B(i,j)", "'B' is neither", "B(i,j)", "did you mean 'A'?"),
    ("b(i) = weights(i,j)", "'weights' is neither", "weights(i,j)"),
    ("b(i) = A(i)", "'A' has 2 dimensions", "A(i)"),
    ("b(i) = a", "'a' has 1 dimension", "a"),
    ("b(i) = a(i) + N(i)", "'N' is a size, not a tensor", "N(i)"),
    ("a(i) = 0.0 b(i) = a(i)", "'a' is an input and cannot be written", "a(i)"),
    ("N = 3 b(i) = a(i)", "'N' is a size and cannot be written", "N"),
    ("exp(i) = a(i) b(i) = a(i)", "'exp' is a builtin", "exp(i)", "call the temporary 'exp_'"),
    ("half(i) = a(i) b(i) = half(i)", "'half' is the name of a type", "half(i)", "call the tensor otherwise"),
    ("def f(float(N) int32) -> (b) { b(i) = int32(i) }", "'int32' is the name of a type", "float(N) int32"),
    ("def f(float(N) a) -> (float(N) byte) { byte(i) = a(i) }", "'byte' is the name of a type", "float(N) byte"),
    ("b(i) = exp(a(i), a(i))", "'exp' takes 1 argument", "exp(a(i), a(i))"),
    ("b(i) = min(a(i))", "'min' takes 2 or more arguments", "min(a(i))"),
    ("b(i) = A(i,j)", "the index 'j' is on the right but not on the left", "j"),
    ("b(i) = a(i) where k in 0:3", "the index 'k' is given a range but not used", "k"),
    ("b(i) = a(i) where i in 0:3, i in 0:4", "'i' has two `where` clauses", "i"),
    ("b(i) = a(i) where N in 0:3", "'N' is already a size", "N"),
    ("b(i) = a(i) where a = 3", "'a' is already a tensor", "a"),
    ("b(i) = x where x = x + 1", "the let 'x' refers to itself", "x"),
    ("b(i) = a(i) where i in 0:2.5", "a bound of 'i' must be an integer", "2.5"),
    ("b(i) = a(i) where i in 0:I(0)", "a bound of 'i' may only use sizes", "I(0)"),
    ("b(i) +=! a(j) where i in 0:N, j in 0:i", "a bound of 'j' may only use sizes", "i"),
    ("b(i) = a(a(i))", "subscript 0 of 'a' must be an integer", "a(i)", "cast it: int32(...)"),
    ("b(i) = a(i > 2)", "subscript 0 of 'a' must be an integer", "i > 2"),
    ("b(i,i) = a(i)", "the index 'i' appears twice on the left", "b(i,i)"),
    ("b(I(i)) = a(i)", "a subscript on the left that depends on data", "b(I(i))"),
    ("b(i) = a(i) b(i,j) = A(i,j)", "'b' has an earlier definition with another rank", "b(i,j)"),
    ("b(i) = a(i) b(i) = I(i)", "'b' is float32 by another definition", "I(i)", "cast it: float32(...)"),
    ("b(i) = I(i) b(i) = a(i)", "'b' is int32, and this value is float32", "a(i)", "cast it: int32(...)"),
    ("t(i) += a(i) b(i) = t(i)", "the temporary 't' has no value before", "t(i)"),
    ("t(i) = b(i) b(i) = a(i)", "'b' is read before it is defined", "b(i)"),
    (
        "def f(float(N) a) -> (float(N) p, float(N) m) { p(i) = p(i) - m(i) m(i) = m(i) + a(i) }",
        "'m' is read before it is defined",
        "m(i)",
        "to read its initial value, define it first: m(...) = m(...)",
    ),
    ("t(i) = a(i)", "the return 'b' is never defined", "b"),
    ("b(i) = a(i) % 2.0", "'%' takes integers", "a(i) % 2.0", "use fmod(a, b)"),
    ("b(i) = I(i) / 0", "'/' divides by zero", "I(i) / 0"),
    ("b(i) = 3 % 0 where i in 0:N", "'%' divides by zero", "3 % 0"),
    ("b(i) = a(i) && z(i)", "'&&' takes bool", "a(i) && z(i)", "compare: `x != 0`"),
    ("b(i) = !a(i)", "'!' takes bool", "!a(i)"),
    ("b(i) = a(i) ? 1 : 2", "the condition of '?:' takes bool", "a(i) ? 1 : 2"),
    ("b(i) = z(i) + z(i)", "'+' does not take bool", "z(i) + z(i)"),
    ("b(i) = -z(i)", "'-' does not take bool", "-z(i)"),
    ("b(i) = max(z(i), z(i))", "'max' does not take bool", "max(z(i), z(i))"),
    ("b +=! z(i)", "'+=' does not take bool", "z(i)"),
    ("b(i) = 2147483648 where i in 0:N", "the literal 2147483648 does not fit int32", "2147483648"),
    ("b(i) = uint64(I(i)) + 18446744073709551616", "this integer does not fit 64 bits", "18446744073709551616"),
    ("b(i) = a(i) * 1e999", "this number does not fit float64", "1e999"),
    ("b(i) = uint8(I(i)) + 256", "the literal 256 does not fit uint8", "uint8(I(i)) + 256"),
    ("b(i) = a(i) where exists i + 1", "'exists' takes a tensor access", "i + 1"),
    ("b(i) = a(i) * A.2", "'A' has no dimension 2", "A.2"),
    ("b(i) = a(i) * x.0", "'x' is neither a tensor nor a builtin", "x.0"),
    ("def f(a) -> (b) { b(i) = a(i) }", "the parameter 'a' has no type", "a"),
    ("def f(float(N) a, int a) -> (b) { b(i) = a(i) }", "two parameters are called 'a'", "int a"),
    ("def f(float(a) a) -> (b) { b(i) = a(i) }", "'a' is both a tensor and a size", "float(a) a"),
    ("def f(float(N) a) -> (a) { a(i) = 1 }", "'a' is also a parameter", "a"),
    ("def f(float(N) a) -> (b, b) { b(i) = a(i) }", "'b' is returned twice", "b"),
    ("def f(float(N) a) -> () { b(i) = a(i) }", "the def returns nothing", "f"),
    ("def f(float(N) a) -> (float(N,N) b) { b(i) = a(i) }", "'b' is declared with another rank", "b(i)"),
    ("def f(float(N) a) -> (float(P) b) { b(i) = a(i) }", "'P' is not a size of any parameter", "P"),
    ("def f(double(N) a) -> (float(N) b) { b(i) = a(i) }", "'b' is float32, and this value is float64", "a(i)"),
    ("def f() -> (b) { b = 1 } def f() -> (c) { c = 1 }", "two defs are called 'f'", "f"),
    ("def f(float(N) a) -> (b) { b = f(a) }", "a def calls itself", "f(a)"),
    ("def g(float(N) x) -> (y) { y(i) = x(i) } def f(float(N) a) -> (b) { b(i) = g(a) }", "'g' is a def", "g(a)"),
    ("def f(float(N) a, float(N,N) A) -> (b) { b(a) = A(a,a) }", "'a' is a tensor, and no index can", "a", "rename"),
    ("def f(float(N) a, float(N,N) A) -> (b) { b(i) = A(i,a) }", "'a' is a tensor, and no index can", "a", "rename"),
    ("def g(float(N) x) -> (y) { y(i) = x(i) } def f(float(N) a) -> (b) { b = g(a, a) }", "'g' takes 1 arg", "g(a, a)"),
    ("def g(float(N) x) -> (y) { y(i) = x(i) } def f(float a) -> (b) { b = g(a) }", "a tensor of 1 dimension", "a"),
    ("def g(float(N) x) -> (y) { y(i) = x(i) } def f(float a) -> (b) { b = g(1.0) }", "takes a tensor as 'x'", "1.0"),
    ("def g(float x) -> (y) { y = x } def f(float(N) a) -> (b) { b = g(i) }", "'i' is unknown", "i"),
    ("def g(float x) -> (y, z) { y = x z = x } def f(float a) -> (b) { (b, b) = g(a) }", "writes 'b' twice", "b"),
]  # fmt: skip

RANGES = [
    ("b(i) = 3.0", "the range of 'i' does not follow", "b(i) = 3.0", "where i in 0:..."),
    ("b(i,j) = A(i+j, i-j)", "the range of 'i', 'j' does not follow", "b(i,j) = A(i+j, i-j)"),
    ("b(i) = a(i) + a(N)", "dimension 0 of 'a' is accessed out of bounds", "a(N)"),
    ("b(i) = a(i+1) where i in 0:N", "dimension 0 of 'a' is accessed out of bounds", "a(i+1)"),
    ("b(i) = i > 0 ? a(i+1) : 0.0 where i in 0:N", "is accessed out of bounds", "a(i+1)"),
    ("b(i) = a(i) where i in 4:2", "the range of 'i' is [4, 2)", "b(i) = a(i) where i in 4:2"),
    ("b(i) = a(i) b(i) = A(0,i)", "two definitions of 'b' give dimension 0", "b(i) = A(0,i)"),
    ("b(2*i) = a(i)", "the first definition of 'b' leaves elements undefined", "b(2*i) = a(i)"),
    ("b(i+j) = A(i,j)", "'=' writes some elements of 'b' twice", "b(i+j) = A(i,j)"),
    ("b(I(i)) += a(i)", "the size of dimension 0 of 'b' depends on data", "b(I(i)) += a(i)"),
    ("def f(float(N) a) -> (float(N) b) { b(i) = a(i) + a(i+1) }", "'b' has another size than declared", "float(N) b",
     "leave the size"),
    ("def f(float(N) a) -> (b) { b(i,j,k,l) = a(i) where j in 0:N*1000000000, k in 0:1000000000, l in 0:9 }",
     "more bytes than a machine can address", "b"),
    ("def g(float(N) x, float(N) y) -> (z) { z(i) = x(i) * y(i) } def f(float(N) a, float(M) c) -> (b) { b = g(a, c) }",
     "the called def needs sizes M and N to be equal", "c"),
]  # fmt: skip

MISTAKES = [Mistake(CheckError, *row) for row in CHECKS] + [Mistake(RangeError, *row) for row in RANGES]


def test_declared_size_is_checked_by_define() -> None:
    """The sizes as formulas show it: no call is needed."""
    with pytest.raises(RangeError, match="another size than declared") as caught:
        compile_source("def f(float(N) x) -> (float(N) y) { y(i) = x(i) where i in 1:N-1 }")
    assert (caught.value.expected, caught.value.found) == ("N", "N - 2")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.program[:50])
def test_mistake(mistake: Mistake) -> None:
    with pytest.raises(mistake.error) as caught:
        bound(mistake.source, {"s": 2}, **SIZES)
    e = caught.value
    assert mistake.message in e.message
    assert e.source == mistake.source
    assert e.span is not None
    assert mistake.source[e.span.start : e.span.end] == mistake.caret
    assert mistake.help in e.suggestion
