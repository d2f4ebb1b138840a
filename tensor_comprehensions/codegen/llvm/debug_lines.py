"""LLVM assembly with debug locations that map each instruction to its line of the loop text; for display only.

A test checks that the line tables do not change the machine code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...loop_ir.nodes import Kernel, Module, Stmt
from ...loop_ir.show import Line, LineNumbers
from ...target import CpuTarget
from .captures import Usage
from .hoisting_builder import HoistingBuilder
from .llvm_printer import FunctionWriter, ModuleWriter

_UNIT, _VERSION, _FILE, _TYPE, _FIRST = 1, 2, 3, 4, 5
"""Numbers of the fixed metadata nodes; functions and locations are numbered from `_FIRST` on."""


def emit_llvm_with_lines(module: Module, target: CpuTarget, symbols: Mapping[str, str], lines: Sequence[Line]) -> str:
    """`emit_llvm` with a debug location on each instruction: the number, from 1 on, of its line in `lines`."""
    return _LineModuleWriter(module, target, symbols, lines).write()


class _LineModuleWriter(ModuleWriter):
    """A module writer that appends debug metadata."""

    def __init__(self, module: Module, target: CpuTarget, symbols: Mapping[str, str], lines: Sequence[Line]) -> None:
        super().__init__(module, target, symbols)
        self.numbers = LineNumbers.of(lines)
        self.present = 0
        self.metadata: list[str] = []

    def kernel(self, kernel: Kernel, number: int) -> None:
        self.present = self.numbers.kernels[number]
        super().kernel(kernel, number)

    def add_metadata(self, text: str) -> int:
        """Append a metadata node; returns its number."""
        self.metadata.append(text)
        return _FIRST + len(self.metadata) - 1

    def new_function(self, name: str, used: Usage, writes: Mapping[int, frozenset[str]]) -> FunctionWriter:
        return _LineFunctionWriter(self, name, used, writes)

    def write(self) -> str:
        text = super().write()
        tail = [
            f"!llvm.dbg.cu = !{{!{_UNIT}}}",
            f"!llvm.module.flags = !{{!{_VERSION}}}",
            f"!{_UNIT} = distinct !DICompileUnit(language: DW_LANG_C, file: !{_FILE}, isOptimized: true, "
            "runtimeVersion: 0, emissionKind: LineTablesOnly)",
            f'!{_VERSION} = !{{i32 2, !"Debug Info Version", i32 3}}',
            f'!{_FILE} = !DIFile(filename: "loops", directory: "")',
            f"!{_TYPE} = !DISubroutineType(types: !{{}})",
            *(f"!{_FIRST + n} = {node}" for n, node in enumerate(self.metadata)),
        ]
        return text + "\n".join(tail) + "\n"


class _LineFunctionWriter(FunctionWriter):
    """A function writer that tracks the line of the current statement."""

    def __init__(self, module: _LineModuleWriter, name: str, used: Usage, writes: Mapping[int, frozenset[str]]) -> None:
        self.lines, self.start = module, module.present
        self.scope = module.add_metadata(
            f'distinct !DISubprogram(name: "{name}", scope: !{_FILE}, file: !{_FILE}, line: {self.start}, '
            f"scopeLine: {self.start}, type: !{_TYPE}, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !{_UNIT})"
        )
        super().__init__(module, name, used, writes)

    def new_builder(self) -> HoistingBuilder:
        return _LineBuilder(self.module.declarations, self.lines, self.scope, self.start)

    @property
    def annotation(self) -> str:
        return f" !dbg !{self.scope}"

    def statement(self, s: Stmt) -> None:
        assert isinstance(self.b, _LineBuilder)
        outer = self.b.line
        self.b.line = self.lines.present = self.lines.numbers.statements.get(id(s), outer)
        super().statement(s)
        self.b.line = self.lines.present = outer


class _LineBuilder(HoistingBuilder):
    """A builder that attaches the location of the current line to every instruction."""

    def __init__(self, declarations: dict[str, None], module: _LineModuleWriter, scope: int, line: int) -> None:
        super().__init__(declarations)
        self.module, self.scope, self.line = module, scope, line
        self.locations: dict[int, int] = {}

    def instruction(self, text: str) -> str:
        if self.line not in self.locations:
            node = f"!DILocation(line: {self.line}, column: 1, scope: !{self.scope})"
            self.locations[self.line] = self.module.add_metadata(node)
        return f"{super().instruction(text)}, !dbg !{self.locations[self.line]}"
