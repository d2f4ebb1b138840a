"""Kernels for any number of rows: the calls that they serve, and how they run.

Defs that cannot have such kernels get kernels for exact sizes; `TC_LOGS=cache` says why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from ..compiler.compiled_kernel import CompiledRangeKernel
from ..core.diagnostics import get_logger
from ..core.errors import TCError
from ..core.lazy_import import lazy_module
from ..core.memory_layout import contiguous_strides
from ..core.single_flight import SingleFlightCache
from ..options import CpuOptions
from ..target import CpuTarget
from ..tc_lang.bind import bind
from ..tc_lang.ir import BoundFunction, Function, Role
from ..tc_lang.ir import Tensor as BoundTensor
from ..tc_lang.rows import CannotGeneralize, Rows
from .call_steps import launch_error

if TYPE_CHECKING:
    from ..tc_lang import rows as row_analysis
else:
    row_analysis = lazy_module("tc_lang.rows")

LIMIT = 256
"""How many combinations of other sizes are remembered."""
Strides = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RangeKey:
    """The facts that a kernel for any number of rows depends on.

    Attributes:
        rows: its rows. fixed: the sizes that are numbers in it, and the scalars.
        strides: of each argument, and of each destination of a call: those of a row, and before them the distance
            between rows.
        typical: most rows of a block; 0 chooses.
    """

    rows: Rows
    fixed: tuple[tuple[str, int], ...]
    strides: Strides
    typical: int

    def make(self, function: Function, count: int) -> BoundFunction:
        """The def for this many rows."""
        sizes = self.rows.sizes_for(count, dict(self.fixed))
        scalars = {name: sizes.pop(name) for name in function.scalars}
        bound = bind(function, sizes, scalars)
        given = dict(
            zip((t.name for t in function.tensors if t.name != row_analysis.COUNT), self.strides, strict=False)
        )
        return replace(
            bound, tensors=tuple(self._lay_out(t, given.get(t.name, t.strides), count) for t in bound.tensors)
        )

    def _lay_out(self, t: BoundTensor, strides: tuple[int, ...], count: int) -> BoundTensor:
        """A tensor of the def for `count` rows, with the strides of one row in front of which is that of rows."""
        if t.name not in self.rows.tensors or len(strides) == len(t.shape):
            return replace(t, strides=strides)
        return replace(t, strides=(*(strides[0] * count,) * (self.rows.depth - 1), *strides))

    def make_block(self, function: Function, count: int) -> BoundFunction:
        """The def for a block of this many rows; if values depend on the number of all rows, that is an operand."""
        return self.make(row_analysis.add_row_count_operand(function, self.rows), count)


class RangeFinder:
    """Finds the range keys of calls that differ only in their numbers of rows."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._rows: SingleFlightCache[tuple[object, ...], Rows | None] = SingleFlightCache(LIMIT)

    def key_of(
        self, sizes: Mapping[str, int], dynamic: Mapping[str, int], tensors: Sequence[Tensor], strides: Strides
    ) -> RangeKey | None:
        """The key of a kernel for calls like one; None where there can be none but for exactly its sizes.

        Args:
            sizes: of the call, and its scalars. dynamic: the sizes that are not to be part of the kernel, with the
                values that many calls have.
            tensors: the arguments, and where to write. strides: theirs, as `canonical_strides` has them.
        """
        names = tuple(dynamic)
        fixed = tuple((n, v) for n, v in sizes.items() if n not in dynamic)
        rows = self._rows.get((names, fixed), lambda: self._find(names, sizes))
        if rows is None:
            return None
        found = [
            _row_strides(s, tuple(x.shape), rows.depth) if t.name in rows.tensors else s
            for t, x, s in zip(self._function.tensors, tensors, strides, strict=False)
        ]
        if None in found:
            return None
        fixed = tuple((n, v) for n, v in sizes.items() if n not in rows.sizes)
        typical = dynamic[rows.sizes[0]] if rows.depth == 1 else 0
        return RangeKey(rows, fixed, tuple(s for s in found if s is not None), typical)

    def _find(self, names: tuple[str, ...], sizes: Mapping[str, int]) -> Rows | None:
        """The rows of as many of the sizes as count rows together."""
        for candidate in row_analysis.list_row_size_candidates(self._function, names):
            rows = self._try(candidate, sizes)
            if rows is not None:
                break
        else:
            rows = None
        for name in names:
            if rows is None or name not in rows.sizes:
                self._try((name,), sizes, explain=True)
        return rows

    def _try(self, names: tuple[str, ...], sizes: Mapping[str, int], *, explain: bool = False) -> Rows | None:
        """The rows of these sizes; where they have none, the log may say why."""
        try:
            return row_analysis.find_rows(self._function, names, {n: v for n, v in sizes.items() if n not in names})
        except CannotGeneralize as reason:
            if explain:
                get_logger("cache").debug("%s: %s", self._function.name, reason)
            return None


def _row_strides(strides: tuple[int, ...], shape: tuple[int, ...], depth: int) -> tuple[int, ...] | None:
    """The strides of a row after the distance between rows; None if that is not constant."""
    for d in range(depth - 1):
        if shape[d] > 1 and strides[d] != shape[d + 1] * strides[d + 1] and 0 not in shape:
            return None
    return strides[depth - 1 :]


class RangeLauncher:
    """A loaded kernel for any number of rows, in place of a `CpuLauncher`."""

    def __init__(self, compiled: CompiledRangeKernel) -> None:
        self._compiled = compiled
        taken = [t for t in compiled.bound.tensors if t.role is not Role.TEMPORARY]
        self._first = next(n for n, t in enumerate(taken) if t.name in compiled.rows.tensors)

    def run(self, *tensors: Tensor) -> None:
        """Run on the inputs followed by the outputs, which must fit the operands and not overlap."""
        compiled = self._compiled
        rows = ctypes.c_int64(prod(tensors[self._first].shape[: compiled.rows.depth]))
        failed, value = compiled.executable([*(x.data_ptr() for x in tensors), ctypes.addressof(rows)])
        if failed:
            raise launch_error(compiled.bound.name, compiled.sites, failed, value)


def row_extent(bound: BoundFunction, name: str, depth: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a row of a tensor, and its strides in memory that is contiguous."""
    shape = bound.tensor(name).shape[depth:]
    return shape, contiguous_strides(shape)


def compile_range_kernel(
    function: Function, key: RangeKey, options: CpuOptions, target: CpuTarget
) -> CompiledRangeKernel | None:
    """The kernel of a key, from the cache or made now; None where there can be none."""
    from . import persistent_kernel_cache

    try:
        return persistent_kernel_cache.load_or_compile_range(function, key, options, target)
    except (CannotGeneralize, TCError) as reason:  # the call with its own sizes reports the mistake
        get_logger("cache").debug("%s: made for these sizes only: %s", function.name, reason)
        return None
