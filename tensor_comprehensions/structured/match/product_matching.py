"""Split products into factors, replace reads and convert types in expressions of the language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from ...core.dtypes import DType
from ...core.math_functions import TF32
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundStatement, map_operands, walk_expr


@dataclass(frozen=True, slots=True)
class Product:
    """`scale * left * right`: the summed product of a contraction; `scale` is the same for all terms."""

    left: tc.Expr
    right: tc.Expr
    scale: tc.Expr | None


def split_product(s: BoundStatement) -> Product | None:
    """The value of an update as a product of two factors and a scale; None if it is no such product.

    Each factor reads a tensor and depends on a reduction index.
    """
    reduced = {i.name for i in s.reduction_indices}
    leaves = list_factors(s.value)
    summed = [x for x in leaves if reduced & collect_index_names(x)]
    scales = [x for x in leaves if not reduced & collect_index_names(x)]
    if scales and not s.value.dtype.is_float and any(x.dtype != s.value.dtype for x in scales):
        return None
    factors = _merge_factors(summed)
    if len(factors) != 2 or not all(any(isinstance(e, tc.Access) for e in walk_expr(f)) for f in factors):
        return None
    return Product(factors[0], factors[1], multiply_factors(scales) if scales else None)


def has_narrow_products(function: BoundFunction) -> bool:
    """Whether some sum may be of products that tensor cores compute: of 8- or 16-bit numbers, or of tf32."""
    return any(
        s.reduction == "+" and s.reduction_indices and any(_is_narrow(e) for e in walk_expr(s.value))
        for s in function.statements
    )


def _is_narrow(e: tc.Expr) -> bool:
    if isinstance(e, tc.Call):
        return e.function == TF32
    return isinstance(e, tc.Cast) and e.operand.dtype.bits <= 16 and e.dtype.bits == 32


def list_factors(e: tc.Expr) -> list[tc.Expr]:
    """The factors of a product, left to right. The first factor keeps a minus sign in front of the product."""
    match e:
        case tc.Binary("*", left, right):
            return [*list_factors(left), *list_factors(right)]
        case tc.Unary("-", operand, dtype) if dtype.is_float:
            first, *rest = list_factors(operand)
            return [tc.Unary("-", first, dtype), *rest]
    return [e]


def _merge_factors(factors: list[tc.Expr]) -> list[tc.Expr]:
    """Merge factors until two are left, each time a factor into one whose indices include its own."""
    while len(factors) > 2:
        pairs = [
            (a, b) for a in factors for b in factors if a is not b and collect_index_names(a) <= collect_index_names(b)
        ]
        if not pairs:
            break
        small, large = min(pairs, key=lambda p: len(collect_index_names(p[0])))
        joined = multiply_factors([large, small])
        factors = [joined if x is large else x for x in factors if x is not small]
    return factors


def multiply_factors(factors: Sequence[tc.Expr]) -> tc.Expr:
    """The product of factors of one type, from left to right."""
    return reduce(lambda a, b: tc.Binary("*", a, b, a.dtype), factors)


def collect_index_names(e: tc.Expr) -> set[str]:
    """The indices in an expression."""
    return {x.name for x in walk_expr(e) if isinstance(x, tc.Index)}


def replace_element_reads(e: tc.Expr, element: tc.Access, value: tc.Expr) -> tc.Expr:
    """`e` with every read of `element` replaced by `value`."""
    if isinstance(e, tc.Access) and e.tensor == element.tensor and e.subscripts == element.subscripts:
        return value
    return map_operands(e, lambda x: replace_element_reads(x, element, value))


def convert_exactly(e: tc.Expr, dtype: DType) -> tc.Expr:
    """`e` converted to `dtype`; an integer constant becomes a float constant without a cast."""
    if e.dtype == dtype:
        return e
    if isinstance(e, tc.Const) and not isinstance(e.value, float) and dtype.is_float:
        return tc.Const(float(e.value), dtype)
    return tc.Cast(e, dtype)
