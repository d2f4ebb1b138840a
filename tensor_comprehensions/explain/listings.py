"""Listings of the forms of a kernel, and the lines of the statements of a def."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..codegen.c.text_lines import split_marks
from ..loop_ir.nodes import Invoke, Module, Stmt, Store
from ..loop_ir.origins import statement_of
from ..loop_ir.rewrite import substatements
from ..loop_ir.show import Line
from ..tc_lang.ir import BoundFunction
from .kernel_report import Listing, ListingLine, SourceStatement


def source_statements(text: str, bound: BoundFunction) -> tuple[SourceStatement, ...]:
    """The statements of `bound` with their lines in `text`; a statement with an unknown line has its number instead."""
    places: dict[str, tuple[str, int, int]] = {}
    for number, s in enumerate(bound.statements, 1):
        name = statement_of(s.name)
        if name in places:
            continue
        if s.span is None or not 0 <= s.span.start < len(text):
            places[name] = (s.target, number, number)
        else:
            first = text.count("\n", 0, s.span.start) + 1
            places[name] = (s.target, first, _last_line(text, s.span.start))
    return tuple(SourceStatement(name, *place) for name, place in places.items())


def _last_line(text: str, start: int) -> int:
    """The last line of the statement that begins at offset `start`, judged by brackets and operators at line ends."""
    line = text.count("\n", 0, start) + 1
    depth = 0
    for number, row in enumerate(text[start:].split("\n")):
        row = row.split("#")[0]
        depth += sum(row.count(c) for c in "([") - sum(row.count(c) for c in ")]")
        if depth <= 0 and not row.rstrip().endswith(_OPERATORS):
            return line + number
    return line


_OPERATORS = ("=", "+", "-", "*", "/", "?", ":", ",", "!", "<", ">", "&&", "||")
"""A line that ends with one of these continues on the next."""


def list_def(text: str, bound: BoundFunction, statements: tuple[SourceStatement, ...]) -> Listing:
    """The listing of a def's text; if no statement has a place in it, a line for each statement."""
    if all(s.span is None for s in bound.statements):
        lines = tuple(ListingLine(f"{s.name}: {s.tensor}", (s.name,)) for s in statements)
        return Listing("def", "def", lines)
    owners: dict[int, list[str]] = {}
    for s in statements:
        for line in range(s.line, s.last + 1):
            owners.setdefault(line, []).append(s.name)
    rows = text.rstrip("\n").split("\n")
    return Listing("def", "def", tuple(ListingLine(row, tuple(owners.get(n, ()))) for n, row in enumerate(rows, 1)))


def list_schedule(text: str) -> Listing:
    """The listing of the schedule tree; a line belongs to the statements that it names."""
    found = []
    for row in text.rstrip("\n").split("\n"):
        names = dict.fromkeys(statement_of(name) for name in re.findall(r"\bS\d+", row))
        found.append(ListingLine(row, tuple(names)))
    return Listing("schedule", "schedule tree", tuple(found))


def list_loops(module: Module, lines: Sequence[Line], texts: Sequence[str]) -> Listing:
    """The listing of the loops of `module`: `lines` with other `texts`; a line belongs to the statements inside it."""
    found = []
    kernels = iter(module.kernels)
    known: dict[int, tuple[str, ...]] = {}
    for text, (own, s) in zip(texts, lines, strict=True):
        shown = next(kernels).body if s is None and own.startswith("kernel ") else s
        role = f"{s.origin.role} {s.origin.tensor}".strip() if isinstance(s, Store) and s.origin is not None else ""
        found.append(ListingLine(text, () if shown is None else _find_owner_statements(shown, known), role))
    return Listing("loops", "loops", tuple(found))


def _find_owner_statements(s: Stmt, known: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """The statements of the def that `s` belongs to. known: a cache by `id`."""
    if id(s) not in known:
        origin = s.origin if isinstance(s, Store | Invoke) else None
        own = () if origin is None else map(statement_of, origin.statements)
        inner = (name for c in substatements(s) for name in _find_owner_statements(c, known))
        known[id(s)] = tuple(dict.fromkeys((*own, *inner)))
    return known[id(s)]


def list_marked(kind: str, title: str, text: str, loops: Listing) -> Listing:
    """The listing of a text that was printed with marks for the lines of the loops."""
    return Listing(kind, title, tuple(_link_line(*row, loops) for row in split_marks(text.rstrip())))


def list_llvm(text: str, loops: Listing) -> Listing:
    """The listing of LLVM assembly with debug locations, which are removed from the text."""
    numbers = {m[1]: int(m[2]) for m in re.finditer(r"^!(\d+) = !DILocation\(line: (\d+),", text, re.MULTILINE)}
    rows = text[: text.find("\n!llvm.dbg.cu")].rstrip().split("\n")
    pairs = (row.partition(", !dbg !") if row.startswith(" ") else (row, "", "") for row in rows)
    lines = (_link_line(re.sub(r" !dbg !\d+", "", plain), numbers.get(number, 0), loops) for plain, _, number in pairs)
    return Listing("llvm", "LLVM", tuple(lines))


def _link_line(text: str, number: int, loops: Listing) -> ListingLine:
    """A line of code that implements line `number` (from 1) of the loops; 0: none."""
    return ListingLine(text, loops.lines[number - 1].statements, "", number) if number else ListingLine(text)
