"""The language: text in, checked `Function`s out; a `BoundFunction` is one with every size known.

Always holds: nothing here knows of targets, schedules or torch kernels; every mistake is a `TCError` with its place.
"""

from __future__ import annotations

from .bind import bind
from .check import compile_source
from .function import BoundFunction, Function

__all__ = ["BoundFunction", "Function", "bind", "compile_source"]
