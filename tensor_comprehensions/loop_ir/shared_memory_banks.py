"""How many turns the banks of shared memory take to serve accesses of warps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..machine import WARP_THREADS

BANKS = 32
"""Banks of the shared memory of every NVIDIA GPU: each serves one word a turn."""
BANK_BYTES = 4
"""Bytes of a word; neighboring words lie in neighboring banks."""


def count_bank_conflict_turns(addresses: npt.ArrayLike, width: int) -> int:
    """Turns, beyond those without a conflict, that accesses of warps take.

    Args:
        addresses: the first byte of each thread, threads of a warp in order; in the last dimension, if there are more.
        width: bytes that a thread accesses at once; of 16, eight lanes are served at a time, of 8 sixteen.
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
    """The addresses of the lanes that are served at a time, as rows. A last lane that is missing repeats another."""
    missing = -addresses.shape[-1] % lanes
    if missing:
        addresses = np.pad(addresses, [(0, 0)] * (addresses.ndim - 1) + [(0, missing)], mode="edge")
    return addresses.reshape(-1, lanes)
