"""Polynomials over sizes ("formulas"), for extents before the sizes are known.

A formula is a polynomial with integer coefficients in atoms: size names, and floor quotients, remainders, minima
and maxima of formulas. The operators keep it in a normal form, so that equal formulas mostly compare equal and
`H - KH + 1` prints as people write it. One algorithm infers ranges for numbers and for formulas, so `min_of` and
`max_of` take both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

from ..core.errors import InternalError


@dataclass(frozen=True, slots=True)
class SizeName:
    """A size, a specialized scalar, or the extent `t.d` of a tensor."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class SizeOperation:
    """`left op right` with op one of `/ % min max` that does not simplify; `/` and `%` round down."""

    op: str
    left: SizePolynomial
    right: SizePolynomial

    def __str__(self) -> str:
        if self.op in ("min", "max"):
            return f"{self.op}({self.left}, {self.right})"
        return f"{_parenthesize(self.left)} {self.op} {_parenthesize(self.right)}"


Atom = SizeName | SizeOperation
Monomial = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class SizePolynomial:
    """A sum of monomials with integer coefficients, none of them zero, in order of first appearance."""

    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    def name(name: str) -> SizePolynomial:
        """The formula that is one name."""
        return SizePolynomial((((SizeName(name),), 1),))

    @property
    def value(self) -> int | None:
        """The number that this formula equals if it is constant, else None."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The value of this formula for given sizes."""
        total = 0
        for monomial, coefficient in self.terms:
            product = coefficient
            for atom in monomial:
                product *= _evaluate(atom, sizes)
            total += product
        return total

    def __add__(self, other: Value) -> SizePolynomial:
        sums: dict[Monomial, int] = dict(self.terms)
        for monomial, coefficient in to_polynomial(other).terms:
            sums[monomial] = sums.get(monomial, 0) + coefficient
        return SizePolynomial(tuple((m, c) for m, c in sums.items() if c))

    __radd__ = __add__

    def __neg__(self) -> SizePolynomial:
        return SizePolynomial(tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: Value) -> SizePolynomial:
        return self + -to_polynomial(other)

    def __rsub__(self, other: Value) -> SizePolynomial:
        return to_polynomial(other) + -self

    def __mul__(self, other: Value) -> SizePolynomial:
        out = SizePolynomial(())
        for m, c in self.terms:
            for n, d in to_polynomial(other).terms:
                out = out + SizePolynomial(((tuple(sorted((*m, *n), key=str)), c * d),))
        return out

    __rmul__ = __mul__

    def __floordiv__(self, other: Value) -> SizePolynomial:
        return _divide(self, to_polynomial(other))

    def __rfloordiv__(self, other: Value) -> SizePolynomial:
        return _divide(to_polynomial(other), self)

    def __mod__(self, other: Value) -> SizePolynomial:
        return _remainder(self, to_polynomial(other))

    def __rmod__(self, other: Value) -> SizePolynomial:
        return _remainder(to_polynomial(other), self)

    def __str__(self) -> str:
        ordered = sorted(self.terms, key=lambda term: (not term[0], term[1] < 0))
        text = ""
        for monomial, coefficient in ordered:
            sign = ("-" if coefficient < 0 else "") if not text else (" - " if coefficient < 0 else " + ")
            text += sign + _print_monomial(monomial, abs(coefficient), alone=sign != "-")
        return text or "0"


Value = int | SizePolynomial


def to_polynomial(x: Value) -> SizePolynomial:
    """`x` as a formula."""
    if isinstance(x, SizePolynomial):
        return x
    return SizePolynomial((((), x),) if x else ())


def constant_value(x: Value) -> int | None:
    """The number that `x` equals if it is constant, else None."""
    return x if isinstance(x, int) else x.value


def min_of(a: Value, b: Value) -> Value:
    """The minimum of two numbers or formulas."""
    return _make_extremum("min", a, b)


def max_of(a: Value, b: Value) -> Value:
    """The maximum of two numbers or formulas."""
    return _make_extremum("max", a, b)


def _make_extremum(op: str, a: Value, b: Value) -> Value:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if op == "min" else max(a, b)
    operands = _list_extremum_operands(op, a)
    for x in _list_extremum_operands(op, b):
        _add_operand(op, operands, x)
    return reduce(lambda x, y: _make_operation_atom(op, to_polynomial(x), to_polynomial(y)), operands)


def _list_extremum_operands(op: str, x: Value) -> list[Value]:
    """The operands of `x` as a minimum or maximum; `x` itself if it is neither."""
    match x:
        case SizePolynomial(terms=(((SizeOperation() as atom,), 1),)) if atom.op == op:
            return [*_list_extremum_operands(op, atom.left), *_list_extremum_operands(op, atom.right)]
    return [x]


def _add_operand(op: str, operands: list[Value], x: Value) -> None:
    """Add `x` to the operands of an extremum; if one of them is comparable to `x`, keep only the better of the two."""
    for n, known in enumerate(operands):
        difference = constant_value(_subtract_for_sign(known, x))
        if difference is not None:
            operands[n] = known if (difference <= 0) == (op == "min") else x
            return
    operands.append(x)


def _subtract_for_sign(a: Value, b: Value) -> Value:
    """`a - b`; for two quotients by the same positive divisor, the difference of the numerators instead.

    Its sign decides which is better: if it is <= 0, `a <= b`; if it is >= 0, `a >= b`.
    """
    left, right = as_quotient(to_polynomial(a)), as_quotient(to_polynomial(b))
    if left is not None and right is not None and left[1] == right[1]:
        return left[0] - right[0]
    return to_polynomial(a) - b


def as_quotient(x: SizePolynomial) -> tuple[SizePolynomial, int] | None:
    """Return `n, d` with `x = floor(n / d)` if `x` is a quotient by a positive number plus a number, else None."""
    shift = sum(c for m, c in x.terms if not m)
    rest = [(m, c) for m, c in x.terms if m]
    if len(rest) != 1 or rest[0][1] != 1 or len(rest[0][0]) != 1:
        return None
    atom = rest[0][0][0]
    if not isinstance(atom, SizeOperation) or atom.op != "/":
        return None
    divisor = atom.right.value
    return None if divisor is None or divisor <= 0 else (atom.left + shift * divisor, divisor)


def _divide(a: SizePolynomial, b: SizePolynomial) -> SizePolynomial:
    divisor = b.value
    if not a.terms:
        return a
    if divisor == 0:
        raise InternalError("a formula divides by zero")
    if divisor is None:
        return to_polynomial(1) if a == b else _make_operation_atom("/", a, b)
    if divisor < 0:
        return _divide(-a, to_polynomial(-divisor))
    whole = SizePolynomial(tuple((m, c // divisor) for m, c in a.terms if c // divisor and (c % divisor == 0 or not m)))
    rest = a - whole * divisor
    return whole if not rest.terms else whole + _make_quotient(rest, divisor)


def _make_quotient(a: SizePolynomial, divisor: int) -> SizePolynomial:
    value = a.value
    return (
        to_polynomial(value // divisor) if value is not None else _make_operation_atom("/", a, to_polynomial(divisor))
    )


def _remainder(a: SizePolynomial, b: SizePolynomial) -> SizePolynomial:
    y = b.value
    if y:
        rest = SizePolynomial(tuple((m, c % y) for m, c in a.terms if c % y)).value
        if rest is not None:
            return to_polynomial(rest % y)
    return _make_operation_atom("%", a, b)


def _make_operation_atom(op: str, a: SizePolynomial, b: SizePolynomial) -> SizePolynomial:
    return SizePolynomial((((SizeOperation(op, a, b),), 1),))


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "/": lambda a, b: a // b, "%": lambda a, b: a % b, "min": min, "max": max,
}  # fmt: skip


def _evaluate(atom: Atom, sizes: Mapping[str, int]) -> int:
    match atom:
        case SizeName(name=name):
            return sizes[name]
        case SizeOperation(op=op, left=a, right=b):
            return _OPERATIONS[op](a.evaluate(sizes), b.evaluate(sizes))


def _parenthesize(x: SizePolynomial) -> str:
    simple = len(x.terms) == 1 and (
        not x.terms[0][0] or (x.terms[0][1] == 1 and isinstance(x.terms[0][0][0], SizeName))
    )
    return str(x) if simple and len(x.terms[0][0]) <= 1 else f"({x})"


def _print_monomial(monomial: Monomial, coefficient: int, *, alone: bool) -> str:
    """Print a monomial. alone: whether no operator precedes it, so that a quotient needs no parentheses."""
    factors = [] if coefficient == 1 and monomial else [str(coefficient)]
    alone &= coefficient == 1 and len(monomial) == 1
    for atom in monomial:
        quotient = isinstance(atom, SizeOperation) and atom.op in ("/", "%")
        factors.append(f"({atom})" if quotient and not alone else str(atom))
    return "*".join(factors)
