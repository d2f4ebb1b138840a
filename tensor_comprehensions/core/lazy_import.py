"""Modules of this package that are imported at their first use.

A process that finds its programs and kernels in the cache does not parse, differentiate or compile, and the modules for
that are two thirds of the package. So modules that every call needs import each other at the top, as usual, and import
modules that only a cache miss needs by `lazy_module`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from .gc_pause import pause_gc
from .interrupts import deferred_interrupts


class LazyModule(ModuleType):
    """A stand-in for a module, which is imported when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocol lookups of Python
            raise AttributeError(name)
        module = self.__dict__.get("_module")
        if module is None:
            module = self.__dict__["_module"] = import_without_gc(self.__name__)
        return getattr(module, name)


def lazy_module(name: str) -> Any:
    """The module `name` of this package, imported when one of its attributes is first read."""
    return LazyModule(f"{__name__.partition('.')[0]}.{name}")


def import_without_gc(name: str) -> ModuleType:
    """Import a module by its full name. An interrupt waits, because a half-imported package would stay broken."""
    # Module objects are long-lived, and a collection among torch's objects takes a quarter of the import time.
    with deferred_interrupts(), pause_gc():
        return import_module(name)
