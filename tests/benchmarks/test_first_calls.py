"""The first steps of networks, which `benchmarks.first_calls` times."""

from __future__ import annotations

import pytest
import torch

from benchmarks import first_calls


def test_the_last_process_of_a_round_uses_the_cache_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []

    def run(name: str, backend: str, folder: str) -> float:
        calls.append((backend, folder))
        return float(len(calls))

    monkeypatch.setattr(first_calls, "_run_process", run)
    assert first_calls.measure_round("encoder") == first_calls.Round(1.0, 2.0, 3.0)
    assert [backend for backend, _ in calls] == ["aot_eager", "tensor_comprehensions", "tensor_comprehensions"]
    assert calls[1][1] == calls[2][1]


def test_networks_have_the_sizes_they_name() -> None:
    network, x = first_calls.make_resnet18()
    assert sum(p.numel() for p in network.parameters()) == 11_689_512  # as torchvision's
    with torch.no_grad():
        assert network.eval()(x).shape == (4, 1000)
        network, x = first_calls.make_encoder()
        assert network.eval()(x).shape == x.shape


def test_an_unknown_network_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        first_calls.main(["resnet19"])
    assert "resnet19" in capsys.readouterr().err
