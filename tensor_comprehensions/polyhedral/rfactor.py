"""Long reductions into few elements, cut into parts that run in parallel and are combined in a fixed order.

`s += f(k)` becomes `part(p) +=! f(p * chunk + k)` for a fixed number of parts, `s += part(p)`, and the few terms that
are left over. The result depends on the sizes, never on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ..strides import contiguous_strides
from ..target import Target
from ..tc_lang import function as tc
from ..tc_lang.function import BoundFunction, BoundIndex, BoundStatement, Role, Tensor, map_operands
from .affine import affine
from .locality import stride

# Fewer results than this leave threads idle; fewer terms in all than this are summed before another thread wakes.
FEW_RESULTS = 16
MANY_TERMS = 1 << 17
PARTS = 64
# A sum of the columns of a matrix that no cache holds reads memory in its order where each thread has rows of its own.
# Where the last cache is far, that is worth its while from a few times what the others hold.
LARGE_MATRIX, FAR_MATRIX, ELEMENT = 1 << 21, 2, 4
ROW_PARTS, LEAST_ROWS = 8, 16


def rfactor(
    function: BoundFunction,
    parts: int = PARTS,
    few: int = FEW_RESULTS,
    many: int = MANY_TERMS,
    matrix: int | None = LARGE_MATRIX,
) -> BoundFunction:
    """`function` with its reductions of at least `many` terms into fewer than `few` elements in two stages.

    So is a def that does nothing but to sum the columns of a matrix of at least `matrix` elements.
    """
    tensors, statements = list(function.tensors), []
    for s in function.statements:
        by_rows = _rows(function, s, matrix) if len(function.statements) == 1 and matrix is not None else None
        index = by_rows or _index(s, few, many)
        if index is None:
            statements.append(s)
            continue
        count = _parts(index.extent, ROW_PARTS if by_rows else parts)
        part = _part(s, index, _fresh(f"{s.target}_part", {t.name for t in tensors}), count)
        tensors.append(part)
        statements += _stages(s, index, part)
    return replace(function, tensors=tuple(tensors), statements=tuple(statements))


def large_matrix(target: Target) -> int:
    """Elements of a matrix that is large to `target`."""
    return int(min(LARGE_MATRIX, FAR_MATRIX * target.far / ELEMENT))


def in_parts(
    s: BoundStatement, index: BoundIndex, parts: int, taken: set[str]
) -> tuple[Tensor, tuple[BoundStatement, ...]]:
    """`s` in two stages, its reduced `index` cut in so many parts, and the temporary with these; `taken`: names."""
    part = _part(s, index, _fresh(f"{s.target}_part", taken), parts)
    return part, tuple(_stages(s, index, part))


def _index(s: BoundStatement, few: int, many: int) -> BoundIndex | None:
    """The reduced index to cut: the outermost long enough one of a reduction that needs it."""
    if s.reduction is None or not s.reduced or s.checks or not _plain(s):
        return None
    terms = prod(i.extent for i in s.indices)
    if prod(i.extent for i in s.free) >= few or terms < many:
        return None
    return next((i for i in s.reduced if i.extent >= FEW_RESULTS), None)


def _rows(function: BoundFunction, s: BoundStatement, least: int) -> BoundIndex | None:
    """The index of rows of a matrix of which `s` sums the columns, where there are enough of both."""
    if s.reduction is None or len(s.reduced) != 1 or len(s.free) != 1 or s.checks or not _plain(s):
        return None
    (column,), (row,) = s.free, s.reduced
    reads = [x for x in tc.walk(s.value) if isinstance(x, tc.Access)]
    along = all(stride(function, x, column.name) in (0, 1) for x in reads)
    large = column.extent * row.extent >= least and column.extent >= LEAST_ROWS * ROW_PARTS
    return row if along and large and row.extent >= LEAST_ROWS * ROW_PARTS else None


def _parts(extent: int, most: int) -> int:
    """How many parts: a number that leaves no terms over, if there is one that is not much smaller."""
    whole = (n for n in range(most, most // 2, -1) if extent % n == 0)
    return min(next(whole, most), extent)


def _plain(s: BoundStatement) -> bool:
    forms = [affine(e) for e in s.subscripts]
    names = [f.single for f in forms if f is not None]
    return len(names) == len(forms) == len(set(names)) and None not in names


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _part(s: BoundStatement, index: BoundIndex, name: str, parts: int) -> Tensor:
    shape = (parts, *(i.extent for i in s.free))
    return Tensor(name, s.value.dtype, shape, contiguous_strides(shape), Role.TEMPORARY)


def _stages(s: BoundStatement, index: BoundIndex, part: Tensor) -> Iterator[BoundStatement]:
    """The parts, their combination, and the terms that do not fill a chunk."""
    parts = part.shape[0]
    chunk = index.extent // parts
    outer = BoundIndex(_fresh("p", {i.name for i in s.indices}), 0, parts)
    inner = BoundIndex(index.name, 0, chunk)
    position = _sum(_sum(_times(outer.name, chunk), tc.Index(index.name, tc.INDEX_TYPE)), index.lower)
    where = (tc.Index(outer.name, tc.INDEX_TYPE), *(_offset(i) for i in s.free))
    yield replace(
        s,
        name=f"{s.name}_parts",
        target=part.name,
        subscripts=where,
        initialise=True,
        value=_substituted(s.value, index.name, position),
        indices=(outer, *s.free, inner, *(i for i in s.reduced if i != index)),
        left=1 + s.left,
    )
    yield replace(
        s,
        name=f"{s.name}_combined",
        value=tc.Access(part.name, where, part.dtype),
        indices=(*s.free, outer),
        left=s.left,
    )
    rest = replace(index, lower=index.lower + parts * chunk)
    if rest.extent:
        yield replace(
            s,
            name=f"{s.name}_rest",
            initialise=False,
            indices=tuple(rest if i == index else i for i in s.indices),
        )


def _offset(i: BoundIndex) -> tc.Expr:
    return _sum(tc.Index(i.name, tc.INDEX_TYPE), -i.lower)


def _times(name: str, factor: int) -> tc.Expr:
    index = tc.Index(name, tc.INDEX_TYPE)
    return index if factor == 1 else tc.Binary("*", index, tc.Const(factor, tc.INDEX_TYPE), tc.INDEX_TYPE)


def _sum(e: tc.Expr, term: tc.Expr | int) -> tc.Expr:
    if isinstance(term, int):
        if term == 0:
            return e
        term = tc.Const(term, tc.INDEX_TYPE)
    return tc.Binary("+", e, term, tc.INDEX_TYPE)


def _substituted(e: tc.Expr, name: str, value: tc.Expr) -> tc.Expr:
    if isinstance(e, tc.Index) and e.name == name:
        return value if e.dtype == tc.INDEX_TYPE else tc.Cast(value, e.dtype)
    return map_operands(e, lambda x: _substituted(x, name, value))
