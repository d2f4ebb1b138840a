"""Convert between coordinates and levels: build the tree of a format, and list its elements."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import ArgumentError
from ...tc_lang.formats import Format, LevelKind

if TYPE_CHECKING:
    from .sparse_tensor import Level, SparseTensor


def to_coordinates(t: SparseTensor) -> Tensor:
    """The coordinates of all stored elements, in the order of the values; (rank, n), int64."""
    extents, device = t.format.extents(t.shape), t.values.device
    found: list[Tensor] = []
    positions = 1
    for level, arrays, extent in zip(t.format.levels, t.levels, extents, strict=True):
        if arrays is None:
            own = torch.arange(extent, device=device).repeat(positions)
            parents = torch.arange(positions, device=device).repeat_interleave(extent)
            positions *= extent
        else:
            pos, crd = arrays
            own = crd.long()
            if level.kind is LevelKind.COMPRESSED:
                assert pos is not None
                numbers = torch.arange(positions, device=device)
                parents = numbers.repeat_interleave(pos.diff().long(), output_size=crd.shape[0])
            else:
                parents = torch.arange(positions, device=device)
            positions = crd.shape[0]
        found = [c[parents] for c in found] + [own]
    return _join_blocks(t.format, found, t.values.numel(), device)


def _join_blocks(format: Format, by_level: list[Tensor], count: int, device: torch.device) -> Tensor:
    """The coordinates of the dimensions, (rank, count), from those of the levels."""
    if not by_level:
        return torch.zeros((0, count), dtype=torch.int64, device=device)
    split = [by_level[format.order.index(d)] for d in range(len(by_level))]
    if format.blocks:
        rank = format.rank
        split = [split[d] * format.blocks[d] + split[rank + d] for d in range(rank)]
    return torch.stack(split)


def from_coordinates(
    places: Tensor,
    values: Tensor,
    shape: tuple[int, ...],
    format: Format,
    index_dtype: torch.dtype | None,
    reduction: str = "+",
) -> SparseTensor:
    """See `SparseTensor.from_coordinates`; `reduction` combines elements with the same coordinates."""
    _check_places(places, values, shape, format)
    keys, extents, depth = _split_blocks(places, format), format.extents(shape), format.depth
    order = _compute_lexicographic_order(keys[:depth], extents[:depth], values)
    return _pack([k[order] for k in keys], values[order], shape, format, index_dtype, reduction)


def from_sorted_coordinates(
    places: Tensor,
    values: Tensor,
    shape: tuple[int, ...],
    format: Format,
    index_dtype: torch.dtype | None,
    reduction: str = "+",
) -> SparseTensor:
    """As `from_coordinates` for coordinates that are in range, and sorted in the order of the format."""
    return _pack(_split_blocks(places, format), values, shape, format, index_dtype, reduction)


def _pack(
    keys: list[Tensor],
    values: Tensor,
    shape: tuple[int, ...],
    format: Format,
    index_dtype: torch.dtype | None,
    reduction: str,
) -> SparseTensor:
    """A tensor of sorted elements; `keys` has their coordinates for each level."""
    from .sparse_tensor import SparseTensor

    dtype = _index_dtype(index_dtype, shape, len(values))
    extents, depth = format.extents(shape), format.depth
    builder = _Builder(torch.zeros(len(values), dtype=torch.int64, device=values.device), 1, dtype)
    levels = tuple(builder.add(format, n, keys, extents[n]) for n in range(depth))
    levels += (None,) * (len(extents) - depth)
    tail, flat = extents[depth:], builder.nodes
    for key, extent in zip(keys[depth:], tail, strict=True):
        flat = flat * extent + key
    room = (builder.count, *tail) if depth else tail
    return SparseTensor(format, shape, levels, _scatter_reduce_values(values, flat, room, reduction))


def _check_places(places: Tensor, values: Tensor, shape: tuple[int, ...], format: Format) -> None:
    if places.ndim != 2 or places.shape[0] != len(shape) or values.ndim != 1 or len(values) != places.shape[1]:
        raise ArgumentError(
            "coordinates have a row for each dimension and a column for each value",
            expected=f"coordinates of the shape ({len(shape)}, {len(values) if values.ndim else 1})",
            found=f"{tuple(places.shape)}, and values of the shape {tuple(values.shape)}",
        )
    for d, (row, extent) in enumerate(zip(places, shape, strict=True)):
        wrong = (row < 0) | (row >= extent)
        if bool(wrong.any()):
            at = int(wrong.to(torch.uint8).argmax())
            raise ArgumentError(
                f"coordinate {int(row[at])} of element {at} is outside of dimension {d}", expected=f"0 to {extent - 1}"
            )
    for n, block in zip(shape, format.blocks, strict=False):
        if n % block:
            raise ArgumentError(f"blocks of {block} do not divide a dimension of {n}", suggestion="pad the tensor")


def _index_dtype(asked: torch.dtype | None, shape: tuple[int, ...], count: int) -> torch.dtype:
    limit = 2**31 - 1
    needed = torch.int64 if max((*shape, count)) > limit else torch.int32
    if asked is torch.int32 and needed is torch.int64:
        return needed
    return needed if asked is None else asked


def _split_blocks(places: Tensor, format: Format) -> list[Tensor]:
    """The coordinates of each level."""
    rows = list(places)
    if format.blocks:
        blocks = format.blocks
        rows = [r // b for r, b in zip(rows, blocks, strict=True)] + [r % b for r, b in zip(rows, blocks, strict=True)]
    return [rows[d] for d in format.order]


def _compute_lexicographic_order(keys: list[Tensor], extents: tuple[int, ...], values: Tensor) -> Tensor:
    """The permutation that sorts `values` by the first key, then by the second, and so on; it is stable."""
    order = torch.arange(len(values), device=values.device)
    pending: list[Tensor] = []
    room, joined = 2**62, None
    for key, extent in zip(reversed(keys), reversed(extents), strict=True):  # as many keys at once as 62 bits hold
        if joined is None or room // max(1, extent) == 0:
            if joined is not None:
                pending.append(joined)
            joined, scale, room = key, extent, 2**62 // max(1, extent)
        else:
            joined, scale, room = key * scale + joined, scale * extent, room // max(1, extent)
    pending += [joined] if joined is not None else []
    for key in pending:
        order = order[torch.argsort(key[order], stable=True)]
    return order


@dataclass(slots=True)
class _Builder:
    """Builds the levels of sorted elements, outermost first.

    Attributes:
        nodes: the position of each element in the level above.
        count: the number of positions of the level above.
        dtype: the type of the arrays.
    """

    nodes: Tensor
    count: int
    dtype: torch.dtype

    def add(self, format: Format, n: int, keys: list[Tensor], extent: int) -> Level:
        """Build the arrays of level `n` for the coordinates `keys[n]`. Raises ArgumentError if it cannot hold them."""
        level, key = format.levels[n], keys[n]
        if level.is_dense:
            self.nodes, self.count = self.nodes * extent + key, self.count * extent
            return None
        if level.kind is LevelKind.SINGLETON:
            if self.count and not extent:
                raise ArgumentError(
                    f"the format '{format}' holds a coordinate for each of {self.count} parents, where there is none",
                    expected="an extent of 1 or more", found="an extent of 0",
                )  # fmt: skip
            return None, self._singleton(key, format).to(self.dtype)
        first, parents = self._begins(format, n, keys).nonzero().squeeze(1), self.nodes
        counts = torch.bincount(parents[first], minlength=self.count)
        pos = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        begins = torch.zeros_like(key)
        begins[first] = 1
        self.nodes, self.count = begins.cumsum(0) - 1, len(first)
        return pos.to(self.dtype), key[first].to(self.dtype)

    def _singleton(self, key: Tensor, format: Format) -> Tensor:
        crd = key.new_zeros(self.count)
        crd[self.nodes] = key
        if bool((crd[self.nodes] != key).any()):
            raise ArgumentError(f"the format '{format}' holds one coordinate where the tensor has several")
        return crd

    def _begins(self, format: Format, n: int, keys: list[Tensor]) -> Tensor:
        """A mask of the elements that begin a new position of the compressed level `n`.

        If coordinates of the level may repeat, the singletons below also distinguish positions; if these may repeat,
        too, every element has its own position.
        """
        last = next((m for m in range(n, format.depth) if format.levels[m].unique), None)
        begins = torch.ones_like(self.nodes, dtype=torch.bool)
        if last is None:
            return begins
        begins[1:] = self.nodes[1:] != self.nodes[:-1]
        for key in keys[n : last + 1]:
            begins[1:] |= key[1:] != key[:-1]
        return begins


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed types of the same width for unsigned types, which torch cannot compute with."""
_REDUCE = {"*": "prod", "min": "amin", "max": "amax"}


def _scatter_reduce_values(values: Tensor, places: Tensor, room: tuple[int, ...], reduction: str) -> Tensor:
    """A tensor of the shape `room` with `values` combined at flat `places`, and 0 elsewhere.

    16-bit floats are added in float32. Sums and maxima of bools are their disjunction, products and minima their
    conjunction.
    """
    count, dtype = prod(room), values.dtype
    if dtype is torch.bool:
        every = reduction in ("*", "min")
        held = values.new_zeros(count).index_put((places if every else places[values],), values.new_ones(()))
        return (held.index_put((places[~values],), values.new_zeros(())) if every else held).reshape(room)
    if dtype in SIGNED:
        # Flipping the sign bit keeps the order.
        zero = torch.iinfo(SIGNED[dtype]).min if reduction in ("min", "max") else 0
        found = _scatter_reduce(values.view(SIGNED[dtype]) ^ zero, places, count, reduction, zero)
        return (found ^ zero).view(dtype).reshape(room)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) and reduction == "+" else dtype
    return _scatter_reduce(values.to(wide), places, count, reduction).to(dtype).reshape(room)


def _scatter_reduce(values: Tensor, places: Tensor, count: int, reduction: str, initial: int = 0) -> Tensor:
    """A tensor of `count` elements with `values` combined at `places`, and `initial` elsewhere."""
    found = values.new_full((count,), initial)
    if reduction == "+":
        return found.index_add(0, places, values)
    return found.scatter_reduce(0, places, values, _REDUCE[reduction], include_self=False)
