"""The parts of torch that the machine code of calls uses and that torch does not document: symbols, memory layout.

All of them are looked up or found by probing. If one is missing, calls take the slow path (`availability`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from ...core.single_flight import SingleFlightCache
from ..cpu import host_symbols

_SHIM = (
    "aoti_torch_get_sizes", "aoti_torch_get_strides", "aoti_torch_get_dtype", "aoti_torch_get_dim",
    "aoti_torch_get_data_ptr", "aoti_torch_empty_strided", "aoti_torch_delete_tensor_object",
    "aoti_torch_grad_mode_is_enabled", "aoti_torch_is_defined", "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv",
    "_ZN5torch3jit6tracer15getTracingStateEv",
)  # fmt: skip
_REGISTRATION = ("aoti_torch_library_init_impl", "torch_library_impl")
_C10 = (
    "_ZNK3c1010TensorImpl13requires_gradEv", "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE",
    "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb",
)  # fmt: skip
_SYSTEM = ("madvise",)
_BINDING = ("_Z16THPVariable_WrapON2at10TensorBaseE",)
_CXX = (
    "__cxa_allocate_exception", "__cxa_throw", "_ZTVN10__cxxabiv120__si_class_type_infoE", "_ZTISt9exception",
)  # fmt: skip
_PYTHON = (
    "PyGILState_Ensure", "PyGILState_Release", "Py_DecRef", "Py_IncRef", "PyTuple_GetItem", "PyTuple_New",
    "PyTuple_SetItem", "PyBytes_AsString", "PyErr_Clear", "PyErr_Occurred", "PyLong_AsLongLong", "PyFloat_AsDouble",
    "PyEval_SaveThread", "PyEval_RestoreThread", "PyLong_Type", "PyFloat_Type",
    "PyObject_CallFunction", "PyErr_Fetch", "PyErr_NormalizeException",
)  # fmt: skip


class UnknownLayout(Exception):
    """This torch or this system lacks something that the machine code of calls uses; the message says what."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where torch keeps the facts that the machine code reads directly.

    Attributes:
        keys: the offset of the dispatch keys in a C++ tensor, in bytes.
        tensor: the offset of the C++ tensor in a Python object, in bytes.
        plain, inference: the dispatch keys of ordinary tensors and of those made in inference mode.
    """

    keys: int
    tensor: int
    plain: int
    inference: int


def tensor_layout() -> TensorLayout:
    """The layout of this torch's tensors, whatever modes the caller is in. Raises UnknownLayout."""
    return _layouts.get("", probe_in_thread)


def symbol_addresses() -> dict[str, int]:
    """The addresses of the functions and objects that the machine code refers to. Raises UnknownLayout."""
    return _symbols.get("", _find_symbol_addresses)


_layouts: SingleFlightCache[str, TensorLayout] = SingleFlightCache(1)
_symbols: SingleFlightCache[str, dict[str, int]] = SingleFlightCache(1)


def probe_in_thread() -> TensorLayout:
    """The layout, found in another thread, where no mode of the caller replaces the tensors that probing makes."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_probe_tensor_layout).result()


def _probe_tensor_layout() -> TensorLayout:
    try:
        keys, tensor = _probe_field_offsets()
        with torch.inference_mode():
            inference = torch.empty(1)
        return TensorLayout(keys, tensor, _read_dispatch_keys(torch.empty(1)), _read_dispatch_keys(inference))
    except (AttributeError, OSError) as error:
        raise UnknownLayout(f"torch {torch.__version__} has no handles of tensors: {error}") from error


def _find_symbol_addresses() -> dict[str, int]:
    if sys.platform != "linux":  # the exceptions and the names of C++ are those of Linux
        raise UnknownLayout(f"the machine code of calls is for Linux, and this is {sys.platform}")
    libraries = (
        ("torch_cpu", host_symbols.torch_library, _SHIM + _REGISTRATION),
        ("c10", host_symbols.torch_library, _C10),
        ("torch_python", host_symbols.torch_library, _BINDING),
        ("libstdc++.so.6", ctypes.CDLL, _CXX),
        ("Python", lambda _: ctypes.pythonapi, _PYTHON),
        ("the C library", lambda _: ctypes.CDLL(None), _SYSTEM),
    )
    found: dict[str, int] = {}
    for name, load, symbols in libraries:
        try:
            library = load(name)
            for symbol in symbols:
                found[symbol] = ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
        except (OSError, ValueError) as error:
            raise UnknownLayout(f"{name} lacks what the machine code of calls needs: {error}") from error
    return found


def _probe_field_offsets() -> tuple[int, int]:
    """The offsets of a tensor's dispatch keys and of a Python object's tensor, found by probing.

    The words of an object are those of Python itself (reference count and type), then torch's.
    """
    plain = torch.empty(1)
    kinds = (plain, torch.empty(2, 3).double(), torch.empty(1, dtype=torch.complex64).conj().imag, plain.to_sparse())
    keys, tensors = set(range(24)), set(range(torch.Tensor.__basicsize__ // 8))
    for x in kinds:
        handle = handle_of(x)
        inside = ctypes.c_void_p.from_address(handle).value or 0
        in_tensor = [n for n in keys if _read_word(inside, n) == _read_dispatch_keys(x)]
        in_object = [n for n in tensors if _read_word(id(x), n) == inside]
        tensor_of(handle)
        if len(in_tensor) != 1 or len(in_object) != 1:
            raise UnknownLayout("the places of a tensor's dispatch keys are not found by probing")
        keys, tensors = set(in_tensor), set(in_object)
    return 8 * keys.pop(), 8 * tensors.pop()


def _read_word(address: int, n: int) -> int:
    return ctypes.c_uint64.from_address(address + 8 * n).value


def _read_dispatch_keys(x: torch.Tensor) -> int:
    keys: int = torch._C._dispatch_keys(x).raw_repr()
    return keys


# --- tensors as handles ------------------------------------------------------------------------------------------

_python = ctypes.pythonapi
_new_capsule = _python.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_content = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))


def tensor_of(handle: int) -> torch.Tensor:
    """The tensor of an owned handle, which is freed."""
    x: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_new_capsule(handle, None, None))
    _empty_handle(handle)
    return x


@cache
def _load_tensor_deleter() -> Callable[[int], int]:
    delete = host_symbols.torch_library().aoti_torch_delete_tensor_object
    delete.argtypes = [ctypes.c_void_p]
    return delete


def _empty_handle(handle: int) -> None:
    """Free a handle whose tensor was taken out: torch takes the tensor, but does not free the handle."""
    _load_tensor_deleter()(handle)


def handle_of(x: torch.Tensor) -> int:
    """A new handle of `x`, owned by the caller."""
    address: int = _content(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(x), None)
    return address
