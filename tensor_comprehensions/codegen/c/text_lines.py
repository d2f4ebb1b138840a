"""Lines of printed text: indentation, and marks that map them to lines of the loop text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...loop_ir import nodes as ir
from .expressions import PrintScope

_MARK = "\x01"
"""Separates a line from the number of its line in the loop text; it occurs in no printed program."""


def mark_lines(lines: Iterator[str], number: int) -> Iterator[str]:
    """`lines` with the mark `number` added to those without a mark; unchanged if `number` is 0."""
    return (line if _MARK in line else f"{line}{_MARK}{number}" for line in lines) if number else lines


def split_marks(text: str) -> Iterator[tuple[str, int]]:
    """The lines of a marked text without the marks, each with its line number in the loop text (from 1), or 0."""
    for line in text.split("\n"):
        plain, _, number = line.partition(_MARK)
        yield plain, int(number or 0)


def mark_part(s: ir.Stmt, lines: Iterator[str], scope: PrintScope) -> Iterator[str]:
    """`lines`, which print `s` or a part of it, marked with the line of `s` if `scope` asks for marks."""
    return lines if scope.marks is None else mark_lines(lines, scope.marks.statements.get(id(s), 0))


def indent_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines one level deeper."""
    return (f"    {line}" if line else line for line in lines)
