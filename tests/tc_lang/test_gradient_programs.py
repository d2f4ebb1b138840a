"""Gradients of random programs, and of the programs in which faults were found, against differences in double."""

from __future__ import annotations

import time

import numpy as np
import pytest
from helpers import compile_last_def

from tensor_comprehensions.tc_lang.gradients import differentiate
from tensor_comprehensions.tc_lang.gradients.read_conditions import ALWAYS, NEVER, read_condition
from tensor_comprehensions.tc_lang.ir import Access, walk_expr
from tensor_comprehensions.tc_lang.semantics.to_syntax import expr_to_syntax
from tensor_comprehensions.tc_lang.syntax.printer import to_text
from tests.helpers.gradient_checks import Rejected, check_program, run
from tests.helpers.gradient_programs import GradientProgram, draw_program

SEED = time.time_ns() % 1_000_000_000
PROGRAMS = 3
ROUNDS = 3

FOUND = {
    "a table, and a condition on something else": (
        "def f(double(E) X, long(N) words, double(E) Z) -> (y) { y(n) +=! (n > 1 ? 1.0 : 0.5) * fabs(X(words(n))) }",
        {"E": 3, "N": 2},
    ),
    "a table of differences of a solved index and a summed one": (
        "def f(double(K) X, long(N) I) -> (double(5) y) { y(I(min(max(j - i + 2, 0), N - 1))) +=! X(2 * i + 2)"
        " where i in -1:1, j in -1:K }",
        {"K": 4, "N": 3},
    ),
    "a mirrored diagonal, and a condition on something else": (
        "def f(double(N,M) X, double(Q) c) -> (y) {"
        " y(q) +=! fabs(X(7-l,l)) - (q > 2 ? c(q) : 0.0) where l in 0:8, q in 0:Q }",
        {"N": 8, "M": 9, "Q": 5},
    ),
    "a sum of guarded terms": (
        "def f(double(N) x) -> (t) { t(q) = x(0) where q in 0:7"
        "\n t(q) = min(t(q), (q*7+1 >= 0 && q*7+1 < 3 ? x(q*7+1) : 0)) where q in 0:7 }",
        {"N": 3},
    ),
    "one element behind two guards": (
        "def f(double(N) x, long(M) I) -> (y) { y(i) = (I(i) > 0 ? sin(x(3*I(i)-3)) : 0.5)"
        " * (I(i) < 2 && I(i) > 0 ? x(3*I(i)-3) : 1.5) }",
        {"N": 4, "M": 5},
    ),
    "a guarded index that is bare": (
        "def f(double(N,N) x) -> (y) { y(i) = i < N ? fabs(x(i,i)) * x(N-1-i,i) : 0.25 where i in 0:9 }",
        {"N": 4},
    ),
    "a remainder of sizes": (
        "def f(double(K) X, double(N,N) Z) -> (T) {"
        " T(i,j) = Z(i,j) + X((N-1-i) % 1) * Z((N-1) % 2, (i+N) % 2) where i in 0:N }",
        {"K": 2, "N": 5},
    ),
    "a product that an output holds for a part of the range": (
        "def f(double(N) x, double(N) w, double(N) v) -> (y, z) { y(i) = x(i)*w(i) where i in 1:N-1"
        "\n z(i) = x(i)*x(i)*w(i)*v(i) where i in 0:N }",
        {"N": 5},
    ),
    "a product over a range that starts late": (
        "def f(double(N,M) x) -> (y) { y(i) *=! 1 + 0.3 * x(i-1,j) where i in 1:N, j in 2:M }",
        {"N": 4, "M": 5},
    ),
    "a maximum over a range that starts late": (
        "def f(double(N,M) x) -> (y, z) { y(i) max=! x(i-1,j) where i in 1:N, j in 1:M"
        "\n z(i) min=! sin(x(i-1,j)) * x(i,j) where i in 1:N, j in 1:M }",
        {"N": 4, "M": 5},
    ),
    "an index that only counts terms": (
        "def f(double(N,M,K) x) -> (t) { t(i,j) max=! x(j, (k+j) % 1, i % 2) where i in 0:5, j in 1:N, k in 0:N }",
        {"N": 5, "M": 1, "K": 2},
    ),
}


def program_of(source: str, sizes: dict[str, int]) -> GradientProgram:
    """A program with values: tables of whole numbers below the least size."""
    function, random = compile_last_def(source), np.random.default_rng(3)
    arrays = {}
    for symbol in (*function.parameters, *function.inouts):
        shape = [sizes[getattr(e, "name", "")] for e in symbol.extents or ()]
        low = random.integers(0, min(sizes.values()), shape)
        arrays[symbol.name] = random.uniform(-1.5, 1.5, shape) if symbol.dtype.is_float else low
    return GradientProgram(source, sizes, arrays)


@pytest.mark.parametrize("name", FOUND)
def test_programs_in_which_faults_were_found(name: str) -> None:
    check_program(program_of(*FOUND[name]), 0)


def test_where_a_value_is_flat_its_element_is_read_nonetheless() -> None:
    """The scatter of `fabs` once wrote to element 0 wherever its argument was negative."""
    source = "def f(double(E) X, long(N) words) -> (y) { y(n) +=! (n > 1 ? 1.0 : 0.5) * fabs(X(words(n))) }"
    gradient = differentiate(compile_last_def(source)).function
    arrays = {"X": np.array([1.0, -2.0, 3.0]), "words": np.array([1, 2]), "d_y": np.ones(2)}
    assert run(gradient, arrays)["d_X"].tolist() == [0.0, -0.5, 0.5]


@pytest.mark.parametrize(
    ("source", "shapes"),
    [
        ("def f(double(V) a, long(N) I) -> (b) { b(i) = I(i) >= 0 ? a(I(i)) * i : 0.0 }", {"a": 0, "I": 3, "d_b": 3}),
        ("def f(double(V) a, long(N) I) -> (b) { b +=! I(i) >= 0 ? a(I(i)) : 0.0 }", {"a": 0, "I": 3}),
        ("def f(double(V) a, long(M) I) -> (b) { b = I(0) >= 0 ? a(I(0)) * a(I(0)) : 0.5 }", {"a": 0, "I": 1}),
    ],
)
def test_an_empty_table_that_nothing_is_read_from(source: str, shapes: dict[str, int]) -> None:
    """The scatter, which takes element 0 where nothing is read, once left the table."""
    gradient = differentiate(compile_last_def(source)).function
    kinds = {p.name: "float64" if p.dtype.is_float else "int64" for p in gradient.parameters}
    arrays = {n: np.full([shapes[n]] if n in shapes else [], -1, kind) for n, kind in kinds.items()}
    assert run(gradient, arrays)["d_a"].shape == (0,)


@pytest.mark.parametrize(
    ("value", "condition"),
    [
        ("fabs(x(7-i))", "always"),
        ("i > 2 ? 1.5 : 0.5", "never"),
        ("i > 2 ? x(7-i) : 0.5", "i > 2"),
        ("i > 2 ? 0.5 : x(7-i)", "!(i > 2)"),
        ("(i > 2 ? x(7-i) : 0.5) * x(7-i)", "always"),
        ("i > 2 ? (i < 5 ? x(7-i) : 1.5) : x(7-i)", "i > 2 && i < 5 || !(i > 2)"),
        ("i > 2 && x(7-i) > 0.5 ? 1.5 : 0.5", "i > 2"),
        ("x(7-i) > 0.5 ? 1.5 : 0.5", "always"),
        ("!(i > 2) || x(7-i) > 0.5 ? 1.5 : 0.5", "i > 2"),
    ],
)
def test_the_condition_under_which_an_element_is_read(value: str, condition: str) -> None:
    function = compile_last_def(f"def f(double(N) x) -> (y) {{ y(i) = x(7-i) * ({value}) where i in 0:8 }}")
    access = next(x for x in walk_expr(function.statements[0].value) if isinstance(x, Access))
    (_, right) = (getattr(function.statements[0].value, side) for side in ("left", "right"))
    found = read_condition(access, right)
    text = {ALWAYS: "always", NEVER: "never"}.get(found) or to_text(expr_to_syntax(found))
    assert text == condition


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_random_programs(turn: int, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    """First and second derivatives, jvp, vmap, vmap of the gradient and the gradient of the vmap."""
    right = 0
    count = PROGRAMS * (100 if request.config.getoption("--long") else 1)
    for n in range(turn * count, (turn + 1) * count):
        name = f"{SEED}:{n}"
        program = draw_program(name, 2)
        try:
            check_program(program, n)
            right += 1
        except Rejected:
            continue
        except Exception as error:
            raise AssertionError(f"program {name}, {program.sizes}:\n{program.source}") from error
    with capsys.disabled():
        print(f" [seed {SEED}: {right} programs]", end="")
    assert right > count // 4
