"""Files, tables and messages with a fault put in: what readers of outside text must refuse in words.

Everything is drawn from one `random.Random`, so that a seed makes a fault again.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from random import Random
from types import FrameType
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

HANG = 60
"""Seconds after which a reader is said to hang: thousands of times what one takes."""
TEXTS = (
    "", "\0", "a\0b", "\ud800", "é", "²", "٣", "1" * 40 + "!", "9" * 5000, "-1", "nan", "1e999", "/dev/zero", "/", "..",
    "~nobody-of-this-name", "://", "cpu:0-999999999", "(" * 3000, "[" * 3000, "#" * 3000, "x(" + "#" * 60, "\n" * 50,
    "tile(m=8) >> " * 300, "{}", "%s%n", "N=1,N=2,,=", "a" * 70_000,
)  # fmt: skip
NUMBERS = (0, -1, 1, 3, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 1 << 9000)
REALS = (0.0, -0.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), 0.5)


@contextmanager
def no_hang() -> Iterator[None]:
    """Fail where what is inside does not come to an end."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still at it after {HANG} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- bytes -------------------------------------------------------------------------------------------------------


def damage_bytes(r: Random, data: bytes) -> bytes:
    """`data` with one to three faults: flipped bits, an end that is missing, parts removed, repeated or put in."""
    for _ in range(r.choice((1, 1, 2, 3))):
        data = r.choice((_flip_bits, _cut, _remove_part, _repeat_part, _insert_part))(r, data)
    return data


def _flip_bits(r: Random, data: bytes) -> bytes:
    if not data:
        return b"\xff"
    at = r.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << r.randrange(8))]) + data[at + 1 :]


def _cut(r: Random, data: bytes) -> bytes:
    return data[: r.randrange(len(data) + 1)]


def _slice(r: Random, data: bytes) -> tuple[int, int]:
    start = r.randrange(len(data) + 1)
    return start, min(len(data), start + r.choice((1, 2, 8, 64)))


def _remove_part(r: Random, data: bytes) -> bytes:
    start, end = _slice(r, data)
    return data[:start] + data[end:]


def _repeat_part(r: Random, data: bytes) -> bytes:
    start, end = _slice(r, data)
    return data[:start] + data[start:end] * r.choice((2, 3, 1000)) + data[end:]


def _insert_part(r: Random, data: bytes) -> bytes:
    at = r.randrange(len(data) + 1)
    return data[:at] + r.choice((r.randbytes(4), text(r).encode("utf-8", "surrogatepass"), b"\xed\xa0\x80")) + data[at:]


def text(r: Random) -> str:
    return r.choice(TEXTS)


# --- tables ------------------------------------------------------------------------------------------------------


def odd_table(r: Random, table: Any) -> Any:
    """A copy of a table in which one or two values are of another type or size, or are missing, or have company."""
    made = {"": deepcopy(table)}
    for _ in range(r.choice((1, 1, 2))):
        holder, key = r.choice(list(_places(made)))
        kind = r.random()
        if kind < 0.7 or key == "":
            holder[key] = odd_value(r)
        elif kind < 0.8:
            del holder[key]
        elif isinstance(holder, dict):
            holder[text(r)] = odd_value(r)
        else:
            holder.insert(key, odd_value(r))
    return made[""]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) in a nested value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def odd_value(r: Random, depth: int = 0) -> Any:
    kind = r.randrange(7 if depth < 3 else 4)
    match kind:
        case 0:
            return r.choice(NUMBERS)
        case 1:
            return r.choice(REALS)
        case 2:
            return text(r)
        case 3:
            return r.choice((None, True, False, [], {}))
        case 4:
            return [odd_value(r, depth + 1) for _ in range(r.randrange(3))]
        case 5:
            return {text(r): odd_value(r, depth + 1) for _ in range(r.randrange(3))}
    value: Any = 1
    for _ in range(r.choice((5, 20, 400))):
        value = [value] if r.random() < 0.5 else {"a": value}
    return value


def to_toml(table: Any) -> str:
    """A table, mostly of one level, as TOML; what TOML cannot say comes out as something that it cannot read."""
    if not isinstance(table, dict):
        return _toml(table)
    lines = [f"{_key(k)} = {_toml(v)}" for k, v in table.items() if k != "tune" or not isinstance(v, list)]
    for entry in table.get("tune", []) if isinstance(table.get("tune"), list) else []:
        lines.append("[[tune]]")
        lines += [f"{_key(k)} = {_toml(v)}" for k, v in entry.items()] if isinstance(entry, dict) else [_toml(entry)]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else json.dumps(key)


def _toml(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() if value.bit_length() > 10_000 or value > 1 << 64:
            return hex(value)
        case int() | float():
            return str(value)
        case str():
            return json.dumps(value)
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return f"{{{', '.join(f'{_key(k)} = {_toml(v)}' for k, v in value.items())}}}"
    raise TypeError(type(value))


def to_json(table: Any) -> str:
    """A table as JSON, with numbers of more digits than Python reads."""
    return json.dumps(table, default=str) if _small(table) else json.dumps(0)


def _small(value: Any) -> bool:
    """Can Python print it?"""
    if isinstance(value, dict | list):
        return all(map(_small, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or value.bit_length() < 10_000


# --- messages ----------------------------------------------------------------------------------------------------


def odd_message(r: Random, message: Message) -> bytes:
    """The bytes of a message in which a field or three have odd values, or which are damaged."""
    made = type(message)()
    made.CopyFrom(message)
    if r.random() < 0.2:
        return damage_bytes(r, made.SerializeToString())
    for _ in range(r.choice((1, 1, 3))):
        places = list(_fields(made))
        if places:
            _spoil(r, *r.choice(places))
    return made.SerializeToString()


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field that is set, in the message and in those that it holds."""
    for field, value in message.ListFields():
        yield message, field
        if field.type == field.TYPE_MESSAGE:
            for inner in value if _is_repeated(message, field) else (value,):
                yield from _fields(inner)


def _is_repeated(message: Message, field: FieldDescriptor) -> bool:
    return hasattr(getattr(message, field.name), "append")


def _spoil(r: Random, message: Message, field: FieldDescriptor) -> None:
    value = getattr(message, field.name)
    if field.type == field.TYPE_MESSAGE or _is_repeated(message, field):
        if r.random() < 0.5 or not _is_repeated(message, field):
            message.ClearField(field.name)
        else:
            value.extend(list(value) * r.choice((1, 20)))
    elif field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        setattr(message, field.name, r.choice(REALS))
    elif field.type == field.TYPE_STRING:
        odd = text(r)
        setattr(message, field.name, "" if "\ud800" in odd else odd)
    elif field.type == field.TYPE_BYTES:
        setattr(message, field.name, damage_bytes(r, value))
    elif field.type == field.TYPE_BOOL:
        setattr(message, field.name, not value)
    else:
        fit = [n for n in (*NUMBERS, 77) if _fits(message, field, n)]
        setattr(message, field.name, r.choice(fit))


def _fits(message: Message, field: FieldDescriptor, number: int) -> bool:
    probe = type(message)()
    try:
        setattr(probe, field.name, number)
    except (ValueError, OverflowError):
        return False
    return True
