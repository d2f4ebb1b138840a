"""How a product is divided into tiles: a box of indices for each tile of rows, columns and terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from ..loop_ir.nodes import Buffer
from ..tc_lang import ir as tc
from ..tc_lang.ir import BoundIndex
from .affine_element import AffineElement, affine_element
from .recognize_products import IndexKind, ProductFactor, ProductRegion

VECTOR_BYTES = 16
"""Neighbors that a copy moves at best: boxes keep so many of a contiguous index together."""


@dataclass(frozen=True, slots=True)
class FactorPlace:
    """Where a factor comes from, and how its tile lies in shared memory.

    Attributes:
        element: where it is an element with affine subscripts; None: threads compute it.
        transposed: whether the tile lies as terms x rows, which 16-bit factors may.
    """

    element: AffineElement | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class ProductOrder:
    """The indices of a region in the order in which tiles count them, the fastest first."""

    rows: tuple[BoundIndex, ...]
    columns: tuple[BoundIndex, ...]
    terms: tuple[BoundIndex, ...]
    batch: tuple[BoundIndex, ...]
    left: FactorPlace
    right: FactorPlace


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tiles of a region.

    Attributes:
        boxes: for every index the size of a tile along it.
        tile: rows, columns and terms of a tile. warps: along its rows and columns.
        stages: of shared memory. group: rows of tiles that are walked side by side.
    """

    boxes: Mapping[str, int]
    tile: tuple[int, int, int]
    warps: tuple[int, int]
    stages: int
    group: int

    def count(self, indices: Sequence[BoundIndex]) -> int:
        """How many tiles there are along indices."""
        return prod(-(-i.extent // self.boxes[i.name]) for i in indices)


def order_indices(region: ProductRegion, buffers: Mapping[str, Buffer]) -> ProductOrder:
    """The order in which copies and stores of neighbors are possible."""
    every = [i for i, _ in region.kinds]
    rows, columns, terms = (list(region.indices(kind)) for kind in (IndexKind.ROW, IndexKind.COLUMN, IndexKind.TERM))
    left, right = (_element(f, every, buffers) for f in (region.left, region.right))
    output = affine_element(region.contraction.output, every, buffers)
    terms = _sorted(terms, [x for x in (left, right) if x is not None])
    places = []
    for factor, element, own in ((region.left, left, rows), (region.right, right, columns)):
        unit = None if element is None else _unit(element, [*terms[:1], *own])
        places.append(FactorPlace(_plain(factor, element), unit in own and factor.dtype.bits == 16))
    if places[0].transposed or output is None:
        rows = _sorted(rows, [x for x in (left, output) if x is not None])
    else:
        rows = _sorted(rows, [x for x in (output, left) if x is not None])
    columns = _sorted(columns, [x for x in ((right, output) if places[1].transposed else (output, right)) if x])
    return ProductOrder(
        tuple(rows), tuple(columns), tuple(terms), region.indices(IndexKind.BATCH), places[0], places[1]
    )


def choose_boxes(order: ProductOrder, tile: tuple[int, int, int]) -> dict[str, int]:
    """For every index the size of a tile along it, so that together they are `tile` and the fewest tiles are needed."""
    found = {i.name: 1 for i in order.batch}
    for indices, size in zip((order.rows, order.columns, order.terms), tile, strict=True):
        found |= dict(zip((i.name for i in indices), _box(tuple(i.extent for i in indices), size), strict=True))
    return found


@cache
def _box(extents: tuple[int, ...], size: int) -> tuple[int, ...]:
    if len(extents) == 1:
        return (size,)

    def waste(box: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        tiles = prod(-(-n // b) for n, b in zip(extents, box, strict=True))
        short = min(box[0], 8) < min(8, extents[0])  # neighbors that no vector holds
        return tiles, int(short), tuple(-b for b in box)

    return min(_boxes(extents, size), key=waste)


def _boxes(extents: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Boxes of powers of two, but for what is left of `size`, which the first index has."""
    if len(extents) == 1:
        yield (size,)
        return
    side = 1
    while size % side == 0 and side < 2 * extents[-1]:
        yield from ((*rest, side) for rest in _boxes(extents[:-1], size // side))
        side *= 2


def _element(
    factor: ProductFactor, indices: Sequence[BoundIndex], buffers: Mapping[str, Buffer]
) -> AffineElement | None:
    """The first element that a factor reads, if its subscripts are affine: neighbors of it are neighbors."""
    reads = [x for x in tc.walk_expr(factor.value) if isinstance(x, tc.Access)]
    return affine_element(reads[0], indices, buffers) if reads else None


def _plain(factor: ProductFactor, element: AffineElement | None) -> AffineElement | None:
    return None if factor.element is None else element


def _unit(element: AffineElement, indices: Sequence[BoundIndex]) -> BoundIndex | None:
    return next((i for i in indices if element.stride(i.name) == 1), None)


def _sorted(indices: list[BoundIndex], elements: Sequence[AffineElement]) -> list[BoundIndex]:
    """Those that move the elements least first; an index of one value last."""

    def steps(i: BoundIndex) -> tuple[bool, bool, list[int]]:
        moved = [e.stride(i.name) for e in elements]
        return i.extent == 1, 1 not in moved, [s or 1 << 62 for s in moved]

    return sorted(indices, key=steps)
