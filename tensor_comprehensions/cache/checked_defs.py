"""Checked programs in the cache, so that a known source text is neither parsed nor checked again.

Entries are JSON, from which only classes of the language are created.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ..core.diagnostics import get_logger
from ..core.errors import Span
from ..core.lazy_import import lazy_module
from ..tc_lang import formats
from ..tc_lang import ir as language
from ..tc_lang.ir import Function
from . import package_digest as package
from .plain_records import from_plain, record_classes, to_plain
from .store import PROGRAM, current_store

if TYPE_CHECKING:
    from ..tc_lang.semantics import check
else:
    check = lazy_module("tc_lang.semantics.check")


def load_checked_defs(source: str | bytes) -> tuple[Function, ...]:
    """As `tc_lang.compile_source`, but from the cache if it knows the text. Raises the same errors."""
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
    """The functions of one source text as JSON, which has the text once."""
    text = made[0].source if made else ""
    content = [text, [to_plain(replace(f, source="")) for f in made]]
    return json.dumps(content, separators=(",", ":")).encode()


def defs_from_bytes(data: bytes) -> tuple[Function, ...] | None:
    """The functions that `defs_to_bytes` wrote; None for other bytes."""
    try:
        text, made = from_plain(json.loads(data), language_classes())
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not (isinstance(text, str) and isinstance(made, tuple) and all(isinstance(f, Function) for f in made)):
        return None
    return tuple(replace(f, source=text) for f in made)


@cache
def language_classes() -> dict[str, Any]:
    """The classes of the values in a `Function`, by name."""
    return {**record_classes(formats, language), "Span": Span}
