"""The benchmark of whole networks: those that need no other package are right in every mode."""

from __future__ import annotations

import pytest
import torch

from benchmarks import models
from benchmarks.networks import NETWORKS, make_network


@pytest.mark.parametrize("mode", models.MODES)
def test_a_network_is_checked(mode: str) -> None:
    row = models.measure_network("graph_attention", mode, 1, seconds=0)
    assert row.problem == ""
    assert 0 < row.share <= 1
    assert row.ratios == {}
    assert "not timed" in models.format_row(row)


def test_a_network_is_timed_beside_eager() -> None:
    row = models.measure_network("graph_attention", "inference", 1, seconds=0.05)
    assert row.ratios[models.EAGER] > 0


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = models.run_network

    def run(network: object, inputs: object, mode: str) -> object:
        found = whole(network, inputs, mode)
        return tuple(x * 1.5 for x in found) if hasattr(network, "_orig_mod") else found

    monkeypatch.setattr(models, "run_network", run)
    row = models.measure_network("graph_attention", "inference", 1, seconds=0.05)
    assert row.problem.startswith("error ")
    assert row.ratios == {}


def test_networks_are_the_same_for_a_seed() -> None:
    first, second = (make_network("unet").state_dict() for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert len(NETWORKS) >= 24
