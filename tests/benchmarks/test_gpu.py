"""The benchmarks on GPUs: what they say without one, and the line that a measurement becomes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from benchmarks import gpu, gpu_products, gpu_rates
from benchmarks.gpu import Row, main, measure_benchmark, select
from benchmarks.kernels import Benchmark
from tensor_comprehensions.options import TileOptions
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--calibrate"]):
        assert main(arguments) == 2
        assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_probes_of_rates_compile(name: str) -> None:
    """Every rate of a GPU's tensor cores and memories has a probe, which keeps its values in registers."""
    target = parse_gpu_target(f"cuda:{name}")
    found = list(gpu_rates.probes(target))
    groups = ["group_ops"] if name == "sm_90" else []
    fields = ["float32_lanes", "tensor_ops", "tensor_ops_int8", *groups, "l2_bytes", "shared_bytes"]
    assert [p.field for p in found] == fields
    for probe in found:
        made = nvrtc.compile_text(probe.source, f"{name}a" if probe.accelerated else name)
        used = made.resources["probe"]
        assert (used.spill_stores, used.spill_loads, used.local) == (0, 0, 0), probe.field
        peak = getattr(target, probe.field)
        blocks = [round(probe.work * gpu_rates.TIMES * probe.blocks / peak)] * 4
        assert probe.rate(blocks) == pytest.approx(peak, rel=1e-2)


def test_rates_beside_those_of_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A device whose blocks take the same time for every probe."""
    target = parse_gpu_target("cuda:sm_90")
    monkeypatch.setattr(gpu_rates.launch, "device_target", lambda device: target)
    monkeypatch.setattr(gpu_rates.launch, "cuda_api", lambda: None)
    monkeypatch.setattr(gpu_rates, "_run", lambda *_: [(1_700_000, 1_000_000)] * 8)
    monkeypatch.setattr(gpu_rates, "_copy_rate", lambda _: 3e12)
    assert gpu._calibrate(None) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert float(rows["clock"][1]) == 1.7e9
    assert float(rows["bandwidth"][1]) == 3e12
    assert float(rows["l2_bytes"][0]) == target.l2_bytes


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
    row = measure_benchmark(benchmark, mode=None, graphs=False, device="cpu")
    assert row.ours == row.copy == 2e-3
    assert set(row.peers) == {p.name for p in benchmark.peers}
    assert row.error <= benchmark.tolerance
    assert row.flops == {"matmul_256": 2 * 256**3, "tmm_128x32x256": 2 * 128 * 32 * 256}.get(name, 0)
    with pytest.raises(ArithmeticError, match="is wrong"):
        measure_benchmark(replace(benchmark, tolerance=-1.0), mode=None, graphs=False, device="cpu")


SMALL = {
    "gemm": gpu_products.gemm("", 24, 16, 40, torch.bfloat16),
    "bytes": gpu_products.gemm_bytes(32, 16, 24),
    "gelu": gpu_products.gemm_gelu(24, 16, 40),
    "swiglu": gpu_products.swiglu(24, 16, 40),
    "contraction": next(gpu_products.half_contractions("odd")),
    "attention": gpu_products.fmha(3, 20, 16, causal=False),
    "causal": gpu_products.fmha(3, 20, 16, causal=True),
    "layernorm": gpu_products.layernorm(5, 48),
}


@pytest.mark.parametrize("name", SMALL)
def test_products_equal_their_peers(name: str, on_cpu: None) -> None:
    """The defs and what libraries compute are the same, at small sizes on the CPU."""
    here = replace(SMALL[name], peers=tuple(p for p in SMALL[name].peers if p.name not in ("flash", "cudnn")))
    row = measure_benchmark(here, mode=None, graphs=False, device="cpu")
    assert row.error <= here.tolerance
    assert row.flops == here.flops


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")
def test_layers_equal_their_peers() -> None:
    for benchmark in (gpu_products.lstm_cell(16, 32, 32), gpu_products.mlp_layers(16, 64, 2)):
        given = benchmark.arguments()
        kernel: Any = benchmark.kernel
        found = gpu._tuple(kernel.compile(*given, target="cuda:sm_80").emulate(*given))
        for x, y in zip(found, gpu._tuple(benchmark.peers[0].function(*given)), strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["gemm_bf16_8192", "fmha_128x2048x128_causal", "gemm_tf32_4096"])
def test_large_products_are_for_tensor_cores(name: str) -> None:
    known = {b.name: b for b in (*gpu_products.products(), gpu_products.fmha(128, 2048, 128, causal=True))}
    benchmark = known[name]
    options = TileOptions(products="tf32") if "tf32" in name else None
    given = [torch.empty(i.shape, dtype=i.dtype) for i in benchmark.inputs]
    (op,) = tc.define(benchmark.source)
    assert re.search("wgmma|mma_m16", op.compile(*given, target="cuda:sm_90", options=options).source())


def test_a_failure_leaves_the_others_their_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def here(benchmark: Benchmark, *, mode: str | None, graphs: bool) -> Row:
        if benchmark.name == "matmul_256":
            raise ValueError("no such luck")
        return Row(benchmark.name, 2e-5, {"torch": 5e-5}, 40_000_000, 1.8e-5, 1e-7)

    monkeypatch.setattr(gpu, "measure_benchmark", here)
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
    gpu.capture_graph(run)()
    assert done == ["stream", *["run"] * 3, "stream ends", "synchronize", "graph", "run", "graph ends", "replay"]


def test_large_kernels_are_those_of_the_list_at_other_sizes() -> None:
    names = [b.name for b in select(None)]
    assert len(set(names)) == len(names)
    assert [b.name for b in select(["matmul_[24]*"])] == ["matmul_256", "matmul_2048", "matmul_4096"]
