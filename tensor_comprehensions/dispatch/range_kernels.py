"""Range kernels, which serve any number of rows: find the one for a call, and run it.

Defs that cannot have range kernels get kernels for exact sizes; `TC_LOGS=cache` logs why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from ..compiler.compiled_kernel import CompiledRangeKernel
from ..compiler.row_strides import GIVEN, PACKED, classify_strides, open_strides
from ..core.diagnostics import get_logger
from ..core.errors import TCError
from ..core.lazy_import import lazy_module
from ..core.single_flight import SingleFlightCache
from ..options import CpuOptions
from ..target import CpuTarget
from ..tc_lang.binding.bind import bind
from ..tc_lang.dynamic_sizes.rows import CannotGeneralize, Rows
from ..tc_lang.dynamic_sizes.size_separation import separate_sizes
from ..tc_lang.ir import BoundFunction, Function, Role
from ..tc_lang.ir import Tensor as BoundTensor
from .call_steps import launch_error

if TYPE_CHECKING:
    from ..tc_lang.dynamic_sizes import row_axes
    from ..tc_lang.dynamic_sizes import rows as row_analysis
else:
    row_analysis, row_axes = lazy_module("tc_lang.dynamic_sizes.rows"), lazy_module("tc_lang.dynamic_sizes.row_axes")

LIMIT = 256
"""Maximum number of combinations of other sizes whose axes are cached."""
Strides = tuple[tuple[int, ...], ...]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class RangeKey:
    """The facts that a kernel for any number of rows depends on.

    Attributes:
        axes: its axes of rows, outermost first.
        fixed: (name, value) of the sizes compiled in as constants, and of the scalars.
        strides: the stride classes of each argument, and of each tensor in `out`, as `classify_strides` returns them.
        typical: most rows of a block; 0 chooses.
        separated: the sizes that are several axes.
    """

    axes: tuple[Rows, ...]
    fixed: tuple[tuple[str, int], ...]
    strides: Strides
    typical: int
    separated: tuple[str, ...] = ()

    @property
    def dynamic_sizes(self) -> tuple[str, ...]:
        """The sizes that are parameters."""
        return row_analysis.list_dynamic_sizes(self.axes)

    def number_sizes(self) -> list[tuple[Rows, tuple[int, ...]]]:
        """(axis, positions of its sizes in the list of dynamic sizes) for each axis."""
        names = self.dynamic_sizes
        return [(rows, tuple(map(names.index, rows.original_sizes))) for rows in self.axes]

    def make(self, function: Function, counts: Sequence[int]) -> BoundFunction:
        """Bind the def to `counts` rows along the axes."""
        function = separate_sizes(function, self.separated) if self.separated else function
        sizes = dict(self.fixed)
        for rows, count in zip(self.axes, counts, strict=True):
            sizes |= rows.sizes_for(count)
        scalars = {name: sizes.pop(name) for name in function.scalars}
        bound, given = bind(function, sizes, scalars), self._map_strides(function)
        return replace(bound, tensors=tuple(self._lay_out(t, given.get(t.name)) for t in bound.tensors))

    def _map_strides(self, function: Function) -> dict[str, tuple[int, ...]]:
        added = row_analysis.list_row_operands(self.axes)
        return dict(zip((t.name for t in function.tensors if t.name not in added), self.strides, strict=False))

    def _dynamic_dimensions(self, tensor: str) -> list[int]:
        """The dimensions of a tensor whose sizes are dynamic."""
        places = ((rows.place(tensor), rows.depth) for rows in self.axes)
        return [place + n for place, depth in places if place is not None for n in range(depth)]

    def _lay_out(self, t: BoundTensor, given: tuple[int, ...] | None) -> BoundTensor:
        """A tensor of the def with its strides; `open_strides` chooses numbers for dynamic ones."""
        classes = given if given is not None else self._own_classes(t)
        opened = [d for d, stride in enumerate(classes) if stride in (PACKED, GIVEN)]
        return replace(t, strides=open_strides(t.shape, classes, opened, self._dynamic_dimensions(t.name)))

    def _own_classes(self, t: BoundTensor) -> tuple[int, ...]:
        """The stride classes of an output or a temporary, which the caller does not provide."""
        if t.role is Role.TEMPORARY:
            return t.strides
        dynamic = self._dynamic_dimensions(t.name)
        return tuple(PACKED if any(e > d for e in dynamic) else stride for d, stride in enumerate(t.strides))

    def classes(self, function: Function) -> dict[str, tuple[int, ...]]:
        """The stride classes of the arguments and outputs that have rows, by name."""
        bound = self.make(function, (1,) * len(self.axes))
        given = self._map_strides(function)
        taken = [t for t in bound.tensors if t.role is not Role.TEMPORARY and self._dynamic_dimensions(t.name)]
        return {t.name: given[t.name] if t.name in given else self._own_classes(t) for t in taken}

    def facts(self, function: Function, row: BoundFunction) -> str:
        """What its rows are, for the key of a kernel in the cache. row: the def for a single row along each axis."""
        facts = [
            (numbers, a.sums, a.step, a.reach, *((a.place(t.name), t.name in a.windowed) for t in row.tensors))
            for a, numbers in self.number_sizes()
        ]
        strides = self.classes(function)
        return f"{facts} {[strides.get(t.name) for t in row.tensors]} typical {self.typical}"

    def make_block(self, function: Function, counts: Sequence[int]) -> BoundFunction:
        """Bind the def to a block of `counts` rows; row counts that values depend on become operands."""
        return self.make(row_analysis.add_row_operands(function, self.axes), counts)


class RangeFinder:
    """Finds the range keys of calls that differ only in their numbers of rows."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._axes: SingleFlightCache[tuple[object, ...], row_axes.FoundAxes] = SingleFlightCache(LIMIT)

    def key_of(
        self, sizes: Mapping[str, int], dynamic: Mapping[str, int], tensors: Sequence[Tensor], strides: Strides
    ) -> RangeKey | None:
        """The key of the range kernel for a call; None if only a kernel for exact sizes can serve it.

        Args:
            sizes: the sizes and scalars of the call.
            dynamic: the sizes that should not be constants of the kernel, with their typical values (0: unknown).
            tensors: the arguments, followed by the tensors in `out`.
            strides: the `canonical_strides` of `tensors`.
        """
        for merge in (True, False):
            known = self.find_axes(tuple(dynamic), sizes, merge=merge)
            found = self._classify(known.axes, tensors, strides)
            if known.axes and found is not None:
                break
        else:
            return None
        if not all(rows.counts_rows(sizes) for rows in known.axes):
            return None
        used = row_analysis.list_dynamic_sizes(known.axes)
        fixed = tuple((n, v) for n, v in sizes.items() if n not in used)
        typical = dynamic.get(used[0], 0) if len(used) == len(known.axes) == 1 else 0
        return RangeKey(known.axes, fixed, found, typical, known.separated)

    def _classify(self, axes: Sequence[Rows], tensors: Sequence[Tensor], strides: Strides) -> Strides | None:
        """The classes of all strides; None if those along one axis are not packed."""
        found = []
        for t, x, s in zip(self._function.tensors, tensors, strides, strict=False):
            places = [(place, rows.depth) for rows in axes if (place := rows.place(t.name)) is not None]
            dynamic = [place + n for place, depth in places for n in range(depth)]
            packed = [place + n for place, depth in places for n in range(depth - 1)]
            found.append(classify_strides(tuple(x.shape), s, dynamic, packed))
        return None if None in found else tuple(s for s in found if s is not None)

    def find_axes(self, names: tuple[str, ...], sizes: Mapping[str, int], *, merge: bool = True) -> row_axes.FoundAxes:
        """The axes that the sizes `names` count, as many as possible; other sizes have the values in `sizes`."""
        while names:
            fixed = tuple((n, v) for n, v in sizes.items() if n not in names)
            found = self._axes.get((names, fixed, merge), lambda n=names, f=fixed: self._find(n, dict(f), merge))  # type: ignore[misc]
            if not found.refused_sizes:
                return found
            names = tuple(name for name in names if name not in found.refused_sizes)
        return row_axes.FoundAxes()

    def _find(self, names: tuple[str, ...], fixed: Mapping[str, int], merge: bool) -> row_axes.FoundAxes:
        found = row_axes.find_axes(self._function, names, fixed, merge=merge)
        for reason in found.reasons:
            get_logger("cache").debug("%s: %s", self._function.name, reason)
        return found


class RangeLauncher:
    """Runs a range kernel; has the interface of `CpuLauncher`."""

    def __init__(self, compiled: CompiledRangeKernel) -> None:
        self._compiled = compiled
        taken = [t for t in compiled.bound.tensors if t.role is not Role.TEMPORARY]
        places = {n: (k, d) for k, t in enumerate(taken) for d, n in compiled.sized_dimensions(t.name).items()}
        self._sizes = [places[n] for n in range(len(compiled.dynamic_sizes))]
        self._strides = [
            (k, d)
            for k, t in enumerate(taken)
            for d, stride in enumerate(compiled.strides.get(t.name, ()))
            if stride == GIVEN
        ]
        self._type = ctypes.c_int64 * (len(self._sizes) + len(self._strides))

    def run(self, *tensors: Tensor) -> None:
        """Run on the inputs followed by the outputs, which must fit the kernel and not overlap. Raises RangeError."""
        compiled = self._compiled
        values = self._type(
            *(tensors[k].shape[d] for k, d in self._sizes), *(tensors[k].stride(d) for k, d in self._strides)
        )
        failed, value = compiled.executable([*(x.data_ptr() for x in tensors), ctypes.addressof(values)])
        if failed:
            raise launch_error(compiled.bound.name, compiled.sites, failed, value)


def compile_range_kernel(
    function: Function, key: RangeKey, options: CpuOptions, target: CpuTarget
) -> CompiledRangeKernel | None:
    """The range kernel of a key, from the cache or compiled now; None if the def cannot have one."""
    from . import persistent_kernel_cache

    return make_if_general(
        function, lambda: persistent_kernel_cache.load_or_compile_range(function, key, options, target)
    )


def make_if_general(function: Function, make: Callable[[], K]) -> K | None:
    """The kernel for any number of rows that `make` makes; None, with the reason in the log, if there is none."""
    try:
        return make()
    except (CannotGeneralize, TCError) as reason:  # the call with its own sizes reports the mistake
        get_logger("cache").debug("%s: made for these sizes only: %s", function.name, reason)
        return None
