"""A file that remembers what became of each candidate, so that a search that was killed goes on where it was.

Always holds: a record that was not written whole is as if it had not been written.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from ..errors import ArgumentError
from . import tuner_pb2 as pb

_MAGIC = b"tcjournal1\n"
_HEADER = struct.Struct("<II")
LARGEST = 1 << 20
"""Bytes of a record."""
Record = pb.Start | pb.Outcome | pb.Decision


class Journal:
    """Outcomes by problem and options, in the order in which they were added.

    Args:
        path: the file; None keeps nothing.

    Raises ArgumentError where the file cannot be written, or is something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._known: dict[tuple[str, bytes], pb.Outcome] = {}
        self._decided: dict[str, pb.Decision] = {}
        self._started: dict[str, pb.Start] = {}
        self._file: BinaryIO | None = None
        if path is None:
            return
        try:
            self._file = path.open("a+b")
            end = self._read(self._file, path)
            self._file.truncate(end)
        except OSError as error:
            raise ArgumentError(f"the journal {path} cannot be written: {error}") from error
        except ArgumentError:
            self.close()
            raise

    def _read(self, file: BinaryIO, path: Path) -> int:
        """Take in what there is; the offset at which the last whole record ends."""
        file.seek(0)
        data = file.read()
        if not data or _MAGIC.startswith(data):
            file.truncate(0)
            file.write(_MAGIC)
            file.flush()
            return len(_MAGIC)
        if not data.startswith(_MAGIC):
            raise ArgumentError(f"{path} is no journal of a search", suggestion="name another file, or remove it")
        end = len(_MAGIC)
        for start, problem, record in _records(data):
            self._take(problem, record)
            end = start
        return end

    def _take(self, problem: str, record: Record) -> None:
        if isinstance(record, pb.Outcome):
            self._known[problem, _key(record)] = record
        elif isinstance(record, pb.Start):
            self._started[problem] = record
        else:
            self._decided[problem] = record

    def __len__(self) -> int:
        return len(self._known)

    def find(self, problem: str, options: bytes) -> pb.Outcome | None:
        """What became of options, a serialised message."""
        return self._known.get((problem, options))

    def decision(self, problem: str) -> pb.Decision | None:
        """How the search for a problem ended, the last time that it did."""
        return self._decided.get(problem)

    def start(self, problem: str) -> pb.Start | None:
        """What the search for a problem began with."""
        return self._started.get(problem)

    def add(self, problem: str, record: Record) -> None:
        """Remember a record, on disk before this returns as far as the system is concerned."""
        self._take(problem, record)
        if self._file is not None:
            name = problem.encode()
            kind = next(k for k, message in _KINDS.items() if isinstance(record, message))
            payload = kind + bytes([len(name)]) + name + record.SerializeToString(deterministic=True)
            self._file.write(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _key(outcome: pb.Outcome) -> bytes:
    return outcome.options.SerializeToString(deterministic=True)


def _records(data: bytes) -> Iterator[tuple[int, str, Record]]:
    """(where it ends, problem, record) of every record up to the first that is damaged."""
    at = len(_MAGIC)
    while at + _HEADER.size <= len(data):
        length, check = _HEADER.unpack_from(data, at)
        payload = data[at + _HEADER.size : at + _HEADER.size + length]
        if not 2 <= length <= LARGEST or len(payload) < length or zlib.crc32(payload) != check:
            return
        at += _HEADER.size + length
        text = 2 + payload[1]
        try:
            yield at, payload[2:text].decode(), _KINDS[payload[:1]].FromString(payload[text:])
        except (KeyError, DecodeError, UnicodeDecodeError):
            return


_KINDS: dict[bytes, type[pb.Start] | type[pb.Outcome] | type[pb.Decision]] = {
    b"s": pb.Start,
    b"o": pb.Outcome,
    b"d": pb.Decision,
}
