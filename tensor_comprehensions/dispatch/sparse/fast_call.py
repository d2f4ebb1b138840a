"""The short way of a call like the one before: the same stored places and sizes, and one kernel with dense results.

What the long way has found out is compared, not found out again. Whatever differs is left to the long way.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...runtime.cpu.object_code import Executable
from ..outside_graphs import run_outside_graphs
from .sparse_tensor import SparseTensor

_is_transformed, _records = torch._C._are_functorch_transforms_active, torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_PARTS: dict[torch.layout, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
}
"""Layouts of torch whose parts are read here."""


class _Array:
    """An array of a pattern as it was."""

    __slots__ = ("address", "count", "dtype", "storage", "version")

    def __init__(self, x: Tensor) -> None:
        self.address, self.count, self.dtype, self.version = x.data_ptr(), x.numel(), x.dtype, x._version
        self.storage = weakref.ref(x.untyped_storage())

    def is_still(self, x: Tensor) -> bool:
        return (
            type(x) is Tensor
            and x.data_ptr() == self.address
            and x._version == self.version
            and x.numel() == self.count
            and x.dtype is self.dtype
            and x.is_contiguous()
            and self.storage() is not None
        )


class _Plain:
    """The type and the shape of a dense tensor, or of the values of a sparse one."""

    __slots__ = ("dtype", "shape", "slot")

    def __init__(self, x: Tensor, slot: int) -> None:
        self.dtype, self.shape, self.slot = x.dtype, x.shape, slot

    def fits(self, x: Any) -> bool:
        return (
            type(x) is Tensor
            and x.dtype is self.dtype
            and x.shape == self.shape
            and x.is_cpu
            and x.layout is torch.strided
            and x.is_contiguous()
            and not (x.requires_grad and _records())
            and not x.is_neg()
            and not x._is_zerotensor()
        )


class _Sparse:
    """A sparse operand as it was: an object of `kind`, whose layout or format is `form`."""

    __slots__ = ("count", "form", "levels", "parts", "shape", "values")

    def __init__(self, t: SparseTensor, given: Any, slot: int) -> None:
        self.parts = _PARTS[given.layout] if isinstance(given, Tensor) else None
        self.form = given.layout if isinstance(given, Tensor) else given.format
        self.shape = given.shape
        self.count = len(t.levels)
        self.levels = [
            (n, level[0] is not None, _Array(level[1] if level[0] is None else level[0]), _Array(level[1]))
            for n, level in enumerate(t.levels)
            if level is not None
        ]
        self.values = _Plain(t.values, slot)

    def values_of(self, x: Any) -> Tensor | None:
        """The values of an operand with the same pattern; None of any other."""
        if self.parts is None:
            if type(x) is not SparseTensor or x.format is not self.form or x.shape != self.shape:
                return None
            levels, values = x.levels, x.values
        else:
            if type(x) is not Tensor or x.layout is not self.form or x.shape != self.shape:
                return None
            if x.requires_grad and _records():
                return None
            pos, crd = self.parts
            levels, values = (None, (pos(x), crd(x))), x.values()
        if len(levels) != self.count:
            return None
        for n, has_positions, known_pos, known_crd in self.levels:
            level = levels[n]
            if level is None or not known_crd.is_still(level[1]):
                return None
            if has_positions and not (level[0] is not None and known_pos.is_still(level[0])):
                return None
        return values if self.values.fits(values) else None


class FastCall:
    """Takes calls like one that has succeeded.

    Args:
        executable: the only phase. addresses: what it ran on.
        operands: for each argument what was given, and its tensor with the place of its address, or of its values'.
        results: shape, type and place of the address of each result, all of them dense.
    """

    def __init__(
        self,
        executable: Executable,
        addresses: Sequence[int],
        operands: Sequence[tuple[Any, Tensor | SparseTensor, int]],
        results: Sequence[tuple[torch.Size, torch.dtype, int]],
    ) -> None:
        self._executable = executable
        self._count = len(operands)
        self._sparse: list[tuple[int, _Sparse]] = []
        self._dense: list[tuple[int, _Plain]] = []
        for n, (given, x, slot) in enumerate(operands):
            if isinstance(x, SparseTensor):
                self._sparse.append((n, _Sparse(x, given, slot)))
            else:
                self._dense.append((n, _Plain(x, slot)))
        self._results = [(partial(torch.empty, *(shape or ((),)), dtype=dtype), slot) for shape, dtype, slot in results]
        self._addresses = tuple(addresses)
        self._free: list[tuple[Any, int, Any]] = []
        self.held: tuple[Any, ...] = ()
        """Arrays whose addresses are among `addresses`."""

    @run_outside_graphs("calls with sparse operands run outside of graphs")
    def __call__(self, *values: Any) -> Any:
        """The result, or NotImplemented."""
        if len(values) != self._count or forward_ad._current_level >= 0 or _is_transformed() or _dispatch_modes():
            return NotImplemented
        try:
            frame = self._free.pop()
        except IndexError:
            frame = self._frame()
        slots, address, _ = frame
        kept = []
        for n, known in self._sparse:
            stored = known.values_of(values[n])
            if stored is None:
                return NotImplemented
            slots[known.values.slot] = stored.data_ptr()
            kept.append(stored)
        for n, plain in self._dense:
            x = values[n]
            if not plain.fits(x):
                return NotImplemented
            slots[plain.slot] = x.data_ptr()
        made = []
        for make, slot in self._results:
            result = make()
            slots[slot] = result.data_ptr()
            made.append(result)
        if self._executable.function(address):
            return NotImplemented
        self._free.append(frame)
        return made[0] if len(made) == 1 else tuple(made)

    def _frame(self) -> tuple[Any, int, Any]:
        """The arguments of one run: the array, its address, and where the kernel says what failed."""
        status = (ctypes.c_int64 * 2)()
        slots = (ctypes.c_void_p * (len(self._addresses) + 1))(*self._addresses, ctypes.addressof(status))
        return slots, ctypes.addressof(slots), status
