"""The kernels of one def, and the slow path of a call, which checks everything.

Invariant: each kernel is compiled once, even if several threads need it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from logging import DEBUG
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, strided

from ..compiler.compiled_kernel import CompiledCpuKernel
from ..core import knobs
from ..core.diagnostics import get_logger
from ..core.interrupts import deferred_interrupts
from ..core.single_flight import SingleFlightCache
from ..options import CpuOptions, SparseOptions
from ..runtime.cpu.host import host
from ..runtime.cpu.python_launch import CpuLauncher
from ..target import CpuTarget
from ..tc_lang.formats import Format
from ..tc_lang.ir import BoundFunction, Function
from . import persistent_kernel_cache
from .arguments import is_device_array
from .call_steps import (
    Arguments,
    ArgumentShapes,
    CallSignature,
    allocate_output,
    bind_sizes,
    canonical_strides,
    check_out,
    check_runs_here,
    convert_outputs,
    copy_initial_values,
    copy_to_out,
    evaluate_reference,
    normalize_arguments,
    shapes_of,
    sizes_of,
    with_strides,
)
from .dynamic_sizes import Dynamic, DynamicSizes
from .inline_cache import MISS, InlineCache, plain_launcher
from .range_kernels import RangeFinder, RangeKey, RangeLauncher, compile_range_kernel

if TYPE_CHECKING:
    from .cuda.gpu_kernels import GpuKernelTable
    from .sparse.sparse_kernels import SparseKernels

LIMIT = 256
"""Maximum number of kernels, and of bound functions, in memory; the most recently used stay."""


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """The options and the target of a kernel."""

    options: CpuOptions
    target: CpuTarget


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel and the way to run it."""

    compiled: CompiledCpuKernel
    launcher: CpuLauncher | RangeLauncher


def may_be_sparse(value: object) -> bool:
    """Whether an argument is a sparse tensor of any kind; this check imports nothing."""
    if isinstance(value, Tensor):
        return value.layout is not strided and not value.is_nested
    if isinstance(value, NEVER_SPARSE) or type(value) is dict:  # Dynamo cannot ask for the modules of these
        return False
    return any(_is_sparse_class(base) for base in type(value).__mro__)


def _is_sparse_class(kind: type) -> bool:
    module = kind.__module__
    return module.startswith("scipy.sparse") or (module == _SPARSE and kind.__name__ == "SparseTensor")


NEVER_SPARSE = (bool, int, float, complex, str, bytes, list, tuple, type(None), np.ndarray, np.generic)
"""Classes without sparse subclasses. SciPy's DOK arrays are dicts."""
_SPARSE = "tensor_comprehensions.dispatch.sparse.sparse_tensor"
OptionsProvider = Callable[[Function, BoundFunction, Arguments], CpuOptions | None]
"""Returns the options for a def and its arguments; None leaves the lowering to the cost models."""
SparseOptionsProvider = Callable[[Function, Any, Mapping[str, int]], SparseOptions | None]
"""As `OptionsProvider`, for calls with sparse operands: takes the def, the call and its sizes."""


class KernelTable:
    """The kernels of one def for all sizes, layouts and machines."""

    def __init__(
        self,
        function: Function,
        choose: OptionsProvider | None = None,
        formats: Mapping[str, Format] | None = None,
        sparse_options: SparseOptions | None = None,
        choose_sparse: SparseOptionsProvider | None = None,
        dynamic: Dynamic = None,
    ) -> None:
        self._sparse_options, self._choose_sparse = sparse_options, choose_sparse
        self.dynamic, self._ranges = DynamicSizes(function, dynamic), RangeFinder(function)
        self._range_routes: SingleFlightCache[Hashable, LoadedKernel | None] = SingleFlightCache(LIMIT)
        self._exact: set[Hashable] = set()
        self.function, self.formats = function, dict(formats or {})
        self._declares_sparse = function.is_sparse or any(not f.is_dense for f in self.formats.values())
        self.call_signature = CallSignature.of(function)
        self._bound: SingleFlightCache[ArgumentShapes, BoundFunction] = SingleFlightCache(LIMIT)
        self.routes: SingleFlightCache[Hashable, LoadedKernel] = SingleFlightCache(LIMIT)
        self._tuned: dict[Hashable, CpuOptions] = {}
        self._like_this = partial(KernelTable, function, choose, formats, sparse_options, choose_sparse)
        self._choose, self._chosen = choose, SingleFlightCache[Hashable, CpuOptions](LIMIT)
        self._last_key: tuple[object, ...] | None = None
        self.latest: LoadedKernel | None = None

    @cached_property
    def gpu(self) -> GpuKernelTable:
        """The kernels for GPUs; the modules they need are imported on first use."""
        with deferred_interrupts():
            from .cuda.gpu_kernels import GpuKernelTable
        return GpuKernelTable(self)

    @cached_property
    def sparse(self) -> SparseKernels:
        """The kernels for sparse operands; the modules they need are imported on first use."""
        from .sparse.sparse_kernels import SparseKernels

        return SparseKernels(self.call_signature, self.formats, self._sparse_options, self._choose_sparse)

    def with_dynamic(self, dynamic: Dynamic) -> KernelTable:
        """A kernel table for the same def with other dynamic sizes."""
        return self._like_this(dynamic)

    def has_sparse(self, values: Sequence[object]) -> bool:
        """Whether a tensor of the def, or an argument of a call, is sparse, so that `sparse` serves it."""
        return self._declares_sparse or any(may_be_sparse(v) for v in values)

    @staticmethod
    def any_cuda(values: Sequence[object]) -> bool:
        """Whether an argument of a call is a tensor or an array on a CUDA device, so that `gpu` serves it."""
        return any(v.is_cuda if isinstance(v, Tensor) else is_device_array(v) for v in values)

    def bind(self, sizes: ArgumentShapes) -> BoundFunction:
        """The def with these sizes. Raises ArgumentError or RangeError if they do not fit."""
        return self._bound.get(sizes, lambda: bind_sizes(self.call_signature, sizes))

    def find_or_make_kernel(
        self,
        sizes: ArgumentShapes,
        arguments: Arguments,
        out: Sequence[Tensor],
        machine: CompileConfig,
        *,
        is_call: bool = True,
    ) -> LoadedKernel:
        """The kernel for the layouts of `arguments`, and of the destinations `out` if there are any.

        is_call: whether a call needs it; then its sizes count toward those that change between calls.
        """
        strides = tuple(canonical_strides(x) for x in (*arguments.inputs, *out))
        options = self._options(sizes, arguments, machine)
        ranged = self._find_or_make_range_kernel(sizes, arguments, out, strides, options, machine, is_call)
        if ranged is not None:
            self.latest = ranged
            return ranged
        found = True

        def make() -> LoadedKernel:
            nonlocal found
            found = False
            bound = with_strides(self.bind(sizes), strides)
            compiled = persistent_kernel_cache.load_or_compile(self.function, bound, options, machine.target)
            return LoadedKernel(compiled, plain_launcher(compiled))

        key = (sizes, strides, options, machine.target)
        route = self.routes.get(key, make)
        if get_logger("cache").isEnabledFor(DEBUG):
            self._log_lookup(
                found, key, "loaded" if persistent_kernel_cache.was_cache_hit(route.compiled) else "compiled"
            )
        self._last_key, self.latest = key, route
        return route

    def _find_or_make_range_kernel(
        self,
        sizes: ArgumentShapes,
        arguments: Arguments,
        out: Sequence[Tensor],
        strides: tuple[tuple[int, ...], ...],
        options: CpuOptions,
        machine: CompileConfig,
        is_call: bool,
    ) -> LoadedKernel | None:
        """The kernel for any number of rows; None if this call needs a kernel for exact sizes."""
        is_exact = options.schedule is not None or options is not machine.options
        exact = (sizes, strides, options, machine.target)
        tensors = (*arguments.inputs, *out)
        key = self.find_range_key(sizes, tensors, strides, exact, has_exact_options=is_exact, is_call=is_call)
        if key is None:
            return None
        made = (key, options, machine.target)
        return self._range_routes.get(made, lambda: self._make_range(key, options, machine.target))

    def find_range_key(
        self,
        sizes: ArgumentShapes,
        tensors: Sequence[Tensor],
        strides: tuple[tuple[int, ...], ...],
        exact: Hashable,
        *,
        has_exact_options: bool,
        is_call: bool,
    ) -> RangeKey | None:
        """The key of the kernel for any number of rows that serves a call; None if it needs one for exact sizes.

        Args:
            tensors: the arguments, and where to write; `strides` are theirs.
            exact: the key of the exact kernel. A call that had one keeps it when its sizes become parameters.
            has_exact_options: whether its options were chosen for these sizes only.
            is_call: as for `find_or_make_kernel`.
        """
        if not self.dynamic.may_be_dynamic:
            return None
        if has_exact_options:
            get_logger("cache").debug("%s: its options are for exactly these sizes", self.function.name)
            return None
        values = sizes_of(self.call_signature, sizes)
        dynamic = self.dynamic.note(values, is_call=is_call)
        if not dynamic or exact in self._exact:
            if len(self._exact) < LIMIT:
                self._exact.add(exact)
            return None
        return self._ranges.key_of(values, dynamic, tensors, strides)

    def serves(self, key: RangeKey, sizes: ArgumentShapes, tensors: Sequence[Tensor]) -> bool:
        """Whether the kernel of a key for any number of rows serves a call with these arguments."""
        names = dict.fromkeys(key.dynamic_sizes, 0)
        strides = tuple(map(canonical_strides, tensors))
        found = self._ranges.key_of(sizes_of(self.call_signature, sizes), names, tensors, strides)
        return found is not None and replace(found, typical=key.typical) == key

    def has_several_axes(self, arguments: Arguments) -> bool:
        """Whether the range kernel for calls like this one has several axes.

        Such a kernel takes several times as long to compile as a kernel for exactly these sizes.
        """
        values = sizes_of(self.call_signature, shapes_of(self.function, arguments))
        dynamic = self.dynamic.note(values, is_call=False)
        strides = tuple(map(canonical_strides, arguments.inputs))
        key = self._ranges.key_of(values, dynamic, arguments.inputs, strides) if dynamic else None
        return key is not None and len(key.axes) > 1

    def _make_range(self, key: RangeKey, options: CpuOptions, target: CpuTarget) -> LoadedKernel | None:
        compiled = compile_range_kernel(self.function, key, options, target)
        if compiled is None:
            return None
        made = "loaded" if persistent_kernel_cache.was_cache_hit(compiled) else "compiled"
        names = " and ".join(compiled.dynamic_sizes)
        get_logger("cache").debug("%s: %s for all values of %s", self.function.name, made, names)
        return LoadedKernel(compiled, RangeLauncher(compiled))

    def loaded_kernels(self) -> list[CompiledCpuKernel]:
        """The kernels that calls can use, range kernels first."""
        ranges = [route.compiled for route in self._range_routes.values() if route is not None]
        return [*ranges, *(route.compiled for route in self.routes.values())]

    def _options(self, sizes: ArgumentShapes, arguments: Arguments, machine: CompileConfig) -> CpuOptions:
        """The options of a kernel: those that tuning found, else those of the options provider, else of `machine`."""
        key = (sizes, tuple(canonical_strides(x) for x in arguments.inputs), machine)
        known, choose = self._tuned.get(key), self._choose
        if known is None and choose is not None and machine == CompileConfig(CpuOptions(), host()):
            bound = self.bound_for(sizes, arguments)
            return self._chosen.get(key, lambda: choose(self.function, bound, arguments) or machine.options)
        return machine.options if known is None else known

    def _log_lookup(self, found: bool, key: tuple[object, ...], made: str) -> None:
        """Log whether a kernel was found; if not, how its key differs from that of the previous call."""
        parts, before = ("sizes", "strides", "options", "target"), self._last_key
        if found:
            what = "found"
        elif before is None:
            what = f"{made}, the first"
        else:
            new = [part for part, a, b in zip(parts, key, before, strict=True) if a != b]
            what = f"{made}, because of new {' and '.join(new)}" if new else f"{made} again: it was dropped"
        text = ", ".join(f"{part} {value}" for part, value in zip(parts[:-1], key, strict=False))
        get_logger("cache").debug("%s: %s: %s", self.function.name, what, text)

    def entry(self, arguments: Arguments, machine: CompileConfig) -> tuple[BoundFunction, CpuOptions]:
        """The bound def and the options that the kernel of a call is compiled from."""
        sizes = shapes_of(self.function, arguments)
        return self.bound_for(sizes, arguments), self._options(sizes, arguments, machine)

    def forget(self) -> None:
        """Drop all kernels, so that later calls look them up again."""
        self.routes, self._range_routes = SingleFlightCache(LIMIT), SingleFlightCache(LIMIT)

    def bound_for(self, sizes: ArgumentShapes, arguments: Arguments) -> BoundFunction:
        """The def for the layouts of `arguments`."""
        return with_strides(self.bind(sizes), tuple(canonical_strides(x) for x in arguments.inputs))

    def set_tuned_options(
        self, sizes: ArgumentShapes, arguments: Arguments, machine: CompileConfig, options: CpuOptions
    ) -> None:
        """Use `options` for later calls like this one on `machine`."""
        if len(self._tuned) >= LIMIT:
            self._tuned.clear()
        self._tuned[sizes, tuple(canonical_strides(x) for x in arguments.inputs), machine] = options

    def call(
        self,
        tensors: Sequence[object],
        out: object,
        initial: Mapping[str, object],
        machine: CompileConfig,
        inline_cache: InlineCache,
    ) -> Any:
        """The result of a call, which is then added to `inline_cache`. Raises ArgumentError or RangeError."""
        arguments = normalize_arguments(self.call_signature, tensors, initial)
        if arguments.convert is not None and out is None:
            values = dict(zip([p.name for p in self.call_signature.initial], arguments.initial, strict=True))
            known = inline_cache.call(arguments.inputs, None, values)
            if known is not MISS:
                return convert_outputs(known if isinstance(known, tuple) else (known,), arguments.convert)
        sizes = shapes_of(self.function, arguments)
        bound = self.bind(sizes)
        wanted = () if out is None else check_out(bound, arguments, out)
        if knobs.current_knobs().interpret:
            outputs = evaluate_reference(bound, arguments)
        else:
            outputs = self._compute(bound, sizes, arguments, wanted, machine, inline_cache)
        if out is None:
            return convert_outputs(outputs, arguments.convert)
        copy_to_out(outputs, wanted)
        return out

    def _compute(
        self,
        bound: BoundFunction,
        sizes: ArgumentShapes,
        arguments: Arguments,
        wanted: tuple[Tensor, ...],
        machine: CompileConfig,
        inline_cache: InlineCache,
    ) -> tuple[Tensor, ...]:
        """The outputs, written to `wanted`, or to fresh memory if a subscript check may fail."""
        if machine.target is not host():
            check_runs_here(bound.name, machine.target)
        route = self.find_or_make_kernel(sizes, arguments, wanted, machine)
        if wanted and route.compiled.sites:
            wanted, route = (), self.find_or_make_kernel(sizes, arguments, (), machine)
        outputs = wanted or tuple(allocate_output(bound, name) for name in bound.returns)
        copy_initial_values(bound, arguments, outputs)
        route.launcher.run(*arguments.inputs, *outputs)
        inline_cache.add(route.compiled, arguments, tuple(value for _, value in sizes.scalars), wanted)
        return outputs
