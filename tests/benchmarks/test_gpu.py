"""The benchmarks on GPUs: what they say without one, and the line that a measurement becomes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import Row, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_line() -> None:
    row = Row("softmax", 2e-5, {"torch": 5e-5, "torch compiled": 3e-5}, 40_000_000, 1.8e-5, 1e-7)
    text = row.text()
    for part in ("20.0 us", "1.50 x of torch compiled", "2000.0 GB/s", "90.0% of a copy", "torch 50.0"):
        assert part in text
