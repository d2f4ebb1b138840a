"""Tensors of more than 2^31 elements, in a file of which only what is touched exists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc

ELEMENTS = 2**31 + 2**28
OPS = tc.define("""
def pick(uint8(V) table, int64(N) at) -> (y) { y(i) = table(at(i)) }
def rows(float(V,D) table, int64(N) at) -> (y) { y(i,d) = 2 * table(at(i), d) }
def add(float(N,M) a, float(N,M) b) -> (c) { c(i,j) = a(i,j) + b(i,j) }
def turned(float(N,M) a, float(M,N) b) -> (c) { c(i,j) = a(i,j) + b(j,i) }
def total(float(N,M) a) -> (s) { s(i) +=! a(i,j) }
def matmul(float(M,K) a, float(K,N) b) -> (c) { c(m,n) +=! a(m,k) * b(k,n) }
""")


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tensor]:
    path: Path = tmp_path_factory.mktemp("large") / "elements"
    yield torch.from_file(str(path), shared=True, size=ELEMENTS, dtype=torch.float32)
    path.unlink()


def make_strided(memory: Tensor, shape: tuple[int, int], strides: tuple[int, int], start: int = 0) -> Tensor:
    """Random numbers in an excerpt of `memory` that reaches beyond 2^31 elements."""
    x = memory.as_strided(shape, strides, start)
    assert start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) > 2**31
    return x.copy_(torch.randn(shape))


def test_elements_beyond_are_gathered(memory: Tensor) -> None:
    bytes_ = memory.view(torch.uint8)
    at = torch.tensor([0, 2**31 - 1, 2**31, 2**32 + 50, bytes_.numel() - 1])
    bytes_[at] = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    for call in (OPS.pick, OPS.pick.overload):
        assert torch.equal(call(bytes_, at), torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8))
        with pytest.raises(tc.RangeError):
            call(bytes_, at + 1)


def test_rows_of_a_large_table(memory: Tensor) -> None:
    table = memory[: ELEMENTS // 1000 * 1000].view(-1, 1000)
    at = torch.tensor([0, len(table) - 1, 2**31 // 1000])
    table[at] = torch.randn(3, 1000)
    assert torch.equal(OPS.rows(table, at), 2 * table[at])


@pytest.mark.parametrize("strides", [(2**30 + 7, 1), (1, 2**26 + 5), (2**30 + 2**20, 3)], ids=str)
def test_strides_beyond(memory: Tensor, strides: tuple[int, int]) -> None:
    """Rows, columns and elements that lie far apart, as inputs and as what is written to."""
    shape = (3, 33)
    x, y = make_strided(memory, shape, strides, 11), torch.randn(shape)
    torch.testing.assert_close(OPS.add(x, y), x + y)
    torch.testing.assert_close(OPS.turned(y.t(), x), y.t() + x.t())
    torch.testing.assert_close(OPS.total(x), x.sum(1))
    torch.testing.assert_close(OPS.matmul(x, y.t()), x @ y.t())
    torch.testing.assert_close(OPS.matmul.overload(y.t(), x), y.t() @ x)
    held = x.clone()
    OPS.add(held, y, out=x)
    torch.testing.assert_close(x, held + y)


def test_sizes_beyond(memory: Tensor) -> None:
    """Shapes are counted in 64 bits also where nothing is computed."""
    shape = (2**17, 2**17)
    assert OPS.add.infer(shape, shape) == shape
    meta = torch.empty(shape, device="meta")
    assert OPS.add(meta, meta).numel() == 2**34
    with pytest.raises(tc.ArgumentError, match="no memory"):
        OPS.turned(torch.ones(1, 1).expand(2**24, 2**24), torch.ones(1, 1).expand(2**24, 2**24))
