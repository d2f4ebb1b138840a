"""Random stories of a cache: puts, gets, evictions, kills and damage, against a dictionary."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tensor_comprehensions.cache import eviction, measurement_store, stored_kernels
from tensor_comprehensions.cache.key import Key
from tensor_comprehensions.cache.measurement_store import Measurement
from tensor_comprehensions.cache.safe_io import SYSTEM
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.cache.stored_kernels import StoredKernel
from tensor_comprehensions.options import CpuOptions

KEYS = [Key((("kind", "kernel"), ("def", "f"), ("shapes", str(n)))) for n in range(3)]


class Killed(BaseException):
    """What a process feels that is killed: nothing of it runs any more."""


def dying(after: int) -> Callable[..., Any]:
    """Writes so many bytes, then dies."""

    def write(descriptor: int, data: memoryview) -> int:
        if after:
            os.write(descriptor, data[:after])
        raise Killed

    return write


class Cache(RuleBasedStateMachine):
    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "cache"
        self.kept: dict[Key, bytes | None] = {}
        self.measured: set[int] = set()
        self.unsure = False  # measurements may have gone with a damaged file

    def teardown(self) -> None:
        shutil.rmtree(self.root.parent)

    @property
    def store(self) -> Store:
        """As a new process sees it."""
        return Store(self.root)

    @rule(target=keys, n=st.integers(0, 2))
    def key(self, n: int) -> Key:
        return KEYS[n]

    @rule(key=keys, data=st.binary(max_size=30))
    def put(self, key: Key, data: bytes) -> None:
        assert stored_kernels.store_kernel(self.store, StoredKernel(key, {"kernels": 1}, data))
        self.kept[key] = data

    @rule(key=keys, data=st.binary(min_size=1, max_size=30), after=st.sampled_from([0, 1, 30]), renaming=st.booleans())
    def killed_while_putting(self, key: Key, data: bytes, after: int, renaming: bool) -> None:
        def die(*_: object) -> None:
            raise Killed

        gone = replace(SYSTEM, unlink=die, **({"replace": die} if renaming else {"write": dying(after)}))
        try:
            stored_kernels.store_kernel(Store(self.root, system=gone), StoredKernel(key, {}, data))
        except Killed:
            pass
        else:
            raise AssertionError("it lived")

    @rule(key=keys, data=st.binary(max_size=30), fault=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EROFS]))
    def put_on_a_bad_disk(self, key: Key, data: bytes, fault: int) -> None:
        def fail(*_: object) -> int:
            raise OSError(fault, os.strerror(fault))

        assert not stored_kernels.store_kernel(
            Store(self.root, system=replace(SYSTEM, write=fail)), StoredKernel(key, {}, data)
        )

    @rule(key=keys)
    def get(self, key: Key) -> None:
        found = stored_kernels.find_kernel(self.store, key)
        if key not in self.kept:
            assert found is None
        elif self.kept[key] is not None:
            assert found is not None
            assert found.data == self.kept[key]

    @rule(place=st.integers(0, 1 << 16), bit=st.integers(0, 7), which=st.integers(0, 1 << 16))
    def flip(self, place: int, bit: int, which: int) -> None:
        self._damage(which, lambda data: data[: place % len(data)] + bytes([data[place % len(data)] ^ 1 << bit])
                     + data[place % len(data) + 1 :])  # fmt: skip

    @rule(end=st.integers(0, 1 << 16), which=st.integers(0, 1 << 16))
    def truncate(self, end: int, which: int) -> None:
        self._damage(which, lambda data: data[: end % len(data)])

    def _damage(self, which: int, change: Callable[[bytes], bytes]) -> None:
        files = sorted(p for p in self.root.rglob("*.tc") if p.stat().st_size)
        if files:
            path = files[which % len(files)]
            path.write_bytes(change(path.read_bytes()))
            self.unsure |= "tuning" in path.parts
            for key in self.kept:
                if path.stem == key.digest:
                    self.kept[key] = None

    @rule(limit=st.sampled_from([0, 300, 1 << 20]))
    def evict(self, limit: int) -> None:
        swept = eviction.evict(self.store, limit)
        assert swept is None or swept.bytes <= limit
        for key in list(self.kept):
            if stored_kernels.find_kernel(self.store, key) is None:
                del self.kept[key]
        self.unsure |= limit < 1 << 20

    @rule(grain=st.integers(0, 5), key=st.sampled_from(KEYS))
    def measure(self, grain: int, key: Key) -> None:
        measurement_store.record_measurements(
            self.store, KEYS[0], [Measurement(CpuOptions(grain_size=grain), 1.0 + grain, True, time=0)]
        )
        self.measured.add(grain)

    @rule()
    def compact(self) -> None:
        measurement_store.compact_measurements(self.store, KEYS[0])

    @rule()
    def lose_everything(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.kept, self.measured, self.unsure = {}, set(), False

    @invariant()
    def measurements_are_there(self) -> None:
        grains = {
            m.options.grain_size for m in measurement_store.recall_measurements(Store(self.root, "read"), KEYS[0])
        }
        assert grains <= self.measured
        assert self.unsure or grains == self.measured


Cache.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestCache = Cache.TestCase
