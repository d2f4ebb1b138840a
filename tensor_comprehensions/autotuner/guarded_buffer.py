"""Memory of a candidate: tensors between guard bands that detect out-of-bounds writes."""

from __future__ import annotations

import torch
from torch import Tensor

GUARD = 4096
"""Bytes before and after the memory of each tensor."""
ALIGNMENT = 64
"""The alignment of the first element in bytes, the same as from torch's allocator."""
_CANARY, _POISON = 0xA5, 0xFF  # floats of all ones are NaN


class GuardedBuffer:
    """Zeroed memory of `size` bytes between two guard bands."""

    def __init__(self, size: int) -> None:
        self.size = size
        raw = torch.full((size + 2 * GUARD + ALIGNMENT,), _CANARY, dtype=torch.uint8, device="cpu")
        skip = -(raw.data_ptr() + GUARD) % ALIGNMENT
        self._whole = raw[skip : skip + size + 2 * GUARD]
        self.bytes = self._whole[GUARD : GUARD + size]
        self.bytes.zero_()
        self._before, self._after = self._whole[:GUARD], self._whole[GUARD + size :]
        words = self._whole[: (size + 2 * GUARD) // 8 * 8]  # the remaining bytes belong to the guard
        self._words = words.view(torch.int64)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """A view of the memory, which must be large enough."""
        flat = self.bytes.view(dtype) if self.size else torch.empty(0, dtype=dtype, device="cpu")
        return flat.as_strided(shape, strides)

    def poison(self) -> None:
        """Fill with NaN or -1 to expose elements that are left unwritten, or read before they are written."""
        self.bytes.fill_(_POISON)

    def digest(self) -> int:
        """A checksum, which changes if one byte does."""
        return int(self._words.sum())

    def guards_intact(self) -> bool:
        """Whether the guard bands are intact."""
        return bool((self._before == _CANARY).all()) and bool((self._after == _CANARY).all())
