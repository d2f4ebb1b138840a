"""Programs whose values were once wrong, each as small as it could be made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.dtypes import DTYPES
from tensor_comprehensions.loop_ir.interpret.ops import round_to

INTEGERS = [name for name, t in DTYPES.items() if t.is_integer]
EDGES = [0.0, -0.5, 0.99, -3.0, 127.9, 128.0, -129.0, 255.0, 256.0, 65536.5, 2.0**31, 2.0**32, 2.0**63, 2.0**64]
FLOATS = [*EDGES, *(-x for x in EDGES), 1e30, -1e30, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("float_type", ["float32", "float64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_a_float_that_becomes_an_integer_saturates(name: str, float_type: str) -> None:
    op = tc.define(f"def f({float_type}(N) x) -> (y) {{ y(i) = {name}(x(i)) }}").f
    x = np.array(FLOATS * 5, float_type)
    limits = np.iinfo(name)
    expected = [0 if v != v else min(max(int(v), limits.min), limits.max) if abs(v) < 1e38 else
                limits.max if v > 0 else limits.min for v in x.tolist()]  # fmt: skip
    for values in (op(x), op.reference(x), round_to(x, DTYPES[name])):
        assert values.dtype == name
        assert values.tolist() == expected


def test_the_reference_reduces_into_a_bool_number() -> None:
    op = tc.define("def f(bool(N) x) -> (y) { y max=! x(i) }").f
    x = torch.tensor([False, True])
    assert op.reference(x).item() is op(x).item() is True


@pytest.mark.parametrize("subscript", ["uint8(i)", "int32(uint8(i))", "uint8(i) + 0", "int16(uint8(i))"])
def test_a_subscript_that_wraps_is_not_taken_for_its_operand(subscript: str) -> None:
    """Were it, the two statements would share a parallel loop that reads what other iterations write."""
    op = tc.define(f"""
    def f(float(N) x) -> (y) {{
        t(i) = x(i) * 2 where i in 0:512
        y(i) = t({subscript}) where i in 0:512
    }}""").f
    x = torch.arange(512.0)
    assert torch.equal(op(x), 2 * (x % 256))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("n", [5, 100, 100_000])
def test_no_subscript_is_read_through_one_that_is_out_of_bounds(depth: int, n: int) -> None:
    """Every subscript is verified before the next is read by it; otherwise this reads far outside."""
    op = tc.define(f"def f(float(N) x, int(N) I) -> (y) {{ y(i) = x({'I(' * depth}i{')' * depth}) }}").f
    indices = torch.full((n,), 2**30, dtype=torch.int32)
    with pytest.raises(tc.RangeError, match=str(2**30)):
        op(torch.ones(n), indices)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("op", ["+=!", "*=!", "max=!", "min=!"])
def test_reductions_over_nothing(op: str, dtype: str) -> None:
    """Nothing in them is evaluated: no access of theirs is verified, masked or prefetched."""
    if dtype == "bool" and op[0] in "+*":
        return
    def_ = tc.define(f"""
    def f({dtype}(N,K) x, {dtype}(M) z, int(K) I) -> (y, s, {dtype}(4) h, t) {{
        y(i) {op} 2*i - 1 >= 0 && 2*i - 1 < M ? z(2*i - 1) : x(i,k)
        s {op} 2*j - 1 >= 0 && 2*j - 1 < M ? z(2*j - 1) : x(0,k) where j in 0:16
        h(I(k)) {op} x(0,k)
        t(i) = z(0) where i in 0:N
        t(i) {op.replace("!", "")} x(i,k)
    }}""").f
    kind = getattr(torch, dtype)
    arguments = torch.ones(9, 0, dtype=kind), torch.ones(3, dtype=kind), torch.ones(0, dtype=torch.int32)
    for found, expected in zip(def_(*arguments), def_.reference(*arguments), strict=True):
        assert torch.equal(found, expected)


def test_a_contraction_whose_tile_is_too_narrow_for_a_kernel_of_its_own() -> None:
    op = tc.define("""
    def f(float(K,M) a, float(P,N) b, float(N) z) -> (C) {
        C(n) = z(n)
        C(n) += a(k,m) * b(2*k + m, n) where m in 0:33, k in 0:15, n in 0:9
        C(n) = max(C(n), z(n))
    }""").f
    arguments = torch.ones(15, 33), torch.ones(61, 9), torch.ones(9)
    for tile in (), (1,), (4,), (8, 3):
        for fusion in "min", "preserve3", "max":
            for contract in False, True:
                options = tc.CpuOptions(fusion=fusion, tile=tile, localize_temporaries=contract, grain_size=64)
                kernel = op.compile(*arguments, options=options)
                assert torch.equal(kernel(*arguments), op.reference(*arguments))


def test_dimensions_of_data_that_says_where_to_write_are_not_merged() -> None:
    op = tc.define(
        "def f(float(N,M) x, uint8(N,M) c, float(M,K) z) -> (y) { y(m,k) = z(m,k) y(m, c(n,m)) += x(n,m) }"
    ).f
    x, code, start = torch.randn(7, 3), torch.randint(16, (7, 3), dtype=torch.uint8), torch.zeros(3, 16)
    expected = start.clone().t().scatter_add(0, code.long(), x).t()
    torch.testing.assert_close(op(x, code, start), expected)


@pytest.mark.parametrize("shape", [(2, 5), (40, 70)])
def test_a_register_that_a_transposition_writes_more_than_once(shape: tuple[int, int]) -> None:
    op = tc.define("""
    def f(float(B,C) Y) -> (Z) {
        T(c,b) = Y(b,c) + 1
        T(c,b) = T(c,b) * T(c,b)
        Z(c,b) = T(c,b) + Y(b,c)
    }""").f
    y = torch.randn(shape)
    with knobs.override_knobs(verify=True, cache="off"):
        torch.testing.assert_close(op(y), (y.t() + 1) ** 2 + y.t())


@pytest.mark.parametrize("shape", [(3, 17, 2), (40, 50, 60), (5, 1, 7)])
@pytest.mark.parametrize(
    "second", ["t(k) +=! x(i,j,k)", "t(k) max=! x(i,j,k)", "t(i,j) +=! x(i,j,k)", "t(j,k) +=! x(i,j,k)"]
)
def test_what_one_statement_sums_over_may_be_free_in_another(second: str, shape: tuple[int, ...]) -> None:
    """One nest for both began the elements of one of them outside of the loop that leads from each to the next."""
    x = torch.randint(-3, 4, shape).float()
    for first, last in (("s(i,k) +=! x(i,j,k)", second), (second, "s(i,k) +=! x(i,j,k)")):
        sums = tc.define(f"def sums(float(N,M,K) x) -> (s, t) {{ {first} {last} }}").sums
        torch.testing.assert_close(sums(x), sums.reference(x), rtol=0, atol=0)


def test_an_output_that_is_defined_as_itself_has_an_initial_value() -> None:
    text = "def f(float(N) g) -> (float(N) p, float(N) m) { m(i) = m(i) p(i) = p(i) - m(i) m(i) = 0.5 * m(i) + g(i) }"
    g, p, m = torch.randn(3, 5)
    found_p, found_m = tc.define(text).f(g, p=p, m=m)
    torch.testing.assert_close(found_p, p - m)
    torch.testing.assert_close(found_m, 0.5 * m + g)


def test_the_reference_takes_the_power_of_one_half_as_c_does() -> None:
    """NumPy takes the square root, where the exponent has one element."""
    op = tc.define("def f(float(N) x) -> (y) { y(i) = pow(x(i), 0.5) }").f
    x = torch.tensor([-torch.inf, torch.inf, -0.0, 4.0])
    for found in (op.reference(x), op(x)):
        assert found.tolist() == [torch.inf, torch.inf, 0.0, 2.0]
        assert not found.signbit().any()


LARGE_LITERALS = {
    "x(i) * 6364136223846793005": ("int64", [6364136223846793005, -645664597830827399]),
    "min(x(i), -9223372036854775808)": ("int64", [-(2**63), -(2**63)]),
    "x(i) % 0xffffffffff + (x(i) < 0 ? 1 : 3000000000)": ("int64", [3000000001, 2**40 - 3]),
    "x(i) + 18446744073709551615": ("uint64", [0, 6]),
    "x(i) * 3000000000": ("uint32", [3000000000, 3000000000 * 7 % 2**32]),
    "x(i) * (4000000000 - 1000000000)": ("float64", [3e9, -9e9]),
    "int64(3000000000) + int64(0 * x(i))": ("int32", [3000000000, 3000000000]),
}


@pytest.mark.parametrize("value", LARGE_LITERALS)
def test_a_large_literal_takes_the_type_of_the_other_operand(value: str) -> None:
    dtype, expected = LARGE_LITERALS[value]
    op = tc.define(f"def f({dtype}(N) x) -> (y) {{ y(i) = {value} }}").f
    x = torch.tensor([1, 7 if dtype[0] == "u" else -3]).to(getattr(torch, dtype))
    for found in (op.reference(x), op(x)):
        assert found.tolist() == expected
