"""Tuning one call: from its arguments to the options that later calls use; the cache stores the measurements."""

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

from ..cache import measurement_store
from ..cache.key import Key, make_key, names_digest
from ..cache.options_proto import from_message, to_message
from ..cache.store import Store
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from ..core.interrupts import deferred_interrupts
from ..options import CpuOptions
from ..target import CpuTarget
from ..tc_lang.ir import BoundFunction, Function
from . import tuner_pb2 as pb
from .device import TuningDevice
from .evaluators import Evaluator, ExecutorWorkers, LocalWorkers
from .journal import Journal
from .problem import Problem
from .recorded_options import starting_points
from .search_history import remember_search
from .search_loop import Observer, SearchBudget, StopFlag, Tuner, TuningResult
from .space import CpuSearchSpace, Genome, search_space

FOREVER = 1 << 62
"""Seconds that count as no limit."""


Spaced = tuple[CpuSearchSpace, tuple[Genome, ...]]
"""A space, and the genomes to try first."""


@dataclass(frozen=True, slots=True)
class TuningTask:
    """The subject of a search: a def bound to sizes and layouts, its message, the machine and the store for results."""

    function: Function
    bound: BoundFunction
    message: pb.Problem
    target: CpuTarget
    start: CpuOptions
    store: Store

    def key(self, threads: int) -> Key:
        return make_key(self.function, self.bound, self.target, threads=threads)


def tune(
    subject: TuningTask,
    effort: SearchBudget,
    devices: Sequence[TuningDevice],
    *,
    executor: Executor | None = None,
    evaluator: Evaluator | None = None,
    journal: Path | Journal | None = None,
    observe: Observer = lambda tuner, generation: None,
    spaced: Spaced | None = None,
) -> TuningResult[CpuOptions]:
    """Search, store the measurements, and return the result.

    executor: evaluates candidates instead of `devices` of this machine. evaluator: an existing one to use instead.
    journal: the journal to resume from: a file, or a journal that the caller closes.
    spaced: the search space and its first genomes; by default, the space around the options to start from.
    The first Ctrl-C ends the search with the best result so far; a second one raises KeyboardInterrupt.

    Raises ArgumentError if no candidate works.
    """
    start = time.monotonic()
    key = subject.key(devices[0].threads)
    book = journal if isinstance(journal, Journal) else Journal(journal)
    where = evaluator or (LocalWorkers(devices) if executor is None else ExecutorWorkers(executor, devices[0]))
    try:
        with deferred_interrupts():  # otherwise an interrupt could leave a started process behind
            where.begin()
        problem = Problem(subject.message)
        known = load_or_start(book, problem.digest, key.digest, lambda: known_options(subject, key))
        made, seeds = spaced or search_space(subject.bound, subject.target, subject.start, known)
        with stop_on_interrupt() as stop:
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
    publish_result(subject, key, found, effort)
    remember_search(key, found)
    return found


def publish_result(subject: TuningTask, key: Key, found: TuningResult[CpuOptions], effort: SearchBudget) -> None:
    """Store the times of the winner and of the default in the race."""
    facts = {"validated": found.validated, "tuner": effort.search}
    best = {"samples": found.runs, "spread": found.spread}
    kept = [measurement_store.measurement_of(subject.bound, found.options, found.seconds, **best, **facts)]
    if found.options != found.default:
        kept.append(measurement_store.measurement_of(subject.bound, found.default, found.default_seconds, **facts))
    measurement_store.record_measurements(subject.store, key, kept)


def known_options(subject: TuningTask, key: Key) -> list[CpuOptions]:
    """Recorded options that a search of `subject` may start from, best first."""
    found = starting_points(subject.store, key, names_digest(subject.bound), subject.start)
    get_logger("tune").debug("%s: the search starts from %d options that are known", subject.function.name, len(found))
    return found


def load_or_start(book: Journal, problem: str, key: str, look: Callable[[], list[CpuOptions]]) -> list[CpuOptions]:
    """The starting points of a search besides the default; a resumed search takes them from the journal.

    key: the digest of the key of its result, by which a report finds the search. look: finds them for a new search.
    """
    record = book.start(problem)
    if record is None:
        record = pb.Start(known=map(to_message, look()), key=key)
        book.add(problem, record)
    return [from_message(message) for message in record.known]


# --- budgets and signals -----------------------------------------------------------------------------------------

_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*")


def parse_seconds(budget: object) -> float:
    """Seconds of a budget: a number, or a text such as "90s", "2min", "1h 30min". Raises ArgumentError."""
    if isinstance(budget, int | float) and not isinstance(budget, bool) and budget > 0:
        return float(budget) if budget < FOREVER else math.inf
    if isinstance(budget, str):
        total = _parse_duration(budget)
        if total > 0:
            return total
    raise ArgumentError(f"the budget is {budget!r}", expected='seconds, or a text such as "90s", "2min", "1h 30min"')


def _parse_duration(text: str) -> float:
    """Seconds of "1h 30min"; 0 if the text has no such form."""
    total, at = 0.0, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part[2] not in _UNITS:
            return 0.0
        total, at = total + float(part[1]) * _UNITS[part[2]], part.end()
    return total


@contextmanager
def stop_on_interrupt() -> Iterator[StopFlag]:
    """Yield a flag that the first Ctrl-C sets; a second one raises KeyboardInterrupt. Only in the main thread."""
    stop = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if stop.wanted:
            raise KeyboardInterrupt
        stop.wanted = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
