"""The search for options of a def with sparse operands: one option after the other, in this process.

The fastest options depend on the stored elements, so candidates run on the operands of the call, interleaved with the
best so far. There are few options, and they rarely interact: sweeps repeat until no single change is a gain.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from math import prod
from time import perf_counter
from typing import Any

import torch

from ..cache.key import Key, make_sparse_tuning_key
from ..cache.measurement_store import MIN_SECONDS, Measurement, record_measurements
from ..cache.store import Store, current_store
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from ..dispatch.sparse.fixed_patterns import are_equal_levels
from ..dispatch.sparse.sparse_kernel import without_gradients
from ..dispatch.sparse.sparse_kernels import SparseKernels
from ..dispatch.sparse.sparse_run import SparseCall
from ..dispatch.sparse.sparse_tensor import SparseTensor
from ..options import SparseOptions
from ..runtime.cpu.host import host
from ..sparse.explain import text_with_formats
from ..tc_lang.binding.bind import bind
from ..tc_lang.ir import Function
from . import tuner_pb2 as pb
from .expected_results import allow_rounding, find_fault
from .outcomes import Outcome
from .recorded_options import lookup_by_key
from .search_loop import SearchBudget, TuningResult
from .timing import RunQueueClock, Times, calls_for, sample_run, speedup_lower_bound

MIN_SPEEDUP = 1.02
"""The lower bound of the speedup that a candidate needs to replace the best so far."""
MIN_RACE_ROUNDS, MAX_RACE_ROUNDS = 15, 61
"""Rounds of a race: enough to detect a loser, and enough to detect a winner."""
MAX_MEDIAN_RATIO = 1.1
"""A race ends when the candidate's median is more than this many times that of the best so far."""
MAX_PERMUTED = 4
"""Indices of a statement up to which all orders of loops are tried."""


@dataclass(frozen=True, slots=True)
class _Race:
    """The result of a race of two options: a lower bound of the speedup of the second, and the times of both."""

    gain: float
    first: Times
    other: Times


def autotune_sparse(
    kernels: SparseKernels,
    values: Sequence[object],
    initial: Mapping[str, object],
    start: object,
    trying: SearchBudget,
    store: Store,
) -> TuningResult[SparseOptions]:
    """Search for options for calls like this one, use them from now on, and keep them in the store.

    Raises:
        ArgumentError: the operands do not fit the def, or `start` is not a `SparseOptions`.
    """
    if start is not None and not isinstance(start, SparseOptions):
        raise ArgumentError(f"options is {start!r}, and an operand is sparse", expected="SparseOptions(...)")
    call = kernels.accept(without_gradients(values), initial)
    default = kernels.options if start is None else start
    search = _SparseCoordinateSearch(kernels, call, default, trying)
    with torch.no_grad():
        found = search.run()
    kernels.set_tuned_options(call, found.options)
    key = make_tuning_key(kernels.function_for_call(call), call, kernels.sizes(call))
    record_measurements(store, key, _make_measurements(found))
    get_logger("tune").info(
        "%s: sparse, %.2f times as fast as untuned, after %d candidates: %s",
        kernels.function.name, found.speedup, len(found.outcomes), found.options,
    )  # fmt: skip
    return found


def _make_measurements(found: TuningResult[SparseOptions]) -> list[Measurement]:
    """The times of the winner and of the start in their last race."""
    times = {found.default: found.default_seconds, found.options: found.seconds}
    return [
        Measurement(options, max(MIN_SECONDS, seconds), found.validated, found.runs, found.spread, tuner="sparse")
        for options, seconds in times.items()
    ]


def make_tuning_key(function: Function, call: SparseCall, sizes: Mapping[str, int]) -> Key:
    """The key of measurements for calls like this one: of the stored elements, only their number counts."""
    shapes = " ".join(map(str, (*sizes.values(), *(len(t.values) for t in call.sparse.values()))))
    types = tuple((n, str(t.dtype), str(t.index_dtype)) for n, t in call.sparse.items())
    text = text_with_formats(function)
    return make_sparse_tuning_key(text, types, shapes, host(), threads=torch.get_num_threads())


def choose_tuned_sparse_options(function: Function, call: SparseCall, sizes: Mapping[str, int]) -> SparseOptions | None:
    """The options for an operator that was defined with `options="tuned"`, from the cache."""
    return lookup_by_key(function, make_tuning_key(function, call, sizes), "", SparseOptions, current_store())


class _SparseCoordinateSearch:
    def __init__(self, kernels: SparseKernels, call: SparseCall, start: SparseOptions, trying: SearchBudget) -> None:
        self._kernels, self._call, self._start, self._trying = kernels, call, start, trying
        self._expected = kernels.run(call, options=start)
        self._longest_sum = _count_terms(kernels, call)
        self._began = perf_counter()
        self._end = self._began + trying.seconds
        self._limit = trying.generations * trying.population
        self._tried, self._outcomes = {start}, list[Outcome]()

    def run(self) -> TuningResult[SparseOptions]:
        best, generation, improved = self._start, 0, True
        order = random.Random(self._trying.seed)
        while improved:
            improved, generation = False, generation + 1
            changes = list(_single_option_changes(best, self._kernels.function_for_call(self._call)))
            order.shuffle(changes)
            for field, value in changes:
                if perf_counter() >= self._end or len(self._tried) > self._limit:
                    return self._make_result(best)
                candidate: SparseOptions = replace(best, **{field: value})
                if candidate in self._tried:
                    continue
                self._tried.add(candidate)
                if self._measure_gain(best, candidate, generation) >= MIN_SPEEDUP:
                    best, improved = candidate, True
        return self._make_result(best)

    def _make_result(self, best: SparseOptions) -> TuningResult[SparseOptions]:
        """Race the winner against the start once more: times of different races cannot be compared."""
        last = self._race(self._start, best, past_end=True)
        low, middle, high = last.other.quartiles
        default_low = low if best == self._start else last.first.quartiles[0]
        return TuningResult(
            best, self._start, low, default_low, (high - low) / middle, len(last.other.samples), True,
            tuple(self._outcomes), perf_counter() - self._began, False,
        )  # fmt: skip

    def _measure_gain(self, best: SparseOptions, candidate: SparseOptions, generation: int) -> float:
        """A lower bound of the speedup of a candidate over the best so far; 0 if the candidate fails."""
        began = perf_counter()
        try:
            found = self._kernels.run(self._call, options=candidate)
        except ArgumentError as refusal:  # e.g. an impossible order of loops
            return self._add_failure(candidate, pb.INVALID, refusal.message, generation)
        if not all(_results_agree(found[n], x, self._longest_sum) for n, x in self._expected.items()):
            get_logger("tune").warning("%s: %s gives other results", self._kernels.function.name, candidate)
            return self._add_failure(candidate, pb.WRONG_RESULT, "other results than the start's", generation)
        compiled = perf_counter()
        race = self._race(best, candidate)
        low, middle, high = race.other.quartiles
        now = perf_counter()
        times = low, (high - low) / middle, len(race.other.samples)
        ends = compiled - began, now - compiled, now - self._began
        self._outcomes.append(Outcome(candidate, pb.OK, "", *times, "", generation, *ends))
        return race.gain

    def _add_failure(self, candidate: SparseOptions, status: pb.Status, message: str, generation: int) -> float:
        elapsed = perf_counter() - self._began
        self._outcomes.append(Outcome(candidate, status, message, None, 0.0, 0, "", generation, 0.0, 0.0, elapsed))
        return 0.0

    def _race(self, first: SparseOptions, other: SparseOptions, *, past_end: bool = False) -> _Race:
        """Race two options for up to `MAX_RACE_ROUNDS`; only `MIN_RACE_ROUNDS` after the budget or if `past_end`."""

        def launch(options: SparseOptions) -> int:
            self._kernels.run(self._call, options=options)
            return 0

        runs = [lambda: launch(first), lambda: launch(other)]
        count = calls_for(sample_run(runs[0], 1, None))
        samples: list[list[tuple[float, float]]] = [[], []]
        with RunQueueClock() as waiting:
            for number in range(MIN_RACE_ROUNDS if past_end else MAX_RACE_ROUNDS):
                for k in (0, 1) if number % 2 == 0 else (1, 0):
                    samples[k].append(waiting.of(lambda k=k: sample_run(runs[k], count, None), count))  # type: ignore[misc]
                if number + 1 < MIN_RACE_ROUNDS:
                    continue
                one, two = (Times(tuple(s for s, _ in x), tuple(w for _, w in x)) for x in samples)
                race = _Race(speedup_lower_bound(one, two), one, two)
                if (
                    race.gain >= MIN_SPEEDUP
                    or two.median > MAX_MEDIAN_RATIO * one.median
                    or perf_counter() >= self._end
                ):
                    return race
        return race


def _single_option_changes(options: SparseOptions, function: Function) -> Iterator[tuple[str, Any]]:
    """Yield every change of one option, as (field name, new value)."""
    for f in fields(options):
        choices = f.metadata.get("choices", _list_loop_orders(function))
        yield from ((f.name, value) for value in choices if value != getattr(options, f.name))


def _list_loop_orders(function: Function) -> list[tuple[str, ...]]:
    """The orders of loops to try: those of the statement with the most indices."""
    most = max((s.indices for s in function.statements), key=len, default=())
    return [(), *permutations(most)] if len(most) <= MAX_PERMUTED else [()]


def _count_terms(kernels: SparseKernels, call: SparseCall) -> int:
    """The maximum number of terms that are reduced into one element."""
    function, sizes = kernels.function_for_call(call), kernels.sizes(call)
    scalars = {name: sizes[name] for name in function.scalars}
    bound = bind(function, {n: v for n, v in sizes.items() if n not in scalars}, scalars)
    return max((prod(i.extent for i in s.reduction_indices) for s in bound.statements), default=1) or 1


def _results_agree(x: Any, right: Any, longest_sum: int) -> bool:
    """Whether two results store the same elements and agree up to rounding."""
    if not isinstance(x, SparseTensor):
        return find_fault(x, right, allow_rounding(right, longest_sum)) is None
    return are_equal_levels(x.levels, right.levels) and _results_agree(x.values, right.values, longest_sum)
