"""Matrix products, lookups and attention as formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import fx

from ..core.dtypes import BOOL, INT64
from .def_builder import selects_constants
from .index_views import Value, align_values, broadcast_value, of_shape, reshape_value
from .literals import Unsupported, compute_dtype, format_literal
from .op_table import (
    FLOPS,
    MULTI_OUTPUT_OPS,
    Parts,
    TranslationContext,
    add_scaled,
    aten,
    expand,
    num_elements,
    operation,
    pointwise,
    reduce_dims,
    size_of,
    to_values,
)

FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def einsum_value(c: TranslationContext, equation: str, a: Value, b: Value, triangle: str = "") -> Value:
    """The sum of products that `equation` describes; `triangle` as in `DefBuilder.add_contraction`."""
    if not c.dtype.is_float:
        raise Unsupported(f"products of {c.dtype} stay with torch")
    a, b = map(c.body.materialize_rounded, (a, b))  # 16-bit factors, which some processors multiply in pairs
    return c.body.add_contraction(a, b, equation, triangle)


@operation(aten.mm.default)
def mm(c: TranslationContext, a: Value, b: Value) -> Value:
    return einsum_value(c, "mk,kn->mn", a, b)


@operation(aten.bmm.default)
def bmm(c: TranslationContext, a: Value, b: Value) -> Value:
    return einsum_value(c, "bmk,bkn->bmn", a, b)


@operation(aten.addmm.default)
def addmm(c: TranslationContext, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    product = _multiply_by_factor(c, mm(c, a, b), alpha)
    if beta == 0:  # then torch does not read the bias, which may be NaN
        return product
    return add_scaled(c, "+", _multiply_by_factor(c, bias, beta), product, 1)


def _multiply_by_factor(c: TranslationContext, x: Value, factor: Any) -> Value:
    return x if factor == 1 else pointwise(replace(c, shape=x.shape), "({0} * {1})", to_values(c, x, factor))


@operation(aten.embedding.default)
def embedding(c: TranslationContext, table: Value, words: Value, *_: Any) -> Value:
    return _look_up(c, table, 0, words)


@operation(aten.index_select.default)
def index_select(c: TranslationContext, x: Value, d: int, words: Value) -> Value:
    return _look_up(c, x, d % max(1, len(x.shape)), words)


@operation(aten.index.Tensor)
def index(c: TranslationContext, x: Value, indices: Sequence[Value | None]) -> Value:
    """Indices below 0 count from the end. Several must be for dimensions in a row, and of the same loops."""
    given = [(d, words) for d, words in enumerate(indices) if words is not None]
    if len(given) == 1:
        ((d, words),) = given
        return _look_up(c, x, d, words, from_end=True)
    first, stop = given[0][0], given[-1][0] + 1
    if stop - first != len(given) or any(len(g) != 1 for g in x.groups[first:stop]):
        raise Unsupported("a lookup by several indices that are not in a row")
    if any(words.dtype != INT64 for _, words in given):
        raise Unsupported("a lookup by masks")
    table, *found = (v if v.access else c.body.materialize(v) for v in (x, *(words for _, words in given)))
    shape = np.broadcast_shapes(*(words.shape for words in found))
    found = align_values([broadcast_value(words, shape) for words in found])
    before = sum(map(len, table.groups[:first]))
    after = before + len(found[0].loops)

    def element_text(i: Sequence[str]) -> str:
        own = i[before:after]
        rows = (_row(w.at(own), n, from_end=True) for w, n in zip(found, table.shape[first:stop], strict=True))
        return table.at([*i[:before], *rows, *i[after:]])

    return Value((*table.groups[:first], *found[0].groups, *table.groups[stop:]), element_text, c.dtype)


def _look_up(c: TranslationContext, x: Value, d: int, words: Value, *, from_end: bool = False) -> Value:
    """`x` with the dimensions of `words`, which give indices, in place of dimension `d`."""
    if words.dtype != INT64 or not x.shape or len(x.groups[d]) != 1:
        raise Unsupported("not a lookup in one dimension")
    table, words = (v if v.access else c.body.materialize(v) for v in (x, words))
    start, stop = (sum(map(len, table.groups[:d])) + n for n in (0, len(words.loops)))

    def element_text(i: Sequence[str]) -> str:
        word = words.at(i[start:stop])
        return table.at([*i[:start], _row(word, table.shape[d], from_end=from_end), *i[stop:]])

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
    term = _multiply_by_factor(c, source, alpha)
    return c.body.add_scattered(x, term, lambda i: [*i[:place], words.at([i[place]]), *i[place + 1 :]])


@operation(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    c: TranslationContext, g: Value, words: Value, _: int, padding: int, by_frequency: bool
) -> Value:
    if by_frequency or words.dtype != INT64:
        raise Unsupported("gradients scaled by how often a word occurs")
    words = words if words.access else c.body.materialize(words)
    count = len(words.loops)

    def element_text(i: Sequence[str]) -> str:
        return f"({words.at(i[:count])} == {padding} ? 0.0 : {g.at(i)})"

    g, words = _align_rows(g, words)
    return _add_rows(c, _zeros(c), words, g if padding < 0 else Value(g.groups, element_text, g.dtype))


@operation(aten.index_put.default)
def index_put(
    c: TranslationContext, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """Sums at one index per row; indices below 0 count from the end."""
    given = [(d, words) for d, words in enumerate(indices) if words is not None]
    if len(given) != 1 or given[0][0] != 0 or not accumulate or c.dtype == BOOL:
        raise Unsupported("not a sum at one index of the first dimension")
    words = given[0][1]
    term = expand(_replace_context_shape(c, (*words.shape, *x.shape[1:])), values, ())
    term, words = _align_rows(term, words if words.access else c.body.materialize(words))
    return _add_rows(c, x, words, term, from_end=True)


def _align_rows(term: Value, words: Value) -> tuple[Value, Value]:
    """`term` and `words` with the same loops in the dimensions of `words`, which are the first of `term`."""
    term, words = align_values([term, words], len(words.groups))
    return term, words


def _zeros(c: TranslationContext) -> Value:
    return of_shape(c.shape, lambda i: format_literal(0, compute_dtype(c.dtype)), c.dtype, constant=True)


def _add_rows(c: TranslationContext, x: Value, words: Value, term: Value, *, from_end: bool = False) -> Value:
    """`x` with the elements of `term` added to its rows, which `words` gives for the first dimensions of `term`."""
    count = len(words.loops)
    if words.dtype != INT64 or len(x.groups[0]) != 1 or term.loops[count:] != x.loops[1:]:
        raise Unsupported("not a sum by index in one dimension")

    def subscripts(i: Sequence[str]) -> Sequence[str]:
        return [_row(words.at(i[:count]), x.shape[0], from_end=from_end), *i[count:]]

    return c.body.add_scattered(x, term, subscripts)


def _row(word: str, size: int, *, from_end: bool) -> str:
    return f"({word} < 0 ? {word} + {size} : {word})" if from_end else word


@operation(aten.gather.default)
def gather(c: TranslationContext, x: Value, d: int, words: Value, *, sparse_grad: bool = False) -> Value:
    table, words = (v if v.access else c.body.materialize(v) for v in (x, words))
    d, places = _places(table, d, words)
    return Value(words.groups, lambda i: table.at(places(i)), c.dtype)


@operation(aten.scatter_add.default)
def scatter_add(c: TranslationContext, x: Value, d: int, words: Value, source: Value) -> Value:
    words = words if words.access else c.body.materialize(words)
    d, places = _places(x, d, words)
    if any(len(g) > 1 for g in source.groups) or c.dtype == BOOL:
        raise Unsupported("not a sum of tensors with one loop for each dimension")
    if any(own != whole for k, (own, whole) in enumerate(zip(words.groups, x.groups, strict=True)) if k != d):
        raise Unsupported("sums at indices of a part of the tensor")
    kept = [bool(own) for own, group in zip(words.groups, source.groups, strict=True) if group]

    def element_text(i: Sequence[str]) -> str:
        rest = iter(i)
        return source.at([next(rest) if keep else "0" for keep in kept])

    return c.body.add_scattered(
        x, replace(source, groups=words.groups, at=element_text, access=False, tensor=""), places
    )


def _places(x: Value, d: int, words: Value) -> tuple[int, Callable[[Sequence[str]], list[str]]]:
    """`d`, not negative, and a function from indices in `words` to those in `x`; `words` gives the one in `d`."""
    if words.dtype != INT64 or not x.groups or any(len(g) > 1 for v in (x, words) for g in v.groups):
        raise Unsupported("not a lookup with one loop for each dimension")
    d %= len(x.groups)

    def places(i: Sequence[str]) -> list[str]:
        rest = iter(i)
        own = [next(rest) if g else "0" for g in words.groups]
        own[d] = words.at(i)
        return [text for text, group in zip(own, x.groups, strict=True) if group]

    return d, places


# --- attention ---------------------------------------------------------------------------------------------------


def attention(
    c: TranslationContext, q: Value, k: Value, v: Value, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Parts:  # fmt: skip
    """The result, and the logarithm of the sums of exponentials.

    Both are 0 in rows that a mask excludes altogether, as in torch.
    """
    k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    scores = _make_attention_scores(c, q, k, v, dropout, attn_mask, scale)
    rows = (*scores.shape[:3], 1)
    seen = _mask_later_keys(scores, "(-inf)") if causal else scores
    greatest = reduce_dims(_replace_context_shape(c, rows), seen, [3], True, "max")
    if attn_mask is not None:
        greatest = pointwise(_replace_context_shape(c, rows), "({0} == (-inf) ? 0 : {0})", [greatest])
    powers = pointwise(_replace_context_shape(c, scores.shape), "exp({0} - {1})", [scores, greatest])
    powers = c.body.materialize(_mask_later_keys(powers, "0.0") if causal else powers)
    totals = reduce_dims(_replace_context_shape(c, rows), powers, [3], True, "+")

    def result() -> Value:
        mixed = einsum_value(c, "bhij,bhje->bhie", powers, v, "ij" if causal else "")
        quotient = "({0} / {1})" if attn_mask is None else "({1} == 0 ? 0 : {0} / {1})"
        return pointwise(c, quotient, [mixed, totals])

    def logarithms() -> Value:
        logarithm = "({0} + log({1}))" if attn_mask is None else "({1} == 0 ? 0 : {0} + log({1}))"
        whole = pointwise(_replace_context_shape(c, rows), logarithm, [greatest, totals])
        return replace(whole, groups=whole.groups[:3])

    return result, logarithms


def attention_backward(
    c: TranslationContext, g: Value, q: Value, k: Value, v: Value, out: Value, logarithms: Value, dropout: float,
    causal: bool, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Parts:  # fmt: skip
    """The gradients by queries, keys and values."""
    heads, shared = q.shape[1], k.shape
    k, v = (_repeat_heads(x, heads) for x in (k, v))
    scores = _make_attention_scores(c, q, k, v, dropout, attn_mask, scale)
    inner, rows = _replace_context_shape(c, scores.shape), (*scores.shape[:3], 1)
    triangle = "ij" if causal else ""

    def materialize_masked(x: Value) -> Value:
        return c.body.materialize(_mask_later_keys(x, "0.0") if causal else x)

    along = replace(logarithms, groups=(*logarithms.groups, ()), tensor="")
    weights = materialize_masked(pointwise(inner, "exp({0} - {1})", [scores, along]))
    both = pointwise(_replace_context_shape(c, g.shape), "({0} * {1})", [g, out])
    delta = reduce_dims(_replace_context_shape(c, rows), both, [3], True, "+")
    upstream = einsum_value(inner, "bhie,bhje->bhij", g, v)
    parts = to_values(inner, weights, upstream, delta, _choose_attention_scale(q, scale))
    change = materialize_masked(pointwise(inner, "({0} * ({1} - {2}) * {3})", parts))

    def by_shared(scores: Value, rows: Value) -> Value:
        """Sums over the rows of all heads that share keys and values."""
        a, b = (reshape_value(x, (*shared[:2], heads // shared[1], *x.shape[2:])) for x in (scores, rows))
        return einsum_value(c, "bhgij,bhgie->bhje", a, b, triangle)

    return (
        lambda: einsum_value(c, "bhij,bhje->bhie", change, k, triangle),
        lambda: by_shared(change, q),
        lambda: by_shared(weights, g),
    )


def _repeat_heads(x: Value, heads: int) -> Value:
    """`x` with each head repeated for the neighboring query heads that share it."""
    batch, own, *rest = x.shape
    if heads == own or heads % own:
        return x
    apart = reshape_value(x, (batch, own, 1, *rest))
    return reshape_value(broadcast_value(apart, (batch, own, heads // own, *rest)), (batch, heads, *rest))


def _make_attention_scores(
    c: TranslationContext, q: Value, k: Value, v: Value, dropout: float, mask: Any, scale: float | None
) -> Value:
    """The arguments of the exponentials: scaled products of queries and keys plus `mask`."""
    if dropout or k.shape != v.shape or q.shape[:2] != k.shape[:2]:
        raise Unsupported("attention with dropout, or with keys and values of different shapes")
    inner = _replace_context_shape(c, (*q.shape[:3], k.shape[2]))
    scores = einsum_value(inner, "bhie,bhje->bhij", q, k)
    scaled = pointwise(inner, "({0} * {1})", to_values(inner, scores, _choose_attention_scale(q, scale)))
    if isinstance(mask, Value) and selects_constants(mask):
        mask = broadcast_value(mask, inner.shape)  # selecting again costs less than memory
    return scaled if mask is None else pointwise(inner, "({0} + {1})", to_values(inner, scaled, mask))


def _mask_later_keys(x: Value, neutral: str) -> Value:
    """`x`, whose last dimensions are queries and keys, with `neutral` for the keys after each query.

    Around all that uses a score, and with the neutral element of its sum, the mask saves the work of these keys.
    """
    row = broadcast_value(of_shape((x.shape[2], 1), lambda i: i[0] if i else "0", INT64, constant=True), x.shape)
    column = broadcast_value(of_shape(x.shape[3:], lambda i: i[0] if i else "0", INT64, constant=True), x.shape)
    a, r, j = align_values([x, row, column])
    return Value(a.groups, lambda i: f"({j.at(i)} <= {r.at(i)} ? {a.at(i)} : {neutral})", x.dtype)


def _choose_attention_scale(q: Value, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else float(scale)


def _replace_context_shape(c: TranslationContext, shape: Sequence[int]) -> TranslationContext:
    return replace(c, shape=tuple(shape))


ATTENTION = frozenset((FLASH, FLASH_BACKWARD))
MULTI_OUTPUT_OPS[FLASH] = attention
MULTI_OUTPUT_OPS[FLASH_BACKWARD] = attention_backward


def _product_of(argument: int, dimension: int) -> Callable[[fx.Node], int]:
    return lambda node: 2 * num_elements(node) * size_of(node, argument, dimension)


FLOPS[aten.mm.default] = FLOPS[aten.bmm.default] = _product_of(0, -1)
PRODUCTS = {aten.mm.default, aten.bmm.default, FLASH}
"""Operations whose kernels for all sizes have many blocks."""
FLOPS[aten.addmm.default] = _product_of(1, -1)
FLOPS[FLASH] = lambda node: 4 * num_elements(node) * size_of(node, 1, 2)
FLOPS[FLASH_BACKWARD] = lambda node: 10 * math.prod(node.args[1].meta["val"].shape) * size_of(node, 2, 2)  # type: ignore[union-attr]
