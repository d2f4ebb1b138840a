"""Register tiles: what they cost, many at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.structured.analysis.contraction_info import ContractionInfo, analyze_contraction
from tensor_comprehensions.structured.cost.register_tiles import RegisterTileRanking
from tensor_comprehensions.structured.cost.tile_cost import all_tiles_cycles, live_registers, tile_cycles
from tensor_comprehensions.target import AVX2, AVX512

MATMUL = "C:i,j = A:i,k x B:k,j"


@pytest.fixture
def known(ops: Any) -> ContractionInfo:
    return analyze_contraction(ops.op(MATMUL, {"i": 29, "j": 100, "k": 64}))


def test_tilings_cost_together_what_each_costs_alone(known: ContractionInfo) -> None:
    sizes = {"j": np.array([16.0, 32.0, 48.0, 112.0]), "i": np.array([29.0, 7.0, 1.0, 12.0])}
    together = all_tiles_cycles(known, AVX512, 16, sizes)
    alone = [all_tiles_cycles(known, AVX512, 16, {name: n[k : k + 1] for name, n in sizes.items()}) for k in range(4)]
    assert together.tolist() == [float(cycles[0]) for cycles in alone]


def test_a_tiling_is_its_full_and_its_partial_tiles(known: ContractionInfo) -> None:
    def one(j: int, i: int) -> float:
        return float(tile_cycles(known, AVX512, 16, {"j": np.array([float(j)]), "i": np.array([float(i)])})[0])

    whole = all_tiles_cycles(known, AVX512, 16, {"j": np.array([48.0]), "i": np.array([12.0])})
    assert whole[0] == pytest.approx(2 * 2 * one(48, 12) + 2 * one(48, 5) + 2 * one(4, 12) + one(4, 5))


@pytest.mark.parametrize("target", [AVX2, AVX512])
def test_ranked_tiles_fit_the_registers_and_come_in_order(known: ContractionInfo, target: Any) -> None:
    ranked = RegisterTileRanking(known, target).cycles
    assert [tile[0] for tile in ranked] == sorted(tile[0] for tile in ranked)
    for _, lanes, columns, rows in ranked:
        points = {name: np.array([float(n)]) for name, n in (("j", columns), *rows)}
        assert live_registers(known, lanes, points)[0] < target.vector_registers
