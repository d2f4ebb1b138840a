"""Tile kernels compiled for sizes and a target: texts, resources, emulated runs, launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...codegen.gpu import cuda_printer
from ...codegen.gpu.gpu_printer import GpuCode
from ...codegen.gpu.ptx import architecture_for
from ...compiler.gpu_passes import check_limits
from ...core.error_boundary import only_tc_errors
from ...core.errors import ArgumentError
from ...loop_ir import nodes as ir
from ...loop_ir.show import format_program
from ...loop_ir.verify import UnprovenBoundsError, verify
from ...runtime.cuda import cubins, launch, nvrtc
from ...runtime.cuda.disassembler import disassemble
from ...runtime.cuda.launch import CudaRunner
from ...runtime.cuda.nvrtc import Cubin
from ...runtime.emulate import emulator
from ...target import GpuTarget, parse_gpu_target
from ...tiles.check.check_program import check_program
from ...tiles.check.shared_accesses import bank_turns
from ...tiles.lower.lower_tiles import format_tiles, lower_program
from ...tiles.specs import Program
from ...tiles.tile_program import TileProgram
from . import device_arguments
from .device_arguments import is_aligned

if TYPE_CHECKING:
    from ...explain.kernel_report import Report


class TileKernel:
    """A tile kernel for any sizes, made by `tc.tile_kernel`. Calls compile it once for each combination of sizes."""

    def __init__(self, program: TileProgram) -> None:
        self.program = program
        self._compiled: dict[Any, CompiledTileKernel] = {}
        functools.update_wrapper(self, program.function)

    def __repr__(self) -> str:
        return f"<tile kernel {self.program.name}: {self.program.header}>"

    @only_tc_errors
    def compile(self, *inputs: Tensor, target: str | GpuTarget | None = None, **parameters: Any) -> CompiledTileKernel:
        """The kernel for inputs of these sizes.

        Args:
            inputs: the tensors of the header, in order; only their sizes and types matter.
            target: a target or its name, such as "cuda:sm_80"; None: the device of the inputs.
            parameters: values of the function's parameters after its tensors.

        Raises:
            ArgumentError: the inputs disagree with the header, or the program cannot be decomposed for the target.
        """
        self._check_types(inputs)
        if target is None:
            target = self._target_of(inputs)
        known = target if isinstance(target, GpuTarget) else parse_gpu_target(target)
        shapes = {p.name: tuple(x.shape) for p, x in zip(self.program.header.inputs, inputs, strict=True)}
        key = tuple(shapes.items()), known, tuple(sorted(parameters.items(), key=lambda item: item[0]))
        try:
            found = self._compiled.get(key)
        except TypeError:
            raise ArgumentError("a parameter of a tile kernel cannot be a key", found=str(parameters)) from None
        if found is None:
            found = self._compiled[key] = _compile(self.program, shapes, known, parameters)
        return found

    def __call__(self, *inputs: Tensor, **parameters: Any) -> Any:
        """The outputs for inputs on a CUDA device. Raises ArgumentError as `compile` does."""
        return self.compile(*inputs, **parameters)(*inputs)

    def _target_of(self, inputs: tuple[Any, ...]) -> GpuTarget:
        """The device of all inputs. Raises ArgumentError."""
        help = "compile(..., target='cuda:sm_80').emulate(...) runs it on the CPU"
        return launch.device_target(_find_common_device(self.program.name, inputs, help).index or 0)

    def _check_types(self, inputs: tuple[Any, ...]) -> None:
        wanted = self.program.header.inputs
        if len(inputs) != len(wanted):
            raise ArgumentError(
                f"{self.program.name} takes {len(wanted)} tensors", expected=str(self.program.header),
                found=str(len(inputs)),
            )  # fmt: skip
        for p, x in zip(wanted, inputs, strict=True):
            if not isinstance(x, Tensor) or x.dtype != getattr(torch, p.dtype.name):
                raise ArgumentError(
                    f"{p.name} has another type", expected=str(p),
                    found=str(x.dtype) if isinstance(x, Tensor) else type(x).__name__,
                )  # fmt: skip


def _compile(
    program: TileProgram, shapes: dict[str, tuple[int, ...]], target: GpuTarget, parameters: dict[str, Any]
) -> CompiledTileKernel:
    traced = program.trace(shapes, target, parameters)
    module = lower_program(traced)
    try:
        verify(module)
    except UnprovenBoundsError as error:
        raise ArgumentError(
            f"{program.name} reaches beyond a tensor", expected="indices inside of it, or k.when(condition)",
            found=str(error),
        ) from error  # fmt: skip
    for kernel in module.kernels:
        check_limits(program.name, kernel, target)
    return CompiledTileKernel(
        program, traced, module, target, cuda_printer.emit_cuda(module, header=str(program.header))
    )


@dataclass(frozen=True, eq=False)
class CompiledTileKernel:
    """A tile kernel for given sizes.

    Attributes:
        program: the program for any sizes.
        traced: the program for these sizes, decomposed down to instructions.
        module: its loop program.
        target: the GPU that it was compiled for.
        code: its CUDA text and launch.
    """

    program: TileProgram
    traced: Program
    module: ir.Module
    target: GpuTarget
    code: GpuCode

    @only_tc_errors
    def source(self, kind: str = "tiles") -> str:
        """The kernel as text of a kind: "tiles" (the paper's notation), "loops", "cuda" or "sass" (machine code).

        Raises ArgumentError for other kinds.
        """
        if kind not in _SOURCES:
            raise ArgumentError(f"there is no source {kind!r}", expected=", ".join(_SOURCES))
        return _SOURCES[kind](self)

    @only_tc_errors
    def explain(self) -> Report:
        """Explain the kernel's code: the function, its tiles, loops, CUDA and PTX, and how it uses memory.

        `print` the report for the short form, `save("x.html")` it for the page.
        """
        from ...explain.tiles import explain_tile_kernel

        return explain_tile_kernel(self.program.name, str(self.program.header), self.program.function, self)

    @only_tc_errors
    def check(self) -> int:
        """Prove that the body of every move and product implements its spec; return the number of proofs.

        The bodies run on tags instead of numbers, for the first and the last blocks and loop iterations.

        Raises:
            InternalError: a body moves an element to a wrong place, or computes some (m, n, k) twice or never.
        """
        return check_program(self.traced)

    @functools.cached_property
    def cubin(self) -> Cubin:
        """The machine code. Raises ArgumentError if NVRTC is not installed."""
        return cubins.cubin_of(self.code.source, architecture_for(self.code.source, self.target.name))

    @property
    def resources(self) -> dict[str, int]:
        """Blocks of the grid and of a cluster, threads and bytes of shared memory per block, and `bank_turns`.

        `bank_turns` counts the extra turns that bank conflicts cost. If NVRTC is installed, also registers, bytes of
        local memory and bytes of spills per thread.
        """
        (kernel,) = self.code.kernels
        found = {
            "blocks": prod(kernel.launch.grid),
            "cluster": kernel.launch.cluster,
            "threads": prod(kernel.launch.block),
            "shared_bytes": kernel.shared + kernel.dynamic,
            "bank_turns": bank_turns(self.module),
        }
        if nvrtc.is_nvrtc_available():
            (report,) = self.cubin.resources.values()
            found["registers"] = report.registers
            found["local_bytes"] = report.local
            found["spill_bytes"] = report.spill_stores + report.spill_loads
        return found

    @only_tc_errors
    def emulate(self, *inputs: Tensor) -> Any:
        """Run the CUDA text on the CPU and check every access. Returns the output, or a tuple of several.

        Raises:
            ArgumentError: no C++ compiler is installed, or the inputs have other sizes or types.
            InternalError: a race, a read of uninitialized memory, or an access out of bounds; the message has the
                tensor, the thread and the line.
        """
        self._check(inputs)
        outputs = self._empty("cpu")
        both = [*outputs, *(x.detach().cpu().contiguous() for x in inputs)]
        arrays = {b.name: _as_numpy(x) for b, x in zip(self.module.arguments, both, strict=True)}
        emulator.run_emulated_module(self._load_emulator, self.module, arrays)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @only_tc_errors
    def __call__(self, *inputs: Tensor) -> Any:
        """Run on the CUDA device of the inputs, on torch's current stream.

        Raises:
            ArgumentError: the inputs have other sizes or types, are not on one CUDA device, or are on one that does not
                run the code of `target`; or a CUDA graph is being captured, and the kernel has not run on the device.
        """
        self._check(inputs)
        device = _find_common_device(self.program.name, inputs, "compile(...).emulate(...) runs it on the CPU")
        dense = [x.detach().resolve_neg().contiguous() for x in inputs]
        dense = [x if is_aligned(x) else x.clone() for x in dense]
        outputs = self._empty(device)
        self._runner(device)(*outputs, *dense)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @functools.cached_property
    def _load_emulator(self) -> emulator.Emulated:
        return emulator.build_emulated([self.code])[0]

    @functools.cached_property
    def _runners(self) -> dict[int, CudaRunner]:
        return {}

    def _runner(self, device: torch.device) -> CudaRunner:
        index = device.index or 0
        if index not in self._runners:
            launch.check_runs_on(self.target, device)
            launch.check_not_capturing(self.program.name, device)
            launches = launch.load_launches_on(self.code, self.cubin, index)
            order = range(len(self.module.arguments))
            self._runners[index] = CudaRunner(launches, device, order, (), None)
        return self._runners[index]

    def _empty(self, device: torch.device | str) -> list[Tensor]:
        outputs = self.module.arguments[: self.traced.outputs]
        return [torch.empty(b.shape, dtype=getattr(torch, b.type.dtype.name), device=device) for b in outputs]

    def _check(self, inputs: tuple[Any, ...]) -> None:
        wanted = self.module.arguments[self.traced.outputs :]
        found = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in inputs]
        if found != [(b.shape, getattr(torch, b.type.dtype.name)) for b in wanted]:
            raise ArgumentError(
                f"{self.program.name} was compiled for other tensors",
                expected=", ".join(f"{b.name}:{list(b.shape)}.{b.type.dtype.name}" for b in wanted),
                found=", ".join(f"{list(f[0])}.{str(f[1]).removeprefix('torch.')}" if f else "none" for f in found),
            )


def _find_common_device(name: str, inputs: tuple[Any, ...], suggestion: str) -> torch.device:
    """The CUDA device of all inputs. Raises ArgumentError if there is none, since other addresses break the device."""
    devices = {x.device for x in inputs if isinstance(x, Tensor)}
    device = next(iter(devices), None)
    if device is None or len(devices) > 1 or device.type != device_arguments.KIND:
        raise ArgumentError(
            f"{name} takes tensors on one CUDA device", found=", ".join(sorted(map(str, devices))) or "none",
            suggestion=suggestion,
        )  # fmt: skip
    return device


def _as_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a tensor as an array; bfloat16 as uint16."""
    bits: np.ndarray[Any, Any] = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return bits


_SOURCES: dict[str, Callable[[CompiledTileKernel], str]] = {
    "tiles": lambda k: format_tiles(k.traced),
    "loops": lambda k: format_program(k.module),
    "cuda": lambda k: k.code.source,
    "sass": lambda k: disassemble(k.cubin),
}
