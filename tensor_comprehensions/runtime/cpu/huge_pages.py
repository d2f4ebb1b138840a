"""Huge pages for large new tensors.

A tensor that a call makes is written from end to end. In pages of 2 MiB its first touch takes half the time, and stores
to many pages at once miss the TLB less often. Linux provides such pages on request.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

LARGE, HUGE = 4 << 20, 2 << 20
"""The minimum bytes of a tensor in huge pages, and the bytes of a huge page."""
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""Linux's number of the advice; None on other systems."""


def advise_huge_pages(address: int, size: int) -> None:
    """Request huge pages for the whole huge pages in this memory that have not been touched yet."""
    if size < LARGE or ADVICE is None:
        return
    start = -(-address // HUGE) * HUGE
    stop = (address + size) // HUGE * HUGE
    _load_madvise()(start, stop - start, ADVICE)  # a refusal does no harm


@functools.cache
def _load_madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return advise
