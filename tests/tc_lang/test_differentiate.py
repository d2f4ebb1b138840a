"""The text of derived gradients."""

from __future__ import annotations

import pytest
from helpers import compile_last_def

from tensor_comprehensions.core.errors import CheckError
from tensor_comprehensions.tc_lang.gradients.differentiate import differentiate
from tests.conftest import Golden
from tests.helpers import differentiable as defs

SHOWN = ("MATMUL", "SOFTMAX", "LAYERNORM", "CONV1D", "CONV2D", "STRIDED", "GATHER", "FCRELU", "GEMM", "PARTS", "POOL")


@pytest.mark.parametrize("name", SHOWN)
def test_texts(name: str, golden: Golden) -> None:
    golden.check(f"{name.lower()}_backward.tc", differentiate(compile_last_def(getattr(defs, name))).source + "\n")


def test_a_gradient_takes_what_it_reads_and_gives_what_is_wanted() -> None:
    function = compile_last_def(defs.FCRELU)
    gradient = differentiate(function, [("input", "W")])
    assert gradient.outputs == (("input", "W"),)
    assert gradient.inputs == (("input", "I"), ("output", "O"), ("gradient", "O"))
    assert gradient.reads == set(gradient.inputs)


def test_a_gradient_takes_what_says_a_size_that_nothing_else_does() -> None:
    gather = differentiate(compile_last_def(defs.GATHER))
    assert gather.inputs == (("input", "T"), ("input", "I"), ("gradient", "o"))
    assert ("input", "T") not in gather.reads
    pool = differentiate(compile_last_def(defs.POOL))
    assert {("input", "k"), ("input", "s")} <= set(pool.inputs)


def test_names_of_the_def_may_be_anything() -> None:
    text = differentiate(
        compile_last_def(
            "def f(float(d_x) d_y, float(d_x) exp, float i0) -> (max) {"
            " t(inf1) = d_y(inf1) * exp(inf1)\n max +=! t(j) * t(j) * i0 }"
        )
    ).source
    assert compile_last_def(text).returns == ("d_d_y", "d_exp", "d_i0")


@pytest.mark.parametrize(
    "source",
    [
        "def f(float(N) x) -> (y) { y(i) = tgamma(x(i)) }",
        "def f(float(N) x, long(N) I) -> (float(3) y) { y(I(i)) *=! x(i) }",
        "def f(int(N) x) -> (y) { y(i) = x(i) * 2 }",
        "def f(float(N) x) -> (y) { y(i) = int32(x(i)) }",
    ],
)
def test_what_has_no_gradient_is_refused(source: str) -> None:
    with pytest.raises(CheckError, match="cannot be differentiated") as caught:
        differentiate(compile_last_def(source))
    assert "backward=" in str(caught.value)


def test_the_place_of_the_refusal_is_shown() -> None:
    with pytest.raises(CheckError) as caught:
        differentiate(compile_last_def("def f(float(N) x) -> (y) {\n    t(i) = x(i)\n    y(i) = lgamma(t(i))\n}"))
    assert caught.value.line == 3


def test_extrema_of_computed_values_are_found_among_values_of_the_same_kernel() -> None:
    text = differentiate(
        compile_last_def("def f(float(N,K) a) -> (m) { t(i,k) = exp(a(i,k))\n m(i) max=! t(i,k) }")
    ).source
    assert "m_part(i) max=! t(i, k)" in text
    assert "t(i, k) == m_part(i)" in text
