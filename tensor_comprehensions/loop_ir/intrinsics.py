"""What `Invoke` can name. No pass and no emitter knows a row by its name: targets spell them in tables of their own."""

from __future__ import annotations

from dataclasses import dataclass

from .nodes import Invoke

CACHE_LINE = 64
"""Bytes that a prefetch brings near."""


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """One row.

    operands: how many views it takes, attributes: how many numbers.
    hint: it computes nothing, so its views need not exist and it may be left out; only their indices are evaluated.
    """

    name: str
    operands: int
    attributes: int
    hint: bool


PREFETCH = "prefetch"

INTRINSICS = {
    i.name: i
    for i in (
        # The cache line of an element is wanted soon; the attribute tells whether to be written (1) or only read (0).
        Intrinsic(PREFETCH, operands=1, attributes=1, hint=True),
    )
}


def is_hint(s: Invoke) -> bool:
    """Whether `s` computes nothing."""
    known = INTRINSICS.get(s.name)
    return known is not None and known.hint
