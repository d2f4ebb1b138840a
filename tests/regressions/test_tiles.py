"""Tiles that divide no extent, around contractions of static size (polyhedral)."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.options import CpuOptions


@pytest.mark.parametrize("tile", [(8, 3), (3, 8), (3, 5, 7), (5,), (0, 3)])
def test_every_mix_of_whole_and_shorter_tiles(tile: tuple[int, ...]) -> None:
    source = "def f(double(B,K,D) X, double(D,B,N) Y) -> (Z) { Z(n,m,k) +=! X(m,k,b) * Y(b,m,n) }"
    op = tc.define(source).f
    x, y = torch.randn(4, 17, 4, dtype=torch.float64), torch.randn(4, 4, 17, dtype=torch.float64)
    kernel = op.compile(x, y, options=CpuOptions(tile=tile))
    torch.testing.assert_close(kernel(x, y), op.reference(x, y))
