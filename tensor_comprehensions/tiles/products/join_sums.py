"""Join products with the same left factor into one region: `G += x * W; H += x * V; y = silu(G) * H`.

Each tile of the left factor is copied only once, and a thread combines the sums in registers and stores only the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, Role, map_operands, walk_expr
from ...tc_lang.transforms.extract_statements import tensors_of_statements
from .product_region import OtherSum, ProductRegion

MOST_SUMS = 4


FindRegion = Callable[[BoundFunction, int], ProductRegion | None]


def extend_by_sums(function: BoundFunction, region: ProductRegion, at: int, region_at: FindRegion) -> ProductRegion:
    """`region`, which begins at statement `at`, extended by following products with which it can be joined.

    region_at: returns the region that begins at a statement, or None.
    """
    while region.sums < MOST_SUMS:
        following = region_at(function, at + len(region.statements))
        joined = None if following is None else _join_regions(function, region, following, at)
        if joined is None:
            break
        region = joined
    return region


def _join_regions(
    function: BoundFunction, region: ProductRegion, following: ProductRegion, at: int
) -> ProductRegion | None:
    """Both as one region, with the index names of the second.

    None if the sums of the first are used elsewhere, or if the left factors or indices differ.
    """
    held = region.contraction.output.tensor
    if function.tensor(held).role is not Role.TEMPORARY or len(region.pairs) > 1 or len(following.pairs) > 1:
        return None
    last = at + len(region.statements) + len(following.statements)
    others = (*function.statements[:at], *function.statements[last:])
    touched = tensors_of_statements(others)
    first, second = region.contraction, following.contraction
    if held in (*touched.read, *touched.written) or second.output.tensor in region.tensors:
        return None
    reads = _collect_reads(held, *(x for x in (second.initial, second.epilogue) if x is not None))
    inner = (x for x in (first.initial, *(f.value for p in region.pairs + following.pairs for f in p.factors)) if x)
    if len(set(reads)) != 1 or _collect_reads(held, *inner):
        return None
    names = _match_index_names(region, following, reads[0])
    if names is None:
        return None

    def rename_sums(e: tc.Expr) -> tc.Expr:
        if isinstance(e, tc.Index):
            return replace(e, name=names.get(e.name, e.name))
        return map_operands(e, rename_sums)

    def maybe(e: tc.Expr | None) -> tc.Expr | None:
        return None if e is None else rename_sums(e)

    (mine,), (pair,) = region.pairs, following.pairs
    if rename_sums(mine.left.value) != pair.left.value or mine.right.dtype != pair.right.dtype:
        return None
    new = [(reads[0], first.initial, first.epilogue), *((x.element, x.initial, x.epilogue) for x in region.others)]
    sums = tuple(
        OtherSum(
            e if n == 0 else replace(e, subscripts=tuple(map(rename_sums, e.subscripts))), maybe(start), maybe(end)
        )
        for n, (e, start, end) in enumerate(new)
    )
    rights = tuple(replace(f, value=rename_sums(f.value)) for f in (mine.right, *mine.others))
    contraction = replace(
        second, statements=(*first.statements, *second.statements), update=second.update + len(first.statements)
    )
    return replace(following, contraction=contraction, pairs=(replace(pair, others=rights),), others=sums)


def _collect_reads(tensor: str, *roots: tc.Expr) -> list[tc.Access]:
    return [e for x in roots for e in walk_expr(x) if isinstance(e, tc.Access) and e.tensor == tensor]


def _match_index_names(region: ProductRegion, following: ProductRegion, read: tc.Access) -> Mapping[str, str] | None:
    """The index names of the first region mapped to those of the second, which reads its element `read`.

    None if the ranges differ, or if a subscript is not an index.
    """
    output = region.contraction.output
    pairs = list(zip(output.subscripts, read.subscripts, strict=True))
    if not all(isinstance(a, tc.Index) and isinstance(b, tc.Index) for a, b in pairs):
        return None
    names = {a.name: b.name for a, b in pairs if isinstance(a, tc.Index) and isinstance(b, tc.Index)}
    (mine,), (pair,) = region.pairs, following.pairs
    if len(mine.terms) != len(pair.terms):
        return None
    names |= {a.name: b.name for a, b in zip(mine.terms, pair.terms, strict=True)}
    for kind in ("rows", "columns", "batch"):
        here = {(names.get(i.name), i.lower, i.upper) for i in getattr(region, kind) if i.name in names}
        there = {(i.name, i.lower, i.upper) for i in getattr(following, kind) if i.name in names.values()}
        if here != there:
            return None
    same = [(i.lower, i.upper) for i in mine.terms] == [(i.lower, i.upper) for i in pair.terms]
    return names if same and len(set(names.values())) == len(names) else None
