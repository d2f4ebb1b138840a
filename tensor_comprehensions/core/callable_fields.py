"""Fields of a frozen record that are also builder methods.

`options.tile` is a tuple, and `options.tile(32, 32)` is a copy of `options` with another tuple: the paper uses the same
words for options and builders. The descriptor attaches the record to a value only when the field is read, so that the
stored values are plain and records compare, hash, copy and serialize as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

Record = TypeVar("Record", bound=type)


class _Sizes(tuple[int, ...]):
    record: Any
    name: str

    def __call__(self, *sizes: int) -> Any:
        return replace(self.record, **{self.name: sizes})

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class _Number(int):
    record: Any
    name: str

    def __call__(self, value: int) -> Any:
        return replace(self.record, **{self.name: value})

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class _Field:
    """A descriptor around the slot of a field, which makes the values that it returns callable."""

    def __init__(self, name: str, slot: Any) -> None:
        self.name, self.slot = name, slot

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        if record is None:
            return self
        value = self.slot.__get__(record, owner)
        if type(value) not in (tuple, int):  # a mistake that the checks of the record report
            return value
        bound: Any = _Sizes(value) if type(value) is tuple else _Number(value)
        bound.record, bound.name = record, self.name
        return bound

    def __set__(self, record: Any, value: Any) -> None:
        plain = tuple(value) if isinstance(value, _Sizes) else int(value) if isinstance(value, _Number) else value
        self.slot.__set__(record, plain)


def with_callable_fields(*names: str) -> Callable[[Record], Record]:
    """Return a decorator of a frozen dataclass with slots that makes the fields `names` (tuples or ints) callable."""

    def decorate(record: Record) -> Record:
        for name in names:
            setattr(record, name, _Field(name, record.__dict__[name]))
        return record

    return decorate
