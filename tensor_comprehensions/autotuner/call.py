"""Tuning as operators offer it: for the arguments of a call."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import knobs
from ..cache.store import Store, current
from ..calling.calls import Arguments, check_machine, sizes_of
from ..calling.kernels import Kernels
from ..errors import ArgumentError
from ..inspection import logger
from ..options import CpuOptions
from ..runtime.host import host
from ..structured.strategy import frozen
from ..tc_lang.function import BoundFunction, Function
from . import tuner_pb2 as pb
from .device import devices as named_devices
from .evaluators import Here
from .lookup import remembered
from .problem import describe
from .report import write
from .search import SEARCHES
from .space import pipelines
from .tune import Subject, seconds, tune
from .tuner import Effort, Tuned

IMPLICIT = 30.0
"""Seconds that a search takes which TC_TUNE=auto starts."""
GENERATION_BITS, POPULATION_BITS = 31, 20
"""Of their numbers at most; a population is in memory."""
SEED_BITS = 63
"""Of a seed at most: seeds made from it fit into messages."""


def effort(budget: object, generations: object, population: object, seed: object, search: object) -> Effort:
    """How hard to try, as users say it. Raises ArgumentError."""
    for name, value, least, bits in (
        ("generations", generations, 1, GENERATION_BITS),
        ("population", population, 4, POPULATION_BITS),
        ("seed", seed, 0, SEED_BITS),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"{name} is {value!r}", expected=f"a whole number, at least {least}")
        if value.bit_length() > bits:
            found = repr(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
            raise ArgumentError(f"{name} is {found}", expected=f"a whole number of at most {bits} bits")
    if not isinstance(search, str) or search not in SEARCHES:
        raise ArgumentError(f"there is no search {search!r}", expected=", ".join(SEARCHES))
    return Effort(seconds(budget), generations, population, search, seed)  # type: ignore[arg-type]


def store_of(given: object) -> Store:
    """The store that a user names: a folder, a store, or None for that of the process. Raises ArgumentError."""
    if given is None:
        return current()
    if isinstance(given, Store):
        return given
    if not isinstance(given, str | Path) or not str(given):
        raise ArgumentError(f"the store is {given!r}", expected="a folder")
    try:
        store = Store(Path(given).expanduser())
        reason = store.refusal()  # before a search whose results would be lost
    except (RuntimeError, ValueError) as error:  # a home of no user; a NUL
        reason = str(error)
    if reason:
        raise ArgumentError(f"the store {given} cannot be used: {reason}", expected="a folder of this user's own")
    return store


def autotune(
    kernels: Kernels,
    arguments: Arguments,
    start: object,
    trying: Effort,
    *,
    devices: Sequence[object] = ("cpu",),
    executor: Executor | None = None,
    store: object = None,
    report: str | Path | None = None,
    **others: Any,
) -> Tuned:
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
    subject = subject_of(kernels, arguments, _plain(options), trying.seed, store_of(store))
    found = tune(subject, trying, named_devices(devices), executor=executor, **others)
    logger("tune").info(
        "%s: %.3g s in the race, %.2f times as fast as untuned (%.3g s), after %d candidates in %.0f s",
        kernels.function.name, found.seconds, found.speedup, found.default_seconds, len(found.outcomes), found.elapsed,
    )  # fmt: skip
    if report is not None:
        write(Path(report), [(kernels.function.name, found)])
    return found


def search(kernels: Kernels, arguments: Arguments, start: CpuOptions, count: int, seconds: float) -> Tuned:
    """Try `count` pipelines for each contraction of a def in this process, one contraction after the other.

    start: whose strategy says what is tried, where it has one; else the cost model does. Raises ArgumentError.
    """
    bound = kernels.bound_for(sizes_of(kernels.function, arguments), arguments)
    spaced = pipelines(bound, host(), start, count)
    subject = subject_of(kernels, arguments, replace(start, strategy=None), 0, current())
    trying = Effort(seconds, len(spaced[0].genes), count, "sweep")
    evaluator = Here()
    try:
        return tune(subject, trying, named_devices(("cpu",)), evaluator=evaluator, spaced=spaced)
    finally:
        evaluator.close()


def subject_of(kernels: Kernels, arguments: Arguments, start: CpuOptions, seed: int, store: Store) -> Subject:
    """What a call with `arguments` is, to a tuner. Raises ArgumentError where they do not fit the def."""
    bound = kernels.bound_for(sizes_of(kernels.function, arguments), arguments)
    return Subject(kernels.function, bound, describe(kernels.function, arguments, seed), host(), start, store)


def _plain(options: CpuOptions) -> CpuOptions:
    if callable(options.strategy):
        raise ArgumentError("a search cannot start from an expert", expected="options with a pipeline, or without")
    frozen(options.strategy)
    return options


def choose(function: Function, bound: BoundFunction, arguments: Arguments) -> CpuOptions | None:
    """The options for an operator that was defined with `options="tuned"`: what the cache knows.

    With TC_TUNE=auto, sizes for which it knows nothing are tuned now.
    """
    known = remembered(function, bound, host(), exact=knobs.current().tune == "auto")
    if known is None and knobs.current().tune == "auto":
        message: pb.Problem = describe(function, arguments, 0)
        subject = Subject(function, bound, message, host(), CpuOptions(), current())
        return tune(subject, Effort(seconds=IMPLICIT), named_devices(("cpu",))).options
    return known
