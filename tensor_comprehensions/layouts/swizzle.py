"""Swizzles: permutations of the offsets of a layout that spread rows over the banks of a memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..core.errors import ArgumentError

MAX_OFFSET_BITS = 62
"""Maximum bits of offsets and extents of storage, so that index arithmetic fits signed 64-bit integers."""
_Offsets = TypeVar("_Offsets", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Swizzle:
    """`x ^ ((x & mask) >> shift)`, mask being `bits` ones from bit `base + shift` on; prints as `Sw<3,3,3>`.

    It permutes every aligned block of `period` offsets and is its own inverse.

    Attributes:
        bits: the number of permuted bits.
        base: the lowest permuted bit; 2^base consecutive elements stay together.
        shift: the distance to the bits that they are XORed with; at least `bits`.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if any(type(n) is not int for n in (self.bits, self.base, self.shift)):
            raise ArgumentError(f"{self} is not a swizzle", expected="whole numbers for bits, base and shift")
        if min(self.bits, self.base, self.shift) < 0:
            raise ArgumentError(f"{self} has a negative number", expected="bits, base and shift of 0 or more")
        if self.bits + self.base + self.shift > MAX_OFFSET_BITS:
            raise ArgumentError(f"{self} permutes no offsets", expected=f"up to {MAX_OFFSET_BITS} bits of an offset")
        if self.shift < self.bits:
            raise ArgumentError(
                f"{self} has no inverse: it combines bits with themselves", expected=f"a shift of at least {self.bits}",
                found=str(self.shift),
            )  # fmt: skip

    def __str__(self) -> str:
        return f"Sw<{self.bits},{self.base},{self.shift}>"

    def __call__(self, offset: _Offsets) -> _Offsets:
        """The swizzled offset of the element at `offset`, element by element for an array."""
        mask = ((1 << self.bits) - 1) << (self.base + self.shift)
        return offset ^ ((offset & mask) >> self.shift)

    @property
    def period(self) -> int:
        """The number of offsets after which the permutation repeats."""
        return 1 << (self.bits + self.base + self.shift)
