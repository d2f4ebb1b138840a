"""Masks on row indices, such as causal ones: find blocks of rows that a mask keeps or removes entirely.

The code of a block adds the index of its first row to indices, so a mask looks like a condition on data. Most blocks
are on one side of a mask, though. They need no condition, and those that the mask removes need hardly any work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from ...core.dtypes import BOOL, INT32, INT64
from ..affine import Affine, Opaque, Variable, to_affine
from ..binding.bind import neutral_element
from ..ir import (
    INDEX_TYPE,
    Access,
    Binary,
    BoundFunction,
    BoundStatement,
    Cast,
    Const,
    Expr,
    Index,
    Role,
    Select,
    map_operands,
    operands_of,
    walk_expr,
)

LARGEST_SUM = 1 << 30
"""Largest sum of row indices that is certain to be the same with 32 and with 64 bits."""


@dataclass(frozen=True, slots=True)
class RowScalars:
    """The scalar operands of a block that hold the indices of its first rows, and those that hold row counts."""

    firsts: frozenset[str]
    counts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`sum of coefficient * operand + constant <= 0`; terms name operands that hold first rows or row counts."""

    terms: tuple[tuple[str, int], ...]
    constant: int
    spans: tuple[tuple[str, int], ...]
    """How much the sum may change inside a block, by operand: coefficient * (rows of the block - 1)."""
    indices: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """The indices that are added to the terms, in the statement of the comparison, with their coefficients."""

    @property
    def limit(self) -> int:
        """The largest value of the operands for which the sum is certain to be the same with 32 bits."""
        return LARGEST_SUM // (1 + sum(abs(c) for _, c in self.terms))

    @property
    def is_square(self) -> bool:
        """Whether a block has several rows along each axis, and as many: so it may be on the diagonal of the mask."""
        lengths = {abs(n) for _, n in self.spans}
        return len(self.spans) > 1 and len(lengths) == 1 and 0 not in lengths

    @property
    def low(self) -> int:
        """The least value, over the rows of a block, to add to the terms for its first rows; includes the constant."""
        return self.constant + sum(min(n, 0) for _, n in self.spans)

    @property
    def high(self) -> int:
        """The greatest such value."""
        return self.constant + sum(max(n, 0) for _, n in self.spans)


Mask = frozenset[Comparison]
"""A conjunction of comparisons."""


def find_block_mask(bound: BoundFunction, scalars: RowScalars) -> Mask | None:
    """The mask of a block's def if it has exactly one, else None. scalars: its operands for rows."""
    found = {mask for s in bound.statements for mask in _list_masks(s, scalars)}
    return found.pop() if len(found) == 1 else None


def find_masked_temporaries(bound: BoundFunction, scalars: RowScalars) -> frozenset[str]:
    """The temporaries that are read only where one mask holds."""
    reads: dict[str, set[Mask | None]] = {}
    for s in bound.statements:
        for tensor, mask in _list_reads(s.value, None, s, scalars):
            reads.setdefault(tensor, set()).add(mask)
        for e in (*s.subscripts, *(c.subscript for c in s.checks)):
            for x in walk_expr(e):
                if isinstance(x, Access):
                    reads.setdefault(x.tensor, set()).add(None)
    local = {t.name for t in bound.tensors if t.role is Role.TEMPORARY}
    return frozenset(name for name, masks in reads.items() if name in local and len(masks) == 1 and None not in masks)


def without_mask(bound: BoundFunction, scalars: RowScalars) -> BoundFunction:
    """The def for a block that the mask keeps entirely."""
    return replace(bound, statements=tuple(_decide(s, scalars, holds=True) for s in bound.statements))


def at_equal_terms(bound: BoundFunction, scalars: RowScalars) -> BoundFunction:
    """The def for a block in which the terms of each comparison add up to 0, so that masks depend on indices alone.

    Blocks on the diagonal of a causal mask are an example. Their masks are known, so loops can end where they do.
    """

    def choose(e: Expr) -> Expr:
        if isinstance(e, Select) and (mask := _parse_mask(e.condition, s, scalars)) is not None:
            e = replace(e, condition=reduce(_both, map(_compare_indices, sorted(mask, key=repr))))
        return map_operands(e, choose)

    statements = []
    for s in bound.statements:
        statements.append(replace(s, value=choose(s.value)))
    return replace(bound, statements=tuple(statements))


def _both(left: Expr, right: Expr) -> Expr:
    return Binary("&&", left, right, left.dtype)


def _compare_indices(c: Comparison) -> Expr:
    """The comparison `c` of indices, without its terms."""

    def add(parts: Iterable[tuple[str, int]], constant: int) -> Expr:
        total: Expr = Const(constant, INDEX_TYPE)
        for name, factor in parts:
            scaled = Binary("*", Const(factor, INDEX_TYPE), Index(name, INDEX_TYPE), INDEX_TYPE)
            total = Binary("+", total, scaled, INDEX_TYPE)
        return total

    left = add((part for part in c.indices if part[1] > 0), max(c.constant, 0))
    right = add(((name, -factor) for name, factor in c.indices if factor < 0), max(-c.constant, 0))
    return Binary("<=", left, right, BOOL)


def masked_out(bound: BoundFunction, scalars: RowScalars, unread: Collection[str]) -> BoundFunction | None:
    """The def for a block that the mask removes entirely; None if it has no fewer reductions.

    Args:
        unread: tensors that are not read in such a block.
    """
    statements = [_decide(s, scalars, holds=False) for s in bound.statements]
    kept = [_skip_value(s, bound) if s.target in unread else s for s in statements]
    kept = [s for s in kept if not _adds_nothing(s)]
    if sum(s.reduction is not None for s in kept) == sum(s.reduction is not None for s in bound.statements):
        return None
    return replace(bound, statements=tuple(kept))


def _skip_value(s: BoundStatement, bound: BoundFunction) -> BoundStatement:
    """`s` with a constant as its value, which still initializes its target."""
    if s.reduction is not None and not s.initialize:
        return replace(s, value=Const(neutral_element(s.reduction, s.value.dtype), s.value.dtype))
    dtype = bound.tensor(s.target).dtype
    zero = Const(neutral_element("+", dtype), dtype)
    return replace(
        s, reduction=None, initialize=False, indices=s.free, value=zero, reads_own_target=False, checks=(), exists=(),
        elements=(), terms=(),
    )  # fmt: skip


def _adds_nothing(s: BoundStatement) -> bool:
    if s.reduction is None or s.initialize or not isinstance(s.value, Const):
        return False
    return s.value == Const(neutral_element(s.reduction, s.value.dtype), s.value.dtype)


def _decide(s: BoundStatement, scalars: RowScalars, *, holds: bool) -> BoundStatement:
    """`s` with each select on a mask replaced by the branch for `holds`."""

    def choose(e: Expr) -> Expr:
        if isinstance(e, Select) and _parse_mask(e.condition, s, scalars) is not None:
            return choose(e.then if holds else e.otherwise)
        return map_operands(e, choose)

    return replace(s, value=choose(s.value))


def _list_masks(s: BoundStatement, scalars: RowScalars) -> Iterator[Mask]:
    for e in walk_expr(s.value):
        if isinstance(e, Select) and (mask := _parse_mask(e.condition, s, scalars)) is not None:
            yield mask


def _list_reads(
    e: Expr, mask: Mask | None, s: BoundStatement, scalars: RowScalars
) -> Iterator[tuple[str, Mask | None]]:
    """The tensors that an expression reads, each with the mask of the read; None without a mask."""
    if isinstance(e, Access):
        yield e.tensor, mask
    inner = _parse_mask(e.condition, s, scalars) if isinstance(e, Select) else None
    for part in operands_of(e):
        is_masked = isinstance(e, Select) and inner is not None and part is e.then
        yield from _list_reads(part, inner if is_masked and mask is None else mask, s, scalars)


def _parse_mask(e: Expr, s: BoundStatement, scalars: RowScalars) -> Mask | None:
    """Parse a condition on row indices; None if it is any other condition."""
    if isinstance(e, Binary) and e.op == "&&":
        left, right = _parse_mask(e.left, s, scalars), _parse_mask(e.right, s, scalars)
        return None if left is None or right is None else left | right
    if not isinstance(e, Binary) or e.op not in ("<", "<=", ">", ">="):
        return None
    left_side, right_side = (to_affine(_widen(x), {}) for x in (e.left, e.right))
    difference = left_side - right_side if e.op in ("<", "<=") else right_side - left_side
    found = _parse_comparison(difference.shift(1 if e.op in ("<", ">") else 0), s, scalars)
    return None if found is None else frozenset({found})


def _widen(e: Expr) -> Expr:
    """`e` without the casts of row indices from 64 to 32 bits."""
    if isinstance(e, Cast) and e.dtype == INT32 and e.operand.dtype == INT64:
        return _widen(e.operand)
    return e if isinstance(e, Access) else map_operands(e, _widen)


def _parse_comparison(a: Affine, s: BoundStatement, scalars: RowScalars) -> Comparison | None:
    """`a <= 0` as a comparison; None unless each index of rows occurs with the operand for its first row."""
    extents = {i.name: i.extent for i in s.indices if i.lower == 0}
    terms: dict[str, int] = {}
    indices: list[tuple[int, int]] = []
    names: list[tuple[str, int]] = []
    for atom, c in a.terms:
        if not isinstance(c, int):
            return None
        match atom:
            case Opaque(expr=Access(tensor=name, subscripts=())) if name in scalars.firsts | scalars.counts:
                terms[name] = c
            case Variable(name=name) if name in extents:
                indices.append((c, extents[name]))
                names.append((name, c))
            case _:
                return None
    if not isinstance(a.constant, int) or not terms.keys() & scalars.firsts:
        return None
    found = _pair_indices(terms, scalars.firsts, indices, a.constant)
    if found is None or max(-found.low, found.high) >= LARGEST_SUM:
        return None
    return replace(found, indices=tuple(names))


def _pair_indices(
    terms: Mapping[str, int], firsts: Collection[str], indices: list[tuple[int, int]], constant: int
) -> Comparison | None:
    """Pair every index with the only first row that has the same coefficient; None if that is not unique."""
    spans: dict[str, int] = {}
    for c, extent in indices:
        found = [name for name, factor in terms.items() if factor == c and name in firsts and name not in spans]
        if len(found) != 1:
            return None
        spans[found[0]] = c * (extent - 1)
    return Comparison(tuple(sorted(terms.items())), constant, tuple(sorted(spans.items())))
