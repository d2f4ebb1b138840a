"""Machine code as text, each instruction with the line of the loops that it computes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .kernel_report import Listing, ListingLine

_LOCATION = re.compile(r"\t\.loc\t\d+ (\d+)")
_LABEL = re.compile(r"(\.?[\w.$]+):")


def list_assembly(text: str, loops: Listing) -> Listing:
    """The instructions and labels of an assembly text with line tables; directives and the tables are left out."""
    return Listing("asm", "machine code", tuple(_lines(text, loops)))


def _lines(text: str, loops: Listing) -> Iterator[ListingLine]:
    used = set(re.findall(r"[\w$.]*\.?L\w+", _operands(text)))
    line, inside = 0, False
    for row in text.split("\n"):
        if row.startswith("\t.section"):
            inside = not row.startswith("\t.section\t.debug") and "text" in row
            continue
        if row.startswith("\t.text"):
            inside = True
            continue
        if location := _LOCATION.match(row):
            line = int(location[1])
        elif not inside or not row.strip() or row.startswith("\t."):
            continue
        elif label := _LABEL.match(row):
            if not label[1].startswith(".L"):
                line = 0
            if not label[1].startswith(".L") or label[1] in used:
                yield ListingLine(row.split("#")[0].rstrip())
        else:
            shown = row.split("\t#")[0].rstrip().expandtabs(8).replace("        ", "  ", 1)
            if 0 < line <= len(loops.lines):
                yield ListingLine(shown, loops.lines[line - 1].statements, "", line)
            else:
                yield ListingLine(shown)


def _operands(text: str) -> str:
    """The instructions of an assembly text: where labels are used, and not defined."""
    return "\n".join(row for row in text.split("\n") if row.startswith("\t") and not row.startswith("\t."))
