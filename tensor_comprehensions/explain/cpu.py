"""A report on a kernel for a CPU: it is compiled once more, under a book of decisions and with line tables."""

from __future__ import annotations

from typing import Any

from ..codegen.llvm.debug_lines import emit_llvm_with_lines
from ..compiler.compiled_kernel import CompiledCpuKernel, CompiledRangeKernel
from ..compiler.cpu_passes import PASSES, with_original_names
from ..core.decisions import Decision, close_book, open_book
from ..loop_ir.nodes import Module
from ..loop_ir.show import list_lines
from ..runtime.cpu import host_symbols, object_code
from ..tc_lang.canonical_bound import errors_of
from .assembly import list_assembly
from .footprints import loop_footprints
from .kernel_report import Report, shapes_of_tensors
from .numbers import format_bytes, format_count
from .original_names import with_original_decisions
from .statements import list_def, list_loops, list_schedule, source_statements
from .work import call_bytes, call_flops

SAME_BYTES, BY_HAND = "the machine code of the kernel, byte for byte", "the kernel that runs was put there by hand"


def explain_cpu_kernel(compiled: CompiledCpuKernel, tuning: tuple[Decision, ...] = ()) -> Report:
    """The report on a CPU kernel. tuning: the caller's decisions about its options."""
    bound, blocks = compiled.bound, ""
    if isinstance(compiled, CompiledRangeKernel):
        bound, blocks = compiled.make(compiled.sizes[0].rows), ", in blocks of this and fewer rows"
    with errors_of(bound), open_book() as book:
        module = _run_passes(compiled)
        lines = list(list_lines(module))
        text = emit_llvm_with_lines(module, compiled.target, host_symbols.vector_functions(), lines)
    code, assembly = object_code.assemble_and_print(text, compiled.target)
    statements = source_statements(compiled.text, bound)
    named = list(list_lines(with_original_names(module, bound)))
    loops = list_loops(module, lines, named)
    same = object_code.code_sections(code.data) == object_code.code_sections(compiled.code.data)
    with close_book():
        schedule = compiled.source("schedule")
    return Report(
        name=bound.name,
        sizes=shapes_of_tensors(bound),
        target=f"{compiled.target.name}, vectors of {compiled.target.vector_bits} bits{blocks}",
        resources=compiled.resources,
        statements=statements,
        decisions=(*tuning, *with_original_decisions(book.decisions, bound)),
        listings=(
            list_def(compiled.text, bound, statements), list_schedule(schedule), loops, list_assembly(assembly, loops)
        ),
        seconds=compiled.seconds,
        facts=(
            ("options", repr(compiled.options)),
            ("work", f"{format_count(call_flops(bound))} operations, {format_bytes(call_bytes(bound))} of tensors"),
        ),
        footprints=loop_footprints(lines, named, compiled.target),
        matches=SAME_BYTES if same else BY_HAND,
    )  # fmt: skip


def _run_passes(compiled: CompiledCpuKernel) -> Module:
    """The loops that are printed as code, made again: of all blocks, for a kernel for any number of rows."""
    if isinstance(compiled, CompiledRangeKernel):
        joined: Module = compiled.rerun_until("join")
        return joined
    with close_book():
        context = compiled.context
    results: dict[str, Any] = {}
    value: Any = compiled.bound
    for step in PASSES:
        if step.name == "emit":
            break
        value = results[step.name] = step.apply(value, context, results)
    module: Module = value
    return module
