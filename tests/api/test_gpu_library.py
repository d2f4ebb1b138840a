"""Products that are left to torch: which statements they are, and the def around them."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import ArgumentError, RangeError
from tensor_comprehensions.dispatch.cuda import gpu_kernels as gpu
from tensor_comprehensions.dispatch.cuda.library_calls import LibraryMatmul, split_at_library_calls
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers.fake_cuda import FakeCuda, fake

__all__ = ["fake"]
needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
SM90 = "cuda:sm_90"
CALLS = MappingOptions(tile=(8, 8, 8), threads=(8, 4), match_library_calls=True)

PRODUCTS = {
    "mm": ("float(M,K) A, float(K,N) B", "C(m,n) +=! A(m,k) * B(k,n)"),
    "tmm": ("float(K,M) A, float(N,K) B", "C(m,n) +=! A(k,m) * B(n,k)"),
    "turned": ("float(M,K) A, float(K,N) B", "C(n,m) +=! A(m,k) * B(k,n)"),
    "swapped": ("float(M,K) A, float(K,N) B", "C(m,n) +=! B(k,n) * A(m,k)"),
    "bmm": ("float(L,M,K) A, float(L,K,N) B", "C(b,m,n) +=! A(b,m,k) * B(b,k,n)"),
    "batch in the middle": ("float(M,L,K) A, float(K,L,N) B", "C(m,b,n) +=! A(m,b,k) * B(k,b,n)"),
    "half": ("half(M,K) A, half(K,N) B", "C(m,n) +=! A(m,k) * B(k,n)"),
}
OTHERS = {
    "adds to what is there": ("float(M,K) A, float(K,N) B", "C(m,n) += A(m,k) * B(k,n)"),
    "greatest": ("float(M,K) A, float(K,N) B", "C(m,n) max=! A(m,k) * B(k,n)"),
    "more than a product": ("float(M,K) A, float(K,N) B", "C(m,n) +=! A(m,k) * B(k,n) + 1"),
    "a vector": ("float(M,K) A, float(K) B", "C(m) +=! A(m,k) * B(k)"),
    "two sums": ("float(M,K,L) A, float(K,L,N) B", "C(m,n) +=! A(m,k,l) * B(k,l,n)"),
    "a window": ("float(M,K) A, float(K,N) B", "C(m,n) +=! A(m,k) * B(k,n) where m in 1:3"),
    "a stride": ("float(M,K) A, float(K,N) B", "C(m,n) +=! A(2*m,k) * B(k,n)"),
    "a sum of one": ("float(M,K) A, float(M,N) B", "C(m,n) +=! A(m,k) * B(m,n)"),
    "whole numbers": ("int(M,K) A, int(K,N) B", "C(m,n) +=! A(m,k) * B(k,n)"),
    "the same twice": ("float(K,K) A, float(K,N) B", "C(m,n) +=! A(k,k) * B(k,n) where m in 0:3"),
}


def op_of(parameters: str, statement: str) -> Any:
    return tc.define(f"def f({parameters}) -> (C) {{ {statement} }}").f


def arguments(parameters: str) -> list[torch.Tensor]:
    sizes = {"M": 4, "N": 5, "K": 6, "L": 3}
    generator, found = torch.Generator().manual_seed(0), []
    for kind, dimensions in re.findall(r"(\w+)\(([\w,]+)\)", parameters):
        shape = [sizes[n] for n in dimensions.split(",")]
        values = torch.randint(-3, 4, shape, generator=generator)
        found.append(values.to({"float": torch.float32, "half": torch.float16, "int": torch.int32}[kind]))
    return found


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_recognized_and_right(name: str) -> None:
    op, tensors = op_of(*PRODUCTS[name]), arguments(PRODUCTS[name][0])
    kernel = op.compile(*tensors, target=SM90, options=CALLS)
    (product,) = kernel.compiled.parts
    assert isinstance(product, LibraryMatmul)
    assert product.function == ("bmm" if "b" in name else "mm")
    assert torch.equal(kernel.emulate(*tensors), op.reference(*tensors))
    assert f"torch.{product.function}(" in kernel.source()
    assert kernel.resources == {}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product_is_left_alone(name: str) -> None:
    op, tensors = op_of(*OTHERS[name]), arguments(OTHERS[name][0])
    initial = {"C": torch.zeros(4, 5)} if name == "adds to what is there" else {}
    kernel = op.compile(*tensors, target=SM90, options=CALLS, **initial)
    bound = kernel.compiled.bound
    assert split_at_library_calls(bound) == (bound,)


CHAIN = """
def chain(float(M,K) A, float(K,N) B, float(N) bias, float(N,P) D) -> (O, S) {
    T(m,k) = A(m,k) * 2
    C(m,n) +=! T(m,k) * B(k,n)
    R(m,n) = fmax(C(m,n) + bias(n), 0)
    C(m,n) = C(m,n) * 0.5
    E(m,p) +=! R(m,n) * D(n,p)
    S(m) +=! E(m,p)
    O(m,n) = C(m,n) + R(m,n)
}
"""


@needs_compiler
def test_a_def_is_split_around_its_products(caplog: pytest.LogCaptureFixture) -> None:
    """Temporaries live as long as they must, and one that a product starts may be changed after it."""
    op = tc.define(CHAIN).chain
    tensors = [torch.randn(*shape) for shape in ((4, 6), (6, 5), (5,), (5, 3))]
    with caplog.at_level(logging.DEBUG, "tensor_comprehensions"):
        kernel = op.compile(*tensors, target=SM90, options=CALLS)
    assert [isinstance(p, LibraryMatmul) for p in kernel.compiled.parts] == [False, True, False, True, False]
    assert any("torch.mm(" in r.getMessage() for r in caplog.records)
    for found, right in zip(kernel.emulate(*tensors), op.reference(*tensors), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    text = kernel.source()
    assert text.count("// torch.mm(") == 2
    assert text.index("chain_0") < text.index("// torch.mm(") < text.index("chain_2")
    assert kernel.resources["kernels"] >= 3
    assert kernel.compile_seconds > 0
    assert "chain" in repr(kernel)
    shifted = torch.randn(25)[1:].view(4, 6)
    for found, right in zip(kernel.emulate(shifted, *tensors[1:]), op.reference(shifted, *tensors[1:]), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="other sizes"):
        kernel.emulate(torch.randn(3, 6), *tensors[1:])
    plain = op.compile(*tensors, target=SM90, options=MappingOptions.naive())
    assert "torch.mm" not in plain.source()


LOOKUP = """
def f(float(V,K) table, int64(M) words, float(K,N) B) -> (C) {
    T(m,k) = table(words(m),k)
    C(m,n) +=! T(m,k) * B(k,n)
}
"""


@needs_compiler
def test_on_a_device(fake: FakeCuda) -> None:
    """Products run between the launches; nothing is written where a check fails."""
    op = tc.define(LOOKUP).f
    table, words, B = torch.randn(9, 6), torch.tensor([1, 8, 0, 3]), torch.randn(6, 5)
    kernel = op.compile(table, words, B, target=SM90, options=CALLS)
    torch.testing.assert_close(kernel(table, words, B), table[words] @ B, rtol=1e-4, atol=1e-4)
    out = torch.zeros(4, 5)
    assert kernel(table, words, B, out=out) is out
    torch.testing.assert_close(out, table[words] @ B, rtol=1e-4, atol=1e-4)
    out.zero_()
    with pytest.raises(RangeError, match="'table' is out of bounds"):
        kernel(table, torch.tensor([1, 9, 0, 3]), B, out=out)
    assert not out.any()
    assert {name for name, *_ in fake.launches} >= {"f_0_1"} or len(fake.launches) >= 4


@needs_compiler
def test_a_call_like_the_last_one_takes_the_short_way(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and products, with fresh outputs and with given ones; temporaries between them are new in each call."""
    op = tc.define(CHAIN).chain
    tensors = [torch.randn(*shape) for shape in ((4, 6), (6, 5), (5,), (5, 3))]
    kernel, out = op.compile(*tensors, target=SM90, options=CALLS), (torch.empty(4, 5), torch.empty(4))
    kernel(*tensors)
    kernel(*tensors, out=out)
    monkeypatch.setattr(gpu, "gather_on_device", lambda *_: 1 / 0)
    products: list[tuple[int, ...]] = []
    mm = torch.mm

    def counted(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        products.append(tuple(out.shape))
        return mm(left, right, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    other = [torch.randn_like(x) for x in tensors]
    before = len(fake.launches)
    first, second = kernel(*other), kernel(*tensors)
    assert products == [(4, 5), (4, 3)] * 2
    assert len(fake.launches) - before == 2 * kernel.resources["kernels"]
    assert kernel(*other, out=out) is out
    for given, found in ((other, first), (tensors, second), (other, out)):
        for x, right in zip(found, op.reference(*given), strict=True):
            torch.testing.assert_close(x, right, rtol=1e-4, atol=1e-4)


def test_a_def_that_is_a_product_launches_nothing(fake: FakeCuda) -> None:
    op, (A, B) = op_of(*PRODUCTS["tmm"]), arguments(PRODUCTS["tmm"][0])
    kernel, out = op.compile(A, B, target=SM90, options=CALLS), torch.empty(4, 5)
    for _ in range(2):
        assert torch.equal(kernel(A, B), A.t() @ B.t())
        assert torch.equal(kernel(A, B, out=out), A.t() @ B.t())
    assert not fake.launches
