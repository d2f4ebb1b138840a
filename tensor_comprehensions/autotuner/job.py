"""Offline jobs: a file that lists defs and sizes, worked off one after another, by one process or by many.

Always holds: a job that was killed goes on where its journal ends; what a finished search found is in the store.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from ..cache.store import Store
from ..calling.arguments import numbers
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
    table = _table(path)
    _check(table, _JOB, str(path))
    entries = table.get("tune", [])
    if not isinstance(entries, list) or not entries:
        raise ArgumentError(f"{path} has nothing to tune", expected='tables [[tune]] with "file" or "source"')
    given = {**_JOB, **table}
    tasks = [task for n, entry in enumerate(entries) for task in _tasks(entry, given, path, f"{path}: tune[{n}]")]
    if not isinstance(given["devices"], list):
        raise ArgumentError(f"{path}: devices is {given['devices']!r}", expected='a list such as ["cpu"]')
    return Job(tuple(tasks), devices(given["devices"]), given["store"])


def _table(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            found = json.loads(data)
        else:
            found = _toml().loads(data.decode())
    except OSError as error:
        raise ArgumentError(f"cannot read the job {path}: {error}") from error
    except ValueError as error:  # of either format, and of UTF-8
        raise ArgumentError(f"the job {path} cannot be understood: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"the job {path} is no table")
    return found


def _toml() -> Any:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib
    try:
        import tomli
    except ImportError as error:
        raise ArgumentError(
            "this Python reads no TOML by itself",
            suggestion="pip install 'tensor-comprehensions[tune]', or write the job as JSON",
        ) from error
    return tomli


def _check(table: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    if unknown := [name for name in table if name not in known]:
        raise ArgumentError(f"{where}: there is no setting {unknown[0]!r}", expected=", ".join(known))


def _tasks(entry: Any, job: Mapping[str, Any], path: Path, where: str) -> Iterator[Task]:
    if not isinstance(entry, dict):
        raise ArgumentError(f"{where} is no table")
    _check(entry, _TASK, where)
    given = {**_TASK, **entry}
    trying = effort(given["budget"] or job["budget"], job["generations"], job["population"], job["seed"], job["search"])
    sizes = given["sizes"] if isinstance(given["sizes"], list) else [given["sizes"]]
    for function in _functions(given, path, where):
        for one in sizes:
            values = numbers(one) if isinstance(one, str) else one
            if not isinstance(values, dict):
                raise ArgumentError(f"{where}: sizes are {one!r}", expected='a list of {M = 128} or "M=128"')
            shown = ",".join(f"{name}={value}" for name, value in values.items())
            yield Task(f"{function.name}({shown})", function, values, trying)


def _functions(given: Mapping[str, Any], path: Path, where: str) -> list[Function]:
    if (given["file"] is None) == (given["source"] is None):
        raise ArgumentError(f"{where}: either file or source tells the program")
    source = given["source"]
    if source is None:
        try:
            source = (path.parent / given["file"]).read_text()
        except (OSError, TypeError, UnicodeDecodeError) as error:
            raise ArgumentError(f"{where}: cannot read {given['file']}: {error}") from error
    functions = compile_source(source)
    found = [f for f in functions if given["def"] in (None, f.name)]
    if not found:
        raise ArgumentError(f"{where}: there is no def {given['def']!r}", expected=", ".join(f.name for f in functions))
    return found


# --- shards ------------------------------------------------------------------------------------------------------


def shard_of(text: str) -> tuple[int, int]:
    """`3/64` as (3, 64), counted from 0. Raises ArgumentError."""
    number, _, count = text.partition("/")
    if number.isdigit() and count.isdigit() and int(number) < int(count):
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
    where = Local(on) if evaluator is None else evaluator()
    try:
        for number, task in enumerate(tasks):
            watcher.begin(number, len(tasks), task)
            try:
                tuned = _tuned(task, on, store, journal, watcher, where)
            except (TCError, InternalError) as error:
                logger("tune").debug("%s: %s", task.name, error)
                watcher.end(task, None, str(error))
                continue
            found.append((task.name, tuned))
            watcher.end(task, tuned, "")
            if tuned.interrupted:
                break
    finally:
        where.close()
    return found


def _tuned(
    task: Task, on: Sequence[Device], store: Store, journal: Path | None, watcher: Watcher, where: Evaluator
) -> Tuned:
    tensors, initial = sample_arguments(task.function, task.sizes)
    arguments = gather(Interface.of(task.function), tensors, initial)
    subject = subject_of(Kernels(task.function), arguments, CpuOptions(), task.effort.seed, store)
    return tune(subject, task.effort, on, evaluator=where, journal=journal, observe=watcher.seen)
