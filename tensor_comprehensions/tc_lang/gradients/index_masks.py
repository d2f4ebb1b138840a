"""Use the masks of a def in its gradient: restrict sums to the mask, and reuse stored values inside of a mask.

A gradient that is zero outside of a mask makes every term with it as a factor zero, or NaN if the other factor is NaN
or infinite. A masked-out element does not contribute to the result, so zero is right. The language does not compute
terms that a condition on indices excludes, so the condition is put around the whole term.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...core.dtypes import INT64
from ..ir import Access, Call, Const, Expr, Index, Select, map_operands, walk_expr
from ..size_polynomial import Value
from .adjoint_access import substitute_indices
from .emit import GradStatement
from .factorize import to_product, unify
from .ssa import SsaProgram, SsaStatement, are_bare_indices, is_restricted_by_exists


def restrict_sums_to_masks(written: Sequence[GradStatement], sizes: Mapping[str, Value]) -> list[GradStatement]:
    """Restrict sums of products with a masked tensor to the terms inside of the mask."""
    writers = [w.target for w in written]
    masked = {
        w.target: w
        for w in written
        if w.op == "=" and are_bare_indices(w.subscripts) and _is_index_masked(w.value) and writers.count(w.target) == 1
    }
    return [_restrict_sum_to_mask(w, masked, sizes) for w in written]


def _restrict_sum_to_mask(
    w: GradStatement, masked: Mapping[str, GradStatement], sizes: Mapping[str, Value]
) -> GradStatement:
    if w.op != "+=!" or w.exists or len(w.ranges) == len(w.subscripts):
        return w
    product = to_product(w.value)
    for factor in product.over:
        if isinstance(factor, Access) and factor.tensor in masked and are_bare_indices(factor.subscripts):
            definition = masked[factor.tensor]
            names = (x.name for x in definition.subscripts if isinstance(x, Index))
            mask = definition.value
            assert isinstance(mask, Select)
            condition = substitute_indices(mask.condition, dict(zip(names, factor.subscripts, strict=True)), sizes)
            return replace(w, value=Select(condition, w.value, Const(0.0, w.value.dtype), w.value.dtype))
    return w


def _is_index_masked(e: Expr) -> bool:
    """Whether `e` is `condition ? value : 0` with a condition on indices."""
    return (
        isinstance(e, Select)
        and isinstance(e.otherwise, Const)
        and e.otherwise.value == 0
        and not any(isinstance(x, Access) for x in walk_expr(e.condition))
    )


def reuse_masked_values(written: Sequence[GradStatement], steps: SsaProgram) -> list[GradStatement]:
    """Replace function calls inside of a mask by reads of tensors that store the same calls under the same mask."""
    used = {name for w in written for name in w.reads}
    held = [s for s in steps.steps if s.target in used and _stores_masked_call(s, steps)]
    return [
        replace(w, value=_replace_calls_by_stored_values(w.value, held, steps)) if _is_index_masked(w.value) else w
        for w in written
    ]


def _stores_masked_call(step: SsaStatement, steps: SsaProgram) -> bool:
    plain = step.op == "=" and step.before is None and are_bare_indices(step.subscripts)
    return (
        plain
        and not is_restricted_by_exists(step, steps.function)
        and _is_index_masked(step.value)
        and _masked_call(step.value) is not None
    )


def _masked_call(e: Expr) -> Call | None:
    """The call `f(...)` if `e` is `condition ? f(...) : ...`, else None."""
    return e.then if isinstance(e, Select) and isinstance(e.then, Call) else None


def _replace_calls_by_stored_values(e: Expr, held: Iterable[SsaStatement], steps: SsaProgram) -> Expr:
    """`e`, a masked value, with calls replaced by elements of tensors that store them under the same mask."""
    assert isinstance(e, Select)
    condition = _widen_indices(e.condition)

    def replace_calls(x: Expr) -> Expr:
        for step in held if isinstance(x, Call) else ():
            pattern = _masked_call(step.value)
            assert pattern is not None
            assert isinstance(step.value, Select)
            mapping = unify(_widen_indices(pattern), _widen_indices(x), {})
            if mapping is None or any(isinstance(i, Index) and i.name not in mapping for i in step.subscripts):
                continue
            if _rename_indices(_widen_indices(step.value.condition), mapping) == condition:
                where = tuple(_rename_indices(_widen_indices(i), mapping) for i in step.subscripts)
                return Access(step.target, where, steps.versions[step.target].dtype)
        return map_operands(x, replace_calls)

    return replace(e, then=replace_calls(e.then))


def _rename_indices(e: Expr, names: Mapping[str, Expr]) -> Expr:
    return names.get(e.name, e) if isinstance(e, Index) else map_operands(e, lambda x: _rename_indices(x, names))


def _widen_indices(e: Expr) -> Expr:
    """`e` with all indices in int64, so that indices in subscripts and in conditions compare equal."""
    return replace(e, dtype=INT64) if isinstance(e, Index) else map_operands(e, _widen_indices)
