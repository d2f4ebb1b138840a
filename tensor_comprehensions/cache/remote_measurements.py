"""Measurements in remote storage, by URL: one immutable file per shard, which `tensorc cache merge` adds to a cache.

A remote store that is slow, full or unreachable costs a bounded delay, and never loses results.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from ..core.errors import CacheError
from .import_export import SUFFIX, Found, read_measurements, write_measurements
from .store import Store

T = TypeVar("T")
TIMEOUT_SECONDS = 60.0
"""Seconds to wait for a remote store."""


def is_url(place: str) -> bool:
    """Whether `place` is a URL rather than a path."""
    return "://" in place


def upload_measurements(store: Store, url: str) -> str:
    """Write the measurements of a store to a new file below a URL. Returns the URL of the file.

    If that fails, it warns, writes a file in the current folder, and returns the name of that file.
    """
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:12]}{SUFFIX}"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, name)
        write_measurements(store, made)
        data = made.read_bytes()

    def upload_file() -> str:
        fs, path = _open_filesystem(url)
        fs.makedirs(path, exist_ok=True)
        fs.pipe_file(f"{path}/{name}", data)
        return f"{url.rstrip('/')}/{name}"

    try:
        return with_timeout(upload_file, url)
    except CacheError as error:
        kept = Path(name)
        kept.write_bytes(data)
        store.report_fault(f"{error}; the results are in {kept.resolve()}")
        return str(kept)


def download_measurements(url: str) -> Found:
    """All measurements below a URL; corrupt files are skipped. Raises CacheError if the URL cannot be read."""

    def get() -> list[bytes]:
        fs, path = _open_filesystem(url)
        names = [path] if path.endswith(SUFFIX) else sorted(fs.glob(f"{path}/*{SUFFIX}"))
        return [fs.cat_file(name) for name in names]

    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(with_timeout(get, url)):
            path = Path(folder, str(number))
            path.write_bytes(data)
            try:
                part = read_measurements(path)
            except CacheError:
                continue
            for key, measurements in part.items():
                found[key] = (*found.get(key, ()), *measurements)
    return found


def _open_filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    fs, path = fsspec.core.url_to_fs(url)
    return fs, path.rstrip("/")


def with_timeout(action: Callable[[], T], url: str, patience: float = TIMEOUT_SECONDS) -> T:
    """The result of `action`, run in a thread.

    patience: seconds. Raises CacheError if the action fails or takes longer; the thread then goes on by itself.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:  # drivers of file systems raise any exception
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    if results:
        return results[0]
    reason = f"{type(errors[0]).__name__}: {errors[0]}" if errors else f"no answer in {patience:.0f} s"
    raise CacheError(f"the store {url} cannot be used: {reason}")
