"""The fast path of a call like the last one: the same stored places and sizes, and one kernel with dense results.

The results of the slow path's checks are compared, not computed again; other calls go to the slow path. Patterns are
compared here, by the memory and the version of their arrays. The machine code of dense calls compares types, sizes,
strides and autograd state, and runs the kernel.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...runtime.cpu.object_code import Executable
from ...runtime.fastpath import availability, call_cache
from ...runtime.fastpath.call_cache import RECORDED, CachedCall, CallCache, NewOutput, TensorGuard
from ..graph_breaks import run_outside_graphs
from ..inline_cache import dtype_number
from .sparse_tensor import SparseTensor

_is_transformed, _records = torch._C._are_functorch_transforms_active, torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_PARTS: dict[torch.layout, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
}
"""Layouts of torch whose parts are read here."""


class _KnownArray:
    """An array of a known pattern: its memory and version."""

    __slots__ = ("address", "storage", "version")

    def __init__(self, x: Tensor) -> None:
        self.address, self.version = x.data_ptr(), x._version
        self.storage = weakref.ref(x.untyped_storage())

    def is_same_content(self, x: Tensor) -> bool:
        """Whether an array has the same memory with the same content; its type and length are compared elsewhere."""
        return (
            type(x) is Tensor
            and x.layout is torch.strided  # others have no address
            and x._version == self.version
            and x.data_ptr() == self.address
            and self.storage() is not None
        )


class _KnownSparse:
    """A known sparse operand: an object of one class, whose layout or format is `form`."""

    __slots__ = ("count", "form", "levels", "parts", "shape")

    def __init__(self, t: SparseTensor, given: Any) -> None:
        self.parts = _PARTS[given.layout] if isinstance(given, Tensor) else None
        self.form = given.layout if isinstance(given, Tensor) else given.format
        self.shape = given.shape
        self.count = len(t.levels)
        self.levels = [
            (n, None if level[0] is None else _KnownArray(level[0]), _KnownArray(level[1]))
            for n, level in enumerate(t.levels)
            if level is not None
        ]

    def append_parts(self, x: Any, found: list[Tensor]) -> bool:
        """Append the arrays and the values of an operand with the same pattern; whether it has that."""
        if self.parts is None:
            if type(x) is not SparseTensor or x.format is not self.form or x.shape != self.shape:
                return False
            levels = x.levels
            if len(levels) != self.count:
                return False
            for n, known_pos, known_crd in self.levels:
                level = levels[n]
                if level is None:
                    return False
                pos, crd = level
                if known_pos is not None:
                    if pos is None or not known_pos.is_same_content(pos):
                        return False
                    found.append(pos)
                if not known_crd.is_same_content(crd):
                    return False
                found.append(crd)
            found.append(x.values)
            return True
        if type(x) is not Tensor or x.layout is not self.form or x.shape != self.shape:
            return False
        if x.requires_grad and _records():
            return False
        ((_, known_pos, known_crd),) = self.levels
        pos, crd = self.parts[0](x), self.parts[1](x)
        assert known_pos is not None
        if not (known_pos.is_same_content(pos) and known_crd.is_same_content(crd)):
            return False
        found += (pos, crd, x.values())
        return True


class FastCall:
    """Accepts calls like one that has succeeded.

    Args:
        executable: the only phase.
        constants: the arrays that kernels take first.
        operands: for each argument the given value, and the tensor that the kernel takes.
        results: those of the call, all of them dense.
    """

    def __init__(
        self,
        executable: Executable,
        constants: Sequence[Tensor],
        operands: Sequence[tuple[Any, Tensor | SparseTensor]],
        results: Sequence[Tensor],
    ) -> None:
        self._count, self._constants = len(operands), tuple(constants)
        self._known = [_KnownSparse(x, given) if isinstance(x, SparseTensor) else None for given, x in operands]
        taken = [*constants]
        for _, x in operands:
            taken += _list_storage_arrays(x) if isinstance(x, SparseTensor) else [x]
        self._serve: Callable[..., Any]
        if availability.is_fast_path_available():
            self._serve = _make_native_call(executable, taken, results)
        else:
            self._serve = _PythonFastCall(executable, taken, results)

    @run_outside_graphs("calls with sparse operands run outside of graphs")
    def __call__(self, *values: Any) -> Any:
        """The result, or NotImplemented."""
        if len(values) != self._count:
            return NotImplemented
        parts = [*self._constants]
        for known, x in zip(self._known, values, strict=True):
            if known is None:
                parts.append(x)
            elif not known.append_parts(x, parts):
                return NotImplemented
        result = self._serve(*parts)
        return NotImplemented if result is RECORDED else result


def _list_storage_arrays(t: SparseTensor) -> list[Tensor]:
    return [x for level in t.levels if level is not None for x in level if x is not None] + [t.values]


def _make_native_call(executable: Executable, taken: Sequence[Tensor], results: Sequence[Tensor]) -> Callable[..., Any]:
    """A function in machine code that runs the kernel on tensors like `taken` and makes results like `results`."""
    guards = tuple(map(_make_tensor_guard, taken))
    outputs = tuple(NewOutput(_make_tensor_guard(x), x.nbytes) for x in results)
    spans = tuple(x.nbytes for x in taken)
    cell = CallCache([call_cache.TENSOR] * len(taken), len(results))
    order = tuple(range(len(taken)))
    cell.add(CachedCall(executable.address, executable, guards, spans, order, outputs, (), ((), 0)))
    return cell.function()


def _make_tensor_guard(x: Tensor) -> TensorGuard:
    return TensorGuard(dtype_number(x.dtype), tuple(x.shape), tuple(x.stride()))


class _PythonFastCall:
    """The same in Python, for systems without machine code for calls."""

    def __init__(self, executable: Executable, taken: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self._executable = executable
        self._taken = [(x.dtype, x.shape) for x in taken]
        self._results = [(tuple(x.shape), x.dtype) for x in results]

    def __call__(self, *parts: Any) -> Any:
        if forward_ad._current_level >= 0 or _is_transformed() or _dispatch_modes():
            return NotImplemented
        if not all(map(_is_plain, parts)) or [(x.dtype, x.shape) for x in parts] != self._taken:
            return NotImplemented
        made = [torch.empty(shape, dtype=dtype) for shape, dtype in self._results]
        status = (ctypes.c_int64 * 2)()
        addresses = [x.data_ptr() for x in (*parts, *made)]
        slots = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, ctypes.addressof(status))
        if self._executable.function(ctypes.addressof(slots)):
            return NotImplemented
        return made[0] if len(made) == 1 else tuple(made)


def _is_plain(x: Any) -> bool:
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.layout is torch.strided
        and x.is_contiguous()
        and not (x.requires_grad and _records())
        and not x.is_neg()
        and not x._is_zerotensor()
    )
