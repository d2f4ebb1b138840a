"""Convert records of options to protobuf messages, field by field, and back.

A schedule is stored as text, which is parsed and never evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from .. import options as option_records
from ..core.errors import ArgumentError
from ..structured.language.primitives import Schedule, parse_schedule
from .key import Uncacheable
from .tc_cache_pb2 import Field, List, Options, Value


def option_classes() -> Mapping[str, type]:
    """The classes of options by name."""
    return {
        name: x
        for name, x in vars(option_records).items()
        if isinstance(x, type) and x.__module__ == option_records.__name__
    }


def to_message(options: Any) -> Options:
    """The message of a record of options. Raises Uncacheable if a field holds a function."""
    message = Options(record=type(options).__name__)
    for x in fields(options):
        message.fields.append(Field(name=x.name, value=_serialize_value(getattr(options, x.name))))
    return message


def from_message(message: Options) -> Any:
    """The record of options in a message; missing fields have their default. Fields are checked like a user's.

    Raises ArgumentError for unknown classes and fields (of another version), and for invalid values.
    """
    record = option_classes().get(message.record)
    if record is None:
        raise ArgumentError(f"there are no options called {message.record!r}", expected=", ".join(option_classes()))
    known = {x.name: x for x in fields(record)}
    values: dict[str, Any] = {}
    for field in message.fields:
        if field.name not in known:
            raise ArgumentError(f"{message.record} has no option {field.name!r}", expected=", ".join(known))
        values[field.name] = _parse_value(field.value, known[field.name].default)
    return record(**values)


def _serialize_value(x: object) -> Value:
    match x:
        case None:
            return Value()
        case bool():
            return Value(flag=x)
        case int():
            return Value(number=x)
        case float():
            return Value(real=x)
        case str():
            return Value(text=x)
        case Enum():
            return Value(text=x.name)
        case tuple():
            return Value(list=List(items=map(_serialize_value, x)))
        case Schedule():
            return Value(pipeline=repr(x))
    if type(x) in option_classes().values():
        return Value(options=to_message(x))
    raise Uncacheable(f"{x!r} cannot be written down")


def _parse_value(value: Value, default: object = None) -> Any:
    kind = value.WhichOneof("kind")
    match kind:
        case None:
            return None
        case "list":
            return tuple(_parse_value(item) for item in value.list.items)
        case "pipeline":
            return parse_schedule(value.pipeline)
        case "options":
            return from_message(value.options)
        case "text" if isinstance(default, Enum):
            return _find_enum_member(type(default), value.text)
    return getattr(value, kind)


def _find_enum_member(kind: type[Enum], name: str) -> Enum:
    if name not in kind.__members__:
        raise ArgumentError(f"there is no {kind.__name__} {name!r}", expected=", ".join(kind.__members__))
    return kind[name]
