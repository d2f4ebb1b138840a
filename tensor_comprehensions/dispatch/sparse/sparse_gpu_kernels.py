"""The GPU kernels of a sparse def: find the one for a call, launch it, or run it in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...codegen.gpu.gpu_printer import GpuCode
from ...compiler.sparse_gpu_passes import CompiledSparseGpuKernel, compile_sparse_gpu
from ...core import knobs
from ...core.error_boundary import only_tc_errors
from ...core.errors import ArgumentError, CannotLower
from ...core.single_flight import SingleFlightCache
from ...loop_ir.nodes import Buffer
from ...machine import WARP_THREADS
from ...options import SparseOptions
from ...runtime.cuda import launch
from ...runtime.cuda.launch import Launches
from ...runtime.emulate import emulator
from ...runtime.emulate.emulator import Emulated, EmulatedTensor
from ...sparse.call_plan import PlannedResult
from ...sparse.shared_sparsity import find_shared_patterns, with_shared_formats
from ...sparse.sparse_problem import SparseProblem, fixed_sizes
from ...target import GpuTarget
from ...tc_lang.formats import Format
from ...tc_lang.ir import Function, Role
from ..compiled_callable import CompiledCallable
from ..persistent_kernel_cache import save_page
from ..signatures import format_signature
from .sparse_run import INDEX_TYPES, ProgramRun, SparseCall
from .sparse_tensor import SparseTensor
from .structure import Structure, convert_levels

if TYPE_CHECKING:
    from ...explain.kernel_report import Report

LIMIT = 64
"""Maximum number of kernels, and of size arrays, of one def in memory."""

RunArrays = Callable[[int, Sequence[Tensor]], None]
"""Runs a phase of a kernel on the arrays of its arguments, in order."""


@dataclass(slots=True, eq=False)
class SparseGpuKernels:
    """The GPU kernels of one def, those loaded on devices of this machine, and arrays of sizes on devices."""

    compiled: SingleFlightCache[Hashable, CompiledSparseGpuKernel] = field(
        default_factory=lambda: SingleFlightCache(LIMIT)
    )
    loaded: SingleFlightCache[Hashable, tuple[Launches, ...]] = field(default_factory=lambda: SingleFlightCache(LIMIT))
    sizes: SingleFlightCache[Hashable, Tensor] = field(default_factory=lambda: SingleFlightCache(LIMIT))

    def run(
        self, function: Function, call: SparseCall, sizes: Mapping[str, int], options: SparseOptions
    ) -> dict[str, Tensor | SparseTensor]:
        """The results of the def for operands on a device, by name. Raises ArgumentError as `kernel` does."""
        assert call.device is not None
        device = call.device
        kernel = self.kernel(function, call, sizes, options, launch.device_target(device.index))
        launches = self.loaded.get((kernel, device.index), lambda: load_on_device(kernel, device))
        run = GpuRun(kernel, call, sizes, self.sizes)
        if kernel.plan.results and launch.is_capturing():
            raise ArgumentError(
                f"{function.name} allocates what its kernels have counted, and a graph is being captured",
                suggestion="call it outside of the capture",
            )
        return run.run(function, lambda phase, arrays: launch_on_arrays(launches[phase], arrays))

    def kernel(
        self,
        function: Function,
        call: SparseCall,
        sizes: Mapping[str, int],
        options: SparseOptions,
        target: GpuTarget,
    ) -> CompiledSparseGpuKernel:
        """The kernel for a call. Raises ArgumentError if the def cannot be lowered for GPUs."""
        problem = make_problem(function, call, sizes, options)

        def make() -> CompiledSparseGpuKernel:
            try:
                made = compile_sparse_gpu(problem, target)
            except CannotLower as refusal:
                raise ArgumentError(
                    f"{function.name} has no kernel for GPUs: {refusal}",
                    suggestion="pass tensors on the CPU, where all defs run",
                ) from refusal
            if knobs.current_knobs().explain:
                save_page(made)
            return made

        return self.compiled.get((problem, target), make)


def make_problem(
    function: Function, call: SparseCall, sizes: Mapping[str, int], options: SparseOptions
) -> SparseProblem:
    """The input of the lowering for a call."""
    stored = with_walkable_levels(call)
    walked = _with_walkable_formats(function)
    shared = find_shared_patterns(walked)
    known = {n: v for n, v in sizes.items() if n not in function.scalars}
    return SparseProblem(
        with_shared_formats(walked, shared),
        tuple((n, INDEX_TYPES[t.index_dtype]) for n, t in stored.sparse.items()),
        fixed_sizes(function, known),
        tuple((name, x.source) for name, x in shared.items()),
        options=options,
        lanes=count_lanes(stored),
    )


def load_on_device(kernel: CompiledSparseGpuKernel, device: torch.device) -> tuple[Launches, ...]:
    """Load the phases of a kernel on a device. Raises ArgumentError while a CUDA graph is captured."""
    if launch.is_capturing():
        raise ArgumentError(
            f"{kernel.plan.problem.function.name} has not run in these formats on {device}, and a graph is being "
            "captured",
            suggestion="call it once before the capture",
        )
    launches = launch.load_launches_on(kernel.code, kernel.cubin, device.index)
    return tuple(map(launches.select, kernel.kernels_by_phase))


def launch_on_arrays(launches: Launches, arrays: Sequence[Tensor]) -> None:
    """Launch all kernels on device arrays. torch reuses the memory of a freed array only after them."""
    launches([x.data_ptr() for x in arrays])


class GpuRun(ProgramRun):
    """One run of a GPU kernel. Arrays of collected results are allocated after a phase has counted their elements."""

    def __init__(
        self,
        kernel: CompiledSparseGpuKernel,
        call: SparseCall,
        sizes: Mapping[str, int],
        known: SingleFlightCache[Hashable, Tensor],
    ) -> None:
        super().__init__(kernel.plan, with_walkable_levels(call), sizes)
        self._original, self._known, self._threads = call, known, kernel.lowered.num_threads
        self._starts: dict[int, Tensor] = {}

    def run(self, function: Function, launch: RunArrays) -> dict[str, Tensor | SparseTensor]:
        """Run all phases. Returns the results of `function`, the def with the caller's formats, by name."""
        for phase in range(self.plan.num_phases):
            self._add_completed_results(phase)
            for n, r in enumerate(self.plan.results):
                self._prepare_result(n, r, phase)
            launch(phase, self.list_arrays())
        return {name: self._in_format(name, function.tensor(name).format) for name in function.returns}

    def _prepare_result(self, number: int, r: PlannedResult, phase: int) -> None:
        """Allocate the counts per thread before the phase that counts, then the elements before the next phase."""
        if phase == r.phase - 1:
            self._starts[number] = torch.zeros(self._threads + 1, dtype=torch.int64, device=self.call.device)
        if phase == r.phase:
            starts = self._starts[number] = self._starts[number].cumsum(0)
            self.arrays[number] = self._allocate_collected(r, int(starts[-1]))

    def list_arrays(self) -> list[Tensor]:
        """The arguments of the kernel, in order."""
        device = self.call.device or torch.device("cpu")
        sizes = self._known.get((device, *self.numbers), lambda: torch.tensor(self.numbers, device=device))
        found = [sizes, sizes[:0]]  # no counts
        for o in self.plan.operands:
            if o.has_levels and o.name not in self.sparse:  # a result that is not computed yet
                found += [sizes[:0]] * o.num_level_arrays
            elif o.has_levels:
                levels = (level for level in self.sparse[o.name].levels if level is not None)
                found += [x for level in levels for x in level if x is not None]
            found.append(self.values[o.name])
        for n, r in enumerate(self.plan.results):
            nothing = [sizes[:0]] * (r.num_arrays - 1)
            found += [*self.arrays.get(n, nothing), self._starts.get(n, sizes[:0])]
        return found

    def _in_format(self, name: str, format: Format | None) -> Tensor | SparseTensor:
        made = self._result(name)
        if not isinstance(made, SparseTensor) or format is None or made.format == format:
            return made
        if name not in self.shared:
            return made.to(format)
        source = self._original.sparse[self.shared[name]]
        if source.format == format:
            return SparseTensor(format, made.shape, source.levels, made.values)
        return made.to(format)


def count_lanes(call: SparseCall) -> int:
    """How many lanes share a row, from 2 to `WARP_THREADS`: the average elements of a row, rounded down to 2^n."""
    longest = 2
    for t in call.sparse.values():
        counts = [len(level[1]) for level in t.levels if level is not None]
        rows = t.format.extents(t.shape)[0] if t.format.levels[0].is_dense else counts[0] if counts else 1
        while counts and longest < WARP_THREADS and counts[-1] >= 2 * longest * max(1, rows):
            longest *= 2
    return longest


# --- formats -----------------------------------------------------------------------------------------------------


def with_walkable_levels(call: SparseCall) -> SparseCall:
    """The call with operands that repeat coordinates, as COO does, in formats with one position per coordinate.

    Their values stay in place, because such formats have the same elements in the same order. Only operands that may
    store an element several times are copied, to add up the repetitions.
    """
    wrong = {n: t for n, t in call.sparse.items() if walkable_format(t.format) != t.format}
    if not wrong:
        return call
    stored = {n: _convert_to_walkable(t, call.structures.get(n)) for n, t in wrong.items()}
    kept = {n: s for n, s in call.structures.items() if n not in wrong}
    kept |= {n: Structure(len(t.values)) for n, t in stored.items()}
    return replace(call, sparse={**call.sparse, **stored}, structures=kept)


def _convert_to_walkable(t: SparseTensor, structure: Structure | None) -> SparseTensor:
    format = walkable_format(t.format)
    if not t.format.is_unique or t.format.repeats_padding:
        return t.with_values(t.values.detach()).to(format)
    known = Structure(len(t.values)) if structure is None else structure
    return SparseTensor(format, t.shape, convert_levels(t, format, known), t.values)


def walkable_format(format: Format) -> Format:
    """The format of the same elements that stores each coordinate once: compressed levels instead of repetitions."""
    unique = format.with_unique_elements
    is_walkable = all(level.unique for level in unique.levels[: unique.depth]) and not unique.repeats_padding
    return unique if is_walkable else unique.with_compressed_levels


def _with_walkable_formats(function: Function) -> Function:
    tensors = (
        t if t.format is None or t.role is Role.TEMPORARY else replace(t, format=walkable_format(t.format))
        for t in function.tensors
    )
    return replace(function, tensors=tuple(tensors))


# --- without a device --------------------------------------------------------------------------------------------


class SparseGpuKernel(CompiledCallable[CompiledSparseGpuKernel]):
    """A GPU kernel of an operator for sparse operands in given formats, of any sizes.

    Call it like the operator, with tensors on such a device; `emulate` runs it on the CPU.

    Attributes:
        compiled: the compiled kernel with its texts and metadata.
        compile_seconds: the seconds that compilation took.
        resources: kernels and threads; with NVRTC also registers and spills.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        prepare: Callable[[Sequence[object], Mapping[str, object]], tuple[Function, SparseCall, Mapping[str, int]]],
        finish: Callable[[dict[str, Tensor | SparseTensor], Sequence[object]], Any],
        compiled: CompiledSparseGpuKernel,
    ) -> None:
        """prepare: returns the def, the operands and the sizes of a call. finish: converts results for the caller."""
        self._call, self._prepare, self._finish, self.compiled = call, prepare, finish, compiled
        self._sizes: SingleFlightCache[Hashable, Tensor] = SingleFlightCache(1)
        self._emulated: SingleFlightCache[GpuCode, Emulated] = SingleFlightCache(1)

    def __repr__(self) -> str:
        name = format_signature(self.compiled.plan.problem.function)
        return f"<sparse kernel of {name} for {self.compiled.target.name}>"

    @only_tc_errors
    def __call__(self, /, *tensors: object, **initial: object) -> Any:
        return self._call(*tensors, **initial)

    @only_tc_errors
    def explain(self) -> Report:
        """Explain the kernel's code: `print` the report for the short form, `save("x.html")` it for the page."""
        from ...explain.sparse import explain_sparse_gpu_kernel

        return explain_sparse_gpu_kernel(self.compiled)

    @only_tc_errors
    def source(self, kind: str = "cuda") -> str:
        """The kernel as text of a kind: "tc", "schedule", "loops", "cuda" or "opencl"."""
        return self.compiled.source(kind)

    @only_tc_errors
    def emulate(self, /, *tensors: object, **initial: object) -> Any:
        """Run the CUDA text on CPU tensors, compiled by the host's C++ compiler.

        This is slow, and checks every memory access as `GpuKernel.emulate` does.

        Raises:
            ArgumentError: no C++ compiler is installed, or the operands have other formats or types than the kernel.
            InternalError: the kernel would fail on a device.
        """
        function, call, sizes = self._prepare(tensors, initial)
        mine = self.compiled.problem
        wanted = replace(make_problem(function, call, sizes, mine.options), lanes=mine.lanes)
        if wanted != mine:
            raise ArgumentError(
                f"this kernel of {function.name} was compiled for operands in other formats, or for other fixed sizes",
                suggestion="compile it for these",
            )
        run = GpuRun(self.compiled, call, sizes, self._sizes)
        return self._finish(run.run(function, self._emulate), tensors)

    def _emulate(self, phase: int, arrays: Sequence[Tensor]) -> None:
        code = self.compiled.code
        emulated = self._emulated.get(code, lambda: emulator.build_emulated([code])[0])
        run_emulated_phase(emulated, self.compiled, phase, arrays)


def run_emulated_phase(
    emulated: Emulated, kernel: CompiledSparseGpuKernel, phase: int, arrays: Sequence[Tensor]
) -> None:
    """Run one phase of a kernel's text on CPU arrays.

    Raises:
        InternalError: the kernel would fail on a device.
    """
    dense = {o.values.name for o in kernel.program.operands if o.role in (Role.OUTPUT, Role.TEMPORARY)}
    dense -= set(dict(kernel.plan.problem.shared))  # initialized with zeros
    memories = [
        EmulatedTensor(x.data_ptr(), with_length(b, x.numel()), phase > 0 or b.name not in dense)
        for b, x in zip(kernel.arguments, arrays, strict=True)
    ]
    emulated.select(kernel.kernels_by_phase[phase])(memories)


def with_length(b: Buffer, count: int) -> Buffer:
    """A 1-d argument of `count` elements, the length of the array in a call."""
    return replace(b, shape=(count,), strides=(1,), dynamic=())
