"""The progress of a job: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from . import tuner_pb2 as pb
from .jobs import JobTask, ProgressListener
from .outcomes import median_seconds
from .report import format_seconds
from .search_loop import Tuner, TuningResult

LINE_SECONDS = 5.0
"""Seconds between two plain lines."""


def progress_state(tuner: Tuner, generation: int) -> dict[str, str]:
    """The state to display: generation, candidates, best, median, failures by kind, time left.

    Times are those measured during the search, not in the final race.
    """
    times = tuner.best
    failed = Counter(o.kind for o in tuner.outcomes if o.status not in (pb.OK, pb.SLOW))
    left = tuner.effort.seconds - tuner.elapsed()
    middle = median_seconds(tuner.outcomes)
    return {
        "generation": str(generation),
        "candidates": str(len(tuner.outcomes)),
        "best in search": "-" if times is None or times.seconds is None else format_seconds(times.seconds),
        "median": "-" if middle is None else format_seconds(middle),
        "failed": ", ".join(f"{count} {kind}" for kind, count in failed.most_common()) or "none",
        "left": f"{max(0.0, left):.0f} s" if math.isfinite(left) else "no limit",
    }


class LineProgress(ProgressListener):
    """Prints a line when a task begins and ends, and every few seconds in between."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._told, self._title = out, 0.0, ""

    def begin(self, number: int, of: int, task: JobTask) -> None:
        self._title, self._told = f"[{number + 1}/{of}] {task.name}", time.monotonic()
        self._say(f"{self._title}: begins")

    def on_generation(self, tuner: Tuner, generation: int) -> None:
        if time.monotonic() - self._told >= LINE_SECONDS:
            self._told = time.monotonic()
            facts = ", ".join(f"{name} {text}" for name, text in progress_state(tuner, generation).items())
            self._say(f"{self._title}: {facts}")

    def end(self, task: JobTask, found: TuningResult[Any] | None, problem: str) -> None:
        self._say(f"{self._title}: {result_line(found, problem)}")

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def result_line(found: TuningResult[Any] | None, problem: str) -> str:
    """The result of a task in one line."""
    if found is None:
        return f"failed: {problem.splitlines()[0]}"
    early = ", ended early" if found.interrupted else ""
    return (
        f"{format_seconds(found.seconds)} in the race, {found.speedup:.2f} times as fast as untuned "
        f"({format_seconds(found.default_seconds)}), "
        f"{len(found.outcomes)} candidates in {found.elapsed:.0f} s{early}"
    )


class TableProgress(ProgressListener):
    """A live table of the current task, drawn by `rich`."""

    COLUMNS = ("generation", "candidates", "best in search", "median", "failed", "left")

    def __init__(self, live: Any) -> None:
        self._live = live
        self._rows: list[list[str]] = []

    def begin(self, number: int, of: int, task: JobTask) -> None:
        self._rows.append([f"{number + 1}/{of} {task.name}", *("" for _ in self.COLUMNS)])
        self._draw()

    def on_generation(self, tuner: Tuner, generation: int) -> None:
        facts = progress_state(tuner, generation)
        self._rows[-1][1:] = [facts[name] for name in self.COLUMNS]
        self._draw()

    def end(self, task: JobTask, found: TuningResult[Any] | None, problem: str) -> None:
        self._live.console.print(f"{task.name}: {result_line(found, problem)}", markup=False, highlight=False)
        self._rows.pop()
        self._draw()

    def _draw(self) -> None:
        from rich.table import Table as Drawn

        table = Drawn("def", *self.COLUMNS)
        for row in self._rows:
            table.add_row(*row)
        self._live.update(table, refresh=True)


@contextmanager
def progress_listener(out: TextIO | None = None) -> Iterator[ProgressListener]:
    """Yield a live table if `out` (default: standard error) is a terminal, else plain lines."""
    stream = sys.stderr if out is None else out
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    if not console.is_terminal:
        yield LineProgress(stream)
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield TableProgress(live)
