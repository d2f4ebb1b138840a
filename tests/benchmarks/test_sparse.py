"""The benchmark of sparse operators: its data, its checks, its reports. No time is asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from benchmarks import sparse
from benchmarks.runner import OURS
from benchmarks.sparse import KERNELS, PATTERNS, SCALES, SCIPY, TORCH, Data

TINY = SCALES["tiny"]


@pytest.mark.sampled  # patterns for each kernel
@pytest.mark.parametrize(("name", "pattern"), sparse.select(None, None))
def test_all_contenders_give_our_result(name: str, pattern: str) -> None:
    measured = sparse.measure(name, Data(TINY, pattern, torch.float64), 1, 0.001)
    assert not measured.failures
    peers = {TORCH} if KERNELS[name].scipy is None else {SCIPY, TORCH}
    assert set(measured.times) == {OURS, *peers}
    assert set(measured.ratios) == peers
    assert measured.best in peers
    assert measured.goal is None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_data_are_the_same_in_every_process_and_as_large_as_said(pattern: str) -> None:
    scale = replace(TINY, rows=400, elements=4000)
    first, again, other = (Data(scale, pattern, torch.float64).matrix(n) for n in (0, 0, 1))
    assert torch.equal(first.values, again.values)
    assert torch.equal(first.coordinates(), again.coordinates())
    assert not torch.equal(first.values[:99], other.values[:99])
    assert first.check().shape == (400, 400)
    assert 2000 < first.nnz < 9000
    counts = first.coordinates()[0].bincount(minlength=400)
    assert (counts.max() > 8 * counts.float().mean()) == (pattern == "zipf")
    assert (counts.max() == 21) == (pattern == "band")


def test_a_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    chosen = ["--kernels", "spm?", "--data", "band", "--scale", "tiny", "--dtype", "float32"]
    assert sparse.main([*chosen, "--threads", "1", "2", "--seconds", "0.001", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.count("band") >= 4
    assert "as fast on 2 threads as on one" in text
    assert [m.kernel for m in sparse.read_json(path)] == ["spmv", "spmm"] * 2
    assert sparse.main(["--load", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == text.splitlines()[:3]
    assert sparse.main(["--list", "--kernels", "mttkrp"]) == 0
    assert capsys.readouterr().out.split() == ["mttkrp", "uniform"]


def test_without_scipy_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "scipy_sparse", None)
    measured = sparse.measure("spmv", Data(TINY, "band", torch.float64), 1, 0.001)
    assert set(measured.times) == {OURS, TORCH}
    assert "not installed" in measured.failures[SCIPY]
    assert any(SCIPY in note and "spmv band" in note for note in sparse.notes([measured]))


def test_another_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_places(*matrices: Any) -> Any:
        return lambda: matrices[0].torch()

    def other_values(a: tc.SparseTensor, x: torch.Tensor) -> Any:
        return lambda: 2 * (a.to_dense() @ x)

    monkeypatch.setitem(sparse.KERNELS, "add", replace(KERNELS["add"], torch=other_places))
    monkeypatch.setitem(sparse.KERNELS, "spmv", replace(KERNELS["spmv"], torch=other_values))
    for name, words in {"add": "inf", "spmv": "difference 0.5"}.items():
        measured = sparse.measure(name, Data(TINY, "uniform", torch.float64), 1, 0.001)
        assert words in measured.failures[TORCH]
        assert TORCH not in measured.times


def test_goals_are_for_full_data_on_one_thread() -> None:
    measured = sparse.measure("spmv", Data(TINY, "band", torch.float64), 1, 0.001)
    assert "0.90 " in sparse.row(replace(measured, goal=0.9))[9]
    assert all(set(kernel.goals) == set(kernel.patterns) for kernel in KERNELS.values())
