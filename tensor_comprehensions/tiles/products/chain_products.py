"""Recognize chains of two products: the left factor of the second is computed from the sums of the first.

Between them may be pointwise statements, as between two layers, or a softmax, as in attention: `T max=! S;
W = exp((S - T) * c); L +=! W; O +=! half(W) * V; O = O / L`. The softmax becomes an online one, which rescales the sums
when the running maximum grows: "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018). If the def
divides the weights by their sum before rounding them, the sums are divided at the end: each is rounded once in either
order.

If masks restrict all statements from the scores on to the same domain, they restrict the chain, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.dtypes import FLOAT32
from ...core.internal_names import internal_name
from ...structured.match.product_matching import replace_element_reads
from ...structured.op import ACCUMULATOR
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, Role, map_operands, walk_expr
from ...tc_lang.reference.numpy_expression import NumpyExpressionEvaluator
from ...tc_lang.transforms.extract_statements import tensors_of_statements
from .product_region import LARGEST, TOTAL, ChainedFactor, FactorPair, ProductFactor, ProductRegion, Softmax

FindRegion = Callable[[BoundFunction, int], ProductRegion | None]
Names = Mapping[str, str]
MOST_BETWEEN = 5
"""The maximum number of statements between two products: maximum, its rounding, weights, their sum, the division."""


def extend_by_chain(
    function: BoundFunction, restricted: BoundFunction, inner: ProductRegion, at: int, region_at: FindRegion
) -> ProductRegion:
    """`inner`, extended by the product whose left factor depends only on it; or `inner` itself if there is none.

    Args:
        restricted: `function` with masks as domains; a chain found in it is preferred.
        at: the position of the first statement of `inner`.
        region_at: returns the region that begins at a statement, or None.
    """
    found = None if restricted is function else _find_chain(restricted, inner, at, region_at)
    found = found or _find_chain(function, inner, at, region_at)
    return found or inner


def _find_chain(function: BoundFunction, inner: ProductRegion, at: int, region_at: FindRegion) -> ProductRegion | None:
    """The chain that begins with `inner`, or None."""
    first = at + len(inner.statements)
    if len(inner.pairs) > 1 or inner.others or inner.total != FLOAT32 or inner.pairs[0].left.rounding:
        return None
    for skipped in range(MOST_BETWEEN + 1):
        if first + skipped >= len(function.statements):
            break
        outer = region_at(function, first + skipped)
        if outer is None:
            continue
        between = function.statements[first : first + skipped]
        found = _Chain(function, inner, between, outer).join()
        return None if found is None or _used_elsewhere(function, found, at) else found
    return None


def _used_elsewhere(function: BoundFunction, region: ProductRegion, at: int) -> bool:
    """Whether other statements, or the caller, use a tensor that the chain would keep in registers."""
    end = at + len(region.statements)
    others = tensors_of_statements((*function.statements[:at], *function.statements[end:]))
    held = {s.target for s in region.statements} - {region.contraction.output.tensor}
    roles = {t.name: t.role for t in function.tensors}
    return any(roles[n] is not Role.TEMPORARY or n in others.read or n in others.written for n in held)


class _Chain:
    """Two products and the statements between them."""

    def __init__(
        self, function: BoundFunction, inner: ProductRegion, between: Sequence[BoundStatement], outer: ProductRegion
    ) -> None:
        self.function, self.inner, self.between, self.outer = function, inner, between, outer

    def join(self) -> ProductRegion | None:
        """The chain as one region, with the index names of the second product; None if they do not match."""
        outer, held = self.outer, self.inner.contraction.output.tensor
        if len(outer.pairs) > 1 or outer.others or outer.pairs[0].left.rounding:
            return None
        pair, divided = outer.pairs[0], self._inline_division(outer.pairs[0].left.value)
        between = self.between if divided is None else self.between[:-1]
        factor = pair.left.value if divided is None else divided
        weights = between[-1 if not _is_sum(between) else -2].target if len(between) > 1 else held
        element = _only_read(weights, factor)
        if element is None or _only_read(weights, pair.right.value) or not _is_plain(element):
            return None
        softmax, scores = None, element
        if between:
            found = self._softmax(between, element)
            if found is None:
                return None
            softmax, scores = found
        inner = self._renamed_inner(scores)
        if inner is None:
            return None
        return self._join(inner, softmax, _name_reads(factor, element, ACCUMULATOR))

    def _join(self, inner: ProductRegion, softmax: Softmax | None, factor: tc.Expr) -> ProductRegion | None:
        """The chain with the left factor `factor`; None if it reads intermediate results other than one element."""
        outer = self.outer
        pair, c = outer.pairs[0], outer.contraction
        total, epilogue, value = None, c.epilogue, factor
        if softmax is not None and softmax.total is not None:
            total = softmax.total
            epilogue = None if epilogue is None else _name_reads(epilogue, total, TOTAL)
            value = _without_division(factor, total) or factor
            if value != factor and c.initial is not None:
                return None
            epilogue = epilogue if value == factor else _divide_sum(epilogue)
        own = {s.target for s in (*self.inner.statements, *self.between)}
        roots = [x for x in (pair.right.value, value, c.initial, epilogue) if x is not None]
        if any(isinstance(e, tc.Access) and e.tensor in own for x in roots for e in walk_expr(x)):
            return None
        statements = (*self.inner.statements, *self.between, *outer.statements)
        contraction = replace(
            c, statements=statements, update=c.update + len(statements) - len(outer.statements), epilogue=epilogue
        )
        pairs = (FactorPair(ProductFactor(value), pair.right, pair.terms),)
        return replace(outer, contraction=contraction, chain=ChainedFactor(inner, softmax), pairs=pairs)

    def _inline_division(self, factor: tc.Expr) -> tc.Expr | None:
        """`factor` with the last statement inlined, if that divides the weights by their sum; else None."""
        if len(self.between) < 2 or not _is_sum(self.between[:-1]):
            return None
        s = self.between[-1]
        read = _only_read(s.target, factor)
        names = None if read is None else _match_names(tc.Access(s.target, s.subscripts, read.dtype), read)
        if read is None or names is None or s.reduction is not None or not self._fits(s, names):
            return None
        return replace_element_reads(factor, read, _rename_expr_indices(s.value, names))

    def _renamed_inner(self, scores: tc.Access) -> ProductRegion | None:
        """The first product with the index names of the second, which reads its element `scores`; or None."""
        inner, outer = self.inner, self.outer
        (pair,), output = inner.pairs, inner.contraction.output
        names = _match_names(output, scores)
        if names is None:
            return None
        names |= {i.name: internal_name(i.name, "inner") for i in pair.terms}
        rows, columns, batch = (_rename_indices(x, names) for x in (inner.rows, inner.columns, inner.batch))
        left, right = (ProductFactor(_rename_expr_indices(f.value, names)) for f in (pair.left, pair.right))
        if set(columns) == set(outer.rows):
            rows, columns, left, right = columns, rows, right, left
        terms = outer.pairs[0].terms
        same = (set(rows), set(columns), set(batch)) == (set(outer.rows), set(terms), set(outer.batch))
        if not same or len(pair.terms) > 1 or left.dtype != right.dtype:
            return None
        c = inner.contraction
        contraction = replace(
            c, output=scores, initial=None if c.initial is None else _rename_expr_indices(c.initial, names),
            epilogue=None if c.epilogue is None else _rename_expr_indices(c.epilogue, names),
        )  # fmt: skip
        pairs = (FactorPair(left, right, _rename_indices(pair.terms, names)),)
        return replace(inner, contraction=contraction, pairs=pairs, rows=outer.rows, columns=terms, batch=outer.batch)

    # --- softmax -------------------------------------------------------------------------------------------------

    def _softmax(self, statements: Sequence[BoundStatement], element: tc.Access) -> tuple[Softmax, tc.Access] | None:
        """The softmax between the products, and the score from which the weight `element` is computed; or None."""
        between, held = list(statements), self.inner.contraction.output.tensor
        total = between.pop() if _is_sum(between) else None
        if len(between) < 2 or not all(map(_is_pointwise_or_row, self.between)):
            return None
        maximum, *rounding, weight = between
        names = _match_names(tc.Access(weight.target, weight.subscripts, element.dtype), element)
        if names is None or weight.reduction is not None or not self._fits(weight, names):
            return None
        value = _rename_expr_indices(weight.value, names)
        scores, largest = _only_read(held, value), _only_read((rounding or [maximum])[-1].target, value)
        if scores is None or largest is None or not _is_plain(scores):
            return None
        if rounding and (len(rounding) > 1 or not _is_exact_copy(rounding[0], maximum, scores)):
            return None
        top = self._maximum(maximum, scores, largest)
        weighted = _name_reads(_name_reads(value, scores, ACCUMULATOR), largest, LARGEST)
        known = _match_exponential(weighted)
        if top is None or known is None or not _masks_agree(top, weighted):
            return None
        summed = None if total is None else self._total(total, element)
        if total is not None and summed is None:
            return None
        return Softmax(top, weighted, *known, total=summed), scores

    def _maximum(self, s: BoundStatement, scores: tc.Access, largest: tc.Access) -> tc.Expr | None:
        """The operand of the maximum over the scores; None if the statement is not a maximum along rows."""
        read = _only_read(scores.tensor, s.value)
        names = None if read is None else _match_names(read, scores)
        if read is None or names is None or s.reduction != "max" or not s.initialize or not self._fits(s, names):
            return None
        if [_rename_expr_indices(e, names) for e in s.subscripts] != [*largest.subscripts]:
            return None
        return _name_reads(_rename_expr_indices(s.value, names), scores, ACCUMULATOR)

    def _total(self, s: BoundStatement, element: tc.Access) -> tc.Access | None:
        """The element that holds the sum of a row of weights; None if the statement is not such a sum."""
        read = s.value
        names = _match_names(read, element) if isinstance(read, tc.Access) and read.tensor == element.tensor else None
        if names is None or not s.initialize or not self._fits(s, names):
            return None
        return tc.Access(s.target, tuple(_rename_expr_indices(e, names) for e in s.subscripts), s.value.dtype)

    def _fits(self, s: BoundStatement, names: Names) -> bool:
        """Whether a statement covers all rows and terms of the second product, and reduces along rows if at all."""
        region = self.outer
        known = {*region.rows, *region.batch, *region.pairs[0].terms}
        mine = {replace(i, name=names.get(i.name, "")) for i in s.indices}
        free = {replace(i, name=names.get(i.name, "")) for i in s.free}
        rows = {*region.rows, *region.batch}
        domain = {g.rename_indices(names) for g in s.domain} if mine == known else None
        return domain == {*region.domain} and (s.reduction is None or free == rows)


def _without_division(factor: tc.Expr, total: tc.Access) -> tc.Expr | None:
    """The rounded weight if `factor` is the rounded quotient of the weight and its row's sum; else None."""
    quotient = tc.Binary("/", tc.Index(ACCUMULATOR, FLOAT32), total, FLOAT32)
    if not isinstance(factor, tc.Cast) or factor.operand != quotient:
        return None
    return tc.Cast(tc.Index(ACCUMULATOR, FLOAT32), factor.dtype)


def _divide_sum(epilogue: tc.Expr | None) -> tc.Expr:
    """The epilogue with the sum divided by the sum of weights first."""
    quotient = tc.Binary("/", tc.Index(ACCUMULATOR, FLOAT32), tc.Index(TOTAL, FLOAT32), FLOAT32)
    if epilogue is None:
        return quotient

    def divide(e: tc.Expr) -> tc.Expr:
        return quotient if e == tc.Index(ACCUMULATOR, FLOAT32) else map_operands(e, divide)

    return divide(epilogue)


def _is_sum(between: Sequence[BoundStatement]) -> bool:
    return bool(between) and between[-1].reduction == "+"


def _is_pointwise_or_row(s: BoundStatement) -> bool:
    plain = all(isinstance(e, tc.Index) for e in s.subscripts)
    return plain and not (s.checks or s.reads_own_target)


def _is_exact_copy(s: BoundStatement, maximum: BoundStatement, scores: tc.Access) -> bool:
    """Whether a statement only converts the maximum back to the type of the scores, which is exact."""
    if s.reduction is not None or not isinstance(s.value, tc.Cast) or s.value.dtype != scores.dtype:
        return False
    source = s.value.operand
    return isinstance(source, tc.Access) and (source.tensor, source.subscripts) == (maximum.target, s.subscripts)


def _match_exponential(weight: tc.Expr) -> tuple[str, float] | None:
    """The (function, scale) of a weight `exp((score - largest) * scale)`, perhaps masked to 0; None for others."""
    match weight:
        case tc.Select(_, then, tc.Const(value)) if value == 0:
            return _match_exponential(then)
        case tc.Call(function=("exp" | "exp2") as name, arguments=(tc.Binary("*", left, right),)):
            for a, b in ((left, right), (right, left)):
                if _is_difference(a) and (scale := _positive_constant(b)) is not None:
                    return name, scale
        case tc.Call(function=("exp" | "exp2") as name, arguments=(tc.Binary("/", left, right),)):
            if _is_difference(left) and (scale := _positive_constant(right)) is not None:
                return name, 1 / scale
        case tc.Call(function=("exp" | "exp2") as name, arguments=(operand,)) if _is_difference(operand):
            return name, 1.0
    return None


def _is_difference(e: tc.Expr) -> bool:
    """Whether `e` is `score - largest`."""
    return e == tc.Binary("-", tc.Index(ACCUMULATOR, FLOAT32), tc.Index(LARGEST, FLOAT32), FLOAT32)


def _positive_constant(e: tc.Expr) -> float | None:
    if any(isinstance(x, tc.Index | tc.Access) for x in walk_expr(e)):
        return None
    value = float(NumpyExpressionEvaluator({}, _read_nothing)(e))
    return value if 0 < value < float("inf") else None


def _read_nothing(*_: Any) -> Any:
    raise AssertionError("a constant reads no tensor")


def _masks_agree(largest: tc.Expr, weight: tc.Expr) -> bool:
    """Whether the maximum is over all scores, or masked with -inf exactly where the weights are masked to 0."""
    scores = tc.Index(ACCUMULATOR, FLOAT32)
    match largest:
        case tc.Select(condition, then, tc.Const(value)) if then == scores:
            return value == -float("inf") and isinstance(weight, tc.Select) and weight.condition == condition
    return largest == scores


# --- names -------------------------------------------------------------------------------------------------------


def _only_read(tensor: str, e: tc.Expr) -> tc.Access | None:
    """The only element of `tensor` that an expression reads; None if it reads none, or several."""
    found = {x for x in walk_expr(e) if isinstance(x, tc.Access) and x.tensor == tensor}
    return found.pop() if len(found) == 1 else None


def _is_plain(element: tc.Access) -> bool:
    """Whether the subscripts are distinct indices."""
    names = [e.name for e in element.subscripts if isinstance(e, tc.Index)]
    return len(names) == len(element.subscripts) == len(set(names))


def _match_names(mine: tc.Access, other: tc.Access) -> dict[str, str] | None:
    """The index names of `mine` mapped to those of `other`; None if a subscript is not a bare, distinct index."""
    if not _is_plain(mine) or not _is_plain(other):
        return None
    pairs = zip(mine.subscripts, other.subscripts, strict=True)
    return {a.name: b.name for a, b in pairs if isinstance(a, tc.Index) and isinstance(b, tc.Index)}


def _name_reads(e: tc.Expr, element: tc.Access, name: str) -> tc.Expr:
    """`e` with every read of `element` replaced by the float32 variable `name`, which holds its value."""
    number = tc.Index(name, FLOAT32)
    if e == element:
        return number if element.dtype == FLOAT32 else tc.Cast(number, element.dtype)
    if isinstance(e, tc.Cast) and e.operand == element and e.dtype == FLOAT32:
        return number
    return map_operands(e, lambda x: _name_reads(x, element, name))


def _rename_expr_indices(e: tc.Expr, names: Names) -> tc.Expr:
    if isinstance(e, tc.Index):
        return replace(e, name=names.get(e.name, e.name))
    return map_operands(e, lambda x: _rename_expr_indices(x, names))


def _rename_indices(indices: Sequence[BoundIndex], names: Names) -> tuple[BoundIndex, ...]:
    return tuple(replace(i, name=names.get(i.name, i.name)) for i in indices)
