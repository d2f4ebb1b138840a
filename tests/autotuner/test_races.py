"""Races by their recorded times: what they decide, and when they decide nothing."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest

from tensor_comprehensions.autotuner import timing
from tensor_comprehensions.autotuner.timing import (
    MAX_SAMPLES,
    MAX_WAITING_FRACTION,
    MIN_ROUNDS,
    MIN_SAMPLES,
    TimedLaunch,
    Times,
    _normalize_samples,
    speedup_lower_bound,
    time_interleaved,
)

# A product of two matrices on two threads of two processors that also had six other processes to run, twice in turns:
# microseconds, and what part of them its threads waited for a processor; and the same when they had nothing else to do.
BUSY = (
    (23484, 15852, 31957, 35846, 23897, 23947, 23908, 33817, 23830, 27955, 23900, 23684, 27963, 23869, 23966, 23906),
    (1.87, 2.28, 1.58, 1.74, 1.68, 1.67, 1.68, 1.78, 1.68, 1.43, 1.84, 1.69, 1.72, 1.69, 1.67, 1.68),
    (23886, 27903, 23927, 27868, 23901, 35900, 23943, 25989, 24321, 19509, 35843, 24133, 23761, 31923, 27825, 23849),
    (1.68, 1.58, 1.67, 1.6, 1.84, 1.67, 1.68, 1.62, 1.67, 1.85, 1.45, 2.16, 1.68, 1.69, 1.73, 1.68),
)
# fmt: off
IDLE = (
    (
        71.5, 56.0, 57.3, 57.6, 57.0, 58.0, 86.3, 57.0, 57.7, 57.2, 57.8, 56.5, 54.6, 54.9, 55.0, 54.6, 54.2,
        50.0, 54.1, 59.3, 55.7, 58.6, 56.0, 56.0, 56.5, 73.4, 57.5, 56.7, 54.8, 55.1, 55.1, 54.1, 78.2, 54.6,
        57.5, 55.1, 54.5, 56.2, 55.7, 58.7,
    ),
    (0.0,) * 40,
    (
        55.2, 59.3, 55.2, 57.6, 56.9, 57.8, 56.5, 59.0, 57.0, 56.8, 56.8, 55.7, 70.1, 57.8, 55.5, 54.6, 56.7,
        54.5, 114.4, 60.0, 57.5, 56.2, 56.9, 56.9, 55.8, 55.1, 54.0, 54.8, 53.9, 53.9, 55.0, 55.7, 57.4, 55.3,
        56.8, 55.5, 54.2, 54.9, 56.8, 77.3,
    ),
    (*(0.0,) * 18, 0.16, *(0.0,) * 21),
)
# fmt: on


def make_recorded_times(noise: tuple[tuple[float, ...], ...], faster: float = 1.0) -> tuple[Times, Times]:
    """The times of two kernels in turns, the second so many times as fast."""
    first, waits, second, more = noise
    return Times(first, waits), Times(tuple(s / faster for s in second), more)


def test_a_race_on_a_busy_machine_decides_nothing() -> None:
    for faster in (0.9, 1.0, 1.2, 2.0):
        slow, quick = make_recorded_times(BUSY, faster)
        assert speedup_lower_bound(slow, quick) == speedup_lower_bound(quick, slow) == 0.0


def test_a_race_on_an_idle_machine_decides_what_its_noise_lets_it() -> None:
    one, other = make_recorded_times(IDLE)
    assert 0.9 < speedup_lower_bound(one, other) <= 1.0
    assert 0.9 < speedup_lower_bound(other, one) <= 1.0
    slow, quick = make_recorded_times(IDLE, 1.2)
    assert 1.08 < speedup_lower_bound(slow, quick) <= 1.2
    assert speedup_lower_bound(quick, slow) < 0.9


def test_moments_in_which_threads_wait_for_a_processor_do_not_count() -> None:
    slow, quick = make_recorded_times(IDLE, 1.2)
    lost = (
        Times((*slow.samples, 1.0, 1.0), (*slow.waits, 0.5, 0.5)),
        Times((*quick.samples, 9.0, 9.0), (*quick.waits, 0.5, 0.5)),
    )
    assert speedup_lower_bound(*lost) == speedup_lower_bound(slow, quick)
    assert (lost[0].median, lost[1].quartiles) == (slow.median, quick.quartiles)


def test_kernels_that_are_equal_seldom_win() -> None:
    samples = [s for k, s in enumerate((*IDLE[0], *IDLE[2])) if (*IDLE[1], *IDLE[3])[k] <= MAX_WAITING_FRACTION]
    source = random.Random(1)
    wins = 0
    for _ in range(2000):
        one, other = (Times(tuple(source.choices(samples, k=40))) for _ in range(2))
        wins += speedup_lower_bound(one, other) > 1
    assert wins <= 12  # 4 are expected


def test_a_few_rounds_tell_nothing() -> None:
    few, enough = (Times((2.0,) * n) for n in (MIN_ROUNDS - 1, MIN_ROUNDS))
    assert speedup_lower_bound(few, Times((1.0,) * (MIN_ROUNDS - 1))) == 0.0
    assert speedup_lower_bound(enough, Times((1.0,) * MIN_ROUNDS)) == 2.0


def test_what_is_timed_in_turns_does_not_depend_on_how_fast_the_machine_is_at_the_time() -> None:
    """Half as fast in every third round it takes three quarters of the time of the other all the same."""
    slow = [2.0 if k % 3 == 0 else 1.0 for k in range(12)]
    waits = [0.5 if k == 5 else 0.0 for k in range(12)]
    mine = [(3e-6 * s, 0.0) for s in slow]
    others = list(zip((4e-6 * s for s in slow), waits, strict=True))
    (times, other) = _normalize_samples([mine, others])
    assert times.quartiles == pytest.approx((3e-6,) * 3)
    assert times.waits == tuple(waits)
    assert other.median == pytest.approx(4e-6)
    assert _normalize_samples([mine])[0].quartiles[2] == pytest.approx(6e-6)


def test_a_timing_in_turns_ends_when_it_is_hopeless_beside_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"mine": 4e-3, "other": 1e-3}
    monkeypatch.setattr(timing, "sample_run", lambda launch, calls, before: seconds[launch.name])
    mine, other = (
        cast(TimedLaunch, SimpleNamespace(name=name, memory=SimpleNamespace(accumulates=False))) for name in seconds
    )
    monkeypatch.setattr(timing, "_is_precise", lambda times: False)
    assert len(time_interleaved(mine, other, (1e-3, 1e-3), 100.0, 3.9)[0].samples) == MIN_SAMPLES
    assert len(time_interleaved(mine, other, (1e-3, 1e-3), 100.0, 4.1)[0].samples) == MAX_SAMPLES
