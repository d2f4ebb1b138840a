"""Cached facts about sparsity patterns: that they obey their format, and their conversions to other formats.

Both are computed once. They hold as long as the arrays of a pattern have the same memory and the same version, which
torch increments with every in-place change. NumPy's memory and inference tensors have no versions, so nothing is cached
for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ...core.diagnostics import get_logger
from ...tc_lang.formats import Format
from .check_storage import check_parts, check_values
from .sparse_tensor import Level, SparseTensor

V = TypeVar("V")


class ArrayKeyedCache:
    """Caches values that were computed from arrays, until one of the arrays changes or is freed."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[tuple[int, ...], list[Any], Any]] = {}

    def get(self, arrays: Sequence[Tensor], key: Hashable, make: Callable[[], V]) -> V:
        """The cached result of `make` for these arrays and this key; it must not keep the arrays' memory alive."""
        # Tensors that torch traces have no memory, and inference tensors no version.
        if not all(type(x) is Tensor and not x.is_inference() for x in arrays):
            return make()
        full = (key, *((x.data_ptr(), x.numel(), x.dtype, x.stride()) for x in arrays))
        versions = tuple(x._version for x in arrays)
        found = self._entries.get(full)
        if found is not None and found[0] == versions and all(r() is not None for r in found[1]):
            return cast("V", found[2])
        with torch.inference_mode(False):  # later calls may record it for autograd
            value = make()
        entries = self._entries

        def forget(_: object) -> None:
            entries.pop(full, None)

        entries[full] = versions, [weakref.ref(x.untyped_storage(), forget) for x in arrays], value
        return value


@dataclass(frozen=True, eq=False)  # without slots: there are weak references to it
class Structure:
    """A pattern that obeys its format. Calls with the same arrays have the same object.

    Attributes:
        positions: the number of positions of the last level that is not dense.
        copies: contiguous copies of the levels, of one index type; None if the arrays already are like that.
        conversions: the pattern in other formats.
    """

    positions: int
    copies: tuple[Level, ...] | None = None
    conversions: dict[Format, LevelConversion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LevelConversion:
    """A pattern in another format.

    Attributes:
        levels: the levels in that format.
        shape: the shape of the values.
        source: for each value, its position among the values of the original; -1 if the original does not store it.
        is_whole: whether the original stores all values.
    """

    levels: tuple[Level, ...]
    shape: tuple[int, ...]
    source: Tensor
    is_whole: bool

    def apply(self, values: Tensor) -> Tensor:
        """The values in the order of this format."""
        flat = values.reshape(-1)
        if not self.is_whole:
            flat = torch.cat((flat, flat.new_zeros(1)))
        return flat[self.source].reshape(self.shape)


_known = ArrayKeyedCache()


def structure_of(t: SparseTensor, name: str = "the sparse tensor") -> Structure:
    """The structure of a tensor's pattern, whose arrays are checked the first time.

    Raises:
        ArgumentError: the arrays violate the format; the message calls the tensor `name`.
    """
    arrays = _index_arrays(t.levels)
    if arrays is None:
        return check_structure(t, name)
    found = _known.get(arrays, (t.format, t.shape, _find_present_arrays(t.levels)), lambda: check_structure(t, name))
    check_values(t.format, t.shape, found.positions, t.values, name)
    return found


def check_structure(t: SparseTensor, name: str = "the sparse tensor") -> Structure:
    """As `structure_of`, but check the arrays again. Raises ArgumentError."""
    check_parts(t.format, t.shape, t.levels, t.values, name)
    last = next((level for level in reversed(t.levels) if level is not None), None)
    return Structure(1 if last is None else len(last[1]), _normalized_level_copies(t.levels))


def _normalized_level_copies(levels: Sequence[Level]) -> tuple[Level, ...] | None:
    """The levels with contiguous arrays of one index type; None if they already are like that."""
    arrays = _index_arrays(levels) or []
    types = {x.dtype for x in arrays}
    if len(types) < 2 and all(x.is_contiguous() for x in arrays):
        return None
    dtype = torch.int64 if torch.int64 in types else torch.int32

    def copy_tensor(x: Tensor) -> Tensor:
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)

    return tuple(
        level if level is None else (None if level[0] is None else copy_tensor(level[0]), copy_tensor(level[1]))
        for level in levels
    )


def copy_levels(levels: Sequence[Level]) -> tuple[Level, ...]:
    """The levels in memory of their own."""
    return tuple(
        level if level is None else (None if level[0] is None else level[0].clone(), level[1].clone())
        for level in levels
    )


def list_index_arrays(levels: Sequence[Level]) -> list[Tensor]:
    """All pos and crd."""
    return [x for level in levels if level is not None for x in level if x is not None]


def cache_for_arrays(key: Hashable, arrays: Sequence[Tensor], make: Callable[[], V]) -> V:
    """The result of `make` for arrays, cached until one of them changes."""
    return _known.get(arrays, key, make)


def convert_format(t: SparseTensor, format: Format, structure: Structure) -> SparseTensor:
    """The tensor in another format; the converted pattern is cached in its `structure`."""
    if t.format == format:
        return t
    if not t.format.is_unique or t.format.repeats_padding:  # elements with the same coordinates are added
        return t.to(format)
    found = _get_level_conversion(t, format, structure)
    return SparseTensor(format, t.shape, found.levels, found.apply(t.values))


def convert_levels(t: SparseTensor, format: Format, structure: Structure) -> tuple[Level, ...]:
    """The levels of the tensor in a format that stores the same elements in the same order, cached in `structure`."""
    return _get_level_conversion(t, format, structure).levels


def _get_level_conversion(t: SparseTensor, format: Format, structure: Structure) -> LevelConversion:
    found = structure.conversions.get(format)
    if found is None:
        with torch.inference_mode(t.values.is_inference()):
            found = structure.conversions.setdefault(format, _make_conversion(t, format))
    return found


def _make_conversion(t: SparseTensor, format: Format) -> LevelConversion:
    get_logger("sparse").debug("a tensor of the shape %s is converted from %s to %s", t.shape, t.format, format)
    numbers = torch.arange(1, t.values.numel() + 1, device=t.device).reshape(t.values.shape)
    made = SparseTensor(t.format, t.shape, t.levels, numbers).to(format)
    source = made.values.reshape(-1) - 1
    return LevelConversion(made.levels, tuple(made.values.shape), source, not bool((source < 0).any()))


def _index_arrays(levels: Sequence[object]) -> list[Tensor] | None:
    """All arrays pos and crd; None if one is not a strided tensor."""
    found = [x for level in levels if isinstance(level, tuple) for x in level if x is not None]
    return found if all(isinstance(x, Tensor) and x.layout is torch.strided for x in found) else None


def _find_present_arrays(levels: Sequence[object]) -> tuple[object, ...]:
    """Which arrays each level has, as a hashable value."""
    return tuple(tuple(x is not None for x in level) if isinstance(level, tuple) else level is None for level in levels)
