"""Products of a def that tensor cores compute: statements in, regions and the reasons of all others out.

A region is a sum of products of two factors whose values are float16, bfloat16, int8 or uint8 in the text, widened
there to the type of the sum, with the pointwise statements around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from ..core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, UINT8, DType
from ..core.errors import CannotLower
from ..structured.match.match_contraction import MatchedContraction, match_contraction
from ..structured.match.product_matching import split_product
from ..tc_lang import ir as tc
from ..tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, walk_expr

FACTOR_TYPES = {FLOAT32: ((FLOAT16,), (BFLOAT16,)), INT32: ((INT8, UINT8),)}
"""For the type of a sum the types that its factors may have; those of one tuple may meet."""


class IndexKind(Enum):
    """Which factors an index moves: both and the sum (BATCH), the left one (ROW), the right one (COLUMN), or no sum."""

    BATCH = "batch"
    ROW = "row"
    COLUMN = "column"
    TERM = "term"


@dataclass(frozen=True, slots=True)
class ProductFactor:
    """A factor: an expression of a type that tensor cores take; `element` where it is an element of a tensor."""

    value: tc.Expr

    @property
    def dtype(self) -> DType:
        """The type of the values."""
        return self.value.dtype

    @property
    def indices(self) -> frozenset[str]:
        """The names of the indices that it depends on."""
        return frozenset(x.name for x in walk_expr(self.value) if isinstance(x, tc.Index))

    @property
    def element(self) -> tc.Access | None:
        """The element that it is; None where it is computed, or exists only under a condition."""
        return self.value if isinstance(self.value, tc.Access) and not self.value.guarded else None


@dataclass(frozen=True, slots=True)
class ProductRegion:
    """Consecutive statements that tensor cores compute.

    Attributes:
        contraction: what they mean. total: the type of the sums.
        left, right: the factors; columns are those of the right one, along which the output is contiguous if it can.
        kinds: of each index.
    """

    contraction: MatchedContraction
    total: DType
    left: ProductFactor
    right: ProductFactor
    kinds: tuple[tuple[BoundIndex, IndexKind], ...]

    @property
    def statements(self) -> tuple[BoundStatement, ...]:
        """The members, as the contraction names their indices."""
        return self.contraction.statements

    def indices(self, kind: IndexKind) -> tuple[BoundIndex, ...]:
        """The indices of a kind."""
        return tuple(i for i, k in self.kinds if k is kind)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that the kernel touches, first the one that it writes."""
        c = self.contraction
        roots = [x for x in (self.left.value, self.right.value, c.initial, c.epilogue) if x is not None]
        reads = (e.tensor for x in roots for e in walk_expr(x) if isinstance(e, tc.Access))
        return tuple(dict.fromkeys((c.output.tensor, *reads)))

    @property
    def text(self) -> str:
        """What people read: `C(m,n) += A * B, 16 x 32 x 64`."""
        sizes = " x ".join(str(_size(self.indices(kind))) for kind in (IndexKind.ROW, IndexKind.COLUMN, IndexKind.TERM))
        batch = _size(self.indices(IndexKind.BATCH))
        return f"{self.contraction.output.tensor}: {self.left.dtype.name} {sizes}" + (f" x{batch}" if batch > 1 else "")


@dataclass(frozen=True, slots=True)
class RefusedProduct:
    """A sum of products that is no region, and why."""

    target: str
    reason: str

    def __str__(self) -> str:
        return f"{self.target}: {self.reason}"


DefPiece: TypeAlias = ProductRegion | tuple[BoundStatement, ...]


def recognize_products(function: BoundFunction) -> tuple[tuple[DefPiece, ...], tuple[RefusedProduct, ...]]:
    """The def as regions and runs of other statements, in order; and why other products are none."""
    tensors, statements = {t.name: t for t in function.tensors}, function.statements
    pieces: list[DefPiece] = []
    refused: list[RefusedProduct] = []
    rest: list[BoundStatement] = []
    at = 0
    while at < len(statements):
        found = match_contraction(statements, at, tensors, in_place=True)
        region: ProductRegion | None = None
        if found is not None:
            try:
                region = _region(function, found)
            except CannotLower as reason:
                refused.append(RefusedProduct(found.output.tensor, str(reason)))
        elif _is_product(statements[at]):
            refused.append(RefusedProduct(statements[at].target, "it is no product of two factors into plain indices"))
        if region is None:
            taken = 1 if found is None else len(found.statements)
            rest += statements[at : at + taken]
        else:
            taken = len(region.statements)
            pieces += [tuple(rest)] if rest else []
            pieces.append(region)
            rest = []
        at += taken
    pieces += [tuple(rest)] if rest else []
    return tuple(pieces), tuple(refused)


def _is_product(s: BoundStatement) -> bool:
    return s.reduction == "+" and bool(s.reduction_indices) and split_product(s) is not None


def _region(function: BoundFunction, found: MatchedContraction) -> ProductRegion:
    """The region of a contraction. Raises CannotLower with the reason why it is none."""
    for s in found.statements:
        if s.checks:
            raise CannotLower("a subscript is checked in the run")
        if s.elements or s.terms:
            raise CannotLower("it is restricted to a part of its elements or terms")
    if any(not i.extent for i in (*found.free, *found.reduction_indices)):
        raise CannotLower("it is empty")
    total = found.left.dtype
    left, right = (ProductFactor(_narrow_factor(x)) for x in (found.left, found.right))
    if not any(left.dtype in types and right.dtype in types for types in FACTOR_TYPES.get(total, ())):
        raise CannotLower(f"its factors are {left.dtype.name} and {right.dtype.name}, and its sum is {total.name}")
    names = left.indices, right.indices
    kinds = tuple((i, _kind(i, names, found)) for i in (*found.free, *found.reduction_indices))
    region = ProductRegion(found, total, left, right, kinds)
    for kind in (IndexKind.ROW, IndexKind.COLUMN, IndexKind.TERM):
        if not region.indices(kind):
            raise CannotLower(f"it has no index of the kind '{kind.value}'")
    unit = _unit_index(function, found)
    return _exchanged(region) if unit in {i.name for i in region.indices(IndexKind.ROW)} else region


def _kind(i: BoundIndex, names: tuple[frozenset[str], frozenset[str]], found: MatchedContraction) -> IndexKind:
    inside = tuple(i.name in n for n in names)
    if i in found.reduction_indices:
        return IndexKind.TERM
    match inside:
        case (True, True):
            return IndexKind.BATCH
        case (True, False):
            return IndexKind.ROW
        case (False, True):
            return IndexKind.COLUMN
    raise CannotLower(f"no factor depends on the index {i.name}")


def _exchanged(region: ProductRegion) -> ProductRegion:
    """The region with rows and columns exchanged."""
    other = {IndexKind.ROW: IndexKind.COLUMN, IndexKind.COLUMN: IndexKind.ROW}
    kinds = tuple((i, other.get(kind, kind)) for i, kind in region.kinds)
    return replace(region, left=region.right, right=region.left, kinds=kinds)


def _unit_index(function: BoundFunction, found: MatchedContraction) -> str | None:
    """The longest index along which the output is contiguous."""
    output, extents = found.output, {i.name: i.extent for i in found.free}
    strides = function.tensor(output.tensor).strides
    unit = [e.name for e, n in zip(output.subscripts, strides, strict=True) if isinstance(e, tc.Index) and n == 1]
    return max(unit, key=lambda name: extents[name], default=None)


def _narrow_factor(e: tc.Expr) -> tc.Expr:
    """The value of a factor before the text widens it. Raises CannotLower where it is computed and not rounded."""
    narrow = _narrowed(e, None)
    if narrow is not None:
        return narrow
    types = [x.dtype.name for x in walk_expr(e) if isinstance(x, tc.Access)]
    if isinstance(e, tc.Access):
        raise CannotLower(f"its factor {e.tensor} is {e.dtype.name}: write it as float(half({e.tensor}(...)))")
    computed = f"computed in {e.dtype.name} from {', '.join(dict.fromkeys(types)) or 'numbers'}"
    raise CannotLower(f"a factor is {computed} and not rounded: write it as float(half(...))")


def _narrowed(e: tc.Expr, dtype: DType | None) -> tc.Expr | None:
    """`e` before it was widened: of `dtype`, where that is known. Widening is exact, so zeros may be widened first."""
    match e:
        case tc.Cast(operand) if any(operand.dtype in types for types in FACTOR_TYPES.get(e.dtype, ())):
            return operand if dtype in (None, operand.dtype) else None
        case tc.Const(value) if value == 0 and dtype is not None:
            return tc.Const(0.0 if dtype.is_float else 0, dtype)
        case tc.Select(condition, then, otherwise):
            known = _narrowed(then, dtype) or _narrowed(otherwise, dtype)
            if known is None:
                return None
            one, other = _narrowed(then, known.dtype), _narrowed(otherwise, known.dtype)
            return None if one is None or other is None else tc.Select(condition, one, other, known.dtype)
    return None


def _size(indices: Sequence[BoundIndex]) -> int:
    size = 1
    for i in indices:
        size *= i.extent
    return size
