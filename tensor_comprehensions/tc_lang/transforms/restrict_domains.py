"""`BoundFunction` -> `BoundFunction` with smaller domains: skip work that a mask makes neutral.

A sum over `j <= i ? x : 0` needs only the terms with `j <= i`, because 0 is neutral; this becomes its `terms`. If all
readers of a temporary need only the part with `j <= i`, this becomes its `elements`, and the others are not computed.
Results stay the same, including inf and NaN: skipped terms are exactly neutral.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..binding.bind import neutral_element
from ..binding.bounds_proof import is_nonnegative
from ..ir import (
    Access,
    Binary,
    BoundFunction,
    BoundStatement,
    Const,
    Expr,
    Inequality,
    Role,
    Select,
    map_operands,
    operands_of,
    walk_expr,
)
from .masks import (
    Box,
    ConstantOrNan,
    Masked,
    MaskFacts,
    Outside,
    Region,
    as_form,
    find_masked_regions,
    includes,
    index_subscripts,
    is_implied,
    region_dimension_name,
    region_where,
    value_outside,
)

MOST_KEPT = 0.75
"""Largest fraction of a domain that a mask may keep; if it keeps more, loops of constant length are faster."""
SAMPLES = 24
"""Values of each index that are sampled to estimate this fraction."""


def restrict_domains(function: BoundFunction, most_kept: float = MOST_KEPT) -> BoundFunction:
    """The same function with `elements` and `terms` wherever masks allow it; `function` itself if none does.

    most_kept: the largest fraction of a domain for which a restriction pays.
    """
    if not any(isinstance(e, Select) for s in function.statements for e in walk_expr(s.value)):
        return function
    statements = _restrict_temporaries(function, _restrict_reductions(function, most_kept), most_kept)
    statements = [_without_masks(s) for s in statements]
    return replace(function, statements=tuple(statements)) if any(s.domain for s in statements) else function


# --- terms: forwards, with facts about earlier tensors -------------------------------------------------------------


def _restrict_reductions(function: BoundFunction, most_kept: float) -> list[BoundStatement]:
    facts = MaskFacts({}, {})
    found = []
    for s in function.statements:
        region = _nonneutral_region(s, facts)
        if not _is_masked_product(s) and _region_fraction(region, _make_index_box(s)) > most_kept:
            region = ()
        s = replace(s, terms=region) if region else s
        found.append(s)
        facts = _update_mask_facts(function, s, facts)
    return found


def _nonneutral_region(s: BoundStatement, facts: MaskFacts) -> Region:
    """The region outside of which the value of a reduction is neutral; () if there is no restriction."""
    if (
        s.reduction is None
        or not s.reduction_indices
        or _restrictable_subscripts(s) is None
        or any(i.extent == 0 for i in s.indices)
    ):
        return ()
    box = _make_index_box(s)
    found: list[Inequality] = []
    for region in find_masked_regions(s.value, facts, box):
        value = value_outside(s.value, region, facts, box)
        if value is not None and _is_neutral(value, s):
            found += region
    return tuple(dict.fromkeys(found))


def _is_masked_product(s: BoundStatement) -> bool:
    """Whether `s` is a masked sum of products, which without its mask is a contraction."""
    return (
        s.reduction == "+"
        and isinstance(s.value, Select)
        and isinstance(s.value.then, Binary)
        and (s.value.then.op == "*")
    )


def _is_neutral(value: Outside, s: BoundStatement) -> bool:
    """Whether `value` is neutral for the reduction of `s`."""
    assert s.reduction is not None
    neutral = neutral_element(s.reduction, s.value.dtype)
    if isinstance(value, ConstantOrNan):
        return (
            value.value == neutral and value.along <= {i.name for i in s.reduction_indices} and s.value.dtype.is_float
        )
    return type(value.value) is type(neutral) and value.value == neutral


def _update_mask_facts(function: BoundFunction, s: BoundStatement, facts: MaskFacts) -> MaskFacts:
    """The facts that hold after `s`."""
    masked = {name: m for name, m in facts.masked.items() if name != s.target}
    largest = {name: m for name, m in facts.largest.items() if name != s.target and not _reads_tensor(m, s.target)}
    names = index_subscripts(Access(s.target, s.subscripts, s.value.dtype))
    if names is None or s.reads_own_target or not _defines_whole_target(function, s, names):
        return MaskFacts(masked, largest)
    if s.reduction is None and function.tensor(s.target).dtype == s.value.dtype:
        box = _make_index_box(s)
        place = {name: region_dimension_name(d) for d, name in enumerate(names)}
        for region in find_masked_regions(s.value, facts, box):
            value = value_outside(s.value, region, facts, box)
            if isinstance(value, ConstantOrNan):
                value = replace(value, along=frozenset(place[name] for name in value.along))
            if value is not None:
                masked[s.target] = Masked(tuple(g.rename_indices(place) for g in region), value)
                break
    elif s.reduction == "max" and s.initialize and s.terms and _has_no_empty_reduction(s):
        largest[s.target] = s
    return MaskFacts(masked, largest)


def _defines_whole_target(function: BoundFunction, s: BoundStatement, names: Sequence[str]) -> bool:
    """Whether `s` defines every element of its target."""
    ranges = {i.name: (i.lower, i.upper) for i in s.free}
    shape = function.tensor(s.target).shape
    return all(ranges.get(name) == (0, extent) for name, extent in zip(names, shape, strict=True))


def _has_no_empty_reduction(s: BoundStatement) -> bool:
    """Whether every element of a reduction has an unmasked term. Decided only for reductions over one index."""
    if len(s.reduction_indices) != 1:
        return False
    (k,) = s.reduction_indices
    box = _make_index_box(s)
    ends = (Inequality(((k.name, 1),), -k.lower), Inequality(((k.name, -1),), k.upper - 1))
    pairs = [(dict(g.terms).get(k.name, 0), g) for g in (*s.terms, *ends)]
    if any(abs(c) > 1 for c, _ in pairs):
        return False
    lower, upper, others = ([as_form(g) for c, g in pairs if c == sign] for sign in (1, -1, 0))
    return all(is_nonnegative(a + b, [], box) for a in lower for b in upper) and not others


# --- elements: backwards, from the reads ---------------------------------------------------------------------------


def _restrict_temporaries(
    function: BoundFunction, statements: list[BoundStatement], most_kept: float
) -> list[BoundStatement]:
    """`statements` with definitions of temporaries restricted to the elements that are read."""
    found = list(statements)
    last = {s.target: n for n, s in enumerate(found)}
    readers: dict[str, list[int]] = {}
    for n, s in enumerate(found):
        for name in _tensors_read(s):
            readers.setdefault(name, []).append(n)
    for target in sorted(last, key=lambda name: -last[name]):
        if function.tensor(target).role is not Role.TEMPORARY:
            continue
        own = [n for n, s in enumerate(found) if s.target == target]
        names = [_restrictable_subscripts(found[n]) for n in own]
        region = _wanted_region([found[n] for n in readers.get(target, ())], target, most_kept)
        if not region or None in names:
            continue
        for n, subscripts in zip(own, names, strict=True):
            place = {region_dimension_name(d): name for d, name in enumerate(subscripts or ())}
            found[n] = replace(found[n], elements=tuple(g.rename_indices(place) for g in region))
    return found


def _restrictable_subscripts(s: BoundStatement) -> tuple[str, ...] | None:
    """The subscripts of a definition that may be computed in part; None if it may not, as with guarded reads."""
    if s.reads_own_target or s.checks or _reads_under_guard(s):
        return None
    return index_subscripts(Access(s.target, s.subscripts, s.value.dtype))


def _wanted_region(readers: Sequence[BoundStatement], tensor: str, most_kept: float) -> Region:
    """The region of a temporary that its readers need, over its dimensions; () if it is not worth restricting."""
    found = [use for s in readers for use in _needed_regions(s, tensor)]
    uses = [use for use in found if use is not None]
    if len(uses) < len(found):
        return ()
    boxes = [box for _, box in uses]
    candidates = dict.fromkeys(g for region, _ in uses for g in region)
    kept = tuple(g for g in candidates if all(is_implied(g, region, box) for region, box in uses))
    return kept if kept and _region_fraction(kept, boxes[0]) <= most_kept else ()


def _needed_regions(s: BoundStatement, tensor: str) -> Iterator[tuple[Region, Box] | None]:
    """For each read of `tensor` by `s`, the region that it needs and the box around it; None: any element.

    A definition of the tensor that reads it only at its own point needs no further elements, and is left out.
    """
    box = _make_index_box(s)
    for access, region in _reads_of(s, tensor, box):
        if s.target == tensor and access.subscripts == s.subscripts and not s.reduction_indices:
            continue
        names = index_subscripts(access)
        if names is None:
            yield None
            continue
        place = {name: region_dimension_name(d) for d, name in enumerate(names)}
        local = tuple(g for g in region if all(name in place for name, _ in g.terms))
        yield tuple(g.rename_indices(place) for g in local), {place[name]: box[name] for name in names}


def _reads_of(s: BoundStatement, tensor: str, box: Box) -> Iterator[tuple[Access, Region]]:
    """The reads of `tensor` by `s`, each with the region in which it matters."""

    def visit(e: Expr, region: Region) -> Iterator[tuple[Access, Region]]:
        if isinstance(e, Select):
            yield from visit(e.condition, region)
            yield from visit(e.then, (*region, *region_where(e.condition, True, box)))
            yield from visit(e.otherwise, (*region, *region_where(e.condition, False, box)))
            return
        if isinstance(e, Access) and e.tensor == tensor:
            yield e, region
        for x in operands_of(e):
            yield from visit(x, region)

    yield from visit(s.value, s.domain)
    for e in _exprs_beside_value(s):
        yield from visit(e, ())


def _tensors_read(s: BoundStatement) -> frozenset[str]:
    accesses = (x for e in (s.value, *_exprs_beside_value(s)) for x in walk_expr(e) if isinstance(x, Access))
    return frozenset(x.tensor for x in accesses)


def _exprs_beside_value(s: BoundStatement) -> tuple[Expr, ...]:
    return (*s.subscripts, *(x for c in s.checks for x in (c.subscript, c.guard) if x is not None))


# --- the restricted values -----------------------------------------------------------------------------------------


def _without_masks(s: BoundStatement) -> BoundStatement:
    """`s` without the conditions that are implied by its domain."""
    if not s.domain:
        return s
    box = _make_index_box(s)

    def visit(e: Expr) -> Expr:
        if isinstance(e, Select):
            if _is_condition_implied(e.condition, True, s.domain, box):
                return visit(e.then)
            if _is_condition_implied(e.condition, False, s.domain, box):
                return visit(e.otherwise)
        return map_operands(e, visit)

    return replace(s, value=visit(s.value))


def _is_condition_implied(e: Expr, value: bool, domain: Region, box: Box) -> bool:
    """Whether the condition `e` has the value `value` in all of `domain`."""
    match e:
        case Const():
            return bool(e.value) == value
        case Binary(op="&&", left=a, right=b) if value:
            return _is_condition_implied(a, True, domain, box) and _is_condition_implied(b, True, domain, box)
        case Binary(op="||", left=a, right=b) if not value:
            return _is_condition_implied(a, False, domain, box) and _is_condition_implied(b, False, domain, box)
        case Binary(op=op) if op != ("!=" if value else "=="):
            region = region_where(e, not value, box)  # is the opposite infeasible within the domain?
            return any(_is_infeasible(g, domain, box) for g in region) or _is_two_sided_bound(e, value, domain, box)
    return False


def _is_infeasible(g: Inequality, domain: Region, box: Box) -> bool:
    """Whether `g` holds nowhere in `domain`."""
    contrary = Inequality(tuple((name, -c) for name, c in g.terms), -g.constant - 1)
    return is_implied(contrary, domain, box)


def _is_two_sided_bound(e: Binary, value: bool, domain: Region, box: Box) -> bool:
    """Whether `e` is an equality that inequalities of the domain from both sides imply."""
    if e.op != ("==" if value else "!="):
        return False
    divides = any(
        isinstance(x, Binary) and x.op in ("/", "%") for x in walk_expr(e)
    )  # regions with quotients are larger
    region = region_where(e, value, box)
    return not divides and len(region) == 2 and includes(region, domain, box)


# --- small things --------------------------------------------------------------------------------------------------


def _make_index_box(s: BoundStatement) -> Box:
    return {i.name: (i.lower, i.upper - 1) for i in s.indices}


def _reads_tensor(s: BoundStatement, tensor: str) -> bool:
    return any(isinstance(e, Access) and e.tensor == tensor for e in walk_expr(s.value))


def _reads_under_guard(s: BoundStatement) -> bool:
    """Whether `s` has guarded reads, so that its mask must stay to keep them in bounds."""
    return any(isinstance(e, Access) and e.guarded for e in walk_expr(s.value))


def _region_fraction(region: Region, box: Box) -> float:
    """The approximate fraction of a box that is in a region."""
    names = dict.fromkeys(name for g in region for name, _ in g.terms)
    axes = {}
    for axis, name in enumerate(names):
        low, high = box[name]
        shape = [1] * len(names)
        shape[axis] = -1
        axes[name] = np.unique(np.linspace(low, high, SAMPLES).round()).reshape(shape)
    inside = np.ones((), bool)
    for g in region:
        inside = inside & (sum((c * axes[name] for name, c in g.terms), np.asarray(g.constant)) >= 0)
    return float(np.mean(inside)) if region else 1.0
