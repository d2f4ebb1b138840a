"""The file format of cache entries: a header whose digest shows that the payload is complete and unchanged.

    magic (8 bytes) | version (2) | signed (2) | length of the payload (8) | digest (32) | payload

Numbers are little-endian. The digest is the SHA-256 of everything else; in a signed entry, the HMAC-SHA-256 with the
secret key.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import sha256

MAGIC = b"TCcache\n"
VERSION = 2
"""The version of the format. It names the folder of the entries, so other versions do not interfere."""
MAX_PAYLOAD_BYTES = 1 << 28
"""Most bytes of a payload; larger ones are neither written nor read."""

_START = struct.Struct("<8sHHQ")
_DIGEST = 32
HEADER = _START.size + _DIGEST


class CorruptEntry(Exception):
    """Bytes are not an entry that this process can trust; the message says why."""


def pack_entry(payload: bytes, secret: bytes | None = None) -> bytes:
    """An entry in bytes, signed if `secret` is given. Raises CorruptEntry for payloads above `MAX_PAYLOAD_BYTES`."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise CorruptEntry(f"it has {len(payload)} bytes, and an entry may have {MAX_PAYLOAD_BYTES}")
    start = _START.pack(MAGIC, VERSION, secret is not None, len(payload))
    return start + _compute_payload_digest(start, payload, secret) + payload


def unpack_entry(data: bytes, secret: bytes | None = None) -> bytes:
    """The payload of an entry. Raises CorruptEntry unless `pack_entry` wrote the bytes with the same secret."""
    if len(data) < HEADER:
        raise CorruptEntry(f"it ends after {len(data)} bytes")
    magic, version, signed, length = _START.unpack_from(data)
    if magic != MAGIC:
        raise CorruptEntry("it is not an entry of this cache")
    if version != VERSION:
        raise CorruptEntry(f"it has version {version} of the format, not {VERSION}")
    if length != len(data) - HEADER:
        raise CorruptEntry(f"it has {len(data) - HEADER} bytes instead of {length}")
    if signed != (secret is not None):
        raise CorruptEntry("it is signed, and there is no key to check it with" if signed else "it is not signed")
    payload = data[HEADER:]
    if not hmac.compare_digest(
        _compute_payload_digest(data[: _START.size], payload, secret), data[_START.size : HEADER]
    ):
        raise CorruptEntry("its bytes are not those that were written" if secret is None else "its signature is wrong")
    return payload


def _compute_payload_digest(start: bytes, payload: bytes, secret: bytes | None) -> bytes:
    if secret is not None:
        return hmac.new(secret, start + payload, sha256).digest()
    total = sha256(start)
    total.update(payload)
    return total.digest()
