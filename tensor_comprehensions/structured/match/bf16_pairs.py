"""Pairs of bfloat16 products, for processors with an instruction that adds two products to a float32.

A sum over k becomes a sum over pairs of neighbors along k: the factors of `left(m,k) * right(k,n)` become
`pair(left(m,2k), left(m,2k+1))` and `pair(right(2k,n), right(2k+1,n))`. Panels hold the two elements of a pair next to
each other, as the instruction expects. A last element without a partner is paired with zero.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.dtypes import BFLOAT16, FLOAT32
from ...loop_ir import build
from ...loop_ir.instructions import PAIR_BFLOAT16
from ...loop_ir.nodes import Cast, Expr, Load, Var
from ...loop_ir.rewrite import substitute
from ...target import CpuTarget
from ..op import Iterator, StructuredOp, variable_names


def pack_bf16_pairs(op: StructuredOp, target: CpuTarget) -> StructuredOp:
    """`op` over pairs of bfloat16 if `target` can multiply them, else `op`.

    Both factors must be bfloat16 loads and must have parallel iterators of their own, because pairing does not pay for
    elements that are used only once.
    """
    if not target.has_bf16_dot or op.dtype != FLOAT32 or op.terms or not all(map(_is_element, op.factors)):
        return op
    left, right = (frozenset(variable_names(factor)) for factor in op.factors)
    own = [any(i.name in side - other for i in op.parallel) for side, other in ((left, right), (right, left))]
    both = [i for i in op.reductions if i.name in left & right and i.extent > 1]
    if not both or not all(own):
        return op
    chosen = max(both, key=lambda i: (i.extent % 2 == 0, i.extent))
    return replace(
        op,
        iterators=tuple(replace(i, extent=-(-i.extent // 2)) if i is chosen else i for i in op.iterators),
        left=_make_bf16_pair(op.left, chosen),
        right=_make_bf16_pair(op.right, chosen),
        pairs=chosen.name,
    )


def _is_element(factor: Expr) -> bool:
    return isinstance(factor, Cast) and isinstance(factor.operand, Load) and factor.operand.type.dtype == BFLOAT16


def _make_bf16_pair(factor: Expr, along: Iterator) -> Expr:
    assert isinstance(factor, Cast)
    even = build.mul(Var(along.name), 2)
    low, high = (substitute(factor.operand, {along.name: build.add(even, k)}) for k in (0, 1))
    assert isinstance(high, Load)
    if along.extent % 2:
        inside = build.lt(build.add(even, 1), along.extent)
        high = replace(high, mask=build.and_masks(high.mask, inside))
    return build.call(PAIR_BFLOAT16, low, high)
