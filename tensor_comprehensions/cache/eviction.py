"""Eviction: remove the least recently used entries of a store that exceeds its limit, and leftovers of killed writers.

Any process may evict at any time: for concurrent readers a removed entry is a miss. A lock, for which no process waits,
avoids duplicate work.
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

EVICTION_SECONDS = 3600.0
"""Seconds between two evictions, and the age above which a temporary file is a leftover."""
EVICTION_TARGET = 0.9
"""The fraction of the limit down to which an eviction removes entries, so that the next write triggers no other."""
LAST_LAYERS = ("tuning", "injected")
"""Layers that are evicted last, because they cannot be rebuilt quickly."""
_MARK, _LOCK = ".swept", ".lock"


@dataclass(frozen=True, slots=True)
class EvictionReport:
    """The result of an eviction: remaining entries and bytes, removed entries, and removed leftovers."""

    entries: int
    bytes: int
    removed: int
    leftovers: int


def is_eviction_due(store: Store) -> bool:
    """Whether the last eviction is `EVICTION_SECONDS` ago, or this process has written 1/16 of the limit since."""
    if store.written > store.limit // 16:
        return True
    try:
        return abs(store.system.clock() - store.system.stat(store.folder() / _MARK).st_mtime) > EVICTION_SECONDS
    except OSError:
        return True


def evict(store: Store, limit: int | None = None) -> EvictionReport | None:
    """Remove leftovers, and entries if the store exceeds `limit` bytes; None is the store's own limit.

    Returns None if another process is evicting.
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
            # A time in the future comes from a wrong clock: the entry counts as just used.
            entries.append((layer in LAST_LAYERS, min(changed, now), size, path))
        elif path.name.endswith(safe_io.TEMPORARY) and abs(now - changed) > EVICTION_SECONDS:
            leftovers += safe_io.remove_file(store.system, path)
    total, removed = sum(size for _, _, size, _ in entries), 0
    if total > limit:
        for _, _, size, path in sorted(entries):
            if total <= limit * EVICTION_TARGET:
                break
            if safe_io.remove_file(store.system, path):
                total, removed = total - size, removed + 1
                _remove_empty_folder(store.system, path.parent)
    return EvictionReport(len(entries) - removed, total, removed, leftovers)


def _walk(system: safe_io.OsFunctions, folder: Path, layer: str = "") -> Iterator[tuple[str, Path, int, float]]:
    """(layer, path, bytes, modification time) of every file below a folder."""
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
    """Remove a folder if it is empty."""
    with suppress(OSError):
        system.rmdir(folder)


def _record_sweep_time(store: Store) -> None:
    """Record the time of this eviction."""
    path, now = store.folder() / _MARK, store.system.clock()
    with suppress(OSError):
        store.system.close(store.system.open(path, os.O_WRONLY | os.O_CREAT | safe_io.SAFE, 0o600))
        store.system.utime(path, (now, now))


@contextmanager
def _lock(system: safe_io.OsFunctions, path: Path) -> Iterator[bool]:
    """Try to take a lock for the `with` block; yields whether this process has it."""
    try:
        import fcntl
    except ImportError:  # without it, two processes may do the same work
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
