"""Split long reductions into few elements into parts that run in parallel and are combined in a fixed order.

`s += f(k)` becomes `part(p) +=! f(p * chunk + k)` for a fixed number of parts, `s += part(p)`, and the few terms that
are left over. The result depends on the sizes, never on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

from ...core.decisions import Decision, is_recording, note_decision
from ...core.internal_names import internal_name
from ...core.memory_layout import contiguous_strides
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, Role, Tensor, map_operands
from ...thresholds import (
    COLUMN_SUM_ELEMENTS,
    COLUMN_SUM_MESH_FACTOR,
    COLUMN_SUM_PARTS,
    FEW_RESULTS,
    MIN_COLUMN_SUM_ROWS,
    MIN_PART_TERMS,
    SPLIT_SUM_TERMS,
    SUM_PARTS,
)
from ..schedule.access_cost import access_stride
from .isl_affine import to_isl_affine

ELEMENT = 4


SplitPoint = tuple[BoundIndex, int]
"""The reduced index to split, and the number of parts."""


def rfactor(function: BoundFunction, matrix: int = COLUMN_SUM_ELEMENTS) -> BoundFunction:
    """`function` with its long reductions into few elements in two stages.

    A def that only sums the columns of a matrix of at least `matrix` elements is split, too.
    """
    alone = len(function.statements) == 1

    def cut(s: BoundStatement) -> SplitPoint | None:
        by_rows = _find_row_index(function, s, matrix) if alone else None
        index = by_rows or _choose_split_index(s)
        return (
            None
            if index is None
            else (index, _choose_part_count(index.extent, COLUMN_SUM_PARTS if by_rows else SUM_PARTS))
        )

    return in_two_stages(function, cut, f"it has few results (less than {FEW_RESULTS}), or rows that no cache holds")


def in_two_stages(
    function: BoundFunction, cut: Callable[[BoundStatement], SplitPoint | None], why: str = "asked for"
) -> BoundFunction:
    """`function` with each statement for which `cut` returns a split in two stages. why: the recorded reason.

    Statements with an index whose extent only a call tells stay whole: the number of parts is chosen for one extent.
    """
    tensors, statements = list(function.tensors), []
    for s in function.statements:
        found = None if s.domain or any(i.variable for i in s.indices) else cut(s)
        if found is None:
            statements.append(s)
            continue
        index, parts = found
        if is_recording():
            _record_split(s, index, parts, why)
        part = _make_partial_tensor(s, _fresh_name(internal_name(s.target, "part"), {t.name for t in tensors}), parts)
        tensors.append(part)
        first, *others = _make_split_statements(s, index, part)
        statements.insert(_insertion_position(statements, s), first)
        statements += others
    return replace(function, tensors=tuple(tensors), statements=tuple(statements))


def _record_split(s: BoundStatement, index: BoundIndex, parts: int, why: str) -> None:
    terms, results = prod(i.extent for i in s.reduction_indices), prod(i.extent for i in s.free)
    numbers = ("parts", parts), ("terms", terms), ("results", results), ("terms of a part", terms // parts)
    note_decision(Decision("split", (s.name,), f"{parts} parts of {index.name}, added up afterwards", why, numbers))


def requested_split(s: BoundStatement, parts: int) -> SplitPoint | None:
    """The split of the outermost index with at least `parts` values; None if a part would have too few terms."""
    terms, results = prod(i.extent for i in s.reduction_indices), prod(i.extent for i in s.free)
    if not is_divisible(s) or s.reads_own_target or not 0 < results <= terms or terms < MIN_PART_TERMS * parts:
        return None
    index = next((i for i in s.reduction_indices if i.extent >= parts), None)
    return None if index is None else (index, _choose_part_count(index.extent, parts))


def _insertion_position(before: Sequence[BoundStatement], s: BoundStatement) -> int:
    """Where to insert the partial sums of `s`: before the statements that initialize its target, such as a bias.

    So the initialization still fuses with adding up the parts.
    """
    place = len(before)
    while place and before[place - 1].target == s.target:
        place -= 1
    return (
        len(before) if any(isinstance(e, tc.Access) and e.tensor == s.target for e in tc.walk_expr(s.value)) else place
    )


def large_matrix(target: CpuTarget) -> int:
    """Elements of a matrix that is large to `target`."""
    return int(min(COLUMN_SUM_ELEMENTS, COLUMN_SUM_MESH_FACTOR * target.writeback_limit_bytes / ELEMENT))


def is_divisible(s: BoundStatement) -> bool:
    """Whether `s` is a reduction that may be split into parts."""
    return s.reduction is not None and bool(s.reduction_indices) and not s.checks and _has_distinct_indices(s)


def _choose_split_index(s: BoundStatement) -> BoundIndex | None:
    """The reduced index to split: the outermost long one, if the reduction is long and has few results; else None."""
    if not is_divisible(s) or prod(i.extent for i in s.free) >= FEW_RESULTS:
        return None
    if prod(i.extent for i in s.indices) < SPLIT_SUM_TERMS:
        return None
    return next((i for i in s.reduction_indices if i.extent >= FEW_RESULTS), None)


def _find_row_index(function: BoundFunction, s: BoundStatement, least: int) -> BoundIndex | None:
    """The index of the rows if `s` sums the columns of a matrix of at least `least` elements, else None."""
    if not is_divisible(s) or len(s.reduction_indices) != 1 or len(s.free) != 1:
        return None
    (column,), (row,) = s.free, s.reduction_indices
    reads = [x for x in tc.walk_expr(s.value) if isinstance(x, tc.Access)]
    along = all(access_stride(function, x, column.name) in (0, 1) for x in reads)
    large = column.extent * row.extent >= least and column.extent >= MIN_COLUMN_SUM_ROWS * COLUMN_SUM_PARTS
    return row if along and large and row.extent >= MIN_COLUMN_SUM_ROWS * COLUMN_SUM_PARTS else None


def _choose_part_count(extent: int, most: int) -> int:
    """The number of parts: `most`, or a divisor of `extent` that is not much smaller."""
    whole = (n for n in range(most, most // 2, -1) if extent % n == 0)
    return min(next(whole, most), extent)


def _has_distinct_indices(s: BoundStatement) -> bool:
    forms = [to_isl_affine(e) for e in s.subscripts]
    names = [f.single for f in forms if f is not None]
    return len(names) == len(forms) == len(set(names)) and None not in names


def _fresh_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _make_partial_tensor(s: BoundStatement, name: str, parts: int) -> Tensor:
    shape = (parts, *(i.extent for i in s.free))
    return Tensor(name, s.value.dtype, shape, contiguous_strides(shape), Role.TEMPORARY)


def _make_split_statements(s: BoundStatement, index: BoundIndex, part: Tensor) -> Iterator[BoundStatement]:
    """The statements that compute the parts, combine them, and add the terms that do not fill a chunk."""
    parts = part.shape[0]
    chunk = index.extent // parts
    outer = BoundIndex(_fresh_name(internal_name("p"), {i.name for i in s.indices}), 0, parts)
    inner = BoundIndex(index.name, 0, chunk)
    position = _add_term(_add_term(_scale_index(outer.name, chunk), tc.Index(index.name, tc.INDEX_TYPE)), index.lower)
    where = (tc.Index(outer.name, tc.INDEX_TYPE), *(_subtract_lower_bound(i) for i in s.free))
    yield replace(
        s,
        name=internal_name(s.name, "parts"),
        target=part.name,
        subscripts=where,
        initialize=True,
        value=_substitute_index(s.value, index.name, position),
        indices=(outer, *s.free, inner, *(i for i in s.reduction_indices if i != index)),
        num_free=1 + s.num_free,
    )
    yield replace(
        s,
        name=internal_name(s.name, "combined"),
        value=tc.Access(part.name, where, part.dtype),
        indices=(*s.free, outer),
        num_free=s.num_free,
    )
    rest = replace(index, lower=index.lower + parts * chunk)
    if rest.extent:
        yield replace(
            s,
            name=internal_name(s.name, "rest"),
            initialize=False,
            indices=tuple(rest if i == index else i for i in s.indices),
        )


def _subtract_lower_bound(i: BoundIndex) -> tc.Expr:
    return _add_term(tc.Index(i.name, tc.INDEX_TYPE), -i.lower)


def _scale_index(name: str, factor: int) -> tc.Expr:
    index = tc.Index(name, tc.INDEX_TYPE)
    return index if factor == 1 else tc.Binary("*", index, tc.Const(factor, tc.INDEX_TYPE), tc.INDEX_TYPE)


def _add_term(e: tc.Expr, term: tc.Expr | int) -> tc.Expr:
    if isinstance(term, int):
        if term == 0:
            return e
        term = tc.Const(term, tc.INDEX_TYPE)
    return tc.Binary("+", e, term, tc.INDEX_TYPE)


def _substitute_index(e: tc.Expr, name: str, value: tc.Expr) -> tc.Expr:
    if isinstance(e, tc.Index) and e.name == name:
        return value if e.dtype == tc.INDEX_TYPE else tc.Cast(value, e.dtype)
    return map_operands(e, lambda x: _substitute_index(x, name, value))
