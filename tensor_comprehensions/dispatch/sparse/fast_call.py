"""The fast path of calls with sparse operands that have the patterns and sizes of an earlier call.

The results of such a call have known sizes, and its checks need not be repeated; other calls go to the slow path.
Patterns are compared here, by the memory and the version of their arrays. The machine code of dense calls compares
types, sizes, strides and autograd state, allocates the arrays of the results, and runs the first phase of the kernel.

Invariant: no kernel writes beyond a result, even if NumPy has changed a pattern, which no version shows. Arrays are as
large as operands of these lengths may need, or the counts of an earlier phase are compared first.
"""

from __future__ import annotations

import ctypes
import threading
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
"""The layouts of torch that the fast path supports, with the functions that return pos and crd."""


class _KnownArray:
    """An array of a known pattern: its memory and version."""

    __slots__ = ("address", "storage", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.address, self.version = x.data_ptr(), x._version
        self.storage = weakref.ref(x.untyped_storage())
        self.tensor = weakref.ref(x)

    def is_same_content(self, x: Tensor) -> bool:
        """Whether an array has the same memory and version. Its type and length are compared elsewhere."""
        if self.tensor() is x:  # of the same kind, and it keeps its memory alive
            return x._version == self.version and x.data_ptr() == self.address
        return (
            type(x) is Tensor
            and x.layout is torch.strided  # other layouts have no address
            and not x.is_inference()  # inference tensors have no version
            and x._version == self.version
            and x.data_ptr() == self.address
            and self.storage() is not None
        )


class _KnownSparse:
    """The pattern of a sparse operand: a `SparseTensor` of the format `form`, or torch's tensor of layout `form`."""

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
        """Append the arrays and the values of `x` to `found`. Returns False if `x` has another pattern."""
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
class ArraySlice:
    """The first `length` elements of the array with the index `number`; all of them if `length` is None."""

    number: int
    length: int | None = None

    def cut(self, arrays: Sequence[Tensor]) -> Tensor:
        x = arrays[self.number]
        return x if self.length is None else trim_array(x, self.length)


@dataclass(frozen=True, slots=True)
class KnownResult:
    """How to build a result from the arrays that a kernel takes and those that the call allocates.

    format: None for a dense result, which has no levels.
    """

    format: Format | None
    shape: tuple[int, ...]
    levels: tuple[tuple[ArraySlice | None, ArraySlice] | None, ...]
    values: ArraySlice

    def build(self, arrays: Sequence[Tensor]) -> Tensor | SparseTensor:
        values = self.values.cut(arrays)
        if self.format is None:
            return values
        levels = tuple(
            None if level is None else (None if level[0] is None else level[0].cut(arrays), level[1].cut(arrays))
            for level in self.levels
        )
        return SparseTensor.from_known(self.format, self.shape, levels, values)


@dataclass(frozen=True, slots=True)
class KnownCount:
    """A count of elements that a kernel stores at `totals[slot]`, to compare with `value` after the phase `phase`."""

    slot: int
    value: int
    phase: int


class _ThreadTotals(threading.local):
    """The array `totals` of a call, one per thread, since several threads may call at the same time."""

    def __init__(self, like: Tensor) -> None:
        self.array = torch.zeros_like(like)


class FastCall:
    """Serves calls like one that has succeeded.

    Args:
        executables: the phases, which take the same arrays.
        sizes, totals: the arrays that kernels take first; each thread has its own `totals`.
        operands: for each argument, the value that the caller passed, and the tensor that the kernel takes.
        made: examples of the arrays that the kernel takes last, which each call allocates.
        results: the results of the call. Arrays are numbered in the order `sizes`, `totals`, operands, `made`.
        counts: the counts that `totals` must have so that the results fit into `made`, and have the known lengths.
    """

    def __init__(
        self,
        executables: Sequence[Executable],
        sizes: Tensor,
        totals: Tensor,
        operands: Sequence[tuple[Any, Tensor | SparseTensor]],
        made: Sequence[Tensor],
        results: Sequence[KnownResult],
        counts: Sequence[KnownCount],
    ) -> None:
        self._count, self._sizes, self._totals = len(operands), sizes, _ThreadTotals(totals)
        self._counts = [[(c.slot, c.value) for c in counts if c.phase == n] for n in range(len(executables))]
        self.known = [_KnownSparse(x, given) if isinstance(x, SparseTensor) else None for given, x in operands]
        taken = [sizes, totals]
        for _, x in operands:
            taken += list_storage_arrays(x) if isinstance(x, SparseTensor) else [x]
        make = _make_native_call if availability.is_fast_path_available() else _PythonFastCall
        first, *others = executables
        self._serve: Callable[..., Any] = make(first, taken, made)
        self._continue = [make(x, [*taken, *made], ()) for x in others]
        in_order = [ArraySlice(len(taken) + n) for n in range(len(made))] == [r.values for r in results]
        is_plain = in_order and not others and all(r.format is None for r in results)
        self._results = None if is_plain else tuple(results)
        self._are_torch = all(isinstance(v, Tensor) for v, x in operands if isinstance(x, SparseTensor))

    @run_outside_graphs("calls with sparse operands run outside of graphs")
    def __call__(self, *values: Any) -> Any:
        """The result, or NotImplemented for other calls."""
        if len(values) != self._count:
            return NotImplemented
        parts = [self._sizes, self._totals.array]
        for known, x in zip(self.known, values, strict=True):
            if known is None:
                parts.append(x)
            elif not known.append_parts(x, parts):
                return NotImplemented
        made = self._serve(*parts)
        if made is RECORDED or made is NotImplemented:
            return NotImplemented
        return made if self._results is None else self._finish(self._results, parts, made)

    def _finish(self, results: Sequence[KnownResult], parts: list[Tensor], made: Tensor | tuple[Tensor, ...]) -> Any:
        """Run the other phases, and build the results; NotImplemented if a count differs."""
        arrays = [*parts, *made] if isinstance(made, tuple) else [*parts, made]
        totals = arrays[1]
        if not self._has_known_counts(0, totals):
            return NotImplemented
        for number, phase in enumerate(self._continue, 1):
            if phase(*arrays) is NotImplemented or not self._has_known_counts(number, totals):
                return NotImplemented
        found = [r.build(arrays) for r in results]
        if self._are_torch:
            found = [r.torch() if isinstance(r, SparseTensor) else r for r in found]
        return found[0] if len(found) == 1 else tuple(found)

    def _has_known_counts(self, phase: int, totals: Tensor) -> bool:
        """Whether the counts after a phase are the known ones."""
        counts = self._counts[phase]
        if not counts:
            return True
        found = totals.tolist()
        return all(found[slot] == value for slot, value in counts)


class FastCalls:
    """The fast paths for calls of one def: the last one used is tried first, others are found by patterns and sizes."""

    def __init__(self) -> None:
        self._latest: FastCall | None = None
        self._others: dict[tuple[object, ...], FastCall] = {}

    def add(self, call: FastCall, values: Sequence[Any]) -> None:
        """Use `call` for calls like the one with `values`."""
        key = _make_key(values)
        self._others.pop(key, None)
        drop_oldest(self._others, MOST_PATTERNS)
        self._others[key] = self._latest = call

    @run_outside_graphs("calls with sparse operands run outside of graphs")
    def __call__(self, *values: Any) -> Any:
        """The result, or NotImplemented if no fast path serves the call."""
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
"""Most fast paths of one def."""
SPARE = 2
"""An array with more than so many times the elements of a result is copied to the exact size."""
SPARE_BYTES = 4096
"""Arrays of up to so many bytes are not copied, since a copy would take a large part of the time of a call."""


def drop_oldest(kept: dict[Any, Any], most: int) -> None:
    """Drop the oldest entries of a dict until it has less than `most`; other threads may change it meanwhile."""
    while len(kept) >= most:
        kept.pop(next(iter([*kept])), None)


def trim_array(x: Tensor, count: int) -> Tensor:
    """The first `count` elements of an array, copied if a view would waste most of the memory."""
    return x[:count] if len(x) <= SPARE * count or x.nbytes <= SPARE_BYTES else x[:count].clone()


def list_storage_arrays(t: SparseTensor) -> list[Tensor]:
    """The arrays of the levels, followed by the values."""
    return [x for level in t.levels if level is not None for x in level if x is not None] + [t.values]


def _make_native_call(executable: Executable, taken: Sequence[Tensor], made: Sequence[Tensor]) -> Callable[..., Any]:
    """A function in machine code that runs a kernel on tensors like `taken`; allocates and returns ones like `made`."""
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
    """As `_make_native_call` in Python, for systems without machine code for calls."""

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
