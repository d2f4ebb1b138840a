"""The functions of the reference evaluator against those of the C library, special values and all."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.math_functions import FUNCTIONS

C = ctypes.CDLL(ctypes.util.find_library("m"))
EXACT = frozenset(
    ["floor", "ceil", "trunc", "rint", "nearbyint", "round", "fabs", "sqrt", "copysign", "fmin", "fmax", "fmod", "fdim",
     "fma", "remainder", "nextafter", "logb"]
)  # fmt: skip
ROOT = {"lgamma": 1e-12}  # near its roots, which the last digits of the argument decide, an absolute error
SPECIAL = (
    0.0, 1.0, 0.5, 1.5, 2.0, 2.5, 3.0, 3.7, 7.0, 10.0, 34.5, 35.1, 88.8, 104.0, 128.0, 150.0, 170.5, 171.7, 710.0,
    746.0, 1023.5, 1024.0, 1075.0, 0.1, 1e10, 1e30, 1e-30, np.inf, 0.49999997, 0.49999999999999994, 4194304.5,
    8388607.5, 8388609.0, 2.0**51 + 0.5, 2.0**52 - 0.5, 2.0**52 + 1,
)  # fmt: skip


def of_c(name: str, columns: tuple[np.ndarray, ...]) -> np.ndarray:
    single = columns[0].dtype == np.float32
    function, number = getattr(C, name + "f" * single), ctypes.c_float if single else ctypes.c_double
    function.restype, function.argtypes = number, [number] * len(columns)
    return np.array([function(*map(float, row)) for row in zip(*columns, strict=True)], columns[0].dtype)


def columns_of(arity: int, dtype: type) -> tuple[np.ndarray, ...]:
    """Special values in all pairs, and random ones."""
    r, limits = np.random.default_rng(0), np.finfo(dtype)
    positive = np.array([*SPECIAL, limits.smallest_subnormal, limits.tiny, limits.max], dtype)
    special = np.concatenate([positive, -positive, np.array([np.nan], dtype)])
    rows = np.array(np.meshgrid(special, special)).reshape(2, -1) if arity > 1 else special[None]
    if arity == 3:
        with np.errstate(all="ignore"):
            third = np.concatenate([np.roll(rows[0], 7), -rows[0] * rows[1]])
        rows = np.stack([np.tile(rows[0], 2), np.tile(rows[1], 2), third])
    return tuple(np.concatenate([row, r.uniform(-20, 20, 1000).astype(dtype)]) for row in rows)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("rsqrt", "tf32")])
def test_a_function_is_that_of_c(name: str, dtype: type) -> None:
    columns = columns_of(FUNCTIONS[name].arity, dtype)
    expected = of_c(name, columns)
    with np.errstate(all="ignore"):
        found = np.asarray(FUNCTIONS[name].evaluate(*columns))
        assert found.dtype == dtype
        same = (found == expected) | np.isnan(found) & np.isnan(expected)
        if name not in EXACT:
            unit = np.spacing(np.maximum(np.abs(expected), np.finfo(dtype).tiny))
            same |= np.abs(found - expected) <= np.maximum(8 * unit, ROOT.get(name, 0))
        same &= (
            (np.signbit(found) == np.signbit(expected)) | np.isnan(expected) | (np.abs(expected) < ROOT.get(name, 0))
        )
    wrong = [(*(c[n] for c in columns), found[n], expected[n]) for n in np.flatnonzero(~same)[:5]]
    assert not wrong, f"{name}: arguments, found, of C: {wrong}"


def test_halves_and_numbers_without_fractions_round_as_in_c() -> None:
    """Adding a half first makes 0.49999997 to 1, and 8388609 to 8388610."""
    op = tc.define("def f(float(N) x) -> (y) { y(i) = round(x(i)) }").f
    x = torch.tensor([0.49999997, -0.49999997, 8388609.0, -8388609.0, 0.5, -0.5, 2.5, torch.inf])
    y = torch.tensor([0.0, -0.0, 8388609.0, -8388609.0, 1.0, -1.0, 3.0, torch.inf])
    for found in (op.reference(x), op(x)):
        assert torch.equal(found, y)
        assert torch.equal(found.signbit(), y.signbit())


def test_a_multiply_add_is_rounded_once() -> None:
    op = tc.define("def f(double(N) x, double(N) y, double(N) z) -> (o) { o(i) = fma(x(i), y(i), z(i)) }").f
    x = torch.tensor([2251799813685248.5, 1e30, 1e200, 1e200, 5e-324, 1.0], dtype=torch.float64)
    y = torch.tensor([1.5, 2.5, 1e200, 1e200, 0.25, 0.0], dtype=torch.float64)
    z = torch.tensor([-0.49999997, 0.49999999999999994, -torch.inf, 1.0, -5e-324, -0.0], dtype=torch.float64)
    expected = [3377699720527872.5, 2.5000000000000002e30, -torch.inf, torch.inf, -5e-324, 0.0]
    for found in (op.reference(x, y, z), op(x, y, z)):
        assert found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_rest_of_c99(dtype: torch.dtype) -> None:
    kind = {torch.float32: "float", torch.float64: "double"}[dtype]
    op = tc.define(
        f"def f({kind}(N) x, {kind}(N) y) -> (after, rest, exponent, near) {{"
        " after(i) = nextafter(x(i), y(i))"
        " rest(i) = remainder(x(i), y(i))"
        " exponent(i) = logb(x(i))"
        " near(i) = nearbyint(x(i)) }"
    ).f
    r = torch.Generator().manual_seed(0)
    x, y = ((torch.randn(1000, generator=r) * 30).to(dtype) for _ in range(2))
    x[:6] = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 2.5, -3.5], dtype=dtype)
    after, rest, exponent, near = op(x, y)
    torch.testing.assert_close(after, torch.nextafter(x, y), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(near, torch.round(x), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(exponent[4:], torch.frexp(x[4:]).exponent.to(dtype) - 1, rtol=0, atol=0)
    assert exponent[:4].tolist()[:3] == [-torch.inf, -torch.inf, torch.inf]
    assert bool((rest[4:].abs() <= y[4:].abs() / 2).all())
    for found, expected in zip((after, rest, exponent, near), op.reference(x, y), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_tf32_keeps_ten_bits_of_the_fraction() -> None:
    """By exact arithmetic on float64, where a unit is a power of two and halves go away from zero."""
    op = tc.define("def f(float(N) x) -> (y) { y(i) = tf32(x(i)) }").f
    (special,) = columns_of(1, np.float32)
    r = np.random.default_rng(1)
    bits = np.concatenate([special.view(np.uint32), r.integers(0, 1 << 32, 4000, np.uint32)])
    x = np.concatenate([bits, bits & 0xFFFFF000]).view(np.float32)  # the second half is full of ties
    with np.errstate(all="ignore"):
        unit = np.exp2(np.maximum(np.floor(np.log2(np.abs(x.astype(np.float64)))), -126) - 10)
        expected = (np.sign(x) * np.floor(np.abs(x.astype(np.float64)) / unit + 0.5) * unit).astype(np.float32)
    expected = torch.from_numpy(np.where(np.isfinite(x) & (x != 0), expected, x))
    for found in (op.reference(torch.from_numpy(x)), op(torch.from_numpy(x))):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_tf32_takes_float32_alone() -> None:
    with pytest.raises(tc.CheckError, match="tf32 rounds float32"):
        tc.define("def f(double(N) x) -> (y) { y(i) = tf32(x(i)) }")
    half = tc.define("def f(half(N) x) -> (y) { y(i) = tf32(x(i)) }").f(torch.tensor([1.5]).half())
    assert (half.dtype, half.item()) == (torch.float32, 1.5)


def test_the_gradient_of_tf32_is_that_of_a_rounding() -> None:
    op = tc.define("def f(float(N) x) -> (y) { y(i) = tf32(x(i)) * x(i) }").f
    x = torch.tensor([1.0, 2.5], requires_grad=True)
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 5.0]
