"""The compiler of kernels for any number of rows: blocks of a few fixed sizes, compiled by `PASSES` and joined.

A block is a def with all sizes known, so its code is as good, and as well proved, as that of a kernel for these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from ..codegen.c import c_printer
from ..core import knobs
from ..core.errors import CannotLower, InternalError
from ..loop_ir.binding import check_bindings
from ..loop_ir.nodes import Buffer, Module, Type
from ..loop_ir.row_blocks import RowBlock, join_row_blocks
from ..loop_ir.show import format_program
from ..loop_ir.verify import verify
from ..options import CpuOptions
from ..runtime.cpu import object_code
from ..target import CpuTarget
from ..tc_lang.canonical_bound import canonicalize
from ..tc_lang.ir import BoundFunction, Role
from ..tc_lang.printer import format_ranges
from ..tc_lang.rows import CannotGeneralize, Rows
from . import cpu_passes
from .compiled_kernel import BlockSize, CompiledRangeKernel, PassContext
from .row_block_sizes import choose_block_sizes

BlockMaker = Callable[[int], BoundFunction]
"""Returns the def for a number of rows."""


@dataclass(frozen=True, slots=True)
class RangeProblem:
    """A def to compile for any number of rows.

    Attributes:
        rows: its rows. row: the def for a single one.
        make: returns the def for a number of rows, with the strides of the call.
        typical: most rows of a block; 0 chooses.
    """

    rows: Rows
    row: BoundFunction
    make: BlockMaker
    typical: int = 0


def compile_range(problem: RangeProblem, text: str, options: CpuOptions, target: CpuTarget) -> CompiledRangeKernel:
    """The kernel for any number of rows.

    Raises:
        CannotGeneralize: the def has to be seen as a whole.
    """
    start = perf_counter()
    sizes = choose_block_sizes(problem.row, problem.rows, options, problem.typical)
    blocks = tuple(problem.make(size.rows) for size in sizes)
    context = PassContext(options, target, problem.row.name)
    joined = _join(problem.rows, blocks, sizes, text, context)
    lowered = perf_counter()
    results, seconds, _ = cpu_passes.run_passes(cpu_passes.PASSES[-3:], blocks[0], text, context, {"join": joined})
    compiled = CompiledRangeKernel(
        problem.row, text, options, target, (("blocks", lowered - start), *seconds), results["assemble"],
        results["load"], (), cpu_passes.sites_of(joined, blocks[0]), len(joined.kernels),
        problem.rows, sizes, problem.make,
    )  # fmt: skip
    cpu_passes.log_compilation(compiled, None)
    return compiled


def _join(
    rows: Rows,
    blocks: tuple[BoundFunction, ...],
    sizes: tuple[BlockSize, ...],
    text: str,
    context: PassContext,
) -> Module:
    """The module of all blocks."""
    modules = [cpu_passes.run_passes(cpu_passes.PASSES[:-3], b, text, context)[0]["simplify_again"] for b in blocks]
    parts = [RowBlock(size.rows, m, size.grain, size.overlap_from) for size, m in zip(sizes, modules, strict=True)]
    try:
        joined = join_row_blocks(parts, _sources(rows, blocks[0]))
    except CannotLower as refusal:
        raise CannotGeneralize(rows.sizes[0], str(refusal)) from refusal
    check_bindings(joined)
    if knobs.current_knobs().verify:
        try:
            verify(joined)
        except InternalError as error:
            raise InternalError(f"{context.name}: after the blocks were joined: {error}") from error
    return joined


def _sources(rows: Rows, block: BoundFunction) -> Mapping[str, Buffer]:
    """The arguments that have rows, by their canonical names: a dimension for all rows, then those of a row."""
    plain = canonicalize(block)
    return {
        own.name: Buffer(
            own.name, Type(t.dtype), (0, *t.shape[rows.depth :]), t.strides[rows.depth - 1 :], dynamic=True
        )
        for t, own in zip(block.tensors, plain.tensors, strict=True)
        if t.name in rows.tensors and t.role is not Role.TEMPORARY
    }


def rejoin(kernel: CompiledRangeKernel) -> Module:
    """The module of a kernel, made again."""
    context = PassContext(kernel.options, kernel.target, kernel.bound.name)
    return _join(kernel.rows, tuple(kernel.make(s.rows) for s in kernel.sizes), kernel.sizes, kernel.text, context)


def _with_original_names(kernel: CompiledRangeKernel) -> Module:
    return cpu_passes.with_original_names(rejoin(kernel), kernel.bound)


def _schedules(kernel: CompiledRangeKernel) -> str:
    parts = []
    for size in kernel.sizes:
        exact = replace(kernel, bound=kernel.make(size.rows))
        parts.append(f"blocks of {size.rows} row{'s' * (size.rows != 1)}:\n{cpu_passes.KINDS['schedule'](exact)}")
    return "\n".join(parts)


KINDS: dict[str, Callable[[CompiledRangeKernel], str]] = {
    "tc": lambda k: k.text,
    "ranges": lambda k: f"for one row:\n{format_ranges(k.bound)}",
    "schedule": _schedules,
    "loops": lambda k: format_program(_with_original_names(k)),
    "c": lambda k: c_printer.emit_c(_with_original_names(k), header=k.text),
    "llvm": lambda k: k.rerun_until("emit"),
    "asm": lambda k: object_code.host_assembly(k.rerun_until("emit"), k.target),
}
"""The printers of `source` for a kernel for any number of rows."""
