"""A thread-safe and fork-safe LRU cache that makes each value only once, even if several threads need it."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakSet

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlightCache(Generic[K, V]):
    """A cache of the `limit` most recently used values. One thread makes a value; other threads that need it wait.

    Values of different keys are made in parallel. If `make` raises, nothing is cached, and the next thread tries.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[K, V] = OrderedDict()
        self._forget_threads()
        _instances.add(self)

    def __len__(self) -> int:
        return len(self._values)

    def latest_value(self) -> V | None:
        """The most recently used value, if any."""
        with self._lock:
            return next(reversed(self._values.values()), None)

    def values(self) -> list[V]:
        """All values, the most recently used last."""
        with self._lock:
            return list(self._values.values())

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made by `make()` if it is not cached."""
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                turn = self._turns.setdefault(key, threading.Lock())
            with turn:  # an interrupt at any point of this thread releases the lock
                if self._turns.get(key) is turn:  # else another thread has made the value, or failed to
                    return self._make(key, make)

    def _make(self, key: K, make: Callable[[], V]) -> V:
        try:
            with _gate.thread_lock():
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
    """Lets threads make values in parallel, and delays forks until no thread makes one.

    Otherwise the child could inherit locks of libraries whose owners do not exist in it. Each thread that makes a value
    holds its own lock: an interrupt could leave a counter wrong, but it releases the lock.
    """

    PAUSE = 0.001
    """Seconds between two attempts of a waiting fork."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._registering = threading.RLock()
        self._locks: WeakSet[Any] = WeakSet()
        self._threads = threading.local()
        self._held: list[Any] = []

    def thread_lock(self) -> Any:
        """The lock that this thread holds while it makes a value."""
        lock = getattr(self._threads, "lock", None)
        if lock is None:
            with self._registering:
                lock = threading.RLock()
                self._locks.add(lock)
                self._threads.lock = lock
        return lock

    def before_fork(self) -> None:
        if self.is_open():
            return
        while not self._take_all():
            time.sleep(self.PAUSE)

    def _take_all(self) -> bool:
        """Take the locks of all threads, or none and return False: a thread that makes a value may itself fork."""
        self._registering.acquire()
        self._held = [self._registering]
        for lock in list(self._locks):
            if not lock.acquire(blocking=False):
                self._release_all()
                return False
            self._held.append(lock)
        return True

    def is_open(self) -> bool:
        """Whether this thread may fork without waiting."""
        return getattr(self._threads, "open", False)

    def open(self, value: bool) -> None:
        self._threads.open = value

    def after_in_parent(self) -> None:
        if not self.is_open():
            self._release_all()

    def _release_all(self) -> None:
        while self._held:
            self._held.pop().release()

    def after_in_child(self) -> None:
        self._reset()
        for instance in _instances:
            instance._forget_threads()


@contextmanager
def fork_at_once() -> Iterator[None]:
    """Let this thread fork while threads make values, for children that use no library that may be locked.

    Without this, a thread that forks while it makes a value would deadlock if another thread, which is making its own
    value, waits for that one.
    """
    _gate.open(True)
    try:
        yield
    finally:
        _gate.open(False)


_instances: WeakSet[SingleFlightCache[Any, Any]] = WeakSet()
_gate = _Gate()
os.register_at_fork(
    before=_gate.before_fork, after_in_parent=_gate.after_in_parent, after_in_child=_gate.after_in_child
)
