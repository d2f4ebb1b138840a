"""Processes that use one cache at the same time, for the tests: `python crowd.py TASK FOLDER [NUMBER]`. No torch.

The script imports what is needed once and forks, so that a process costs a millisecond.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tensor_comprehensions.cache import eviction, measurement_store, stored_kernels
from tensor_comprehensions.cache.key import Key
from tensor_comprehensions.cache.measurement_store import Measurement
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.cache.stored_kernels import StoredKernel
from tensor_comprehensions.options import CpuOptions

PROCESSES = 8
HANGS = 600
"""Seconds after which a process is thought to wait for ever."""


def key(n: int) -> Key:
    return Key((("kind", "kernel"), ("def", "f"), ("shapes", str(n))))


def payload(n: int) -> bytes:
    return bytes([n]) * 20_000


def together(work: Callable[[int], None], count: int = PROCESSES) -> None:
    """Run `work` in processes that start at the same moment; fail where one fails."""
    ready, start = os.pipe()
    children = []
    for n in range(count):
        child = os.fork()
        if child == 0:
            try:
                os.close(start)
                os.read(ready, 1)  # until the parent closes its end
                work(n)
                os._exit(0)
            except BaseException as error:
                print(f"process {n}: {error!r}", file=sys.stderr)
                os._exit(1)
        children.append(child)
    os.close(start)
    states = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert states == [0] * count, states


def same_key(root: Path) -> None:
    """Fault 17: everybody keeps the same code under the same key."""

    def work(_: int) -> None:
        store = Store(root)
        for _ in range(10):
            assert stored_kernels.store_kernel(store, StoredKernel(key(0), {}, payload(0)))
            found = stored_kernels.find_kernel(store, key(0))
            assert found is not None
            assert found.data == payload(0)

    together(work)
    assert list(Store(root).walk()) == [stored_kernels.kernel_entry_name(key(0))]


def different_keys(root: Path) -> None:
    """Fault 18: everybody keeps code and measurements of its own; nothing is lost."""

    def work(n: int) -> None:
        store = Store(root)
        for k in range(10):
            assert stored_kernels.store_kernel(store, StoredKernel(key(100 * n + k), {}, payload(n)))
            measurement_store.record_measurements(
                store, key(0), [Measurement(CpuOptions(grain_size=100 * n + k), 1.0 + k, True)]
            )

    together(work)
    store = Store(root)
    for n in range(PROCESSES):
        for k in range(10):
            found = stored_kernels.find_kernel(store, key(100 * n + k))
            assert found is not None
            assert found.data == payload(n)
    grains = {m.options.grain_size for m in measurement_store.recall_measurements(store, key(0))}
    assert grains == {100 * n + k for n in range(PROCESSES) for k in range(10)}


def one_of_them(root: Path) -> None:
    """Fault 19: everybody keeps other code under one key; what is there is one of them, whole."""

    def work(n: int) -> None:
        store = Store(root)
        for _ in range(10):
            stored_kernels.store_kernel(store, StoredKernel(key(0), {}, payload(n)))
            found = stored_kernels.find_kernel(store, key(0))
            assert found is not None
            assert found.data == payload(found.data[0])

    together(work)


def check_eviction(root: Path) -> None:
    """Fault 20: some write and read while others remove; a reader sees an entry or a miss."""

    def work(n: int) -> None:
        store = Store(root, limit=100_000)
        for k in range(30):
            if n < 2:
                eviction.evict(store)
            else:
                stored_kernels.store_kernel(store, StoredKernel(key(k), {}, payload(k)))
                found = stored_kernels.find_kernel(store, key((7 * k) % 30))
                assert found is None or found.data == payload((7 * k) % 30)

    together(work)
    swept = eviction.evict(Store(root, limit=100_000))
    assert swept is not None
    assert swept.bytes <= 100_000


def check_compaction(root: Path) -> None:
    """Everybody records and compacts the measurements of one key; none is lost."""

    def work(n: int) -> None:
        store = Store(root)
        for k in range(5):
            measurement_store.record_measurements(
                store, key(0), [Measurement(CpuOptions(grain_size=10 * n + k), 1.0 + k, True)]
            )
            measurement_store.compact_measurements(store, key(0))

    together(work)
    grains = {m.options.grain_size for m in measurement_store.recall_measurements(Store(root), key(0))}
    assert grains == {10 * n + k for n in range(PROCESSES) for k in range(5)}


def check_killed_writers(root: Path, times: int = 100) -> None:
    """Fault 6: writers are killed at random moments; what they leave is whole, or a leftover that is swept."""
    chance, store = random.Random(6), Store(root)
    for _ in range(times):
        child = os.fork()
        if child == 0:
            own = Store(root)
            for k in range(1 << 30):
                stored_kernels.store_kernel(own, StoredKernel(key(k % 5), {}, payload(k % 5) * 20))
                measurement_store.record_measurements(
                    own, key(0), [Measurement(CpuOptions(grain_size=k % 7), 1.0 + k % 3, True)]
                )
        time.sleep(chance.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for k in range(5):
            found = stored_kernels.find_kernel(store, key(k))
            assert found is None or found.data == payload(k) * 20
        measurement_store.recall_measurements(store, key(0))
    assert sum(stored_kernels.find_kernel(store, key(k)) is not None for k in range(5))
    for leftover in root.rglob("*.tmp"):
        os.utime(leftover, (0, 0))
    eviction.evict(store)
    assert not list(root.rglob("*.tmp"))
    assert all(store.read(name) is not None for name in store.walk())


def held(root: Path) -> None:
    """Faults 21 and 22: the lock of a stopped process keeps nobody waiting, and goes with its process."""
    import fcntl

    store = Store(root)
    assert stored_kernels.store_kernel(store, StoredKernel(key(0), {}, payload(0)))
    listen, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with open(root / "v2" / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(tell, b"x")
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.read(listen, 1)
    signal.alarm(HANGS)
    assert eviction.evict(store) is None
    assert stored_kernels.store_kernel(store, StoredKernel(key(1), {}, payload(1)))
    together(lambda n: None if stored_kernels.find_kernel(store, key(1)) else os._exit(1), 2)
    signal.alarm(0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert eviction.evict(store) is not None


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
