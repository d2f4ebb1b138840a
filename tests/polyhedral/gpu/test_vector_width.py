"""Neighbors that a thread moves at once by default: where there are vectors, where there are none, and the results."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.runtime.emulate import emulator

SM90 = "cuda:sm_90"
OPS = tc.define("""
def add(float(N,D) x, float(D) b) -> (out) { out(n,d) = x(n,d) + b(d) }
def shifted(float(N,D) x) -> (out) { out(n,d) = x(n,d+1) where d in 0:64 }
def doubles(double(N,D) x) -> (out) { out(n,d) = 2 * x(n,d) }
def halves(half(N,D) x) -> (out) { out(n,d) = x(n,d) * x(n,d) }
def rows(float(V,D) x, int32(N) I) -> (out) { out(n,d) = x(I(n),d) }
def sums(float(N,D) x) -> (out) { out(n) +=! x(n,d) }
def turned(float(N,D) x) -> (out) { out(d) +=! x(n,d) }
def softmax(float(N,D) x) -> (out) {
    peak(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - peak(n))
    total(n) +=! e(n,d)
    out(n,d) = e(n,d) / total(n)
}
""")


def source(name: str, *tensors: torch.Tensor) -> str:
    return str(getattr(OPS, name).compile(*tensors, target=SM90).source())


def test_pointwise_kernels_move_vectors() -> None:
    x = torch.empty(1024, 512)
    text = source("add", x, x[0])
    assert text.count("const float4 *>(&x[") == text.count("const float4 *>(&b[") == text.count("float4 *>(&out[") == 1
    assert "double2 *>(&out[" in source("doubles", x.double())
    assert "packed_half4 *>(&out[" in source("halves", x.half())
    assert "const float4 *>(&x[" in source("rows", x, torch.zeros(1024, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("add", (1024, 511)), ("add", (64, 64)), ("shifted", (4096, 66)), ("turned", (4096, 512))],
    ids=["odd rows", "few elements", "shifted", "columns"],
)
def test_what_has_no_vectors(name: str, shape: tuple[int, int]) -> None:
    """Rows that start anywhere, too few elements for all threads, places between multiples, terms one below another."""
    x = torch.empty(shape)
    assert "float4" not in source(name, *([x, x[0]] if name == "add" else [x]))


def test_rows_are_read_in_vectors_and_reread_in_registers() -> None:
    text = source("softmax", torch.empty(4096, 1024))
    assert "float4 *>(&out[" in text
    assert "&x[bx * 4 + ty][c1 * 128 + tx * 4]" in text
    assert "float4" in source("sums", torch.empty(64, 4096))
    assert "float4" not in source("sums", torch.empty(64, 4097))


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
def test_results() -> None:
    wide, flat = torch.randn(9, 1024), torch.randn(3, 258)
    for x in (wide, wide[:, 4:1000], wide[:, 1:1001], flat):
        made = OPS.softmax.compile(x, target=SM90)
        torch.testing.assert_close(made.emulate(x), x.softmax(1))
        torch.testing.assert_close(OPS.sums.compile(x, target=SM90).emulate(x), x.sum(1), rtol=1e-4, atol=1e-4)
    x = torch.randn(300, 500)
    for y in (x, x[1:, 4:], x[:, :498]):
        assert torch.equal(OPS.add.compile(y, y[0], target=SM90).emulate(y, y[0]), y + y[0])
