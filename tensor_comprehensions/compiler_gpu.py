"""The compiler for graphics processors: `GPU_PASSES` lists what happens between a bound def and its text.

No GPU and no driver is needed for any of it. Assembling the text is left until machine code or its report is asked for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import DEBUG
from math import prod
from typing import Any

from .codegen import cuda, opencl
from .codegen.gpu import GpuCode, shared_bytes
from .compiler import Pass, digest, run_passes, temporary_bytes
from .errors import ArgumentError, CannotLower
from .inspection import Dump, logger
from .loop_ir.affine import Interval
from .loop_ir.build import const
from .loop_ir.nodes import CheckSite, Kernel, Module
from .loop_ir.rewrite import substitute_stmt
from .loop_ir.show import show
from .loop_ir.simplify import simplify
from .options import MappingOptions
from .runtime import nvrtc
from .runtime.nvrtc import Cubin
from .target import GpuTarget
from .tc_lang.function import BoundFunction
from .tc_lang.legalise import legalise


@dataclass(frozen=True, slots=True)
class GpuJob:
    """What stays the same while a def goes through the passes. options: None leaves the mapping to the cost model."""

    options: MappingOptions | None
    target: GpuTarget
    header: str


def _mapper() -> Any:
    """The polyhedral mapper, imported when something is mapped."""
    from .polyhedral import gpu

    return gpu


def _lower(bound: BoundFunction, job: GpuJob) -> Module:
    try:
        module: Module = _mapper().lower(bound, job.options, job.target)
    except CannotLower as refusal:
        raise ArgumentError(f"{bound.name} cannot be mapped to {job.target.name}: {refusal}") from refusal
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


GPU_PASSES = (
    Pass("legalise", lambda bound, job: legalise(bound), repr),
    Pass("lower", _lower),
    Pass("simplify", _simplify, topic="loops"),
    Pass("emit", lambda module, job: cuda.emit(module, header=job.header), lambda code: code.source, "cu", "code"),
)


@dataclass(frozen=True, eq=False)
class GpuCompiled:
    """A def as CUDA C++, what it was made from and what that cost.

    Attributes:
        bound: the def with its sizes; `text` is the def as written.
        options, target: what it was compiled with and for.
        module: what is printed. code: its text and launches.
        seconds: the time of each pass, in order.
    """

    bound: BoundFunction
    text: str
    options: MappingOptions | None
    target: GpuTarget
    module: Module
    code: GpuCode
    seconds: tuple[tuple[str, float], ...]

    @property
    def compile_seconds(self) -> float:
        return sum(seconds for _, seconds in self.seconds)

    @property
    def sites(self) -> tuple[CheckSite, ...]:
        return self.module.sites

    @property
    def temporaries(self) -> tuple[int, ...]:
        return temporary_bytes(self.module)

    @functools.cached_property
    def unaligned(self) -> GpuCode:
        """The text for arguments that start anywhere."""
        return cuda.emit(self.module, header=header(self.text, self.bound, self.options, self.target), aligned=False)

    @functools.cached_property
    def cubin(self) -> Cubin:
        """Machine code. Raises ArgumentError where NVRTC is not installed."""
        return nvrtc.compile_text(self.code.source, self.target.name, name=f"{self.bound.name}.cu")

    @property
    def resources(self) -> dict[str, int]:
        """What a call takes: kernels, bytes of temporaries, and of the largest kernel threads and shared memory.

        Where NVRTC is installed also registers, and bytes of local memory and of spills, of the worst kernel.
        """
        kernels = self.code.kernels
        found = {
            "kernels": len(kernels),
            "temporary_bytes": sum(self.temporaries),
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

    def stage(self, name: str) -> Any:
        """The result of the pass `name`, made again."""
        job = GpuJob(self.options, self.target, header(self.text, self.bound, self.options, self.target))
        value: Any = self.bound
        for step in GPU_PASSES:
            value = step.run(value, job)
            if step.name == name:
                break
        return value

    def source(self, kind: str = "cuda") -> str:
        """The kernel as text: one of `GPU_KINDS`. Raises ArgumentError for another kind, or one without a spelling."""
        if kind not in GPU_KINDS:
            raise ArgumentError(f"a kernel has no source of kind {kind!r}", expected=", ".join(GPU_KINDS))
        try:
            return GPU_KINDS[kind](self)
        except CannotLower as refusal:
            raise ArgumentError(f"{self.bound.name} cannot be printed as {kind}: {refusal}") from refusal


GPU_KINDS: Mapping[str, Callable[[GpuCompiled], str]] = {
    "tc": lambda k: k.text,
    "schedule": lambda k: str(_mapper().explain(k.stage("legalise"), k.options, k.target)),
    "loops": lambda k: show(k.module),
    "cuda": lambda k: k.code.source,
    "opencl": lambda k: opencl.emit(k.module, header=k.text).source,
}
"""What `GpuCompiled.source` can show."""


def compile_gpu(bound: BoundFunction, text: str, options: MappingOptions | None, target: GpuTarget) -> GpuCompiled:
    """Run `GPU_PASSES` on `bound`, whose def reads `text`. Raises ArgumentError where `target` has too little of it."""
    dump = Dump.of(f"{bound.name}_{digest(bound, options, target)}")
    if dump is not None:
        dump.write(0, "def", text, "tc")
        dump.write(1, "bound", repr(bound))
    job = GpuJob(options, target, header(text, bound, options, target))
    results, seconds = run_passes(GPU_PASSES, bound, job, dump)
    compiled = GpuCompiled(bound, text, options, target, results["simplify"], results["emit"], seconds)
    if dump is not None:
        dump.write(3, "schedule", compiled.source("schedule"))
    if logger("schedule").isEnabledFor(DEBUG):
        logger("schedule").debug("%s: schedule:\n%s", bound.name, compiled.source("schedule"))
    times = ", ".join(f"{step} {taken * 1e3:.1f}" for step, taken in seconds)
    logger("passes").debug("%s: %.1f ms: %s", bound.name, compiled.compile_seconds * 1e3, times)
    return compiled


def header(text: str, bound: BoundFunction, options: MappingOptions | None, target: GpuTarget) -> str:
    """What the opening comment of the text says."""
    shapes = ", ".join(f"{t.name}({', '.join(map(str, t.shape))})" for t in bound.tensors if t.shape)
    text = definition(text, bound.name)
    chosen = "chosen from the sizes" if options is None else repr(options)
    return "\n".join(("", text.strip("\n"), "", f"sizes: {shapes}", f"mapping: {chosen}", f"target: {target.name}"))


def definition(text: str, name: str) -> str:
    """The def called `name` of a program."""
    found = re.search(rf"\bdef\s+{re.escape(name)}\b[^{{]*{{[^}}]*}}", text)
    return found[0] if found else text
