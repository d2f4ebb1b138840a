"""Translate decisions about the canonical program to the names of the def."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.decisions import Decision
from ..loop_ir.origins import statement_of
from ..tc_lang.ir import BoundFunction
from ..tc_lang.transforms.canonical_bound import OriginalNames


def with_original_decisions(decisions: Sequence[Decision], bound: BoundFunction) -> tuple[Decision, ...]:
    """`decisions` with the names and statements of the def's source, without duplicates."""
    text = OriginalNames.of(bound).text
    found = (
        replace(
            d,
            statements=tuple(dict.fromkeys(map(statement_of, d.statements))),
            chosen=text(d.chosen),
            why=text(d.why),
            others=tuple(replace(o, text=text(o.text), why_not=text(o.why_not)) for o in d.others),
        )
        for d in decisions
    )
    return tuple(dict.fromkeys(found))
