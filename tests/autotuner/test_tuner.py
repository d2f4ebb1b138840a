"""The tuner over an evaluator that runs nothing: what it believes, what it remembers and who wins."""

from __future__ import annotations

import logging
import math
import os
import signal
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensor_comprehensions.autotuner import recorded_options, search_loop
from tensor_comprehensions.autotuner import session as tuning_calls
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.device import TuningDevice
from tensor_comprehensions.autotuner.journal import Journal
from tensor_comprehensions.autotuner.problem import Problem
from tensor_comprehensions.autotuner.recorded_options import lookup_best, nearest_sizes
from tensor_comprehensions.autotuner.search_loop import SearchBudget, Tuner, TuningResult
from tensor_comprehensions.autotuner.session import TuningTask, parse_seconds, tune
from tensor_comprehensions.cache import measurement_store
from tensor_comprehensions.cache.import_export import add_measurements, read_measurements, write_measurements
from tensor_comprehensions.cache.options_proto import from_message, to_message
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.options import CpuOptions

from .pretend import SOFTMAX, TMM, Pretend, landscape, space_of, subject, timing

EFFORT = SearchBudget(seconds=1000.0, generations=4, population=12)
HERE = (TuningDevice("cpu", (0,), 1),)


def tune_pretended(evaluator: Pretend, effort: SearchBudget = EFFORT, **others: object) -> TuningResult:
    return tune(subject(), effort, HERE, evaluator=evaluator, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("search", ["genetic", "random"])
def test_the_fastest_wins_the_race_with_the_default(search: str) -> None:
    evaluator = Pretend()
    found = tune_pretended(evaluator, replace(EFFORT, search=search))
    assert found.seconds == min(map(landscape, evaluator.asked)) < found.default_seconds == landscape(CpuOptions())
    assert found.speedup == found.default_seconds / found.seconds
    assert len(found.outcomes) == len(evaluator.asked) > 20
    assert landscape(found.options) == found.seconds


def test_times_taken_in_turns_with_the_default_are_reported_as_if_the_machine_were_always_as_fast() -> None:
    """The default comes along from the second one on; the machine is slower and slower."""
    usual, moment = landscape(CpuOptions()), [1.0]

    def change(options: CpuOptions, reply: pb.Reply) -> None:
        if options != CpuOptions():
            moment[0] *= 1.1
            reply.timings[0].CopyFrom(timing(moment[0] * landscape(options)))
            reply.timings.append(timing(moment[0] * usual))

    evaluator = Recording(change=change)
    found = tune_pretended(evaluator)
    assert all(o.seconds == pytest.approx(landscape(o.options)) for o in found.outcomes)
    first, *others = (r for r in evaluator.requests if r.stage == pb.MEASURE)
    assert len(first.codes) == 1
    assert {len(r.codes) for r in others} == {2}
    assert {r.codes[1].program for r in others} == {first.codes[0].program}


def test_nobody_believes_a_time_beside_which_the_default_takes_none() -> None:
    def change(options: CpuOptions, reply: pb.Reply) -> None:
        if options != CpuOptions():
            reply.timings.append(pb.Timing(median=0.0, runs=5))

    found = tune_pretended(Pretend(change=change))
    assert {o.status for o in found.outcomes[1:]} == {pb.IMPOSSIBLE}


def test_a_tie_goes_to_the_default() -> None:
    assert tune_pretended(Pretend(raced=lambda options: 1e-3)).options == CpuOptions()


def test_case_44_one_lucky_measurement_does_not_win() -> None:
    lucky: list[CpuOptions] = []

    def seconds_of(options: CpuOptions) -> float:
        if options != CpuOptions() and not lucky:
            lucky.append(options)
        return 1e-6 if options in lucky else landscape(options)

    found = tune_pretended(Pretend(seconds_of, raced=landscape))
    assert lucky
    assert found.options not in lucky
    assert found.seconds < landscape(CpuOptions())


@pytest.mark.parametrize("lie", [float("nan"), 0.0, -1.0, 1e-12, 1e9, float("inf")])
def test_case_43_times_that_cannot_be_are_never_chosen(lie: float) -> None:
    liars: set[CpuOptions] = set()

    def change(options: CpuOptions, reply: pb.Reply) -> None:
        if options.fusion == "max":
            liars.add(options)
            reply.timings[0].median, reply.timings[0].runs = lie, 5

    found = tune_pretended(Pretend(change=change))
    assert liars
    assert found.options not in liars
    assert {o.status for o in found.outcomes if o.options in liars} == {pb.IMPOSSIBLE}


def test_case_46_when_all_fail_the_reasons_are_reported() -> None:
    def change(options: CpuOptions, reply: pb.Reply) -> None:
        reply.status, reply.message = (pb.CRASH, "SIGSEGV") if options.interleave else (pb.NAN, "output 0")

    with pytest.raises(ArgumentError, match=r"no way to lower softmax works: \d+ x .*SIGSEGV") as error:
        tune_pretended(Pretend(change=change))
    assert "x nan (output 0" in str(error.value)


def test_a_default_that_fails_does_not_win() -> None:
    def change(options: CpuOptions, reply: pb.Reply) -> None:
        if options == CpuOptions():
            reply.status = pb.RUN_TIMEOUT

    found = tune_pretended(Pretend(change=change, raced=lambda o: 0.0 if o == CpuOptions() else landscape(o)))
    assert found.options != CpuOptions()


def test_answers_of_another_device_are_refused() -> None:
    def change(options: CpuOptions, reply: pb.Reply) -> None:
        if options.interleave == 4:
            reply.fingerprint = "elsewhere"

    found = tune_pretended(Pretend(change=change))
    refused = [o for o in found.outcomes if o.options.interleave == 4]
    assert refused
    assert all(o.status == pb.REFUSED and "elsewhere" in o.message for o in refused)
    assert found.options.interleave != 4


def test_candidates_with_the_same_code_are_run_once() -> None:
    class Same(Pretend):
        def submit(self, request: pb.Request):  # type: ignore[no-untyped-def]
            future = super().submit(request)
            if request.stage != pb.COMPILE:
                return future
            reply = pb.Reply.FromString(future.result())
            reply.digest = "one" if request.options[0].fields[0].value.text == "min" else reply.digest
            done = type(future)()
            done.set_result(reply.SerializeToString())
            return done

    evaluator = Same()
    found = tune_pretended(evaluator)
    same = [o for o in found.outcomes if o.digest == "one"]
    assert len(same) > 2
    assert len([o for o in evaluator.asked if o.fusion == "min"]) == 1
    assert len({o.seconds for o in same}) == 1


def test_a_budget_ends_the_search() -> None:
    evaluator = Pretend()
    found = tune_pretended(evaluator, replace(EFFORT, seconds=1e-6))
    assert (found.options, len(found.outcomes)) == (CpuOptions(), 1)


class Recording(Pretend):
    """An evaluator that keeps what it is sent, in order."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.requests: list[pb.Request] = []

    def submit(self, request: pb.Request) -> Future[bytes]:
        self.requests.append(pb.Request.FromString(request.SerializeToString()))
        return super().submit(request)


def test_others_are_compiled_with_the_default_and_its_time_limits_them() -> None:
    evaluator = Recording()
    found = tune_pretended(evaluator)
    stages = [r.stage for r in evaluator.requests]
    assert stages[: stages.index(pb.MEASURE)] == [pb.RACE, *[pb.COMPILE] * (evaluator.width // 2)]
    default, other, *_ = (r for r in evaluator.requests if r.stage == pb.MEASURE)
    assert (default.hopeless, default.losing) == (0.0, 0.0)
    assert other.losing == pytest.approx(1.25)  # of the default's, which runs in turns with it
    assert [c.program for c in other.codes[1:]] == [default.codes[0].program]
    assert [o.options for o in found.outcomes] == evaluator.asked
    assert found.outcomes[0].options == CpuOptions()


def test_long_code_is_compiled_first_and_candidates_keep_their_order() -> None:
    what = subject(TMM, (64, 96), (48, 96))
    made, _ = space_of(what)
    evaluator = Recording()
    found = tune(what, replace(EFFORT, generations=2), HERE, evaluator=evaluator)
    groups = groupby(evaluator.requests, lambda r: r.stage)
    batches = [[made.length(from_message(r.options[0])) for r in each] for stage, each in groups if stage == pb.COMPILE]
    assert len(batches) > 2
    assert all(lengths == sorted(lengths, reverse=True) for lengths in batches)
    assert [o.options for o in found.outcomes] == evaluator.asked
    in_order = [made.length(options) for options in evaluator.asked]
    assert in_order != [length for lengths in batches for length in lengths]


def test_a_generation_is_parted_evenly() -> None:
    evaluator = Recording()
    tune_pretended(
        evaluator, replace(EFFORT, population=24, seconds=10.0)
    )  # in which a batch of a generation would take long
    counts = [len([*each]) for stage, each in groupby(r.stage for r in evaluator.requests) if stage == pb.COMPILE]
    assert counts[0] == 2
    assert set(counts[1:]) <= {3, 4, 5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("2min", 120), ("1h 30min", 5400), (2.5, 2.5), ("10", 10), ("1.5m", 90), (10**400, math.inf)],
)
def test_budgets(text: object, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize("wrong", ["", "soon", "-1s", 0, True, "3 weeks", None, "2min and"])
def test_budgets_that_mean_nothing(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="budget"):
        parse_seconds(wrong)


# --- journals ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As if the process had ended here."""


def test_case_48_a_search_that_was_killed_ends_as_if_it_had_not(tmp_path: Path) -> None:
    whole = tune_pretended(Pretend(), journal=tmp_path / "whole")
    for after in (1, 7, 23):
        journal, count = tmp_path / f"killed{after}", 0

        def dying(options: CpuOptions, after: int = after) -> float:
            nonlocal count
            count += 1
            if count > after:
                raise Killed
            return landscape(options)

        with pytest.raises(Killed):
            tune_pretended(Pretend(dying), journal=journal)
        with journal.open("ab") as f:
            f.write(b"\x40\x00\x00\x00half a record")
        book = Journal(journal)
        folded = len(book)
        book.close()
        assert after - Pretend.width < folded <= after
        evaluator = Pretend()
        resumed = tune_pretended(evaluator, journal=journal)
        assert resumed.options == whole.options
        assert [o.options for o in resumed.outcomes] == [o.options for o in whole.outcomes]
        assert evaluator.asked == [o.options for o in whole.outcomes[folded:]]
    again = Pretend()
    assert tune_pretended(again, journal=tmp_path / "whole").options == whole.options
    assert again.asked == []


def test_journals_forget_what_was_damaged_and_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    outcomes = [pb.Outcome(options=to_message(CpuOptions(interleave=n)), status=pb.OK) for n in range(5)]
    for outcome in outcomes:
        journal.add("problem", outcome)
    journal.close()
    data = path.read_bytes()
    for at in range(11, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        damaged = Journal(path)
        known = len(damaged)
        assert known < 5
        for n, outcome in enumerate(outcomes):
            found = damaged.find("problem", outcome.options.SerializeToString(deterministic=True))
            assert found == (outcome if n < known else None)
        damaged.add("problem", outcomes[4])
        damaged.close()
        again = Journal(path)
        assert len(again) == known + 1
        again.close()


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("milk, bread")
    with pytest.raises(ArgumentError, match="not a journal"):
        Journal(path)
    assert path.read_text() == "milk, bread"
    with pytest.raises(ArgumentError, match="cannot be written"):
        Journal(tmp_path)


# --- interruption ------------------------------------------------------------------------------------------------


def test_case_47_ctrl_c_keeps_the_best_so_far() -> None:
    evaluator = Pretend()

    def interrupt(tuner: Tuner, generation: int) -> None:
        if len(tuner.outcomes) > 10:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    found = tune_pretended(evaluator, observe=interrupt)
    assert found.interrupted
    assert 10 < len(found.outcomes) < 20
    assert found.seconds == min(map(landscape, evaluator.asked))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_is_raised() -> None:
    def interrupt(tuner: Tuner, generation: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tune_pretended(Pretend(), observe=interrupt)


# --- the cache ---------------------------------------------------------------------------------------------------


def test_what_was_found_is_used_for_these_sizes_and_for_near_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    small = subject(store=store)
    found = tune(small, EFFORT, HERE, evaluator=Pretend())
    evaluator = Pretend(lambda options: 1.0 / (1 + options.grain_size))
    far = tune(subject(SOFTMAX, (4800, 6400), store=store), replace(EFFORT, generations=1), HERE, evaluator=evaluator)
    assert found.options != far.options
    key = small.key(1)
    large = subject(SOFTMAX, (5000, 6000), store=store)
    middle = subject(SOFTMAX, (50, 70), store=store)
    assert measurement_store.best_measurement(store, key).options == found.options  # type: ignore[union-attr]
    assert nearest_sizes(store, large.key(1), "")[0].best.options == far.options
    assert nearest_sizes(store, middle.key(1), "")[0].best.options == found.options


def test_four_merged_shards_do_not_lose_to_one_search_of_their_common_budget(tmp_path: Path) -> None:
    long = replace(EFFORT, generations=16)  # shards of less than some 200 candidates each do lose
    whole = tune_pretended(Pretend(), replace(long, population=48))
    merged = Store(tmp_path / "merged")
    for seed in range(4):
        shard = subject(store=Store(tmp_path / str(seed)))
        tune(shard, replace(long, seed=seed, part=(seed, 4)), HERE, evaluator=Pretend())
        write_measurements(shard.store, tmp_path / "file")
        add_measurements(merged, read_measurements(tmp_path / "file"))
    best = measurement_store.best_measurement(merged, subject(store=merged).key(1))
    assert best is not None
    assert best.seconds <= whole.seconds


def test_searches_for_the_same_deal_what_to_try_first() -> None:
    _, seeds = space_of(subject())
    asked = []
    for number in range(3):
        evaluator = Pretend()
        tune_pretended(evaluator, replace(EFFORT, generations=1, population=len(seeds), part=(number, 3)))
        asked.append(evaluator.asked)
    assert {first for first, *_ in asked} == {CpuOptions()}
    made, _ = space_of(subject())
    dealt = [{made.options(g) for g in seeds[1:]} & set(each) for each in asked]
    share = len(seeds[1:]) // 3
    assert all(len(each) >= share for each in dealt)
    assert set.union(*dealt) == {made.options(g) for g in seeds[1:]}


def test_nothing_is_remembered_of_an_empty_store(tmp_path: Path) -> None:
    what = subject()
    assert lookup_best(what.function, what.bound, what.target, Store(tmp_path)) is None


def test_case_54_a_poisoned_record_is_measured_before_it_wins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    what = subject(store=store)
    poison = CpuOptions(interleave=8, grain_size=0)
    with pytest.raises(ArgumentError, match="a time of"):
        measurement_store.measurement_of(what.bound, poison, 1e-9, validated=True)
    measurement_store.record_measurements(
        store, what.key(1), [measurement_store.measurement_of(what.bound, poison, 2e-8, validated=True)]
    )
    evaluator = Pretend()
    found = tune(what, EFFORT, HERE, evaluator=evaluator)
    assert poison in evaluator.asked
    assert found.options != poison
    assert found.seconds == landscape(found.options)


def test_a_search_starts_from_what_is_known_elsewhere(tmp_path: Path) -> None:
    store = Store(tmp_path)
    best = tune(subject(store=store), EFFORT, HERE, evaluator=Pretend()).options
    evaluator = Pretend()
    tune(subject(SOFTMAX, (96, 64), store=store), EFFORT, HERE, evaluator=evaluator)
    assert best in evaluator.asked[:4]


def test_options_tuned_with_other_threads_are_started_from_and_never_used_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, what = Store(tmp_path), subject()
    good = CpuOptions(interleave=2, grain_size=64)
    threads = torch.get_num_threads()
    monkeypatch.setattr(recorded_options, "_thread_counts", lambda: {threads, threads + 1})
    measurement_store.record_measurements(
        store, what.key(threads + 1), [measurement_store.measurement_of(what.bound, good, 2e-5, validated=True)]
    )
    monkeypatch.setattr(logging.getLogger("tensor_comprehensions"), "propagate", True)
    with caplog.at_level(logging.DEBUG, "tensor_comprehensions.tune"):
        assert lookup_best(what.function, what.bound, what.target, store) is None
    (warned,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert f"tuned with {threads + 1} threads, and torch has {threads}" in warned
    (miss,) = [r.message for r in caplog.records if r.levelno == logging.DEBUG]
    assert f"threads {threads + 1} instead of {threads}" in miss
    assert "sizes" not in miss
    evaluator = Pretend()
    tune(replace(what, store=store), EFFORT, (TuningDevice("cpu", (0,), threads),), evaluator=evaluator)
    assert good in evaluator.asked[:4]


def test_the_log_of_a_lookup_says_which_record_and_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(logging.getLogger("tensor_comprehensions"), "propagate", True)

    def said(store: Store, what: TuningTask) -> str:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "tensor_comprehensions.tune"):
            lookup_best(what.function, what.bound, what.target, store)
        return caplog.records[-1].message

    store, what, other = Store(tmp_path), subject(), subject(SOFTMAX, (96, 64))
    assert "miss: none of 0 records is of this def" in said(store, what)
    measured = measurement_store.measurement_of(what.bound, CpuOptions(interleave=2), 2e-5, validated=True)
    measurement_store.record_measurements(store, what.key(threads), [measured])
    hit = said(store, what)
    assert f"hit: record {what.key(threads).digest[:12]}, 20.0 us in the race, CpuOptions(" in hit
    assert "interleave=2" in hit
    nearest = said(store, other)
    assert "no record of these sizes; the nearest: record" in nearest
    assert f"sizes {what.key(1)['shapes']} instead of {other.key(1)['shapes']}" in nearest
    elsewhere = replace(what, target=replace(what.target, name="another"))
    assert f"target {what.target.name!r} instead of 'another'" in said(store, elsewhere)
    versions = tuple((name, "1.0" if name == "torch" else text) for name, text in measured.versions)
    old = replace(measured, options=CpuOptions(interleave=3), versions=versions)
    measurement_store.record_measurements(store, other.key(threads), [old])
    assert "measured by other versions (torch 1.0 instead of" in said(store, other)


def test_effort_that_means_nothing() -> None:
    what = subject()
    made, seeds = space_of(what)
    with pytest.raises(ArgumentError, match="no search"):
        Tuner(Problem(what.message), made, seeds, SearchBudget(search="annealing"), Pretend())


def test_a_search_uses_its_budget_but_for_a_last_batch_and_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only moves while something is compiled, a second at a time, and while workers start."""
    now = [0.0]

    class Slow(Pretend):
        def submit(self, request: pb.Request) -> Future[bytes]:
            now[0] += 10.0 if request.stage == pb.RACE and not request.codes else float(request.stage == pb.COMPILE)
            return super().submit(request)

    for module in (search_loop, tuning_calls):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = tune_pretended(Slow(), replace(EFFORT, seconds=300.0, generations=1000, population=24))
    assert 300.0 - 5.0 - 2 * Slow.width <= found.outcomes[-1].elapsed <= 300.0


def test_a_race_compiles_what_an_interrupted_search_never_measured() -> None:
    outcome = SimpleNamespace(digest="measured")
    search = SimpleNamespace(_by_options={CpuOptions(fusion="min"): outcome}, _codes={"measured": (pb.Code(),)})
    codes_of: Any = Tuner._find_measured_codes
    assert codes_of(search, [CpuOptions(fusion="min")]) == [pb.Code()]
    assert codes_of(search, [CpuOptions(), CpuOptions(fusion="min")]) == []
