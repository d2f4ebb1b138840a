"""Measurements of options, which may be merged, committed and sent to others.

Merging is commutative, associative and idempotent, so neither order nor repetition matters. Data is checked like user
input when it is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from google.protobuf.message import DecodeError

from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from .key import Key, names_digest, refers_to_names, toolchain_versions
from .options_proto import from_message, to_message
from .store import TUNING, Name, Store
from .tc_cache_pb2 import Collection, Part, Provenance, Tuning
from .tc_cache_pb2 import Key as KeyMessage
from .tc_cache_pb2 import Measurement as Message

MAX_MEASUREMENTS = 128
"""Most measurements that a key keeps, the fastest ones."""
MIN_SECONDS, MAX_SECONDS = 1e-8, 1e5
"""The range of plausible seconds of a call; other records are rejected."""
MAX_TIMESTAMP = 1 << 37
"""Seconds since 1970 below which `datetime` can show a date."""
MAX_LISTINGS = 5
"""How often the files of a key are listed if other processes replace them meanwhile."""
MAX_FILES = 16
"""If a key has more files than this, they are merged into one."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured time of a call with some options.

    Attributes:
        options: the options, with resolved schedules.
        seconds: median time of a call.
        validated: whether the results were compared with the reference evaluator's.
        samples: number of timed calls.
        spread: interquartile range, relative to the median.
        names_digest: digest of the names that the options refer to, "" if they refer to none; see `key.names_digest`.
        versions: (package, version) of this package and its compilers.
        tuner: what took the measurement, e.g. "search".
        time: when, in seconds since 1970.

    Raises ArgumentError for implausible values.
    """

    options: Any
    seconds: float
    validated: bool
    samples: int = 1
    spread: float = 0.0
    names_digest: str = ""
    versions: tuple[tuple[str, str], ...] = field(default_factory=toolchain_versions)
    tuner: str = ""
    time: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and MIN_SECONDS <= self.seconds <= MAX_SECONDS):
            raise ArgumentError(f"a time of {self.seconds} seconds", expected=f"{MIN_SECONDS} to {MAX_SECONDS}")
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise ArgumentError(f"a spread of {self.spread}", expected="0 or more")
        if not 0 < self.samples < 1 << 32:
            raise ArgumentError(f"a number of samples of {self.samples}", expected="1 or more")
        if not 0 <= self.time < MAX_TIMESTAMP:
            raise ArgumentError(f"a time of {self.time} seconds since 1970", expected=f"0 to {MAX_TIMESTAMP}")

    @property
    def is_current(self) -> bool:
        """Whether it was measured with the installed versions."""
        return self.versions == toolchain_versions()


# --- the measurements of a key -----------------------------------------------------------------------------------


def record_measurements(store: Store, key: Key, measurements: Iterable[Measurement]) -> None:
    """Add measurements to a key. Concurrent writes of other processes are not lost."""
    fresh = merge_measurements(measurements)
    if not fresh:
        return
    if _write_measurements(store, key, fresh) is not None:
        get_logger("cache").debug("kept %d measurements of %s", len(fresh), key.digest[:12])
    if len(store.names(_get_key_folder(key))) > MAX_FILES:
        compact_measurements(store, key)


def recall_measurements(store: Store, key: Key) -> tuple[Measurement, ...]:
    """All measurements of a key, the fastest validated one first."""
    return merge_measurements(
        m for _, found in _read_measurement_files(store, _get_key_folder(key)) if found[0] == key for m in found[1]
    )


def best_measurement(store: Store, key: Key, names: str = "") -> Measurement | None:
    """The fastest validated measurement of a key with the installed versions, else with others; None without any.

    Args:
        names: `key.names_digest` of the def; options that refer to other names are skipped.
    """
    usable = [m for m in recall_measurements(store, key) if m.validated and m.names_digest in ("", names)]
    return next((m for m in usable if m.is_current), usable[0] if usable else None)


def family_measurements(store: Store, key: Key) -> dict[Key, tuple[Measurement, ...]]:
    """The measurements of other keys that differ from `key` only in sizes, strides and scalar values."""
    found: dict[Key, tuple[Measurement, ...]] = {}
    for digest in store.names((TUNING, key.family)):
        for _, (other, measurements) in _read_measurement_files(store, (TUNING, key.family, digest)):
            if other != key:
                found[other] = merge_measurements((*found.get(other, ()), *measurements))
    return found


def all_measurements(store: Store) -> dict[Key, tuple[Measurement, ...]]:
    """All measurements of a store."""
    found: dict[Key, tuple[Measurement, ...]] = {}
    for name in store.names((TUNING,)):
        for digest in store.names((TUNING, name)):
            for _, (key, measurements) in _read_measurement_files(store, (TUNING, name, digest)):
                found[key] = merge_measurements((*found.get(key, ()), *measurements))
    return found


def compact_measurements(store: Store, key: Key) -> None:
    """Replace the files of a key by one file with the same measurements.

    Other processes may write or compact concurrently: a file is removed only after one with its content was written.
    """
    read = [(name, found[1]) for name, found in _read_measurement_files(store, _get_key_folder(key)) if found[0] == key]
    if len(read) < 2:
        return
    kept = _write_measurements(store, key, merge_measurements(m for _, found in read for m in found))
    if kept is not None:
        for name, _ in read:
            if name != kept:
                store.remove((*_get_key_folder(key), name))


def measurement_of(bound: Any, options: Any, seconds: float, **facts: Any) -> Measurement:
    """A measurement of `options` on a bound def, with the digest of the names that the options refer to."""
    names = names_digest(bound) if refers_to_names(options) else ""
    return Measurement(options, seconds, names_digest=names, **facts)


# --- merging -----------------------------------------------------------------------------------------------------


def merge_measurements(measurements: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """The best measurement of each variant, validated ones first, then by time; at most `MAX_MEASUREMENTS` of them.

    Measurements are of the same variant if their options, name digests and versions are equal.
    """
    best_of: dict[bytes, tuple[tuple[bool, float, bytes], Measurement]] = {}
    for m in measurements:
        message = _make_measurement_message(m)
        data = message.SerializeToString(deterministic=True)
        way = Message(options=message.options, spelling=m.names_digest, provenance=_make_provenance(m))
        name, rank = way.SerializeToString(deterministic=True), (not m.validated, m.seconds, data)
        if name not in best_of or rank < best_of[name][0]:
            best_of[name] = rank, m
    ranked = sorted(best_of.values(), key=lambda pair: pair[0])
    return tuple(m for _, m in ranked[:MAX_MEASUREMENTS])


# --- messages ----------------------------------------------------------------------------------------------------


def measurements_to_bytes(key: Key, measurements: Iterable[Measurement]) -> bytes:
    """A `Tuning` message; the same measurements in any order give the same bytes."""
    tuning = _tuning_message(key, measurements)
    return tuning.SerializeToString(deterministic=True)


def measurements_from_bytes(data: bytes) -> tuple[Key, tuple[Measurement, ...]] | None:
    """The key and the valid measurements in a `Tuning` message; None if the bytes are no message."""
    try:
        return _parse_tuning(Tuning.FromString(data))
    except (DecodeError, RecursionError):
        return None


def collection_to_bytes(found: dict[Key, tuple[Measurement, ...]]) -> bytes:
    """Measurements of many keys as a `Collection` message."""
    tunings = [_tuning_message(key, found[key]) for key in sorted(found, key=lambda k: k.digest)]
    return Collection(tunings=tunings).SerializeToString(deterministic=True)


def collection_from_bytes(data: bytes) -> dict[Key, tuple[Measurement, ...]]:
    """The measurements in a `Collection` message. Raises ArgumentError if the bytes are not one."""
    try:
        message = Collection.FromString(data)
    except (DecodeError, RecursionError) as error:
        raise ArgumentError(f"this is not a collection of measurements: {error}") from error
    found: dict[Key, tuple[Measurement, ...]] = {}
    for tuning in message.tunings:
        key, measurements = _parse_tuning(tuning)
        found[key] = merge_measurements((*found.get(key, ()), *measurements))
    return found


def _tuning_message(key: Key, measurements: Iterable[Measurement]) -> Tuning:
    parts = [Part(name=name, text=text) for name, text in key.parts]
    return Tuning(
        key=KeyMessage(parts=parts), measurements=map(_make_measurement_message, merge_measurements(measurements))
    )


def _parse_tuning(tuning: Tuning) -> tuple[Key, tuple[Measurement, ...]]:
    key = Key(tuple((part.name, part.text) for part in tuning.key.parts))
    return key, merge_measurements(m for m in map(_parse_measurement, tuning.measurements) if m is not None)


def _make_measurement_message(m: Measurement) -> Message:
    provenance = _make_provenance(m)
    provenance.tuner, provenance.time = m.tuner, m.time
    return Message(
        options=to_message(m.options), seconds=m.seconds, validated=m.validated, samples=m.samples, spread=m.spread,
        spelling=m.names_digest, provenance=provenance,
    )  # fmt: skip


def _make_provenance(m: Measurement) -> Provenance:
    return Provenance(versions=[Part(name=name, text=text) for name, text in m.versions])


def _parse_measurement(message: Message) -> Measurement | None:
    """The measurement in a message; None, with a line in the log, if it is malformed or implausible."""
    made = message.provenance
    try:
        return Measurement(
            from_message(message.options), message.seconds, message.validated, message.samples, message.spread,
            message.spelling, tuple((part.name, part.text) for part in made.versions), made.tuner, made.time,
        )  # fmt: skip
    except (ArgumentError, TypeError, ValueError) as error:
        get_logger("cache").debug("a measurement is passed over: %s", error)
        return None


def _get_key_folder(key: Key) -> Name:
    return TUNING, key.family, key.digest


def _write_measurements(store: Store, key: Key, measurements: Iterable[Measurement]) -> str | None:
    """Write measurements to a file that is named after its content. Returns the name; None if writing failed."""
    payload = measurements_to_bytes(key, measurements)
    name = sha256(payload).hexdigest()[:32]
    return name if store.write((*_get_key_folder(key), name), payload) else None


def _read_measurement_files(store: Store, folder: Name) -> list[tuple[str, tuple[Key, tuple[Measurement, ...]]]]:
    """(name, content) of the files in the folder of a key; files of other keys are skipped."""
    for _ in range(MAX_LISTINGS):
        names = store.names(folder)
        payloads = [store.read((*folder, name)) for name in names]
        # If another process merged the files meanwhile, their content is in a new one.
        if None not in payloads or set(names) <= set(store.names(folder)):
            break
    return [
        (name, found)
        for name, payload in zip(names, payloads, strict=True)
        if payload is not None and (found := _parse_entry(store, (*folder, name), payload)) is not None
    ]


def _parse_entry(store: Store, name: Name, payload: bytes) -> tuple[Key, tuple[Measurement, ...]] | None:
    found = measurements_from_bytes(payload)
    if found is None or found[0].digest != name[-2]:
        store.report_fault(f"the entry {store.path(name)} is passed over: it is that of another key")
        return None
    return found
