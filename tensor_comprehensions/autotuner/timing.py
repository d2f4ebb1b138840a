"""Running a kernel in a worker: its memory, and its times.

Invariant: before every run whose results are checked, outputs and temporaries hold poison, and in/out outputs their
initial values.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time

import torch
from torch import Tensor

from ..core.memory_layout import storage_extent
from ..dispatch.arguments import TORCH_TYPES
from ..runtime.cpu.object_code import Executable
from ..tc_lang.ir import Role
from .guarded_buffer import GuardedBuffer
from .problem import Problem, torch_type

MIN_SAMPLE_SECONDS = 100e-6
"""The minimum seconds of one sample, in which short runs are repeated."""
MIN_SAMPLES, MAX_SAMPLES = 5, 60
"""The minimum and maximum number of samples of a timing."""
MAX_ROUNDS, MIN_ROUNDS, EXTRA_TIME_RATIO = 501, 9, 2.0
"""The maximum rounds of a race; the undisturbed ones it needs; its extra time to get these, relative to its time."""
MAX_WAITING_FRACTION = 0.02
"""The maximum share of an undisturbed sample that its threads spent waiting for a processor."""
FALSE_WIN_PROBABILITY = 0.002
"""The probability of finding a kernel faster that is not; small, as the luckiest of several finalists counts."""
PRECISE_RELATIVE_ERROR = 0.01
"""The interquartile range / sqrt(samples), relative to the median, at which a timing is precise enough."""


class ProblemMemory:
    """The tensors of a problem in guarded memory.

    Attributes:
        inputs: the inputs, and then the initial values of in/out outputs.
        outputs: in the order of the def.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._inputs: list[GuardedBuffer] = []
        inputs = []
        for t in problem.tensors:
            dtype, shape, strides = torch_type(t.dtype), tuple(t.shape), tuple(t.strides)
            guarded = GuardedBuffer(storage_extent(shape, strides) * dtype.itemsize)
            self._inputs.append(guarded)
            inputs.append(guarded.tensor(dtype, shape, strides))
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        returned = [problem.bound.tensor(name) for name in problem.bound.returns]
        self._outputs = [GuardedBuffer(t.size * t.dtype.size) for t in returned]
        self.outputs: tuple[Tensor, ...] = tuple(
            g.tensor(TORCH_TYPES[t.dtype], t.shape, t.strides) for g, t in zip(self._outputs, returned, strict=True)
        )
        self._starts = self._initial_values()
        self._digests: list[int] = []

    def _initial_values(self) -> list[tuple[Tensor, Tensor]]:
        """(initial value, output) of the in/out outputs."""
        bound = self.problem.bound
        places = dict(zip(bound.returns, self.outputs, strict=True))
        names = [t.name for t in bound.tensors if t.role is Role.INOUT]
        return [
            (x, places[name]) for name, x in zip(names, self.inputs[len(self.problem.message.inputs) :], strict=True)
        ]

    def restore(self, *, poison: bool) -> None:
        """Reset in/out outputs to their initial values; `poison`: first fill all outputs with poison."""
        if poison:
            for g in self._outputs:
                g.poison()
        for x, output in self._starts:
            output.copy_(x)

    def restore_without_poison(self) -> None:
        """`restore` without poison, as a callback."""
        self.restore(poison=False)

    @property
    def accumulates(self) -> bool:
        """Whether a run depends on the result of the last one."""
        return bool(self._starts)

    def addresses(self) -> list[int]:
        """The addresses of the arguments, in the order of the kernel's parameters."""
        return [g.address for g in (*self._inputs[: len(self.problem.message.inputs)], *self._outputs)]

    def describe_guard_damage(self) -> str:
        """The kind of memory whose guard bands were overwritten; empty if none."""
        groups = {"an input": self._inputs, "an output": self._outputs}
        return next((name for name, parts in groups.items() if not all(g.guards_intact() for g in parts)), "")

    def record_input_digests(self) -> None:
        """Save the inputs, to detect later whether they changed."""
        self._digests = [g.digest() for g in self._inputs]

    def has_changed_inputs(self) -> bool:
        """Whether the inputs have changed since `record_input_digests` was called."""
        return [g.digest() for g in self._inputs] != self._digests

    @property
    def size(self) -> int:
        """The size of all tensors in bytes."""
        return sum(g.size for g in (*self._inputs, *self._outputs))


class LoadedCandidate:
    """A kernel with its temporaries. Raises MemoryError or RuntimeError if they cannot be allocated."""

    def __init__(self, executable: Executable, temporaries: Sequence[int]) -> None:
        self.executable, self.temporaries = executable, [GuardedBuffer(size) for size in temporaries]


class TimedLaunch:
    """A kernel bound to a problem's memory."""

    def __init__(self, loaded: LoadedCandidate, memory: ProblemMemory) -> None:
        self.memory = memory
        self._executable, self._temporaries = loaded.executable, loaded.temporaries
        addresses = [*memory.addresses(), *(g.address for g in self._temporaries)]
        self._status = (ctypes.c_int64 * 2)()
        self._slots = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, ctypes.addressof(self._status))
        self._place = ctypes.addressof(self._slots)

    def __call__(self) -> int:
        """Run on the memory as it is; return 0, or the number of a failed check."""
        return int(self._executable.function(self._place))

    def run_with_poisoned_outputs(self) -> int:
        """Run after filling outputs and temporaries with poison and resetting in/out outputs."""
        self.memory.restore(poison=True)
        for g in self._temporaries:
            g.poison()
        return self()

    def describe_guard_damage(self) -> str:
        """The kind of memory whose guard bands were overwritten; empty if none."""
        return self.memory.describe_guard_damage() or (
            "" if all(g.guards_intact() for g in self._temporaries) else "a temporary"
        )


@dataclass(frozen=True, slots=True)
class Times:
    """Samples in order, in seconds per run.

    waits: for each sample, the share of it that threads spent waiting for a processor; empty if not measured.
    """

    samples: tuple[float, ...]
    waits: tuple[float, ...] = ()

    def is_undisturbed(self, number: int) -> bool:
        """Whether the threads of a sample hardly waited for a processor."""
        return not self.waits or self.waits[number] <= MAX_WAITING_FRACTION

    @property
    def undisturbed_samples(self) -> tuple[float, ...]:
        """The undisturbed samples; all samples if those are fewer than `MIN_SAMPLES`."""
        found = tuple(s for k, s in enumerate(self.samples) if self.is_undisturbed(k))
        return found if len(found) >= MIN_SAMPLES else self.samples

    @property
    def quartiles(self) -> tuple[float, float, float]:
        counted = self.undisturbed_samples
        if len(counted) < 2:
            return (counted[0],) * 3
        low, median, high = statistics.quantiles(counted, n=4, method="inclusive")
        return low, median, high

    @property
    def median(self) -> float:
        return statistics.median(self.undisturbed_samples)


def speedup_lower_bound(first: Times, other: Times) -> float:
    """A lower bound of the speedup of `other` over `first` by a race; 0 if it is undecided.

    It bounds the median ratio of samples of the same round, for any distribution of the ratios: if the median were
    less, this many ratios would exceed the bound with probability `FALSE_WIN_PROBABILITY` only.
    """
    rounds = range(min(len(first.samples), len(other.samples)))
    ratios = sorted(
        first.samples[k] / other.samples[k] for k in rounds if first.is_undisturbed(k) and other.is_undisturbed(k)
    )
    n, below, chance = len(ratios), 0, 0.0
    while below < n and (chance := chance + math.comb(n, below) / 2**n) <= FALSE_WIN_PROBABILITY:
        below += 1
    return ratios[below - 1] if below else 0.0


def thread_clock() -> Callable[[], float]:
    """The clock of runs: wall time, or with one thread its processor time, which other load does not affect."""
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def sample_run(run: Callable[[], int], calls: int, before: Callable[[], None] | None) -> float:
    """Seconds per run of `calls` runs in a row; with `before`, of one run after calling it."""
    now = thread_clock()
    if before is not None:
        before()
        calls = 1
    start = now()
    for _ in range(calls):
        run()
    return (now() - start) / calls


def calls_for(seconds: float) -> int:
    """The number of runs in one sample if a run takes `seconds`."""
    return max(1, min(1000, round(MIN_SAMPLE_SECONDS / max(seconds, 1e-9))))


class RunQueueClock:
    """Seconds that the threads of this process have waited for a processor, if the system reports them.

    With one thread, `thread_clock` excludes waiting, so nothing is measured.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        if torch.get_num_threads() > 1:
            for path in Path("/proc/self/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    self._files.append(os.open(path, os.O_RDONLY))

    def seconds(self) -> float:
        """The seconds that threads have waited so far."""
        total = 0
        for file in self._files:
            with contextlib.suppress(OSError, IndexError, ValueError):  # a thread that has ended
                total += int(os.pread(file, 80, 0).split()[1])
        return total * 1e-9

    def of(self, run: Callable[[], float], calls: int) -> tuple[float, float]:
        """The seconds per run that `run` returns for `calls` runs, and the share of the time spent waiting."""
        before = self.seconds()
        seconds = run()
        return seconds, (self.seconds() - before) / max(seconds * calls, 1e-9)

    def __enter__(self) -> RunQueueClock:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)


def time_launch(launch: TimedLaunch, first: float, seconds: float, losing: float) -> Times:
    """Time a kernel whose run takes about `first`, until the time is precise, `seconds` are over or it is losing.

    losing: the measurement ends when the lower quartile of some samples exceeds this; 0: never.
    """
    return _time_in_rounds([launch], [first], seconds, losing)[0]


def time_interleaved(
    launch: TimedLaunch, other: TimedLaunch, firsts: Sequence[float], seconds: float, losing: float
) -> tuple[Times, Times]:
    """Time a kernel as `time_launch` does, interleaved with another one. Returns the times of both.

    The samples of the first are scaled to the speed that the machine had in the median round of the other, because the
    speed of a machine drifts, not only with other load.

    losing: a multiple of the other's time.
    """
    mine, others = _time_in_rounds([launch, other], firsts, seconds, losing)
    return mine, others


def _time_in_rounds(
    launches: Sequence[TimedLaunch], firsts: Sequence[float], seconds: float, losing: float
) -> list[Times]:
    """Time the first of one or two launches in rounds; the second one is the baseline."""
    counts = [calls_for(first) for first in firsts]
    found: list[list[tuple[float, float]]] = [[] for _ in launches]
    end = perf_counter() + seconds
    with RunQueueClock() as waiting:
        for number in range(MAX_SAMPLES):
            _time_round(launches, counts, number, waiting, found)
            if number + 1 < MIN_SAMPLES and (number + 1 < 3 or perf_counter() < end):
                continue
            times, *others = _normalize_samples(found)
            most = losing * others[0].median if others else losing
            if perf_counter() >= end or (losing and times.quartiles[0] > most) or _is_precise(times):
                break
    return _normalize_samples(found)


def _normalize_samples(found: Sequence[Sequence[tuple[float, float]]]) -> list[Times]:
    """The times of each launch; of two, the first's are scaled by the second's in the same rounds."""
    mine, *others = map(_make_times, found)
    for other in others:
        usual = other.median
        samples = tuple(a / b * usual for a, b in zip(mine.samples, other.samples, strict=True))
        return [Times(samples, tuple(map(max, mine.waits, other.waits))), other]
    return [mine]


def _time_round(
    launches: Sequence[TimedLaunch],
    counts: Sequence[int],
    number: int,
    waiting: RunQueueClock,
    found: Sequence[list[tuple[float, float]]],
) -> None:
    """Take one sample of each launch, in an order that alternates from round to round."""
    for k in range(len(launches)) if number % 2 == 0 else reversed(range(len(launches))):
        before = launches[k].memory.restore_without_poison if launches[k].memory.accumulates else None
        run = partial(sample_run, launches[k], counts[k], before)
        found[k].append(waiting.of(run, 1 if before else counts[k]))


def _make_times(found: Sequence[tuple[float, float]]) -> Times:
    return Times(tuple(s for s, _ in found), tuple(w for _, w in found))


def _is_precise(times: Times) -> bool:
    if len(times.samples) < MIN_SAMPLES:
        return False
    low, median, high = times.quartiles
    return bool((high - low) / len(times.undisturbed_samples) ** 0.5 <= PRECISE_RELATIVE_ERROR * median)


def race_launches(launches: Sequence[TimedLaunch], firsts: Sequence[float], seconds: float) -> list[Times]:
    """Time kernels, interleaved, so that other load affects all alike.

    The race ends after `seconds`, or later if too few rounds were undisturbed.
    """
    counts = [calls_for(first) for first in firsts]
    found: list[list[tuple[float, float]]] = [[] for _ in launches]
    end, calm = perf_counter() + seconds, 0
    with RunQueueClock() as waiting:
        for number in range(MAX_ROUNDS):
            late = perf_counter() - end
            if number >= MIN_ROUNDS and late > (0 if calm >= MIN_ROUNDS else EXTRA_TIME_RATIO * seconds):
                break
            _time_round(launches, counts, number, waiting, found)
            calm += all(each[-1][1] <= MAX_WAITING_FRACTION for each in found)
    return list(map(_make_times, found))
