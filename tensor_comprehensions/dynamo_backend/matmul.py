"""Matrix products, lookups and attention as formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from ..core.dtypes import BOOL, INT64
from .index_views import Value, align_values, broadcast_value, of_shape
from .literals import Unsupported
from .op_table import (
    FLOPS,
    MULTI_OUTPUT_OPS,
    Parts,
    TranslationContext,
    add_scaled,
    aten,
    num_elements,
    operation,
    pointwise,
    reduce_dims,
    size_of,
    to_values,
)

FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def einsum_value(c: TranslationContext, equation: str, a: Value, b: Value) -> Value:
    """The sum of products that `equation` describes."""
    if not c.dtype.is_float:
        raise Unsupported(f"products of {c.dtype} stay with torch")
    a, b = (x if x.access else c.body.materialize(x) for x in (a, b))
    return c.body.add_contraction(a, b, equation)


@operation(aten.mm.default)
def mm(c: TranslationContext, a: Value, b: Value) -> Value:
    return einsum_value(c, "mk,kn->mn", a, b)


@operation(aten.bmm.default)
def bmm(c: TranslationContext, a: Value, b: Value) -> Value:
    return einsum_value(c, "bmk,bkn->bmn", a, b)


@operation(aten.addmm.default)
def addmm(c: TranslationContext, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    return add_scaled(c, "+", _times(c, bias, beta), _times(c, mm(c, a, b), alpha), 1)


def _times(c: TranslationContext, x: Value, factor: Any) -> Value:
    return x if factor == 1 else pointwise(replace(c, shape=x.shape), "({0} * {1})", to_values(c, x, factor))


@operation(aten.embedding.default)
def embedding(c: TranslationContext, table: Value, words: Value, *_: Any) -> Value:
    return _look_up(c, table, 0, words)


@operation(aten.index_select.default)
def index_select(c: TranslationContext, x: Value, d: int, words: Value) -> Value:
    return _look_up(c, x, d % max(1, len(x.shape)), words)


@operation(aten.index.Tensor)
def index(c: TranslationContext, x: Value, indices: Sequence[Value | None]) -> Value:
    """Indices below 0 count from the end."""
    given = [(d, words) for d, words in enumerate(indices) if words is not None]
    if len(given) != 1:
        raise Unsupported("a lookup by several indices")
    ((d, words),) = given
    return _look_up(c, x, d, words, from_end=True)


def _look_up(c: TranslationContext, x: Value, d: int, words: Value, *, from_end: bool = False) -> Value:
    """`x` with the dimensions of `words`, which give indices, in place of dimension `d`."""
    if words.dtype != INT64 or not x.shape or len(x.groups[d]) != 1:
        raise Unsupported("not a lookup in one dimension")
    table, words = (v if v.access else c.body.materialize(v) for v in (x, words))
    start, stop = (sum(map(len, table.groups[:d])) + n for n in (0, len(words.loops)))

    def element_text(i: Sequence[str]) -> str:
        word = words.at(i[start:stop])
        word = f"({word} < 0 ? {word} + {table.shape[d]} : {word})" if from_end else word
        return table.at([*i[:start], word, *i[stop:]])

    return Value((*table.groups[:d], *words.groups, *table.groups[d + 1 :]), element_text, c.dtype)


@operation(aten.index_add.default)
def index_add(c: TranslationContext, x: Value, d: int, words: Value, source: Value, *, alpha: Any = 1) -> Value:
    if words.dtype != INT64 or c.dtype == BOOL or not x.shape or not source.shape:
        raise Unsupported("not a sum by index")
    d %= len(x.shape)
    rows = source.groups[d]
    if not (len(rows) == len(x.groups[d]) == 1 and words.groups == (rows,)):
        raise Unsupported("not a sum by index in one dimension")
    if source.groups != (*x.groups[:d], rows, *x.groups[d + 1 :]):
        raise Unsupported("rows that fall apart differently")
    words = words if words.access else c.body.materialize(words)
    place = sum(map(len, x.groups[:d]))
    term = _times(c, source, alpha)
    return c.body.add_scattered(x, term, lambda i: [*i[:place], words.at([i[place]]), *i[place + 1 :]])


# --- attention ---------------------------------------------------------------------------------------------------


def attention(
    c: TranslationContext, q: Value, k: Value, v: Value, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Parts:  # fmt: skip
    """The result, and the logarithm of the sums of exponentials.

    Both are 0 in rows that a mask excludes altogether, as torch has them.
    """
    scores = _scores(c, q, k, v, dropout, causal, attn_mask, scale)
    rows = (*scores.shape[:3], 1)
    greatest = reduce_dims(_in(c, rows), scores, [3], True, "max")
    if attn_mask is not None:
        greatest = pointwise(_in(c, rows), "({0} == (-inf) ? 0 : {0})", [greatest])
    powers = c.body.materialize(pointwise(_in(c, scores.shape), "exp({0} - {1})", [scores, greatest]))
    totals = reduce_dims(_in(c, rows), powers, [3], True, "+")

    def result() -> Value:
        mixed = einsum_value(c, "bhij,bhje->bhie", powers, v)
        quotient = "({0} / {1})" if attn_mask is None else "({1} == 0 ? 0 : {0} / {1})"
        return pointwise(c, quotient, [mixed, totals])

    def logarithms() -> Value:
        logarithm = "({0} + log({1}))" if attn_mask is None else "({1} == 0 ? 0 : {0} + log({1}))"
        whole = pointwise(_in(c, rows), logarithm, [greatest, totals])
        return replace(whole, groups=whole.groups[:3])

    return result, logarithms


def attention_backward(
    c: TranslationContext, g: Value, q: Value, k: Value, v: Value, out: Value, logarithms: Value, dropout: float,
    causal: bool, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Parts:  # fmt: skip
    """The gradients by queries, keys and values."""
    scores = _scores(c, q, k, v, dropout, causal, attn_mask, scale)
    inner, rows = _in(c, scores.shape), (*scores.shape[:3], 1)
    along = replace(logarithms, groups=(*logarithms.groups, ()), tensor="")
    weights = c.body.materialize(pointwise(inner, "exp({0} - {1})", [scores, along]))
    both = pointwise(_in(c, g.shape), "({0} * {1})", [g, out])
    delta = reduce_dims(_in(c, rows), both, [3], True, "+")
    upstream = einsum_value(inner, "bhie,bhje->bhij", g, v)
    parts = to_values(inner, weights, upstream, delta, _scale(q, scale))
    change = c.body.materialize(pointwise(inner, "({0} * ({1} - {2}) * {3})", parts))
    return (
        lambda: einsum_value(c, "bhij,bhje->bhie", change, k),
        lambda: einsum_value(c, "bhij,bhie->bhje", change, q),
        lambda: einsum_value(c, "bhij,bhie->bhje", weights, g),
    )


def _scores(
    c: TranslationContext, q: Value, k: Value, v: Value, dropout: float, causal: bool, mask: Any, scale: float | None
) -> Value:
    """The arguments of the exponentials: products of queries and keys, plus a mask, -inf for later keys."""
    if dropout or k.shape != v.shape or q.shape[:2] != k.shape[:2]:
        raise Unsupported("attention with dropout or with groups of heads")
    shape = (*q.shape[:3], k.shape[2])
    inner = _in(c, shape)
    scores = einsum_value(inner, "bhie,bhje->bhij", q, k)
    scaled = pointwise(inner, "({0} * {1})", to_values(inner, scores, _scale(q, scale)))
    if mask is not None:
        scaled = pointwise(inner, "({0} + {1})", to_values(inner, scaled, mask))
    if not causal:
        return scaled
    row = broadcast_value(of_shape((shape[2], 1), lambda i: i[0] if i else "0", INT64, constant=True), shape)
    column = broadcast_value(of_shape(shape[3:], lambda i: i[0] if i else "0", INT64, constant=True), shape)
    a, r, j = align_values([scaled, row, column])
    return Value(a.groups, lambda i: f"({j.at(i)} <= {r.at(i)} ? {a.at(i)} : (-inf))", c.dtype)


def _scale(q: Value, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else float(scale)


def _in(c: TranslationContext, shape: Sequence[int]) -> TranslationContext:
    return replace(c, shape=tuple(shape))


MULTI_OUTPUT_OPS[FLASH] = attention
MULTI_OUTPUT_OPS[FLASH_BACKWARD] = attention_backward


def _product_of(argument: int, dimension: int) -> Callable[[fx.Node], int]:
    return lambda node: 2 * num_elements(node) * size_of(node, argument, dimension)


FLOPS[aten.mm.default] = FLOPS[aten.bmm.default] = _product_of(0, -1)
FLOPS[aten.addmm.default] = _product_of(1, -1)
FLOPS[FLASH] = lambda node: 4 * num_elements(node) * size_of(node, 1, 2)
FLOPS[FLASH_BACKWARD] = lambda node: 10 * math.prod(node.args[1].meta["val"].shape) * size_of(node, 2, 2)  # type: ignore[union-attr]
