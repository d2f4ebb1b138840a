"""The structured kernels are measured beside the machine's limits and reported; no time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kernels import outputs
from benchmarks.report import read_json
from benchmarks.runner import Settings, run
from benchmarks.structured.__main__ import benchmarks, main, row, select, summary
from benchmarks.structured.convolutions import Convolution
from benchmarks.timing import Quartiles
from tensor_comprehensions.runtime.cpu import roofline_probes
from tensor_comprehensions.tc_lang.semantics.check import compile_source

EVERYTHING = benchmarks()
SMALL = (
    Convolution("nwc", 2, 3, 5, (6,), (3,), 2, 1, last=True),
    Convolution("nchw", 1, 4, 6, (5, 4), (3, 2), 1, 2, finish=True),
    Convolution("grouped", 2, 6, 4, (5, 5), (3, 3), groups=2),
    Convolution("depthwise", 1, 5, 5, (4, 5), (3, 3), 2, groups=5, last=True),
    Convolution("depthwise", 1, 5, 5, (4, 5), (3, 3), groups=5),
    Convolution("ndhwc", 1, 2, 3, (3, 4, 5), (2, 2, 2), last=True),
)


def test_names_are_unique_and_shards_are_parts() -> None:
    assert len({b.name for b in EVERYTHING}) == len(EVERYTHING)
    parts = [select(EVERYTHING, ["conv1d_nwc"], (k, 3)) for k in (1, 2, 3)]
    assert sorted(b.name for part in parts for b in part) == sorted(
        b.name for b in EVERYTHING if b.family == "conv1d_nwc"
    )


def test_every_def_is_accepted() -> None:
    for source in dict.fromkeys(b.source for b in EVERYTHING):
        assert len(compile_source(source)) == 1


@pytest.mark.sampled  # convolutions
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_convolutions_and_their_peers_agree(case: Convolution) -> None:
    result = run(case.benchmark, 1, Settings(seconds=0.01, compiled=False))
    assert not result.failures
    assert result.ratio is not None
    assert result.limit is not None
    assert result.limit.unit == ("B" if case.depthwise else "FLOP")


def test_copies_copy_and_multiply_adds_count() -> None:
    for call, work in (
        *roofline_probes.peak_copy_calls(5000).values(),
        roofline_probes.peak_multiply_add_call(torch.float64),
    ):
        call()
        assert work > 0
    assert {work % 2 for _, work in roofline_probes.peak_copy_calls(5000).values()} == {0}


def test_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--kernels", "copy_L1_10x32", "gemm_f32_16", "--no-compile", "--seconds", "0.01"]
    assert main([*arguments, "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg")]) == 0
    shown = capsys.readouterr().out
    results = read_json(tmp_path / "r.json")
    assert [r.name for r in results] == ["copy_L1_10x32", "gemm_f32_16"]
    assert all(row(r)[0] in shown for r in results)
    assert all(text in shown for text in summary(results, {"copy_L1_10x32": 0.95, "gemm_f32_16": 1.0}))
    assert "<svg" in (tmp_path / "r.svg").read_text()
    assert main(["--load", str(tmp_path / "r.json")]) == 0
    assert all(isinstance(r.limit.share, Quartiles) for r in results if r.limit is not None)


def test_limits_follow_from_the_sizes() -> None:
    (b,) = select(EVERYTHING, ["conv2d_nhwc_1x8x8_32x64_k3x3"])
    arguments = b.arguments()
    results = outputs(b.peers[0].function(*(b.peers[0].prepare or (lambda *a: a))(*arguments)))
    assert b.operands == 4 * sum(t.numel() for t in (*arguments, *results))
    assert b.flops == 2 * results[0].numel() * 32 * 9
