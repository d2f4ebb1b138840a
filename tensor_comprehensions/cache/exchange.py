"""Measurements and signed code between stores, machines and people."""

from __future__ import annotations

from pathlib import Path

from ..errors import CacheError
from . import code, entry, tuning
from .entry import Damaged
from .files import SYSTEM, System, read_bounded, write
from .key import Key
from .store import Store
from .tuning import Measurement

SUFFIX = ".tct"
"""Of a file with measurements: a `.tc` file has defs."""
Found = dict[Key, tuple[Measurement, ...]]


def write_measurements(store: Store, path: Path) -> int:
    """Write all measurements of a store to a file; the number of keys. Raises CacheError, also for a `.tc` file.

    The same measurements give the same bytes, so that the file can be kept under version control.
    """
    if path.suffix == ".tc":
        raise CacheError(
            f"{path} would be taken for a file with defs", suggestion=f"write to {path.with_suffix(SUFFIX)}"
        )
    found = tuning.everything(store)
    try:
        write(SYSTEM, path, entry.pack(tuning.collection(found)))
    except (OSError, Damaged) as error:
        raise CacheError(f"cannot write {path}: {error}") from error
    return len(found)


def read_measurements(path: Path) -> Found:
    """The measurements in a file that `write_measurements` made, or in the folder of another store. Raises CacheError.

    Whoever owns it: measurements are data, and are checked as a user's input is.
    """
    if path.is_dir():
        return tuning.everything(Store(path, "read", system=ANYBODY))
    try:
        return tuning.from_collection(entry.unpack(read_bounded(path, entry.LARGEST + entry.HEADER)))
    except (OSError, Damaged) as error:
        raise CacheError(f"cannot read {path}: {error}") from error


def add_measurements(store: Store, found: Found) -> int:
    """Add measurements to a store; the number of those that it did not have. In any order, any number of times."""
    fresh = 0
    for key, measurements in found.items():
        known = tuning.recall(store, key)
        new = [m for m in tuning.merge((*known, *measurements)) if m not in known]
        tuning.record(store, key, new)
        fresh += len(new)
    return fresh


def copy_code(store: Store, other: Store) -> int:
    """Copy the code of a store to another one with the same secret key; the number of entries. Raises CacheError."""
    if store.secret is None or store.secret != other.secret:
        raise CacheError(
            "compiled code stays on its machine: whoever can change it can run code as you",
            suggestion="set TC_CACHE_KEY to a file with a secret on both sides, and code is signed and checked",
        )
    copied = 0
    for name in code.names(store):
        found = code.read(store, name)
        copied += found is not None and code.keep(other, found, name[0])
    return copied


ANYBODY = System(user=lambda: -1)
"""A system in which it does not matter who owns a file."""
