"""Named steps inside a pass, which a watcher can time and dump.

A lowering names its steps with `run_step`. Outside `watch_steps`, which is the normal case, that is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepReport:
    """A finished step.

    Attributes:
        name: unique in its pass, such as "schedule" or "kernel1.promote".
        seconds: wall time.
        text: prints the result of the step; None if the result is not printable.
    """

    name: str
    seconds: float
    text: Callable[[], str] | None


_watcher: ContextVar[Callable[[StepReport], None] | None] = ContextVar("step_watcher", default=None)


def run_step(name: str, transform: Callable[[], T], show: Callable[[T], str] | None = None) -> T:
    """Return `transform()`, and report the step to the watcher of this context, if there is one."""
    watcher = _watcher.get()
    if watcher is None:
        return transform()
    start = perf_counter()
    result = transform()
    text: Any = None if show is None else lambda: show(result)
    watcher(StepReport(name, perf_counter() - start, text))
    return result


@contextmanager
def watch_steps(watcher: Callable[[StepReport], None] | None) -> Iterator[None]:
    """Report the steps of the `with` block to `watcher`; None reports nothing."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
