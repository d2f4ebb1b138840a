"""The report on a GPU kernel. It needs no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from ..codegen.gpu.cuda_printer import emit_cuda
from ..codegen.gpu.gpu_printer import GpuKernelSource, shared_buffers
from ..codegen.gpu.ptx import architecture_for
from ..compiler.gpu_passes import CompiledGpuKernel
from ..core.decisions import Decision
from ..core.gc_pause import pause_gc
from ..loop_ir.intrinsics import COPY_ASYNC, COPY_ASYNC_ZERO, INTRINSICS
from ..loop_ir.nodes import Buffer, Invoke, Kernel, Space
from ..loop_ir.rewrite import walk_stmts
from ..loop_ir.swizzled_buffer import swizzle_offset
from ..runtime.cpu.object_code import code_sections
from ..runtime.cuda import nvrtc
from ..runtime.cuda.nvrtc import Cubin, Resources
from ..target import GpuTarget
from .assembly import list_ptx
from .format_numbers import format_bytes
from .kernel_report import BY_HAND, SAME_BYTES, Grid, Listing, Report, Section
from .listings import list_marked
from .sectors import SECTOR, count_sectors
from .tile_grids import draw_atoms
from .trace import trace_compilation

BANKS, BANK_BYTES = 32, 4
ROWS_SHOWN, COLUMNS_SHOWN = 16, 36
"""Most rows and columns of a shared buffer in the picture of its banks."""
MAX_COMPILATIONS = 8
"""Compilations until NVRTC produces the same machine code; its assembler orders some instructions randomly."""


@pause_gc()
def explain_gpu_kernel(compiled: CompiledGpuKernel, tuning: tuple[Decision, ...] = ()) -> Report:
    """The report on a GPU kernel. tuning: the caller's decisions about its options."""
    trace = trace_compilation(compiled, "simplify")
    marked = emit_cuda(
        trace.readable_module, header=compiled.header, aligned=compiled.aligned, marks=trace.readable_numbers
    )
    code = list_gpu_code(marked.source, compiled, trace.loops)
    kernels = zip(trace.readable_module.kernels, marked.kernels, strict=True)
    return trace.make_report(
        f"{compiled.target.kind} {compiled.target.name}",
        (*tuning, *trace.decisions),
        code.listings,
        facts=(("options", "chosen from the sizes" if compiled.options is None else repr(compiled.options)),),
        matches=code.matches,
        sections=kernel_sections(kernels, code.resources, compiled.target),
    )


class CompiledForGpu(Protocol):
    """A kernel with a GPU target and machine code."""

    @property
    def target(self) -> GpuTarget: ...
    @property
    def cubin(self) -> Cubin: ...


@dataclass(frozen=True, slots=True)
class GpuListings:
    """The listings of GPU code.

    Attributes:
        listings: CUDA, and PTX if NVRTC is installed.
        matches: as in a report.
        resources: the resources of each kernel by name; empty without NVRTC.
    """

    listings: tuple[Listing, ...]
    matches: str
    resources: Mapping[str, Resources]


def list_gpu_code(marked: str, compiled: CompiledForGpu, loops: Listing) -> GpuListings:
    """The listings of CUDA text with line marks, and of the PTX that NVRTC compiles it to."""
    cuda = list_marked("cuda", "CUDA", marked, loops)
    if not nvrtc.is_nvrtc_available():
        return GpuListings((cuda,), "", {})
    architecture = architecture_for(cuda.text, compiled.target.name)
    wanted = code_sections(compiled.cubin.binary)
    for _ in range(MAX_COMPILATIONS):
        ptx, code = nvrtc.compile_with_lines(cuda.text, architecture)
        same = code_sections(code.binary) == wanted
        if same:
            break
    return GpuListings((cuda, list_ptx(ptx, cuda)), SAME_BYTES if same else BY_HAND, code.resources)


def kernel_sections(
    kernels: Iterable[tuple[Kernel, GpuKernelSource]], resources: Mapping[str, Resources], target: GpuTarget
) -> tuple[Section, ...]:
    """Sections on each kernel's launch, accesses to global memory, instructions, and buffers in shared memory."""
    found: list[Section] = []
    for kernel, printed in kernels:
        registers = resources[printed.name].registers if printed.name in resources else 0
        found += _list_kernel_sections(kernel, registers, target)
    return tuple(found)


def _list_kernel_sections(kernel: Kernel, registers: int, target: GpuTarget) -> Iterator[Section]:
    """The sections of one kernel. registers: registers of a thread; 0 if unknown."""
    if kernel.launch is None:
        return
    yield Section(f"kernel {kernel.name}", tuple(_launch_lines(kernel, registers, target)))
    if accesses := tuple(_sector_lines(kernel)):
        yield Section(f"global memory of {kernel.name}", accesses)
    if atoms := tuple(_atom_lines(kernel)):
        yield Section(f"instructions of {kernel.name}", atoms)
        yield from draw_atoms(INTRINSICS[s.name].atom for s in walk_stmts(kernel.body) if isinstance(s, Invoke))
    for b in shared_buffers(kernel.body):
        if len(b.shape) > 1 and b.space is Space.SHARED:
            text = f"{' x '.join(map(str, b.shape))} {b.type.dtype}, {format_bytes(b.bytes)}, {_describe_rows(b)}"
            yield Section(f"shared {b.name}", (text,), (Grid("the bank of each element", tuple(bank_rows(b)), BANKS),))


def _describe_rows(b: Buffer) -> str:
    """The row pitch of a shared buffer, or its swizzle, in words."""
    pitch = b.strides[-2]
    if b.swizzle is not None:
        bits, base, _ = b.swizzle
        return f"groups of {1 << base} elements change places by the number of their row, which has {1 << bits} values"
    return f"rows of {b.shape[-1]} every {pitch}" if pitch != b.shape[-1] else "rows without padding"


def _atom_lines(kernel: Kernel) -> Iterator[str]:
    """A line for each kind of tensor-core instruction and asynchronous copy."""
    names = Counter(s.name for s in walk_stmts(kernel.body) if isinstance(s, Invoke))
    for name, times in names.items():
        known = INTRINSICS[name]
        if known.atom or known.mapped is not None or name in (COPY_ASYNC, COPY_ASYNC_ZERO):
            together = f"{known.group} threads together" if known.group > 1 else "each thread"
            yield f"{name}: {together}, {times} times in the text"


def _launch_lines(kernel: Kernel, registers: int, target: GpuTarget) -> Iterator[str]:
    launch = kernel.launch
    assert launch is not None
    blocks = (count or n for n, count in zip(launch.grid, launch.counts or launch.grid, strict=True))
    grid, block = (" x ".join(map(str, sizes)) for sizes in (blocks, launch.block))
    shared = sum(b.bytes for b in shared_buffers(kernel.body))
    clusters = f" in clusters of {launch.cluster}" if launch.cluster > 1 else ""
    yield f"{grid} blocks of {block} threads{clusters}, {format_bytes(shared)} of shared memory"
    limits = target.resident_block_limits(prod(launch.block), registers, shared)
    limit = min(limits, key=lambda name: limits[name])
    together = limits[limit]
    used = 100 * together * prod(launch.block) / target.threads_per_sm
    known = "" if registers else " (registers are not known without NVRTC)"
    yield f"{together} blocks on a processor at once, {used:.0f} % of its threads; limited by {limit}{known}"
    room = together * target.num_sms
    if room and not launch.counts:
        yield f"{prod(launch.grid) / room:.2f} times the blocks that {target.num_sms} processors hold at once"


def _sector_lines(kernel: Kernel) -> Iterator[str]:
    """A line for each access of a warp to global memory, the most wasteful first."""
    counted = sorted(count_sectors(kernel), key=lambda found: found[0].least - found[0].sectors)
    for c, times in counted:
        many = f", {times} times in the text" if times > 1 else ""
        yield (
            f"{c.threads} threads of a warp {c.kind.removesuffix('s')} {c.bytes} bytes of {c.buffer}: {c.sectors} "
            f"sectors of {SECTOR} bytes, at least {c.least}{many}"
        )


def bank_rows(b: Buffer) -> Iterator[tuple[int, ...]]:
    """The banks of the elements in the first rows of a shared buffer; -1 for the padding at the end of a row."""
    size, pitch = b.type.dtype.size * b.type.lanes, b.strides[-2]
    for row in range(min(ROWS_SHOWN, b.shape[-2])):
        columns = range(min(COLUMNS_SHOWN, pitch))
        places = [row * pitch + c if b.swizzle is None else swizzle_offset(row * pitch + c, b.swizzle) for c in columns]
        yield tuple(
            p * size // BANK_BYTES % BANKS if c < b.shape[-1] else -1 for c, p in zip(columns, places, strict=True)
        )
