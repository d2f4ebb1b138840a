"""Factor expressions into products: common factors outside of sums, loop-invariant factors first.

Products are never expanded and nothing is canceled: a sum stays a sum, and a quotient a quotient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from ...core.dtypes import DType
from ..ir import Access, Binary, Const, Expr, Index, Select, Unary, operands_of, walk_expr, with_operands
from ..semantics.to_syntax import sigmoid_argument
from .adjoint_access import uses_index
from .derivatives import negate_expr


@dataclass(frozen=True, slots=True)
class FactorProduct:
    """`coefficient * over... / under...`, all of the same floating-point type."""

    coefficient: float
    over: tuple[Expr, ...] = ()
    under: tuple[Expr, ...] = ()

    def divide_by(self, other: FactorProduct) -> FactorProduct:
        return FactorProduct(self.coefficient / other.coefficient, self.over + other.under, self.under + other.over)

    def multiply_by(self, other: FactorProduct) -> FactorProduct:
        return FactorProduct(self.coefficient * other.coefficient, self.over + other.over, self.under + other.under)

    def split(self, holds: Callable[[Expr], bool]) -> tuple[FactorProduct, FactorProduct]:
        """Split off the factors for which `holds` is true, with the coefficient, from the others."""
        over, under = [x for x in self.over if not holds(x)], [x for x in self.under if not holds(x)]
        chosen = FactorProduct(self.coefficient, _remove_factors(self.over, over), _remove_factors(self.under, under))
        return chosen, FactorProduct(1.0, tuple(over), tuple(under))


def to_product(e: Expr, inner: str | None = None) -> FactorProduct:
    """A floating-point expression as a product of simplified factors; `inner` is the index of the innermost loop."""
    if sigmoid_argument(e) is not None:
        return FactorProduct(1.0, (e,))
    match e:
        case Const():
            return FactorProduct(float(e.value))
        case Unary(op="-", operand=x):
            return FactorProduct(-1.0).multiply_by(to_product(x, inner))
        case Binary(op="*", left=a, right=b):
            return to_product(a, inner).multiply_by(to_product(b, inner))
        case Binary(op="/", left=a, right=Const() as b):
            return to_product(a, inner).multiply_by(FactorProduct(1.0, (), (b,)))
        case Binary(op="/", left=a, right=b):
            return to_product(a, inner).divide_by(_as_one_factor(to_product(b, inner), e.dtype, inner))
        case Binary(op="+" | "-"):
            return _factor_out_common(list(_list_sum_terms(e, 1.0, inner)), e.dtype, inner)
        case Select(then=a, otherwise=b):
            return FactorProduct(
                1.0, (with_operands(e, (e.condition, simplify_product(a, inner), simplify_product(b, inner))),)
            )
    return FactorProduct(1.0, (e,))


def simplify_product(e: Expr, inner: str | None = None) -> Expr:
    """`e` rewritten as a product if it is floating-point, else `e`."""
    return product_to_expr(to_product(e, inner), e.dtype, inner) if e.dtype.is_float else e


def product_to_expr(p: FactorProduct, dtype: DType, inner: str | None = None) -> Expr:
    """A product as an expression, factors independent of `inner` first."""
    if p.coefficient == 0.0:
        return Const(0.0, dtype)
    if inner is not None:
        still, moving = p.split(lambda x: not uses_index(inner, x))
        if still.over and moving.over:
            return _multiply_exprs(product_to_expr(still, dtype), product_to_expr(moving, dtype), dtype)
    return _make_quotient_expr(p, dtype)


def _make_quotient_expr(p: FactorProduct, dtype: DType) -> Expr:
    sign, size = (-1.0, -p.coefficient) if p.coefficient < 0 else (1.0, p.coefficient)
    factors = list(p.over)
    if size != 1.0 or not factors:
        factors.insert(0, Const(size, dtype))
    out = reduce(lambda a, b: Binary("*", a, b, dtype), factors)
    if p.under:
        out = Binary("/", out, reduce(lambda a, b: Binary("*", a, b, dtype), p.under), dtype)
    return negate_expr(out) if sign < 0 else out


def _multiply_exprs(a: Expr, b: Expr, dtype: DType) -> Expr:
    if isinstance(a, Unary):
        return negate_expr(_multiply_exprs(a.operand, b, dtype))
    return Binary("*", a, b, dtype)


# --- sums ------------------------------------------------------------------------------------------------------------


def _list_sum_terms(e: Expr, sign: float, inner: str | None) -> Iterable[FactorProduct]:
    """The terms of a sum."""
    match e:
        case Binary(op="+" | "-", left=a, right=b):
            yield from _list_sum_terms(a, sign, inner)
            yield from _list_sum_terms(b, sign if e.op == "+" else -sign, inner)
        case Unary(op="-", operand=Binary(op="+" | "-") as x):
            yield from _list_sum_terms(x, -sign, inner)
        case _:
            yield FactorProduct(sign).multiply_by(to_product(e, inner))


def _factor_out_common(terms: list[FactorProduct], dtype: DType, inner: str | None) -> FactorProduct:
    """A sum as the product of its terms' common factors and of the remaining sum."""
    terms = _merge_equal_terms(terms)
    if not terms:
        return FactorProduct(0.0)
    if len(terms) == 1:
        return terms[0]
    over = reduce(_intersect_factors, (t.over for t in terms))
    under = reduce(_intersect_factors, (t.under for t in terms))
    rest = [FactorProduct(t.coefficient, _remove_factors(t.over, over), _remove_factors(t.under, under)) for t in terms]
    sign = -1.0 if all(t.coefficient < 0 for t in rest) else 1.0
    return FactorProduct(
        sign, (*over, _add_terms([replace(t, coefficient=sign * t.coefficient) for t in rest], dtype, inner)), under
    )


def _merge_equal_terms(terms: Sequence[FactorProduct]) -> list[FactorProduct]:
    """Merge terms with the same factors into one."""
    sums: dict[tuple[frozenset[tuple[Expr, int]], frozenset[tuple[Expr, int]]], FactorProduct] = {}
    for t in terms:
        key = _count_factors(t.over), _count_factors(t.under)
        before = sums.get(key)
        sums[key] = t if before is None else replace(before, coefficient=before.coefficient + t.coefficient)
    return [t for t in sums.values() if t.coefficient]


def _add_terms(terms: Sequence[FactorProduct], dtype: DType, inner: str | None) -> Expr:
    first = next((n for n, t in enumerate(terms) if t.coefficient > 0), 0)
    out = product_to_expr(terms[first], dtype, inner)
    for n, t in enumerate(terms):
        if n != first:
            op = "-" if t.coefficient < 0 else "+"
            out = Binary(op, out, product_to_expr(replace(t, coefficient=abs(t.coefficient)), dtype, inner), dtype)
    return out


def _as_one_factor(p: FactorProduct, dtype: DType, inner: str | None) -> FactorProduct:
    """A divisor with its coefficient kept as a factor: dividing by a number is not multiplying by its inverse."""
    return p if p.coefficient in (1.0, -1.0) else FactorProduct(1.0, (product_to_expr(p, dtype, inner),))


def _count_factors(xs: Iterable[Expr]) -> frozenset[tuple[Expr, int]]:
    counts: dict[Expr, int] = {}
    for x in xs:
        counts[x] = counts.get(x, 0) + 1
    return frozenset(counts.items())


def _intersect_factors(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The common elements of both, with multiplicity."""
    return _remove_factors(a, _remove_factors(a, b))


def _remove_factors(a: Iterable[Expr], b: Iterable[Expr]) -> tuple[Expr, ...]:
    """`a` without the elements of `b`, with multiplicity."""
    left = list(b)
    out = []
    for x in a:
        if x in left:
            left.remove(x)
        else:
            out.append(x)
    return tuple(out)


# --- stored products -------------------------------------------------------------------------------------------------


def is_batched_product(value: Expr, left: Sequence[str]) -> bool:
    """Whether each of two factors has an index of `left` that the other lacks, and both have a common one."""
    while isinstance(value, Select):
        value = value.then
    if not (isinstance(value, Binary) and value.op == "*"):
        return False
    first, second = (
        {x.name for x in walk_expr(factor) if isinstance(x, Index) and x.name in left}
        for factor in (value.left, value.right)
    )
    return bool(first & second and first - second and second - first)


@dataclass(frozen=True, slots=True)
class NamedProduct:
    """An element `access` of a tensor that holds a product."""

    access: Access
    value: FactorProduct


def with_named_products(
    p: FactorProduct, names: Sequence[NamedProduct], exists: Callable[[Access], bool]
) -> FactorProduct:
    """`p` with products replaced by the elements of tensors that store them, if these elements exist."""
    for named in names:
        while (found := _replace_named(p, named, exists)) is not None:
            p = found
    return p


def _replace_named(p: FactorProduct, named: NamedProduct, exists: Callable[[Access], bool]) -> FactorProduct | None:
    """`p` with `named` substituted once for matching factors; None if they do not match."""
    mapping: dict[str, Expr] | None = {}
    over, under = list(p.over), list(p.under)
    for pattern, factors in ((named.value.over, over), (named.value.under, under)):
        for wanted in pattern:
            for n, x in enumerate(factors):
                if mapping is not None and (longer := unify(wanted, x, mapping)) is not None:
                    mapping = longer
                    del factors[n]
                    break
            else:
                return None
    if mapping is None or any(isinstance(e, Index) and e.name not in mapping for e in named.access.subscripts):
        return None
    subscripts = tuple(mapping[e.name] if isinstance(e, Index) else e for e in named.access.subscripts)
    element = replace(named.access, subscripts=subscripts)
    if not exists(element):
        return None
    return FactorProduct(p.coefficient / named.value.coefficient, (element, *over), tuple(under))


def unify(pattern: Expr, e: Expr, mapping: dict[str, Expr]) -> dict[str, Expr] | None:
    """Extend `mapping` from indices to expressions so that `pattern` becomes `e`; None if that is impossible."""
    if isinstance(pattern, Index):
        if mapping.get(pattern.name, e) != e:
            return None
        return {**mapping, pattern.name: e}
    inner, found = operands_of(pattern), operands_of(e)
    if type(pattern) is not type(e) or len(inner) != len(found) or with_operands(pattern, found) != e:
        return None
    for a, b in zip(inner, found, strict=True):
        longer = unify(a, b, mapping)
        if longer is None:
            return None
        mapping = longer
    return mapping
