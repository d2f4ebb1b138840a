"""The fast path of a call like an earlier one: the same stored places and sizes, so results of known sizes.

The results of the slow path's checks are compared, not computed again; other calls go to the slow path. Patterns are
compared here, by the memory and the version of their arrays. The machine code of dense calls compares types, sizes,
strides and autograd state, makes the arrays of the results, and runs the phases of the kernel.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...runtime.cpu.object_code import Executable
from ...runtime.fastpath import availability, call_cache
from ...runtime.fastpath.call_cache import RECORDED, CachedCall, CallCache, NewOutput, TensorGuard
from ...tc_lang.formats import Format
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


@dataclass(frozen=True, slots=True)
class KnownResult:
    """How a result is made of the arrays that a kernel takes and of those that the call makes, by their numbers.

    format: None of a dense result, which has no levels.
    """

    format: Format | None
    shape: tuple[int, ...]
    levels: tuple[tuple[int | None, int] | None, ...]
    values: int

    def build(self, arrays: Sequence[Tensor]) -> Tensor | SparseTensor:
        if self.format is None:
            return arrays[self.values]
        levels = tuple(
            None if level is None else (None if level[0] is None else arrays[level[0]], arrays[level[1]])
            for level in self.levels
        )
        return SparseTensor.from_known(self.format, self.shape, levels, arrays[self.values])


class FastCall:
    """Accepts calls like one that has succeeded.

    Args:
        executables: the phases, which take the same arrays.
        constants: the arrays that kernels take first.
        operands: for each argument the given value, and the tensor that the kernel takes.
        made: arrays like those that the kernel takes last, which each call makes.
        results: those of the call. The numbers of `made` follow those of `constants` and the arrays of the operands.
    """

    def __init__(
        self,
        executables: Sequence[Executable],
        constants: Sequence[Tensor],
        operands: Sequence[tuple[Any, Tensor | SparseTensor]],
        made: Sequence[Tensor],
        results: Sequence[KnownResult],
    ) -> None:
        self._count, self._constants = len(operands), tuple(constants)
        self.known = [_KnownSparse(x, given) if isinstance(x, SparseTensor) else None for given, x in operands]
        taken = [*constants]
        for _, x in operands:
            taken += list_storage_arrays(x) if isinstance(x, SparseTensor) else [x]
        make = _make_native_call if availability.is_fast_path_available() else _PythonFastCall
        first, *others = executables
        self._serve: Callable[..., Any] = make(first, taken, made)
        self._continue = [make(x, [*taken, *made], ()) for x in others]
        in_order = [len(taken) + n for n in range(len(made))] == [r.values for r in results]
        self._results = None if in_order and all(r.format is None for r in results) else tuple(results)
        self._are_torch = all(isinstance(v, Tensor) for v, x in operands if isinstance(x, SparseTensor))

    @run_outside_graphs("calls with sparse operands run outside of graphs")
    def __call__(self, *values: Any) -> Any:
        """The result, or NotImplemented."""
        if len(values) != self._count:
            return NotImplemented
        parts = [*self._constants]
        for known, x in zip(self.known, values, strict=True):
            if known is None:
                parts.append(x)
            elif not known.append_parts(x, parts):
                return NotImplemented
        made = self._serve(*parts)
        if made is RECORDED or made is NotImplemented:
            return NotImplemented
        if self._results is None and not self._continue:
            return made
        return self._finish(parts, made)

    def _finish(self, parts: list[Tensor], made: Tensor | tuple[Tensor, ...]) -> Any:
        """Run the other phases, and build the results."""
        arrays = [*parts, *made] if isinstance(made, tuple) else [*parts, made]
        for phase in self._continue:
            if phase(*arrays) is NotImplemented:
                return NotImplemented
        if self._results is None:
            return made
        found = [r.build(arrays) for r in self._results]
        if self._are_torch:
            found = [r.torch() if isinstance(r, SparseTensor) else r for r in found]
        return found[0] if len(found) == 1 else tuple(found)


class FastCalls:
    """The fast paths for calls of one def, the latest one first; others by patterns and sizes."""

    def __init__(self) -> None:
        self._latest: FastCall | None = None
        self._others: dict[tuple[object, ...], FastCall] = {}

    def add(self, call: FastCall, values: Sequence[Any]) -> None:
        """Use `call` for calls like that with `values`."""
        key = _make_key(values)
        self._others.pop(key, None)
        while len(self._others) >= MOST_PATTERNS:
            del self._others[next(iter(self._others))]
        self._others[key] = self._latest = call

    @run_outside_graphs("calls with sparse operands run outside of graphs")
    def __call__(self, *values: Any) -> Any:
        """The result, or NotImplemented."""
        latest = self._latest
        if latest is None:
            return NotImplemented
        result = latest(*values)
        if result is not NotImplemented or len(self._others) < 2:
            return result
        other = self._others.get(_make_key(values))
        if other is None or other is latest:
            return NotImplemented
        self._latest = other
        return other(*values)


def _make_key(values: Sequence[Any]) -> tuple[object, ...]:
    """The addresses of the patterns of sparse operands, and the shapes of dense ones."""
    return tuple(map(_make_operand_key, values))


def _make_operand_key(x: Any) -> object:
    if type(x) is SparseTensor:
        crd = next((level[1] for level in x.levels if level is not None), x.values)
        return crd.data_ptr() if type(crd) is Tensor and crd.layout is torch.strided else None
    if type(x) is not Tensor:
        return type(x)
    return (x.layout, _PARTS[x.layout][1](x).data_ptr()) if x.layout in _PARTS else x.shape


MOST_PATTERNS = 64
"""Calls of one def that have fast paths."""


def list_storage_arrays(t: SparseTensor) -> list[Tensor]:
    """The arrays of the levels, and the values."""
    return [x for level in t.levels if level is not None for x in level if x is not None] + [t.values]


def _make_native_call(executable: Executable, taken: Sequence[Tensor], made: Sequence[Tensor]) -> Callable[..., Any]:
    """A function in machine code that runs a kernel on tensors like `taken`, and makes and returns some like `made`."""
    guards = tuple(map(_make_tensor_guard, taken))
    outputs = tuple(NewOutput(_make_tensor_guard(x), x.nbytes) for x in made)
    spans = tuple(x.nbytes for x in taken)
    cache = CallCache([call_cache.TENSOR] * len(taken), len(made))
    order = tuple(range(len(taken)))
    cache.add(CachedCall(executable.address, executable, guards, spans, order, outputs, (), ((), 0)))
    return cache.function()


def _make_tensor_guard(x: Tensor) -> TensorGuard:
    return TensorGuard(dtype_number(x.dtype), tuple(x.shape), tuple(x.stride()))


class _PythonFastCall:
    """The same in Python, for systems without machine code for calls."""

    def __init__(self, executable: Executable, taken: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        self._executable = executable
        self._taken = [(x.dtype, x.shape) for x in taken]
        self._made = [(tuple(x.shape), x.dtype) for x in made]

    def __call__(self, *parts: Any) -> Any:
        if forward_ad._current_level >= 0 or _is_transformed() or _dispatch_modes():
            return NotImplemented
        if not all(map(_is_plain, parts)) or [(x.dtype, x.shape) for x in parts] != self._taken:
            return NotImplemented
        made = [torch.empty(shape, dtype=dtype) for shape, dtype in self._made]
        status = (ctypes.c_int64 * 2)()
        addresses = [x.data_ptr() for x in (*parts, *made)]
        slots = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, ctypes.addressof(status))
        if self._executable.function(ctypes.addressof(slots)):
            return NotImplemented
        return made[0] if len(made) == 1 else tuple(made) or None


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
