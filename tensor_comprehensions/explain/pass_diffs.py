"""The changes of each compiler pass to the loops, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from ..loop_ir.nodes import Module
from ..loop_ir.show import Texts, list_lines
from .kernel_report import PassDiff

CONTEXT = 1
"""Number of unchanged lines shown around changed ones."""


def list_pass_diffs(results: Mapping[str, Any], spell: Callable[[str], str], known: Texts) -> tuple[PassDiff, ...]:
    """The changes of each pass after the one that creates the loops.

    Args:
        results: the results of all passes, by name, in order.
        spell: replaces canonical names in a text by those of the def.
        known: a cache of the texts of parts of the loops.
    """
    modules = [(name, value) for name, value in results.items() if isinstance(value, Module)]
    found = []
    texts: list[str] = []
    previous: Module | None = None
    for name, module in modules:
        own = texts if module is previous else [text for text, _ in list_lines(module, known)]
        if previous is not None:
            changed = list(_diff_lines(texts, own)) if own != texts else []
            spelled = spell("\n".join(text for _, text in changed)).split("\n")
            lines = tuple((sign, text) for (sign, _), text in zip(changed, spelled, strict=False))
            found.append(PassDiff(name, len(texts), len(own), lines))
        texts, previous = own, module
    return tuple(found)


def _diff_lines(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(sign, text) of removed ("-"), added ("+") and nearby unchanged (" ") lines, and gaps ("~")."""
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
