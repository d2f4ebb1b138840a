"""Split-K: split long matrix products with few results along the sum, into parts for different threads.

Otherwise threads would share rows or columns, and each would pack all of the other factor. As in `rfactor`, the parts
are combined in a fixed order, so the result depends on the sizes, never on the number of threads.
"""

from __future__ import annotations

from math import prod

from ...options import CpuOptions
from ...structured.match.product_matching import Product, split_product
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, walk_expr
from ...thresholds import FEW_RESULTS, MAX_PRODUCT_PARTS, MIN_PRODUCT_PART_TERMS, MIN_PRODUCT_PARTS, MIN_PRODUCT_SIDE
from ..schedule.access_cost import access_stride
from .rfactor import SplitPoint, in_two_stages, large_matrix, requested_split, rfactor


def split_reductions(
    function: BoundFunction, options: CpuOptions, target: CpuTarget, *, products: bool = True
) -> BoundFunction:
    """`function` with reductions in two stages: as `options` request, else where that is expected to pay.

    products: whether to split matrix products, too, unless the user gave a schedule.
    """
    match options.split_k:
        case 0:
            function = split_products(function, options, target) if products else function
            return rfactor(function, matrix=large_matrix(target))
        case 1:
            return function
        case parts:
            return in_two_stages(
                function, lambda s: requested_split(s, parts), f"the option split_k={parts} asks for it"
            )


def split_products(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> BoundFunction:
    """`function` with matrix products that have more terms than results in two stages.

    Unchanged if the user gave a schedule, or for a single thread.
    """
    if not (options.use_microkernels and options.grain_size) or options.schedule is not None:
        return function
    why = "it has more terms than results: threads would copy all of one factor each, and share rows or columns"
    return in_two_stages(function, lambda s: _choose_split_point(function, s, target), why)


def _choose_split_point(function: BoundFunction, s: BoundStatement, target: CpuTarget) -> SplitPoint | None:
    """The reduced index to split and the number of equal parts; None if splitting does not pay."""
    if s.reduction != "+" or not s.reduction_indices or s.checks or s.reads_own_target:
        return None
    steps, results = prod(i.extent for i in s.reduction_indices), prod(i.extent for i in s.free)
    most = min(MAX_PRODUCT_PARTS, steps // MIN_PRODUCT_PART_TERMS)
    if most < MIN_PRODUCT_PARTS or not FEW_RESULTS <= results <= steps:
        return None
    product = split_product(s)
    if product is None or not _is_matrix_product(s, product):
        return None
    parts = (
        (i, next((n for n in range(most, MIN_PRODUCT_PARTS - 1, -1) if i.extent % n == 0), 0))
        for i in s.reduction_indices
    )
    equal = [(i, n) for i, n in parts if n]
    read = _find_row_factor(function, s, product) if target.has_mesh_llc else s.value
    return max(equal, key=lambda cut: _sum_access_strides(function, read, cut[0]), default=None)


def _find_row_factor(function: BoundFunction, s: BoundStatement, product: Product) -> tc.Expr:
    """The factor that lacks the contiguous index of the results, or both if not unique.

    Its strides matter if the last-level cache is distant: the other factor is packed once, but this one is read in
    place, again for each panel.
    """
    written = tc.Access(s.target, s.subscripts, s.value.dtype)
    unit = {i.name for i in s.free if access_stride(function, written, i.name) == 1}
    factors = (product.left, product.right)
    rows = [f for f in factors if not any(isinstance(e, tc.Index) and e.name in unit for e in walk_expr(f))]
    return rows[0] if len(rows) == 1 else s.value


def _is_matrix_product(s: BoundStatement, product: Product) -> bool:
    """Whether each factor has long enough free indices of its own, and there are no batch indices."""
    left, right = ({e.name for e in walk_expr(f) if isinstance(e, tc.Index)} for f in (product.left, product.right))
    rows = prod(i.extent for i in s.free if i.name in left - right)
    columns = prod(i.extent for i in s.free if i.name in right - left)
    return min(rows, columns) >= MIN_PRODUCT_SIDE and rows * columns * MIN_PRODUCT_PARTS > prod(
        i.extent for i in s.free
    )


def _sum_access_strides(function: BoundFunction, read: tc.Expr, index: BoundIndex) -> int:
    """The sum of the strides of all reads along `index`; split along the largest, parts are contiguous ranges."""
    return sum(access_stride(function, e, index.name) or 0 for e in walk_expr(read) if isinstance(e, tc.Access))
