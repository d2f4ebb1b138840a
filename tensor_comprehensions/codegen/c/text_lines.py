"""Lines of printed text: indentation, and marks that lead to the lines of the loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...loop_ir import nodes as ir
from .expressions import PrintScope

_MARK = "\x01"
"""Between a line and the number of its line of the loops. No text of a program has it."""


def mark_lines(lines: Iterator[str], number: int) -> Iterator[str]:
    """`lines` with the mark `number`, but those that have a mark already; as they are if the number is 0."""
    return (line if _MARK in line else f"{line}{_MARK}{number}" for line in lines) if number else lines


def split_marks(text: str) -> Iterator[tuple[str, int]]:
    """The lines of a text that was printed with marks, as without them, each with the line of the loops that it is
    part of, from 1 on; 0 if it is part of none."""
    for line in text.split("\n"):
        plain, _, number = line.partition(_MARK)
        yield plain, int(number or 0)


def mark_part(s: ir.Stmt, lines: Iterator[str], scope: PrintScope) -> Iterator[str]:
    """`lines`, which print `s` or a part of it, with its mark if the text gets marks."""
    return lines if scope.marks is None else mark_lines(lines, scope.marks.statements.get(id(s), 0))


def indent_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines one level deeper."""
    return (f"    {line}" if line else line for line in lines)
