"""The compiler of sparse defs: `SPARSE_PASSES` lists what happens between a problem and its machine code.

A problem becomes several modules, between which the caller allocates memory; each goes through the same passes as
dense kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from ..codegen.c import c_printer
from ..codegen.llvm import llvm_printer
from ..core import knobs
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError, InternalError
from ..loop_ir.binding import check_bindings
from ..loop_ir.nodes import Module, Stmt
from ..loop_ir.passes.scalar_promotion import hoist_accumulators
from ..loop_ir.passes.simplify import simplify
from ..loop_ir.passes.unroll import unroll_loops
from ..loop_ir.passes.vectorize import vectorize_loops
from ..loop_ir.show import format_program
from ..loop_ir.verify import verify
from ..runtime.cpu import host_symbols, object_code
from ..runtime.cpu.object_code import Executable, ObjectCode
from ..sparse.explain import explain, text_with_formats
from ..sparse.lower import Program, lower
from ..sparse.sparse_problem import SparseProblem
from ..target import CpuTarget

SPARSE_PASSES: tuple[tuple[str, Callable[[Stmt], Stmt]], ...] = (
    ("simplify", simplify),
    ("vectorize", vectorize_loops),
    ("unroll", unroll_loops),
    ("hoist", hoist_accumulators),
    ("simplify_again", simplify),
)
"""What happens to the body of every kernel after `lower` and before it is printed."""


@dataclass(frozen=True, eq=False)
class CompiledSparseKernel:
    """A sparse def as machine code.

    Attributes:
        program: what was lowered, with its phases before the passes.
        phases: the modules after the passes.
        code: the machine code of each phase. executables: the same, loaded.
        seconds: the time of all passes.
    """

    program: Program
    phases: tuple[Module, ...]
    code: tuple[ObjectCode, ...]
    executables: tuple[Executable, ...]
    target: CpuTarget
    seconds: float

    def source(self, kind: str) -> str:
        """All phases as text of a kind: "tc", "schedule", "loops", "c", "llvm" or "asm".

        Raises:
            ArgumentError: there is no such kind.
        """
        if kind not in SPARSE_KINDS:
            raise ArgumentError(f"a sparse kernel has no source of kind {kind!r}", expected=", ".join(SPARSE_KINDS))
        return SPARSE_KINDS[kind](self)


def _each_phase(text: Callable[[CompiledSparseKernel, Module], str]) -> Callable[[CompiledSparseKernel], str]:
    return lambda kernel: "\n".join(text(kernel, module) for module in kernel.phases)


def _llvm(kernel: CompiledSparseKernel, module: Module) -> str:
    return llvm_printer.emit_llvm(module, kernel.target, host_symbols.vector_functions())


SPARSE_KINDS: Mapping[str, Callable[[CompiledSparseKernel], str]] = {
    "tc": lambda kernel: text_with_formats(kernel.program.problem.function),
    "schedule": lambda kernel: explain(kernel.program),
    "loops": _each_phase(lambda _, module: format_program(module)),
    "c": _each_phase(lambda _, module: c_printer.emit_c(module)),
    "llvm": _each_phase(_llvm),
    "asm": _each_phase(lambda kernel, module: object_code.host_assembly(_llvm(kernel, module), kernel.target)),
}
"""What `source` can show."""


def compile_sparse(problem: SparseProblem, target: CpuTarget) -> CompiledSparseKernel:
    """Lower and compile a problem.

    Raises:
        CannotLower: a statement is of a kind that is not lowered.
    """
    start = perf_counter()
    program = lower(problem, target)
    phases = tuple(_run_passes(m) for m in program.phases)
    code = tuple(
        object_code.assemble(llvm_printer.emit_llvm(m, target, host_symbols.vector_functions()), target) for m in phases
    )
    executables = tuple(object_code.load_object(c) for c in code)
    seconds = perf_counter() - start
    get_logger("passes").debug("%s: sparse, %.1f ms", problem.function.name, seconds * 1e3)
    get_logger("schedule").debug("%s: sparse, loops %s", problem.function.name, program.orders)
    return CompiledSparseKernel(program, phases, code, executables, target, seconds)


def _run_passes(module: Module) -> Module:
    check_bindings(module)
    _check(module, "lower")
    for name, transform in SPARSE_PASSES:
        module = replace(module, kernels=tuple(replace(k, body=transform(k.body)) for k in module.kernels))
        _check(module, name)
        get_logger("loops").debug("after %s:\n%s", name, format_program(module))
    return module


def _check(module: Module, step: str) -> None:
    if not knobs.current_knobs().verify:
        return
    try:
        verify(module)
    except InternalError as error:
        raise InternalError(f"{module.name}: after {step}: {error}") from error
