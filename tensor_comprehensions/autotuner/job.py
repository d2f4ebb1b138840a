"""Offline jobs: a file that lists defs and sizes, worked off one after another, by one process or by many.

Always holds: a job that was killed goes on where its journal ends; what a finished search found is in the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from ..cache.store import Store
from ..calling.calls import Interface, gather
from ..calling.kernels import Kernels
from ..calling.samples import sample_arguments
from ..errors import ArgumentError, InternalError, TCError
from ..inspection import logger
from ..options import CpuOptions
from ..tc_lang import compile_source
from ..tc_lang.function import Function
from .call import effort, subject_of
from .device import Device, devices
from .evaluators import Evaluator, Local
from .job_file import check_settings, read_table, sizes_of, source_of, text_of
from .journal import Journal
from .search import GENERATIONS, POPULATION
from .tune import tune
from .tuner import Effort, Tuned, Tuner

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
SMALLEST = 8
"""Candidates of a generation from which it pays to breed."""
_TASK: dict[str, Any] = {"file": None, "source": None, "def": None, "sizes": [{}], "budget": None}


@dataclass(frozen=True, slots=True)
class Task:
    """One def at one size. name: for people."""

    name: str
    function: Function
    sizes: Mapping[str, float]
    effort: Effort


@dataclass(frozen=True, slots=True)
class Job:
    """What a job file says. store: where results go; None for the cache."""

    tasks: tuple[Task, ...]
    devices: tuple[Device, ...]
    store: str | None


def read_job(path: Path) -> Job:
    """The job in a TOML or JSON file. Raises ArgumentError that names what is wrong in it."""
    table = read_table(path)
    check_settings(table, _JOB, str(path))
    entries = table.get("tune", [])
    if not isinstance(entries, list) or not entries:
        raise ArgumentError(f"{path} has nothing to tune", expected='tables [[tune]] with "file" or "source"')
    given = {**_JOB, **table}
    tasks = [task for n, entry in enumerate(entries) for task in _tasks(entry, given, path, f"{path}: tune[{n}]")]
    if not isinstance(given["devices"], list):
        raise ArgumentError(f"{path}: devices is {given['devices']!r}", expected='a list such as ["cpu"]')
    return Job(tuple(tasks), devices(given["devices"]), text_of(given, "store", str(path)))


def _tasks(entry: Any, job: Mapping[str, Any], path: Path, where: str) -> Iterator[Task]:
    if not isinstance(entry, dict):
        raise ArgumentError(f"{where} is no table")
    check_settings(entry, _TASK, where)
    given = {**_TASK, **entry}
    budget = job["budget"] if given["budget"] is None else given["budget"]
    try:
        trying = effort(budget, job["generations"], job["population"], job["seed"], job["search"])
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error.message}", expected=error.expected) from None
    several = sizes_of(given["sizes"], where)
    for function in _functions(given, path, where):
        for values in several:
            shown = ",".join(f"{name}={value}" for name, value in values.items())
            yield Task(f"{function.name}({shown})", function, values, trying)


def _functions(given: Mapping[str, Any], path: Path, where: str) -> list[Function]:
    source, file, name = (text_of(given, setting, where) for setting in ("source", "file", "def"))
    if (file is None) == (source is None):
        raise ArgumentError(f"{where}: either file or source tells the program")
    functions = compile_source(source_of(path.parent / file, where) if file is not None else source or "")
    found = [f for f in functions if name in (None, f.name)]
    if not found:
        raise ArgumentError(
            f"{where}: there is no def{'' if name is None else f' {name!r}'}",
            expected=", ".join(f.name for f in functions),
        )
    return found


# --- shards ------------------------------------------------------------------------------------------------------


def shard_of(text: str) -> tuple[int, int]:
    """`3/64` as (3, 64), counted from 0. Raises ArgumentError."""
    number, _, count = text.partition("/")
    if _SHARD.fullmatch(text) and int(number) < int(count):
        return int(number), int(count)
    raise ArgumentError(f"the shard is {text!r}", expected="such as 0/64 up to 63/64")


def dealt(tasks: Sequence[Task], shard: tuple[int, int]) -> tuple[Task, ...]:
    """The tasks of a shard. Where there are fewer than shards, several search for the same: they deal what to try first
    among themselves, and go on with other seeds.
    """
    number, count = shard
    if len(tasks) >= count:
        return tuple(tasks[number::count])
    task = tasks[number % len(tasks)]
    part = number // len(tasks), len(range(number % len(tasks), count, len(tasks)))
    return (replace(task, effort=_shared(replace(task.effort, seed=task.effort.seed + number, part=part))),)


def _shared(trying: Effort) -> Effort:
    """A part of a search by itself: fewer at a time, and more often, for it has less time to learn from what it saw."""
    _, count = trying.part
    if trying.search != "genetic" or trying.population <= SMALLEST:
        return trying
    population = max(SMALLEST, round(trying.population / sqrt(count)))
    return replace(trying, population=population, generations=ceil(trying.generations * trying.population / population))


# --- working -----------------------------------------------------------------------------------------------------


class Watcher:
    """Told what happens. Does nothing."""

    def begin(self, number: int, of: int, task: Task) -> None: ...

    def seen(self, tuner: Tuner, generation: int) -> None: ...

    def end(self, task: Task, found: Tuned | None, problem: str) -> None: ...


def work(
    tasks: Sequence[Task],
    on: Sequence[Device],
    store: Store,
    journal: Path | None,
    watcher: Watcher,
    evaluator: Callable[[], Evaluator] | None = None,
) -> list[tuple[str, Tuned]]:
    """Work off tasks in order: the name and the result of each that succeeded. A task that is interrupted is the last.

    Raises KeyboardInterrupt where it is interrupted twice.
    """
    found: list[tuple[str, Tuned]] = []
    book = Journal(journal)  # for all tasks: another process that wants it is refused, whichever is at work
    where = Local(on) if evaluator is None else evaluator()
    try:
        for number, task in enumerate(tasks):
            watcher.begin(number, len(tasks), task)
            try:
                tuned = _tuned(task, on, store, book, watcher, where)
            except (TCError, InternalError, OSError) as error:  # no process can be started, say
                logger("tune").debug("%s: %s", task.name, error)
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


def _tuned(task: Task, on: Sequence[Device], store: Store, book: Journal, watcher: Watcher, where: Evaluator) -> Tuned:
    tensors, initial = sample_arguments(task.function, task.sizes)
    arguments = gather(Interface.of(task.function), tensors, initial)
    subject = subject_of(Kernels(task.function), arguments, CpuOptions(), task.effort.seed, store)
    return tune(subject, task.effort, on, evaluator=where, journal=book, observe=watcher.seen)
