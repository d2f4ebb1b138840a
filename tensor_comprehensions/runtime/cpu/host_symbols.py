"""The functions of the process that emitted code calls: torch's thread pool, memory, vector mathematics.

Everything is looked up in the library that torch has already loaded, so that there is one thread pool.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import llvmlite
import llvmlite.binding as llvm
import torch

from ...cache.store import RUNTIME, current_store
from ...core.dtypes import FLOAT32, FLOAT64
from ...core.errors import CannotLower
from ...core.lazy_import import lazy_module
from ...core.math_functions import FUNCTIONS
from ...core.single_flight import SingleFlightCache

if TYPE_CHECKING:
    from ...codegen.llvm import vector_math
    from ...loop_ir import nodes
else:
    vector_math, nodes = lazy_module("codegen.llvm.vector_math"), lazy_module("loop_ir.nodes")

_REJECTED = ("acosh", "asinh", "cosh", "sinh", "fmod", "remainder", "lgamma", "tgamma")
"""Functions of SLEEF that are wrong for large or special arguments."""
_SUFFIXES = ("u10", "u05", "u15", "")  # SLEEF's error bounds in tenths of an ulp; exact functions have none

# Kernels reach the pool through a pointer, so that a forked child, whose pool is dead, can run without it.
_SHIM = """
@tc_pool = external global ptr
define i32 @tc_parallel_for(i64 %begin, i64 %end, i64 %grain, ptr %function, ptr %context) {
  %pool = load atomic ptr, ptr @tc_pool monotonic, align 8
  %sequential = icmp eq ptr %pool, null
  br i1 %sequential, label %here, label %there
here:
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %run, label %done
run:
  call void %function(i64 %begin, i64 %end, ptr %context)
  br label %done
done:
  ret i32 0
there:
  %error = tail call i32 %pool(i64 %begin, i64 %end, i64 %grain, ptr %function, ptr %context)
  ret i32 %error
}
define ptr @tc_allocate(i64 %bytes) {
  %more = add i64 %bytes, 128
  %raw = call ptr @tc_malloc(i64 %more)
  %none = icmp eq ptr %raw, null
  br i1 %none, label %failure, label %success
failure:
  ret ptr null
success:
  %number = ptrtoint ptr %raw to i64
  %after = add i64 %number, 127
  %aligned = and i64 %after, -64
  %address = inttoptr i64 %aligned to ptr
  %slot = getelementptr i8, ptr %address, i64 -8
  store ptr %raw, ptr %slot
  ret ptr %address
}
define void @tc_free(ptr %address) {
  %slot = getelementptr i8, ptr %address, i64 -8
  %raw = load ptr, ptr %slot
  call void @tc_release(ptr %raw)
  ret void
}
declare ptr @tc_malloc(i64)
declare void @tc_release(ptr)
"""


def _find_symbol_address(library: ctypes.CDLL, name: str) -> int | None:
    function = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def torch_library(name: str = "torch_cpu") -> ctypes.CDLL:
    """A library of torch, by default that for the CPU, as torch loaded it."""
    prefix, suffix = {"darwin": ("lib", ".dylib"), "win32": ("", ".dll")}.get(sys.platform, ("lib", ".so"))
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{prefix}{name}{suffix}"))


class ThreadPool:
    """torch's thread pool. Emitted code reads `cell`: the address of `torch_parallel_for`, or null for no pool."""

    def __init__(self) -> None:
        self.cell = ctypes.c_void_p(_find_symbol_address(torch_library(), "torch_parallel_for"))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.abandon)

    def abandon(self) -> None:
        """Run everything in the calling thread from now on."""
        self.cell.value = None


class _Linked:
    """The functions that emitted modules call, which must live as long as the process."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        libc = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
        llvm.add_symbol("tc_malloc", _find_symbol_address(libc, "malloc"))
        llvm.add_symbol("tc_release", _find_symbol_address(libc, "free"))
        self.pool = ThreadPool()
        llvm.add_symbol("tc_pool", ctypes.addressof(self.pool.cell))
        self.engine = load_code(builtin_code(_SHIM))
        for name in ("tc_parallel_for", "tc_allocate", "tc_free"):
            llvm.add_symbol(name, self.engine.get_function_address(name))


_linked: SingleFlightCache[str, _Linked] = SingleFlightCache(1)


def load_code(data: bytes) -> llvm.ExecutionEngine:
    """Load object code into this process; it stays until the engine is freed."""
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    nothing = llvm.parse_assembly("")
    engine = llvm.create_mcjit_compiler(nothing, machine)
    engine.remove_module(nothing)  # an engine needs a first module, and compiling even an empty one is the slowest part
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine


def link_host_symbols() -> ThreadPool:
    """Start LLVM and make the functions that emitted modules call known to its linker; once per process."""
    return _linked.get("", _Linked).pool


@functools.cache
def vector_functions() -> Mapping[str, str]:
    """Vector functions of the process by `vector_math.function_key`: those of SLEEF, at most 1.5 ulp, in torch.

    Other functions are called lane by lane from the C library.
    """
    found: dict[str, str] = {}
    for name, function in FUNCTIONS.items():
        if name in _REJECTED:
            continue
        for dtype, letter, widths in ((FLOAT32, "f", (4, 8, 16)), (FLOAT64, "d", (2, 4, 8))):
            for lanes in widths:
                symbol = _register_sleef_symbol(name, letter, lanes)
                if symbol is not None:
                    found[vector_math.function_key(function.name, nodes.Type(dtype, lanes))] = symbol
    return MappingProxyType(found)


def builtin_code(text: str) -> bytes:
    """The object code of functions that every process needs, from the cache or assembled now.

    It has the large code model, because it may be loaded far from what it refers to.
    """
    store = current_store()
    facts = (text, llvm.get_default_triple(), llvm.llvm_version_info, llvmlite.__version__)
    name = (RUNTIME, sha256(repr(facts).encode()).hexdigest())
    known = store.read(name)
    if known is not None:
        return known
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, jit=True, codemodel="large")
    code: bytes = machine.emit_object(llvm.parse_assembly(text))
    store.write(name, code)
    return code


def provide_symbols(symbols: Iterable[str]) -> None:
    """Make vector functions known to the linker. Raises CannotLower if this process does not have one."""
    for symbol in symbols:
        address = _find_symbol_address(torch_library(), symbol)
        if address is None:
            raise CannotLower(f"torch's library has no {symbol}")
        llvm.add_symbol(symbol, address)


def _register_sleef_symbol(name: str, letter: str, lanes: int) -> str | None:
    for suffix in _SUFFIXES:
        symbol = "_".join(filter(None, ("Sleef", f"{name}{letter}{lanes}", suffix)))
        address = _find_symbol_address(torch_library(), symbol)
        if address is not None:
            llvm.add_symbol(symbol, address)
            return symbol
    return None
