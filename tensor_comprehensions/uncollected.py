"""Work during which Python looks for no cycles of garbage: what imports make stays, and what passes make has none.

A look goes through all young objects, and at times through all of the process; among torch's it takes longer than to
load a kernel from the cache.
"""

from __future__ import annotations

import gc
import os
import threading
from types import TracebackType


class _Uncollected:
    """Usage: `with UNCOLLECTED: ...`, nested and in several threads; the last one to leave lets Python look again."""

    def __init__(self) -> None:
        self._lock, self._inside, self._stopped = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1 and gc.isenabled():
                gc.disable()
                self._stopped = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside = max(0, self._inside - 1)  # in a child of a fork, nobody has entered
            if not self._inside:
                self._again()

    def _again(self) -> None:
        if self._stopped:
            gc.enable()
        self._stopped = False

    def after_in_child(self) -> None:
        """Only the thread that forked goes on: nobody waits for the others to leave."""
        self._lock, self._inside = threading.Lock(), 0
        self._again()


def settle() -> None:
    """Count all objects there are as old ones, unlooked at: after an import nearly all of them stay.

    Python looks through the others with the first thousands of new ones, in the midst of the first call.
    """
    if hasattr(gc, "freeze") and not gc.get_freeze_count():  # else somebody wants them frozen
        gc.freeze()
        gc.unfreeze()


UNCOLLECTED = _Uncollected()
os.register_at_fork(after_in_child=UNCOLLECTED.after_in_child)
