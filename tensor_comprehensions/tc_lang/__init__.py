"""The language. In: text. Out: checked `Function`s, and `BoundFunction`s with every size known.

Invariant: nothing here depends on targets, schedules or torch kernels. Every mistake is a `TCError` with its position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.lazy_import import lazy_module
from .binding.bind import bind
from .ir import BoundFunction, Function

if TYPE_CHECKING:
    from .semantics.check import compile_source

__all__ = ["BoundFunction", "Function", "bind", "compile_source"]


def __getattr__(name: str) -> Any:
    if name != "compile_source":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lazy_module("tc_lang.semantics.check").compile_source
