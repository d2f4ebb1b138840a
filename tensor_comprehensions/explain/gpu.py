"""The report on a GPU kernel, from the compiler's facts: no device is needed."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from ..codegen.c.statements import split_marks
from ..codegen.gpu.cuda_printer import emit_cuda
from ..codegen.gpu.gpu_printer import shared_buffers
from ..compiler.cpu_passes import with_original_names
from ..compiler.gpu_passes import GPU_PASSES, CompiledGpuKernel
from ..core.decisions import Decision, close_book, open_book
from ..loop_ir.nodes import Buffer, Kernel, Module
from ..loop_ir.origins import statement_of
from ..loop_ir.show import list_lines
from ..runtime.cuda import nvrtc
from ..tc_lang.canonical_bound import errors_of
from .kernel_report import Listing, ListingLine, Report, Section, shapes_of_tensors
from .numbers import format_bytes
from .original_names import with_original_decisions
from .statements import list_def, list_loops, list_schedule, source_statements

BANKS, BANK_BYTES = 32, 4
ROWS_SHOWN, COLUMNS_SHOWN = 16, 36
"""Of a shared buffer in the picture of its banks."""


def explain_gpu_kernel(compiled: CompiledGpuKernel, tuning: tuple[Decision, ...] = ()) -> Report:
    """The report on a GPU kernel. tuning: the caller's decisions about its options."""
    bound = compiled.bound
    with errors_of(bound), open_book() as book:
        module = _run_passes(compiled)
    statements = source_statements(compiled.text, bound)
    named = with_original_names(module, bound)
    code = emit_cuda(named, header=compiled.header, aligned=compiled.aligned, marks=True).source
    with close_book():
        schedule = compiled.source("schedule")
    return Report(
        name=bound.name,
        sizes=shapes_of_tensors(bound),
        target=f"{compiled.target.kind} {compiled.target.name}",
        resources=compiled.resources,
        statements=statements,
        decisions=(*tuning, *with_original_decisions(book.decisions, bound)),
        listings=(
            list_def(compiled.text, bound, statements), list_schedule(schedule),
            list_loops(module, list(list_lines(module)), list(list_lines(named))), list_cuda(code),
        ),
        seconds=compiled.seconds,
        facts=(("options", "chosen from the sizes" if compiled.options is None else repr(compiled.options)),),
        sections=tuple(section for k in named.kernels for section in _sections(k, compiled)),
    )  # fmt: skip


def _run_passes(compiled: CompiledGpuKernel) -> Module:
    """The loops that are printed, made again."""
    results: dict[str, Any] = {}
    value: Any = compiled.bound
    for step in GPU_PASSES[: [p.name for p in GPU_PASSES].index("simplify") + 1]:
        value = results[step.name] = step.apply(value, compiled.context, results)
    module: Module = value
    return module


def list_cuda(text: str) -> Listing:
    """CUDA text that was printed with marks: each line with the statements that it computes."""
    lines = (
        ListingLine(plain, tuple(dict.fromkeys(map(statement_of, names))))
        for plain, names in split_marks(text.rstrip())
    )
    return Listing("cuda", "CUDA", tuple(lines))


def _sections(kernel: Kernel, compiled: CompiledGpuKernel) -> Iterator[Section]:
    """The launch of a kernel, and its buffers in shared memory."""
    if kernel.launch is None:
        return
    buffers = shared_buffers(kernel.body)
    yield Section(f"kernel {kernel.name}", tuple(_launch_lines(kernel, buffers, compiled)))
    for b in buffers:
        if len(b.shape) > 1 and b.swizzle is None:
            pitch = b.strides[-2]
            padded = f", rows of {b.shape[-1]} every {pitch}" if pitch != b.shape[-1] else ", rows without padding"
            text = f"{' x '.join(map(str, b.shape))} {b.type.dtype}, {format_bytes(b.bytes)}{padded}"
            yield Section(f"shared {b.name}", (text,), tuple(bank_rows(b)))


def _launch_lines(kernel: Kernel, buffers: list[Buffer], compiled: CompiledGpuKernel) -> Iterator[str]:
    launch, target = kernel.launch, compiled.target
    assert launch is not None
    grid, block = (" x ".join(map(str, sizes)) for sizes in (launch.grid, launch.block))
    shared = sum(b.bytes for b in buffers)
    yield f"{grid} blocks of {block} threads, {format_bytes(shared)} of shared memory"
    registers = _registers(kernel.name, compiled)
    limits = target.resident_block_limits(prod(launch.block), registers, shared)
    limit = min(limits, key=lambda name: limits[name])
    blocks = limits[limit]
    used = 100 * blocks * prod(launch.block) / target.threads_per_sm
    known = "" if registers else " (registers are not known without NVRTC)"
    yield f"{blocks} blocks on a processor at once, {used:.0f} % of its threads; limited by {limit}{known}"
    room = blocks * target.num_sms
    if room:
        yield f"{prod(launch.grid) / room:.2f} times the blocks that {target.num_sms} processors hold at once"


def _registers(name: str, compiled: CompiledGpuKernel) -> int:
    """Registers of a thread; 0 if unknown."""
    if not nvrtc.is_nvrtc_available():
        return 0
    return max((r.registers for r in compiled.cubin.resources.values()), default=0)


def bank_rows(b: Buffer) -> Iterator[tuple[int, ...]]:
    """The banks of the first rows of a shared buffer; -1 for the padding behind each."""
    size, pitch = b.type.dtype.size * b.type.lanes, b.strides[-2]
    for row in range(min(ROWS_SHOWN, b.shape[-2])):
        columns = range(min(COLUMNS_SHOWN, pitch))
        yield tuple((row * pitch + c) * size // BANK_BYTES % BANKS if c < b.shape[-1] else -1 for c in columns)
