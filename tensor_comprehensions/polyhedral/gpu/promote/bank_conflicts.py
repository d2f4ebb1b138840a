"""Pad rows of shared buffers so that the threads of a warp access different banks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from operator import floordiv, mod

from ....core.decisions import Decision, Rival, is_recording, note_decision
from ....loop_ir.buffer_view import buffer_indices, with_row_pitch
from ....loop_ir.nodes import Buffer, Launch
from .coalescing import ThreadStrides
from .footprint import Box

BANKS, BANK_BYTES, WARP = 32, 4, 32


def pad_rows(
    buffer: Buffer, box: Box, steps: Sequence[ThreadStrides], launch: Launch, lanes: int, *, wide: bool
) -> Buffer:
    """`buffer` with rows padded to the length with the fewest bank conflicts.

    steps: the strides of references in the tensor. lanes: the elements of a vector copy, if the length of rows is a
    multiple of it; rows of odd length, which are copied one by one, are a last resort. wide: whether threads also read
    vectors of `lanes` elements if these are aligned.
    """
    if len(buffer.shape) < 2:
        return buffer
    width = buffer.shape[-1]
    lengths = dict.fromkeys(width + pad for pad in (0, lanes, 2 * lanes, 1 - width % 2))
    candidates = [with_row_pitch(buffer, n) for n in lengths]

    def count_turns(b: Buffer) -> int:
        taken = lanes if wide and b.strides[-2] % lanes == 0 else 1
        return sum(bank_conflicts(b, box, s, launch, taken) for s in steps)

    chosen = min(candidates, key=count_turns)
    if is_recording():
        _record_padding(chosen, [(b, count_turns(b)) for b in candidates])
    return chosen


def _record_padding(chosen: Buffer, turns: Sequence[tuple[Buffer, int]]) -> None:
    """Record the chosen length of rows, and the conflicts with this and other lengths."""
    width, pitch = chosen.shape[-1], chosen.strides[-2]
    waits = {b.strides[-2]: count for b, count in turns}
    others = sorted(((count, n) for n, count in waits.items() if n != pitch), key=lambda w: w[0])
    rivals = tuple(Rival(f"rows of {n}", count, f"{count} further turns of a warp") for count, n in others)
    why = f"{waits[pitch]} further turns of a warp for the same bank, and {waits[width]} without padding"
    numbers = ("row", width), ("pitch", pitch), ("turns", waits[pitch]), ("turns unpadded", waits[width])
    note_decision(Decision("padding", (), f"{chosen.name}: rows of {width} every {pitch}", why, numbers, rivals))


def bank_conflicts(buffer: Buffer, box: Box, steps: ThreadStrides, launch: Launch, lanes: int) -> int:
    """The turns that bank conflicts add to one access of a warp to `buffer`; 0 without conflicts.

    lanes: the elements that a thread accesses at once. With 16 bytes each, a quarter of a warp is served at a time.
    """
    digits = box.digits
    words: dict[int, set[int]] = defaultdict(set)
    span = max(1, lanes * buffer.type.dtype.size // BANK_BYTES)
    for lane in first_warp(launch)[: WARP // span]:
        address = 0
        for count, move in zip(lane, steps.moves, strict=True):
            if move is None:
                continue
            place = buffer_indices(digits, {d: count * m for d, m in enumerate(move)}, floordiv, mod)
            address += sum(p * s for p, s in zip(place, buffer.strides, strict=True))
        word = address * buffer.type.dtype.size // BANK_BYTES
        for part in range(word, word + span):
            words[part % BANKS].add(part)
    return max(map(len, words.values())) - 1


def first_warp(launch: Launch) -> list[tuple[int, int, int]]:
    """The threads of the first warp of a block, as (x, y, z)."""
    x, y, z = (range(n) for n in launch.block)
    return [(i, j, k) for k, j, i in product(z, y, x)][:WARP]
