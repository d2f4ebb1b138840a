"""Operators on graphics processors: kernels for tensors on a CUDA device, and for a device that is not here.

Always holds: what is wrong with a call is found before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ... import knobs
from ...compiler import buffer_bytes
from ...compiler_gpu import GpuCompiled
from ...errors import ArgumentError
from ...guard import guarded
from ...inspection import Picture
from ...once import OncePerKey
from ...options import MappingOptions, check_mapping
from ...runtime import cuda, emulator
from ...runtime.cuda import ALIGNMENT, Launcher, Launches
from ...runtime.dispatch import Operand
from ...runtime.emulator import Emulated, Memory
from ...target import GpuTarget
from ...tc_lang.function import BoundFunction, Role, contiguous_strides
from ..arguments import TYPES, article
from ..calls import (
    Arguments,
    Interface,
    Sizes,
    deliver,
    evaluate,
    failure,
    fill_initial,
    gather,
    hand_back,
    normal_strides,
    sizes_of,
    with_strides,
)
from ..describe import signature
from ..kernels import Kernels
from ..lanes import MISS
from . import library, recall
from .arguments import destinations, device_of, fresh, gather_on_device, is_aligned, on_device, parsed, sizes_here
from .lanes import GpuLanes
from .library import Product

LIMIT = 256


@dataclass(slots=True, eq=False)
class GpuKernels:
    """The kernels of one def for graphics processors, and those of them that are on devices of this machine.

    lanes: the short ways of calls, by device and options.
    """

    kernels: Kernels
    compiled: OncePerKey[Hashable, GpuCompiled] = field(default_factory=lambda: OncePerKey(LIMIT))
    loaded: OncePerKey[Hashable, Launches] = field(default_factory=lambda: OncePerKey(LIMIT))
    lanes: dict[Hashable, GpuLanes] = field(default_factory=dict)
    _last: GpuLanes | None = None
    _tuned: dict[Hashable, MappingOptions] = field(default_factory=dict)
    _split: OncePerKey[Hashable, Parts] = field(default_factory=lambda: OncePerKey(LIMIT))

    @property
    def interface(self) -> Interface:
        return self.kernels.interface

    def kernel(
        self,
        sizes: Sizes,
        strides: tuple[Any, ...],
        options: MappingOptions | None,
        wanted: GpuTarget,
        *,
        aligned: bool = True,
    ) -> GpuCompiled:
        """The kernel for these sizes and strides, for tensors at multiples of `ALIGNMENT` or, if need be, anywhere.

        options: None for those that a search found for calls like this one, or else the cost model chooses.
        """
        if options is None and self._tuned:
            options = self._tuned.get((sizes, strides[: len(self.interface.parameters)], wanted))
        if options is not None:
            check_mapping(options, wanted)

        def made(aligned: bool) -> GpuCompiled:
            bound = with_strides(self.kernels.bind(sizes), strides)
            return recall.kernel(self.interface.function, bound, options, wanted, aligned=aligned)

        found = self.compiled.get((sizes, strides, options, wanted, True), lambda: made(True))
        if aligned or not found.code.aligned:
            return found
        return self.compiled.get((sizes, strides, options, wanted, False), lambda: made(False))

    def compile(
        self,
        tensors: Sequence[object],
        initial: Mapping[str, object],
        options: MappingOptions | None,
        wanted: GpuTarget | str | None,
    ) -> GpuKernel:
        """The kernel for these tensors, which are examples on the CPU, or on the device that it is for."""
        if options is not None and not isinstance(options, MappingOptions):
            raise ArgumentError(f"options is {article(type(options).__name__)}", expected="MappingOptions(...)")
        if on_device((*tensors, *initial.values())):
            device = device_of((*tensors, *initial.values()))
            arguments = gather_on_device(self.interface, tensors, initial, device)
            machine = cuda.device_target(device.index) if wanted is None else parsed(wanted)
        else:
            arguments, machine = gather(self.interface, tensors, initial), parsed(wanted)
        sizes = sizes_here(self.interface, arguments, tensors)
        strides = tuple(map(normal_strides, arguments.inputs))
        if (parts := self.parts(sizes, strides, options, machine)) is not None:
            return LibraryKernel(self, parts, options, machine)
        return GpuKernel(self, self.kernel(sizes, strides, options, machine), options)

    def parts(
        self,
        sizes: Sizes,
        strides: tuple[Any, ...],
        options: MappingOptions | None,
        wanted: GpuTarget,
        *,
        aligned: bool = True,
    ) -> Parts | None:
        """The kernels and the calls of a library that make up the def; None where nothing is for a library."""
        if options is None or not options.match_library_calls:
            return None
        check_mapping(options, wanted)
        bound = with_strides(self.kernels.bind(sizes), strides)

        def made_of(piece: library.Piece) -> GpuCompiled | Product:
            if isinstance(piece, Product):
                return piece
            own = replace(options, match_library_calls=False)
            return recall.kernel(self.interface.function, piece, own, wanted, aligned=aligned)

        def make() -> Parts:
            return Parts(bound, tuple(map(made_of, library.pieces(bound))))

        made = self._split.get((sizes, strides, options, wanted, aligned), make)
        return made if any(isinstance(part, Product) for part in made.parts) else None

    def call(
        self,
        tensors: Sequence[object],
        out: object,
        initial: Mapping[str, object],
        options: MappingOptions | None,
    ) -> Any:
        """The result of a call on tensors of one CUDA device. It leaves a lane for calls like this one.

        Raises ArgumentError or RangeError, and DeviceError where the device can do no more.
        """
        device = device_of((*tensors, *initial.values()))
        lanes = self._last = self._lanes(device, options)
        if (result := lanes.call(tensors, out, initial)) is not MISS:
            return result
        arguments = gather_on_device(self.interface, tensors, initial, device)
        sizes = sizes_here(self.interface, arguments, tensors)
        bound = self.kernels.bind(sizes)
        wanted = () if out is None else destinations(bound, arguments, out, device)
        if knobs.current().interpret:
            outputs = _interpreted(bound, arguments, device)
        else:
            outputs = self._compute(bound, sizes, arguments, wanted, options, device)
        if out is None:
            return hand_back(outputs, None)
        deliver(outputs, wanted)
        return out

    def direct(self) -> Callable[..., Any] | None:
        """What ran last, as a function that gives NotImplemented for what it does not take."""
        return None if self._last is None else self._last.direct()

    def _runner(self, device: torch.device) -> Callable[[GpuCompiled, Sequence[Tensor]], None]:
        """What runs one kernel on its inputs and outputs."""

        def run(kernel: GpuCompiled, tensors: Sequence[Tensor]) -> None:
            launches = self.loaded.get((kernel, device.index), lambda: _load(kernel, device))
            launcher_of(kernel, launches, device, ()).run(*tensors)

        return run

    def tune(self, sizes: Sizes, strides: tuple[Any, ...], wanted: GpuTarget, options: MappingOptions) -> None:
        """From now on, map calls with inputs like these for `wanted` as `options` say."""
        if len(self._tuned) >= LIMIT:
            self._tuned.clear()
        self._tuned[sizes, strides, wanted] = options
        self.lanes.clear()

    def _lanes(self, device: torch.device, options: MappingOptions | None) -> GpuLanes:
        found = self.lanes.get((device, options))
        if found is None:
            found = self.lanes[device, options] = GpuLanes(self.interface, device)
        return found

    def _compute(
        self,
        bound: BoundFunction,
        sizes: Sizes,
        arguments: Arguments,
        wanted: tuple[Tensor, ...],
        options: MappingOptions | None,
        device: torch.device,
    ) -> tuple[Tensor, ...]:
        """The outputs: in `wanted`, unless data may lead astray; then in fresh memory until it has not."""
        target = cuda.device_target(device.index)

        def kernel_for(outputs: tuple[Tensor, ...]) -> GpuCompiled:
            everything = (*arguments.inputs, *outputs)
            strides, aligned = tuple(map(normal_strides, everything)), all(map(is_aligned, everything))
            return self.kernel(sizes, strides, options, target, aligned=aligned)

        outputs = wanted or tuple(fresh(bound, name, device) for name in bound.returns)
        everything = (*arguments.inputs, *outputs)
        strides, aligned = tuple(map(normal_strides, everything)), all(map(is_aligned, everything))
        if (parts := self.parts(sizes, strides, options, target, aligned=aligned)) is not None:
            outputs = tuple(fresh(bound, name, device) for name in bound.returns) if parts.checks else outputs
            fill_initial(bound, arguments, outputs)
            parts.run((*arguments.inputs, *outputs), self._runner(device))
            return outputs
        kernel = kernel_for(outputs)
        if wanted and kernel.sites:
            wanted, outputs = (), tuple(fresh(bound, name, device) for name in bound.returns)
            kernel = kernel_for(outputs)
        launches = self.loaded.get((kernel, device.index), lambda: _load(kernel, device))
        fill_initial(bound, arguments, outputs)
        launcher = launcher_of(kernel, launches, device, (*arguments.inputs, *arguments.initial, *wanted))
        launcher.run(*arguments.inputs, *outputs)
        if kernel.aligned:  # else other tensors may have a better kernel
            special = tuple(value for _, value in sizes.scalars)
            self._lanes(device, options).remember(launcher, arguments, special, wanted)
        return outputs


def _load(kernel: GpuCompiled, device: torch.device) -> Launches:
    if cuda.is_capturing():
        raise ArgumentError(
            f"{kernel.bound.name} has not run with these sizes on {device}, and a graph is being captured",
            suggestion="call it once before the capture",
        )
    return cuda.load(kernel.code, kernel.cubin, device.index)


def launcher_of(kernel: GpuCompiled, launches: Launches, device: torch.device, accepted: Sequence[Tensor]) -> Launcher:
    """What runs a kernel on the inputs followed by the outputs, for tensors like `accepted`."""
    bound = kernel.bound
    names = [t.name for t in bound.tensors if t.role is Role.INPUT] + list(bound.returns)

    def fail(failed: int, value: int) -> BaseException:
        return failure(bound.name, kernel.sites, failed, value)

    return Launcher(
        launches, device,
        [Operand(TYPES[x.dtype], tuple(x.shape), tuple(x.stride())) for x in accepted],
        [Operand(t.dtype, t.shape, contiguous_strides(t.shape)) for t in map(bound.tensor, bound.returns)],
        [names.index(b.name) for b in kernel.arguments],
        [buffer_bytes(b) for b in kernel.temporaries],
        fail if kernel.sites else None, aligned=kernel.code.aligned,
    )  # fmt: skip


def _interpreted(bound: BoundFunction, arguments: Arguments, device: torch.device) -> tuple[Tensor, ...]:
    """The outputs by the reference evaluator, which runs on the CPU."""
    here = Arguments(tuple(x.cpu() for x in arguments.inputs), tuple(x.cpu() for x in arguments.initial), None)
    return tuple(x.to(device) for x in evaluate(bound, here))


def _in_order(kernel: GpuCompiled, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a call, inputs and then outputs, as the arguments of the module."""
    names = [t.name for t in kernel.bound.tensors if t.role is Role.INPUT] + list(kernel.bound.returns)
    places = dict(zip(names, tensors, strict=True))
    return [places[b.name] for b in kernel.arguments]


class GpuKernel:
    """A kernel of an operator for a graphics processor.

    It is called like the operator, with tensors on such a device, and `emulate` runs it on the CPU.

    Attributes:
        compiled: the kernel with everything that the compiler knows of it.
        compile_seconds: what mapping and printing took.
        resources: kernels launched; bytes of temporaries and shared memory; threads of a block; where NVRTC is
            installed also registers of a thread, and bytes of local memory and of spills.
    """

    def __init__(self, kernels: GpuKernels, compiled: GpuCompiled, options: MappingOptions | None) -> None:
        self._kernels, self._options, self._target = kernels, options, compiled.target
        self._emulated: OncePerKey[GpuCompiled, Emulated] = OncePerKey(2)
        self.compiled = compiled

    def __repr__(self) -> str:
        name = signature(self._kernels.interface.function)
        return f"<kernel of {name} for {self.compiled.target.name}, made in {self.compile_seconds * 1e3:.0f} ms>"

    @guarded
    def __call__(self, /, *tensors: object, out: object = None, **initial: object) -> Any:
        if not on_device((*tensors, *initial.values())):
            raise ArgumentError(
                f"this kernel of {self._kernels.interface.function.name} is for {self._target.name}, and its arguments "
                "are on the CPU",
                suggestion="pass tensors on a CUDA device, or call kernel.emulate(...)",
            )
        return self._kernels.call(tensors, out, initial, self._options)

    @property
    def compile_seconds(self) -> float:
        return self.compiled.compile_seconds

    @property
    @guarded
    def resources(self) -> dict[str, int]:
        return self.compiled.resources

    @guarded
    def source(self, kind: str = "cuda") -> str:
        """The kernel as text of a kind: "tc", "schedule", "loops", "cuda" or "opencl"."""
        return self.compiled.source(kind)

    def show(self) -> Picture:
        """The mapped schedule tree: text in a terminal, a picture in a notebook."""
        return Picture(self.source("schedule"))

    @guarded
    def emulate(self, /, *tensors: object, **initial: object) -> Any:
        """What the kernel gives for tensors on the CPU, by its own text, compiled by the host's C++ compiler.

        It is slow, and checks every access to memory: races, reads of what nothing wrote, places outside of tensors,
        barriers that not all threads of a block reach.

        Raises:
            ArgumentError: there is no C++ compiler, or the tensors are not those that the kernel was made for.
            InternalError: the kernel would go wrong on a device.
            RangeError: a subscript leaves its tensor.
        """
        kernel, interface = self.compiled, self._kernels.interface
        arguments = gather(interface, tensors, initial)
        sizes = sizes_of(interface.function, arguments)
        bound, strides = self._kernels.kernels.bind(sizes), tuple(map(normal_strides, arguments.inputs))
        if with_strides(bound, strides) != kernel.bound:
            raise _other_sizes(bound.name)
        outputs = tuple(fresh(bound, name, torch.device("cpu")) for name in bound.returns)
        fill_initial(bound, arguments, outputs)
        memories = (*arguments.inputs, *outputs)
        if not all(map(is_aligned, memories)):
            kernel = self._kernels.kernel(sizes, strides, self._options, kernel.target, aligned=False)
        emulated = self._emulated.get(kernel, lambda: emulator.build([kernel.code])[0])
        number, value = run_emulated(kernel, emulated, memories)
        if number:
            raise failure(bound.name, kernel.sites, number, value)
        return hand_back(outputs, arguments.convert)


def _other_sizes(op: str) -> ArgumentError:
    return ArgumentError(
        f"this kernel of {op} was compiled for tensors of other sizes or strides", suggestion="compile it for these"
    )


def run_emulated(kernel: GpuCompiled, emulated: Emulated, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Run the text of a kernel on its inputs and outputs, tensors on the CPU.

    Returns (0, 0), or the number of a failed check and the value that it found. Raises as `Emulated`.
    """
    roles = {t.name: t.role for t in kernel.bound.tensors}
    memories = [
        Memory(x.data_ptr(), b, roles[b.name] is not Role.OUTPUT)
        for x, b in zip(_in_order(kernel, tensors), kernel.arguments, strict=True)
    ]
    rooms = [torch.zeros(buffer_bytes(b) + ALIGNMENT, dtype=torch.uint8) for b in kernel.temporaries]
    for room, b in zip(rooms, kernel.temporaries, strict=True):
        memories.append(Memory(-(-room.data_ptr() // ALIGNMENT) * ALIGNMENT, b, False))
    return emulated(memories)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A def as kernels and calls of a library, which run one after another."""

    bound: BoundFunction
    parts: tuple[GpuCompiled | Product, ...]

    @property
    def kernels(self) -> tuple[GpuCompiled, ...]:
        return tuple(part for part in self.parts if isinstance(part, GpuCompiled))

    @property
    def checks(self) -> bool:
        """May data lead astray?"""
        return any(kernel.sites for kernel in self.kernels)

    def run(self, tensors: Sequence[Tensor], launch: Callable[[GpuCompiled, Sequence[Tensor]], None]) -> None:
        """Compute the outputs from the inputs. launch: runs one kernel on its inputs and outputs."""
        bound = self.bound
        names = [t.name for t in bound.tensors if t.role is Role.INPUT] + list(bound.returns)
        places = dict(zip(names, tensors, strict=True))
        for part in self.parts:
            missing = [part.target[0]] if isinstance(part, Product) else part.bound.returns
            for name in missing:
                if name not in places:
                    places[name] = fresh(bound, name, tensors[0].device)
            if isinstance(part, Product):
                part.run(places)
            else:
                own = [t.name for t in part.bound.tensors if t.role is Role.INPUT] + list(part.bound.returns)
                launch(part, [places[name] for name in own])


class LibraryKernel(GpuKernel):
    """Kernels of an operator for a graphics processor, with products that are torch's between them.

    Attributes:
        parts: the kernels and the products, in order.
        compile_seconds, resources: as of `GpuKernel`, of all kernels.
    """

    def __init__(self, kernels: GpuKernels, parts: Parts, options: MappingOptions | None, machine: GpuTarget) -> None:
        self._kernels, self._options, self._target = kernels, options, machine
        self._emulated = OncePerKey(len(parts.parts))
        self.parts = parts

    def __repr__(self) -> str:
        return f"<kernels of {signature(self._kernels.interface.function)} for {self._target.name}, with a library's>"

    @property
    def compile_seconds(self) -> float:
        return sum(kernel.compile_seconds for kernel in self.parts.kernels)

    @property
    @guarded
    def resources(self) -> dict[str, int]:
        found = [kernel.resources for kernel in self.parts.kernels]
        added = ("kernels", "temporary_bytes", "source_bytes")
        return {name: (sum if name in added else max)(r[name] for r in found) for name in (found[0] if found else ())}

    @guarded
    def source(self, kind: str = "cuda") -> str:
        """As `GpuKernel.source`, part after part; a product as the call that it is, in a comment."""
        return "\n".join(
            f"// {part}\n" if isinstance(part, Product) else part.source(kind) for part in self.parts.parts
        )

    @guarded
    def emulate(self, /, *tensors: object, **initial: object) -> Any:
        """As `GpuKernel.emulate`; torch computes its part on the CPU."""
        interface = self._kernels.interface
        arguments = gather(interface, tensors, initial)
        sizes, strides = sizes_of(interface.function, arguments), tuple(map(normal_strides, arguments.inputs))
        bound, parts = self._kernels.kernels.bind(sizes), self.parts
        if with_strides(bound, strides) != parts.bound:
            raise _other_sizes(bound.name)
        outputs = tuple(fresh(bound, name, torch.device("cpu")) for name in bound.returns)
        fill_initial(bound, arguments, outputs)
        if not all(map(is_aligned, arguments.inputs)):
            parts = self._kernels.parts(sizes, strides, self._options, self._target, aligned=False) or parts

        def launch(kernel: GpuCompiled, given: Sequence[Tensor]) -> None:
            emulated = self._emulated.get(kernel, lambda: emulator.build([kernel.code])[0])
            number, value = run_emulated(kernel, emulated, given)
            if number:
                raise failure(bound.name, kernel.sites, number, value)

        parts.run((*arguments.inputs, *outputs), launch)
        return hand_back(outputs, arguments.convert)
