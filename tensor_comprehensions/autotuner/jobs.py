"""Offline jobs: a file that lists defs and sizes, tuned one after another, by one process or by many.

Invariant: a killed job resumes where its journal ends; the results of a finished search are in the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from ..cache.store import Store
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError, InternalError, TCError
from ..dispatch.call_steps import CallSignature, normalize_arguments
from ..dispatch.kernel_table import KernelTable
from ..dispatch.random_inputs import sample_arguments
from ..options import CpuOptions
from ..tc_lang import compile_source
from ..tc_lang.ir import Function
from .device import TuningDevice, parse_devices
from .evaluators import Evaluator, LocalWorkers
from .job_file import check_settings, read_sizes_setting, read_source_file, read_table, read_text_setting
from .journal import Journal
from .op_api import parse_budget, tuning_task_of
from .search import GENERATIONS, POPULATION
from .search_loop import SearchBudget, Tuner, TuningResult
from .session import tune

_JOB: dict[str, Any] = {
    "budget": "2min",
    "generations": GENERATIONS,
    "population": POPULATION,
    "search": "genetic",
    "seed": 0,
    "devices": ["cpu"],
    "store": None,
    "tune": [],
}
_SHARD = re.compile("[0-9]{1,6}/[0-9]{1,6}")
MIN_BREEDING_POPULATION = 8
"""The smallest population for which breeding pays."""
_TASK: dict[str, Any] = {"file": None, "source": None, "def": None, "sizes": [{}], "budget": None}


@dataclass(frozen=True, slots=True)
class JobTask:
    """One def at one set of sizes. name: only for display."""

    name: str
    function: Function
    sizes: Mapping[str, float]
    effort: SearchBudget


@dataclass(frozen=True, slots=True)
class TuningJob:
    """The content of a job file. store: where results go; None for the cache."""

    tasks: tuple[JobTask, ...]
    devices: tuple[TuningDevice, ...]
    store: str | None


def read_job(path: Path) -> TuningJob:
    """Read a TOML or JSON job file. Raises ArgumentError that names the mistake."""
    table = read_table(path)
    check_settings(table, _JOB, str(path))
    entries = table.get("tune", [])
    if not isinstance(entries, list) or not entries:
        raise ArgumentError(f"{path} has nothing to tune", expected='tables [[tune]] with "file" or "source"')
    given = {**_JOB, **table}
    tasks = [task for n, entry in enumerate(entries) for task in _parse_tasks(entry, given, path, f"{path}: tune[{n}]")]
    if not isinstance(given["devices"], list):
        raise ArgumentError(f"{path}: devices is {given['devices']!r}", expected='a list such as ["cpu"]')
    return TuningJob(tuple(tasks), parse_devices(given["devices"]), read_text_setting(given, "store", str(path)))


def _parse_tasks(entry: Any, job: Mapping[str, Any], path: Path, where: str) -> Iterator[JobTask]:
    if not isinstance(entry, dict):
        raise ArgumentError(f"{where} is not a table")
    check_settings(entry, _TASK, where)
    given = {**_TASK, **entry}
    budget = job["budget"] if given["budget"] is None else given["budget"]
    try:
        trying = parse_budget(budget, job["generations"], job["population"], job["seed"], job["search"])
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error.message}", expected=error.expected) from None
    several = read_sizes_setting(given["sizes"], where)
    for function in _load_functions(given, path, where):
        for values in several:
            shown = ",".join(f"{name}={value}" for name, value in values.items())
            yield JobTask(f"{function.name}({shown})", function, values, trying)


def _load_functions(given: Mapping[str, Any], path: Path, where: str) -> list[Function]:
    source, file, name = (read_text_setting(given, setting, where) for setting in ("source", "file", "def"))
    if (file is None) == (source is None):
        raise ArgumentError(f"{where}: either file or source tells the program")
    functions = compile_source(read_source_file(path.parent / file, where) if file is not None else source or "")
    found = [f for f in functions if name in (None, f.name)]
    if not found:
        raise ArgumentError(
            f"{where}: there is no def{'' if name is None else f' {name!r}'}",
            expected=", ".join(f.name for f in functions),
        )
    return found


# --- shards ------------------------------------------------------------------------------------------------------


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `3/64` as (3, 64): shard 3, counted from 0, of 64. Raises ArgumentError."""
    number, _, count = text.partition("/")
    if _SHARD.fullmatch(text) and int(number) < int(count):
        return int(number), int(count)
    raise ArgumentError(f"the shard is {text!r}", expected="such as 0/64 up to 63/64")


def shard_tasks(tasks: Sequence[JobTask], shard: tuple[int, int]) -> tuple[JobTask, ...]:
    """The tasks of a shard.

    If there are fewer tasks than shards, several shards share a task: they divide the first candidates among
    themselves, and continue with different seeds.
    """
    number, count = shard
    if len(tasks) >= count:
        return tuple(tasks[number::count])
    task = tasks[number % len(tasks)]
    part = number // len(tasks), len(range(number % len(tasks), count, len(tasks)))
    return (replace(task, effort=_shard_budget(replace(task.effort, seed=task.effort.seed + number, part=part))),)


def _shard_budget(trying: SearchBudget) -> SearchBudget:
    """The budget of a partial search: smaller generations, but more of them, since it has less time to learn."""
    _, count = trying.part
    if trying.search != "genetic" or trying.population <= MIN_BREEDING_POPULATION:
        return trying
    population = max(MIN_BREEDING_POPULATION, round(trying.population / sqrt(count)))
    return replace(trying, population=population, generations=ceil(trying.generations * trying.population / population))


# --- working -----------------------------------------------------------------------------------------------------


class ProgressListener:
    """Callbacks for the progress of a job; by default they do nothing."""

    def begin(self, number: int, of: int, task: JobTask) -> None: ...

    def on_generation(self, tuner: Tuner, generation: int) -> None: ...

    def end(self, task: JobTask, found: TuningResult[CpuOptions] | None, problem: str) -> None: ...


def run_job(
    tasks: Sequence[JobTask],
    on: Sequence[TuningDevice],
    store: Store,
    journal: Path | None,
    watcher: ProgressListener,
    evaluator: Callable[[], Evaluator] | None = None,
) -> list[tuple[str, TuningResult[CpuOptions]]]:
    """Tune tasks in order, up to one that is interrupted; return the name and result of each that succeeded.

    Raises KeyboardInterrupt if it is interrupted twice.
    """
    found: list[tuple[str, TuningResult[CpuOptions]]] = []
    book = Journal(journal)  # stays locked from the first task to the last
    where = LocalWorkers(on) if evaluator is None else evaluator()
    try:
        for number, task in enumerate(tasks):
            watcher.begin(number, len(tasks), task)
            try:
                tuned = _tune_task(task, on, store, book, watcher, where)
            except (TCError, InternalError, OSError) as error:  # e.g. no process can be started
                get_logger("tune").debug("%s: %s", task.name, error)
                watcher.end(task, None, str(error))
                continue
            found.append((task.name, tuned))
            watcher.end(task, tuned, "")
            if tuned.interrupted:
                break
    finally:
        where.close()
        book.close()
    return found


def _tune_task(
    task: JobTask, on: Sequence[TuningDevice], store: Store, book: Journal, watcher: ProgressListener, where: Evaluator
) -> TuningResult[CpuOptions]:
    tensors, initial = sample_arguments(task.function, task.sizes)
    arguments = normalize_arguments(CallSignature.of(task.function), tensors, initial)
    subject = tuning_task_of(KernelTable(task.function), arguments, CpuOptions(), task.effort.seed, store)
    return tune(subject, task.effort, on, evaluator=where, journal=book, observe=watcher.on_generation)
