"""Drop statements of a gradient that add zero, by a normal form for sums of products with totals over indices.

The gradient through the maximum that a softmax subtracts is zero, since its sums cancel, and so is the sum of
deviations from a mean. Rounding is ignored: a sum that is zero in exact arithmetic is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from math import isfinite

from ...core.dtypes import INT64
from ..affine import to_affine
from ..binding.ranges import Bounds
from ..ir import Access, Binary, Call, Cast, Const, Expr, Index, Select, Unary, map_operands, walk_expr
from ..size_polynomial import SizePolynomial, Value, to_polynomial
from .adjoint_access import substitute_indices, uses_index
from .emit import GradStatement
from .ssa import SsaProgram, SsaStatement, are_bare_indices, is_restricted_by_exists, range_extent

MOST = 64
"""Maximum terms of a sum for which a proof is tried."""
MOST_INDICES = 3
"""Maximum indices of nested totals that are put into a normal order: all their permutations are compared."""


@dataclass(frozen=True, slots=True)
class SizeAmount:
    """A size or a number of points, as an atom."""

    value: SizePolynomial


@dataclass(frozen=True, slots=True)
class IndexTotal:
    """The sum of a product over all values of some indices, which are renamed to numbers in a canonical order."""

    indices: tuple[str, ...]
    bounds: tuple[Bounds, ...]
    body: Monomial


Atom = Expr | SizeAmount | IndexTotal
Monomial = tuple[tuple[Atom, int], ...]
Polynomial = dict[Monomial, Fraction]


class _TooLarge(Exception):
    """A sum has too many terms for a proof."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The values of a tensor as a polynomial over its own indices `left`."""

    left: tuple[str, ...]
    value: Polynomial


def drop_zero_statements(
    steps: SsaProgram, written: Iterable[GradStatement], sizes: Mapping[str, Value]
) -> list[GradStatement]:
    """The statements of a gradient without those that always add zero."""
    algebra = _ZeroSumProver(steps, sizes, {s.target: s for s in steps.steps})
    return [kept for w in written if (kept := algebra.run(w)) is not None]


@dataclass(slots=True)
class _ZeroSumProver:
    """Knowledge from the statements so far.

    versions, gradients: the values of tensors of the def and of the gradient; None if unknown. boxes: the ranges of
    the values of gradients. changed: how often each gradient was written.
    """

    steps: SsaProgram
    sizes: Mapping[str, Value]
    made: Mapping[str, SsaStatement]
    versions: dict[str, _Known | None] = field(default_factory=dict)
    gradients: dict[str, _Known | None] = field(default_factory=dict)
    boxes: dict[str, tuple[Bounds, ...]] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)

    def run(self, w: GradStatement) -> GradStatement | None:
        """`w`, or a simpler statement; None if it adds zero."""
        if w.exists:  # a sum over only some points
            self._note(w, None)
            return w
        left = tuple(e.name for e in w.subscripts if isinstance(e, Index))
        plain = are_bare_indices(w.subscripts)
        rest = [i for i in w.ranges if i not in left]
        try:
            value = self.polynomial(w.value)
            for i in rest if plain else ():
                value = _sum_over_index(value, i, w.ranges[i], self._substitute)
        except _TooLarge:
            self._note(w, None)
            return w
        if not value and w.op == "+=":
            return None
        self._note(w, _Known(left, value) if plain and w.op in ("=", "+=", "+=!") else None)
        if not value and w.op == "+=!" and plain:
            ranges = {i: w.ranges[i] for i in left}
            return replace(w, op="=", value=Const(0.0, w.value.dtype), ranges=ranges, exists=())
        return w

    def _note(self, w: GradStatement, known: _Known | None) -> None:
        """Record that `w` has run and what its target then holds, if known."""
        box = tuple(w.ranges[e.name] for e in w.subscripts if isinstance(e, Index))
        before = self.gradients.get(w.target)
        if w.op == "+=" or self.boxes.get(w.target, box) != box:
            if known is None or before is None or self.boxes[w.target] != box or w.op == "=":
                known = None
            else:
                renamed = {old: Index(new, INT64) for old, new in zip(known.left, before.left, strict=True)}
                try:
                    known = _Known(before.left, _add_polynomials(before.value, self._substitute(known.value, renamed)))
                except _TooLarge:
                    known = None
        self.boxes.setdefault(w.target, box)
        self.gradients[w.target] = known
        self.changed[w.target] = self.changed.get(w.target, 0) + 1

    # --- expressions -------------------------------------------------------------------------------------------------

    def polynomial(self, e: Expr) -> Polynomial:
        """Convert an expression to its normal form. Raises _TooLarge."""
        match e:
            case Const(value=value) if isfinite(value):
                return {(): Fraction(value)} if value else {}
            case Access():
                return self._access(e)
            case Unary(op="-", operand=x):
                return _scale(self.polynomial(x), -1)
            case Cast(operand=x) if x.dtype.is_float:
                return self.polynomial(x)
            case Cast(operand=x) if (amount := self._as_size_value(x)) is not None:
                return _size_to_polynomial(amount)
            case Binary(op="+", left=a, right=b):
                return _add_polynomials(self.polynomial(a), self.polynomial(b))
            case Binary(op="-", left=a, right=b):
                return _add_polynomials(self.polynomial(a), _scale(self.polynomial(b), -1))
            case Binary(op="*", left=a, right=b):
                return _multiply_polynomials(self.polynomial(a), self.polynomial(b))
            case Binary(op="/", left=a, right=b):
                return _multiply_polynomials(self.polynomial(a), self._inverse(b))
            case Select(condition=c, then=a, otherwise=Const(value=0.0)):
                one = Select(c, Const(1.0, a.dtype), Const(0.0, a.dtype), a.dtype)
                return _multiply_polynomials(self.polynomial(a), _make_atom_polynomial(one))
            case Call(function="pow", arguments=(x, Const(value=2.0))):
                return _multiply_polynomials(self.polynomial(x), self.polynomial(x))
        return _make_atom_polynomial(e)

    def _inverse(self, e: Expr) -> Polynomial:
        value = self.polynomial(e)
        if len(value) != 1:
            return {((e, -1),): Fraction(1)}
        ((monomial, c),) = value.items()
        return {tuple((atom, -power) for atom, power in monomial): 1 / c}

    def _as_size_value(self, e: Expr) -> Value | None:
        """An integer expression as a formula in sizes, if it depends only on these, else None."""
        if any(isinstance(x, Index | Access) for x in walk_expr(e)):
            return None
        found = to_affine(e, self.sizes)
        return None if found.terms else found.constant

    def _access(self, e: Access) -> Polynomial:
        if e.tensor in self.changed:
            known = self.gradients[e.tensor]
            if known is None:
                return _make_atom_polynomial(replace(e, tensor=f"{e.tensor} #{self.changed[e.tensor]}"))
        else:
            known = self._version(e.tensor)
        if known is None or len(known.value) > MOST:
            return _make_atom_polynomial(e)
        return self._substitute(known.value, dict(zip(known.left, e.subscripts, strict=True)))

    def _version(self, name: str) -> _Known | None:
        """The values of a version of the def, if one statement defines all of its elements, else None."""
        if name not in self.versions:
            self.versions[name] = None  # unknown while it is being computed, because it depends on itself
            step = self.made.get(name)
            if step is None or step.before is not None or is_restricted_by_exists(step, self.steps.function):
                return None
            if step.op in ("=", "+=!") and are_bare_indices(step.subscripts):
                try:
                    value = self.polynomial(step.value)
                    for i in step.ranges:
                        value = value if i in step.left else _sum_over_index(value, i, step.ranges[i], self._substitute)
                except _TooLarge:
                    return None
                left = tuple(e.name for e in step.subscripts if isinstance(e, Index))
                self.versions[name] = _Known(left, value)
        return self.versions[name]

    def _substitute(self, value: Polynomial, indices: Mapping[str, Expr]) -> Polynomial:
        """`value` with expressions substituted for indices."""
        if all(isinstance(e, Index) and e.name == i for i, e in indices.items()):
            return value
        out: Polynomial = {}
        for monomial, c in value.items():
            out = _add_polynomials(out, {self._substitute_monomial(monomial, indices): c})
        return out

    def _substitute_monomial(self, monomial: Monomial, indices: Mapping[str, Expr]) -> Monomial:
        return _sort_powers((self._substitute_atom(atom, indices), power) for atom, power in monomial)

    def _substitute_atom(self, atom: Atom, indices: Mapping[str, Expr]) -> Atom:
        match atom:
            case SizeAmount():
                return atom
            case IndexTotal(body=body):
                return replace(atom, body=self._substitute_monomial(body, indices))
        return substitute_indices(atom, indices, self.sizes)


# --- sums of products ------------------------------------------------------------------------------------------------

Put = Callable[[Polynomial, Mapping[str, Expr]], Polynomial]


def _make_atom_polynomial(atom: Atom) -> Polynomial:
    """The polynomial of a single atom, with its indices in int64, like substituted ones."""
    if not isinstance(atom, SizeAmount | IndexTotal):
        atom = _with_long_indices(atom)
    return {((atom, 1),): Fraction(1)}


def _with_long_indices(e: Expr) -> Expr:
    return replace(e, dtype=INT64) if isinstance(e, Index) else map_operands(e, _with_long_indices)


def _size_to_polynomial(x: Value) -> Polynomial:
    """A size as a polynomial of `SizeAmount` atoms."""
    out: Polynomial = {}
    for monomial, c in to_polynomial(x).terms:
        powers: dict[Atom, int] = {}
        for name in monomial:
            atom = SizeAmount(SizePolynomial((((name,), 1),)))
            powers[atom] = powers.get(atom, 0) + 1
        out = _add_polynomials(out, {_sort_powers(powers.items()): Fraction(c)})
    return out


def _scale(a: Polynomial, factor: int) -> Polynomial:
    return {m: c * factor for m, c in a.items()}


def _add_polynomials(a: Polynomial, b: Polynomial) -> Polynomial:
    out = dict(a)
    for m, c in b.items():
        _add_monomial(out, m, c)
    return out


def _add_monomial(out: Polynomial, m: Monomial, c: Fraction) -> None:
    """Add a term to `out` in place. Raises _TooLarge."""
    c += out.get(m, 0)
    if c:
        out[m] = c
    else:
        out.pop(m, None)
    if len(out) > MOST:
        raise _TooLarge


def _multiply_polynomials(a: Polynomial, b: Polynomial) -> Polynomial:
    out: Polynomial = {}
    for m, c in a.items():
        for n, d in b.items():
            powers: dict[Atom, int] = dict(m)
            for atom, power in n:
                powers[atom] = 1 if _is_condition(atom) else powers.get(atom, 0) + power
            _add_monomial(out, _sort_powers((atom, p) for atom, p in powers.items() if p), c * d)
    return out


def _sort_powers(powers: Iterable[tuple[Atom, int]]) -> Monomial:
    return tuple(sorted(powers, key=lambda p: _print_atom(p[0])))


@lru_cache(maxsize=4096)
def _print_atom(atom: Atom) -> str:
    return repr(atom)


def _is_condition(atom: Atom) -> bool:
    """Whether the atom is always 1 or 0, so that it equals its square."""
    return isinstance(atom, Select) and isinstance(atom.then, Const) and atom.then.value == 1.0


def _sum_over_index(value: Polynomial, index: str, bounds: Bounds, put: Put) -> Polynomial:
    """Sum over all values of an index; factors that do not depend on it are moved out."""
    out: Polynomial = {}
    for monomial, c in value.items():
        inside = tuple((atom, p) for atom, p in monomial if _depends_on_index(atom, index))
        outside: Polynomial = {tuple((atom, p) for atom, p in monomial if not _depends_on_index(atom, index)): c}
        over = (
            _size_to_polynomial(range_extent(bounds))
            if not inside
            else _make_atom_polynomial(_exchange_sums(inside, index, bounds, put))
        )
        out = _add_polynomials(out, _multiply_polynomials(outside, over))
    return out


def _exchange_sums(body: Monomial, index: str, bounds: Bounds, put: Put) -> IndexTotal:
    """The total of a product over an index, merged with totals among its factors into a canonical order of indices."""
    over: list[tuple[str, Bounds]] = [(index, bounds)]
    factors: dict[Atom, int] = {}
    for atom, power in body:
        if not (isinstance(atom, IndexTotal) and power == 1 and len(over) + len(atom.indices) <= MOST_INDICES):
            factors[atom] = factors.get(atom, 0) + power
            continue
        names = [f"{name} of {len(over)}" for name in atom.indices]
        renamed = {old: Index(new, INT64) for old, new in zip(atom.indices, names, strict=True)}
        ((inner, _),) = put({atom.body: Fraction(1)}, renamed).items()
        for x, p in inner:
            factors[x] = 1 if _is_condition(x) else factors.get(x, 0) + p
        over += zip(names, atom.bounds, strict=True)
    product = _sort_powers(factors.items())
    first = 1 + max(_max_index_number(atom) for atom in factors)
    numbers = [f"${first + k}" for k in range(len(over))]
    return min((_number_indices(product, order, numbers, put) for order in permutations(over)), key=_print_atom)


def _number_indices(body: Monomial, over: Sequence[tuple[str, Bounds]], numbers: Sequence[str], put: Put) -> IndexTotal:
    renamed = {name: Index(number, INT64) for (name, _), number in zip(over, numbers, strict=True)}
    ((product, _),) = put({body: Fraction(1)}, renamed).items()
    return IndexTotal(tuple(numbers), tuple(b for _, b in over), product)


def _depends_on_index(atom: Atom, index: str) -> bool:
    match atom:
        case SizeAmount():
            return False
        case IndexTotal(body=body):
            return any(_depends_on_index(inner, index) for inner, _ in body)
    return uses_index(index, atom)


def _max_index_number(atom: Atom) -> int:
    """The largest number that names an index of the totals in an atom; 0 if there is none."""
    if not isinstance(atom, IndexTotal):
        return 0
    return max(*(int(name[1:]) for name in atom.indices), *(_max_index_number(inner) for inner, _ in atom.body))
