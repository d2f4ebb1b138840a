"""Messages between a tuner and its worker processes: a kind, a length and bytes over a stream socket.

Invariant: malformed messages of a broken peer are refused before memory is allocated for them.
"""

from __future__ import annotations

import select
import socket
import struct
import time

REQUEST, PHASE, REPLY = b"Q", b"P", b"R"
MAX_PAYLOAD_BYTES = 1 << 28
"""The maximum size of a payload in bytes."""
CLOCK_CHECK_SECONDS = 0.1
"""Seconds between checks of the clock."""
_HEADER = struct.Struct("<cQ")


class ProtocolError(Exception):
    """The peer sent a malformed message."""


class Disconnected(Exception):
    """The peer is gone."""


class Timeout(Exception):
    """The peer took longer than allowed."""


def send_frame(connection: socket.socket, kind: bytes, payload: bytes = b"") -> None:
    """Send one message. Raises Disconnected."""
    try:
        connection.sendall(_HEADER.pack(kind, len(payload)) + payload)
    except OSError as error:
        raise Disconnected(str(error)) from error


def receive_frame(connection: socket.socket, seconds: float | None = None) -> tuple[bytes, bytes]:
    """The kind and the payload of the next message.

    seconds: how long to wait, None for ever. Time in which this process itself was stopped does not count.

    Raises Disconnected, ProtocolError or Timeout.
    """
    patience = WaitBudget(seconds)
    kind, length = _HEADER.unpack(_receive_exactly(connection, _HEADER.size, patience))
    if kind not in (REQUEST, PHASE, REPLY) or length > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a message of kind {kind!r} and {length} bytes")
    return kind, _receive_exactly(connection, length, patience)


class WaitBudget:
    """The time left of `seconds` of waiting; a check subtracts at most two ticks, as this process may be stopped."""

    def __init__(self, seconds: float | None) -> None:
        self.left = seconds
        self._seen = time.monotonic()

    def is_exhausted(self) -> bool:
        """Subtract the time since the last check; return whether none is left."""
        now = time.monotonic()
        if self.left is not None:
            self.left -= min(now - self._seen, 2 * CLOCK_CHECK_SECONDS)
        self._seen = now
        return self.left is not None and self.left <= 0


def _receive_exactly(connection: socket.socket, count: int, patience: WaitBudget) -> bytes:
    parts: list[bytes] = []
    while count:
        readable, _, _ = select.select([connection], [], [], CLOCK_CHECK_SECONDS)
        if not readable:
            if patience.is_exhausted():
                raise Timeout
            continue
        try:
            part = connection.recv(min(count, 1 << 20))
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not part:
            raise Disconnected("end of stream")
        parts.append(part)
        count -= len(part)
        if count and patience.is_exhausted():
            raise Timeout
    return b"".join(parts)
