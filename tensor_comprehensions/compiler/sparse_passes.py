"""The CPU compiler of sparse defs.

A problem is lowered to several phases, between which the caller allocates memory. Each phase is a module that goes
through `SPARSE_PASSES`, which are those of dense kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from ..core import knobs
from ..core.diagnostics import get_logger
from ..core.errors import InternalError
from ..core.lazy_import import lazy_module
from ..loop_ir.binding_checks import check_bindings
from ..loop_ir.nodes import Module, Stmt
from ..loop_ir.show import format_program
from ..runtime.cpu import host_symbols, object_code
from ..sparse.explain import explain, text_with_formats
from ..sparse.lower import lower
from ..sparse.shared_sparsity import make_cpu_problem
from ..sparse.sparse_problem import KernelRequest
from ..target import CpuTarget
from .compiled_sparse_kernel import CompiledSparseKernel

if TYPE_CHECKING:
    from ..codegen.c import c_printer
    from ..codegen.llvm import llvm_printer
    from ..loop_ir import verify
    from ..loop_ir.passes import scalar_promotion, simplify, unroll, vectorize
else:
    c_printer, llvm_printer = lazy_module("codegen.c.c_printer"), lazy_module("codegen.llvm.llvm_printer")
    verify = lazy_module("loop_ir.verify")
    scalar_promotion, simplify, unroll, vectorize = (
        lazy_module(f"loop_ir.passes.{name}") for name in ("scalar_promotion", "simplify", "unroll", "vectorize")
    )

SPARSE_PASSES: tuple[tuple[str, Callable[[Stmt], Stmt]], ...] = (
    ("simplify", lambda s: simplify.simplify(s)),
    ("vectorize", lambda s: vectorize.vectorize_loops(s)),
    ("unroll", lambda s: unroll.unroll_loops(s)),
    ("hoist", lambda s: scalar_promotion.hoist_accumulators(s)),
    ("simplify_again", lambda s: simplify.simplify(s)),
)
"""The passes for the body of every kernel, between `lower` and the LLVM printer."""


def _each_phase(text: Callable[[CompiledSparseKernel, Module], str]) -> Callable[[CompiledSparseKernel], str]:
    return lambda kernel: "\n".join(text(kernel, module) for module in kernel.phases)


def _emit_llvm_ir(kernel: CompiledSparseKernel, module: Module) -> str:
    return llvm_printer.emit_llvm(module, kernel.target, host_symbols.vector_functions())


SPARSE_KINDS: Mapping[str, Callable[[CompiledSparseKernel], str]] = {
    "tc": lambda kernel: text_with_formats(kernel.program.problem.function),
    "schedule": lambda kernel: explain(kernel.program),
    "loops": _each_phase(lambda _, module: format_program(module)),
    "c": _each_phase(lambda _, module: c_printer.emit_c(module)),
    "llvm": _each_phase(_emit_llvm_ir),
    "asm": _each_phase(lambda kernel, module: object_code.host_assembly(_emit_llvm_ir(kernel, module), kernel.target)),
}
"""The printers of `CompiledSparseKernel.source`."""


def compile_sparse(request: KernelRequest, target: CpuTarget) -> CompiledSparseKernel:
    """Lower and compile a def for the formats, types and facts of `request`.

    Raises:
        CannotLower: the lowering does not support a statement.
    """
    start = perf_counter()
    program = lower(make_cpu_problem(request), target)
    lowered = perf_counter()
    phases = tuple(map(run_sparse_passes, program.phases))
    code = tuple(
        object_code.assemble(llvm_printer.emit_llvm(m, target, host_symbols.vector_functions()), target) for m in phases
    )
    seconds = (("lower", lowered - start), ("generate", perf_counter() - lowered))
    times = ", ".join(f"{step} {s * 1e3:.1f}" for step, s in seconds)
    get_logger("passes").debug("%s: sparse, %s ms", request.function.name, times)
    get_logger("schedule").debug("%s: sparse, loops %s", request.function.name, program.orders)
    executables = tuple(map(object_code.load_object, code))
    return CompiledSparseKernel(request, program.call_plan, code, executables, target, seconds, program)


def run_sparse_passes(module: Module) -> Module:
    """A phase after `SPARSE_PASSES`."""
    check_bindings(module)
    verify_module(module, "lower")
    for name, transform in SPARSE_PASSES:
        module = replace(module, kernels=tuple(replace(k, body=transform(k.body)) for k in module.kernels))
        verify_module(module, name)
        if (log := get_logger("loops")).isEnabledFor(logging.DEBUG):
            log.debug("after %s:\n%s", name, format_program(module))
    return module


def verify_module(module: Module, step: str) -> None:
    """Verify a module if `TC_VERIFY` is set. Raises InternalError that names `step`, which produced it."""
    if not knobs.current_knobs().verify:
        return
    try:
        verify.verify(module)
    except InternalError as error:
        raise InternalError(f"{module.name}: after {step}: {error}") from error
