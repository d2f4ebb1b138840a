"""Reports on sparse kernels: the decisions on formats, loops and merges, the loops, and machine code or CUDA."""

from __future__ import annotations

from dataclasses import replace

from ..codegen.gpu.cuda_printer import emit_cuda
from ..codegen.llvm.debug_lines import emit_llvm_with_lines
from ..compiler.compiled_sparse_kernel import CompiledSparseKernel
from ..compiler.sparse_gpu_passes import CompiledSparseGpuKernel, compile_sparse_gpu
from ..compiler.sparse_passes import run_sparse_passes
from ..core.decisions import open_book
from ..core.gc_pause import pause_gc
from ..loop_ir.nodes import Module
from ..loop_ir.show import LineNumbers, list_lines, separate_statements
from ..runtime.cpu import host_symbols, object_code
from ..sparse.explain import text_with_formats
from ..sparse.lower import lower
from ..target import CpuTarget
from ..tc_lang.ir import Function
from .assembly import list_assembly
from .gpu import list_gpu_code
from .kernel_report import BY_HAND, SAME_BYTES, Listing, ListingLine, Report, SourceStatement
from .listings import list_loops


@pause_gc()
def explain_sparse_kernel(compiled: CompiledSparseKernel) -> Report:
    """The report on a CPU kernel for sparse operands in given formats, of any sizes."""
    problem = compiled.plan.problem
    function = problem.function
    with open_book() as book:
        lowered = lower(problem, compiled.target).phases
        modules = tuple(separate_statements(run_sparse_passes(m)) for m in lowered)
        found = [_compile_phase(m, compiled.target, number) for number, m in enumerate(modules)]
    same = all(
        object_code.code_sections(code) == object_code.code_sections(own.data)
        for (_, _, code), own in zip(found, compiled.code, strict=True)
    )
    statements, definition = _list_def(function)
    return Report(
        name=function.name,
        sizes=(),
        target=f"{compiled.target.name}, any sizes",
        resources={"kernels": sum(len(m.kernels) for m in modules), "phases": len(modules)},
        statements=statements,
        decisions=book.decisions,
        listings=(
            definition,
            Listing(
                "schedule", "formats, loops and merges", tuple(_plan_lines(compiled.source("schedule"), statements))
            ),
            _join_listings("loops", "loops", [loops for loops, _, _ in found]),
            _join_listings("asm", "machine code", [asm for _, asm, _ in found], [loops for loops, _, _ in found]),
        ),
        seconds=compiled.seconds,
        matches=SAME_BYTES if same else BY_HAND,
    )


@pause_gc()
def explain_sparse_gpu_kernel(compiled: CompiledSparseGpuKernel) -> Report:
    """The report on a GPU kernel for sparse operands in given formats, of any sizes."""
    with open_book() as book:
        module = separate_statements(compile_sparse_gpu(compiled.problem, compiled.target).module)
    statements, definition = _list_def(compiled.problem.function)
    lines = list(list_lines(module))
    loops = list_loops(module, lines, [text for text, _ in lines])
    marked = emit_cuda(module, header=compiled.header, marks=LineNumbers.of(lines)).source
    code = list_gpu_code(marked, compiled, loops)
    return Report(
        name=compiled.problem.function.name,
        sizes=(),
        target=f"{compiled.target.kind} {compiled.target.name}, any sizes",
        resources=compiled.resources,
        statements=statements,
        decisions=book.decisions,
        listings=(
            definition,
            Listing(
                "schedule", "formats, loops and threads", tuple(_plan_lines(compiled.source("schedule"), statements))
            ),
            loops,
            *code.listings,
        ),
        seconds=compiled.seconds,
        matches=code.matches,
    )


def _list_def(function: Function) -> tuple[tuple[SourceStatement, ...], Listing]:
    """The statements of a def, and the listing of its text with formats."""
    rows = text_with_formats(function).split("\n")
    lines = _statement_lines(rows, len(function.statements))
    statements = tuple(
        SourceStatement(s.name, s.target, line, line) for s, line in zip(function.statements, lines, strict=True)
    )
    owners = {s.line: (s.name,) for s in statements}
    listed = tuple(ListingLine(row, owners.get(n, ())) for n, row in enumerate(rows, 1))
    return statements, Listing("def", "def with formats", listed)


def _compile_phase(module: Module, target: CpuTarget, number: int) -> tuple[Listing, Listing, bytes]:
    """The loops of one phase, the listing of its machine code, and the machine code."""
    lines = list(list_lines(module))
    text = emit_llvm_with_lines(module, target, host_symbols.vector_functions(), lines)
    code, assembly = object_code.assemble_and_print(text, target)
    loops = list_loops(module, lines, [text for text, _ in lines])
    return loops, list_assembly(assembly, loops), code.data


def _join_listings(kind: str, title: str, parts: list[Listing], loops: list[Listing] | None = None) -> Listing:
    """Concatenate the listings of phases. loops: the loops of each phase, to renumber the lines that refer to them."""
    lines: list[ListingLine] = []
    before = 0
    for number, part in enumerate(parts):
        lines += (replace(line, loop=line.loop + before) if line.loop else line for line in part.lines)
        before += len(loops[number].lines) if loops is not None else 0
    return Listing(kind, title, tuple(lines))


def _statement_lines(rows: list[str], count: int) -> list[int]:
    """The line number of each statement in the printed def `rows`; all 1 if they cannot be found."""
    found = [n for n, row in enumerate(rows, 1) if row.startswith((" ", "\t")) and "=" in row]
    return found if len(found) == count else [1] * count


def _plan_lines(plan: str, statements: tuple[SourceStatement, ...]) -> list[ListingLine]:
    """The lines of a sparse schedule; a line belongs to the statement above it."""
    found: list[ListingLine] = []
    owner: tuple[str, ...] = ()
    for row in plan.split("\n"):
        if row.startswith("statement "):
            number = int(row.split(":")[0].removeprefix("statement "))
            owner = (statements[number].name,) if number < len(statements) else ()
        elif not row.startswith(" "):
            owner = ()
        found.append(ListingLine(row, owner))
    return found
