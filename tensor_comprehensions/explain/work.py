"""Operations and bytes of a call, and its time compared to the limits of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from statistics import median
from time import perf_counter

import torch

from ..compiler.compiled_kernel import CompiledCpuKernel
from ..core.errors import ArgumentError
from ..runtime.cpu import limits
from ..runtime.cpu.host import host
from ..tc_lang.ir import Access, Binary, BoundFunction, Call, Role, Select, Unary, walk_expr
from .report import Report, Roofline

RUNS, LEAST_SECONDS = 5, 0.05
"""Runs that are timed at least, and about how long they take together."""
SHARE = 0.5
"""Of a cache that the copies fill whose rate is measured."""
FAR = 4
"""Size, in last-level caches, of data that no cache holds."""
LARGEST = 256 << 20


def call_flops(bound: BoundFunction) -> int:
    """Arithmetic of a call as the def writes it: operators and functions of values, and one for each term of a sum."""
    return sum(
        (_operations(s.value) + (s.reduction is not None)) * prod(i.extent for i in s.indices) for s in bound.statements
    )


def _operations(value: object) -> int:
    """Operators and functions in a value, without those of subscripts."""
    found: list[object] = [value]
    count = 0
    while found:
        e = found.pop()
        if isinstance(e, Access):
            continue
        count += isinstance(e, Binary | Unary | Call | Select)
        inner = [x for x in walk_expr(e) if x is not e]  # type: ignore[arg-type]
        nested = {id(y) for x in inner for y in walk_expr(x) if y is not x}
        found += [x for x in inner if id(x) not in nested]
    return count


def call_bytes(bound: BoundFunction) -> int:
    """Bytes of all arguments and results: the least traffic of a call."""
    return sum(t.size * t.dtype.size for t in bound.tensors if t.role is not Role.TEMPORARY)


def measured_report(report: Report, compiled: CompiledCpuKernel, run: Callable[[], object]) -> Report:
    """`report` with the time of the call `run`, and the limits of this machine on one thread.

    Raises ArgumentError for a kernel that does not run here.
    """
    if not compiled.target.runs_here():
        raise ArgumentError(
            f"a kernel for {compiled.target.name} does not run here", suggestion="leave out measure=True"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = _time_call(run)
        rates, peak = machine_limits()
    finally:
        torch.set_num_threads(threads)
    found = Roofline(call_flops(compiled.bound), call_bytes(compiled.bound), peak, rates, seconds)
    return replace(report, roofline=found)


def _time_call(run: Callable[[], object]) -> float:
    """The median time of a call."""
    run()
    times: list[float] = []
    while len(times) < RUNS or sum(times) < LEAST_SECONDS:
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return median(times)


@cache
def machine_limits() -> tuple[tuple[tuple[str, float], ...], float]:
    """Bytes per second that one thread copies in each cache and in memory, and its float32 operations per second."""
    call, flops = limits.multiply_adds(torch.float32)
    peak = flops / _time_call(call)
    return tuple((name, _copy_rate(size)) for name, size in _working_sets()), peak


def _working_sets() -> Iterator[tuple[str, int]]:
    cache_sizes = host().cache
    for n, size in enumerate(cache_sizes, 1):
        yield f"L{n}", int(size * SHARE)
    yield "memory", min(LARGEST, FAR * cache_sizes[-1])


def _copy_rate(size: int) -> float:
    return max(moved / _time_call(call) for call, moved in limits.copies(size).values())
