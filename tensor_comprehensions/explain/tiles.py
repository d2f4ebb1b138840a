"""The report on a tile kernel: its function, the decomposition into tiles, the loops, CUDA and PTX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Protocol

from ..codegen.gpu.cuda_printer import emit_cuda
from ..core.gc_pause import pause_gc
from ..loop_ir.nodes import Module
from ..loop_ir.show import LineNumbers, list_lines, separate_statements
from ..target import GpuTarget
from ..tiles.specs import Program
from .gpu import CompiledForGpu, kernel_sections, list_gpu_code
from .kernel_report import Listing, ListingLine, Report
from .listings import list_loops
from .tile_grids import draw_pipeline, draw_thread_groups


class CompiledTiles(CompiledForGpu, Protocol):
    """The parts of a compiled tile kernel that a report needs."""

    @property
    def target(self) -> GpuTarget: ...
    @property
    def traced(self) -> Program: ...
    @property
    def module(self) -> Module: ...
    @property
    def resources(self) -> Mapping[str, int]: ...
    def source(self, kind: str) -> str: ...


@pause_gc()
def explain_tile_kernel(name: str, header: str, function: Callable[..., None], compiled: CompiledTiles) -> Report:
    """The report on the tile kernel `name`. header, function: its signature and its Python function."""
    module = separate_statements(compiled.module)
    lines = list(list_lines(module))
    loops = list_loops(module, lines, [text for text, _ in lines])
    marked = emit_cuda(module, header=header, marks=LineNumbers.of(lines))
    code = list_gpu_code(marked.source, compiled, loops)
    return Report(
        name=name,
        sizes=tuple((b.name, b.shape) for b in module.arguments),
        target=f"{compiled.target.kind} {compiled.target.name}",
        resources={"kernels": len(module.kernels), **compiled.resources},
        statements=(),
        decisions=(),
        listings=(
            _list_text("def", "tile kernel", _text_of(function, header)),
            _list_text("schedule", "decomposition into tiles", compiled.source("tiles")), loops, *code.listings,
        ),
        facts=(("header", header),),
        matches=code.matches,
        sections=(
            *draw_pipeline(compiled.traced), *draw_thread_groups(compiled.traced),
            *kernel_sections(zip(module.kernels, marked.kernels, strict=True), code.resources, compiled.target),
        ),
    )  # fmt: skip


def _text_of(function: Callable[..., None], header: str) -> str:
    """The source of a function; the header if Python does not have the source."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return header


def _list_text(kind: str, title: str, text: str) -> Listing:
    return Listing(kind, title, tuple(ListingLine(row.rstrip()) for row in text.rstrip("\n").split("\n")))
