"""Plans: a def as one GPU kernel, or as kernels and torch's matrix products, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...compiler.gpu_passes import CompiledGpuKernel
from ...core.memory_layout import contiguous_strides
from ...options import GpuOptions, MappingOptions
from ...runtime.cpu.python_launch import OperandSpec
from ...runtime.cuda import launch
from ...runtime.cuda.launch import ALIGNMENT, CudaLauncher, CudaRunner, Launches
from ...runtime.emulate.emulator import Emulated, EmulatedTensor
from ...target import GpuTarget
from ...tc_lang.ir import BoundFunction, Role
from ..arguments import TYPES
from ..call_steps import launch_error
from .device_arguments import empty_output
from .library_calls import LibraryMatmul, split_at_library_calls

Step = Callable[..., None]
"""Computes one part of a plan; takes its inputs, then its outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class MixedPlan:
    """A def as a sequence of kernels and library calls, with the interface of `CompiledGpuKernel`."""

    bound: BoundFunction
    target: GpuTarget
    parts: tuple[CompiledGpuKernel | LibraryMatmul, ...]

    @property
    def compile_seconds(self) -> float:
        return sum(kernel.compile_seconds for kernel in kernels_of(self))

    @property
    def resources(self) -> dict[str, int]:
        found = [kernel.resources for kernel in kernels_of(self)]
        added = ("kernels", "temporary_bytes", "source_bytes")
        return {name: (sum if name in added else max)(r[name] for r in found) for name in (found[0] if found else ())}

    @staticmethod
    def source_kinds() -> Mapping[str, Callable[[CompiledGpuKernel], str]]:
        return CompiledGpuKernel.source_kinds()

    def source(self, kind: str) -> str:
        """The text of all parts in order; a library call is a comment."""
        return "\n".join(
            f"// {part}\n" if isinstance(part, LibraryMatmul) else part.source(kind) for part in self.parts
        )


Plan = CompiledGpuKernel | MixedPlan


def make_plan(
    bound: BoundFunction,
    options: GpuOptions | None,
    target: GpuTarget,
    make: Callable[[BoundFunction, GpuOptions | None], CompiledGpuKernel],
) -> Plan:
    """The plan of a bound def. make: compiles a def, or a part of it, with options."""
    if not isinstance(options, MappingOptions) or not options.match_library_calls:
        return make(bound, options)
    found = split_at_library_calls(bound)
    if not any(isinstance(piece, LibraryMatmul) for piece in found):
        return make(bound, options)
    own = replace(options, match_library_calls=False)
    return MixedPlan(bound, target, tuple(p if isinstance(p, LibraryMatmul) else make(p, own) for p in found))


def kernels_of(plan: Plan) -> tuple[CompiledGpuKernel, ...]:
    if isinstance(plan, MixedPlan):
        return tuple(part for part in plan.parts if isinstance(part, CompiledGpuKernel))
    return (plan,)


def has_bounds_checks(plan: Plan) -> bool:
    """Whether kernels check subscripts at run time, because they depend on data."""
    return any(kernel.sites for kernel in kernels_of(plan))


def needs_alignment(plan: Plan) -> bool:
    """Whether addresses of tensors must be multiples of `ALIGNMENT` bytes."""
    return any(kernel.code.aligned for kernel in kernels_of(plan))


def tensors_of(bound: BoundFunction) -> list[str]:
    """The names of a plan's tensors: the inputs, then the outputs."""
    return [t.name for t in bound.tensors if t.role is Role.INPUT] + list(bound.returns)


def bind_steps(plan: Plan, device: torch.device, step_of: Callable[[CompiledGpuKernel], Step]) -> Step:
    """A function that runs a plan on a device. step_of: returns the function that runs a kernel."""
    if not isinstance(plan, MixedPlan):
        return step_of(plan)
    names, between = tensors_of(plan.bound), list[str]()
    steps: list[tuple[Step, list[int]]] = []
    for part in plan.parts:
        own = list(part.tensors) if isinstance(part, LibraryMatmul) else tensors_of(part.bound)
        between += [name for name in own if name not in (*names, *between)]
        places = [(*names, *between).index(name) for name in own]
        steps.append((part if isinstance(part, LibraryMatmul) else step_of(part), places))

    def run(*given: Tensor) -> None:
        tensors = [*given, *(empty_output(plan.bound, name, device) for name in between)]
        for step, places in steps:
            step(*[tensors[n] for n in places])

    return run


# --- on a device -------------------------------------------------------------------------------------------------


def load_launches(kernel: CompiledGpuKernel, device: torch.device) -> Launches:
    """Load a kernel on a device.

    Raises ArgumentError while a CUDA graph is captured, InternalError as `launch.load_launches_on`.
    """
    launch.check_not_capturing(kernel.bound.name, device)
    return launch.load_launches_on(kernel.code, kernel.cubin, device.index)


def launcher_of(
    plan: Plan,
    device: torch.device,
    accepted: Sequence[Tensor],
    loaded: Callable[[CompiledGpuKernel], Launches],
    bound: BoundFunction | None = None,
    values: Mapping[str, int] | None = None,
) -> CudaLauncher:
    """A launcher of a plan on the inputs followed by the outputs, for tensors like `accepted`.

    loaded: returns the launches of a kernel, as `load_launches` does.
    bound, values: for a kernel for any number of rows, the def with the sizes of the call, and the values of its
    parameters; the launcher keeps these and its grids, as does a graph that captures it.
    """
    bound = bound or plan.bound

    def step_of(kernel: CompiledGpuKernel) -> Step:
        launches = loaded(kernel)

        def fail(failed: int, value: int) -> BaseException:
            return launch_error(bound.name, kernel.sites, failed, value)

        return CudaRunner(
            launches if values is None else launches.bind_parameters(values), device,
            kernel.argument_places(),
            [b.bind_parameters(values or {}).bytes for b in kernel.temporaries],
            fail if kernel.sites else None,
        )  # fmt: skip

    return CudaLauncher(
        bind_steps(plan, device, step_of), device,
        [OperandSpec(TYPES[x.dtype], tuple(x.shape), tuple(x.stride())) for x in accepted],
        [OperandSpec(t.dtype, t.shape, contiguous_strides(t.shape)) for t in map(bound.tensor, bound.returns)],
        aligned=needs_alignment(plan),
    )  # fmt: skip


# --- in the emulator ---------------------------------------------------------------------------------------------


def run_emulated(
    kernel: CompiledGpuKernel,
    emulated: Emulated,
    tensors: Sequence[Tensor],
    values: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Run the text of a kernel on CPU tensors: its inputs, then its outputs. values: as for `launcher_of`.

    Returns (0, 0), or the number of a failed check and the subscript. Raises as `Emulated`.
    """
    roles = [t.role for t in kernel.bound.tensors if t.role is not Role.TEMPORARY]
    arguments, temporaries = (
        [b.bind_parameters(values or {}) for b in found] for found in (kernel.arguments, kernel.temporaries)
    )
    memories = [
        EmulatedTensor(tensors[n].data_ptr(), b, roles[n] is not Role.OUTPUT)
        for n, b in zip(kernel.argument_places(), arguments, strict=True)
    ]
    rooms = [torch.zeros(b.bytes + ALIGNMENT, dtype=torch.uint8) for b in temporaries]
    for room, b in zip(rooms, temporaries, strict=True):
        memories.append(EmulatedTensor(-(-room.data_ptr() // ALIGNMENT) * ALIGNMENT, b, False))
    return (emulated if values is None else emulated.bind_parameters(values))(memories)
