"""The digest of this package's source: an edited checkout never loads kernels of an earlier version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256

from .store import PACKAGE, Store


class SourceChanged(Exception):
    """The source of the package cannot be read, or has changed since the import, so it cannot be part of a key."""


@lru_cache(maxsize=4)
def package_digest(store: Store) -> str:
    """The SHA-256 (64 hexadecimal digits) of the source of this package at import.

    It is computed once; later processes find it in the store by the sizes and times of the files. Raises SourceChanged.
    """
    known = store.read((PACKAGE, _imported)) if _imported else None
    if known is not None and len(known) == 64:
        return known.decode("ascii", "replace")
    total = sha256()
    try:
        for path in sorted(_source_files(_FOLDER)):
            with open(path, "rb") as file:
                data = file.read()
            total.update(f"{os.path.relpath(path, _FOLDER)}:{len(data)}:".encode() + data)
    except OSError as error:
        raise SourceChanged(f"the package's own text cannot be read: {error}") from error
    check_unchanged()
    store.write((PACKAGE, _imported), total.hexdigest().encode())
    return total.hexdigest()


def check_unchanged() -> None:
    """Check that no file has changed since the import, or loaded modules may be of the old or the new source.

    Raises SourceChanged.
    """
    if not _imported or _stamp() != _imported:
        raise SourceChanged("the package's own text has changed since it was imported")


def _stamp() -> str:
    """A digest of the paths, sizes and times of the files; "" if they cannot be read, for example in an archive."""
    facts = []
    try:
        for path in sorted(_source_files(_FOLDER)):
            found = os.stat(path)
            facts.append((path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino))
    except OSError:
        return ""
    return sha256(repr(facts).encode()).hexdigest()


def _source_files(folder: str) -> Iterator[str]:
    """The paths of the package's `.py` and `.lark` files."""
    with os.scandir(folder) as found:
        for x in found:
            if x.is_dir():
                yield from _source_files(x.path)
            elif x.name.endswith((".py", ".lark")):
                yield x.path


_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_imported = _stamp()
