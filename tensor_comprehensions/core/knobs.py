"""The `TC_*` environment variables, in one typed place: no other module reads the environment for settings.

They are read once, when the package is imported. `override_knobs` changes them for part of a program, in all threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .checked_fields import check_value, check_word, describe_value, suggest_word
from .errors import ArgumentError
from .processors import FEATURES

TOPICS = {
    "schedule": "why a transform or schedule does not apply, and the schedule tree",
    "loops": "the loop program that is printed for the target",
    "code": "the emitted LLVM text",
    "why": "the decisions of the compiler, with their reasons and numbers",
    "cache": "kernels found and not found, and which part of the key is new",
    "sparse": "sparse operands that are copied or converted, and why",
    "passes": "the time of each pass",
    "tune": "what a search for options tries, rejects and finds",
    "graph": "what `torch.compile` hands over, which regions become kernels, and why others do not",
}
"""The topics of `TC_LOGS`; each is a logger `tensor_comprehensions.<topic>`."""
MOST_BYTES = 2**63 - 1
"""The largest number of bytes: databases store it in 64 bits."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings of the environment, one variable per field; `metadata["help"]` documents it."""

    interpret: bool = field(
        default=False, metadata={"variable": "TC_INTERPRET", "help": "1: run the reference evaluator, compile nothing"}
    )
    dump: str = field(
        default="",
        metadata={"variable": "TC_DUMP", "help": "folder that receives every stage of every kernel", "path": True},
    )
    logs: tuple[str, ...] = field(
        default=(),
        metadata={
            "variable": "TC_LOGS",
            "help": "comma-separated topics to explain on stderr: " + ", ".join(TOPICS),
            "choices": tuple(TOPICS),
        },
    )
    explain: str = field(
        default="",
        metadata={"variable": "TC_EXPLAIN", "help": "folder that receives a page about every kernel", "path": True},
    )
    verify: bool = field(
        default=False, metadata={"variable": "TC_VERIFY", "help": "1: prove every transform and check after every pass"}
    )
    tracebacks: str = field(
        default="short",
        metadata={
            "variable": "TC_TRACEBACKS",
            "help": "full: show the frames of this package in the traceback of a mistake, too",
            "choices": ("short", "full"),
        },
    )
    tune: str = field(
        default="",
        metadata={
            "variable": "TC_TUNE",
            "help": "auto: operators defined with options='tuned' are tuned at their first call with new sizes",
            "choices": ("", "auto"),
        },
    )
    cache: str = field(
        default="readwrite",
        metadata={
            "variable": "TC_CACHE",
            "help": "off, read or readwrite: whether kernels and tuned options of earlier processes are used and kept",
            "choices": ("off", "read", "readwrite"),
        },
    )
    cache_dir: str = field(
        default="",
        metadata={"variable": "TC_CACHE_DIR", "help": "folder of the cache, instead of the user's own", "path": True},
    )
    cache_strict: bool = field(
        default=False, metadata={"variable": "TC_CACHE_STRICT", "help": "1: raise CacheError for a fault of the cache"}
    )
    cache_max_size: int = field(
        default=1 << 31,
        metadata={
            "variable": "TC_CACHE_MAX_SIZE",
            "help": "bytes that the cache may have: 500M, 2G",
            "most": MOST_BYTES,
        },
    )
    cache_signing_key: str = field(
        default="",
        metadata={
            "variable": "TC_CACHE_SIGNING_KEY",
            "help": "file with a secret that signs compiled code, which may then move",
            "path": True,
        },
    )
    dynamic: str = field(
        default="auto",
        metadata={
            "variable": "TC_DYNAMIC",
            "help": "auto: a size becomes a parameter of kernels with its third value; always: with its first; off: "
            "never",
            "choices": ("auto", "always", "off"),
        },
    )
    einsum: str = field(
        default="auto",
        metadata={
            "variable": "TC_EINSUM",
            "help": "auto: torch computes the first calls of an equation of tc.einsum; kernel: a kernel does",
            "choices": ("auto", "kernel"),
        },
    )
    strict: bool = field(
        default=False,
        metadata={
            "variable": "TC_STRICT",
            "help": "1: raise errors that a fault of the package causes in a graph of `torch.compile`, instead of "
            "running the operations with torch",
        },
    )
    target: str = field(
        default="",
        metadata={
            "variable": "TC_TARGET",
            "help": "a processor, such as haswell or nehalem: use only the features that it shares with this one",
            "choices": ("", *FEATURES),
        },
    )

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Knobs:
        """Read the knobs from `environment`; variables that are not set keep their defaults.

        Raises ArgumentError, which names the variable, if a value is invalid.
        """
        values: dict[str, Any] = {}
        for f in fields(cls):
            variable = f.metadata["variable"]
            if variable in environment:
                value = _parse(variable, environment[variable], type(f.default))
                check_value(variable, f, value)
                values[f.name] = _make_path_absolute(value) if f.metadata.get("path") else value
        return cls(**values)


def _parse(variable: str, text: str, kind: type) -> Any:
    text = text.strip()
    if kind is int:
        return parse_bytes(variable, text)
    if kind is bool:
        if text.lower() not in ("", "0", "1", "false", "true"):
            raise ArgumentError(f"{variable} is {describe_value(text)}", expected="0 or 1")
        return text.lower() in ("1", "true")
    if kind is tuple:
        topics = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for topic in topics:
            check_word(f"a topic of {variable}", topic, (*TOPICS, "all"))
        return tuple(TOPICS) if "all" in topics else topics
    return text


def _make_path_absolute(path: str) -> str:
    """`path` made absolute, so that later changes of the working directory do not matter; "" stays "".

    Also unchanged if the working directory no longer exists.
    """
    try:
        return os.path.abspath(os.path.expanduser(path)) if path else ""
    except OSError:  # the working directory is gone
        return path


def parse_bytes(variable: str, text: str) -> int:
    """Parse a number of bytes such as `500M`, given for `variable`. Raises ArgumentError."""
    digits, unit = text.rstrip("KMGkmg"), text[len(text.rstrip("KMGkmg")) :].upper()
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18 or len(unit) > 1:
        raise ArgumentError(f"{variable} is {describe_value(text)}", expected="a number of bytes, such as 500M or 2G")
    return int(digits) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]


def _read() -> tuple[Knobs, ArgumentError | None]:
    """The knobs of this process, and the error in them, if any: raised at the first use, not when importing."""
    try:
        return Knobs.read(os.environ), None
    except ArgumentError as reason:
        return Knobs(), reason


_current, _wrong = _read()


_observers: list[Callable[[Knobs], None]] = []


def observe_knobs(observer: Callable[[Knobs], None]) -> None:
    """Call `observer` with the current knobs now and after every change, for code that cannot query them each time."""
    _observers.append(observer)
    observer(current_or_default())


def _install_knobs(knobs: Knobs) -> None:
    global _current
    _current = knobs
    for observer in _observers:
        observer(knobs)


def current_knobs() -> Knobs:
    """The current knobs. Raises ArgumentError if the environment sets one to an invalid value."""
    if _wrong is not None:
        raise _wrong.with_traceback(None)  # else it would grow with every call
    return _current


def current_or_default() -> Knobs:
    """The current knobs, or the defaults if `current_knobs` raises: for code that runs at import."""
    return _current


@contextmanager
def override_knobs(**values: Any) -> Iterator[Knobs]:
    """Change settings for a `with` block: `with override_knobs(verify=True): ...`.

    The names are those of the fields of `Knobs`: `cache_dir` for `TC_CACHE_DIR`. The change holds in all threads.

    Raises:
        ArgumentError: a setting does not exist, or cannot have the value.
    """
    before = current_knobs()
    for name, value in values.items():
        values[name] = _check_value(name, value)
    try:
        _install_knobs(replace(before, **values))
        yield _current
    finally:
        _install_knobs(before)


def _check_value(name: str, value: Any) -> Any:
    """Check the value of the setting `name` and return it, with a path as text and topics as a tuple."""
    found = next((f for f in fields(Knobs) if f.name == name), None)
    if found is None:
        known = [f.name for f in fields(Knobs)]
        raise ArgumentError(f"there is no setting {name!r}", suggestion=suggest_word(name, known))
    if found.metadata.get("path") and isinstance(value, os.PathLike):
        value = os.fspath(value)
    check_value(f"the setting {name}", found, value)
    return value
