"""The GPU compiler: `GPU_PASSES` lists every step from a bound def to CUDA C++.

No step needs a GPU or a driver. NVRTC assembles the text when machine code or a resource report is requested.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..codegen.gpu import cuda_printer, opencl_printer
from ..codegen.gpu.gpu_printer import GpuCode, shared_bytes
from ..codegen.gpu.ptx import architecture_for
from ..core.decisions import Decision, close_book, record_decision
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError, CannotLower
from ..loop_ir.binding_checks import check_bindings
from ..loop_ir.build import const
from ..loop_ir.intervals import Interval
from ..loop_ir.nodes import Buffer, CheckSite, Kernel, Module
from ..loop_ir.passes.simplify import simplify
from ..loop_ir.rewrite import substitute_stmt
from ..loop_ir.show import format_program
from ..options import GpuOptions, MappingOptions, TileOptions
from ..runtime.cuda import cubins, nvrtc
from ..runtime.cuda.disassembler import disassemble
from ..runtime.cuda.nvrtc import Cubin
from ..structured.match.product_matching import has_narrow_products
from ..target import GpuTarget
from ..tc_lang.ir import BoundFunction, Role
from ..tc_lang.syntax.printer import format_ranges
from ..tc_lang.transforms.canonical_bound import canonicalize
from ..tc_lang.transforms.legalize import legalize
from .compiled_kernel import CompiledBase, keep_results
from .cpu_passes import Pass, check_sites_of, log_compilation, log_decisions, run_passes, with_original_names

MAX_TENSOR_CORE_CYCLES_RATIO = 3 / 4
"""Largest ratio of estimated cycles with to without tensor cores for which they are used; estimates are rough."""


@dataclass(frozen=True, slots=True)
class GpuPassContext:
    """The constants of a compilation.

    Attributes:
        options: the options; None leaves the lowering to the cost model.
        target: the GPU.
        aligned: whether the code may assume that arguments are aligned to 16 bytes.
        tensor_cores: whether products may use tensor cores, which OpenCL cannot express.
    """

    options: GpuOptions | None
    target: GpuTarget
    aligned: bool = True
    tensor_cores: bool = True


def import_polyhedral_mapper() -> Any:
    """The polyhedral mapper, imported when something is mapped."""
    from ..polyhedral.gpu import lower_gpu

    return lower_gpu


def _tile_lowering() -> Any:
    """The lowering to tile programs, imported when a def may have products for tensor cores."""
    from ..tiles.products import lower_def

    return lower_def


def _lower(bound: BoundFunction, context: GpuPassContext) -> Module:
    divided = _divide_products(bound, context)
    if divided is not None:
        get_logger("schedule").debug("%s: on tensor cores: %s", bound.name, "; ".join(map(str, divided.regions)))
    try:
        module: Module = (
            import_polyhedral_mapper().lower_gpu(bound, context.options, context.target)
            if divided is None
            else _tile_lowering().lower_divided(divided, context.target)
        )
    except CannotLower as refusal:
        raise ArgumentError(f"{bound.name} cannot be mapped to {context.target.name}: {refusal}") from refusal
    check_bindings(module)
    for kernel in module.kernels:
        check_limits(bound.name, kernel, context.target)
    return module


def _divide_products(bound: BoundFunction, context: GpuPassContext) -> Any:
    """The division of a def (legalized) into products for tensor cores and the rest; None: no tensor cores.

    Raises ArgumentError if `TileOptions` are given but no product fits tensor cores.
    """
    asked = isinstance(context.options, TileOptions)
    if isinstance(context.options, MappingOptions) or not context.tensor_cores:
        return None
    if not asked and not (context.target.tensor_ops and has_narrow_products(bound)):
        return None
    boxed = context.target if context.aligned else replace(context.target, group_ops=0)  # TMA needs 16 bytes
    try:
        divided = _tile_lowering().divide_def(bound, context.options or TileOptions(), boxed)
    except CannotLower as reason:
        if asked:
            raise ArgumentError(
                f"no product of {bound.name} is for the tensor cores of {context.target.name}: {reason}",
                suggestion="leave the options out, or give MappingOptions(...)",
            ) from reason
        return None
    if asked:
        _record_tensor_cores(divided, None)
        return divided
    with close_book():  # only an estimate, not a decision to record
        mapped = import_polyhedral_mapper().estimate_cycles(bound, context.target)
    _record_tensor_cores(divided, mapped)
    return divided if divided.cycles < MAX_TENSOR_CORE_CYCLES_RATIO * mapped else None


def _record_tensor_cores(divided: Any, mapped: float | None) -> None:
    """Record whether products use tensor cores. mapped: estimated cycles without them; None if options demand them."""

    def decide() -> Decision:
        names = tuple(s.name for r in divided.regions for s in r.region.statements)
        taken = mapped is None or divided.cycles < MAX_TENSOR_CORE_CYCLES_RATIO * mapped
        chosen = "; ".join(map(str, divided.regions)) if taken else "without tensor cores"
        why = (
            "tile options were given"
            if mapped is None
            else f"they pay if they take at most {MAX_TENSOR_CORE_CYCLES_RATIO} times the cycles"
        )
        others = (("cycles without tensor cores", mapped),) if mapped is not None else ()
        return Decision("lowering", names, chosen, why, (("cycles on tensor cores", divided.cycles), *others))

    record_decision(decide)


def prefers_tensor_cores(function: BoundFunction, target: GpuTarget) -> bool:
    """Whether some product of a def (legalized) uses tensor cores by default."""
    return _divide_products(function, GpuPassContext(None, target)) is not None


def check_limits(op: str, kernel: Kernel, target: GpuTarget) -> None:
    """Check that `target` can launch the kernel. Raises ArgumentError."""
    if kernel.launch is None:
        return
    limits = (
        *(
            (f"blocks along {axis}", n, most)
            for axis, n, most in zip("xyz", kernel.launch.grid, target.grid, strict=True)
        ),
        *((f"threads along {axis}", n, m) for axis, n, m in zip("xyz", kernel.launch.block, target.block, strict=True)),
        ("threads in a block", prod(kernel.launch.block), target.max_threads_per_block),
        ("bytes of shared memory", sum(shared_bytes(kernel.body).values()), target.max_shared_optin),
    )
    for what, number, most in limits:
        if number > most:
            raise ArgumentError(
                f"a kernel of {op} needs {number} {what}", expected=f"at most {most} on {target.name}",
                suggestion="map to fewer threads, use smaller tiles or less shared memory",
            )  # fmt: skip


def _simplify(module: Module, _: GpuPassContext) -> Module:
    return replace(module, kernels=tuple(map(simplify_kernel, module.kernels)))


def simplify_kernel(kernel: Kernel) -> Kernel:
    """The kernel with its body simplified, using the ranges of block and thread indices."""
    if kernel.launch is None:
        return replace(kernel, body=simplify(kernel.body))
    extents = dict(kernel.launch.ranges())
    body = substitute_stmt(kernel.body, {name: const(0) for name, n in extents.items() if n == 1})
    return replace(kernel, body=simplify(body, {name: Interval(0, n - 1) for name, n in extents.items()}))


def _emit_cuda_code(module: Module, context: GpuPassContext) -> GpuCode:
    check_bindings(module)
    return cuda_printer.emit_cuda(module, aligned=context.aligned)


GPU_PASSES = (
    Pass("canonicalize", lambda bound, context: canonicalize(bound, bound.name), repr),
    Pass("legalize", lambda bound, context: legalize(bound), repr),
    Pass("lower", _lower),
    Pass("simplify", _simplify, topic="loops"),
    Pass("emit", _emit_cuda_code, lambda code: code.source, "cu", "code"),
)


@dataclass(frozen=True, eq=False)
class CompiledGpuKernel(CompiledBase):
    """A def as CUDA C++.

    Attributes:
        options: the options; None if the cost model chose.
        aligned: whether arguments must be aligned to 16 bytes, if the code uses that; see `code`.
        code: the text, with canonical names except those of kernels, and its launches.
        arguments, temporaries: the arrays that launches refer to by number, in order, with canonical names; a call
            allocates the temporaries.
        sites: the check sites, indexed by the number that a failed check reports.
    """

    options: GpuOptions | None
    target: GpuTarget
    aligned: bool
    code: GpuCode
    arguments: tuple[Buffer, ...]
    temporaries: tuple[Buffer, ...]
    sites: tuple[CheckSite, ...]

    def passes(self) -> tuple[Pass, ...]:
        return GPU_PASSES

    @staticmethod
    def source_kinds() -> Mapping[str, Callable[[CompiledGpuKernel], str]]:
        return GPU_KINDS

    @property
    def context(self) -> GpuPassContext:
        return GpuPassContext(self.options, self.target, self.aligned)

    def argument_places(self) -> list[int]:
        """For each of `arguments`, its position among the inputs followed by the outputs."""
        bound = canonicalize(self.bound)
        names = [*(t.name for t in bound.tensors if t.role is Role.INPUT), *bound.returns]
        return [names.index(b.name) for b in self.arguments]

    @property
    def header(self) -> str:
        """The content of the comment at the start of a text."""
        shapes = ", ".join(f"{t.name}({', '.join(map(str, t.shape))})" for t in self.bound.tensors if t.shape)
        text = def_text(self.text, self.bound.name)
        chosen = "chosen from the sizes" if self.options is None else repr(self.options)
        about = (f"sizes: {shapes}", f"mapping: {chosen}", f"target: {self.target.name}")
        return "\n".join(("", text.strip("\n"), "", *about))

    @functools.cached_property
    def cubin(self) -> Cubin:
        """Machine code. Raises ArgumentError if NVRTC is not installed."""
        return cubins.cubin_of(self.code.source, architecture_for(self.code.source, self.target.name))

    @property
    def resources(self) -> dict[str, int]:
        """The kernels and bytes of temporaries of a call, and the most threads and shared memory of a kernel's block.

        Temporaries whose size only a call knows are not counted.

        If NVRTC is installed, also the `worst_resources`.
        """
        kernels = self.code.kernels
        found = {
            "kernels": len(kernels),
            "temporary_bytes": sum(b.bytes for b in self.temporaries if not b.dynamic),
            "source_bytes": len(self.code.source),
            "threads": max((prod(k.launch.block) for k in kernels), default=0),
            "shared_bytes": max((k.shared + k.dynamic for k in kernels), default=0),
        }
        return found | (worst_resources(self.cubin) if nvrtc.is_nvrtc_available() else {})


def worst_resources(cubin: Cubin) -> dict[str, int]:
    """The most registers per thread, bytes of local memory, and bytes of spills of any kernel."""
    reports = cubin.resources.values()
    return {
        "registers": max((r.registers for r in reports), default=0),
        "local_bytes": max((r.local for r in reports), default=0),
        "spill_bytes": max((r.spill_stores + r.spill_loads for r in reports), default=0),
    }


GPU_KINDS: Mapping[str, Callable[[CompiledGpuKernel], str]] = {
    "tc": lambda k: k.text,
    "ranges": lambda k: format_ranges(k.bound),
    "schedule": lambda k: _explain_lowering(k),
    "tiles": lambda k: _format_tiles(k),
    "loops": lambda k: format_program(with_original_names(k.rerun_until("simplify"), k.bound)),
    "cuda": lambda k: (
        cuda_printer.emit_cuda(
            with_original_names(k.rerun_until("simplify"), k.bound), header=k.header, aligned=k.aligned
        ).source
    ),
    "sass": lambda k: disassemble(k.cubin),
    "opencl": lambda k: (
        opencl_printer.emit_opencl(with_original_names(_lower_without_tensor_cores(k), k.bound), header=k.text).source
    ),
}
"""The printers of `source` for a GPU kernel."""


def _explain_lowering(k: CompiledGpuKernel) -> str:
    """Explain how the def is mapped."""
    function = legalize(k.bound)
    divided = _divide_products(function, k.context)
    if divided is None:
        return str(import_polyhedral_mapper().explain_gpu(function, k.options, k.target))
    mapped = import_polyhedral_mapper().estimate_cycles(function, k.target) / k.target.clock * 1e6
    return f"without tensor cores: {mapped:.1f} us\n{_tile_lowering().explain_divided(divided, k.target)}"


def _format_tiles(k: CompiledGpuKernel) -> str:
    """The tile programs as text. Raises CannotLower if no product uses tensor cores."""
    divided = _divide_products(legalize(k.bound), k.context)
    if divided is None:
        raise CannotLower("none of its products is on tensor cores")
    return str(_tile_lowering().format_divided(divided, k.target))


def _lower_without_tensor_cores(k: CompiledGpuKernel) -> Module:
    """The module lowered without tensor cores."""
    context = replace(k.context, tensor_cores=False, options=None if isinstance(k.options, TileOptions) else k.options)
    module: Module = k.rerun_all_until("simplify", context)["simplify"]
    return module


def compile_gpu(
    bound: BoundFunction, text: str, options: GpuOptions | None, target: GpuTarget, *, aligned: bool = True
) -> CompiledGpuKernel:
    """Compile `bound`, whose def has the source `text`.

    Raises:
        ArgumentError: `options` do not apply, or `target` cannot launch a kernel.
    """
    context = GpuPassContext(options, target, aligned)
    with log_decisions(bound):
        results, seconds, dump = run_passes(GPU_PASSES, bound, text, context)
    module: Module = results["simplify"]
    compiled = CompiledGpuKernel(
        bound, text, options, target, seconds, aligned, results["emit"],
        module.arguments, module.temporaries, check_sites_of(module, bound),
    )  # fmt: skip
    keep_results(compiled, results)
    log_compilation(compiled, dump)
    return compiled


def def_text(text: str, name: str) -> str:
    """The source of the def called `name` in a program; the whole program if there is none."""
    found = re.search(rf"\bdef\s+{re.escape(name)}\b[^{{]*{{[^}}]*}}", text)
    return found[0] if found else text
