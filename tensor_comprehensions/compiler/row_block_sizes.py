"""Of how many rows the blocks of a kernel for any number of rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from ..options import CpuOptions
from ..polyhedral.schedule.access_cost import expr_op_count
from ..tc_lang.dynamic_sizes.rows import Rows
from ..tc_lang.ir import Access, BoundFunction, BoundStatement, Index, Role, walk_expr
from .compiled_kernel import BlockSize

SHARED_OPERAND_ROWS: tuple[int, ...] = (32, 8, 1)
"""Block sizes if rows are multiplied by one matrix: register tiles need many rows, the remainder few."""
LARGE_OPERAND_ROWS: tuple[int, ...] = (64, 16, 8, 1)
"""The same for a matrix of `LARGE_OPERAND` elements: each block reads it from beyond L2."""
LARGE_OPERAND = 1 << 19
"""Elements of a matrix, of which a small block can take as long as a large one."""
OVERLAP_FROM = {64: 48, 32: 20, 16: 12, 8: 3, 1: 0}
"""Remaining rows from which on a block that computes some rows twice is faster than smaller blocks.

Smaller blocks read the whole matrix for a few rows each. Measured with layers of 256 x 512 on Zen 4.
"""
SUMMED_ROWS: tuple[int, ...] = (128, 32, 8, 2, 1)
"""Block sizes if products of rows are added to a matrix, which every block reads and writes."""
SHARED_INNER_ROWS: tuple[int, ...] = (32, 8, 1)
"""The same where rows along other axes are in blocks as well, which multiply the code."""
SUMMED_INNER_ROWS: tuple[int, ...] = (128, 32, 8, 1)
"""The same for sums. The largest is optional."""
INNER_ROWS: tuple[int, ...] = (256, 32, 8, 1)
"""Block sizes if rows are columns of some tensor, so that blocks are vectors."""
OVERLAP_INNER_FROM = {256: 64, 64: 16, 32: 9, 8: 1}
"""The same as `OVERLAP_FROM` where a row is a column, so that blocks are vectors, and where axes multiply the code."""
VECTOR_ROWS = 32
"""Least rows of the largest block if rows are neighbors in memory: enough for vectors, of which loads are few."""
MOST_INNER_ROWS = 512
"""Most rows of a block inside or outside of others: less than `row_strides.TYPICAL_EXTENT`."""
MOST_VARIANTS = 27
"""Most combinations of block sizes along several axes."""
TYPICAL_ROWS = 256
"""The number of rows along inner axes for which blocks of the outer ones are chosen."""
ENOUGH_REUSE = 64
"""A row that uses each element of a matrix so often needs no others to make a register tile."""
LITTLE_REUSE = 8
"""A row that uses each element of a matrix less often makes no register tile alone."""
BLOCK_OPS = 1 << 14
"""Scalar operations of a block beside which the loop over blocks costs nothing."""
STEP = 8
"""How many blocks of one size make one of the next larger size, where rows are short."""
SHARED_OPS = 1 << 22
"""Scalar operations of a block in which threads share the work, instead of taking whole blocks."""
SUMMED_SHARED_OPS = 1 << 18
"""The same for blocks that run one after another, because they add to the same elements."""
OPEN_ROWS = (257, 251)
"""Two numbers of rows for which loops over all rows are made, which have to be alike. Nothing divides them."""
OPEN_OUTER_ROWS = (17, 13)
"""The same for axes around two others, so that tensors do not exceed the caches."""
NEVER = 1 << 40
"""A number of blocks that no call has: one thread runs them all."""


def choose_block_sizes(
    make: Callable[[tuple[int, ...]], BoundFunction], axes: Sequence[Rows], options: CpuOptions, typical: int = 0
) -> tuple[tuple[BlockSize, ...], ...]:
    """The sizes of blocks along each axis, largest first, each a multiple of the next.

    Args:
        make: returns the def for a number of rows along each axis. typical: no block is larger; 0: any may be.
    """
    found: list[tuple[BlockSize, ...]] = []
    for n, rows in enumerate(axes):
        outer, inner = tuple(sizes[0].rows for sizes in found), (TYPICAL_ROWS,) * (len(axes) - n - 1)
        found.append(_choose_axis(make((*outer, 1, *inner)), rows, len(axes) > 1, options, typical))
    while prod(map(_count_needed, found)) > MOST_VARIANTS:
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
        if any(_adds_products(s, rows) or _count_shared_elements(s, rows, LITTLE_REUSE) for s in row.statements):
            return True
    return False


def list_open_counts(axes: Sequence[Rows], number: int) -> tuple[int, ...]:
    """Numbers of rows along each axis to make the loops over any number of rows for. number: of the choice, 0 or 1."""
    outer, inner = OPEN_OUTER_ROWS[number], OPEN_ROWS[number]
    return tuple(outer if n < len(axes) - 2 else inner for n in range(len(axes)))


def _count_needed(sizes: Sequence[BlockSize]) -> int:
    return sum(not size.is_optional for size in sizes)


def list_variants(axes: Sequence[Rows], sizes: Sequence[Sequence[BlockSize]]) -> list[tuple[int, ...]]:
    """The combinations of block sizes along the axes that there is code for.

    Where a single row means that there are but a few, it is combined with fewer sizes of the axes inside of it, and
    with none that is larger than the axis, if both are one size of the def. Remaining rows are not combined with the
    most terms of a sum: the code is long, and as fast with fewer.
    """
    outer = range(len(axes) - 1)
    return [
        v
        for v in product(*((size.rows for size in axis) for axis in sizes))
        if not any(_has_remaining_rows(sizes[n], v[n]) and _is_long_sum(axes[-1], sizes[-1], v[-1]) for n in outer)
        and not any(
            _has_few_rows(sizes[n], v[n]) and _is_spared(axes[n], axes[m], sizes[n], sizes[m], v[m])
            for n in range(len(axes))
            for m in range(n + 1, len(axes))
        )
    ]


def _has_few_rows(sizes: Sequence[BlockSize], rows: int) -> bool:
    """Whether blocks of this size run only for fewer rows than the next larger block has."""
    return len(sizes) > 1 and rows == sizes[-1].rows and sizes[-2].overlap_from == 1


def _has_remaining_rows(sizes: Sequence[BlockSize], rows: int) -> bool:
    """Whether blocks of this size, the last but one of three or more, take the rows that the largest ones leave."""
    needed = [size.rows for size in sizes if not size.is_optional]
    return len(needed) > 2 and rows == needed[-2]


def _is_long_sum(axis: Rows, sizes: Sequence[BlockSize], rows: int) -> bool:
    """Whether blocks of `rows` terms are the longest of three or more needed sizes, or longer."""
    needed = [size.rows for size in sizes if not size.is_optional]
    return axis.sums and len(needed) > 2 and rows >= needed[0]


def _is_spared(
    outer: Rows, inner: Rows, outer_sizes: Sequence[BlockSize], inner_sizes: Sequence[BlockSize], rows: int
) -> bool:
    """Whether there is no code for so many rows of `inner` inside of the fewest of `outer`."""
    if set(outer.original_sizes) & set(inner.original_sizes):
        return rows >= outer_sizes[-2].rows
    counts = [size.rows for size in inner_sizes]
    return len(counts) > 2 and rows in (counts[:-2] if inner.sums else counts[1:-1])


def _choose_axis(
    row: BoundFunction, rows: Rows, is_one_of_several: bool, options: CpuOptions, typical: int
) -> tuple[BlockSize, ...]:
    """The sizes of blocks along one axis. row: the def for a single row."""
    ops = max(1, sum(_op_count(s) for s in row.statements))
    shared = max((_count_shared_elements(s, rows) for s in row.statements), default=0)
    if any(_adds_products(s, rows) for s in row.statements):
        counts = SUMMED_INNER_ROWS if is_one_of_several else SUMMED_ROWS
    elif shared:
        few = LARGE_OPERAND_ROWS if shared >= LARGE_OPERAND else SHARED_OPERAND_ROWS
        alone = INNER_ROWS if _is_inner(rows) else few
        counts = SHARED_INNER_ROWS if is_one_of_several else alone
    else:
        least = -(-BLOCK_OPS // ops)
        most = max(least * STEP if least > 1 else 1, VECTOR_ROWS * _is_last(row, rows))
        counts = tuple(n for n in INNER_ROWS if n <= most) if _is_inner(rows) else _list_block_row_counts(least)
        counts = tuple(n for n in counts if n <= MOST_INNER_ROWS) if is_one_of_several else counts
    optional = counts[0] if counts is SUMMED_INNER_ROWS else 0
    is_alone = counts in (SHARED_OPERAND_ROWS, LARGE_OPERAND_ROWS) and not (is_one_of_several or _is_inner(rows))
    overlaps = OVERLAP_FROM if is_alone else OVERLAP_INNER_FROM
    counts = tuple(n for n in counts if not typical or n <= typical)
    again = (shared > 0 or _is_inner(rows)) and all(
        t.role is not Role.INOUT for t in row.tensors
    )  # rows computed twice
    sums = any(_is_sum(s, rows) for s in row.statements)
    shared_ops = SUMMED_SHARED_OPS if sums else SHARED_OPS
    return tuple(
        BlockSize(n, _choose_grain(n * ops, shared_ops, options), overlaps.get(n, 0) if again else 0, n == optional)
        for n in counts
    )


def _is_inner(rows: Rows) -> bool:
    """Whether some tensor has rows that are no first dimensions of it, as those of a row of x(N,D) by D."""
    return any(place for _, place in rows.places)


def _is_last(row: BoundFunction, rows: Rows) -> bool:
    """Whether the rows of a result are its last dimension, so that blocks are vectors."""
    return any(rows.place(t.name) == len(t.shape) - rows.depth for t in row.tensors if t.role is Role.OUTPUT)


def _list_block_row_counts(least: int) -> tuple[int, ...]:
    """Powers of `STEP` down to 1, the first of which is the least that is `least` or more."""
    counts = [1]
    while counts[0] < least:
        counts.insert(0, counts[0] * STEP)
    return tuple(counts)


def _choose_grain(ops: int, shared_ops: int, options: CpuOptions) -> int:
    if not options.grain_size:
        return NEVER
    return 0 if ops >= shared_ops else max(1, options.grain_size // ops)


def _op_count(s: BoundStatement) -> int:
    return prod(i.extent for i in s.indices) * (expr_op_count(s.value) + 1)


def _count_shared_elements(s: BoundStatement, rows: Rows, reuse: int = ENOUGH_REUSE) -> int:
    """The elements of the matrix that reduces rows, if all share it and each uses them below `reuse` times."""
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


def _is_sum(s: BoundStatement, rows: Rows) -> bool:
    reads = (e.tensor for e in walk_expr(s.value) if isinstance(e, Access))
    return s.target not in rows.tensors and any(name in rows.tensors for name in reads)


def _adds_products(s: BoundStatement, rows: Rows) -> bool:
    """Whether a sum over all rows adds products of each element of a row with each element of another tensor's row."""
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
    """The indices in the subscripts of an access; empty if data decides."""
    parts = [e for x in a.subscripts for e in walk_expr(x)]
    return set() if any(isinstance(e, Access) for e in parts) else {e.name for e in parts if isinstance(e, Index)}
