"""Deferred Ctrl-C: work that must not stop halfway finishes first, then the interrupt is raised."""

from __future__ import annotations

import signal
import threading
import weakref
from types import FrameType
from typing import Any


class deferred_interrupts:
    """Hold back Ctrl-C for the `with` block, for work that cannot be undone, such as an import.

    Python runs signal handlers in the main thread only, so other threads need no protection.
    """

    def __enter__(self) -> None:
        self._before: Any = None
        self._came: list[FrameType | None] = []
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, _make_interrupt_handler(weakref.ref(self), before))

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came:
                self._before(signal.SIGINT, self._came[0])


def _make_interrupt_handler(block: weakref.ref[deferred_interrupts], before: Any) -> Any:
    """A handler that records the interrupt in `block`. If `block` is gone (it ran out of memory), restores `before`."""

    def note(number: int, frame: FrameType | None) -> None:
        here = block()
        if here is not None:
            here._came.append(frame)
            return
        signal.signal(signal.SIGINT, before)
        before(number, frame)

    return note
