"""Kernels of torch's dispatcher in machine code: calls of operators without Python.

The dispatcher calls them through its stable C ABI with a stack of arguments: owned handles of tensors, and numbers.
Calls that no kernel of the cache fits go to Python, whose exceptions reach the caller unchanged.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import torch

from ...core.error_boundary import shorten_traceback
from ...core.errors import TCError
from ...core.single_flight import SingleFlightCache
from ..cpu import host_symbols
from . import call_cache
from .call_cache import CONSTANT, CallCache
from .dispatcher_ir import CALLBACK, THUNKS, call_caches_symbol, dispatcher_assembly
from .launch_ir import CALL_CACHE_WORDS
from .torch_layout import handle_of, tensor_of

Slow = Callable[..., Any]
_FUNCTIONS = {"CPU": "compute", "AutogradCPU": "record"}
"""The function of a call cache for each dispatch key."""


class BoxedCallCache(CallCache):
    """A call cache with two functions for the dispatcher: one that computes, and one that may record.

    Args:
        kinds, outputs: as in `CallCache`.
        compute, record: called with the arguments if no kernel fits, and if torch may have to record the call.
    """

    def __init__(self, kinds: Sequence[int], outputs: int, compute: Slow, record: Slow) -> None:
        self._code = _code.get("", _BoxedFunctionTable)
        self._slow = (compute, record)
        self.index, words = self._code.slot(self)
        super().__init__(kinds, outputs, words)
        self._functions = {key: self._code.thunk(name, self.index) for key, name in _FUNCTIONS.items()}

    def register(self, namespace: str, name: str, has: Callable[[str], bool]) -> None:
        """Register the functions as kernels of an operator for the CPU, except those for which `has` is true."""
        for key, function in self._functions.items():
            if not has(key):
                self._code.register(namespace, name, key.encode(), function)

    def call_slow_path(self, layer: int, stack: int, count: int, outputs: int) -> None:
        """Call `compute` (layer 0) or `record` (1) with the owned arguments on the stack; leave the results there."""
        words = (ctypes.c_int64 * max(count, outputs)).from_address(stack)
        values = [w if kind == CONSTANT else tensor_of(w) for w, kind in zip(words, self.kinds, strict=False)]
        found = self._slow[layer](*values)
        for n, x in enumerate(found if isinstance(found, tuple) else (found,)):
            words[n] = handle_of(x)


_code: SingleFlightCache[str, _BoxedFunctionTable] = SingleFlightCache(1)


class _BoxedFunctionTable:
    """The functions of all call caches, and the callback to Python; lives as long as the process."""

    def __init__(self) -> None:
        self._common = call_cache.fast_path_code().common
        self._callback = self._python
        llvm.add_symbol(CALLBACK, id(self._callback))
        self._count = itertools.count()
        self._pools: SingleFlightCache[int, _ThunkPool] = SingleFlightCache(1 << 62)
        self._caches: dict[int, BoxedCallCache] = {}
        self._libraries: SingleFlightCache[tuple[str, bytes], ctypes.c_void_p] = SingleFlightCache(1 << 62)

    def slot(self, owner: BoxedCallCache) -> tuple[int, Any]:
        """An index for a call cache, and the memory of its words."""
        index = next(self._count)
        self._caches[index] = owner
        return index, self._pool(index).words(index % THUNKS)

    def thunk(self, function: str, index: int) -> int:
        """The address of a function of the call cache at `index`."""
        address: int = self._pool(index).engine.get_function_address(f"tc_{function}_{index % THUNKS}")
        return address

    def _pool(self, index: int) -> _ThunkPool:
        number = index // THUNKS
        return self._pools.get(number, lambda: _ThunkPool(number, self._common))

    def register(self, namespace: str, name: str, key: bytes, function: int) -> None:
        lib = host_symbols.torch_library()
        library = self._libraries.get((namespace, key), lambda: _make_torch_library(namespace.encode(), key))
        major, minor = (int(x) for x in torch.__version__.split(".")[:2])
        register = lib.torch_library_impl
        register.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64]
        if register(library, name.encode(), function, major << 56 | minor << 48):
            raise RuntimeError(f"torch does not take a kernel of {namespace}::{name}")

    def _python(self, index: int, layer: int, stack: int, count: int, outputs: int) -> None:
        """The callback: continue a call in Python."""
        try:
            self._caches[index].call_slow_path(layer, stack, count, outputs)
        except TCError as error:
            shorten_traceback(error)
            raise


def _make_torch_library(namespace: bytes, key: bytes) -> ctypes.c_void_p:
    make = host_symbols.torch_library().aoti_torch_library_init_impl
    make.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_void_p]
    library = ctypes.c_void_p()
    if make(namespace, key, b"tensor_comprehensions", 1, ctypes.byref(library)):
        raise RuntimeError("torch makes no library")
    return library


class _ThunkPool:
    """The functions of `THUNKS` call caches, made together because one by one takes longer."""

    def __init__(self, number: int, common: str) -> None:
        self._memory = (ctypes.c_uint64 * (CALL_CACHE_WORDS * THUNKS))()
        first = number * THUNKS
        llvm.add_symbol(call_caches_symbol(first), ctypes.addressof(self._memory))
        self.engine = host_symbols.load_code(host_symbols.builtin_code(common + dispatcher_assembly(first)))

    def words(self, slot: int) -> Any:
        return (ctypes.c_uint64 * CALL_CACHE_WORDS).from_address(
            ctypes.addressof(self._memory) + 8 * CALL_CACHE_WORDS * slot
        )
