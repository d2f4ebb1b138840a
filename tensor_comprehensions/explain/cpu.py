"""The report on a CPU kernel, which is compiled again to record decisions and line tables."""

from __future__ import annotations

from collections.abc import Iterator

from ..codegen.c.c_printer import emit_c
from ..codegen.llvm.debug_lines import emit_llvm_with_lines
from ..compiler.compiled_kernel import CompiledCpuKernel, CompiledRangeKernel
from ..core.decisions import Decision, open_book
from ..core.errors import CannotLower
from ..core.gc_pause import pause_gc
from ..runtime.cpu import host_symbols, object_code
from .assembly import list_assembly
from .call_cost import call_bytes, call_flops
from .footprints import loop_footprints
from .format_numbers import format_bytes, format_count
from .kernel_report import BY_HAND, SAME_BYTES, Listing, Report
from .listings import list_llvm, list_marked
from .original_names import with_original_decisions
from .trace import Trace, trace_compilation


@pause_gc()
def explain_cpu_kernel(
    compiled: CompiledCpuKernel, tuning: tuple[Decision, ...] = (), facts: tuple[tuple[str, str], ...] = ()
) -> Report:
    """The report on a CPU kernel.

    tuning: the caller's decisions about its options. facts: further (name, text) facts.
    """
    trace, target = trace_compilation(compiled, "simplify_again"), compiled.target
    with open_book() as book:
        text = emit_llvm_with_lines(trace.module, target, host_symbols.vector_functions(), trace.lines)
    code, assembly = object_code.assemble_and_print(text, target)
    same = object_code.code_sections(code.data) == object_code.code_sections(compiled.code.data)
    blocks = _describe_blocks(compiled) if isinstance(compiled, CompiledRangeKernel) else ""
    work = call_flops(trace.bound), call_bytes(trace.bound)
    return trace.make_report(
        f"{target.name}, vectors of {target.vector_bits} bits{blocks}",
        (*tuning, *map(trace.name_copies, (*trace.decisions, *with_original_decisions(book.decisions, trace.bound)))),
        (list_assembly(assembly, trace.loops), *_list_c(trace), list_llvm(text, trace.loops)),
        facts=(
            ("options", repr(compiled.options)),
            ("work", f"{format_count(work[0])} operations, {format_bytes(work[1])} of tensors"),
            *facts,
        ),
        footprints=loop_footprints(trace.lines, trace.readable_lines, target, trace.buffer_names),
        matches=SAME_BYTES if same else BY_HAND,
    )


def _describe_blocks(compiled: CompiledRangeKernel) -> str:
    return ", in loops over any number of rows" if compiled.has_open_loops else ", in blocks of this and fewer rows"


def _list_c(trace: Trace) -> Iterator[Listing]:
    """The listing of the loops as C; none if C cannot express them."""
    try:
        text = emit_c(trace.readable_module, header=trace.compiled.text, marks=trace.readable_numbers)
    except CannotLower:
        return
    yield list_marked("c", "C", text, trace.loops)
