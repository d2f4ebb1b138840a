"""Compiled code in the cache, which stays with the user and the machine that made it.

A payload is the length of a JSON text (4 bytes), that text (the key and metadata of the code), and the code. Anyone who
can write an entry can run code as this user: hence the private folder, the digest, and the optional signature.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .key import Key
from .store import INJECTED, KERNEL, Name, Store

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """Machine code and the metadata to run it, which are JSON values."""

    key: Key
    metadata: Mapping[str, Any]
    data: bytes


def kernel_entry_name(key: Key, layer: str = KERNEL) -> Name:
    """The name of the entry with the code of a key."""
    return layer, key.family, key.digest


def store_kernel(store: Store, code: StoredKernel, layer: str = KERNEL) -> bool:
    """Store code; returns False if that failed."""
    head = json.dumps({"key": code.key.parts, "facts": code.metadata}).encode()
    return store.write(kernel_entry_name(code.key, layer), _LENGTH.pack(len(head)) + head + code.data)


def find_kernel(store: Store, key: Key) -> StoredKernel | None:
    """The code of a key, injected code before compiled code; None if no trusted entry exists."""
    for layer in (INJECTED, KERNEL):
        code = read_kernel(store, kernel_entry_name(key, layer))
        if code is not None and code.key == key:
            return code
    return None


def read_kernel(store: Store, name: Name) -> StoredKernel | None:
    """The code in an entry; None, with a warning, if its key does not match its name."""
    payload = store.read(name)
    code = None if payload is None else kernel_from_bytes(payload)
    if payload is None or (code is not None and code.key.digest == name[-1]):
        return code
    store.report_fault(f"the entry {store.path(name)} is passed over: it is that of another key")
    return None


def kernel_entry_names(store: Store) -> Iterator[Name]:
    """The names of all entries with code, injected code first."""
    for layer in (INJECTED, KERNEL):
        for family in store.names((layer,)):
            for digest in store.names((layer, family)):
                yield layer, family, digest


def kernel_from_bytes(payload: bytes) -> StoredKernel | None:
    """The code in a payload; None if it is malformed."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        start = _LENGTH.size + length
        if start > len(payload):
            return None
        head = json.loads(payload[_LENGTH.size : start])
        parts = tuple((str(name), str(text)) for name, text in head["key"])
        facts = dict(head["facts"])
    except (struct.error, ValueError, TypeError, KeyError, RecursionError):
        return None
    return StoredKernel(Key(parts), facts, payload[start:])


def nearest_kernel_key(store: Store, key: Key) -> Key | None:
    """The stored key of the same family that differs from `key` in the fewest parts; None without any."""
    found = (read_kernel(store, (KERNEL, key.family, name)) for name in store.names((KERNEL, key.family)))
    keys = [code.key for code in found if code is not None]
    return min(keys, key=lambda other: (len(key.difference(other)), other.digest), default=None)
