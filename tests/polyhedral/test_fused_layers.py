"""Layers that are fused over rows of the batch: a thread packs their weights once, for all tiles of its own."""

from __future__ import annotations

import re

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.target import AVX512

SOURCE = """
def layers(float(B,N) I, float(O,N) W1, float(P,O) W2) -> (H, R) {
    H(b,o) +=! I(b,n) * W1(o,n)
    H(b,o) = fmaxf(H(b,o), 0)
    R(b,p) +=! H(b,o) * W2(p,o)
}"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [128, 131, 389])
def test_tiles_of_every_size_read_the_same_weights(rows: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, w1, w2 = torch.randn(rows, 40), torch.randn(48, 40), torch.randn(32, 48)
        h, r = tc.define(SOURCE).layers(x, w1, w2)
        hidden = torch.relu(x.double() @ w1.double().T)
        torch.testing.assert_close(h.double(), hidden, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(r.double(), hidden @ w2.double().T, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_weights_are_packed_ahead_of_the_tiles_of_a_thread() -> None:
    x, w1, w2 = torch.randn(512, 40), torch.randn(48, 40), torch.randn(32, 48)
    text = tc.define(SOURCE).layers.compile(x, w1, w2, target=AVX512).source("c")
    tiles = text.index("; tile < 8; ++tile)")
    for panel in ("S0_right", "S2_right"):
        stores = [m.start() for m in re.finditer(rf"\b{panel}(\[[^]=]*\])+ =", text)]
        assert max(stores) < tiles, panel
