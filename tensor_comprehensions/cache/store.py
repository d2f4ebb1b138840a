"""The store: payloads by name in a private folder, shared by processes without locks.

An entry is written atomically and verified when read. A fault of the disk is a miss or a lost write and never fails a
call, unless `TC_CACHE_STRICT` is set.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from ..core import knobs
from ..core.diagnostics import get_logger
from ..core.errors import CacheError
from . import eviction, file_format, safe_io
from .file_format import CorruptEntry
from .safe_io import SYSTEM, OsFunctions

T = TypeVar("T")
SUFFIX = ".tc"
TUNING, KERNEL, INJECTED, PROGRAM, PACKAGE, RUNTIME = "tuning", "kernel", "injected", "program", "package", "runtime"
"""The layers: measurements, compiled kernels, kernels that users injected, checked programs, digests of this package's
source, and code of the runtime."""
LAYERS = (TUNING, KERNEL, INJECTED, PROGRAM, PACKAGE, RUNTIME)
EXECUTED = (KERNEL, INJECTED, RUNTIME)
"""The layers with executable code, whose entries are signed if a key is configured."""
FOLDER = f"v{file_format.VERSION}"
TRANSIENT_ERRORS = (errno.ESTALE, errno.EBUSY, errno.EINTR, errno.EAGAIN, errno.ENOENT)
"""Errors after which a second try may succeed: network folders, and folders that another process removes."""
PAUSE_SECONDS = 60.0
"""Seconds without writes after a failed write."""
TOUCH_SECONDS = 3600.0
"""Least age in seconds of an entry's modification time for a read to update it."""

Name = tuple[str, ...]
"""The name of an entry: its folders, the first of which is a layer, and its file name without suffix."""


class Store:
    """Entries below a folder.

    Attributes:
        root: the folder; None turns the store off.
        mode: "off", "read" or "readwrite".
        strict: whether faults raise CacheError instead of a warning.
        limit: most bytes of all entries; see `eviction`.
        secret: the key that signs compiled code; None: not signed.
        system: functions of the operating system.
        written: bytes that this process has written since the last eviction.
    """

    def __init__(
        self,
        root: Path | None,
        mode: str = "readwrite",
        *,
        strict: bool = False,
        limit: int = 1 << 31,
        secret: bytes | None = None,
        system: OsFunctions = SYSTEM,
    ) -> None:
        self.root = root
        self.mode = "off" if root is None else mode
        self.strict, self.limit, self.secret, self.system = strict, limit, secret, system
        self.written = 0
        self._told: set[str] = set()
        self._paused_until = float("-inf")

    def path(self, name: Name) -> Path:
        assert self.root is not None
        return Path(self.root, FOLDER, *name[:-1], name[-1] + SUFFIX)

    def folder(self, name: Name = ()) -> Path:
        assert self.root is not None
        return Path(self.root, FOLDER, *name)

    # --- entries -------------------------------------------------------------------------------------------------

    def read(self, name: Name) -> bytes | None:
        """The payload of an entry; None if it does not exist or cannot be trusted."""
        if not self._has_trusted_root():
            return None
        path = self.path(name)
        data = self._retry_once(
            lambda: safe_io.read_file(self.system, path, file_format.MAX_PAYLOAD_BYTES + file_format.HEADER),
            path,
            "read",
        )
        if data is None:
            return None
        try:
            payload = file_format.unpack_entry(data, self._secret(name))
        except CorruptEntry as reason:
            self.report_fault(f"the entry {path} is passed over: {reason}", key=str(path))
            return None
        self._touch(path)
        return payload

    def write(self, name: Name, payload: bytes) -> bool:
        """Store a payload; returns False if that failed."""
        if self.mode != "readwrite" or self.system.clock() < self._paused_until or not self._has_trusted_root():
            return False
        path = self.path(name)
        try:
            data = file_format.pack_entry(payload, self._secret(name))
        except CorruptEntry as reason:
            self.report_fault(f"an entry is not kept: {reason}")
            return False

        def write_entry() -> bool:
            try:
                safe_io.write_file(self.system, path, data)
            except FileNotFoundError:
                safe_io.make_folders(self.system, path.parent)
                safe_io.write_file(self.system, path, data)
            return True

        if not self._retry_once(write_entry, path, "written"):
            self._paused_until = self.system.clock() + PAUSE_SECONDS
            return False
        self.written += len(data)
        if eviction.is_eviction_due(self):
            swept = eviction.evict(self)
            if swept is not None and swept.removed:
                get_logger("cache").debug("removed %d entries, %d bytes are left", swept.removed, swept.bytes)
        return True

    def names(self, folder: Name) -> tuple[str, ...]:
        """The sorted names in a folder, without suffixes; empty if the folder does not exist."""
        if not self._has_trusted_root():
            return ()
        path = self.folder(folder)
        found = self._retry_once(lambda: self.system.listdir(path), path, "listed")
        return tuple(sorted(name.removesuffix(SUFFIX) for name in found or () if not name.startswith(".")))

    def walk(self, folder: Name = ()) -> Iterator[Name]:
        """The names of all entries, in order."""
        if self.mode == "off":
            return
        for name in self.names(folder):
            if self.folder((*folder, name)).is_dir():
                yield from self.walk((*folder, name))
            else:
                yield (*folder, name)

    def remove(self, name: Name) -> bool:
        """Remove an entry; returns False if it does not exist or cannot be removed."""
        return (
            self.mode == "readwrite" and self._has_trusted_root() and safe_io.remove_file(self.system, self.path(name))
        )

    # --- faults --------------------------------------------------------------------------------------------------

    def report_fault(self, message: str, key: str = "") -> None:
        """Warn about a fault, once per `key` (default: per message); in a strict store, raise CacheError."""
        if self.strict:
            raise CacheError(message, suggestion="unset TC_CACHE_STRICT to go on without the cache")
        if (key or message) not in self._told:
            self._told.add(key or message)
            get_logger("cache").warning("%s", message)

    def _has_trusted_root(self) -> bool:
        """Whether the folder exists and only this user can write it. In mode "readwrite", it is made if necessary."""
        if self.mode == "off":
            return False
        reason = self.refusal()
        if reason:
            self.report_fault(f"the cache {self.root} is not used: {reason}", key="folder")
        return reason == ""

    def refusal(self) -> str | None:
        """Why the folder is not used; "" if it is used; None if it does not exist and the mode is "read"."""
        assert self.root is not None
        try:
            if self.mode == "read":
                self.system.stat(self.root)
            return safe_io.make_private_folder(self.system, self.root)
        except FileNotFoundError:
            return None if self.mode == "read" else "it cannot be made"
        except OSError as error:
            return str(error)

    def _retry_once(self, action: Callable[[], T], path: Path, what: str) -> T | None:
        """The result of `action`, tried again after one of `TRANSIENT_ERRORS`; None if it fails."""
        for last in (False, True):
            try:
                return action()
            except OSError as error:
                if error.errno == errno.ENOENT and what != "written":
                    return None
                if last or error.errno not in TRANSIENT_ERRORS:
                    self.report_fault(f"{path} is not {what}: {error}", key=f"{what} {error.errno}")
                    return None
        return None

    def _touch(self, path: Path) -> None:
        """Update the modification time of an entry, at most once in `TOUCH_SECONDS`, for the eviction."""
        if self.mode != "readwrite":
            return
        now = self.system.clock()
        try:
            if abs(now - self.system.stat(path).st_mtime) > TOUCH_SECONDS:
                self.system.utime(path, (now, now))
        except OSError:
            pass

    def _secret(self, name: Name) -> bytes | None:
        """The key that signs an entry; None for data such as measurements, which is checked instead."""
        return self.secret if name[0] in EXECUTED else None


# --- the store of this process -----------------------------------------------------------------------------------


def current_store() -> Store:
    """The store that the knobs configure."""
    k = knobs.current_knobs()
    return _store(k.cache, k.cache_dir, k.cache_strict, k.cache_max_size, k.cache_signing_key)


@lru_cache(maxsize=8)
def _store(mode: str, folder: str, strict: bool, limit: int, key_file: str) -> Store:
    if mode == "off":
        return Store(None, "off")
    return Store(_find_cache_root(folder), mode, strict=strict, limit=limit, secret=_read_secret_key(key_file))


def _find_cache_root(folder: str) -> Path | None:
    if folder:
        return _expand_user(folder)
    import platformdirs

    try:
        return platformdirs.user_cache_path("tensor-comprehensions", appauthor=False)
    except (OSError, RuntimeError):  # no home folder
        return None


def _expand_user(path: str) -> Path:
    """Expand `~` in a path; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))


def _read_secret_key(key_file: str) -> bytes | None:
    """The secret key: the content of a file that only this user can read. Raises CacheError."""
    if not key_file:
        return None
    path = _expand_user(key_file)
    try:
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise CacheError(f"others may read the key {path}", suggestion=f"chmod 600 {path}")
        secret = safe_io.read_bounded(path, file_format.MAX_PAYLOAD_BYTES).strip()
    except OSError as error:
        raise CacheError(f"the file that TC_CACHE_SIGNING_KEY names cannot be read: {error}") from error
    if len(secret) < 32:
        raise CacheError(f"the key in {path} has {len(secret)} bytes", expected="32 or more")
    return secret
