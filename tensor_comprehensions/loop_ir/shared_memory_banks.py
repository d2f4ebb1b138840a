"""Count the bank conflicts of shared-memory accesses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..machine import WARP_THREADS

BANKS = 32
"""Banks of shared memory on every NVIDIA GPU; each serves one word per turn."""
BANK_BYTES = 4
"""Bytes of a word; neighboring words lie in neighboring banks."""


def count_bank_conflict_turns(addresses: npt.ArrayLike, width: int) -> int:
    """The number of turns that bank conflicts add to accesses of warps.

    Args:
        addresses: byte addresses by thread, in order, along the last dimension; other dimensions are further accesses.
        width: bytes per thread; with 16, eight lanes are served at a time, with 8 sixteen.
    """
    groups = _split_into_groups(np.asarray(addresses, np.int64), min(WARP_THREADS, BANKS * BANK_BYTES // width))
    first, last = groups // BANK_BYTES, (groups + width - 1) // BANK_BYTES
    reach = int((last - first).max(initial=0)) + 1
    words = np.minimum(first[..., None] + np.arange(reach), last[..., None]).reshape(len(groups), -1)
    words.sort(axis=1)
    distinct = np.ones(words.shape, bool)  # lanes that share a word share its turn
    distinct[:, 1:] = words[:, 1:] != words[:, :-1]
    places = np.arange(len(groups))[:, None] * BANKS + words % BANKS
    busy = np.bincount(places[distinct], minlength=len(groups) * BANKS).reshape(-1, BANKS)
    return int((busy.max(axis=1) - 1).sum())


def _split_into_groups(addresses: npt.NDArray[np.int64], lanes: int) -> npt.NDArray[Any]:
    """The addresses in rows of `lanes` lanes that are served at a time; an incomplete row repeats its last lane."""
    missing = -addresses.shape[-1] % lanes
    if missing:
        addresses = np.pad(addresses, [(0, 0)] * (addresses.ndim - 1) + [(0, missing)], mode="edge")
    return addresses.reshape(-1, lanes)
