"""The statements of a def with their places in its text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..loop_ir.nodes import Module, Stmt, Store
from ..loop_ir.origins import origins_in, statement_of
from ..loop_ir.show import Line
from ..tc_lang.ir import BoundFunction
from .kernel_report import Listing, ListingLine, SourceStatement


def source_statements(text: str, bound: BoundFunction) -> tuple[SourceStatement, ...]:
    """The statements of `bound` with their lines in `text`; numbered one after another where these are not known."""
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
    """The line on which a statement ends that begins at `start`: as far as its brackets and operators go on."""
    line = text.count("\n", 0, start) + 1
    depth = 0
    for number, row in enumerate(text[start:].split("\n")):
        row = row.split("#")[0]
        depth += sum(row.count(c) for c in "([") - sum(row.count(c) for c in ")]")
        if depth <= 0 and not row.rstrip().endswith(
            ("=", "+", "-", "*", "/", "?", ":", ",", "!", "<", ">", "&&", "||")
        ):
            return line + number
    return line


_OPERATORS = ("=", "+", "-", "*", "/", "?", ":", ",", "!", "<", ">", "&&", "||")
"""A row that ends so goes on."""


def list_def(text: str, bound: BoundFunction, statements: tuple[SourceStatement, ...]) -> Listing:
    """The text of a def, line by line; its statements one by one if there is no text for them."""
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
    """The schedule tree: a line belongs to the statements that it names."""
    found = []
    for row in text.rstrip("\n").split("\n"):
        names = dict.fromkeys(statement_of(name) for name in re.findall(r"\bS\d+", row))
        found.append(ListingLine(row, tuple(names)))
    return Listing("schedule", "schedule tree", tuple(found))


def list_loops(module: Module, lines: Sequence[Line], named: Sequence[Line]) -> Listing:
    """The loops of `module`, whose lines are `lines`, as `named` spells them: each with the statements inside it."""
    found = []
    kernels = iter(module.kernels)
    for (text, _), (own, s) in zip(named, lines, strict=True):
        is_header = s is None and own.startswith("kernel ")
        names, role = _owners(next(kernels).body if is_header else s)
        found.append(ListingLine(text, names, role))
    return Listing("loops", "loops", tuple(found))


def _owners(s: Stmt | None) -> tuple[tuple[str, ...], str]:
    """The statements of the def that `s` belongs to, and its role if it has but one."""
    if s is None:
        return (), ""
    origins = [origin for _, origin in origins_in(s) if origin is not None]
    names = dict.fromkeys(statement_of(name) for origin in origins for name in origin.statements)
    role = f"{origins[0].role} {origins[0].tensor}".strip() if isinstance(s, Store) and origins else ""
    return tuple(names), role
