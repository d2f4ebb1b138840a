"""Compiled kernels of sparse defs. This module does not import the compiler, so a cached kernel runs without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..core.errors import ArgumentError
from ..core.lazy_import import lazy_module
from ..runtime.cpu.object_code import Executable, ObjectCode
from ..sparse.call_plan import CallPlan
from ..sparse.sparse_problem import KernelRequest
from ..target import CpuTarget

if TYPE_CHECKING:
    from ..loop_ir.nodes import Module
    from ..sparse import lower, shared_sparsity
    from ..sparse.lower import Program
    from . import sparse_passes
else:
    lower, shared_sparsity = lazy_module("sparse.lower"), lazy_module("sparse.shared_sparsity")
    sparse_passes = lazy_module("compiler.sparse_passes")


@dataclass(frozen=True, eq=False)
class CompiledSparseKernel:
    """A sparse def as machine code.

    Attributes:
        request: the input of the compilation.
        plan: how to call the phases.
        code: the machine code of each phase, as the cache stores it.
        executables: the loaded code of each phase.
        target: the processor.
        seconds: (step, seconds) in order; only the lookup, if the kernel came from the cache.
        lowered: the program that was compiled; None if the kernel came from the cache.
    """

    request: KernelRequest
    plan: CallPlan
    code: tuple[ObjectCode, ...]
    executables: tuple[Executable, ...]
    target: CpuTarget
    seconds: tuple[tuple[str, float], ...]
    lowered: Program | None = None

    @property
    def compile_seconds(self) -> float:
        return sum(seconds for _, seconds in self.seconds)

    @property
    def resources(self) -> dict[str, int]:
        """The number of phases of a call, and the bytes of their machine code."""
        return {"phases": len(self.code), "code_bytes": sum(len(c.data) for c in self.code)}

    @cached_property
    def program(self) -> Program:
        """The lowered program, with its phases before the passes; lowered again if the kernel came from the cache."""
        if self.lowered is None:
            return lower.lower(shared_sparsity.make_cpu_problem(self.request), self.target)
        return self.lowered

    @cached_property
    def phases(self) -> tuple[Module, ...]:
        """The module of each phase after the passes, which run again: a kernel does not keep modules."""
        return tuple(map(sparse_passes.run_sparse_passes, self.program.phases))

    @staticmethod
    def source_kinds() -> Mapping[str, Callable[[CompiledSparseKernel], str]]:
        return sparse_passes.SPARSE_KINDS

    def source(self, kind: str) -> str:
        """All phases as text of a kind: "tc", "schedule", "loops", "c", "llvm" or "asm".

        Raises:
            ArgumentError: no such kind exists.
        """
        kinds = self.source_kinds()
        if kind not in kinds:
            raise ArgumentError(f"a sparse kernel has no source of kind {kind!r}", expected=", ".join(kinds))
        return kinds[kind](self)
