"""Prove that a subscript stays inside its tensor in every executed access.

Proofs are sound: undecided subscripts become checks at run time. Three methods are tried in order: intervals, one guard
condition subtracted from the claim, and enumeration of small domains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import gcd, prod

import numpy as np

from ..affine import (
    Affine,
    Interval,
    Variable,
    affine_interval,
    dtype_interval,
    expr_interval,
    reads_tensors,
    to_affine_cached,
)
from ..ir import Access, Binary, Cast, Const, Expr, Index, Select, Unary, operands_of, walk_expr, with_operands
from ..reference.numpy_expression import Array, NumpyExpressionEvaluator, index_grid
from ..semantics.type_rules import COMPARISONS

ENUMERATED = 1 << 17
"""Maximum points of a domain that is enumerated if the other methods do not decide."""

Guards = tuple[tuple[Expr, bool], ...]
"""Conditions of the enclosing `Select`s, outermost first, each with the value it has where the access is executed."""


Conjuncts = list[tuple[Expr, bool]]


class Verdict(Enum):
    """The result of a proof of `0 <= subscript < extent`."""

    SAFE = "always in bounds"
    GUARDED = "in bounds where the guards hold"
    UNKNOWN = "must be checked at run time"
    VIOLATED = "out of bounds somewhere"


@dataclass(frozen=True, slots=True)
class BoundsProof:
    """A verdict. If it is VIOLATED, `witness` is an out-of-bounds value that the subscript takes."""

    verdict: Verdict
    witness: int = 0


def prove_in_bounds(subscript: Expr, extent: int, guards: Guards, box: Mapping[str, Interval]) -> BoundsProof:
    """Try to prove `0 <= subscript < extent` for all indices in `box` for which `guards` hold."""
    low, high = expr_interval(subscript, box)
    if low >= 0 and high < extent:
        return BoundsProof(Verdict.SAFE)
    known = [c for guard in guards for c in conjuncts(*guard)]
    if guards and _is_in_bounds(subscript, extent, known, box):
        return BoundsProof(Verdict.GUARDED)
    if reads_tensors(subscript):
        return BoundsProof(Verdict.UNKNOWN)
    form = to_affine_cached(subscript)
    if not guards and all(isinstance(atom, Variable) for atom, _ in form.terms):
        low, high = affine_interval(form, box)
        return BoundsProof(Verdict.VIOLATED, high if high >= extent else low)
    return _prove_by_enumeration(subscript, extent, known, box)


def conjuncts(e: Expr, holds: bool) -> Iterator[tuple[Expr, bool]]:
    """Split the condition that `e` has the value `holds` into conditions that all hold."""
    match e:
        case Unary(op="!", operand=x):
            yield from conjuncts(x, not holds)
        case Binary(op="&&", left=a, right=b) if holds:
            yield from conjuncts(a, True)
            yield from conjuncts(b, True)
        case Select(condition=a, then=b, otherwise=Const(value=False)) if holds:
            yield from conjuncts(a, True)
            yield from conjuncts(b, True)
        case Binary(op="||", left=a, right=b) if not holds:
            yield from conjuncts(a, False)
            yield from conjuncts(b, False)
        case Select(condition=a, then=Const(value=True), otherwise=b) if not holds:
            yield from conjuncts(a, False)
            yield from conjuncts(b, False)
        case _:
            yield e, holds


# --- one guard implies the claim -----------------------------------------------------------------------------------


def _is_in_bounds(subscript: Expr, extent: int, guards: Conjuncts, box: Mapping[str, Interval]) -> bool:
    form = to_affine_cached(_strip_widening(subscript))
    known = [g for c in guards for g in inequalities(*c, box)]
    return is_nonnegative(form, known, box) and is_nonnegative(Affine(extent - 1) - form, known, box)


def is_nonnegative(claim: Affine, known: list[Affine], box: Mapping[str, Interval]) -> bool:
    """Whether `claim >= 0` follows from the box, or from the box and one of `known` (each `>= 0`)."""
    if affine_interval(claim, box)[0] >= 0:
        return True
    return any(
        affine_interval(claim.scale(q) - g.scale(p), box)[0] >= 0
        for g in known
        for p, q in _cancelling_ratios(claim, g)
    )


def _cancelling_ratios(claim: Affine, g: Affine) -> list[tuple[int, int]]:
    """Positive ratios `p / q` for which `claim - p/q * g` loses an atom."""
    mine = dict(claim.terms)
    ratios = []
    for atom, c in g.terms:
        d = mine.get(atom, 0)
        assert isinstance(c, int)
        assert isinstance(d, int)
        if c * d > 0:
            factor = gcd(c, d)
            ratios.append((abs(d) // factor, abs(c) // factor))
    return ratios


def inequalities(e: Expr, holds: bool, box: Mapping[str, Interval]) -> Iterator[Affine]:
    """Affine forms that are >= 0 if the comparison `e` has the value `holds`; none if its arithmetic may wrap."""
    match e:
        case Binary(op=op, left=a, right=b) if op in COMPARISONS and a.dtype.is_integer:
            left, right = to_affine_cached(_strip_widening(a)), to_affine_cached(_strip_widening(b))
            low, high = dtype_interval(a.dtype)
            for form in (left, right):
                least, greatest = affine_interval(form, box)
                if least < low or greatest > high:
                    return
            if not holds:
                op = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}[op]
            if op in (">", ">=", "=="):
                yield (left - right).shift(-1 if op == ">" else 0)
            if op in ("<", "<=", "=="):
                yield (right - left).shift(-1 if op == "<" else 0)


def _strip_widening(e: Expr) -> Expr:
    """`e` without lossless integer casts around reads of tensors, so that reads in subscripts match those in guards."""
    if isinstance(e, Cast) and isinstance(e.operand, Access) and e.dtype.is_integer:
        low, high = dtype_interval(e.operand.dtype)
        least, greatest = dtype_interval(e.dtype)
        if e.operand.dtype.is_integer and least <= low and high <= greatest:
            return e.operand
    return with_operands(e, [_strip_widening(x) for x in operands_of(e)]) if not isinstance(e, Access) else e


# --- enumeration ---------------------------------------------------------------------------------------------------


def _prove_by_enumeration(
    subscript: Expr, extent: int, guards: list[tuple[Expr, bool]], box: Mapping[str, Interval]
) -> BoundsProof:
    """Try every point. Guards that depend on data are assumed to hold; a violation is then not certain."""
    usable = [(e, holds) for e, holds in guards if not reads_tensors(e)]
    names = index_names(subscript, *(e for e, _ in usable))
    ranges = {name: (box[name][0], box[name][1] + 1) for name in names}
    if prod(upper - lower for lower, upper in ranges.values()) > ENUMERATED:
        return BoundsProof(Verdict.UNKNOWN)
    evaluate = NumpyExpressionEvaluator(index_grid(ranges), _no_memory)
    with np.errstate(all="ignore"):
        values = evaluate(subscript)
        bad = (values < 0) | (values >= extent)
        for e, holds in usable:
            bad = bad & (evaluate(e) == holds)
    if not np.any(bad):
        return BoundsProof(Verdict.GUARDED if guards else Verdict.SAFE)
    if len(usable) < len(guards):
        return BoundsProof(Verdict.UNKNOWN)
    values, bad = np.broadcast_arrays(values, bad)
    return BoundsProof(Verdict.VIOLATED, int(values[bad][0]))


def index_names(*expressions: Expr) -> dict[str, None]:
    """The index variables of expressions, in order of appearance, as the keys of a dict."""
    return {x.name: None for e in expressions for x in walk_expr(e) if isinstance(x, Index)}


def _no_memory(access: Access, subscripts: object, where: object) -> Array:
    raise AssertionError("only expressions that read no tensors are enumerated")


# --- maps on the left ----------------------------------------------------------------------------------------------


def is_injective(subscripts: tuple[Expr, ...], box: Mapping[str, Interval]) -> bool | None:
    """Whether different points of `box` give different subscripts; None if that is not decided."""
    forms = [to_affine_cached(e) for e in subscripts]
    extents = {name: high - low + 1 for name, (low, high) in box.items()}
    open_ = {name for name, extent in extents.items() if extent > 1}
    if all(isinstance(atom, Variable) for form in forms for atom, _ in form.terms):
        while True:
            settled = {name for form in forms for name in _determined_indices(form, open_, extents)}
            if not settled & open_:
                break
            open_ -= settled
        if not open_:
            return True
    ranges = {name: (low, high + 1) for name, (low, high) in box.items()}
    points = prod(extents.values())
    if points > ENUMERATED or any(reads_tensors(e) for e in subscripts):
        return None
    evaluate = NumpyExpressionEvaluator(index_grid(ranges), _no_memory)
    shape = tuple(extents.values())
    columns = [np.broadcast_to(evaluate(e), shape).reshape(-1) for e in subscripts]
    return len(np.unique(np.stack(columns), axis=1).T) == points if columns else points <= 1


def _determined_indices(form: Affine, open_: set[str], extents: Mapping[str, int]) -> list[str]:
    """The indices in `open_` that one subscript determines if the other indices are known, like digits of a number."""
    digits = sorted(
        (abs(c), a.name) for a, c in form.terms if isinstance(a, Variable) and isinstance(c, int) and a.name in open_
    )
    reach = 0
    for weight, name in digits:
        if weight <= reach:
            return []
        reach += weight * (extents[name] - 1)
    return [name for _, name in digits]
