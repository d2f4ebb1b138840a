"""Convert dataclasses to JSON values, with the names of their classes, and back; only given classes are created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from ..core.dtypes import DTYPES, DType


def to_plain(x: Any) -> Any:
    """Convert a dataclass, an enumeration member, a tuple of such, a number or a text to a JSON value."""
    if isinstance(x, DType):
        return {"DType": x.name}
    if isinstance(x, Enum):
        return {type(x).__name__: x.name}
    if isinstance(x, tuple):
        return [to_plain(item) for item in x]
    if is_dataclass(x):
        return {type(x).__name__: [to_plain(getattr(x, f.name)) for f in fields(x)]}
    return x


def from_plain(x: Any, classes: Mapping[str, Any]) -> Any:
    """Convert a JSON value of `to_plain` back. classes: the allowed classes, by name.

    Raises KeyError, TypeError or ValueError for other values.
    """
    if isinstance(x, list):
        return tuple([from_plain(item, classes) for item in x])
    if isinstance(x, dict):
        ((name, content),) = x.items()
        if name == "DType":
            return DTYPES[content]
        kind = classes[name]
        return kind[content] if issubclass(kind, Enum) else kind(*[from_plain(item, classes) for item in content])
    return x


def record_classes(*modules: ModuleType) -> dict[str, Any]:
    """The dataclasses and enumerations that modules define, by name."""
    return {
        name: x
        for module in modules
        for name, x in vars(module).items()
        if isinstance(x, type) and x.__module__ == module.__name__ and (is_dataclass(x) or issubclass(x, Enum))
    }
