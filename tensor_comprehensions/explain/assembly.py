"""Listings of machine code and PTX, each instruction with the line of the loops that it implements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from .kernel_report import Listing, ListingLine

_LOCATION = re.compile(r"\t\.loc\t\d+ (\d+)")
_LABEL = re.compile(r"(\.?[\w.$]+):")


def list_assembly(text: str, loops: Listing) -> Listing:
    """The instructions and labels of assembly with line tables; directives and the tables are left out."""
    return Listing("asm", "machine code", tuple(_parse_assembly_lines(text, loops)))


def _parse_assembly_lines(text: str, loops: Listing) -> Iterator[ListingLine]:
    used = set(re.findall(r"[\w$.]*\.?L\w+", _filter_instructions(text)))
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


def _filter_instructions(text: str) -> str:
    """The instructions of an assembly text, which contain uses of labels but no definitions."""
    return "\n".join(row for row in text.split("\n") if row.startswith("\t") and not row.startswith("\t."))


_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]*)"', re.MULTILINE)
_PLACE = re.compile(r"\s*\.loc\s+(\d+) (\d+) (\d+)(?:, function_name \S+, inlined_at (\d+) (\d+) (\d+))?")
_DIRECTIVE = re.compile(r"\s*(\.(?!visible|entry|shared|func)|//|[(){}]+\s*(//.*)?$|$)")
_Place = tuple[str, str, str]
"""File, line and column."""


def list_ptx(text: str, cuda: Listing) -> Listing:
    """The instructions, labels and shared memory of PTX whose line tables refer to the CUDA listing."""
    return Listing("ptx", "PTX", tuple(_ptx_lines(text, cuda)))


def _ptx_lines(text: str, cuda: Listing) -> Iterator[ListingLine]:
    own = next((number for number, name in _FILE.findall(text) if name.endswith("kernel.cu")), "1")
    callers: dict[_Place, _Place] = {}
    linked = ListingLine("")
    for row in text[: text.find("\n\t.section")].split("\n") if "\n\t.section" in text else text.split("\n"):
        if found := _PLACE.match(row):
            place = found[1], found[2], found[3]
            if found[4]:
                callers[place] = found[4], found[5], found[6]
            linked = _cuda_line(place, callers, own, cuda)
        elif not _DIRECTIVE.match(row):
            is_instruction = row.startswith(("\t", "{", "@")) and not row.lstrip().startswith((".", "$"))
            if row.startswith("."):
                linked = ListingLine("")
            shown = " ".join(row.split())
            yield replace(linked, text=f"  {shown}") if is_instruction else ListingLine(shown)


def _cuda_line(place: _Place, callers: Mapping[_Place, _Place], own: str, cuda: Listing) -> ListingLine:
    """The line of the CUDA text for a place, or for the call into which it was inlined; an empty line if unknown."""
    seen: set[_Place] = set()
    while place[0] != own or place in callers:
        if place not in callers or place in seen:
            break
        seen.add(place)
        place = callers[place]
    number = int(place[1])
    return cuda.lines[number - 1] if place[0] == own and 0 < number <= len(cuda.lines) else ListingLine("")
