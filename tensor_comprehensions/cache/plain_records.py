"""Dataclasses as values of JSON, each with the name of its class; only given classes are made of them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from ..core.dtypes import DTYPES, DType


def to_plain(x: Any) -> Any:
    """A dataclass, an enumerator, a tuple of such, a number or a text as a value of JSON."""
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
    """The value that `to_plain` wrote, made of `classes`. Raises KeyError, TypeError or ValueError for other values."""
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
