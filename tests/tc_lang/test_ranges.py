"""Range inference: formulas, and that they agree with the numbers of `bind`."""

from __future__ import annotations

import pytest
from cases import CASES
from helpers import bound, compile_last_def
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.binding.ranges import output_shapes, symbolic_ranges
from tensor_comprehensions.tc_lang.size_polynomial import SizePolynomial, Value, max_of, min_of, to_polynomial

VECTORS = "float(N) I, float(K) W, int s"


@pytest.mark.parametrize(
    ("statement", "start", "extent"),
    [
        ("O(i) = I(i)", "0", "N"),
        ("O(i) = I(2*i)", "0", "(N + 1) / 2"),
        ("O(i) = I(2*i) + I(2*i+1)", "0", "N / 2"),
        ("O(i) = I(10-i)", "-N + 11", "N"),
        ("O(i) +=! I(i+k) * W(k)", "0", "N - K + 1"),
        ("O(i) +=! I(i-k) * W(k)", "K - 1", "N - K + 1"),
        ("O(i) +=! I(s*i+k) * W(k)", "0", "(N - K) / s + 1"),
        ("O(i) = I(i) + W(i)", "0", "min(N, K)"),
        ("O(i) = I(i/2)", "0", "2*N"),
        ("O(i) = I(i/2+1)", "-2", "2*N"),
        ("O(i) = I(N-1-i)", "0", "N"),
        ("O(i) max=! I(3*i+k) where k in 0:3", "0", "N / 3"),
        ("O(i) = I(i+1) where exists W(2*i)", "0", "min(N - 1, (K + 1) / 2)"),
        ("O(i) = 1.0 where i in s:N*K", "s", "K*N - s"),
        ("O(2*i) +=! I(i)", "0", "2*N - 1"),
        (f"O(i) = {' + '.join(['I(i) * W(i/2)'] * 70)}", "0", "min(N, 2*K)"),  # nested as often as it was said
        ("O(i) = W(i + (N+4) % 2)", "-((N + 4) % 2)", "K"),
        ("O(i) = W(i + (2*N+5) % 2)", "-1", "K"),
    ],
)
def test_formulas(statement: str, start: str, extent: str) -> None:
    ranges = symbolic_ranges(compile_last_def(f"def f({VECTORS}) -> (O) {{ {statement} }}"))
    ((lower, upper),) = ranges.tensors["O"]
    assert (str(lower), str(upper - lower)) == (start, extent)


def test_rounds() -> None:
    """The kernel's indices are solved first, then the image's."""
    f = compile_last_def("def f(float(C,H,W) I, float(C,KH,KW) K) -> (O) { O(h,w) +=! I(c,h+a,w+b) * K(c,a,b) }")
    assert [str(x) for x in symbolic_ranges(f).shape("O")] == ["H - KH + 1", "W - KW + 1"]


def test_later_definitions_lend_their_ranges() -> None:
    f = compile_last_def("def mv(float(M,K) A, float(K) x) -> (C) { C(i) = 0 C(j) += A(j,k) * x(k) }")
    assert [str(x) for x in symbolic_ranges(f).shape("C")] == ["M"]


def test_output_shapes() -> None:
    f = compile_last_def("def f(float(N) I, int s) -> (O) { O(i) = I(s*i) }")
    assert output_shapes(f, {"N": 7}, {"s": 3}) == {"O": (3,)}
    assert output_shapes(f, {"N": 7}, {"s": -3}) == {"O": (3,)}
    assert bound("def f(float(N) I, int s) -> (O) { O(i) = I(s*i) }", {"s": -3}, N=7).starts == ((-2,),)


@pytest.mark.parametrize("case", [c for c in CASES if c.error is None], ids=lambda c: c.id)
@settings(max_examples=5)
@given(st.data())
def test_formulas_agree_with_numbers(case: object, data: st.DataObject) -> None:
    for f in compile_source(case.source):  # type: ignore[attr-defined]
        sizes = {n: data.draw(st.integers(1, 9), n) for n in f.sizes}
        scalars = {n: data.draw(st.integers(1, 3), n) for n in f.scalars}
        try:
            b = bind(f, sizes, scalars)
        except TCError:
            continue
        ranges = symbolic_ranges(f)
        for name in f.returns:
            shape = tuple(to_polynomial(x).evaluate({**sizes, **scalars}) for x in ranges.shape(name))
            assert shape == b.tensor(name).shape


SIZES = ("N", "M")
leaf = st.one_of(st.integers(-4, 4), st.sampled_from(SIZES).map(SizePolynomial.name))


@st.composite
def formulas(draw: st.DrawFn, depth: int = 3) -> tuple[Value, str]:
    """A formula, and the Python expression it was built with."""
    if depth == 0 or draw(st.booleans()):
        x = draw(leaf)
        return x, str(x)
    a, ta = draw(formulas(depth=depth - 1))
    b, tb = draw(formulas(depth=depth - 1))
    d = draw(st.integers(1, 4))
    match draw(st.sampled_from(["+", "-", "*", "/", "%", "min", "max"])):
        case "+":
            return a + b, f"({ta} + {tb})"
        case "-":
            return a - b, f"({ta} - {tb})"
        case "*":
            return a * b, f"({ta} * {tb})"
        case "/":
            return a // d, f"({ta} // {d})"
        case "%":
            return a % d, f"({ta} % {d})"
        case "min":
            return min_of(a, b), f"min({ta}, {tb})"
    return max_of(a, b), f"max({ta}, {tb})"


@given(formulas(), st.integers(-5, 20), st.integers(-5, 20))
@example((-(SizePolynomial.name("M") // 2), "-(M // 2)"), 0, 1)
def test_formulas_evaluate_as_python(case: tuple[Value, str], n: int, m: int) -> None:
    value, text = case
    names = {"N": n, "M": m}
    expected = eval(text, {"min": min, "max": max}, names)
    assert to_polynomial(value).evaluate(names) == expected
    shown = str(value).replace("/", "//")
    assert eval(shown, {"min": min, "max": max}, names) == expected
