"""Calls without Python once their kernels are known: machine code finds and runs the kernels of an operator.

A call cache has the kernels of earlier calls with the same kinds of arguments. Machine code compares the arguments,
finds the kernel that fits, allocates the outputs and runs it: as a builtin function for Python, and through `boxed` for
torch's dispatcher. Other calls go to the slow path.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import torch

from ...core import knobs
from ...core.single_flight import SingleFlightCache
from ..cpu import host_symbols
from . import guard_ir, launch_ir, pycall_ir
from .launch_ir import CALL_CACHE_WORDS, HEADER, PAUSED
from .torch_layout import symbol_addresses, tensor_layout

MOST = 64
"""The maximum number of kernels in a call cache, newest first; the slow path finds the others again."""
TENSOR, CONSTANT = 0, 1
"""Kinds of arguments: a tensor, and an integer that is part of the kernel. For others see `number_kind`."""
RECORDED = Ellipsis
"""The result for ordinary tensors if autograd has to record the call."""


def number_kind(dtype: int) -> int:
    """The kind of an argument that is a number, as a tensor or a Python float. dtype: torch's number of its type."""
    return dtype + 2


@dataclass(frozen=True, slots=True)
class TensorGuard:
    """What guards check of a tensor: torch's number of its dtype, sizes, strides in elements (`ANY`: not checked)."""

    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewOutput:
    """A new output. source: the argument whose elements are copied to it before the run; -1 for none."""

    guard: TensorGuard
    bytes: int
    source: int = -1


@dataclass(frozen=True, slots=True)
class MutatedArg:
    """An argument that is written to.

    place: its index. source: the argument whose elements are copied to it before the run; -1 for none.
    bytes: the bytes to copy from a source that is not the argument itself; -1 if they are not contiguous.
    """

    place: int
    source: int = -1
    bytes: int = -1


@dataclass(frozen=True, slots=True)
class CachedCall:
    """A kernel for calls of one kind.

    Attributes:
        entry: the address of its code. keep_alive: the object that owns it.
        arguments: the guards of the arguments; for numbers that are part of the kernel, their values.
        spans: the bytes that each of them spans; 0 for numbers.
        operands: the arguments that the kernel takes, in its order; new outputs and temporaries follow.
        outputs: new outputs. mutated: arguments that are written to.
        temporaries: the offset of each in one arena, and the bytes of the arena.
        parameters: the number of open sizes, for a kernel that takes any number of rows.
    """

    entry: int
    keep_alive: object
    arguments: tuple[TensorGuard | int, ...]
    spans: tuple[int, ...]
    operands: tuple[int, ...]
    outputs: tuple[NewOutput, ...]
    mutated: tuple[MutatedArg, ...]
    temporaries: tuple[tuple[int, ...], int]
    parameters: int = 0

    def words(self) -> list[int]:
        """The cached call as `launch_ir` reads it."""
        guards: list[int] = []
        for a in self.arguments:
            guards += [a] if isinstance(a, int) else [a.dtype, len(a.sizes), *a.sizes, *a.strides]
        made: list[int] = []
        for o in self.outputs:
            made += [o.guard.dtype, len(o.guard.sizes), o.source, o.bytes, *o.guard.sizes, *o.guard.strides]
        offsets, arena = self.temporaries
        written = [word for w in self.mutated for word in (w.place, w.source, w.bytes)]
        parts: tuple[Sequence[int], ...] = (guards, self.operands, made, offsets, written, self.spans)
        places, at = [], HEADER
        for part in parts:
            places.append(8 * at)
            at += len(part)
        counts = (len(self.operands), len(self.outputs), len(offsets), arena, len(self.mutated))
        return [self.entry, *counts, *places, self.parameters, at, *(word for part in parts for word in part)]


class CallCache:
    """The kernels of one operator for calls that pass the same kinds of arguments.

    Args:
        kinds: of the arguments. outputs: the number of new outputs of a call.
        words: existing memory of `CALL_CACHE_WORDS` words for it, if any.
    """

    def __init__(self, kinds: Sequence[int], outputs: int, words: Any = None) -> None:
        self.kinds = tuple(kinds)
        self._outputs = outputs
        self._words = (ctypes.c_uint64 * CALL_CACHE_WORDS)() if words is None else words
        self._kind_words = (ctypes.c_int64 * max(1, len(self.kinds)))(*self.kinds)
        self._calls: list[_CachedCallMemory] = []
        self._retired: list[Any] = []
        self._words[1] = ctypes.addressof(self._kind_words)
        self._publish()

    def __len__(self) -> int:
        return len(self._calls)

    def function(self) -> Callable[..., Any]:
        """A builtin that takes the arguments; returns the output, a tuple of outputs, or None if there are no new ones.

        It returns RECORDED if autograd has to record the call, whether a kernel fits or not. It returns NotImplemented
        if no kernel fits, torch may have to do still more, or the kernel fails; it never raises.
        """
        plan = struct.pack("=4Q", ctypes.addressof(self._words), len(self.kinds), self._outputs, not self._outputs)
        return _code.get("", FastPathCode).builtin((plan, self))

    def add(self, call: CachedCall) -> None:
        """Use the kernel of `call` for all calls that fit its guards."""
        placed = _CachedCallMemory(call)
        with _publishing.held:
            others = [x for x in self._calls if x.words[1:] != placed.words[1:]]
            kept = [placed, *others[: MOST - 1]]
            self._calls = sorted(kept, key=lambda x: x.is_range)  # kernels for exactly these sizes come first
            self._publish()

    def forget(self) -> None:
        """Remove all kernels."""
        with _publishing.held:
            self._calls = []
            self._publish()

    def _publish(self) -> None:
        """Publish a table of the present kernels. Earlier tables are kept as long as a call may be reading them."""
        calls = list(self._calls)
        table = (ctypes.c_uint64 * (1 + len(calls)))(len(calls), *(call.address for call in calls))
        self._retired.append((table, calls))
        self._words[0] = ctypes.addressof(table)
        if self._words[2] == 0:  # later readers see this table, or the previous one until the store is visible
            del self._retired[:-2]


class _CachedCallMemory:
    """The memory of the words of a cached call."""

    def __init__(self, call: CachedCall) -> None:
        self.words = tuple(call.words())
        self._memory = ctypes.create_string_buffer(struct.pack(f"={len(self.words)}q", *self.words))
        self._owner, self.is_range = call.keep_alive, call.parameters > 0
        self.address = ctypes.addressof(self._memory)


_paused = ctypes.c_int64(0)


class _Lock:
    """The lock for changes of call caches; a forked child gets a new one."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.held = threading.Lock()


_publishing = _Lock()


# --- code -------------------------------------------------------------------------------------------------------

_OBJECTS = {
    "tc_tensor": torch.Tensor,
    "tc_parameter": torch.nn.Parameter,
    "tc_none": None,
    "tc_not_implemented": NotImplemented,
    "tc_recorded": RECORDED,
}
"""The objects that the functions compare with and return."""


class _MethodDefinition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


_FASTCALL = 0x80


class FastPathCode:
    """The machine code that all calls share, and the builtin of call caches; lives as long as the process."""

    def __init__(self) -> None:
        layout = tensor_layout()
        host_symbols.link_host_symbols()
        for name, address in symbol_addresses().items():
            llvm.add_symbol(name, address)
        for name, thing in _OBJECTS.items():
            llvm.add_symbol(name, id(thing))
        llvm.add_symbol(PAUSED, ctypes.addressof(_paused))
        knobs.observe_knobs(_update_pause_flag)
        self.common = guard_ir.guard_assembly(layout.keys, layout.plain, layout.inference) + launch_ir.launch_assembly()
        type_offset = object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p)
        text = self.common + pycall_ir.pycall_assembly(type_offset, layout.tensor)
        self._engine = host_symbols.load_code(host_symbols.builtin_code(text))
        address = self._engine.get_function_address("tc_call")
        self._definition = _MethodDefinition(b"call", address, _FASTCALL, None)

    def builtin(self, kept: tuple[bytes, CallCache]) -> Callable[..., Any]:
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.POINTER(_MethodDefinition), ctypes.py_object, ctypes.c_void_p]
        function: Callable[..., Any] = new(ctypes.byref(self._definition), kept, None)
        return function


_code: SingleFlightCache[str, FastPathCode] = SingleFlightCache(1)


def fast_path_code() -> FastPathCode:
    """The machine code of calls, if `availability` says that they can be used."""
    return _code.get("", FastPathCode)


def resume_calls() -> None:
    """Let calls use kernels even if the knobs ask for interpretation: for a process that only tests them."""
    _paused.value = 0


def _update_pause_flag(now: knobs.Knobs) -> None:
    """Send all calls to the slow path if the knobs ask for interpretation."""
    _paused.value = now.interpret
