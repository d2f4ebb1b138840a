"""A compilation that is run again for a report: under a book of decisions, with the lines of its loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..compiler.compiled_kernel import CompiledBase, CompiledRangeKernel
from ..compiler.cpu_passes import with_original_names
from ..core.decisions import Decision, close_book, open_book
from ..loop_ir.nodes import Allocate, Buffer, Module, Store, Window
from ..loop_ir.show import Line, LineNumbers, Texts, list_lines, separate_statements
from ..structured.lower.contraction import COPY
from ..tc_lang.ir import BoundFunction
from ..tc_lang.transforms.canonical_bound import OriginalNames, canonicalize, translate_errors
from ..tc_lang.transforms.legalize import legalize
from .dependences import list_edges
from .kernel_report import Listing, Report, SourceStatement, StatementDependence, shapes_of_tensors
from .listings import list_def, list_loops, list_schedule, source_statements
from .original_names import with_original_decisions
from .pass_diffs import list_pass_diffs


@dataclass(frozen=True)
class Trace:
    """A compilation, run again.

    Attributes:
        bound: the def; of the largest block, for a kernel for any number of rows.
        results: of the passes before the code is printed, by name, in order.
        decisions: of these passes, in the names of the program.
    """

    compiled: CompiledBase
    bound: BoundFunction
    results: dict[str, Any]
    decisions: tuple[Decision, ...]

    @cached_property
    def texts(self) -> Texts:
        """Texts of parts of `results`."""
        return {}

    @cached_property
    def module(self) -> Module:
        """The loops that are printed as code."""
        return separate_statements(self.results[next(reversed(self.results))])

    @cached_property
    def readable_module(self) -> Module:
        """`module` in the names of the program."""
        return separate_statements(with_original_names(self.module, self.bound))

    @cached_property
    def lines(self) -> list[Line]:
        return list(list_lines(self.module, self.texts))

    @cached_property
    def readable_lines(self) -> list[Line]:
        return list(list_lines(self.readable_module))

    @cached_property
    def readable_numbers(self) -> LineNumbers:
        """The lines of the statements of `readable_module`."""
        return LineNumbers.of(self.readable_lines)

    @cached_property
    def loops(self) -> Listing:
        found = list_loops(self.module, self.lines, [text for text, _ in self.readable_lines])
        spell = OriginalNames.of(self.bound).text
        return replace(found, lines=tuple(replace(x, role=spell(x.role)) if x.role else x for x in found.lines))

    @cached_property
    def copy_names(self) -> dict[str, str]:
        """The names for people of the buffers of `module` that hold copies of operands."""
        name = OriginalNames.of(self.bound).name
        stores = (s for _, s in self.lines if isinstance(s, Store))
        copies = ((s.buffer.name, s.origin.tensor) for s in stores if s.origin and s.origin.role == COPY)
        return {buffer: f"{name(tensor)}, packed" for buffer, tensor in copies}

    @cached_property
    def buffer_names(self) -> dict[str, str]:
        """The names for people of the buffers of `module`."""
        own = _declared_buffers(self.module, self.lines)
        readable = _declared_buffers(self.readable_module, self.readable_lines)
        return {a.name: b.name for a, b in zip(own, readable, strict=True)} | self.copy_names

    def name_copies(self, d: Decision) -> Decision:
        """A decision about a buffer that holds a copy, in words for people."""
        buffer, _, rest = d.chosen.partition(" ")
        return replace(d, chosen=f"{self.copy_names[buffer]}, {rest}") if buffer in self.copy_names else d

    @cached_property
    def statements(self) -> tuple[SourceStatement, ...]:
        return source_statements(self.compiled.text, self.bound)

    def make_report(
        self, target: str, decisions: tuple[Decision, ...], code: tuple[Listing, ...], **parts: Any
    ) -> Report:
        """The report: what kernels of all devices have, and further `parts`.

        decisions: of `self`, of the caller, and of later passes. code: the listings below the loops.
        """
        with close_book():
            schedule = self.compiled.source("schedule")
        definition = list_def(self.compiled.text, self.bound, self.statements)
        return Report(
            name=self.bound.name,
            sizes=shapes_of_tensors(self.bound),
            target=target,
            resources=self.compiled.resources,
            statements=self.statements,
            decisions=decisions,
            listings=(definition, list_schedule(schedule), self.loops, *code),
            seconds=self.compiled.seconds,
            edges=self._list_edges(),
            passes=list_pass_diffs(self.results, OriginalNames.of(self.bound).text, self.texts),
            **parts,
        )

    def _list_edges(self) -> tuple[StatementDependence, ...]:
        legal = self.results["legalize"] if "legalize" in self.results else legalize(canonicalize(self.bound))
        names = {t.name: OriginalNames.of(self.bound).name(t.name) for t in legal.tensors}
        return list_edges(legal, names, self.statements, self.decisions, self.loops)


def _declared_buffers(m: Module, lines: Sequence[Line]) -> Iterator[Buffer]:
    """The buffers of the module whose lines these are, in an order that its names do not change."""
    yield from (*m.arguments, *m.temporaries)
    for _, s in lines:
        if isinstance(s, Allocate):
            yield from s.buffers
        elif isinstance(s, Window):
            yield s.buffer


def trace_compilation(compiled: CompiledBase, last: str) -> Trace:
    """Run the passes of `compiled` as far as `last` again."""
    is_range = isinstance(compiled, CompiledRangeKernel)
    bound = compiled.typical_bound
    with close_book():
        context = compiled.context
    with translate_errors(bound), open_book() as book:
        results = compiled.rerun_all_until("join" if is_range else last, context)
    return Trace(compiled, bound, results, with_original_decisions(book.decisions, bound))
