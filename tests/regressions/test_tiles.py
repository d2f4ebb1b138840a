"""Tiles that divide no extent, around contractions of static size (polyhedral)."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions import schedules
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.schedules import Schedule


@pytest.mark.parametrize("tile", [(8, 3), (3, 8), (3, 5, 7), (5,), (0, 3)])
def test_every_mix_of_whole_and_shorter_tiles(tile: tuple[int, ...]) -> None:
    source = "def f(double(B,K,D) X, double(D,B,N) Y) -> (Z) { Z(n,m,k) +=! X(m,k,b) * Y(b,m,n) }"
    op = tc.define(source).f
    x, y = torch.randn(4, 17, 4, dtype=torch.float64), torch.randn(4, 4, 17, dtype=torch.float64)
    kernel = op.compile(x, y, options=CpuOptions(tile=tile))
    torch.testing.assert_close(kernel(x, y), op.reference(x, y))


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_tiles_with_few_lanes_are_turned_in_blocks_as_wide_as_these(lanes: int) -> None:
    """Blocks of eight floats once read past the end of the scratch buffer of a tile four lanes wide."""
    f = tc.define("def f(float(N,A,D) x, float(N,D,B) y) -> (C) { C(n,a,b) +=! x(n,a,d) * y(n,d,b) }").f
    x, y = torch.randint(-3, 4, (31, 2, 9)).float(), torch.randint(-3, 4, (31, 9, 17)).float()
    kernel = f.compile(x, y, schedule=schedules.tile(a=2, b=5, n=lanes) >> schedules.vectorize("n", lanes=lanes))
    torch.testing.assert_close(kernel(x, y), x @ y, rtol=0, atol=0)


@pytest.mark.parametrize("tile", [(64,), (0, 64)])
@pytest.mark.parametrize("asked", [None, schedules.tile(m=6, n=32) >> schedules.parallel("m1")], ids=str)
def test_threads_share_the_tiles_or_what_is_inside_them(tile: tuple[int, ...], asked: Schedule | None) -> None:
    product = tc.define("def product(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }").product
    a, b = torch.randint(-3, 4, (256, 100)).float(), torch.randint(-3, 4, (100, 256)).float()
    kernel = product.compile(a, b, options=CpuOptions(tile=tile), schedule=asked)
    assert kernel.source("loops").count("parallel for") == 1
    torch.testing.assert_close(kernel(a, b), a @ b, rtol=0, atol=0)
