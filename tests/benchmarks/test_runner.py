"""The runner measures, checks and reports; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main, select
from benchmarks.kernels import BENCHMARKS, Benchmark, Peer, floats
from benchmarks.plot import draw
from benchmarks.report import HEAD, duration, notes, read_json, table, write_json
from benchmarks.runner import OURS, Settings, def_name, run
from benchmarks.timing import Quartiles, interleave, ratios
from tensor_comprehensions.tc_lang.semantics.check import compile_source

ADD = "def add(float(N) a, float(N) b) -> (c) { c(n) = a(n) + b(n) }"
SETTINGS = Settings(seconds=0.01, compiled=False)


def tiny(*others: Peer, source: str = ADD) -> Benchmark:
    return Benchmark("tiny", "pointwise", source, floats((40,), (40,)), (Peer("torch", torch.add), *others), goal=0.01)


def test_a_kernel_through_the_whole_runner(tmp_path: Path) -> None:
    wrong = Peer("wrong", lambda a, b: a - b)
    broken = Peer("broken", lambda a, b: a @ b[:3])
    result = run(tiny(wrong, broken), 1, SETTINGS)
    assert list(result.times) == [OURS, "torch"]
    assert result.best == "torch"
    assert result.ratio is not None
    assert result.ratio.low <= result.ratio.median <= result.ratio.high
    assert result.errors[OURS] < 1e-6
    assert "wrong result" in result.failures["wrong"]
    assert "RuntimeError" in result.failures["broken"]
    head, row = table([result])
    assert head.split()[0] == HEAD[0]
    assert row.startswith("tiny")
    assert len(list(notes([result, result]))) == 2
    write_json(tmp_path / "r.json", [result], {"seconds": 0.01})
    assert json.loads((tmp_path / "r.json").read_text())["settings"] == {"seconds": 0.01}
    assert read_json(tmp_path / "r.json") == [result]
    draw([result], tmp_path / "r.svg")
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_our_failure_leaves_the_peers() -> None:
    result = run(tiny(source="def add(float(N) a, float(N) b) -> (c) { c(n) = a(n) - b(n) }"), 1, SETTINGS)
    assert "wrong result" in result.failures[OURS]
    assert result.ratio is None
    assert "torch" in result.times


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    run(tiny(), before + 1, SETTINGS)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("benchmark_", BENCHMARKS, ids=lambda b: b.name)
def test_every_def_is_accepted(benchmark_: Benchmark) -> None:
    (function,) = compile_source(benchmark_.source)
    assert function.name == def_name(benchmark_.source)


def test_names_are_unique_and_selectable() -> None:
    assert len({b.name for b in BENCHMARKS}) == len(BENCHMARKS)
    assert [b.name for b in select(["softmax*"])] == ["softmax_4096x1024"]
    assert len(select(["gconv", "1lut"])) == 3
    assert select(None) == list(BENCHMARKS)


def test_command_line_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--kernels", "MLP?"]) == 0
    assert capsys.readouterr().out.split()[::2] == ["mlp1_128x2000x128", "mlp3_128x128x64x32x2"]


def test_rounds_are_shared_and_bounded() -> None:
    calls: list[str] = []
    both = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    samples = interleave(both, seconds=0, least=7)
    assert samples.rounds == 7
    assert [len(v) for v in samples.seconds.values()] == [7, 7]
    assert {"a", "b"} == set(calls)
    assert ratios([2.0, 4.0, 6.0], [1.0, 1.0, 2.0]) == Quartiles(2.5, 3.0, 3.5)


def test_durations() -> None:
    assert [duration(s) for s in (2.5, 0.0123, 4e-6, 3e-8)] == ["2.5 s", "12.3 ms", "4 us", "30 ns"]
