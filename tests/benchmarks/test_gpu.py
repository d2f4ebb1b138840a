"""The benchmarks on GPUs: what they say without one, and the line that a measurement becomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Row, main, measured, select
from benchmarks.kernels import Benchmark


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_line() -> None:
    row = Row("softmax", 2e-5, {"torch": 5e-5, "torch compiled": 3e-5}, 40_000_000, 1.8e-5, 1e-7)
    text = row.text()
    for part in ("20.0 us", "1.50 x of torch compiled", "2000.0 GB/s", "90.0% of a copy", "torch 50.0"):
        assert part in text


class Event:
    """An event of a device whose every call takes two milliseconds."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 2.0


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in the place of a device."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device="cpu", **k: empty(*a, device="cpu", **k))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "FLUSH", 1 << 10)
    monkeypatch.setattr(gpu, "WARM", 0.001)
    monkeypatch.setattr(gpu, "CALLS", 2)


@pytest.mark.parametrize("name", ["matmul_256", "moments_128x36864", "transpose_512x512", "tmm_128x32x256"])
def test_a_measurement(name: str, on_cpu: None) -> None:
    (benchmark,) = select([name])
    row = measured(benchmark, mode=None, graphs=False, device="cpu")
    assert row.ours == row.copy == 2e-3
    assert set(row.peers) == {p.name for p in benchmark.peers}
    assert row.error <= benchmark.tolerance
    assert row.flops == {"matmul_256": 2 * 256**3, "tmm_128x32x256": 2 * 128 * 32 * 256}.get(name, 0)
    with pytest.raises(ArithmeticError, match="is wrong"):
        measured(replace(benchmark, tolerance=-1.0), mode=None, graphs=False, device="cpu")


def test_a_failure_leaves_the_others_their_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def here(benchmark: Benchmark, *, mode: str | None, graphs: bool) -> Row:
        if benchmark.name == "matmul_256":
            raise ValueError("no such luck")
        return Row(benchmark.name, 2e-5, {"torch": 5e-5}, 40_000_000, 1.8e-5, 1e-7)

    monkeypatch.setattr(gpu, "measured", here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    path = tmp_path / "rows.json"
    assert main(["--kernels", "*_256", "transpose_512x512", "--no-compile", "--json", str(path)]) == 1
    text = capsys.readouterr().out
    assert "matmul_256                   failed" in text
    assert "no such luck" in text
    assert [row["name"] for row in json.loads(path.read_text())] == ["transpose_512x512"]
    assert main(["--kernels", "transpose_512x512", "--seconds", "-1"]) == 0
    assert "is not measured" in capsys.readouterr().out


def test_a_captured_call_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs before it is captured, so that nothing is compiled or loaded meanwhile."""
    done: list[str] = []

    class Within:
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> None:
            done.append(self.what)

        def __exit__(self, *_: object) -> None:
            done.append(f"{self.what} ends")

    def replay() -> None:
        done.append("replay")

    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Within("stream"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: Within("graph"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replay))
    run: Callable[[], object] = lambda: done.append("run")  # noqa: E731
    gpu.captured(run)()
    assert done == ["stream", *["run"] * 3, "stream ends", "synchronize", "graph", "run", "graph ends", "replay"]


def test_large_kernels_are_those_of_the_list_at_other_sizes() -> None:
    names = [b.name for b in select(None)]
    assert len(set(names)) == len(names)
    assert [b.name for b in select(["matmul_[24]*"])] == ["matmul_256", "matmul_2048", "matmul_4096"]
