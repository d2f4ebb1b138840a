"""Measure the time of a call, and the peak rates of the machine on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from statistics import median
from time import thread_time

import torch

from ..core.errors import ArgumentError
from ..runtime.cpu import roofline_probes
from ..runtime.cpu.host import host
from ..target import CpuTarget
from ..tc_lang.ir import BoundFunction
from .call_cost import call_bytes, call_flops
from .kernel_report import Report, Roofline

MIN_RUNS, MIN_SECONDS = 5, 0.05
"""Minimum number of timed runs, and their minimum total time in seconds."""
CACHE_FRACTION = 0.5
"""Fraction of a cache that the copies fill when its bandwidth is measured."""
LLC_MULTIPLE, MAX_BUFFER_BYTES = 4, 256 << 20
"""Size of a buffer that fits no cache, in multiples of the last cache; its maximum in bytes."""


def measured_report(report: Report, bound: BoundFunction, target: CpuTarget, run: Callable[[], object]) -> Report:
    """`report` with the time of the call `run`, and the limits of this machine, both on one thread.

    bound: the def with the sizes of the call, which a range kernel's own def does not have.

    Raises ArgumentError for a kernel that does not run here.
    """
    if not target.runs_here():
        raise ArgumentError(f"a kernel for {target.name} does not run here", suggestion="leave out measure=True")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = _time_call(run)
        rates, peak = machine_limits()
    finally:
        torch.set_num_threads(threads)
    found = Roofline(call_flops(bound), call_bytes(bound), peak, rates, seconds)
    return replace(report, roofline=found)


def _time_call(run: Callable[[], object]) -> float:
    """The median CPU time of a call in seconds, of this thread only, so that other load does not count."""
    run()
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_SECONDS:
        start = thread_time()
        run()
        times.append(thread_time() - start)
    return median(times)


@cache
def machine_limits() -> tuple[tuple[tuple[str, float], ...], float]:
    """(cache or memory, bytes per second that one thread copies), and one thread's float32 operations per second."""
    call, flops = roofline_probes.peak_multiply_add_call(torch.float32)
    peak = flops / _time_call(call)
    return tuple((name, _copy_rate(size)) for name, size in _working_sets()), peak


def _working_sets() -> Iterator[tuple[str, int]]:
    cache_sizes = host().cache
    for n, size in enumerate(cache_sizes, 1):
        yield f"L{n}", int(size * CACHE_FRACTION)
    yield "memory", min(MAX_BUFFER_BYTES, LLC_MULTIPLE * cache_sizes[-1])


def _copy_rate(size: int) -> float:
    return max(moved / _time_call(call) for call, moved in roofline_probes.peak_copy_calls(size).values())
