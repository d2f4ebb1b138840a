"""Kernels of torch's dispatcher, made in this process: calls that never see Python once a kernel for them is known.

The dispatcher calls them through its stable C ABI with a stack of arguments: owned handles of tensors, and numbers.
Guards find the kernel; what does not fit goes to Python, and an exception from there goes on to the caller as it is.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import torch

from ..once import OncePerKey
from . import process
from .boxed_code import CALLBACK, CELL_WORDS, PAUSED, THUNKS, assembly, cells_symbol

Slow = Callable[..., Any]
TRIED = ("2.13.",)
"""Versions of torch that this was tried on: how they keep exceptions and the keys of tensors is nowhere promised."""
MOST = 64
"""How many kernels a cell looks through, newest first; what is dropped is found again by the slow way."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A tensor as guards see it: torch's number of its dtype, sizes, strides in elements (`ANY` does not matter)."""

    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fresh:
    """A new output. source: the argument whose elements it starts with; -1 for none."""

    facts: Facts
    bytes: int
    source: int = -1


ANY = -(1 << 63)


_paused = ctypes.c_int64(0)


def pause(everywhere: bool) -> None:
    """Whether calls go to Python from now on, whatever kernels there are."""
    _paused.value = everywhere


class _Lock:
    """One lock for all that publishes lanes, which a forked child finds open."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.held = threading.Lock()


_publishing = _Lock()


def available() -> bool:
    """Can kernels be made for the dispatcher of this torch, on this system?"""
    return torch.__version__.startswith(TRIED) and _code.get("", _attempt) is not None


class Cell:
    """The kernels of one operator, and its two functions for the dispatcher: what computes, and what may record.

    Args:
        integers: of each argument whether it is a number.
        compute, record: what to call with the arguments where no kernel fits, and where torch may have to record.
    """

    def __init__(self, integers: Sequence[bool], compute: Slow, record: Slow) -> None:
        code = _code.get("", _attempt)
        assert code is not None
        self._code, self.integers = code, tuple(integers)
        self._slow = (compute, record)
        self._kinds = (ctypes.c_int64 * max(1, len(self.integers)))(*self.integers)
        self._lanes: list[_Lane] = []
        self._retired: list[Any] = []
        self.index, self._words = code.cell(self)
        self._words[1] = ctypes.addressof(self._kinds)
        self._publish()

    def register(self, namespace: str, name: str) -> None:
        """Make the functions the kernels of an operator for the CPU."""
        for key, function in ((b"CPU", "compute"), (b"AutogradCPU", "record")):
            self._code.register(namespace, name, key, self._code.thunk(function, self.index))

    def add(
        self,
        entry: int,
        arguments: Sequence[Facts | int],
        outputs: Sequence[Fresh],
        inputs: int,
        temporaries: tuple[Sequence[int], int],
        keep: object,
    ) -> None:
        """Use a kernel for calls like one.

        Args:
            entry: the address of a kernel's code. keep: what keeps it there.
            arguments: what the arguments must be. inputs: how many of them, from the first, the kernel takes.
            temporaries: where each starts in one arena, and the arena's bytes.
        """
        lane = _Lane(_packed(entry, arguments, outputs, inputs, temporaries), keep)
        with _publishing.held:
            others = [x for x in self._lanes if x.words[1:] != lane.words[1:]]
            self._lanes = [lane, *others[: MOST - 1]]
            self._publish()

    def forget(self) -> None:
        """Use no kernel any more."""
        with _publishing.held:
            self._lanes = []
            self._publish()

    def _publish(self) -> None:
        """Let calls see the lanes of now. Those of before are kept for as long as a call may be looking at them."""
        lanes = list(self._lanes)
        table = (ctypes.c_uint64 * (1 + len(lanes)))(len(lanes), *(lane.address for lane in lanes))
        self._retired.append((table, lanes))
        self._words[0] = ctypes.addressof(table)
        if self._words[2] == 0:  # whoever comes now sees this table, or the one before it where stores are late
            del self._retired[:-2]

    def slow(self, layer: int, stack: int, count: int, outputs: int) -> None:
        """Call Python with the arguments on the stack, which are owned, and leave the results there."""
        words = (ctypes.c_int64 * max(count, outputs)).from_address(stack)
        values = [w if number else _tensor(w) for w, number in zip(words, self.integers, strict=False)]
        found = self._slow[layer](*values)
        for n, x in enumerate(found if isinstance(found, tuple) else (found,)):
            words[n] = _handle(x)


class _Lane:
    """The words that describe a kernel, and what they point at."""

    def __init__(self, words: Sequence[int], keep: object) -> None:
        self.words = tuple(words)
        self._memory = ctypes.create_string_buffer(struct.pack(f"={len(words)}q", *words))
        self._keep = keep
        self.address = ctypes.addressof(self._memory)


def _packed(
    entry: int,
    arguments: Sequence[Facts | int],
    outputs: Sequence[Fresh],
    inputs: int,
    temporaries: tuple[Sequence[int], int],
) -> list[int]:
    """A lane as `boxed_code` reads it: eight words, the guards, the outputs, the offsets of temporaries."""
    guards: list[int] = []
    for a in arguments:
        guards += [a] if isinstance(a, int) else [a.dtype, len(a.sizes), *a.sizes, *a.strides]
    made: list[int] = []
    for o in outputs:
        made += [o.facts.dtype, len(o.facts.sizes), o.source, o.bytes, *o.facts.sizes, *o.facts.strides]
    offsets, arena = temporaries
    start = 8
    header = [entry, inputs, len(outputs), len(offsets), arena, 8 * start, 8 * (start + len(guards))]
    return [*header, 8 * (start + len(guards) + len(made)), *guards, *made, *offsets]


# --- tensors as handles -----------------------------------------------------------------------------------------

_python = ctypes.pythonapi
_new_capsule = _python.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer = _python.PyCapsule_GetPointer


def _tensor(handle: int) -> torch.Tensor:
    """The tensor of an owned handle, which it takes over."""
    x: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_new_capsule(handle, None, None))
    return x


def _handle(x: torch.Tensor) -> int:
    """A new handle, which whoever gets it owns."""
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
    address: int = get(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(x), None)
    return address


# --- code -------------------------------------------------------------------------------------------------------

_SHIM = (
    "aoti_torch_get_sizes", "aoti_torch_get_strides", "aoti_torch_get_dtype", "aoti_torch_get_dim",
    "aoti_torch_get_data_ptr", "aoti_torch_empty_strided", "aoti_torch_delete_tensor_object",
    "aoti_torch_grad_mode_is_enabled", "aoti_torch_is_defined",
)  # fmt: skip
_C10 = (
    "_ZNK3c1010TensorImpl13requires_gradEv", "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE",
    "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb",
)  # fmt: skip
_CXX = (
    "__cxa_allocate_exception", "__cxa_throw", "_ZTVN10__cxxabiv120__si_class_type_infoE", "_ZTISt9exception",
)  # fmt: skip
_PYTHON = ("PyGILState_Ensure", "PyGILState_Release", "Py_DecRef")


_code: OncePerKey[str, _Code | None] = OncePerKey(1)


def _attempt() -> _Code | None:
    if sys.platform != "linux":  # the exceptions and the names of c10 are those of Linux
        return None
    place = _place_of_keys()
    found = _symbols()
    return None if place is None or found is None else _Code(found, *place)


def _symbols() -> dict[str, int] | None:
    libraries = (
        (process.torch_library(), _SHIM), (process.torch_library("c10"), _C10), (ctypes.CDLL("libstdc++.so.6"), _CXX),
        (_python, _PYTHON),
    )  # fmt: skip
    found: dict[str, int] = {}
    for library, names in libraries:
        for name in names:
            try:
                found[name] = ctypes.addressof(ctypes.c_char.in_dll(library, name))
            except ValueError:
                return None
    return found


def _place_of_keys() -> tuple[int, int] | None:
    """Where in a tensor torch keeps its dispatch keys, found by looking, and the keys of an ordinary tensor."""
    plain = torch.empty(1)
    kinds = (plain, torch.empty(2, 3).double(), torch.empty(1, dtype=torch.complex64).conj().imag, plain.to_sparse())
    places = [set(_words_equal_to_keys(x)) for x in kinds]
    common = set.intersection(*places)
    if len(common) != 1 or any(len(p) != 1 for p in places):
        return None
    return 8 * common.pop(), torch._C._dispatch_keys(plain).raw_repr()


def _words_equal_to_keys(x: torch.Tensor) -> list[int]:
    handle = _handle(x)
    inside = ctypes.c_void_p.from_address(handle).value
    words = (ctypes.c_uint64 * 24).from_address(inside or 0)
    keys = torch._C._dispatch_keys(x).raw_repr()
    found = [n for n, w in enumerate(words) if w == keys]
    _tensor(handle)
    return found


class _Code:
    """The machine code, the cells that its functions look at, and the way back to Python; as old as the process."""

    def __init__(self, symbols: dict[str, int], keys_offset: int, plain_keys: int) -> None:
        process.link()
        for name, address in symbols.items():
            llvm.add_symbol(name, address)
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 5, ctypes.c_void_p)(self._python)
        llvm.add_symbol(CALLBACK, ctypes.cast(self._callback, ctypes.c_void_p).value or 0)
        llvm.add_symbol(PAUSED, ctypes.addressof(_paused))
        self._offset, self._keys = keys_offset, plain_keys
        self._count = itertools.count()
        self._pools: OncePerKey[int, _Pool] = OncePerKey(1 << 62)
        self._cells: dict[int, Cell] = {}
        self._libraries: OncePerKey[tuple[str, bytes], ctypes.c_void_p] = OncePerKey(1 << 62)

    def cell(self, owner: Cell) -> tuple[int, Any]:
        """A number for a cell, and its words: table of lanes, kinds of arguments, calls that look at the table."""
        index = next(self._count)
        self._cells[index] = owner
        return index, self._pool(index).words(index % THUNKS)

    def thunk(self, function: str, index: int) -> int:
        """The address of the function of a cell."""
        address: int = self._pool(index).engine.get_function_address(f"tc_{function}_{index % THUNKS}")
        return address

    def _pool(self, index: int) -> _Pool:
        number = index // THUNKS
        return self._pools.get(number, lambda: _Pool(number, self._offset, self._keys))

    def register(self, namespace: str, name: str, key: bytes, function: int) -> None:
        lib = process.torch_library()
        library = self._libraries.get((namespace, key), lambda: _library(namespace.encode(), key))
        major, minor = (int(x) for x in torch.__version__.split(".")[:2])
        register = lib.torch_library_impl
        register.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64]
        if register(library, name.encode(), function, major << 56 | minor << 48):
            raise RuntimeError(f"torch does not take a kernel of {namespace}::{name}")

    def _python(self, index: int, layer: int, stack: int, count: int, outputs: int, error: int) -> int:
        """Go on in Python; 1, and the parts of the exception, if it raises."""
        try:
            self._cells[index].slow(layer, stack, count, outputs)
        except BaseException as raised:
            parts = (type(raised), raised, raised.__traceback__)
            words = (ctypes.c_void_p * 3).from_address(error)
            for n, part in enumerate(parts):
                if part is not None:
                    _python.Py_IncRef(ctypes.py_object(part))
                words[n] = None if part is None else id(part)
            return 1
        return 0


def _library(namespace: bytes, key: bytes) -> ctypes.c_void_p:
    make = process.torch_library().aoti_torch_library_init_impl
    make.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_void_p]
    library = ctypes.c_void_p()
    if make(namespace, key, b"tensor_comprehensions", 1, ctypes.byref(library)):
        raise RuntimeError("torch makes no library")
    return library


class _Pool:
    """Functions for the dispatcher that are not yet, or are, those of a cell: making them one by one takes longer."""

    def __init__(self, number: int, keys_offset: int, plain_keys: int) -> None:
        self._memory = (ctypes.c_uint64 * (CELL_WORDS * THUNKS))()
        first = number * THUNKS
        llvm.add_symbol(cells_symbol(first), ctypes.addressof(self._memory))
        self.engine = process.loaded(process.builtin_code(assembly(first, keys_offset, plain_keys)))

    def words(self, slot: int) -> Any:
        return (ctypes.c_uint64 * CELL_WORDS).from_address(ctypes.addressof(self._memory) + 8 * CELL_WORDS * slot)
