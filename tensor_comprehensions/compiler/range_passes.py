"""The compiler of kernels for any number of rows: blocks of a few fixed sizes, compiled by `PASSES` and joined.

A block is a def with all sizes known, so its code is as good, and as well proved, as that of a kernel for these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from ..codegen.c import c_printer
from ..core import knobs
from ..core.errors import CannotLower, InternalError
from ..loop_ir.binding_checks import check_bindings
from ..loop_ir.nodes import Buffer, Module, Type
from ..loop_ir.row_blocks import RowBlock, RowProgram, join_row_blocks
from ..loop_ir.show import format_program
from ..loop_ir.verify import verify
from ..options import CpuOptions
from ..runtime.cpu import object_code
from ..target import CpuTarget
from ..tc_lang.ir import BoundFunction, Role, Tensor
from ..tc_lang.printer import format_ranges
from ..tc_lang.row_stages import RowStage, base_tensor, shared_tensors, split_row_stages
from ..tc_lang.rows import COUNT, CannotGeneralize, Rows
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
    context, block = PassContext(options, target, problem.row.name), problem.make(sizes[0].rows)
    joined = _join(problem, sizes, text, context)
    lowered = perf_counter()
    results, seconds, _ = cpu_passes.run_passes(cpu_passes.PASSES[-3:], block, text, context, {"join": joined})
    compiled = CompiledRangeKernel(
        problem.row, text, options, target, (("blocks", lowered - start), *seconds), results["assemble"],
        results["load"], (), cpu_passes.check_sites_of(joined, block), len(joined.kernels),
        problem.rows, sizes, problem.make,
    )  # fmt: skip
    cpu_passes.log_compilation(compiled, None)
    return compiled


def _join(problem: RangeProblem, sizes: tuple[BlockSize, ...], text: str, context: PassContext) -> Module:
    """The module of all blocks of all stages."""
    blocks = tuple(problem.make(size.rows) for size in sizes)
    legal = [cpu_passes.run_passes(cpu_passes.PASSES[:2], b, text, context)[0] for b in blocks]
    plain: BoundFunction = legal[0]["canonicalize"]
    own = {t.name: mine.name for t, mine in zip(blocks[0].tensors, plain.tensors, strict=True)}
    with_rows = frozenset(own[name] for name in problem.rows.tensors)
    split = [split_row_stages(results["legalize"], with_rows) for results in legal]
    if any([(s.has_rows, s.updates) for s in one] != [(s.has_rows, s.updates) for s in split[0]] for one in split):
        raise CannotGeneralize(problem.rows.sizes[0], "other numbers of rows are computed in other steps")

    def lower(n: int, k: int) -> Module:
        made = {**legal[n], "legalize": split[n][k].bound}
        lowered: Module = cpu_passes.run_passes(cpu_passes.PASSES[2:-3], blocks[n], text, context, made)[0][
            "simplify_again"
        ]
        return lowered

    stages = [
        tuple(_block(size, lower(n, k), stage) for n, size in enumerate(sizes)) if stage.has_rows else lower(0, k)
        for k, stage in enumerate(split[0])
    ]
    program = _program(problem.rows, plain, split[0], with_rows, own.get(COUNT))
    try:
        joined = join_row_blocks(program, stages)
    except CannotLower as refusal:
        raise CannotGeneralize(problem.rows.sizes[0], str(refusal)) from refusal
    check_bindings(joined)
    if knobs.current_knobs().verify:
        try:
            verify(joined)
        except InternalError as error:
            raise InternalError(f"{context.name}: after the blocks were joined: {error}") from error
    return joined


def _block(size: BlockSize, module: Module, stage: RowStage) -> RowBlock:
    return RowBlock(size.rows, module, size.grain, 0 if stage.updates else size.overlap_from, stage.sums)


def _program(
    rows: Rows, plain: BoundFunction, stages: Sequence[RowStage], with_rows: frozenset[str], count: str | None
) -> RowProgram:
    """The buffers of all stages. With rows, they have one dimension for all rows, and then those of a row."""
    taken = [t for t in plain.tensors if t.role is not Role.TEMPORARY and t.name != count]
    shared = shared_tensors(stages, plain)

    def buffer(t: Tensor) -> Buffer:
        if t.name not in with_rows and base_tensor(t.name, plain) not in with_rows:
            return Buffer(t.name, Type(t.dtype), t.shape, t.strides)
        return Buffer(t.name, Type(t.dtype), (0, *t.shape[rows.depth :]), t.strides[rows.depth - 1 :], dynamic=True)

    counts = frozenset(() if count is None else (count,))
    return RowProgram(plain.name, tuple(map(buffer, taken)), tuple(map(buffer, shared)), counts)


def rebuild_module(kernel: CompiledRangeKernel) -> Module:
    """The module of a kernel, made again."""
    return _join(RangeProblem(kernel.rows, kernel.bound, kernel.make), kernel.sizes, kernel.text, kernel.context)


def _with_original_names(kernel: CompiledRangeKernel) -> Module:
    return cpu_passes.with_original_names(rebuild_module(kernel), kernel.make(1))


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
