"""A file that records the outcome of each candidate, so that a killed search can resume.

Invariant: a partly written record counts as absent; one process at a time writes; a full disk ends the journal, not
the search.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from google.protobuf.message import DecodeError

from ..cache.options_proto import from_message
from ..cache.tc_cache_pb2 import Options
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from . import tuner_pb2 as pb

_MAGIC = b"tcjournal1\n"
_HEADER = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 20
"""The maximum size of a record in bytes."""
MAX_JOURNAL_BYTES = 1 << 28
"""The maximum size of a journal that is read, in bytes."""
Record = pb.Start | pb.Outcome | pb.Decision


class Journal:
    """Outcomes by problem and options, in the order in which they were added.

    Args:
        path: the file; None keeps nothing.

    Raises ArgumentError if the file cannot be written, is not a journal, or is in use by another search.
    """

    def __init__(self, path: Path | None) -> None:
        self._known: dict[tuple[str, bytes], pb.Outcome] = {}
        self._decided: dict[str, pb.Decision] = {}
        self._started: dict[str, pb.Start] = {}
        self._file: FileIO | None = None
        self._end = 0
        self._path = path
        if path is None:
            return
        try:
            self._file = open(path, "a+b", buffering=0, opener=_open_plain)  # noqa: SIM115
            if not _lock(self._file):
                raise ArgumentError(
                    f"another search writes the journal {path}", suggestion="give each its own: --journal FILE"
                )
            self._end = self._read(self._file, path)
            self._file.truncate(self._end)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            self._discard()
            raise ArgumentError(f"the journal {path} cannot be written: {error}") from error
        except ArgumentError:
            self._discard()
            raise

    def _read(self, file: FileIO, path: Path) -> int:
        """Read the existing records; returns the offset at which the last whole record ends."""
        if os.fstat(file.fileno()).st_size > MAX_JOURNAL_BYTES:
            raise ArgumentError(f"the journal {path} has more than {MAX_JOURNAL_BYTES} bytes", suggestion="remove it")
        file.seek(0)
        data = file.read()
        if not data or _MAGIC.startswith(data):
            file.truncate(0)
            _write_whole(file, _MAGIC)
            return len(_MAGIC)
        _check_magic(data, path)
        end = len(_MAGIC)
        for start, problem, record in _parse_records(data):
            self._index_record(problem, record)
            end = start
        return end

    def _index_record(self, problem: str, record: Record) -> None:
        if isinstance(record, pb.Outcome):
            self._known[problem, _serialize_options(record)] = record
        elif isinstance(record, pb.Start):
            self._started[problem] = record
        else:
            self._decided[problem] = record

    def __len__(self) -> int:
        return len(self._known)

    def find(self, problem: str, options: bytes) -> pb.Outcome | None:
        """The outcome of these options (a serialized message), or None."""
        return self._known.get((problem, options))

    def decision(self, problem: str) -> pb.Decision | None:
        """The result of the last search for a problem that ended, or None."""
        return self._decided.get(problem)

    def start(self, problem: str) -> pb.Start | None:
        """The starting points of the search for a problem, or None."""
        return self._started.get(problem)

    def add(self, problem: str, record: Record) -> None:
        """Add a record, which is written to the file, but not synced, before this returns."""
        self._index_record(problem, record)
        if self._file is not None:
            name = problem.encode()
            kind = next(k for k, message in _KINDS.items() if isinstance(record, message))
            payload = kind + bytes([len(name)]) + name + record.SerializeToString(deterministic=True)
            data = _HEADER.pack(len(payload), zlib.crc32(payload)) + payload
            try:
                _write_whole(self._file, data)
            except OSError as error:
                self._give_up(error)
            else:
                self._end += len(data)

    def _give_up(self, error: OSError) -> None:
        """Go on without the file: cut off a partly written record, and add no more."""
        get_logger("tune").warning(
            "the journal %s cannot be written: %s; the search goes on without recording its results",
            self._path, error,
        )  # fmt: skip
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
        self._discard()

    def _discard(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def close(self) -> None:
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._give_up(error)
            self._discard()


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """The problem and the message of each whole record of a journal, which another search may be writing.

    Raises ArgumentError if it cannot be read, or is no journal.
    """
    try:
        with open(path, "rb", opener=_open_for_reading) as file:
            data = file.read(MAX_JOURNAL_BYTES)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the journal {path} cannot be read: {error}") from error
    _check_magic(data, path)
    for _, problem, record in _parse_records(data):
        yield problem, record


def _check_magic(data: bytes, path: Path) -> None:
    if not data.startswith(_MAGIC):
        raise ArgumentError(f"{path} is not a journal of a search", suggestion="name another file, or remove it")


def _open_for_reading(name: str, flags: int) -> int:
    return _open_plain(name, flags & ~os.O_CREAT)


def _open_plain(name: str, flags: int) -> int:
    """Open a regular file, never a pipe or device, which could block or never end. Raises OSError."""
    descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor


def _lock(file: FileIO) -> bool:
    """Lock a file against other processes while it is open; False if another process has the lock."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _write_whole(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


def _serialize_options(outcome: pb.Outcome) -> bytes:
    return outcome.options.SerializeToString(deterministic=True)


def _parse_records(data: bytes) -> Iterator[tuple[int, str, Record]]:
    """Yield (end offset, problem, record) for each valid record before the first that is damaged."""
    at = len(_MAGIC)
    while at + _HEADER.size <= len(data):
        length, check = _HEADER.unpack_from(data, at)
        payload = data[at + _HEADER.size : at + _HEADER.size + length]
        if not 2 <= length <= MAX_RECORD_BYTES or len(payload) < length or zlib.crc32(payload) != check:
            return
        at += _HEADER.size + length
        text = 2 + payload[1]
        try:
            record = _KINDS[payload[:1]].FromString(payload[text:])
            problem = payload[2:text].decode()
        except (KeyError, DecodeError, UnicodeDecodeError):
            return
        if _is_valid_record(record):
            yield at, problem, record


def _is_valid_record(record: Record) -> bool:
    """Whether a search can have written `record`: known values, and times that are possible."""
    if isinstance(record, pb.Outcome):
        if record.status not in pb.Status.values() or not 0 <= record.elapsed < math.inf:
            return False
        return record.status != pb.OK or _is_valid_timing(record.timing)
    if isinstance(record, pb.Decision):
        fit = len(record.timings) == len(record.finalists) and 0 <= record.elapsed < math.inf
        return fit and all(_is_valid_timing(t) for t in record.timings)
    return all(map(_is_readable, record.known))


def _is_valid_timing(timing: pb.Timing) -> bool:
    """Whether the quartiles are positive and finite, or there was no run."""
    return not timing.runs or all(0 < t < math.inf for t in (timing.low, timing.median, timing.high))


def _is_readable(options: Options) -> bool:
    try:
        from_message(options)
    except (ArgumentError, TypeError, ValueError):
        return False
    return True


_KINDS: dict[bytes, type[pb.Start] | type[pb.Outcome] | type[pb.Decision]] = {
    b"s": pb.Start,
    b"o": pb.Outcome,
    b"d": pb.Decision,
}
