"""The search for options of a def with sparse operands: one option after the other, in this process.

What is fast depends on what the operands store, so candidates run on the operands of the call, in turns with the best
so far. There are few options, and a candidate that is no better than the best in one of them hardly gets better by
another: a sweep goes on until no single change is a gain.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..cache.key import Key, make_sparse_tuning_key
from ..cache.measurement_store import SHORTEST, Measurement, record_measurements
from ..cache.store import Store, current_store
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from ..dispatch.sparse.fixed_patterns import are_equal_levels
from ..dispatch.sparse.sparse_kernel import without_gradients
from ..dispatch.sparse.sparse_kernels import SparseKernels
from ..dispatch.sparse.sparse_run import SparseCall
from ..dispatch.sparse.sparse_tensor import SparseTensor
from ..options import SparseOptions, check_sparse_options
from ..runtime.cpu.host import host
from ..sparse.explain import text_with_formats
from ..tc_lang.bind import bind
from ..tc_lang.ir import Function
from .expected_results import allow_rounding, find_fault
from .recorded_options import lookup_by_key
from .search_loop import SearchBudget
from .timing import RunQueueClock, Times, calls_for, sample_run, speedup_lower_bound

MIN_SPEEDUP = 1.02
"""How many times as fast as the best so far a candidate must be, surely, to take its place."""
MIN_RACE_ROUNDS, MAX_RACE_ROUNDS = 15, 61
"""Rounds of a race: so many tell a loser, and so many a winner."""
HOPELESS = 1.1
"""A candidate that takes so many times as long in half of the first rounds is given up."""
TIMED = 5
"""Samples of the times that are kept."""
MAX_PERMUTED = 4
"""Indices of a statement up to which all orders of loops are tried."""


@dataclass(frozen=True, slots=True)
class SparseTuningResult:
    """The result of a search: what to use, how many times as fast that is surely, and how many candidates ran."""

    options: SparseOptions
    speedup: float
    candidates: int


def autotune_sparse(
    kernels: SparseKernels,
    values: Sequence[object],
    initial: Mapping[str, object],
    start: object,
    trying: SearchBudget,
    store: Store,
) -> SparseTuningResult:
    """Search for options for calls like this one, use them from now on, and keep them in the store.

    Raises:
        ArgumentError: the operands do not fit the def, or the start is no `SparseOptions`.
    """
    if start is not None and not isinstance(start, SparseOptions):
        raise ArgumentError(f"options is {start!r}, and an operand is sparse", expected="SparseOptions(...)")
    call = kernels.accept(without_gradients(values), initial)
    default = kernels.options if start is None else start
    check_sparse_options(default)
    search = _Search(kernels, call, default, trying)
    with torch.no_grad():
        found = search.run()
        times = {options: search.time(options) for options in dict.fromkeys((found.options, default))}
    kernels.set_tuned_options(call, found.options)
    key = make_tuning_key(kernels.function_for_call(call), call, kernels.sizes(call))
    facts = {"validated": True, "tuner": "sparse", "samples": TIMED}
    record_measurements(store, key, [Measurement(o, seconds, **facts) for o, seconds in times.items()])  # type: ignore[arg-type]
    get_logger("tune").info(
        "%s: sparse, %.2f times as fast as untuned, after %d candidates: %s",
        kernels.function.name, found.speedup, found.candidates, found.options,
    )  # fmt: skip
    return found


def make_tuning_key(function: Function, call: SparseCall, sizes: Mapping[str, int]) -> Key:
    """The key of measurements for calls like this one: what is stored counts by its amount."""
    shapes = " ".join(map(str, (*sizes.values(), *(len(t.values) for t in call.sparse.values()))))
    types = tuple((n, str(t.dtype), str(t.index_dtype)) for n, t in call.sparse.items())
    text = text_with_formats(function)
    return make_sparse_tuning_key(text, types, shapes, host(), threads=torch.get_num_threads())


def choose_tuned_sparse_options(function: Function, call: SparseCall, sizes: Mapping[str, int]) -> SparseOptions | None:
    """The options for an operator that was defined with `options="tuned"`: what the cache knows of calls like this."""
    return lookup_by_key(function, make_tuning_key(function, call, sizes), "", SparseOptions, current_store())


class _Search:
    def __init__(self, kernels: SparseKernels, call: SparseCall, start: SparseOptions, trying: SearchBudget) -> None:
        self._kernels, self._call, self._start, self._trying = kernels, call, start, trying
        self._expected = kernels.run(call, options=start)
        self._longest_sum = _count_terms(kernels, call)
        self._end = perf_counter() + trying.seconds
        self._limit = trying.generations * trying.population
        self._tried = {start}

    def run(self) -> SparseTuningResult:
        best, speedup, improved = self._start, 1.0, True
        order = random.Random(self._trying.seed)
        while improved:
            improved = False
            changes = list(_changes(best, self._kernels.function_for_call(self._call)))
            order.shuffle(changes)
            for field, value in changes:
                if perf_counter() >= self._end or len(self._tried) > self._limit:
                    return self._result(best, speedup)
                candidate: SparseOptions = replace(best, **{field: value})
                gain = 0.0 if candidate in self._tried else self._gain(best, candidate)
                self._tried.add(candidate)
                if gain >= MIN_SPEEDUP:
                    best, speedup, improved = candidate, speedup * gain, True
        return self._result(best, speedup)

    def _result(self, best: SparseOptions, speedup: float) -> SparseTuningResult:
        return SparseTuningResult(best, speedup, len(self._tried) - 1)

    def _gain(self, best: SparseOptions, candidate: SparseOptions) -> float:
        """How many times as fast as the best so far a candidate is at least; 0 where it does not work."""
        try:
            found = self._kernels.run(self._call, options=candidate)
        except ArgumentError as refusal:  # an order that is not possible, say
            get_logger("tune").debug("%s: %s", candidate, refusal.message)
            return 0.0
        if not all(_agree(found[n], x, self._longest_sum) for n, x in self._expected.items()):
            get_logger("tune").warning("%s: %s gives other results", self._kernels.function.name, candidate)
            return 0.0
        return self._race(best, candidate)

    def time(self, options: SparseOptions) -> float:
        """Seconds of a call: the median of some."""

        def launch() -> int:
            self._kernels.run(self._call, options=options)
            return 0

        count = calls_for(sample_run(launch, 1, None))
        return max(SHORTEST, median(sample_run(launch, count, None) for _ in range(TIMED)))

    def _race(self, best: SparseOptions, candidate: SparseOptions) -> float:
        def launch(options: SparseOptions) -> int:
            self._kernels.run(self._call, options=options)
            return 0

        runs = [lambda: launch(best), lambda: launch(candidate)]
        count = calls_for(sample_run(runs[0], 1, None))
        samples: list[list[tuple[float, float]]] = [[], []]
        with RunQueueClock() as waiting:
            for number in range(MAX_RACE_ROUNDS):
                for k in (0, 1) if number % 2 == 0 else (1, 0):
                    samples[k].append(waiting.of(lambda k=k: sample_run(runs[k], count, None), count))  # type: ignore[misc]
                if number + 1 < MIN_RACE_ROUNDS:
                    continue
                mine, other = (Times(tuple(s for s, _ in x), tuple(w for _, w in x)) for x in samples)
                gain = speedup_lower_bound(mine, other)
                if gain >= MIN_SPEEDUP or other.median > HOPELESS * mine.median or perf_counter() >= self._end:
                    return gain
        return gain


def _changes(options: SparseOptions, function: Function) -> Iterator[tuple[str, Any]]:
    """The options and values that differ from these in one option."""
    for f in fields(options):
        choices = f.metadata.get("choices", _orders(function))
        yield from ((f.name, value) for value in choices if value != getattr(options, f.name))


def _orders(function: Function) -> list[tuple[str, ...]]:
    """The orders of loops to try: those of the statement with the most indices."""
    most = max((s.indices for s in function.statements), key=len, default=())
    return [(), *permutations(most)] if len(most) <= MAX_PERMUTED else [()]


def _count_terms(kernels: SparseKernels, call: SparseCall) -> int:
    """The most terms that one element of a tensor may have."""
    function, sizes = kernels.function_for_call(call), kernels.sizes(call)
    scalars = {name: sizes[name] for name in function.scalars}
    bound = bind(function, {n: v for n, v in sizes.items() if n not in scalars}, scalars)
    return max((prod(i.extent for i in s.reduction_indices) for s in bound.statements), default=1) or 1


def _agree(x: Any, right: Any, longest_sum: int) -> bool:
    """Whether two results store the same places and agree but for rounding."""
    if not isinstance(x, SparseTensor):
        return find_fault(x, right, allow_rounding(right, longest_sum)) is None
    return are_equal_levels(x.levels, right.levels) and _agree(x.values, right.values, longest_sum)
