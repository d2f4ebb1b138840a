"""Swizzles of tiles in shared memory: count the bank conflicts of warp accesses, and choose the swizzle with fewest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from ..core.errors import ArgumentError
from ..layouts import Layout, Swizzle
from ..loop_ir import build
from ..loop_ir.nodes import Space
from ..loop_ir.shared_memory_banks import BANK_BYTES, BANKS, count_bank_conflict_turns
from ..machine import WARP_THREADS
from .tensors import DataTensor

CHUNK_BYTES = 16
"""The largest access of a lane; swizzles keep chunks of this size contiguous."""
MAX_SWIZZLE_BITS = 3
"""log2 of the number of 16-byte chunks that the banks serve at once: permuting more bits avoids no conflicts."""


@dataclass(frozen=True, slots=True)
class Access:
    """How warps access a part of a tile; the pattern is repeated over the tile.

    Attributes:
        rows, columns: the size of the part.
        tv: (thread, value) -> `row + column * rows`; 32 threads form a warp; the values of a thread are contiguous.
    """

    rows: int
    columns: int
    tv: Layout


def load_matrix_access(columns: int, bits: int) -> Access:
    """`ldmatrix.x4`: lane l reads the 16-byte chunk l // 16 of row l % 16, in a part two chunks wide."""
    chunk = _count_elements(CHUNK_BYTES, bits)
    return Access(16, 2 * chunk, Layout(((16, 2), chunk), ((1, 16 * chunk), 16)))


def store_row_access(columns: int, bits: int) -> Access:
    """Neighboring lanes write neighboring 16-byte chunks of a row."""
    chunk = _count_elements(CHUNK_BYTES, bits)
    across = max(1, columns // chunk)
    rows = lcm(WARP_THREADS, across) // across
    return Access(rows, across * chunk, Layout(((across, rows), chunk), ((rows * chunk, 1), rows)))


def store_fragment_access(columns: int, bits: int) -> Access:
    """The accumulators of `mma`: lane l writes the word (4 bytes, or one element) l % 4 of row l // 4."""
    word = _count_elements(4, bits)
    return Access(8, 4 * word, Layout(((4, 8), word), ((8 * word, 1), 8)))


ACCESSES: dict[str, Callable[[int, int], Access]] = {
    "ldmatrix_x4_rows": load_matrix_access, "store_rows_16": store_row_access,
    "store_fragment_4": store_fragment_access,
}  # fmt: skip
"""Functions from (columns of a tile, bits of an element) to the access of an instruction, by its name."""


def conflicts(tile: DataTensor, access: str | Access) -> int:
    """The extra cycles of a warp access due to bank conflicts: the maximum over the tile, 0 without conflicts.

    Args:
        tile: rows and columns in shared memory, at an address that is a multiple of the swizzle's period.
        access: the access of warps, or its name in `ACCESSES`.

    Raises:
        ArgumentError: `tile` is not of this form, or its size is no multiple of the access.
    """
    if not isinstance(tile, DataTensor):
        raise ArgumentError("conflicts are those of a tile", expected="a data tensor", found=type(tile).__name__)
    access = _resolve_access(tile, access)
    size = tile.dtype.size
    parts = tile.tile(access.rows, access.columns)
    if parts.extents:
        raise ArgumentError(
            f"no whole number of accesses makes up {tile}", expected=f"parts of {access.rows} x {access.columns}"
        )
    swizzle = tile.swizzle or Swizzle(0, 0, 0)
    part = parts[0, 0].partition(access.tv)
    inside, values = part.offsets(), part.parts[1].size
    worst = 0
    # The banks and the swizzle repeat, so parts that begin a whole number of periods apart are alike.
    period = lcm(BANKS * BANK_BYTES // size, 1 if tile.swizzle is None else tile.swizzle.period)
    for base in {base % period for base in parts.levels[0].offsets()}:
        places = [swizzle(base + offset) for offset in inside]
        starts = places[::values]
        if any(places[n] != starts[n // values] + n % values for n in range(len(places))):
            raise ArgumentError(f"{tile} tears the {values} elements of a lane apart", expected="neighbors")
        addresses = [size * start for start in starts]
        turns = (
            count_bank_conflict_turns(addresses[n : n + WARP_THREADS], values * size)
            for n in range(0, len(addresses), WARP_THREADS)
        )
        worst = max(worst, *turns)
    return worst


def choose_swizzle(tile: DataTensor, accesses: Sequence[str | Access]) -> Swizzle | None:
    """The first swizzle without bank conflicts, or else the one with the fewest; None if no swizzle is needed.

    `conflicts` evaluates every candidate exactly.
    """
    best, fewest = None, sum(conflicts(tile.swizzled(None), access) for access in accesses)
    for swizzle in candidates(tile):
        if fewest == 0:
            break
        turns = sum(conflicts(tile.swizzled(swizzle), access) for access in accesses)
        if turns < fewest:
            best, fewest = swizzle, turns
    return best


def candidates(tile: DataTensor) -> list[Swizzle]:
    """Swizzles of 16-byte chunks that stay inside the tile; the standard one for rows of 2^j chunks comes first."""
    chunk = _count_elements(CHUNK_BYTES, tile.dtype.bits)
    base = chunk.bit_length() - 1
    j = max(1, (tile.levels[0].flat[0][1] // chunk).bit_length() - 1)
    rule = (min(MAX_SWIZZLE_BITS, j), max(MAX_SWIZZLE_BITS, j))
    others = [(bits, shift) for bits in range(MAX_SWIZZLE_BITS, 0, -1) for shift in range(bits, rule[1] + 3)]
    found = [Swizzle(bits, base, shift) for bits, shift in dict.fromkeys([rule, *others])]
    return [s for s in found if tile.levels[0].cosize % (1 << (s.bits + s.base)) == 0]


def _count_elements(size: int, bits: int) -> int:
    """The number of elements of `bits` in `size` bytes, at least 1."""
    return max(1, 8 * size // bits)


def _resolve_access(tile: DataTensor, access: str | Access) -> Access:
    if (
        tile.memory is not Space.SHARED
        or len(tile.parts) != 1
        or len(tile.shape) != 2
        or build.integer(tile.offset) != 0
    ):
        raise ArgumentError(f"cannot count the conflicts of {tile}", expected="rows and columns in SH, from its start")
    if isinstance(access, Access):
        return access
    if access not in ACCESSES:
        raise ArgumentError(f"no access is named '{access}'", expected=", ".join(ACCESSES), found=f"'{access}'")
    return ACCESSES[access](tile.levels[0][1].size, tile.dtype.bits)
