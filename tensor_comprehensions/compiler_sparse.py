"""The compiler of sparse defs: `SPARSE_PASSES` lists what happens between a problem and its machine code.

A problem becomes several modules, between which the caller allocates memory; each goes through the same passes as
dense kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from . import knobs
from .codegen import c, llvm
from .errors import ArgumentError, InternalError
from .inspection import logger
from .loop_ir.binding import check_bindings
from .loop_ir.hoist import hoist_accumulators
from .loop_ir.nodes import Module, Stmt
from .loop_ir.show import show
from .loop_ir.simplify import simplify
from .loop_ir.unroll import unroll
from .loop_ir.vectorize import vectorize
from .loop_ir.verify import verify
from .runtime import cpu, process
from .runtime.cpu import Executable, ObjectCode
from .sparse.explain import explain, text_with_formats
from .sparse.lower import Program, lower
from .sparse.problem import Problem
from .target import Target

SPARSE_PASSES: tuple[tuple[str, Callable[[Stmt], Stmt]], ...] = (
    ("simplify", simplify),
    ("vectorize", vectorize),
    ("unroll", unroll),
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
    target: Target
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
    return llvm.emit(module, kernel.target, process.mathematics())


SPARSE_KINDS: Mapping[str, Callable[[CompiledSparseKernel], str]] = {
    "tc": lambda kernel: text_with_formats(kernel.program.problem.function),
    "schedule": lambda kernel: explain(kernel.program),
    "loops": _each_phase(lambda _, module: show(module)),
    "c": _each_phase(lambda _, module: c.emit(module)),
    "llvm": _each_phase(_llvm),
    "asm": _each_phase(lambda kernel, module: cpu.assembly(_llvm(kernel, module), kernel.target)),
}
"""What `source` can show."""


def compile_sparse(problem: Problem, target: Target) -> CompiledSparseKernel:
    """Lower and compile a problem.

    Raises:
        CannotLower: a statement is of a kind that is not lowered.
    """
    start = perf_counter()
    program = lower(problem, target)
    phases = tuple(_run_passes(m) for m in program.phases)
    code = tuple(cpu.assemble(llvm.emit(m, target, process.mathematics()), target) for m in phases)
    executables = tuple(cpu.load_object(c) for c in code)
    seconds = perf_counter() - start
    logger("passes").debug("%s: sparse, %.1f ms", problem.function.name, seconds * 1e3)
    logger("schedule").debug("%s: sparse, loops %s", problem.function.name, program.orders)
    return CompiledSparseKernel(program, phases, code, executables, target, seconds)


def _run_passes(module: Module) -> Module:
    check_bindings(module)
    _check(module, "lower")
    for name, transform in SPARSE_PASSES:
        module = replace(module, kernels=tuple(replace(k, body=transform(k.body)) for k in module.kernels))
        _check(module, name)
        logger("loops").debug("after %s:\n%s", name, show(module))
    return module


def _check(module: Module, step: str) -> None:
    if not knobs.current().verify:
        return
    try:
        verify(module)
    except InternalError as error:
        raise InternalError(f"{module.name}: after {step}: {error}") from error
