"""Rerun a compilation for a report, and record its decisions and the line numbers of its loops."""

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
    """A compilation that was rerun.

    Attributes:
        compiled: the kernel.
        bound: the def; for a range kernel, that of the largest block.
        results: the results of the passes up to the last module, by name, in order.
        decisions: the decisions of these passes, with the names of the def.
    """

    compiled: CompiledBase
    bound: BoundFunction
    results: dict[str, Any]
    decisions: tuple[Decision, ...]

    @cached_property
    def texts(self) -> Texts:
        """A cache of the texts of parts of `results`."""
        return {}

    @cached_property
    def module(self) -> Module:
        """The loops that the code is generated from."""
        return separate_statements(self.results[next(reversed(self.results))])

    @cached_property
    def readable_module(self) -> Module:
        """`module` with the names of the def."""
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
        """Names for users of the buffers of `module` that hold packed operands."""
        name = OriginalNames.of(self.bound).name
        stores = (s for _, s in self.lines if isinstance(s, Store))
        copies = ((s.buffer.name, s.origin.tensor) for s in stores if s.origin and s.origin.role == COPY)
        return {buffer: f"{name(tensor)}, packed" for buffer, tensor in copies}

    @cached_property
    def buffer_names(self) -> dict[str, str]:
        """Names for users of the buffers of `module`."""
        own = _declared_buffers(self.module, self.lines)
        readable = _declared_buffers(self.readable_module, self.readable_lines)
        return {a.name: b.name for a, b in zip(own, readable, strict=True)} | self.copy_names

    def name_copies(self, d: Decision) -> Decision:
        """A decision with the name for users if it is about a buffer that holds a packed operand."""
        buffer, _, rest = d.chosen.partition(" ")
        return replace(d, chosen=f"{self.copy_names[buffer]}, {rest}") if buffer in self.copy_names else d

    @cached_property
    def statements(self) -> tuple[SourceStatement, ...]:
        return source_statements(self.compiled.text, self.bound)

    def make_report(
        self, target: str, decisions: tuple[Decision, ...], code: tuple[Listing, ...], **parts: Any
    ) -> Report:
        """Make the report.

        Args:
            target: the machine, as text.
            decisions: all decisions, including those of `self`.
            code: the listings after the loops.
            parts: further fields of the report, for the device.
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
    """The buffers of a module and its `lines`, in an order that does not depend on names."""
    yield from (*m.arguments, *m.temporaries)
    for _, s in lines:
        if isinstance(s, Allocate):
            yield from s.buffers
        elif isinstance(s, Window):
            yield s.buffer


def trace_compilation(compiled: CompiledBase, last: str) -> Trace:
    """Rerun the passes of `compiled` up to `last`."""
    is_range = isinstance(compiled, CompiledRangeKernel)
    bound = compiled.typical_bound
    with close_book():
        context = compiled.context
    with translate_errors(bound), open_book() as book:
        results = compiled.rerun_all_until("join" if is_range else last, context)
    return Trace(compiled, bound, results, with_original_decisions(book.decisions, bound))
