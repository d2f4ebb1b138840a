"""Matrix descriptors: the 64 bits that tell `wgmma` where an operand lies in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import ArgumentError
from ...layouts import Swizzle

CORE_ROWS = 8
"""The rows, each as long as the swizzle, that are permuted together."""
_MODES = {128: 1, 64: 2, 32: 3}
"""The code of a swizzle in a descriptor, by the bytes of a row."""
_LIMIT = 1 << 18
"""The exclusive limit of addresses and strides; a descriptor omits their lowest four bits."""
_UNUSED = 16
"""The leading offset in bytes of a swizzled K-major tile: the hardware ignores it; by convention, its field is 1."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The matrix descriptor of an operand of `wgmma` in shared memory, with rows along M or N and columns along K.

    Attributes:
        value: the 64 bits.
        major: `K` or `MN`, the dimension that is contiguous in memory.
        bits: the size of an element. `major` and `bits` are encoded in the instruction, not in the descriptor.
    """

    value: int
    major: str
    bits: int

    def __str__(self) -> str:
        return f"0x{self.value:016x}"

    def place(self, row: int, k: int) -> int:
        """The byte address from which the instruction reads the element at `row` of M or N and column `k` of K."""
        start, leading, stride = (self._field(at) << 4 for at in (0, 16, 32))
        width = {mode: width for width, mode in _MODES.items()}[self.value >> 62]
        size = self.bits // 8
        if self.major == "K":
            plain = start + row // CORE_ROWS * stride + row % CORE_ROWS * width + k * size
        else:
            across, inside = divmod(row * size, width)
            plain = start + across * leading + k // CORE_ROWS * stride + k % CORE_ROWS * width + inside
        return byte_swizzle(width)(plain)

    def _field(self, at: int) -> int:
        return self.value >> at & 0x3FFF


def descriptor(
    *, major: str, swizzle: int, address: int, first: int = 0, bits: int = 16, rows: int | None = None
) -> Descriptor:
    """The descriptor of an operand of `wgmma` in a tile written by TMA, or with the same swizzle.

    Args:
        major: `K` for a tile whose rows in memory extend along K; `MN` for one with a row along M or N for each k.
        swizzle: the bytes of a row of the tile: 128, 64 or 32.
        address: the address of the tile in bytes.
        first: the start of the operand in the tile: a column of a `K`-major tile, a row of an `MN`-major one.
        bits: the size of an element; `MN` requires 16.
        rows: the number of rows of an `MN`-major tile, which is its size along K.

    Raises:
        ArgumentError: no descriptor can address the operand.
    """
    for name, number in (("swizzle", swizzle), ("address", address), ("first", first), ("bits", bits)):
        if type(number) is not int:
            raise _make_mismatch(name, number, "a whole number")
    if major not in ("K", "MN"):
        raise _make_mismatch("major", major, "K or MN")
    if swizzle not in _MODES:
        raise _make_mismatch("swizzle", swizzle, "128, 64 or 32 bytes")
    if bits not in ((8, 16, 32) if major == "K" else (16,)):
        raise _make_mismatch(
            "bits", bits, "8, 16 or 32" if major == "K" else "16: only these are transposed on the way"
        )
    stride = CORE_ROWS * swizzle
    if address % stride or address < 0:
        raise _make_mismatch("address", address, f"a multiple of {stride}")
    if major == "K":
        if first * bits % 128 or not 0 <= first * bits < 8 * swizzle:
            raise _make_mismatch("first", first, f"a multiple of {128 // bits} in a row of {8 * swizzle // bits}")
        start, leading = address + first * bits // 8, _UNUSED
    else:
        if rows is None or rows % CORE_ROWS or not 0 < rows < _LIMIT // swizzle:
            raise _make_mismatch("rows", rows, f"a multiple of {CORE_ROWS} below {_LIMIT // swizzle}: the columns of K")
        if first % CORE_ROWS or not 0 <= first < rows:
            raise _make_mismatch("first", first, f"a multiple of {CORE_ROWS} below {rows}")
        start, leading = address + first * swizzle, rows * swizzle
    if start >= _LIMIT:
        raise _make_mismatch("address", address, f"an operand below {_LIMIT}")
    value = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | _MODES[swizzle] << 62
    return Descriptor(value, major, bits)


def byte_swizzle(width: int) -> Swizzle:
    """The swizzle of 16-byte chunks in rows of `width` bytes: 128, 64 or 32."""
    return Swizzle((width // 16).bit_length() - 1, 4, 3)


def _make_mismatch(what: str, found: object, expected: str) -> ArgumentError:
    return ArgumentError(f"a descriptor cannot have this {what}", expected=expected, found=str(found))
