"""Export measurements and signed code of a store, and import them into another."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import CacheError
from . import file_format, measurement_store, stored_kernels
from .file_format import CorruptEntry
from .key import Key
from .measurement_store import Measurement
from .safe_io import SYSTEM, OsFunctions, read_bounded, write_file
from .store import Store

SUFFIX = ".tct"
"""The suffix of a file with measurements; `.tc` files have defs."""
Found = dict[Key, tuple[Measurement, ...]]


def write_measurements(store: Store, path: Path) -> int:
    """Write all measurements of a store to a file. Returns the number of keys.

    The same measurements give the same bytes, so that the file can be kept under version control. Raises CacheError if
    the path ends in `.tc` or cannot be written.
    """
    if path.suffix == ".tc":
        raise CacheError(
            f"{path} would be taken for a file with defs", suggestion=f"write to {path.with_suffix(SUFFIX)}"
        )
    found = measurement_store.all_measurements(store)
    try:
        write_file(SYSTEM, path, file_format.pack_entry(measurement_store.collection_to_bytes(found)))
    except (OSError, CorruptEntry) as error:
        raise CacheError(f"cannot write {path}: {error}") from error
    return len(found)


def read_measurements(path: Path) -> Found:
    """The measurements in a file of `write_measurements`, or in the folder of another store. Raises CacheError.

    The file may belong to any user: measurements are data, and are checked like user input.
    """
    if path.is_dir():
        return measurement_store.all_measurements(Store(path, "read", system=ANYBODY))
    try:
        return measurement_store.collection_from_bytes(
            file_format.unpack_entry(read_bounded(path, file_format.MAX_PAYLOAD_BYTES + file_format.HEADER))
        )
    except (OSError, CorruptEntry) as error:
        raise CacheError(f"cannot read {path}: {error}") from error


def add_measurements(store: Store, found: Found) -> int:
    """Add measurements to a store; returns the number of new ones. Order and repetition do not matter."""
    fresh = 0
    for key, measurements in found.items():
        known = measurement_store.recall_measurements(store, key)
        new = [m for m in measurement_store.merge_measurements((*known, *measurements)) if m not in known]
        measurement_store.record_measurements(store, key, new)
        fresh += len(new)
    return fresh


def copy_code(store: Store, other: Store) -> int:
    """Copy the code of a store to another one. Returns the number of entries.

    Raises CacheError unless both stores have the same secret key.
    """
    if store.secret is None or store.secret != other.secret:
        raise CacheError(
            "compiled code stays on its machine: anyone who can change it can run code as you",
            suggestion="set TC_CACHE_SIGNING_KEY to a file with a secret on both sides, and code is signed and checked",
        )
    copied = 0
    for name in stored_kernels.kernel_entry_names(store):
        found = stored_kernels.read_kernel(store, name)
        copied += found is not None and stored_kernels.store_kernel(other, found, name[0])
    return copied


ANYBODY = OsFunctions(user=lambda: -1)
"""OS functions that turn off the check of a file's owner and mode."""
