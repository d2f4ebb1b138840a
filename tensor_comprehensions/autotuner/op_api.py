"""Tuning of operators for the arguments of a call: `Op.autotune` and `options="tuned"`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cache.store import Store, current_store
from ..core import knobs
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from ..dispatch.call_steps import Arguments, check_machine, shapes_of
from ..dispatch.kernel_table import KernelTable
from ..options import CpuOptions
from ..runtime.cpu.host import host
from ..tc_lang.ir import BoundFunction, Function
from . import tuner_pb2 as pb
from .device import parse_devices as named_devices
from .evaluators import InProcess
from .problem import problem_message
from .recorded_options import lookup_best
from .report import write_report
from .search import SEARCHES
from .search_loop import SearchBudget, TuningResult
from .session import TuningTask, parse_seconds, tune
from .space import schedule_space

SCHEDULES = "schedules"
"""The name of the search of schedules alone, which runs in this process."""
IMPLICIT_SEARCH_SECONDS = 30.0
"""The seconds of a search that TC_TUNE=auto starts."""
GENERATION_BITS, POPULATION_BITS = 31, 20
"""The maximum bits of `generations` and of `population`, which is held in memory."""
SEED_BITS = 63
"""The maximum bits of a seed, so that seeds derived from it fit into messages."""


def parse_budget(budget: object, generations: object, population: object, seed: object, search: object) -> SearchBudget:
    """The budget of a search from a user's arguments. Raises ArgumentError."""
    for name, value, least, bits in (
        ("generations", generations, 1, GENERATION_BITS),
        ("population", population, 1 if search == SCHEDULES else 4, POPULATION_BITS),
        ("seed", seed, 0, SEED_BITS),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"{name} is {value!r}", expected=f"a whole number, at least {least}")
        if value.bit_length() > bits:
            found = repr(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
            raise ArgumentError(f"{name} is {found}", expected=f"a whole number of at most {bits} bits")
    if not isinstance(search, str) or search not in (*SEARCHES, SCHEDULES):
        raise ArgumentError(f"there is no search {search!r}", expected=", ".join((*SEARCHES, SCHEDULES)))
    return SearchBudget(parse_seconds(budget), generations, population, search, seed)  # type: ignore[arg-type]


def store_of(given: object) -> Store:
    """The store that a user passes: a folder, a store, or None for that of the process. Raises ArgumentError."""
    if given is None:
        return current_store()
    if isinstance(given, Store):
        return given
    if not isinstance(given, str | Path) or not str(given):
        raise ArgumentError(f"the store is {given!r}", expected="a folder")
    try:
        store = Store(Path(given).expanduser())
        reason = store.refusal()  # before a search whose results would be lost
    except (RuntimeError, ValueError) as error:  # `~` of an unknown user; a NUL in the name
        reason = str(error)
    if reason:
        raise ArgumentError(f"the store {given} cannot be used: {reason}", expected="a folder of this user's own")
    return store


def autotune(
    kernels: KernelTable,
    arguments: Arguments,
    start: object,
    trying: SearchBudget,
    *,
    devices: Sequence[object] = ("cpu",),
    executor: Executor | None = None,
    store: object = None,
    report: str | Path | None = None,
    **others: Any,
) -> TuningResult[CpuOptions]:
    """Search for options for calls with `arguments`.

    Args:
        start: options to start from; None for the default.
        report: where to write an HTML page about the search, and the same as JSON beside it.
        others: as for `tune`.

    Raises ArgumentError.
    """
    options = CpuOptions() if start is None else start
    check_machine(options, host())
    assert isinstance(options, CpuOptions)
    if executor is not None and not isinstance(executor, Executor):
        raise ArgumentError(
            f"the executor is a {type(executor).__name__}",
            expected="a concurrent.futures.Executor, such as Client(...).get_executor(pure=False) of Dask",
        )
    if not isinstance(report, str | Path | None):
        raise ArgumentError(f"the report is {report!r}", expected="the path of an HTML page")
    if trying.search == SCHEDULES:
        if tuple(devices) != ("cpu",) or executor is not None:
            raise ArgumentError("a search of schedules takes no devices and no executor: it runs in this process")
        found = search_schedules(kernels, arguments, options, trying, store_of(store))
    else:
        subject = tuning_task_of(kernels, arguments, _reject_experts(options), trying.seed, store_of(store))
        found = tune(subject, trying, named_devices(devices), executor=executor, **others)
    get_logger("tune").info(
        "%s: %.3g s in the race, %.2f times as fast as untuned (%.3g s), after %d candidates in %.0f s",
        kernels.function.name, found.seconds, found.speedup, found.default_seconds, len(found.outcomes), found.elapsed,
    )  # fmt: skip
    if report is not None:
        write_report(Path(report), [(kernels.function.name, found)])
    return found


def search_schedules(
    kernels: KernelTable, arguments: Arguments, start: CpuOptions, trying: SearchBudget, store: Store
) -> TuningResult[CpuOptions]:
    """Try `trying.population` schedules for each contraction of a def in this process, one contraction after the other.

    The schedule of `start` says which ones, if it has one; else the cost model does. Raises ArgumentError.
    """
    bound = kernels.bound_for(shapes_of(kernels.function, arguments), arguments)
    spaced = schedule_space(bound, host(), start, trying.population)
    subject = tuning_task_of(kernels, arguments, replace(start, schedule=None), trying.seed, store)
    sweep = replace(trying, generations=len(spaced[0].genes), search="sweep")
    evaluator = InProcess()
    try:
        return tune(subject, sweep, named_devices(("cpu",)), evaluator=evaluator, spaced=spaced)
    finally:
        evaluator.close()


def tuning_task_of(
    kernels: KernelTable, arguments: Arguments, start: CpuOptions, seed: int, store: Store
) -> TuningTask:
    """The tuning task of a call with `arguments`. Raises ArgumentError if they do not fit the def."""
    bound = kernels.bound_for(shapes_of(kernels.function, arguments), arguments)
    return TuningTask(kernels.function, bound, problem_message(kernels.function, arguments, seed), host(), start, store)


def _reject_experts(options: CpuOptions) -> CpuOptions:
    if callable(options.schedule):
        raise ArgumentError("a search cannot start from an expert", expected="options with a pipeline, or without")
    return options


def choose_tuned_options(function: Function, bound: BoundFunction, arguments: Arguments) -> CpuOptions | None:
    """The options for an operator that was defined with `options="tuned"`, from the cache.

    With TC_TUNE=auto, unknown sizes are tuned now.
    """
    known = lookup_best(function, bound, host(), exact=knobs.current_knobs().tune == "auto")
    if known is None and knobs.current_knobs().tune == "auto":
        message: pb.Problem = problem_message(function, arguments, 0)
        subject = TuningTask(function, bound, message, host(), CpuOptions(), current_store())
        return tune(subject, SearchBudget(seconds=IMPLICIT_SEARCH_SECONDS), named_devices(("cpu",))).options
    return known
