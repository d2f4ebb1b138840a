"""The compiler for graphics processors: `GPU_PASSES` lists what happens between a bound def and its text.

No GPU and no driver is needed for any of it. Assembling the text is left until machine code or its report is asked for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from .codegen import cuda, opencl
from .codegen.gpu import GpuCode, shared_bytes
from .compiled import Compilation
from .compiler import Pass, explain_compilation, readable, run_passes, sites_of
from .errors import ArgumentError, CannotLower
from .loop_ir.affine import Interval
from .loop_ir.binding import check_bindings
from .loop_ir.build import const
from .loop_ir.nodes import Buffer, CheckSite, Kernel, Module
from .loop_ir.rewrite import substitute_stmt
from .loop_ir.show import show
from .loop_ir.simplify import simplify
from .options import MappingOptions
from .runtime import cubins, nvrtc
from .runtime.nvrtc import Cubin
from .target import GpuTarget
from .tc_lang.canonical_bound import canonicalize
from .tc_lang.function import BoundFunction
from .tc_lang.legalise import legalise


@dataclass(frozen=True, slots=True)
class GpuJob:
    """What stays the same while a def goes through the passes.

    Attributes:
        options: None leaves the mapping to the cost model.
        aligned: whether the text may rely on arguments at multiples of 16 bytes.
    """

    options: MappingOptions | None
    target: GpuTarget
    aligned: bool = True


def _mapper() -> Any:
    """The polyhedral mapper, imported when something is mapped."""
    from .polyhedral import gpu

    return gpu


def _lower(bound: BoundFunction, job: GpuJob) -> Module:
    try:
        module: Module = _mapper().lower(bound, job.options, job.target)
    except CannotLower as refusal:
        raise ArgumentError(f"{bound.name} cannot be mapped to {job.target.name}: {refusal}") from refusal
    check_bindings(module)
    for kernel in module.kernels:
        check_limits(bound.name, kernel, job.target)
    return module


def check_limits(op: str, kernel: Kernel, target: GpuTarget) -> None:
    """Can `target` launch the kernel? Raises ArgumentError."""
    if kernel.launch is None:
        return
    limits = (
        *(
            (f"blocks along {axis}", n, most)
            for axis, n, most in zip("xyz", kernel.launch.grid, target.grid, strict=True)
        ),
        *((f"threads along {axis}", n, m) for axis, n, m in zip("xyz", kernel.launch.block, target.block, strict=True)),
        ("threads in a block", prod(kernel.launch.block), target.threads),
        ("bytes of shared memory", sum(shared_bytes(kernel.body).values()), target.shared_optin),
    )
    for what, number, most in limits:
        if number > most:
            raise ArgumentError(
                f"a kernel of {op} needs {number} {what}", expected=f"at most {most} on {target.name}",
                suggestion="map to fewer threads, use smaller tiles or less shared memory",
            )  # fmt: skip


def _simplify(module: Module, _: GpuJob) -> Module:
    return replace(module, kernels=tuple(map(_simplified, module.kernels)))


def _simplified(kernel: Kernel) -> Kernel:
    """The body simplified, knowing where the variables of the launch lie."""
    if kernel.launch is None:
        return replace(kernel, body=simplify(kernel.body))
    extents = dict(kernel.launch.ranges())
    body = substitute_stmt(kernel.body, {name: const(0) for name, n in extents.items() if n == 1})
    return replace(kernel, body=simplify(body, {name: Interval(0, n - 1) for name, n in extents.items()}))


def _emit(module: Module, job: GpuJob) -> GpuCode:
    check_bindings(module)
    return cuda.emit(module, aligned=job.aligned)


GPU_PASSES = (
    Pass("canonicalize", lambda bound, job: canonicalize(bound, bound.name), repr),
    Pass("legalise", lambda bound, job: legalise(bound), repr),
    Pass("lower", _lower),
    Pass("simplify", _simplify, topic="loops"),
    Pass("emit", _emit, lambda code: code.source, "cu", "code"),
)


@dataclass(frozen=True, eq=False)
class GpuCompiled(Compilation):
    """A def as CUDA C++.

    Attributes:
        options: None where the cost model chose.
        aligned: whether it is for arguments at multiples of 16 bytes only; `code` tells whether it needs that.
        code: the text, in canonical names but for the kernels', and its launches.
        arguments, temporaries: the arrays that launches count, in order, in canonical names; calls provide the latter.
        sites: what the number of a failed check means.
    """

    options: MappingOptions | None
    target: GpuTarget
    aligned: bool
    code: GpuCode
    arguments: tuple[Buffer, ...]
    temporaries: tuple[Buffer, ...]
    sites: tuple[CheckSite, ...]

    @staticmethod
    def passes() -> tuple[Pass, ...]:
        return GPU_PASSES

    @staticmethod
    def kinds() -> Mapping[str, Callable[[GpuCompiled], str]]:
        return GPU_KINDS

    @property
    def job(self) -> GpuJob:
        return GpuJob(self.options, self.target, self.aligned)

    @property
    def header(self) -> str:
        """What the opening comment of a text says to people."""
        shapes = ", ".join(f"{t.name}({', '.join(map(str, t.shape))})" for t in self.bound.tensors if t.shape)
        text = definition(self.text, self.bound.name)
        chosen = "chosen from the sizes" if self.options is None else repr(self.options)
        about = (f"sizes: {shapes}", f"mapping: {chosen}", f"target: {self.target.name}")
        return "\n".join(("", text.strip("\n"), "", *about))

    @functools.cached_property
    def cubin(self) -> Cubin:
        """Machine code. Raises ArgumentError where NVRTC is not installed."""
        return cubins.machine_code(self.code.source, self.target.name)

    @property
    def resources(self) -> dict[str, int]:
        """What a call takes: kernels, bytes of temporaries, and of the largest kernel threads and shared memory.

        Where NVRTC is installed also registers, and bytes of local memory and of spills, of the worst kernel.
        """
        kernels = self.code.kernels
        found = {
            "kernels": len(kernels),
            "temporary_bytes": sum(b.bytes for b in self.temporaries),
            "source_bytes": len(self.code.source),
            "threads": max((prod(k.launch.block) for k in kernels), default=0),
            "shared_bytes": max((k.shared + k.dynamic for k in kernels), default=0),
        }
        if nvrtc.is_available():
            reports = self.cubin.resources.values()
            found["registers"] = max((r.registers for r in reports), default=0)
            found["local_bytes"] = max((r.local for r in reports), default=0)
            found["spill_bytes"] = max((r.spill_stores + r.spill_loads for r in reports), default=0)
        return found


GPU_KINDS: Mapping[str, Callable[[GpuCompiled], str]] = {
    "tc": lambda k: k.text,
    "schedule": lambda k: str(_mapper().explain(legalise(k.bound), k.options, k.target)),
    "loops": lambda k: show(readable(k.stage("simplify"), k.bound)),
    "cuda": lambda k: cuda.emit(readable(k.stage("simplify"), k.bound), header=k.header, aligned=k.aligned).source,
    "opencl": lambda k: opencl.emit(readable(k.stage("simplify"), k.bound), header=k.text).source,
}
"""What `source` of a kernel for a graphics processor can show."""


def compile_gpu(
    bound: BoundFunction, text: str, options: MappingOptions | None, target: GpuTarget, *, aligned: bool = True
) -> GpuCompiled:
    """Run `GPU_PASSES` on `bound`, whose def reads `text`. Raises ArgumentError where `target` has too little of it."""
    job = GpuJob(options, target, aligned)
    results, seconds, dump = run_passes(GPU_PASSES, bound, text, job)
    module: Module = results["simplify"]
    compiled = GpuCompiled(
        bound, text, options, target, seconds, aligned, results["emit"],
        module.arguments, module.temporaries, sites_of(module, bound),
    )  # fmt: skip
    explain_compilation(compiled, dump)
    return compiled


def definition(text: str, name: str) -> str:
    """The def called `name` of a program."""
    found = re.search(rf"\bdef\s+{re.escape(name)}\b[^{{]*{{[^}}]*}}", text)
    return found[0] if found else text
