"""Checks of the values of settings against the types and bounds that the fields of a frozen dataclass declare.

The annotation of a field gives its type, and its metadata bounds the value. A violation raises an ArgumentError with
the setting, the expected and the found value, and the nearest word. Metadata:

- `choices`: for a word, all allowed values. For a number, values worth trying; the least is also the lower bound.
- `exact`: reject numbers other than `choices`.
- `least`, `most`: bounds of a number, or of each number of a tuple.
- `lengths`: the allowed lengths of a tuple.
- `pattern`, `example`: a regular expression that a text must match, and a text that matches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import Field, fields
from difflib import get_close_matches
from functools import wraps
from reprlib import repr as short_repr
from typing import Any, TypeVar

from .errors import ArgumentError

MOST = 2**31 - 1
"""The largest value of a numeric option, unless its field says otherwise: messages and kernels store 32 bits."""
_TYPES = {
    "bool": (bool, "True or False"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a text"),
}


def check_fields(record: Any, prefix: str) -> None:
    """Check every field of a record. Errors call a field by `prefix` and its name. Raises ArgumentError."""
    for f in fields(record):
        value = getattr(record, f.name)
        if value is not f.default:  # most are defaults in the thousands of records of a search
            check_value(f"{prefix} {f.name}", f, value)


Record = TypeVar("Record", bound=type)


def with_checked_names(record: Record) -> Record:
    """Decorate a dataclass: unknown keyword arguments raise ArgumentError, which suggests the nearest field."""
    initialize, known = vars(record)["__init__"], dict.fromkeys(f.name for f in fields(record))

    @wraps(initialize)
    def initialize_checked(self: object, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                raise ArgumentError(
                    f"{record.__name__} has no field '{name}'",
                    expected=", ".join(known),
                    suggestion=suggest_word(name, known),
                )
        initialize(self, *values, **named)

    setattr(record, "__init__", initialize_checked)  # noqa: B010 — a type checker forbids the assignment
    return record


def check_value(label: str, f: Field[Any], value: object) -> None:
    """Check a value for the field `f`; fields of types that are not in `_TYPES` pass. Raises ArgumentError."""
    kind = str(f.type)
    if kind.startswith("tuple["):
        _check_tuple(label, f, value, kind.removeprefix("tuple[").partition(",")[0])
    elif kind in _TYPES:
        _check_type(label, value, value, kind, f)
        _check_scalar(label, f, value, value)


def check_word(label: str, word: str, choices: Iterable[str]) -> None:
    """Check that a word is one of `choices`. Raises ArgumentError with the nearest one."""
    known = tuple(choices)
    if word not in known:
        raise ArgumentError(
            f"{label} is {describe_value(word)}",
            expected=" or ".join(repr(c) for c in known),
            suggestion=suggest_word(word, known),
        )


def suggest_word(word: object, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the nearest of the `known` words, or ""."""
    near = get_close_matches(word, tuple(known), 1) if isinstance(word, str) and word else []
    return f"did you mean '{near[0]}'?" if near else ""


def describe_value(value: object) -> str:
    """A value for a message, shortened. Of a large integer, only the number of bits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    try:
        return short_repr(value)
    except Exception:  # of a `__repr__` of the user's
        return f"a {type(value).__name__}"


def _check_tuple(label: str, f: Field[Any], value: object, kind: str) -> None:
    if not isinstance(value, tuple):
        raise _type_error(label, value, f"a tuple, such as {_example(f)}", value)
    for item in value:
        _check_type(label, value, item, kind, f)
        _check_scalar(label, f, value, item)
    lengths = f.metadata.get("lengths")
    if lengths is not None and len(value) not in lengths:
        numbers = " or ".join(map(str, sorted(lengths)))
        raise ArgumentError(f"{label} is {describe_value(value)}", expected=f"{numbers} numbers", found=f"{len(value)}")


def _check_type(label: str, value: object, item: object, kind: str, f: Field[Any]) -> None:
    """Check the type of an item of a value. A bool is not a number; an int is also accepted as a float."""
    type_, words = _TYPES[kind]
    types = (int, float) if type_ is float else (type_,)
    if not isinstance(item, types) or (isinstance(item, bool) and type_ is not bool):
        choices = " or ".join(repr(c) for c in f.metadata.get("choices", ())) if type_ is str else ""
        raise _type_error(label, value, choices or words, item)


def _check_scalar(label: str, f: Field[Any], value: object, item: object) -> None:
    """Check the range of an item of a value."""
    match item:
        case bool():
            pass
        case str() if "choices" in f.metadata:
            if item not in f.metadata["choices"]:
                check_word(label, item, f.metadata["choices"])
        case str() if "pattern" in f.metadata:
            if not re.fullmatch(f.metadata["pattern"], item):
                expected = f"such as {f.metadata['example']!r}"
                raise ArgumentError(f"{label} is {describe_value(value)}", expected=expected)
        case int() | float():
            _check_range(label, f, value, item)


def _check_range(label: str, f: Field[Any], value: object, number: float) -> None:
    choices: tuple[Any, ...] = f.metadata.get("choices", ())
    least = f.metadata.get("least", min((c for c in choices if isinstance(c, int)), default=0))
    most = f.metadata.get("most", MOST)
    if f.metadata.get("exact") and number not in choices:
        expected = " or ".join(map(str, choices))
    elif not least <= number <= most:  # rejects NaN, too
        expected = f"at least {least}, at most {most}"
    else:
        return
    raise ArgumentError(f"{label} is {describe_value(value)}", expected=expected)


def _type_error(label: str, value: object, expected: str, item: object) -> ArgumentError:
    return ArgumentError(
        f"{label} is {describe_value(value)}",
        expected=expected,
        found=f"{describe_value(item)} of the type {type(item).__name__}",
    )


def _example(f: Field[Any]) -> str:
    """A valid tuple for the field, as text."""
    if isinstance(f.default, tuple) and f.default:
        return repr(f.default)
    items = [c for c in f.metadata.get("choices", ()) if not isinstance(c, tuple)]
    lengths = [n for n in f.metadata.get("lengths", (1,)) if n]
    return repr((f.metadata.get("example"),) if "example" in f.metadata else tuple(items[-1:] * lengths[0]) or (32, 32))
