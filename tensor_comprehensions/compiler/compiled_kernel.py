"""Compiled CPU kernels. This module does not import the compiler, so a cached kernel runs without it."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import ArgumentError, CannotLower, InternalError
from ..core.lazy_import import lazy_module
from ..options import CpuOptions
from ..target import CpuTarget

if TYPE_CHECKING:
    from ..loop_ir.nodes import CheckSite
    from ..runtime.cpu.object_code import Executable, ObjectCode
    from ..tc_lang.dynamic_sizes import rows as row_analysis
    from ..tc_lang.dynamic_sizes.rows import Rows
    from ..tc_lang.ir import BoundFunction
    from . import cpu_passes, range_passes
    from .cpu_passes import Pass
else:
    cpu_passes, range_passes = lazy_module("compiler.cpu_passes"), lazy_module("compiler.range_passes")
    row_analysis = lazy_module("tc_lang.dynamic_sizes.rows")


@dataclass(frozen=True, slots=True)
class PassContext:
    """The constants of a compilation. name: of the def, for messages."""

    options: CpuOptions
    target: CpuTarget
    name: str = ""


@dataclass(frozen=True, eq=False)
class CompiledBase(ABC):
    """A compiled def and the time of its passes: the part that kernels for all devices share.

    Attributes:
        bound: the def with its sizes.
        text: the source of the def.
        options, target: the compile options and the processor.
        seconds: (pass, seconds) in order; only the lookup, if the kernel came from the cache.
    """

    bound: BoundFunction
    text: str
    options: Any
    target: Any
    seconds: tuple[tuple[str, float], ...]

    @abstractmethod
    def passes(self) -> tuple[Pass, ...]:
        """The passes from the bound def to the kernel."""

    @staticmethod
    @abstractmethod
    def source_kinds() -> Mapping[str, Callable[[Any], str]]:
        """The kinds of text that `source` can print."""

    @property
    @abstractmethod
    def context(self) -> Any:
        """The context that every pass gets."""

    @property
    @abstractmethod
    def resources(self) -> dict[str, int]:
        """The resources of a call: kernels, bytes of temporaries, and so on."""

    @property
    def typical_bound(self) -> BoundFunction:
        """The def with the sizes, or those typical of a range, for which choices were made."""
        return self.bound

    @property
    def compile_seconds(self) -> float:
        return sum(seconds for _, seconds in self.seconds)

    def rerun_until(self, name: str) -> Any:
        """The result of the pass `name`. The passes run again unless this kernel was compiled or rerun last.

        Only the last kernel's results are kept, because users often print several kinds of text of one kernel in a row.
        """
        results = _find_results(self)
        if name not in results:
            results = self.rerun_all_until(name, self.context, results)
            keep_results(self, results)
        return results[name]

    def rerun_all_until(self, name: str, context: Any, made: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The results of the passes up to `name`, in order. made: results of the first passes, which do not rerun."""
        results: dict[str, Any] = dict(made or {})
        value: Any = next(reversed(results.values()), self.bound)
        for step in self.passes()[len(results) :]:
            value = results[step.name] = step.apply(value, context, results)
            if step.name == name:
                return results
        raise InternalError(f"there is no pass {name!r}")

    def source(self, kind: str) -> str:
        """The kernel as text of a kind.

        Raises:
            ArgumentError: `kind` is not in `source_kinds`, or cannot express this kernel.
        """
        if kind not in self.source_kinds():
            raise ArgumentError(f"a kernel has no source of kind {kind!r}", expected=", ".join(self.source_kinds()))
        try:
            return self.source_kinds()[kind](self)
        except CannotLower as refusal:
            raise ArgumentError(f"{self.bound.name} cannot be printed as {kind}: {refusal}") from refusal


_last: tuple[weakref.ref[CompiledBase], Mapping[str, Any]] | None = None
"""The last kernel that was compiled or rerun, and the results of its passes. Threads assign it atomically."""


def keep_results(kernel: CompiledBase, results: Mapping[str, Any]) -> None:
    """Keep the results of the passes of `kernel`, in their order, until it is deleted or another kernel is compiled."""
    global _last
    _last = (weakref.ref(kernel, _drop_results), results)


def _drop_results(kernel: weakref.ref[CompiledBase]) -> None:
    global _last
    if _last is not None and _last[0] is kernel:
        _last = None


def _find_results(kernel: CompiledBase) -> Mapping[str, Any]:
    last = _last
    return last[1] if last is not None and last[0]() is kernel else {}


@dataclass(frozen=True, eq=False)
class CompiledCpuKernel(CompiledBase):
    """A kernel for a CPU.

    Attributes:
        code: the machine code, as the cache stores it.
        executable: the loaded code, callable on raw addresses of arguments and temporaries.
        temporaries: bytes of each temporary that a launch must provide.
        sites: the check sites, indexed by the number that a launch returns if a check fails.
        kernels: how many kernels a launch runs.
    """

    options: CpuOptions
    target: CpuTarget
    code: ObjectCode
    executable: Executable
    temporaries: tuple[int, ...]
    sites: tuple[CheckSite, ...]
    kernels: int

    def passes(self) -> tuple[Pass, ...]:
        return cpu_passes.PASSES

    @staticmethod
    def source_kinds() -> Mapping[str, Callable[[CompiledCpuKernel], str]]:
        return cpu_passes.KINDS

    @property
    def context(self) -> PassContext:
        return cpu_passes.pass_context_of(self.bound, self.options, self.target)

    @property
    def resources(self) -> dict[str, int]:
        """Kernels that a call launches, bytes of temporaries that it allocates, bytes of machine code."""
        return {
            "kernels": self.kernels,
            "temporary_bytes": sum(self.temporaries),
            "code_bytes": len(self.code.data),
        }


@dataclass(frozen=True, slots=True)
class BlockSize:
    """A size of blocks.

    Attributes:
        rows, grain, overlap_from: as in `loop_ir.row_blocks.RowBlock`.
        is_optional: whether this size is used only if its block can end early and so replaces all smaller blocks.
        is_open: whether the kernel has loops over all rows instead of blocks; they were lowered for `rows` rows.
    """

    rows: int
    grain: int
    overlap_from: int
    is_optional: bool = False
    is_open: bool = False


@dataclass(frozen=True, eq=False)
class CompiledRangeKernel(CompiledCpuKernel):
    """A CPU kernel for any number of rows; callers allocate no temporaries for it.

    Attributes:
        bound: the def for a single row along each axis.
        axes: the axes, outermost first.
        sizes: the block sizes along each axis, largest first.
        make: returns the def for a number of rows along each axis.
        strides: the classes of the strides of each tensor with rows, as `row_strides.classify_strides` returns them.
    """

    axes: tuple[Rows, ...]
    sizes: tuple[tuple[BlockSize, ...], ...]
    make: Callable[[tuple[int, ...]], BoundFunction]
    strides: Mapping[str, tuple[int, ...]]

    @property
    def typical_bound(self) -> BoundFunction:
        return self.make(tuple(axis[0].rows for axis in self.sizes))

    @property
    def has_open_loops(self) -> bool:
        """Whether the kernel has loops over all rows instead of blocks."""
        return all(size.is_open for axis in self.sizes for size in axis)

    @property
    def dynamic_sizes(self) -> tuple[str, ...]:
        """The names of the dynamic sizes, in the order in which the kernel takes their values."""
        return row_analysis.list_dynamic_sizes(self.axes)

    def dynamic_dimensions(self, tensor: str) -> dict[int, int]:
        """The dynamic dimensions of a tensor: the position of the size in `dynamic_sizes`, by dimension."""
        names = self.dynamic_sizes
        found: dict[int, int] = {}
        for rows in self.axes:
            place = rows.place(tensor)
            if place is not None:
                found |= {place + n: names.index(name) for n, name in enumerate(rows.original_sizes)}
        return found

    def sized_dimensions(self, tensor: str) -> dict[int, int]:
        """As `dynamic_dimensions`, without dimensions whose extent is the number of windows instead of the size."""
        found = self.dynamic_dimensions(tensor).items()
        return {d: number for d, number in found if self.window_of(tensor, number) == (1, 1)}

    def window_of(self, tensor: str, number: int) -> tuple[int, int]:
        """The step and reach of the windows over a size, if a tensor has one element per window; else (1, 1)."""
        name = self.dynamic_sizes[number]
        found = (x for x in self.axes if name in x.original_sizes and x.windowed and tensor not in x.windowed)
        return next(((x.step, x.reach) for x in found), (1, 1))

    def passes(self) -> tuple[Pass, ...]:
        """The pass "join", which makes the module for any number of rows, and the passes after it."""
        join = cpu_passes.Pass("join", lambda bound, context: range_passes.rebuild_module(self))
        return (join, *cpu_passes.PASSES[-3:])

    @staticmethod
    def source_kinds() -> Mapping[str, Callable[[Any], str]]:
        return range_passes.KINDS

    @property
    def context(self) -> PassContext:
        return PassContext(self.options, self.target, self.bound.name)
