"""Choose the dimension of a loop nest to vectorize, and the order of its loops, by the cost of accesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction
from ...thresholds import MAX_INTERLEAVED_STRIDE
from ..scop.isl_affine import to_isl_affine
from ..scop.scop import ScopStatement
from .loop_nest import DimKind, LoopNest, NestDim

# Relative costs of one vector access, by the stride between lanes; a read that is contiguous along another dimension
# is transposed in registers, or staged in a buffer.
BROADCAST, CONTIGUOUS, TRANSPOSED, STAGED, STRIDED, SCATTERED = 0.25, 1.0, 2.0, 4.0, 10.0, 14.0
# The least number of terms of a long column, and of operations per term that cost less than reading it.
LONG_COLUMN, SIMPLE = 32, 3


def access_stride(function: BoundFunction, access: tc.Access, index: str) -> int | None:
    """The stride of `access` in elements along `index`; None if it depends on data."""
    tensor = function.tensor(access.tensor)
    total = 0
    for e, step in zip(access.subscripts, tensor.strides, strict=True):
        form = to_isl_affine(e)
        if form is not None:
            total += form.coefficient(index) * step
        elif any(isinstance(x, tc.Index) and x.name == index for x in tc.walk_expr(e)):
            return None
    return total


def vector_dim(function: BoundFunction, leaf: LoopNest, target: CpuTarget) -> NestDim | None:
    """The dimension to vectorize: the one with the least cost per element, or None if none may be vectorized."""
    return min(_lane_candidates(leaf), key=lambda d: _estimate_vectorize_cost(function, leaf, d, target), default=None)


def rank_vector_dims(function: BoundFunction, leaf: LoopNest, target: CpuTarget) -> list[tuple[NestDim, float]]:
    """The dimensions that may be vectorized, the best first, with costs relative to contiguous accesses."""
    costs = [(d, _estimate_vectorize_cost(function, leaf, d, target)) for d in _lane_candidates(leaf)]
    return [(d, cost) for d, (cost, _) in sorted(costs, key=lambda c: c[1])]


def why_no_vector_dim(leaf: LoopNest) -> str:
    """Why no dimension of a leaf may be vectorized."""
    serial = [d.name for d in leaf.dims if d.kind is DimKind.SERIAL and d.extent > 1]
    if serial:
        return f"each iteration of {', '.join(serial)} needs the one before it, and no other loop has two iterations"
    return "no loop has two iterations"


def _lane_candidates(leaf: LoopNest) -> list[NestDim]:
    return [d for d in leaf.dims if d.kind is not DimKind.SERIAL and d.extent > 1]


def _estimate_vectorize_cost(
    function: BoundFunction, leaf: LoopNest, dim: NestDim, target: CpuTarget
) -> tuple[float, int]:
    lanes = target.lanes(32)
    total = 0.0
    rows, turning = _list_block_dims(leaf, dim), TRANSPOSED if is_fully_parallel(leaf) else STAGED
    for node in leaf.nodes:
        index = dim.index(node)
        for access in node.reads:
            turned = any(_is_transposable_read(function, leaf, node, access, dim, row) for row in rows)
            total += turning if turned else _access_cost(access_stride(function, access, index))
        for access in node.writes:
            step = access_stride(function, access, index)
            interleaves = _interleaves_rows(function, leaf, node, access, step)
            total += 1.5 * (STAGED if interleaves else _access_cost(step)) if step != 0 else 0.0
    trips = -(-dim.extent // lanes)
    utilization = dim.extent / (trips * lanes)
    # A vectorized reduction needs a horizontal sum for each element of the result.
    horizontal = 4.0 / trips if dim.kind is DimKind.REDUCTION else 0.0
    return (total + horizontal) / utilization, -dim.extent


def _interleaves_rows(
    function: BoundFunction, leaf: LoopNest, node: ScopStatement, write: tc.Access, step: int | None
) -> bool:
    """Whether stores `step` elements apart interleave rows of tensors of their own, one for each neighbor.

    Reads that depend on the index of the neighbor are transposed in registers instead, with lanes along that index.
    """
    if step is None or not 1 < abs(step) <= MAX_INTERLEAVED_STRIDE:
        return False
    neighbors = [d.index(node) for d in leaf.dims if access_stride(function, write, d.index(node)) == 1]
    return all(access_stride(function, read, name) == 0 for read in node.reads for name in neighbors)


def _access_cost(step: int | None) -> float:
    if step is None:
        return SCATTERED
    return {0: BROADCAST, 1: CONTIGUOUS}.get(step, STRIDED)


def transposed_read_dim(function: BoundFunction, leaf: LoopNest, lanes: NestDim) -> NestDim | None:
    """The dimension along which most of the reads that are strided along `lanes` are contiguous, or None.

    Such reads are worth transposing before the iterations that need them.
    """
    rows = _list_block_dims(leaf, lanes)
    turned = {
        row.name: sum(_is_transposable_read(function, leaf, n, a, lanes, row) for n in leaf.nodes for a in n.reads)
        for row in rows
    }
    best = max(rows, key=lambda d: turned[d.name], default=None)
    return best if best is not None and turned[best.name] else None


def is_fully_parallel(leaf: LoopNest) -> bool:
    """Whether the iterations of all dimensions are independent."""
    return all(d.kind is DimKind.PARALLEL for d in leaf.dims)


def _list_block_dims(leaf: LoopNest, lanes: NestDim) -> list[NestDim]:
    """The dimensions other than `lanes` along which blocks can be transposed; none unless all of these are parallel."""
    others = [d for d in leaf.dims if d is not lanes]
    if lanes.kind is DimKind.SERIAL or any(d.kind is not DimKind.PARALLEL for d in others):
        return []
    return [d for d in others if d.extent > 1]


def _is_transposable_read(
    function: BoundFunction, leaf: LoopNest, node: ScopStatement, access: tc.Access, lanes: NestDim, row: NestDim
) -> bool:
    """Whether `access` can be transposed: strided along `lanes`, contiguous along `row`, and not written by `leaf`."""
    along = access_stride(function, access, lanes.index(node))
    if along is None or abs(along) <= MAX_INTERLEAVED_STRIDE or access.guarded:
        return False
    written = any(w.tensor == access.tensor for n in leaf.nodes for w in n.writes)
    return not written and access_stride(function, access, row.index(node)) == 1


def is_column_reduction(leaf: LoopNest, lanes: NestDim | None) -> bool:
    """Whether the nest is one long and simple reduction per lane, and so memory-bound.

    It then pays to read more of each row at a time than a few accumulators cover.
    """
    if lanes is None or lanes.kind is not DimKind.PARALLEL or len(leaf.nodes) > 1:
        return False
    (s,) = leaf.nodes[0].statements
    terms = prod(d.extent for d in leaf.dims if d.kind is DimKind.REDUCTION)
    return terms >= LONG_COLUMN and expr_op_count(s.value) <= SIMPLE


def loop_order(function: BoundFunction, leaf: LoopNest, vector: NestDim | None) -> tuple[NestDim, ...]:
    """The order of the dimensions, outermost first: reductions inside parallel loops, small strides inside large ones.

    A parallel `vector` dimension encloses the reductions, so that accumulators stay in vector registers; a `vector`
    reduction is innermost.
    """
    serial = [d for d in leaf.dims if d.kind is DimKind.SERIAL]
    parallel = [d for d in leaf.dims if d.kind is DimKind.PARALLEL and d is not vector]
    reduction = [d for d in leaf.dims if d.kind is DimKind.REDUCTION and d is not vector]
    weights = {d.name: _sum_access_strides(function, leaf, d) for d in leaf.dims}
    parallel.sort(key=lambda d: -weights[d.name])
    reduction.sort(key=lambda d: -weights[d.name])
    if vector is None:
        return (*parallel, *serial, *reduction)
    if vector.kind is DimKind.REDUCTION:
        return (*parallel, *serial, *reduction, vector)
    return (*parallel, *serial, vector, *reduction)


def _sum_access_strides(function: BoundFunction, leaf: LoopNest, dim: NestDim) -> int:
    """The sum of the strides of all accesses along `dim`."""
    return sum(_clamp_access_stride(function, node, a, dim) for node in leaf.nodes for a in (*node.reads, *node.writes))


def _clamp_access_stride(function: BoundFunction, node: ScopStatement, access: tc.Access, dim: NestDim) -> int:
    step = access_stride(function, access, dim.index(node))
    return min(abs(step), 1 << 20) if step is not None else 1 << 20


def op_count(function: BoundFunction, leaf: LoopNest) -> int:
    """The scalar operations of one iteration of the innermost loop; calls of functions count as several."""
    return sum(expr_op_count(s.value) + 1 for n in leaf.nodes for s in n.statements)


def total_op_count(function: BoundFunction, leaves: Sequence[LoopNest]) -> int:
    """The scalar operations of all `leaves` over their whole domains, including loops over shared rows."""
    domains = ((leaf, (*leaf.nodes[0].free, *leaf.nodes[0].reduction_indices)) for leaf in leaves)
    return sum(op_count(function, leaf) * prod(i.extent for i in indices) for leaf, indices in domains)


def expr_op_count(e: tc.Expr) -> int:
    own: Mapping[type, int] = {tc.Binary: 1, tc.Unary: 1, tc.Select: 1, tc.Call: 12, tc.Access: 1, tc.Cast: 1}
    return sum(own.get(type(x), 0) for x in tc.walk_expr(e))
