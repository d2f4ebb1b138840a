"""How many turns the banks of shared memory take to serve an access of a warp."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..machine import WARP_THREADS

BANKS = 32
"""Banks of the shared memory of every NVIDIA GPU: each serves one word a turn."""
BANK_BYTES = 4
"""Bytes of a word; neighboring words lie in neighboring banks."""


def count_bank_conflict_turns(addresses: Sequence[int], width: int) -> int:
    """Turns, beyond those without a conflict, that one access of a warp takes.

    Args:
        addresses: where each lane's first byte is.
        width: bytes that a lane accesses at once; of 16, eight lanes are served at a time, of 8 sixteen.
    """
    lanes = min(WARP_THREADS, BANKS * BANK_BYTES // width)
    groups = [addresses[first : first + lanes] for first in range(0, len(addresses), lanes)]
    return sum(_count_group_turns(group, width) - 1 for group in groups)


def _count_group_turns(addresses: Sequence[int], width: int) -> int:
    """How many different words the busiest bank has; lanes that share a word share its turn."""
    words: dict[int, set[int]] = defaultdict(set)
    for address in addresses:
        for word in range(address // BANK_BYTES, (address + width - 1) // BANK_BYTES + 1):
            words[word % BANKS].add(word)
    return max(map(len, words.values()))
