from __future__ import annotations

import os
import threading
import time
from collections import Counter

import pytest

from tensor_comprehensions.core.single_flight import SingleFlightCache


def in_threads(count: int, work: object) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def test_many_threads_make_each_value_once() -> None:
    made: Counter[int] = Counter()
    store: SingleFlightCache[int, int] = SingleFlightCache(8)

    def make(key: int) -> int:
        made[key] += 1
        time.sleep(0.02)
        return key * key

    wrong = []
    in_threads(8, lambda i: wrong.extend(k for k in (i % 3, 1, 2) if store.get(k, lambda k=k: make(k)) != k * k))
    assert not wrong
    assert made == {0: 1, 1: 1, 2: 1}


def test_different_keys_are_made_at_the_same_time() -> None:
    store: SingleFlightCache[int, int] = SingleFlightCache(8)
    both = threading.Barrier(2, timeout=300)
    in_threads(2, lambda i: store.get(i, both.wait))
    assert len(store) == 2


def test_a_failure_is_everyones_own_and_leaves_nothing() -> None:
    store: SingleFlightCache[str, int] = SingleFlightCache(8)
    failures = []

    def fail(_: int) -> None:
        try:
            store.get("key", lambda: 1 // 0)
        except ZeroDivisionError as error:
            failures.append(error)

    in_threads(4, fail)
    assert len(failures) == 4
    assert store.get("key", lambda: 5) == 5


def test_the_value_unused_for_longest_is_dropped() -> None:
    store: SingleFlightCache[int, int] = SingleFlightCache(2)
    for key in (1, 2, 1, 3):
        store.get(key, lambda key=key: key)
    assert store.latest_value() == 3
    assert store.get(1, lambda: -1) == 1
    assert store.get(2, lambda: -2) == -2


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fault_24_a_child_of_a_fork_makes_what_a_thread_of_the_parent_was_making() -> None:
    store: SingleFlightCache[int, int] = SingleFlightCache(2)
    started = threading.Event()

    def slow() -> int:
        started.set()
        time.sleep(0.2)
        return 1

    thread = threading.Thread(target=lambda: store.get(1, slow))
    thread.start()
    assert started.wait(300)
    child = os.fork()
    if child == 0:
        os._exit(10 + store.get(1, lambda: 2) if len(store) else 1)
    _, status = os.waitpid(child, 0)
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 11, "the fork waited until the value was there"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_making_a_value_may_itself_fork() -> None:
    def fork() -> int:
        child = os.fork()
        if child == 0:
            os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert SingleFlightCache[int, int](2).get(1, fork) == 3


def test_an_interrupt_between_taking_the_turn_and_making_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals come between any two steps; whoever asks next must not wait for a thread that has left."""
    store: SingleFlightCache[int, int] = SingleFlightCache(2)

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "_make", interrupted)
        store.get(1, lambda: 1)
    in_threads(2, lambda _: store.get(1, lambda: 2))
    assert store.latest_value() == 2
