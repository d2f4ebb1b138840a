"""Tuning one call: from its arguments to the options that later calls use, with what was learnt kept in the cache."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..cache import tuning
from ..cache.key import Key, make_key, spelling
from ..cache.records import from_message, to_message
from ..cache.store import Store
from ..errors import ArgumentError
from ..inspection import logger
from ..interrupts import deferred_interrupts
from ..options import CpuOptions
from ..target import Target
from ..tc_lang.function import BoundFunction, Function
from . import tuner_pb2 as pb
from .device import Device
from .evaluators import Elsewhere, Evaluator, Local
from .journal import Journal
from .lookup import starting_points
from .problem import Problem
from .space import Genome, Space, space
from .tuner import Effort, Observer, Stop, Tuned, Tuner

FOREVER = 1 << 62
"""Seconds that are as good as no limit."""


Spaced = tuple[Space, tuple[Genome, ...]]
"""A space, and the genomes to try first."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tuned: a def bound to sizes and layouts, its message, the machine and where results are kept."""

    function: Function
    bound: BoundFunction
    message: pb.Problem
    target: Target
    start: CpuOptions
    store: Store

    def key(self, threads: int) -> Key:
        return make_key(self.function, self.bound, self.target, threads=threads)


def tune(
    subject: Subject,
    effort: Effort,
    devices: Sequence[Device],
    *,
    executor: Executor | None = None,
    evaluator: Evaluator | None = None,
    journal: Path | Journal | None = None,
    observe: Observer = lambda tuner, generation: None,
    spaced: Spaced | None = None,
) -> Tuned:
    """Search, keep what was learnt in the store, and give the result.

    executor: where to evaluate, instead of on `devices` of this machine. evaluator: the same, made already.
    journal: what to go on from: a file, or a journal that the caller closes.
    spaced: what may be tried, and first of all; without it, everything around the options to start from.
    The first Ctrl-C ends the search with the best so far; a second one raises KeyboardInterrupt.

    Raises ArgumentError where nothing works.
    """
    start = time.monotonic()
    key = subject.key(devices[0].threads)
    book = journal if isinstance(journal, Journal) else Journal(journal)
    where = evaluator or (Local(devices) if executor is None else Elsewhere(executor, devices[0]))
    try:
        with deferred_interrupts():  # else a process could be started that nothing knows of
            where.begin()
        problem = Problem(subject.message)
        known = begun(book, problem.digest, lambda: known_options(subject, key))
        made, seeds = spaced or space(subject.bound, subject.target, subject.start, known)
        with stoppable() as stop:
            tuner = Tuner(
                problem,
                made,
                seeds,
                effort,
                where,
                journal=book,
                stop=stop,
                start=start,
                observe=observe,
            )
            found = tuner.run()
    finally:
        with deferred_interrupts():
            if book is not journal:
                book.close()
            if evaluator is None:
                where.close()
    publish(subject, key, found, effort)
    return found


def publish(subject: Subject, key: Key, found: Tuned, effort: Effort) -> None:
    """Keep the race's times of the winner and of the default."""
    facts = {"validated": found.validated, "tuner": effort.search}
    best = {"samples": found.runs, "spread": found.spread}
    kept = [tuning.measurement_of(subject.bound, found.options, found.seconds, **best, **facts)]
    if found.options != found.default:
        kept.append(tuning.measurement_of(subject.bound, found.default, found.default_seconds, **facts))
    tuning.record(subject.store, key, kept)


def known_options(subject: Subject, key: Key) -> list[CpuOptions]:
    """What the store knows that a search of `subject` may start from, best first."""
    found = starting_points(subject.store, key, spelling(subject.bound), subject.start)
    logger("tune").debug("%s: the search starts from %d options that are known", subject.function.name, len(found))
    return found


def begun(book: Journal, problem: str, look: Callable[[], list[CpuOptions]]) -> list[CpuOptions]:
    """What a search starts from, beside the default: as when it began, if it is one that goes on."""
    record = book.start(problem)
    if record is None:
        record = pb.Start(known=map(to_message, look()))
        book.add(problem, record)
    return [from_message(message) for message in record.known]


# --- budgets and signals -----------------------------------------------------------------------------------------

_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*")


def seconds(budget: object) -> float:
    """Seconds of a budget: a number, or a text such as "90s", "2min", "1h 30min". Raises ArgumentError."""
    if isinstance(budget, int | float) and not isinstance(budget, bool) and budget > 0:
        return float(budget) if budget < FOREVER else math.inf
    if isinstance(budget, str):
        total = _total(budget)
        if total > 0:
            return total
    raise ArgumentError(f"the budget is {budget!r}", expected='seconds, or a text such as "90s", "2min", "1h 30min"')


def _total(text: str) -> float:
    """Seconds of "1h 30min"; 0 for what is no such text."""
    total, at = 0.0, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part[2] not in _UNITS:
            return 0.0
        total, at = total + float(part[1]) * _UNITS[part[2]], part.end()
    return total


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Turn the first Ctrl-C into a wish to stop; the second one is raised."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop.wanted:
            raise KeyboardInterrupt
        stop.wanted = True

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
