"""Interleaved timing: contenders take turns in a random order, so that a busy moment meets them all."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

WARM = 5e-3
"""Seconds up to which a contender is called once before a sample, to restore its data in the caches."""
SAMPLE = 300e-6
"""Seconds that one sample should take at least; fast contenders are called several times in it."""
SLOW = 1.0
"""Seconds from which on a single call is timed, instead of the best of three."""


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A median with the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds per call of every contender in the rounds that count, and the number of rounds.

    quiet: the number of rounds in which the system took no processor away. If there were enough, only they count;
    else the least disturbed ones.
    """

    seconds: Mapping[str, Sequence[float]]
    rounds: int
    quiet: int


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    least: int = 7,
    most: int = 301,
    seed: int = 0,
) -> Samples:
    """Time all contenders once per round, in a random order.

    Args:
        seconds: about how long the whole measurement may take; at least `least` rounds are run.
        clock: the clock to use; `time.thread_time` ignores the load of other processes on a single thread.
    """
    plans = {name: _calls_per_sample(f) for name, f in contenders.items()}
    order = list(contenders)
    shuffle = random.Random(seed).shuffle
    rounds: list[tuple[int, dict[str, float]]] = []
    end = time.perf_counter() + seconds
    with _no_collection():
        while len(rounds) < most and (len(rounds) < least or time.perf_counter() < end):
            shuffle(order)
            before = _interruptions()
            taken = {name: _sample(contenders[name], *plans[name], clock) for name in order}
            rounds.append((_interruptions() - before, taken))
    quiet = sum(disturbed == 0 for disturbed, _ in rounds)
    kept = sorted(rounds, key=lambda r: r[0])[: max(quiet, least)]
    return Samples({name: [taken[name] for _, taken in kept] for name in contenders}, len(rounds), quiet)


def _interruptions() -> int:
    """How often the system has taken a processor from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def _calls_per_sample(f: Callable[[], object]) -> tuple[int, bool]:
    """How many calls a sample has, and whether there is another one before it."""
    taken = _sample(f, 1, False, time.perf_counter)
    if taken < SLOW:
        taken = min(_sample(f, 1, False, time.perf_counter) for _ in range(3))
    return max(1, min(10_000, round(SAMPLE / max(taken, 1e-9)))), taken < WARM


def _sample(f: Callable[[], object], calls: int, warm: bool, clock: Callable[[], float]) -> float:
    if warm:
        f()
    start = clock()
    for _ in range(calls):
        f()
    return (clock() - start) / calls


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Quartiles:
    """Of two contenders of one measurement: the quotients of their times, round by round."""
    return Quartiles.of([a / b for a, b in zip(numerator, denominator, strict=True)])


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_memory() -> bool:
    """Make the C library reuse freed memory rather than return it, if possible.

    Otherwise every call, ours and torch's, pays for the page faults of its outputs, which hides the time of the
    kernels. Returns whether it worked.
    """
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if library is None or not hasattr(library, "mallopt"):
        return False
    trim_threshold, mmap_max, never = -1, -4, -1
    return all(library.mallopt(option, value) == 1 for option, value in ((mmap_max, 0), (trim_threshold, never)))


def release_memory() -> None:
    """Return unused memory to the system that `keep_memory` retains, before operands of other sizes are timed."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
