"""Block sizes of range kernels: how many rows the blocks along each axis have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from ..options import CpuOptions
from ..polyhedral.schedule.access_cost import expr_op_count
from ..tc_lang.dynamic_sizes.rows import Rows
from ..tc_lang.ir import Access, BoundFunction, BoundStatement, Index, Role, walk_expr
from .compiled_kernel import BlockSize

SHARED_OPERAND_BLOCK_ROWS: tuple[int, ...] = (32, 8, 1)
"""Block sizes if all rows are multiplied by one matrix: large blocks for register tiles, small ones for the rest."""
COLUMN_OPERAND_BLOCK_ROWS: tuple[int, ...] = (24, 8, 1)
"""Block sizes if that matrix is read in whole vectors: register tiles of AVX2 have 6 rows, those of AVX-512 6 to 14."""
LARGE_OPERAND_BLOCK_ROWS: tuple[int, ...] = (64, 16, 8, 1)
"""Block sizes if that matrix has `MIN_LARGE_OPERAND_ELEMENTS` elements or more: each block reads it from beyond L2."""
MIN_LARGE_OPERAND_ELEMENTS = 1 << 19
"""Elements of a matrix that is so large that a small block can take as long as a large one."""
MIN_OVERLAP_ROWS = {64: 48, 32: 20, 24: 17, 16: 12, 8: 3, 1: 0}
"""By block size, the least number of remaining rows for which an overlapping block is faster than smaller blocks.

An overlapping block computes some rows twice, but smaller blocks read the whole matrix for a few rows each. Measured
with layers of 256 x 512 on Zen 4.
"""
ROW_SUM_BLOCK_ROWS: tuple[int, ...] = (128, 32, 8, 2, 1)
"""Block sizes if products of rows are summed into a matrix, which every block reads and writes."""
SHARED_OPERAND_INNER_BLOCK_ROWS: tuple[int, ...] = (32, 8, 1)
"""As `SHARED_OPERAND_BLOCK_ROWS` for defs with several axes, since their block sizes multiply the code."""
ROW_SUM_INNER_BLOCK_ROWS: tuple[int, ...] = (128, 32, 8, 1)
"""As `ROW_SUM_BLOCK_ROWS` for defs with several axes. The largest is optional."""
COLUMN_BLOCK_ROWS: tuple[int, ...] = (256, 32, 8, 1)
"""Block sizes if rows are columns of some tensor, so that blocks are vectors."""
MOVED_COLUMN_BLOCK_ROWS: tuple[int, ...] = (64, 8, 1)
"""As `COLUMN_BLOCK_ROWS` for large blocks that neither share a matrix nor sum, as in transpositions."""
MIN_INNER_OVERLAP_ROWS = {256: 161, 64: 49, 32: 25, 24: 17, 8: 1}
"""As `MIN_OVERLAP_ROWS` for rows that are columns of some tensor, and for defs with several axes."""
MIN_VECTOR_BLOCK_ROWS = 32
"""Least rows of the largest block if rows are neighbors in memory: enough to be computed in vectors."""
MAX_INNER_BLOCK_ROWS = 512
"""Most rows of a block in defs with several axes: less than `row_strides.TYPICAL_EXTENT`."""
MAX_VARIANTS = 27
"""Most combinations of block sizes along several axes."""
TYPICAL_ROWS = 256
"""The number of rows that inner axes are assumed to have when the block sizes of an outer axis are chosen."""
REGISTER_TILE_REUSE = 64
"""If a row uses each element of a matrix so often, a block of one row fills a register tile."""
MIN_REGISTER_TILE_REUSE = 8
"""If a row uses each element of a matrix less often, a block of one row makes no register tile."""
MIN_BLOCK_OPS = 1 << 14
"""Scalar operations of a block that make the cost of the loop over blocks negligible."""
BLOCK_ROWS_RATIO = 8
"""The ratio of successive block sizes for rows that share no matrix."""
MIN_SHARED_BLOCK_OPS = 1 << 22
"""Scalar operations from which on the threads share the work inside a block, instead of taking whole blocks."""
MIN_SHARED_SUM_BLOCK_OPS = 1 << 18
"""As `MIN_SHARED_BLOCK_OPS` for blocks that run one after another, because they add to the same elements."""
OPEN_LOOP_ROWS = (257, 251)
"""Two numbers of rows for which loops over all rows are lowered, to compare the results. They are prime."""
OPEN_LOOP_OUTER_ROWS = (17, 13)
"""As `OPEN_LOOP_ROWS` for axes outside of the two innermost ones, so that tensors do not exceed the caches."""
SERIAL_GRAIN = 1 << 40
"""A grain that no call reaches: one thread runs all blocks."""


def choose_block_sizes(
    make: Callable[[tuple[int, ...]], BoundFunction], axes: Sequence[Rows], options: CpuOptions, typical: int = 0
) -> tuple[tuple[BlockSize, ...], ...]:
    """The sizes of blocks along each axis, largest first, each a multiple of the next.

    Args:
        make: returns the def for a number of rows along each axis.
        typical: most rows of a block; 0: no limit.
    """
    found: list[tuple[BlockSize, ...]] = []
    for n, rows in enumerate(axes):
        outer, inner = tuple(sizes[0].rows for sizes in found), (TYPICAL_ROWS,) * (len(axes) - n - 1)
        found.append(_choose_axis(make((*outer, 1, *inner)), rows, len(axes) > 1, options, typical))
    while prod(map(_count_needed, found)) > MAX_VARIANTS:
        longest = max(map(_count_needed, found))
        n = next(n for n, sizes in enumerate(found) if _count_needed(sizes) == longest)
        found[n] = found[n][1:]
    return tuple(found)


def shares_matrices(make: Callable[[tuple[int, ...]], BoundFunction], axes: Sequence[Rows]) -> bool:
    """Whether single rows along some axis use each element of a matrix so seldom that they need others beside them.

    Args:
        make: returns the def for a number of rows along each axis.
    """
    for n, rows in enumerate(axes):
        row = make(tuple(1 if m == n else TYPICAL_ROWS for m in range(len(axes))))
        if any(
            _adds_products(s, rows) or _count_shared_elements(s, rows, MIN_REGISTER_TILE_REUSE) for s in row.statements
        ):
            return True
    return False


def list_open_counts(axes: Sequence[Rows], number: int) -> tuple[int, ...]:
    """One of the two tuples of row counts, by axis, for which loops over all rows are lowered. number: 0 or 1."""
    outer, inner = OPEN_LOOP_OUTER_ROWS[number], OPEN_LOOP_ROWS[number]
    return tuple(outer if n < len(axes) - 2 else inner for n in range(len(axes)))


def _count_needed(sizes: Sequence[BlockSize]) -> int:
    return sum(not size.is_optional for size in sizes)


def list_variants(axes: Sequence[Rows], sizes: Sequence[Sequence[BlockSize]]) -> list[tuple[int, ...]]:
    """The combinations of block sizes along the axes for which code is generated.

    The smallest block of an outer axis may run only if the axis has few rows. It is then combined with fewer sizes of
    inner axes; if both axes count the same size of the def, only with sizes that such a call can reach. Remaining rows
    are not combined with the most terms of a sum that a block needs: that code is long, and no faster. If two axes make
    register tiles together, few columns are not combined with more rows.
    """
    outer = range(len(axes) - 1)
    return [
        v
        for v in product(*((size.rows for size in axis) for axis in sizes))
        if not any(_has_remaining_rows(sizes[n], v[n]) and _is_long_sum(axes[-1], sizes[-1], v[-1]) for n in outer)
        and not any(
            v[n] < min(v[m], sizes[n][0].rows) and _make_register_tiles(sizes[n], sizes[m])
            for n in outer
            for m in range(n + 1, len(v))
        )
        and not any(
            _has_few_rows(sizes[n], v[n]) and _is_spared(axes[n], axes[m], sizes[n], sizes[m], v[m])
            for n in range(len(axes))
            for m in range(n + 1, len(axes))
        )
    ]


def _make_register_tiles(outer: Sequence[BlockSize], inner: Sequence[BlockSize]) -> bool:
    """Whether the blocks along two axes are those of the rows and columns of a product."""
    tiled = (SHARED_OPERAND_INNER_BLOCK_ROWS, COLUMN_OPERAND_BLOCK_ROWS)
    return all(tuple(size.rows for size in sizes) in tiled for sizes in (outer, inner))


def _has_few_rows(sizes: Sequence[BlockSize], rows: int) -> bool:
    """Whether blocks of `rows` rows run only in calls with fewer rows than the next larger block has."""
    return len(sizes) > 1 and rows == sizes[-1].rows and sizes[-2].overlap_from == 1


def _has_remaining_rows(sizes: Sequence[BlockSize], rows: int) -> bool:
    """Whether blocks of this size, the last but one of three or more, take the rows that the largest ones leave."""
    needed = [size.rows for size in sizes if not size.is_optional]
    return len(needed) > 2 and rows == needed[-2]


def _is_long_sum(axis: Rows, sizes: Sequence[BlockSize], rows: int) -> bool:
    """Whether blocks of `rows` terms are the longest of three or more needed sizes."""
    needed = [size.rows for size in sizes if not size.is_optional]
    return axis.sums and len(needed) > 2 and rows == needed[0]


def _is_spared(
    outer: Rows, inner: Rows, outer_sizes: Sequence[BlockSize], inner_sizes: Sequence[BlockSize], rows: int
) -> bool:
    """Whether to generate no code for blocks of `rows` rows of `inner` inside the smallest blocks of `outer`."""
    if set(outer.original_sizes) & set(inner.original_sizes):
        return rows >= outer_sizes[-2].rows
    counts = [size.rows for size in inner_sizes]
    return len(counts) > 2 and rows in (counts[:-2] if inner.sums else counts[1:-1])


def _choose_axis(
    row: BoundFunction, rows: Rows, is_one_of_several: bool, options: CpuOptions, typical: int
) -> tuple[BlockSize, ...]:
    """The block sizes along one axis. row: the def for a single row."""
    ops = max(1, sum(_op_count(s) for s in row.statements))
    shared = max((_count_shared_elements(s, rows) for s in row.statements), default=0)
    if any(_adds_products(s, rows) for s in row.statements):
        counts = ROW_SUM_INNER_BLOCK_ROWS if is_one_of_several else ROW_SUM_BLOCK_ROWS
    elif shared:
        few = LARGE_OPERAND_BLOCK_ROWS if shared >= MIN_LARGE_OPERAND_ELEMENTS else SHARED_OPERAND_BLOCK_ROWS
        alone = COLUMN_BLOCK_ROWS if _is_inner(rows) else few
        counts = SHARED_OPERAND_INNER_BLOCK_ROWS if is_one_of_several else alone
        # Masks on the numbers of rows and terms are known for blocks that have as many rows as terms.
        is_plain = not _is_inner(rows) and not rows.positions and shared < MIN_LARGE_OPERAND_ELEMENTS
        counts = COLUMN_OPERAND_BLOCK_ROWS if is_plain and _read_whole_vectors(row, rows) else counts
    else:
        least = -(-MIN_BLOCK_OPS // ops)
        most = max(least * BLOCK_ROWS_RATIO if least > 1 else 1, MIN_VECTOR_BLOCK_ROWS * _is_last(row, rows))
        inner = COLUMN_BLOCK_ROWS if rows.sums or most < MOVED_COLUMN_BLOCK_ROWS[0] else MOVED_COLUMN_BLOCK_ROWS
        counts = tuple(n for n in inner if n <= most) if _is_inner(rows) else _list_block_row_counts(least)
        counts = tuple(n for n in counts if n <= MAX_INNER_BLOCK_ROWS) if is_one_of_several else counts
    optional = counts[0] if counts is ROW_SUM_INNER_BLOCK_ROWS else 0
    is_alone = counts in (COLUMN_OPERAND_BLOCK_ROWS, SHARED_OPERAND_BLOCK_ROWS, LARGE_OPERAND_BLOCK_ROWS) and not (
        is_one_of_several or _is_inner(rows)
    )
    overlaps = MIN_OVERLAP_ROWS if is_alone else MIN_INNER_OVERLAP_ROWS
    counts = tuple(n for n in counts if not typical or n <= typical)
    again = (shared > 0 or _is_inner(rows)) and all(
        t.role is not Role.INOUT for t in row.tensors
    )  # rows may be computed twice
    sums = any(_is_sum(s, rows) for s in row.statements)
    shared_ops = MIN_SHARED_SUM_BLOCK_OPS if sums else MIN_SHARED_BLOCK_OPS
    return tuple(
        BlockSize(n, _choose_grain(n * ops, shared_ops, options), overlaps.get(n, 0) if again else 0, n == optional)
        for n in counts
    )


def _is_inner(rows: Rows) -> bool:
    """Whether rows are not the first dimension of some tensor, like the columns of x(N,D) if D counts rows."""
    return any(place for _, place in rows.places)


def _is_last(row: BoundFunction, rows: Rows) -> bool:
    """Whether rows are the last dimension of some result, so that blocks are computed in vectors."""
    return any(rows.place(t.name) == len(t.shape) - rows.depth for t in row.tensors if t.role is Role.OUTPUT)


def _list_block_row_counts(least: int) -> tuple[int, ...]:
    """The powers of `BLOCK_ROWS_RATIO` down to 1, from the smallest one that is at least `least`."""
    counts = [1]
    while counts[0] < least:
        counts.insert(0, counts[0] * BLOCK_ROWS_RATIO)
    return tuple(counts)


def _choose_grain(ops: int, shared_ops: int, options: CpuOptions) -> int:
    if not options.grain_size:
        return SERIAL_GRAIN
    return 0 if ops >= shared_ops else max(1, options.grain_size // ops)


def _op_count(s: BoundStatement) -> int:
    return prod(i.extent for i in s.indices) * (expr_op_count(s.value) + 1)


def _count_shared_elements(s: BoundStatement, rows: Rows, reuse: int = REGISTER_TILE_REUSE) -> int:
    """The elements of the matrix that multiplies all rows; 0 without one, or if a row uses each `reuse` times."""
    reduced = {i.name for i in s.reduction_indices if i.extent > 1}
    free = {i.name: i.extent for i in s.free if i.extent > 1}
    accesses = [e for e in walk_expr(s.value) if isinstance(e, Access)]
    if not any(a.tensor in rows.tensors and collect_subscript_indices(a) & reduced for a in accesses):
        return 0
    for a in accesses:
        used = collect_subscript_indices(a)
        if a.tensor not in rows.tensors and used & reduced and used & free.keys():
            again = prod(n for name, n in free.items() if name not in used)
            return prod(i.extent for i in s.indices if i.name in used) if again < reuse else 0
    return 0


def _read_whole_vectors(row: BoundFunction, rows: Rows) -> bool:
    """Whether neighboring columns of every matrix that multiplies all rows are neighbors in memory."""
    shared = [s for s in row.statements if _count_shared_elements(s, rows)]
    return bool(shared) and all(_has_vectors(s, rows) for s in shared)


def _has_vectors(s: BoundStatement, rows: Rows) -> bool:
    free = {i.name for i in s.free if i.extent > 1}
    accesses = [e for e in walk_expr(s.value) if isinstance(e, Access) and e.tensor not in rows.tensors]
    return all(isinstance(a.subscripts[-1], Index) and a.subscripts[-1].name in free for a in accesses if a.subscripts)


def _is_sum(s: BoundStatement, rows: Rows) -> bool:
    reads = (e.tensor for e in walk_expr(s.value) if isinstance(e, Access))
    return s.target not in rows.tensors and any(name in rows.tensors for name in reads)


def _adds_products(s: BoundStatement, rows: Rows) -> bool:
    """Whether a sum over rows adds outer products of the rows of two tensors."""
    if s.target in rows.tensors:
        return False
    free = {i.name for i in s.free if i.extent > 1}
    own = [
        collect_subscript_indices(e) & free
        for e in walk_expr(s.value)
        if isinstance(e, Access) and e.tensor in rows.tensors
    ]
    return any(a - b and b - a for a in own for b in own)


def collect_subscript_indices(a: Access) -> set[str]:
    """The indices in the subscripts of an access; empty if a subscript reads a tensor."""
    parts = [e for x in a.subscripts for e in walk_expr(x)]
    return set() if any(isinstance(e, Access) for e in parts) else {e.name for e in parts if isinstance(e, Index)}
