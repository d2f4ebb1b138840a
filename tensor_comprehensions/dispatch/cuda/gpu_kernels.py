"""Operators on GPUs: kernels for tensors on a CUDA device, and for devices that are not present.

Invariant: an invalid call raises before any launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compiler.gpu_passes import CompiledGpuKernel
from ...compiler.gpu_range_passes import CompiledGpuRangeKernel
from ...core import knobs
from ...core.error_boundary import only_tc_errors
from ...core.errors import ArgumentError
from ...core.single_flight import SingleFlightCache
from ...loop_ir.nodes import MOST_EXTENT
from ...options import GpuOptions, MappingOptions, TileOptions, check_gpu_options
from ...runtime.cuda import launch
from ...runtime.cuda.launch import Launches
from ...runtime.emulate import emulator
from ...runtime.emulate.emulator import Emulated
from ...target import GpuTarget
from ...tc_lang.ir import BoundFunction
from ..arguments import with_article
from ..call_steps import (
    Arguments,
    ArgumentShapes,
    CallSignature,
    canonical_strides,
    convert_outputs,
    copy_initial_values,
    copy_to_out,
    evaluate_reference,
    launch_error,
    normalize_arguments,
    shapes_of,
    sizes_of,
    with_strides,
)
from ..compiled_callable import CompiledCallable
from ..inline_cache import MISS
from ..kernel_table import KernelTable
from ..range_kernels import RangeKey, make_if_general
from ..signatures import format_signature
from . import gpu_kernel_cache
from .device_arguments import (
    check_out_on_device,
    device_of,
    empty_output,
    gather_on_device,
    import_arrays,
    is_aligned,
    is_any_on_device,
    resolve_gpu_target,
    shapes_without_sync,
)
from .gpu_inline_cache import GpuInlineCache
from .mixed_plan import (
    MixedPlan,
    Plan,
    Step,
    bind_steps,
    has_bounds_checks,
    kernels_of,
    launcher_of,
    load_launches,
    make_plan,
    needs_alignment,
    run_emulated,
)

if TYPE_CHECKING:
    from ...explain.kernel_report import Report

LIMIT = 256


@dataclass(frozen=True, slots=True)
class PlanForSizes:
    """The plan of a call. key: that of its kernel, if it is for any number of rows."""

    plan: Plan
    key: RangeKey | None = None


@dataclass(slots=True, eq=False)
class GpuKernelTable:
    """The kernels of one def for GPUs.

    Attributes:
        kernels: the table of the def, which binds sizes.
        compiled: the plans, by sizes, strides, options, target and alignment.
        loaded: the kernels loaded on devices of this machine.
        inline_caches: the fast paths of calls, by device and options.
    """

    kernels: KernelTable
    compiled: SingleFlightCache[Hashable, Plan] = field(default_factory=lambda: SingleFlightCache(LIMIT))
    ranges: SingleFlightCache[Hashable, CompiledGpuRangeKernel | None] = field(
        default_factory=lambda: SingleFlightCache(LIMIT)
    )
    loaded: SingleFlightCache[Hashable, Launches] = field(default_factory=lambda: SingleFlightCache(LIMIT))
    inline_caches: dict[Hashable, GpuInlineCache] = field(default_factory=dict)
    _last: GpuInlineCache | None = None
    _tuned: dict[Hashable, GpuOptions] = field(default_factory=dict)

    @property
    def call_signature(self) -> CallSignature:
        return self.kernels.call_signature

    def plan(
        self,
        sizes: ArgumentShapes,
        strides: tuple[Any, ...],
        options: GpuOptions | None,
        wanted: GpuTarget,
        *,
        aligned: bool = True,
    ) -> Plan:
        """The plan for these sizes and strides.

        options: None uses those that a search found for calls like this one, else those of the cost model.
        aligned: whether the addresses of all tensors are multiples of `ALIGNMENT` bytes.
        """
        if options is None and self._tuned:
            options = self._tuned.get((sizes, strides[: len(self.call_signature.parameters)], wanted))
        if options is not None:
            check_gpu_options(options, wanted)

        def make_plan_for(aligned: bool) -> Plan:
            def compile_piece(piece: BoundFunction, own: GpuOptions | None) -> CompiledGpuKernel:
                return gpu_kernel_cache.load_or_compile_gpu(
                    self.call_signature.function, piece, own, wanted, aligned=aligned
                )

            return make_plan(with_strides(self.kernels.bind(sizes), strides), options, wanted, compile_piece)

        found = self.compiled.get((sizes, strides, options, wanted, True), lambda: make_plan_for(True))
        if aligned or not needs_alignment(found):
            return found
        return self.compiled.get((sizes, strides, options, wanted, False), lambda: make_plan_for(False))

    def find_or_make_plan(
        self,
        sizes: ArgumentShapes,
        tensors: Sequence[Tensor],
        options: GpuOptions | None,
        wanted: GpuTarget,
        *,
        aligned: bool = True,
        is_call: bool = True,
    ) -> PlanForSizes:
        """The plan of a call, for any number of rows where its sizes are parameters.

        tensors: the inputs, and the destinations if the call has some. The other arguments are as for `plan`.
        """
        strides = tuple(map(canonical_strides, tensors))
        ranged = self._find_or_make_range(sizes, tensors, strides, options, wanted, aligned, is_call)
        return ranged or PlanForSizes(self.plan(sizes, strides, options, wanted, aligned=aligned))

    def _find_or_make_range(
        self,
        sizes: ArgumentShapes,
        tensors: Sequence[Tensor],
        strides: tuple[Any, ...],
        options: GpuOptions | None,
        wanted: GpuTarget,
        aligned: bool,
        is_call: bool,
    ) -> PlanForSizes | None:
        """The kernel for any number of rows; None if this call needs a kernel for exact sizes."""
        own = (sizes, strides[: len(self.call_signature.parameters)], wanted)
        is_exact = (options is None and own in self._tuned) or getattr(options, "match_library_calls", False)
        inputs = len(self.call_signature.parameters)
        if all(x.is_contiguous() for x in tensors[inputs:]):  # then outputs are as the kernel allocates them
            tensors, strides = tensors[:inputs], strides[:inputs]
        exact = (sizes, strides, options, wanted)
        key = self.kernels.find_range_key(sizes, tensors, strides, exact, has_exact_options=is_exact, is_call=is_call)
        if key is None or not self._fits_parameters(key, sizes, tensors):
            return None
        if options is not None:
            check_gpu_options(options, wanted)
        found = self.range_plan(key, options, wanted, aligned=aligned)
        return None if found is None else PlanForSizes(found, key)

    def _fits_parameters(self, key: RangeKey, sizes: ArgumentShapes, tensors: Sequence[Tensor]) -> bool:
        """Whether all extents of a call are at most `MOST_EXTENT`, also those of several sizes together."""
        values = sizes_of(self.call_signature, sizes)
        rows = (prod(values[name] for name in axis.original_sizes) for axis in key.axes)
        return max((*rows, *(n for x in tensors for n in x.shape))) <= MOST_EXTENT

    def range_plan(
        self, key: RangeKey, options: GpuOptions | None, wanted: GpuTarget, *, aligned: bool
    ) -> CompiledGpuRangeKernel | None:
        """The kernel of a key for any number of rows, for tensors at multiples of `ALIGNMENT` or anywhere.

        None if the def cannot have one.
        """
        function = self.call_signature.function

        def make(aligned: bool) -> CompiledGpuRangeKernel | None:
            def load_or_compile() -> CompiledGpuRangeKernel:
                return gpu_kernel_cache.load_or_compile_gpu_range(function, key, options, wanted, aligned=aligned)

            return make_if_general(function, load_or_compile)

        found = self.ranges.get((key, options, wanted, True), lambda: make(True))
        if found is None or aligned or not needs_alignment(found):
            return found
        return self.ranges.get((key, options, wanted, False), lambda: make(False))

    def compile(
        self,
        tensors: Sequence[object],
        initial: Mapping[str, object],
        options: GpuOptions | None,
        wanted: GpuTarget | str | None,
    ) -> GpuKernel:
        """The kernel for these tensors, which are on a CUDA device, or CPU tensors that only supply shapes."""
        if options is not None and not isinstance(options, MappingOptions | TileOptions):
            raise ArgumentError(
                f"options is {with_article(type(options).__name__)}", expected="MappingOptions(...) or TileOptions(...)"
            )
        if is_any_on_device((*tensors, *initial.values())):
            tensors, initial, _ = import_arrays(self.call_signature, tensors, initial)
            device = device_of((*tensors, *initial.values()))
            arguments = gather_on_device(self.call_signature, tensors, initial, device)
            machine = launch.device_target(device.index) if wanted is None else resolve_gpu_target(wanted)
        else:
            arguments, machine = normalize_arguments(self.call_signature, tensors, initial), resolve_gpu_target(wanted)
        sizes = shapes_without_sync(self.call_signature, arguments, tensors)
        plan = self.find_or_make_plan(sizes, arguments.inputs, options, machine, is_call=False)
        return GpuKernel(self, plan, options)

    def call(
        self,
        tensors: Sequence[object],
        out: object,
        initial: Mapping[str, object],
        options: GpuOptions | None,
    ) -> Any:
        """The result of a call on tensors of one CUDA device, which is then added to the inline cache.

        Raises:
            ArgumentError: an argument is invalid.
            RangeError: a subscript leaves its tensor.
            DeviceError: the device is out of memory or has failed.
        """
        tensors, initial, convert = import_arrays(self.call_signature, tensors, initial)
        device = device_of((*tensors, *initial.values()))
        inline_cache = self._last = self._inline_cache_of(device, options)
        if (result := inline_cache.call(tensors, out, initial)) is not MISS:
            return result if convert is None or out is not None else convert_outputs(_as_tuple(result), convert)
        arguments = gather_on_device(self.call_signature, tensors, initial, device)
        sizes = shapes_without_sync(self.call_signature, arguments, tensors)
        bound = self.kernels.bind(sizes)
        wanted = () if out is None else check_out_on_device(bound, arguments, out, device)
        if knobs.current_knobs().interpret:
            outputs = _run_reference(bound, arguments, device)
        else:
            outputs = self._compute(bound, sizes, arguments, wanted, options, device)
        if out is None:
            return convert_outputs(outputs, convert)
        copy_to_out(outputs, wanted)
        return out

    def direct_function(self) -> Callable[..., Any] | None:
        """The last plan as a function, which returns NotImplemented for calls that it does not accept; or None."""
        return None if self._last is None else self._last.direct_function()

    def set_tuned_options(
        self, sizes: ArgumentShapes, strides: tuple[Any, ...], wanted: GpuTarget, options: GpuOptions
    ) -> None:
        """Use `options` for later calls with inputs like these on the target `wanted`."""
        if len(self._tuned) >= LIMIT:
            self._tuned.clear()
        self._tuned[sizes, strides, wanted] = options
        self.inline_caches.clear()

    def _inline_cache_of(self, device: torch.device, options: GpuOptions | None) -> GpuInlineCache:
        found = self.inline_caches.get((device, options))
        if found is None:
            found = self.inline_caches[device, options] = GpuInlineCache(self.call_signature, device)
        return found

    def _compute(
        self,
        bound: BoundFunction,
        sizes: ArgumentShapes,
        arguments: Arguments,
        wanted: tuple[Tensor, ...],
        options: GpuOptions | None,
        device: torch.device,
    ) -> tuple[Tensor, ...]:
        """The outputs, written to `wanted`, or to fresh memory if a subscript check may fail."""
        target = launch.device_target(device.index)

        def plan_for(outputs: tuple[Tensor, ...]) -> PlanForSizes:
            everything = (*arguments.inputs, *outputs)
            return self.find_or_make_plan(sizes, everything, options, target, aligned=all(map(is_aligned, everything)))

        def make_launches(kernel: CompiledGpuKernel) -> Launches:
            return self.loaded.get((kernel, device.index), lambda: load_launches(kernel, device))

        outputs = wanted or tuple(empty_output(bound, name, device) for name in bound.returns)
        plan = plan_for(outputs)
        if wanted and has_bounds_checks(plan.plan):
            wanted, outputs = (), tuple(empty_output(bound, name, device) for name in bound.returns)
            plan = plan_for(outputs)
        accepted = (*arguments.inputs, *arguments.initial, *wanted)
        values = self.parameter_values(plan.plan, sizes, (*arguments.inputs, *outputs))
        launcher = launcher_of(plan.plan, device, accepted, make_launches, bound, values)
        copy_initial_values(bound, arguments, outputs)
        launcher.run(*arguments.inputs, *outputs)
        if all(kernel.aligned for kernel in kernels_of(plan.plan)):  # else aligned tensors have a better kernel
            special = tuple(value for _, value in sizes.scalars)
            self._inline_cache_of(device, options).add(launcher, arguments, special, wanted)
        return outputs

    def parameter_values(self, plan: Plan, sizes: ArgumentShapes, tensors: Sequence[Tensor]) -> dict[str, int] | None:
        """The values of the parameters of a plan in a call; None if it is for exact sizes.

        tensors: the inputs followed by the outputs.
        """
        if not isinstance(plan, CompiledGpuRangeKernel):
            return None
        return plan.parameter_values(sizes_of(self.call_signature, sizes), [x.stride() for x in tensors])


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _run_reference(bound: BoundFunction, arguments: Arguments, device: torch.device) -> tuple[Tensor, ...]:
    """The outputs by the reference evaluator, which runs on the CPU."""
    here = Arguments(tuple(x.cpu() for x in arguments.inputs), tuple(x.cpu() for x in arguments.initial), None)
    return tuple(x.to(device) for x in evaluate_reference(bound, here))


class GpuKernel(CompiledCallable[Plan]):
    """A kernel of an operator for a GPU.

    Call it like the operator, with tensors on such a device; `emulate` runs it on the CPU.

    Attributes:
        compiled: the compiled kernel with its texts and metadata; a `MixedPlan` if it has library calls.
        compile_seconds: the seconds of mapping and printing.
        resources: launched kernels; bytes of temporaries and of shared memory; threads of a block; if NVRTC is
            installed, also registers of a thread, and bytes of local memory and of spills.
    """

    def __init__(self, kernels: GpuKernelTable, plan: PlanForSizes, options: GpuOptions | None) -> None:
        self._kernels, self._options, self._key = kernels, options, plan.key
        compiled = plan.plan
        self._emulated: SingleFlightCache[CompiledGpuKernel, Emulated] = SingleFlightCache(
            2 * max(1, len(kernels_of(compiled)))
        )
        self.compiled = compiled

    def __repr__(self) -> str:
        name = format_signature(self._kernels.call_signature.function)
        return f"<kernel of {name} for {self.compiled.target.name}, made in {self.compile_seconds * 1e3:.0f} ms>"

    @only_tc_errors
    def __call__(self, /, *tensors: object, out: object = None, **initial: object) -> Any:
        if not is_any_on_device((*tensors, *initial.values())):
            raise ArgumentError(
                f"this kernel of {self._kernels.call_signature.function.name} is for {self.compiled.target.name}, "
                "and its arguments are on the CPU",
                suggestion="pass tensors on a CUDA device, or call kernel.emulate(...)",
            )
        return self._kernels.call(tensors, out, initial, self._options)

    @only_tc_errors
    def source(self, kind: str = "cuda") -> str:
        """The kernel as text of a kind: "tc", "ranges", "schedule", "tiles", "loops", "cuda", "sass" or "opencl".

        "tiles" exists only if products use tensor cores. NVIDIA's disassembler prints "sass", the machine code. Raises
        ArgumentError for other kinds.
        """
        return self.compiled.source(kind)

    @only_tc_errors
    def explain(self) -> Report:
        """Explain the kernel's code: `print` the report for the short form, `save("x.html")` it for the page.

        Raises ArgumentError if the kernel has library calls.
        """
        from ...explain.gpu import explain_gpu_kernel

        if isinstance(self.compiled, MixedPlan):
            raise ArgumentError(
                "a def with calls of a library is not explained as a whole", suggestion="leave out match_library_calls"
            )
        return explain_gpu_kernel(self.compiled)

    @only_tc_errors
    def emulate(self, /, *tensors: object, **initial: object) -> Any:
        """Run the CUDA text on CPU tensors, compiled by the host's C++ compiler.

        This is slow, and checks every memory access. It reports races, reads of uninitialized memory, accesses out of
        bounds, and barriers that some threads of a block do not reach. torch computes library calls.

        Raises:
            ArgumentError: no C++ compiler is installed, or the tensors have other sizes, types or strides.
            InternalError: the kernel would fail on a device.
            RangeError: a subscript leaves its tensor.
        """
        plan, call_signature = self.compiled, self._kernels.call_signature
        arguments = normalize_arguments(call_signature, tensors, initial)
        sizes = shapes_of(call_signature.function, arguments)
        bound, strides = self._kernels.kernels.bind(sizes), tuple(map(canonical_strides, arguments.inputs))
        if not self._accepts(with_strides(bound, strides), sizes, arguments):
            raise _other_sizes(bound.name)
        outputs = tuple(empty_output(bound, name, torch.device("cpu")) for name in bound.returns)
        copy_initial_values(bound, arguments, outputs)
        memories = (*arguments.inputs, *outputs)
        if not all(map(is_aligned, memories)):
            plan = self._find_unaligned(sizes, strides, plan)
        values = self._kernels.parameter_values(plan, sizes, memories)
        bind_steps(plan, torch.device("cpu"), lambda kernel: self._emulation(kernel, values))(*memories)
        return convert_outputs(outputs, arguments.convert)

    def _accepts(self, bound: BoundFunction, sizes: ArgumentShapes, arguments: Arguments) -> bool:
        """Whether the kernel is for these sizes and layouts. bound: the def with them."""
        if self._key is None:
            return bound == self.compiled.bound
        return self._kernels.kernels.serves(self._key, sizes, arguments.inputs)

    def _find_unaligned(self, sizes: ArgumentShapes, strides: tuple[Any, ...], plan: Plan) -> Plan:
        """The same kernel for tensors that start anywhere."""
        if self._key is not None:
            return self._kernels.range_plan(self._key, self._options, plan.target, aligned=False) or plan
        return self._kernels.plan(sizes, strides, self._options, plan.target, aligned=False)

    def _emulation(self, kernel: CompiledGpuKernel, values: Mapping[str, int] | None) -> Step:
        emulated = self._emulated.get(kernel, lambda: emulator.build_emulated([kernel.code])[0])

        def run(*tensors: Tensor) -> None:
            number, value = run_emulated(kernel, emulated, tensors, values)
            if number:
                raise launch_error(self.compiled.bound.name, kernel.sites, number, value)

        return run


def _other_sizes(op: str) -> ArgumentError:
    return ArgumentError(
        f"this kernel of {op} was compiled for tensors of other sizes or strides", suggestion="compile it for these"
    )
