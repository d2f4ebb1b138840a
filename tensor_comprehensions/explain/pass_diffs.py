"""What each pass of the compiler changed in the loops, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from ..loop_ir.nodes import Module
from ..loop_ir.show import list_lines
from .kernel_report import PassDiff

CONTEXT = 1
"""Unchanged lines that are shown around changed ones."""


def list_pass_diffs(results: Mapping[str, Any], spell: Callable[[str], str]) -> tuple[PassDiff, ...]:
    """The passes after the one that makes the loops. results: of all passes, by name, in order. spell: the names."""
    modules = [(name, value) for name, value in results.items() if isinstance(value, Module)]
    found = []
    texts: list[str] = []
    previous: Module | None = None
    for name, module in modules:
        own = texts if module is previous else [text for text, _ in list_lines(module)]
        if previous is not None:
            changed = tuple((sign, spell(text)) for sign, text in _diff_lines(texts, own)) if own != texts else ()
            found.append(PassDiff(name, len(texts), len(own), changed))
        texts, previous = own, module
    return tuple(found)


def _diff_lines(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Removed lines ("-"), new ones ("+"), unchanged ones around them (" "), and gaps ("~")."""
    groups = SequenceMatcher(None, before, after).get_grouped_opcodes(CONTEXT)
    for number, group in enumerate(groups):
        if number:
            yield "~", ""
        for kind, start, stop, first, last in group:
            if kind == "equal":
                yield from ((" ", text) for text in before[start:stop])
            else:
                yield from (("-", text) for text in before[start:stop])
                yield from (("+", text) for text in after[first:last])
