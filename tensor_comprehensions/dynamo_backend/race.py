"""Finds the fastest of several ways to compute something, in bounded time and memory.

Only the results of one run are in memory at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

ROUNDS = (5, 50)
"""The minimum and maximum number of interleaved runs of each side."""
RACE_SECONDS = 0.05
"""The length of a race, all sides together, unless the minimum of rounds takes longer."""
LONGEST_RUN_SECONDS = 0.5
"""The longest run of torch that is repeated; if it takes longer, its only run is compared with one of the kernel."""
LONGEST_RACE_SECONDS = 1.0
"""The time after which a race ends even before the minimum of rounds."""
CLEAR_LEADS = ((3, 2.0), (6, 1.3))
"""(rounds, factor): a race ends early if one side is faster than all others by the factor after these rounds."""
MEMORY_SHARE = 0.25
"""The maximum share of the free memory that the results of a repeated run may take."""


def time_first_run(run: Callable[[], object]) -> float | None:
    """The seconds of a run; None if its results take so much memory that nothing may run beside them."""
    clock = _choose_clock()
    start = clock()
    outputs = run()
    seconds = clock() - start
    return seconds if total_bytes(outputs) <= MEMORY_SHARE * available_memory() else None


def race_kernel(
    kernel: Callable[..., object], eager: Callable[..., object], inputs: Any, seconds: float
) -> list[float]:
    """The times of `kernel` and of `eager`, whose first run took `seconds`. Both must have run before."""
    if seconds <= LONGEST_RUN_SECONDS:
        return least_times((kernel, eager), inputs)
    clock = _choose_clock()
    start = clock()
    kernel(*inputs)
    return [clock() - start, seconds]


def total_bytes(value: object) -> int:
    """The bytes of the tensors in `value`."""
    return sum(x.numel() * x.element_size() for x in _collect_tensors(value))


def _collect_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _collect_tensors(x)


def least_times(runs: Sequence[Callable[..., object]], inputs: tuple[Any, ...]) -> list[float]:
    """The minimum time of each of `runs`, interleaved, as other load only adds to times. All must have run before."""
    clock = _choose_clock()
    times: list[list[float]] = [[] for _ in runs]
    while not _is_decided(times):
        for run, taken in zip(runs, times, strict=True):
            start = clock()
            run(*inputs)
            taken.append(clock() - start)
    return [min(taken) for taken in times]


def _choose_clock() -> Callable[[], float]:
    """Processor time if torch uses one thread, because other load does not affect it."""
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def _is_decided(times: Sequence[Sequence[float]]) -> bool:
    rounds, seconds = len(times[0]), sum(map(sum, times))
    if not rounds:
        return False
    first, second = sorted(map(min, times))[:2]
    if any(rounds >= fewest and second > lead * first for fewest, lead in CLEAR_LEADS):
        return True
    fewest, most = ROUNDS
    return rounds >= most or seconds >= (RACE_SECONDS if rounds >= fewest else LONGEST_RACE_SECONDS)


def available_memory() -> float:
    """Bytes that a program can still take; infinite if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf
