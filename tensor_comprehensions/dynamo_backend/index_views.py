"""Values of a graph as formulas of indices: the element of a node at given indices, before any tensor holds it.

A view only changes how a formula is indexed. A dimension is a group of loops, outermost first, whose extents multiply
to its size, so that a dimension that was merged splits into its original loops again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from ..core.dtypes import DType

Texts = Sequence[str]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A formula for every element of a tensor.

    Attributes:
        groups: the extents of the loops of each dimension; () for a dimension of one element.
        at: returns the text of the element at given indices of all loops, in order.
        dtype: the type of the elements in torch.
        access: the formula only reads a tensor. constant: it reads nothing.
        tensor: the tensor that holds these elements, in this order; "" if there is none.

    Formulas are in the type that torch computes in: `float32` for elements of 16 bits.
    """

    groups: Groups
    at: Callable[[Texts], str]
    dtype: DType
    access: bool = False
    constant: bool = False
    tensor: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(g) for g in self.groups)

    @property
    def loops(self) -> tuple[int, ...]:
        return tuple(n for g in self.groups for n in g)


def of_shape(
    shape: Iterable[int], at: Callable[[Texts], str], dtype: DType, *, access: bool = False, constant: bool = False
) -> Value:
    """A value with one loop for each dimension of more than one element."""
    return Value(tuple((n,) if n != 1 else () for n in shape), at, dtype, access, constant)


def permute_loops(x: Value, order: Sequence[int]) -> list[int]:
    """The loops of `x` with its dimensions in `order`."""
    starts = [0, *accumulate(len(g) for g in x.groups)]
    return [k for d in order for k in range(starts[d], starts[d + 1])]


def permute_value(x: Value, order: Sequence[int]) -> Value:
    loops = permute_loops(x, order)
    place = {old: new for new, old in enumerate(loops)}

    def element_text(i: Texts) -> str:
        return x.at([i[place[k]] for k in range(len(loops))])

    return replace(x, groups=tuple(x.groups[d] for d in order), at=element_text, tensor="")


def reshape_value(x: Value, shape: Sequence[int]) -> Value:
    """The same elements in the same order under another shape; loops are split where the shape asks for it."""
    pieces = _split_loops_at_shape([n for n in x.loops if n != 1], [n for n in shape if n != 1])
    if pieces is None:
        x = _flatten(x)
        pieces = [[n for n in shape if n != 1]]
    x = _split_loops(x, pieces)
    loops = list(x.loops)
    groups: list[tuple[int, ...]] = []
    for size in shape:
        group: list[int] = []
        while prod(group) < size:
            group.append(loops.pop(0))
        groups.append(tuple(group))
    return replace(x, groups=tuple(groups))


def broadcast_value(x: Value, shape: Sequence[int]) -> Value:
    """`x` repeated along new leading dimensions and along those of one element."""
    missing = len(shape) - len(x.groups)
    groups: list[tuple[int, ...]] = []
    kept: list[bool] = []
    for d, size in enumerate(shape):
        own = x.groups[d - missing] if d >= missing else ()
        grows = prod(own) != size
        groups.append((size,) if grows else own)
        kept += [not grows] * len(groups[-1])

    def element_text(i: Texts) -> str:
        return x.at([text for text, keep in zip(i, kept, strict=True) if keep])

    return replace(x, groups=tuple(groups), at=element_text, tensor="")


def shift_dim(x: Value, dimension: int, size: int, place: Callable[[str], str]) -> Value:
    """`x` with `dimension` of `size` elements: the element at an index is that of `x` at `place(index)`."""
    x = merge_loops(x, dimension)
    position = sum(len(g) for g in x.groups[:dimension])
    new = (size,) if size != 1 else ()
    old = len(x.groups[dimension])

    def element_text(i: Texts) -> str:
        index = place(i[position] if new else "0")
        return x.at([*i[:position], *[index][:old], *i[position + len(new) :]])

    return replace(x, groups=(*x.groups[:dimension], new, *x.groups[dimension + 1 :]), at=element_text, tensor="")


def offset_dim(x: Value, dimension: int, size: int, distance: int) -> Value:
    """`x` with `dimension` of `size` elements: the element at an index is that of `x` at the index minus `distance`."""
    sign = "-" if distance >= 0 else "+"
    return shift_dim(x, dimension, size, lambda i: f"({i} {sign} {abs(distance)})")


def guard_value(x: Value, bounds: Sequence[tuple[int, int, int]], fill: str) -> Value:
    """`x` where low <= index < high for each (dimension, low, high) of `bounds`, and `fill` elsewhere."""
    places = [(sum(map(len, x.groups[:d])), low, high) for d, low, high in bounds if x.groups[d]]
    is_outside = any(not low <= 0 < high for d, low, high in bounds if not x.groups[d])  # of the only element

    def element_text(i: Texts) -> str:
        tests = " && ".join(f"{i[at]} >= {low} && {i[at]} < {high}" for at, low, high in places)
        return f"({tests} ? {x.at(i)} : {fill})" if tests else x.at(i)

    return Value(x.groups, (lambda i: fill) if is_outside else element_text, x.dtype)


def drop_dim(x: Value, dimension: int) -> Value:
    """`x` without a dimension of one element."""
    return replace(x, groups=(*x.groups[:dimension], *x.groups[dimension + 1 :]))


def align_values(values: Sequence[Value], dimensions: int | None = None) -> list[Value]:
    """Split the loops of values so that all have the same loops in the first `dimensions`, whose sizes are equal."""
    for d in range(len(values[0].groups) if dimensions is None else dimensions):
        cuts = _common_loop_split([x.groups[d] for x in values])
        values = [_regroup_dimension(x, d, cuts) for x in values]
    return list(values)


def _common_loop_split(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The coarsest loops that all `groups` can be split into, or one loop if there are none."""
    inner = {n for g in groups for n in accumulate(reversed(g), mul)} | {1}
    marks = sorted(inner)
    if any(b % a for a, b in pairwise(marks)):
        return (marks[-1],)
    return tuple(b // a for a, b in reversed(list(pairwise(marks))))


def _regroup_dimension(x: Value, dimension: int, wanted: tuple[int, ...]) -> Value:
    group = x.groups[dimension]
    if group == wanted:
        return x
    pieces = _split_loops_at_shape(list(group), list(wanted))
    if pieces is None or len(wanted) < len(group):
        x = merge_loops(x, dimension)
        pieces = [list(wanted)]
    before = [[n] for g in x.groups[:dimension] for n in g]
    after = [[n] for g in x.groups[dimension + 1 :] for n in g]
    split = _split_loops(x, [*before, *pieces, *after])
    return replace(split, groups=(*x.groups[:dimension], wanted, *x.groups[dimension + 1 :]))


def _split_loops_at_shape(loops: Sequence[int], shape: Sequence[int]) -> list[list[int]] | None:
    """The extents to split each loop into so that the sizes of `shape` are products of neighbors, or None."""
    ends = {prod(shape[k:]) for k in range(len(shape) + 1)}
    pieces: list[list[int]] = []
    inner = prod(loops)
    for n in loops:
        outer, inner = inner, inner // n
        marks = [outer, *sorted((e for e in ends if inner < e < outer), reverse=True), inner]
        if any(a % b for a, b in pairwise(marks)):
            return None
        pieces.append([a // b for a, b in pairwise(marks)])
    return pieces


def _split_loops(x: Value, pieces: Sequence[Sequence[int]]) -> Value:
    """`x` with each loop split into the extents of `pieces`; each new loop is a group of its own."""

    def element_text(i: Texts) -> str:
        rest, indices = list(i), []
        for extents in pieces:
            text = ""
            for n in extents:
                text = f"({text} * {n} + {rest.pop(0)})" if text else rest.pop(0)
            indices.append(text)
        return x.at(indices)

    return replace(x, groups=tuple((n,) for extents in pieces for n in extents), at=element_text)


def merge_loops(x: Value, dimension: int) -> Value:
    """`x` with one loop for `dimension`, whose index is split by division and remainder."""
    group = x.groups[dimension]
    if len(group) < 2:
        return x
    position = sum(len(g) for g in x.groups[:dimension])

    def element_text(i: Texts) -> str:
        return x.at([*i[:position], *split_index(i[position], group), *i[position + 1 :]])

    return replace(x, groups=(*x.groups[:dimension], (prod(group),), *x.groups[dimension + 1 :]), at=element_text)


def _flatten(x: Value) -> Value:
    """`x` as one dimension with one loop."""
    merged = replace(x, groups=(x.loops,))
    return merge_loops(merged, 0)


def split_index(index: str, extents: Sequence[int]) -> list[str]:
    """The indices in loops of `extents`, the last one innermost, of the flat index `index`."""
    found = []
    inner = prod(extents)
    for k, n in enumerate(extents):
        inner //= n
        text = index if inner == 1 else f"({index} / {inner})"
        found.append(text if k == 0 else f"({text} % {n})")
    return found
