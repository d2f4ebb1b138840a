"""Values that are made at most once per key, whatever number of threads ask, and never half made after a fork."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class OncePerKey(Generic[K, V]):
    """The `limit` values used last, each made by one thread while others that need it wait.

    Different keys are made in parallel. A `make` that raises leaves nothing behind: whoever waited tries anew.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[K, V] = OrderedDict()
        self._forget_threads()
        _instances.add(self)

    def __len__(self) -> int:
        return len(self._values)

    def last(self) -> V | None:
        """The value asked for most recently, if any."""
        with self._lock:
            return next(reversed(self._values.values()), None)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made by `make()` if there is none."""
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                turn = self._turns.setdefault(key, threading.Lock())
            with turn:  # what interrupts this thread, wherever it is, lets go of the lock
                if self._turns.get(key) is turn:  # else another thread has made the value, or failed to
                    return self._make(key, make)

    def _make(self, key: K, make: Callable[[], V]) -> V:
        try:
            with _gate:
                value = make()
            with self._lock:
                self._values[key] = value
                while len(self._values) > self.limit:
                    self._values.popitem(last=False)
            return value
        finally:
            self._turns.pop(key, None)

    def _forget_threads(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[K, threading.Lock] = {}


class _Gate:
    """Lets threads make values side by side, and lets no fork happen while one is at it.

    A child of such a fork would inherit locked libraries whose owners do not exist in it.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._mine = threading.local()

    def __enter__(self) -> None:
        with self._changed:
            self._inside += 1
        self._mine.depth = getattr(self._mine, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        self._mine.depth -= 1
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def before_fork(self) -> None:
        own = getattr(self._mine, "depth", 0)
        self._changed.acquire()
        while self._inside > own:
            self._changed.wait()

    def after_in_parent(self) -> None:
        self._changed.release()

    def after_in_child(self) -> None:
        self._reset()
        for instance in _instances:
            instance._forget_threads()


_instances: WeakSet[OncePerKey[Any, Any]] = WeakSet()
_gate = _Gate()
os.register_at_fork(
    before=_gate.before_fork, after_in_parent=_gate.after_in_parent, after_in_child=_gate.after_in_child
)
