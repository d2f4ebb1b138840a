"""Find the products of a def that tensor cores can compute, or the reasons why they cannot.

A region is a sum of products of two factors, with the pointwise statements around it. In the source, the factors are
float16, bfloat16, int8 or uint8, and are widened to the type of the sum. A float32 factor must be rounded to tf32 in
the source, unless options allow rounding any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TypeAlias

from ...core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, UINT8, DType
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...core.math_functions import TF32
from ...loop_ir.atoms import TFLOAT32
from ...structured.match.match_contraction import MatchedContraction, match_contraction
from ...structured.match.product_matching import split_product
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, map_operands, walk_expr
from ...tc_lang.transforms.restrict_domains import restrict_domains
from .chain_products import extend_by_chain
from .join_sums import extend_by_sums
from .masked_factors import mask_computed_factors
from .product_region import FactorPair, ProductFactor, ProductRegion, Rounding

FACTOR_TYPES = {FLOAT32: ((FLOAT16,), (BFLOAT16,), (TFLOAT32,)), INT32: ((INT8, UINT8),)}
"""The supported types of factors, by the type of the sum; both factors have types of the same tuple."""


class IndexKind(Enum):
    """Which factors depend on a free index: both (BATCH), the left one (ROW), or the right one (COLUMN)."""

    BATCH = "batch"
    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True, slots=True)
class RefusedProduct:
    """A sum of products that tensor cores cannot compute, and the reason."""

    target: str
    reason: str

    def __str__(self) -> str:
        return f"{self.target}: {self.reason}"


DefPiece: TypeAlias = ProductRegion | tuple[BoundStatement, ...]


def recognize_products(
    function: BoundFunction, *, tf32: bool = False, chains: bool = True
) -> tuple[tuple[DefPiece, ...], tuple[RefusedProduct, ...]]:
    """Divide a def into regions and groups of other statements, in order; also return the refused products.

    tf32: whether any float32 factors may be rounded to tf32. chains: whether chained products may form one region.
    """
    tensors, statements = {t.name: t for t in function.tensors}, function.statements
    restricted = restrict_domains(function, most_kept=1.0)
    pieces: list[DefPiece] = []
    refused: list[RefusedProduct] = []
    rest: list[BoundStatement] = []
    at = 0
    while at < len(statements):
        found = match_contraction(statements, at, tensors, in_place=True, finish_checked=False)
        masked = found is None
        if masked:  # retry with masks around the product converted to domains
            found = match_contraction(restricted.statements, at, tensors, in_place=True, finish_checked=False)
            found = found if found is not None and found.statements[found.update].terms else None
        if found is not None and (first := _checked_definitions(found)):
            rest += statements[at : at + first]
            at += first
            continue
        region: ProductRegion | None = None
        if found is not None:
            try:
                whole = _region_of(function, found, tf32=tf32)
                region = mask_computed_factors(whole) if masked else whole
            except CannotLower as reason:
                refused.append(RefusedProduct(found.output.tensor, str(reason)))
        elif _is_product(statements[at]):
            refused.append(RefusedProduct(statements[at].target, "it is no product of two factors into plain indices"))
        if region is None:
            taken = 1 if found is None else len(found.statements)
            rest += statements[at : at + taken]
        else:
            if not region.domain:
                region = _extend_by_products(function, region, at + len(region.statements), tf32=tf32)
                find = partial(_region_at, tf32=tf32)
                region = extend_by_sums(function, region, at, find)
                region = extend_by_chain(function, restricted, region, at, find) if chains else region
            taken = len(region.statements)
            pieces += [tuple(rest)] if rest else []
            pieces.append(region)
            rest = []
        at += taken
    pieces += [tuple(rest)] if rest else []
    return tuple(pieces), tuple(refused)


def _is_product(s: BoundStatement) -> bool:
    return s.reduction == "+" and bool(s.reduction_indices) and split_product(s) is not None


def _region_at(function: BoundFunction, at: int, *, tf32: bool) -> ProductRegion | None:
    """The region that begins at statement `at`; None if there is none."""
    tensors = {t.name: t for t in function.tensors}
    found = match_contraction(function.statements, at, tensors, in_place=True, finish_checked=False)
    try:
        return None if found is None or _checked_definitions(found) else _region_of(function, found, tf32=tf32)
    except CannotLower:
        return None


def _checked_definitions(found: MatchedContraction) -> int:
    """The number of leading statements to exclude, because tensor-core kernels cannot check their subscripts."""
    return max((n + 1 for n in range(found.update) if found.statements[n].checks), default=0)


def _region_of(function: BoundFunction, found: MatchedContraction, *, tf32: bool) -> ProductRegion:
    """The region of a contraction. Raises CannotLower with the reason if tensor cores cannot compute it."""
    for s in found.statements:
        if s.checks:
            raise CannotLower("a subscript is checked in the run")
        if s.elements:
            raise CannotLower("it is restricted to a part of its elements")
    if any(not i.extent for i in (*found.free, *found.reduction_indices)):
        raise CannotLower("it is empty")
    total = found.left.dtype
    left, right = _factors_of(found.left, found.right, tf32=tf32)
    if not any(left.dtype in types and right.dtype in types for types in FACTOR_TYPES.get(total, ())):
        raise CannotLower(f"its factors are {left.dtype.name} and {right.dtype.name}, and its sum is {total.name}")
    kinds = [(i, _classify_index(i, (left.indices, right.indices))) for i in found.free]
    rows, columns, batch = (
        tuple(i for i, k in kinds if k is kind) for kind in (IndexKind.ROW, IndexKind.COLUMN, IndexKind.BATCH)
    )
    if not rows and not columns:
        raise CannotLower("no index moves only one of its factors")
    rows, columns = (
        own or (BoundIndex(internal_name(found.output.tensor, name), 0, 1),)
        for own, name in ((rows, "row"), (columns, "column"))
    )
    if _unit_index(function, found) in {i.name for i in rows}:
        left, right, rows, columns = right, left, columns, rows
    pairs = (FactorPair(left, right, found.reduction_indices),)
    return ProductRegion(found, total, pairs, rows, columns, batch, domain=found.statements[found.update].terms)


def _extend_by_products(function: BoundFunction, region: ProductRegion, at: int, *, tf32: bool) -> ProductRegion:
    """The region joined with the following products that are added to the same sums, and their epilogue."""
    while at < len(function.statements) and region.contraction.epilogue is None:
        tensors = {t.name: t for t in function.tensors}
        found = match_contraction(function.statements, at, tensors, in_place=True, finish_checked=False)
        if found is None or found.update or not _accumulates_into(region, found):
            break
        try:
            more = _region_of(function, found, tf32=tf32)
        except CannotLower:
            break
        joined = _join_regions(region, more)
        if joined is None:
            break
        region, at = joined, at + len(found.statements)
    return region


def _accumulates_into(region: ProductRegion, found: MatchedContraction) -> bool:
    """Whether a contraction adds to the sums that a region stores, without an epilogue in between."""
    update, first = found.statements[0], region.contraction
    same = [(i.lower, i.upper) for i in found.free] == [(i.lower, i.upper) for i in first.free]
    return (
        same and update.target == first.output.tensor and first.output.dtype == region.total
        and found.initial == tc.Access(update.target, update.subscripts, region.total)
        and len(first.statements) - len(region.pairs) == first.update
        and _list_index_positions(update.subscripts, found) == _list_index_positions(first.output.subscripts, first)
    )  # fmt: skip


def _list_index_positions(subscripts: Sequence[tc.Expr], of: MatchedContraction) -> list[int]:
    """The position among the free indices of each subscript."""
    names = [i.name for i in of.free]
    return [names.index(e.name) for e in subscripts if isinstance(e, tc.Index)]


def _join_regions(region: ProductRegion, more: ProductRegion) -> ProductRegion | None:
    """Both as one region, with the index names of the first; None if their free indices or factor sizes differ."""
    first, last = region.contraction, more.contraction
    names = {new.name: old.name for new, old in zip(last.free, first.free, strict=True)}
    taken = {i.name for p in region.pairs for i in p.terms} | {i.name for i in first.free}
    terms = {
        i.name: internal_name(i.name, len(region.pairs)) if i.name in taken else i.name for i in more.pairs[0].terms
    }
    all_names = names | terms

    def rename(e: tc.Expr) -> tc.Expr:
        if isinstance(e, tc.Index):
            return replace(e, name=all_names.get(e.name, e.name))
        return map_operands(e, rename)

    def indices(given: tuple[BoundIndex, ...]) -> tuple[BoundIndex, ...]:
        return tuple(replace(i, name=all_names[i.name]) for i in given)

    (pair,) = more.pairs
    sides = [(indices(x), f) for x, f in ((more.rows, pair.left), (more.columns, pair.right))]
    if set(sides[0][0]) != set(region.rows):
        sides.reverse()
    same = [set(x) for x, _ in sides] == [set(region.rows), set(region.columns)]
    if not same or set(indices(more.batch)) != set(region.batch) or more.factor_bytes != region.factor_bytes:
        return None
    left, right = (replace(f, value=rename(f.value)) for _, f in sides)
    contraction = replace(
        last,
        statements=(*first.statements, *last.statements),
        update=first.update,
        output=replace(last.output, subscripts=tuple(map(rename, last.output.subscripts))),
        initial=first.initial,
        epilogue=None if last.epilogue is None else rename(last.epilogue),
    )
    return replace(region, contraction=contraction, pairs=(*region.pairs, FactorPair(left, right, indices(pair.terms))))


def _classify_index(i: BoundIndex, names: tuple[frozenset[str], frozenset[str]]) -> IndexKind:
    match tuple(i.name in n for n in names):
        case (True, True):
            return IndexKind.BATCH
        case (True, False):
            return IndexKind.ROW
        case (False, True):
            return IndexKind.COLUMN
    raise CannotLower(f"no factor depends on the index {i.name}")


def _unit_index(function: BoundFunction, found: MatchedContraction) -> str | None:
    """The name of the longest index along which the output is contiguous, or None."""
    output, extents = found.output, {i.name: i.extent for i in found.free}
    strides = function.tensor(output.tensor).strides
    unit = [e.name for e, n in zip(output.subscripts, strides, strict=True) if isinstance(e, tc.Index) and n == 1]
    return max(unit, key=lambda name: extents[name], default=None)


def _factors_of(left: tc.Expr, right: tc.Expr, *, tf32: bool) -> tuple[ProductFactor, ProductFactor]:
    """Both factors in types that tensor cores support. Raises CannotLower if a factor is not rounded to one."""
    both = (left, right)
    if all(e.dtype == FLOAT32 for e in both) and not all(_undo_widening(e, None) for e in both):
        a, b = (_rounded_factor(e, tf32=tf32) for e in both)
        if a is not None and b is not None and (a.rounding or b.rounding):
            one = a.rounding or b.rounding  # half-precision values are exact in tf32
            return replace(a, rounding=a.rounding or one), replace(b, rounding=b.rounding or one)
    a, b = (ProductFactor(_narrow_factor(e)) for e in both)
    return a, b


def _rounded_factor(e: tc.Expr, *, tf32: bool) -> ProductFactor | None:
    """A float32 factor that the source rounds to tf32, that may be rounded, or that is exact in tf32; else None."""
    value = _tf32_operand(e)
    if value is not None:
        return ProductFactor(value, Rounding.TEXT)
    if _undo_widening(e, None) is not None:
        return ProductFactor(e)
    return ProductFactor(e, Rounding.OPTION) if tf32 else None


def _tf32_operand(e: tc.Expr) -> tc.Expr | None:
    """`e` without its rounding to tf32 in the source, or None if it is not rounded; zeros need no rounding."""
    match e:
        case tc.Call(function=name, arguments=(operand,)) if name == TF32:
            return operand
        case tc.Select(condition, then, otherwise):
            values = [x if tc.Const(0.0, FLOAT32) == x else _tf32_operand(x) for x in (then, otherwise)]
            found = None in values or values == [then, otherwise]
            return None if found else tc.Select(condition, values[0], values[1], FLOAT32)  # type: ignore[arg-type]
    return None


def _narrow_factor(e: tc.Expr) -> tc.Expr:
    """The value of a factor before the source widens it. Raises CannotLower if it is not a widened value."""
    narrow = _undo_widening(e, None)
    if narrow is not None:
        return narrow
    types = [x.dtype.name for x in walk_expr(e) if isinstance(x, tc.Access)]
    if isinstance(e, tc.Access):
        name, as_tf32 = e.tensor, f" or tf32({e.tensor}(...))" if e.dtype == FLOAT32 else ""
        raise CannotLower(f"its factor {name} is {e.dtype.name}: write it as float(half({name}(...))){as_tf32}")
    computed = f"computed in {e.dtype.name} from {', '.join(dict.fromkeys(types)) or 'numbers'}"
    raise CannotLower(f"a factor is {computed} and not rounded: write it as float(half(...)) or tf32(...)")


def _undo_widening(e: tc.Expr, dtype: DType | None) -> tc.Expr | None:
    """`e` before it was widened from a supported type (`dtype` if given); else None. Constant zeros fit any type."""
    match e:
        case tc.Cast(operand) if any(operand.dtype in types for types in FACTOR_TYPES.get(e.dtype, ())):
            return operand if dtype in (None, operand.dtype) else None
        case tc.Const(value) if value == 0 and dtype is not None:
            return tc.Const(0.0 if dtype.is_float else 0, dtype)
        case tc.Select(condition, then, otherwise):
            known = _undo_widening(then, dtype) or _undo_widening(otherwise, dtype)
            if known is None:
                return None
            one, other = _undo_widening(then, known.dtype), _undo_widening(otherwise, known.dtype)
            return None if one is None or other is None else tc.Select(condition, one, other, known.dtype)
    return None
