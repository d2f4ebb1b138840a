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
    collective: all threads of a block come to it together, so it stands in control flow that is the same for all.
    registers: whether its views are in registers.
    fragments: the views that are matrices in FRAGMENT buffers. written: the views whose memory it writes.
    """

    name: str
    operands: int
    attributes: int
    hint: bool = False
    collective: bool = False
    registers: bool = False
    fragments: tuple[int, ...] = ()
    written: tuple[int, ...] = ()


PREFETCH, PREFETCH_LATER = "prefetch", "prefetch_later"
BARRIER, WARP_BARRIER = "barrier", "warp_barrier"
SHUFFLE_XOR, SHUFFLE_DOWN = "shuffle_xor", "shuffle_down"
COPY_ASYNC, COMMIT_ASYNC, WAIT_ASYNC = "copy_async", "commit_async", "wait_async"
FRAGMENT_ZERO, FRAGMENT_LOAD, FRAGMENT_STORE = "fragment_zero", "fragment_load", "fragment_store"
FRAGMENT_DOT_BFLOAT16 = "fragment_dot_bfloat16"

INTRINSICS = {
    i.name: i
    for i in (
        # The cache line of an element is wanted soon; the attribute tells whether to be written (1) or only read (0).
        Intrinsic(PREFETCH, operands=1, attributes=1, hint=True),
        # The same, but so much later that the first cache has other things to keep until then.
        Intrinsic(PREFETCH_LATER, operands=1, attributes=1, hint=True),
        # What threads of the block (of the warp) wrote before is seen by all of them after.
        Intrinsic(BARRIER, operands=0, attributes=0, collective=True),
        Intrinsic(WARP_BARRIER, operands=0, attributes=0, collective=True),
        # destination, source; (mask or offset of lanes, width): each thread gets the source of the lane whose number
        # is its own xor the mask, or plus the offset, inside its group of `width` lanes; its own beyond the group.
        Intrinsic(SHUFFLE_XOR, operands=2, attributes=2, collective=True, registers=True),
        Intrinsic(SHUFFLE_DOWN, operands=2, attributes=2, collective=True, registers=True),
        # shared destination, global source; (bytes,), 4, 8 or 16: begin to copy contiguous elements; the destination is
        # undefined until this thread has waited for the group, and to other threads until a barrier after that.
        Intrinsic(COPY_ASYNC, operands=2, attributes=1, written=(0,)),
        # Close this thread's group of copies. (groups,): wait until so many of the last groups at most are not done.
        Intrinsic(COMMIT_ASYNC, operands=0, attributes=0),
        Intrinsic(WAIT_ASYNC, operands=0, attributes=1),
        # A fragment becomes all zeros.
        Intrinsic(FRAGMENT_ZERO, operands=1, attributes=0, fragments=(0,), written=(0,)),
        # fragment, memory; (dimension,): its rows go on along that dimension of the memory, each of them contiguous
        # there. Two bfloat16 in memory are one uint32, the first in the low half.
        Intrinsic(FRAGMENT_LOAD, operands=2, attributes=1, fragments=(0,), written=(0,)),
        # memory, fragment; (dimension,): the same the other way.
        Intrinsic(FRAGMENT_STORE, operands=2, attributes=1, fragments=(1,), written=(0,)),
        # sum (m, n), left (m, k), right (k, n): add the products of the pairs of bfloat16 in left and right, as many
        # `DOT_BFLOAT16` along k as there are. Subnormal numbers may count as zero.
        Intrinsic(FRAGMENT_DOT_BFLOAT16, operands=3, attributes=0, fragments=(0, 1, 2), written=(0,)),
    )
}


def is_hint(s: Invoke) -> bool:
    """Whether `s` computes nothing."""
    known = INTRINSICS.get(s.name)
    return known is not None and known.hint


def is_collective(s: Invoke) -> bool:
    """Whether all threads of a block come to `s` together."""
    known = INTRINSICS.get(s.name)
    return known is not None and known.collective
