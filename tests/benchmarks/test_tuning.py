"""Searches on recorded times end where the times say."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks import tuning
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.outcomes import Outcome
from tensor_comprehensions.autotuner.search_loop import TuningResult
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.structured.language.schedule_types import schedule_for


def test_searches_on_recorded_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PIPELINES", 3)
    monkeypatch.setattr(tuning, "BUDGETS", (12, 1000))
    monkeypatch.setattr(tuning, "SEEDS", 3)
    _, made, seeds = tuning.small()
    ways = {made.options(made.random(Random(n))) for n in range(60)} | {made.options(seeds[0])}
    table = {o: float(1 + len(repr(schedule_for(o.schedule, "S0")))) for o in ways}
    head, *lines = tuning.replay_searches(made, seeds, table)
    assert head.startswith(f"{len(table)} ways")
    assert [line.split()[0] for line in lines] == ["12", "12", "1000", "1000"]
    assert all(float(line.split(": ")[1].split()[0]) >= 1.0 for line in lines)
    assert tuning.find_best_time("random", 0, 1000, made, seeds, table) == min(table.values())


def test_what_neither_compiles_nor_runs_is_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "available_cpus", lambda: (0, 1))
    options = CpuOptions()
    outcomes = tuple(
        Outcome(options, pb.OK, "", 1e-3, 0.0, 5, str(k), 1, compiling=2.0, running=1.0, elapsed=4.0 + 4 * k)
        for k in range(2)
    )
    tuned = TuningResult(
        options, options, 1e-3, 1e-3, 0.0, 5, True, outcomes, elapsed=20.0, interrupted=False, raced=1.0
    )
    assert tuning.rests(tuned) == pytest.approx((0.5, 0.75))
