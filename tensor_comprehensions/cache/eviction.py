"""Keeping the store within its limit: least recently used entries go first, leftovers of killed writers always.

Any process may evict at any time beside readers and writers: a vanished entry is a miss, and a vanished file is no
fault. A lock, which no process waits for, avoids duplicate work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import safe_io

if TYPE_CHECKING:
    from .store import Store

PERIOD = 3600.0
"""Seconds between two sweeps, and the age at which a temporary file is a leftover."""
ROOM = 0.9
"""The part of the limit that a sweep leaves filled, so that the next write does not sweep again."""
LAST = ("tuning", "injected")
"""Layers that are evicted last, because they cannot be rebuilt quickly."""
_MARK, _LOCK = ".swept", ".lock"


@dataclass(frozen=True, slots=True)
class EvictionReport:
    """The result of an eviction: remaining entries and bytes, removed entries and leftovers."""

    entries: int
    bytes: int
    removed: int
    leftovers: int


def is_eviction_due(store: Store) -> bool:
    """Whether the last eviction is long ago, or this process has written a lot."""
    if store.written > store.limit // 16:
        return True
    try:
        return abs(store.system.clock() - store.system.stat(store.folder() / _MARK).st_mtime) > PERIOD
    except OSError:
        return True


def evict(store: Store, limit: int | None = None) -> EvictionReport | None:
    """Remove leftovers, and entries until the store is within its limit, or within another.

    None if another process is at it.
    """
    store.written = 0
    with _lock(store.system, store.folder() / _LOCK) as mine:
        if not mine:
            return None
        _record_sweep_time(store)
        return _evict_oldest_entries(store, store.limit if limit is None else limit)


def _evict_oldest_entries(store: Store, limit: int) -> EvictionReport:
    now, leftovers = store.system.clock(), 0
    entries: list[tuple[bool, float, int, Path]] = []
    for layer, path, size, changed in _walk(store.system, store.folder()):
        if not path.name.startswith("."):
            # A time in the future is a clock that was wrong: such an entry counts as just used.
            entries.append((layer in LAST, min(changed, now), size, path))
        elif path.name.endswith(safe_io.TEMPORARY) and abs(now - changed) > PERIOD:
            leftovers += safe_io.remove_file(store.system, path)
    total, removed = sum(size for _, _, size, _ in entries), 0
    if total > limit:
        for _, _, size, path in sorted(entries):
            if total <= limit * ROOM:
                break
            if safe_io.remove_file(store.system, path):
                total, removed = total - size, removed + 1
                _remove_empty_folder(store.system, path.parent)
    return EvictionReport(len(entries) - removed, total, removed, leftovers)


def _walk(system: safe_io.OsFunctions, folder: Path, layer: str = "") -> Iterator[tuple[str, Path, int, float]]:
    """Every file below a folder, with its layer, its bytes and the time of its last change."""
    try:
        names = sorted(system.listdir(folder))
    except OSError:
        return
    for name in names:
        path = folder / name
        try:
            found = system.lstat(path)
        except OSError:
            continue
        if safe_io.is_folder(found):
            yield from _walk(system, path, layer or name)
        else:
            yield layer, path, found.st_size, found.st_mtime


def _remove_empty_folder(system: safe_io.OsFunctions, folder: Path) -> None:
    """Remove a folder that has become empty."""
    with suppress(OSError):
        system.rmdir(folder)


def _record_sweep_time(store: Store) -> None:
    """Note the time of the sweep."""
    path, now = store.folder() / _MARK, store.system.clock()
    with suppress(OSError):
        store.system.close(store.system.open(path, os.O_WRONLY | os.O_CREAT | safe_io.SAFE, 0o600))
        store.system.utime(path, (now, now))


@contextmanager
def _lock(system: safe_io.OsFunctions, path: Path) -> Iterator[bool]:
    """Whether this process has the lock; it is free again at the end of the block, or of the process."""
    try:
        import fcntl
    except ImportError:  # not on this system: two processes may then do the same work
        yield True
        return
    try:
        descriptor = system.open(path, os.O_RDWR | os.O_CREAT | safe_io.SAFE, 0o600)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except OSError:
            mine = False
        yield mine
    finally:
        system.close(descriptor)
