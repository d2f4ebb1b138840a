"""Linear forms of integer expressions: sums of atoms times constants, their differences and canonical expressions."""

from __future__ import annotations

from . import build
from .nodes import Binary, Const, Expr, Unary

Terms = dict[Expr, int]


def linear_terms(e: Expr) -> tuple[Terms, int]:
    """The scalar integer `e` as (terms, constant): the coefficient of each atom, in order of appearance."""
    terms: Terms = {}
    constant = _collect_linear_terms(e, 1, terms)
    return {atom: c for atom, c in terms.items() if c != 0}, constant


def _collect_linear_terms(e: Expr, factor: int, terms: Terms) -> int:
    """Add `factor * e` to `terms`; returns the constant part."""
    match e:
        case Const(value):
            return factor * int(value)
        case Binary("add", left, right):
            return _collect_linear_terms(left, factor, terms) + _collect_linear_terms(right, factor, terms)
        case Binary("sub", left, right):
            return _collect_linear_terms(left, factor, terms) + _collect_linear_terms(right, -factor, terms)
        case Unary("neg", operand):
            return _collect_linear_terms(operand, -factor, terms)
        case Binary("mul", left, Const(value)):
            return _collect_linear_terms(left, factor * int(value), terms)
        case Binary("mul", Const(value), right):
            return _collect_linear_terms(right, factor * int(value), terms)
    terms[e] = terms.get(e, 0) + factor
    return 0


def terms_to_expr(terms: Terms, constant: int) -> Expr:
    """The canonical expression of `sum coefficient * atom + constant`: positive terms first, the constant last."""
    e: Expr | None = None
    for atom, c in terms.items():
        if c > 0:
            e = build.mul(atom, c) if e is None else build.add(e, build.mul(atom, c))
    if e is None and constant != 0:
        e, constant = build.const(constant), 0
    for atom, c in terms.items():
        if c < 0:
            e = build.mul(atom, c) if e is None else build.sub(e, build.mul(atom, -c))
    return build.const(constant) if e is None else build.add(e, constant)


def join_divisions(terms: Terms) -> None:
    """Replace `k*d*(x // d) + k*(x % d)` among `terms` by `k*x`, in place; x may be a quotient itself."""
    for atom in list(terms):
        match atom:
            case Binary("mod", Binary("div", x, Const(by)) as quotient, Const(d)) if terms.get(atom):
                _join_division_terms(terms, atom, build.div(x, int(by) * int(d)), int(d), quotient)
        match atom:
            case Binary("mod", x, Const(d) as divisor) if terms.get(atom):
                _join_division_terms(terms, atom, Binary("div", x, divisor), int(d), x)


def _join_division_terms(terms: Terms, remainder: Expr, quotient: Expr, divisor: int, whole: Expr) -> None:
    """Replace `quotient` and `remainder` in `terms` by `whole` if their coefficients match."""
    k = terms[remainder]
    if terms.get(quotient, 0) == k * divisor:
        del terms[remainder], terms[quotient]
        terms[whole] = terms.get(whole, 0) + k


def difference(a: Expr, b: Expr) -> int | None:
    """`a - b` if it is a constant, else None. Both are scalar integers."""
    if a is b:
        return 0
    terms, constant = linear_terms(a)
    for atom, c in linear_terms(b)[0].items():
        terms[atom] = terms.get(atom, 0) - c
    return None if any(terms.values()) else constant - linear_terms(b)[1]


def subtract(a: Expr, b: Expr) -> Expr:
    """`a - b` with common terms cancelled, also inside `a` if that is a minimum or maximum."""
    if type(a) is Binary and a.op in ("min", "max"):
        return build.binary(a.op, subtract(a.left, b), subtract(a.right, b))
    terms, constant = linear_terms(a)
    others, other = linear_terms(b)
    for atom, c in others.items():
        terms[atom] = terms.get(atom, 0) - c
    return terms_to_expr({atom: c for atom, c in terms.items() if c != 0}, constant - other)
