"""The compiler of sparse defs: `SPARSE_PASSES` lists what happens between a problem and its machine code.

A problem becomes several modules, between which the caller allocates memory; each goes through the same passes as
dense kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from . import knobs
from .codegen import c, llvm
from .errors import InternalError
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
        """All phases as text of a kind: "loops", "c", "llvm" or "asm"."""
        texts = {
            "loops": lambda m: show(m),
            "c": lambda m: c.emit(m),
            "llvm": lambda m: llvm.emit(m, self.target, process.mathematics()),
            "asm": lambda m: cpu.assembly(llvm.emit(m, self.target, process.mathematics()), self.target),
        }
        return "\n".join(texts[kind](m) for m in self.phases)


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
