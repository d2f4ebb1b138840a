"""Checked programs in the cache: the functions of a text that was parsed and checked before.

They are written as JSON, every record by the name of its class, and only the classes of the language are made of it.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ..core.diagnostics import get_logger
from ..core.dtypes import DTYPES, DType
from ..core.errors import Span
from ..core.lazy_import import lazy_module
from ..tc_lang import ir as language
from ..tc_lang.ir import Function
from . import package_digest as package
from .store import PROGRAM, current_store

if TYPE_CHECKING:
    from ..tc_lang import check
else:
    check = lazy_module("tc_lang.check")


def load_checked_defs(source: str | bytes) -> tuple[Function, ...]:
    """As `tc_lang.compile_source`, out of the cache where the text is known."""
    store = current_store()
    if store.mode == "off" or not isinstance(source, str):
        return check.compile_source(source)
    try:
        text = f"{package.package_digest(store)}\n{source}".encode()
    except (package.SourceChanged, UnicodeEncodeError):
        return check.compile_source(source)
    digest = sha256(text).hexdigest()
    name = (PROGRAM, digest[:2], digest)
    payload = store.read(name)
    found = None if payload is None else defs_from_bytes(payload)
    if found is not None and all(f.source == source.removeprefix("\ufeff") for f in found):
        get_logger("cache").debug("%s: found the checked def", ", ".join(f.name for f in found))
        return found
    made = check.compile_source(source)
    try:
        package.check_unchanged()
        store.write(name, defs_to_bytes(made))
    except package.SourceChanged as reason:
        get_logger("cache").debug("not kept: %s", reason)
    return made


def defs_to_bytes(made: tuple[Function, ...]) -> bytes:
    """The functions of one text as JSON, with the text once."""
    text = made[0].source if made else ""
    content = [text, [_to_plain(replace(f, source="")) for f in made]]
    return json.dumps(content, separators=(",", ":")).encode()


def defs_from_bytes(data: bytes) -> tuple[Function, ...] | None:
    """The functions that JSON describes; None if it describes none."""
    try:
        text, made = _from_plain(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not (isinstance(text, str) and isinstance(made, tuple) and all(isinstance(f, Function) for f in made)):
        return None
    return tuple(replace(f, source=text) for f in made)


def _to_plain(x: Any) -> Any:
    if isinstance(x, DType):
        return {"DType": x.name}
    if isinstance(x, Enum):
        return {type(x).__name__: x.name}
    if isinstance(x, tuple):
        return [_to_plain(item) for item in x]
    if is_dataclass(x):
        return {type(x).__name__: [_to_plain(getattr(x, f.name)) for f in fields(x)]}
    return x


def _from_plain(x: Any) -> Any:
    if isinstance(x, list):
        return tuple([_from_plain(item) for item in x])
    if isinstance(x, dict):
        ((name, content),) = x.items()
        if name == "DType":
            return DTYPES[content]
        kind = _collect_language_classes()[name]
        return kind[content] if issubclass(kind, Enum) else kind(*[_from_plain(item) for item in content])
    return x


@cache
def _collect_language_classes() -> dict[str, Any]:
    """The classes that a function is made of."""
    here = {
        name: x
        for name, x in vars(language).items()
        if isinstance(x, type) and x.__module__ == language.__name__ and (is_dataclass(x) or issubclass(x, Enum))
    }
    return {**here, "Span": Span}
