"""Large new tensors are in memory that asked for huge pages."""

import re
from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.runtime.cpu import huge_pages

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or not SMAPS.exists(), reason="no such pages here"
)

SOURCE = "def twice(float(N) x) -> (y) { y(n) = 2 * x(n) }"


def has_requested_huge_pages(address: int) -> bool:
    """Whether the memory at `address` has asked for huge pages, as Linux tells."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("nothing is there")


def middle(x: torch.Tensor) -> int:
    return x.data_ptr() + x.nbytes // 2


def test_outputs_of_calls() -> None:
    operator = tc.define(SOURCE).twice
    x = torch.randn(48 << 18)
    for _ in range(2):  # compiled, then found
        y = operator(x)
        assert has_requested_huge_pages(middle(y))
        assert torch.equal(y, 2 * x)
        del y


def test_outputs_of_kernels() -> None:
    x = torch.randn(48 << 18)
    y = tc.define(SOURCE).twice.compile(x)(x)
    assert has_requested_huge_pages(middle(y))
    assert torch.equal(y, 2 * x)


def test_small_ones_do_not_ask() -> None:
    x = torch.empty(64 << 18)
    huge_pages.advise_huge_pages(x.data_ptr(), huge_pages.LARGE - 1)
    assert not has_requested_huge_pages(middle(x))
    huge_pages.advise_huge_pages(x.data_ptr(), x.nbytes)
    assert has_requested_huge_pages(middle(x))
