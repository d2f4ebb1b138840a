"""The division of a product into tiles: each tile of rows, columns and terms is a box of indices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from ...loop_ir.nodes import Buffer
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundIndex
from .affine_element import AffineElement, affine_element
from .product_region import ProductFactor, ProductRegion

MMA, WGMMA = "mma", "wgmma"
"""The instructions that compute products."""
VECTOR_BYTES = 16
"""The bytes of the widest copy, which boxes keep together along a contiguous index."""


@dataclass(frozen=True, slots=True)
class FactorPlace:
    """The source of a factor, and the layout of its tile in shared memory.

    Attributes:
        element: the tensor element with affine subscripts that is copied; None if threads compute the factor.
        transposed: whether the layout is terms x rows, which is possible for 16-bit factors.
    """

    element: AffineElement | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class PairOrder:
    """The term indices of a product, the fastest first, and the sources of its factors."""

    terms: tuple[BoundIndex, ...]
    left: FactorPlace
    right: FactorPlace
    others: tuple[FactorPlace, ...] = ()

    @property
    def rights(self) -> tuple[FactorPlace, ...]:
        """All right factors, one for each sum."""
        return self.right, *self.others


@dataclass(frozen=True, slots=True)
class ProductOrder:
    """The indices of a region in the order in which tiles enumerate them, the fastest first.

    output: the stored element, or None if it is not affine. inner: the order of the first product of a chain.
    """

    rows: tuple[BoundIndex, ...]
    columns: tuple[BoundIndex, ...]
    batch: tuple[BoundIndex, ...]
    pairs: tuple[PairOrder, ...]
    output: AffineElement | None
    inner: ProductOrder | None = None


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tiles of a region.

    Attributes:
        boxes: the size of a tile along each index.
        tile: the rows, columns and terms of a tile. warps: the numbers of warps along its rows and columns.
        stages: the pipeline stages in shared memory. group: the tile rows that consecutive blocks cover together.
        instruction: `MMA` by warps, or `WGMMA` by warpgroups, which divide the rows.
        stores_boxes: whether sums are stored via shared memory by TMA, which only `WGMMA` supports.
        lead: the number of steps by which the first of two warpgroups is ahead, so that epilogues overlap products.
        cluster: the number of blocks, in neighboring rows of tiles, that share copies of the right factors.
    """

    boxes: Mapping[str, int]
    tile: tuple[int, int, int]
    warps: tuple[int, int]
    stages: int
    group: int
    instruction: str = MMA
    stores_boxes: bool = False
    cluster: int = 1
    lead: int = 0

    @property
    def warpgroups(self) -> int:
        """The number of multiplying warpgroups, for `WGMMA`."""
        return self.warps[0] // 4

    def count(self, indices: Sequence[BoundIndex]) -> int:
        """The number of tiles along `indices`."""
        return prod(-(-i.extent // self.boxes[i.name]) for i in indices)


def order_indices(region: ProductRegion, buffers: Mapping[str, Buffer]) -> ProductOrder:
    """The order of indices that makes copies and stores contiguous where possible."""
    free = [*region.rows, *region.columns, *region.batch]
    output = affine_element(region.contraction.output, free, buffers)
    read = [[_find_first_element(f, [*free, *p.terms], buffers) for f in p.factors] for p in region.pairs]
    terms = [_sort_by_stride(p.terms, pair) for p, pair in zip(region.pairs, read, strict=True)]
    sides = []
    of_sides = ([pair[0] for pair in read], [e for pair in read for e in pair[1:]])
    of_terms = ([t[0] for t in terms], [t[0] for t, pair in zip(terms, read, strict=True) for _ in pair[1:]])
    for own, elements, firsts in zip((region.rows, region.columns), of_sides, of_terms, strict=True):
        across = any(
            e is not None and e.stride(first.name) != 1 and _unit_index(e, own) is not None
            for e, first in zip(elements, firsts, strict=True)
        )
        sides.append(_sort_by_stride(own, [*elements, output] if across else [output, *elements]))
    pairs = []
    for p, pair, t in zip(region.pairs, read, terms, strict=True):
        owns = [sides[0], *[sides[1]] * (len(pair) - 1)]
        left, right, *others = [
            _make_factor_place(f, e, t, own) for f, e, own in zip(p.factors, pair, owns, strict=True)
        ]
        pairs.append(PairOrder(t, left, right, tuple(others)))
    found = ProductOrder(sides[0], sides[1], region.batch, tuple(pairs), output)
    return found if region.chain is None else replace(found, inner=_order_inner(region.chain.product, found, buffers))


def _order_inner(product: ProductRegion, outer: ProductOrder, buffers: Mapping[str, Buffer]) -> ProductOrder:
    """The order of the first product of a chain, whose columns are the terms of the second."""
    (pair,), terms = product.pairs, outer.pairs[0].terms
    indices = [*outer.rows, *terms, *outer.batch, *pair.terms]
    places = [
        _make_factor_place(f, _find_first_element(f, indices, buffers), pair.terms, own)
        for f, own in ((pair.left, outer.rows), (pair.right, terms))
    ]
    return ProductOrder(outer.rows, terms, outer.batch, (PairOrder(pair.terms, places[0], places[1]),), None)


def choose_boxes(order: ProductOrder, tile: tuple[int, int, int]) -> dict[str, int]:
    """The size of a tile along each index, by name: sizes multiply to `tile`, with as few tiles as possible."""
    found = {i.name: 1 for i in order.batch}
    groups = [(order.rows, tile[0]), (order.columns, tile[1]), *((p.terms, tile[2]) for p in order.pairs)]
    for indices, size in groups:
        found |= dict(zip((i.name for i in indices), _choose_box(tuple(i.extent for i in indices), size), strict=True))
    return found


@cache
def _choose_box(extents: tuple[int, ...], size: int) -> tuple[int, ...]:
    if len(extents) == 1:
        return (size,)

    def waste(box: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        tiles = prod(-(-n // b) for n, b in zip(extents, box, strict=True))
        short = min(box[0], 8) < min(8, extents[0])  # too short for the widest vector
        return tiles, int(short), tuple(-b for b in box)

    return min(_list_candidate_boxes(extents, size), key=waste)


def _list_candidate_boxes(extents: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Boxes of `size` elements whose sides are powers of two, except the first, which has the remaining factor."""
    if len(extents) == 1:
        yield (size,)
        return
    side = 1
    while size % side == 0 and side < 2 * extents[-1]:
        yield from ((*rest, side) for rest in _list_candidate_boxes(extents[:-1], size // side))
        side *= 2


def _find_first_element(
    factor: ProductFactor, indices: Sequence[BoundIndex], buffers: Mapping[str, Buffer]
) -> AffineElement | None:
    """The first element that a factor reads, which decides what is contiguous; None if it is not affine."""
    reads = [x for x in tc.walk_expr(factor.value) if isinstance(x, tc.Access)]
    return affine_element(reads[0], indices, buffers) if reads else None


def _make_factor_place(
    factor: ProductFactor, element: AffineElement | None, terms: Sequence[BoundIndex], own: Sequence[BoundIndex]
) -> FactorPlace:
    along = element is not None and element.stride(terms[0].name) == 1
    across = element is not None and element.stride(own[0].name) == 1 and factor.dtype.bits == 16
    return FactorPlace(None if factor.element is None else element, across and not along)


def _unit_index(element: AffineElement, indices: Sequence[BoundIndex]) -> BoundIndex | None:
    return next((i for i in indices if element.stride(i.name) == 1), None)


def _sort_by_stride(indices: Sequence[BoundIndex], elements: Sequence[AffineElement | None]) -> tuple[BoundIndex, ...]:
    """The indices sorted by stride, the smallest first; those of extent 1 last."""
    known = [e for e in elements if e is not None]

    def steps(i: BoundIndex) -> tuple[bool, bool, list[int]]:
        moved = [e.stride(i.name) for e in known]
        return i.extent == 1, 1 not in moved, [s or 1 << 62 for s in moved]

    return tuple(sorted(indices, key=steps))
