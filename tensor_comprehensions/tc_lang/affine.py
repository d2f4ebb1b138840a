"""Integer expressions as sums of atoms with coefficients, and the intervals they range over.

One representation serves range inference (coefficients may be formulas in sizes) and binding (all are numbers). The
atoms are index variables, floor quotients and remainders of affine forms by a constant, and opaque atoms for all other
expressions: products of indices, minima, reads of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..core.dtypes import INT64, DType, Kind, wrap_integer
from ..core.errors import InternalError
from .ir import Access, Binary, Cast, Const, Expr, Index, Select, Size, Unary, operands_of, walk_expr, with_operands
from .size_polynomial import Value, constant_value, max_of, min_of


@dataclass(frozen=True, slots=True)
class Variable:
    """An index variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Quotient:
    """`floor(inner / divisor)`, the divisor constant and not 1."""

    inner: Affine
    divisor: Value


@dataclass(frozen=True, slots=True)
class Remainder:
    """`inner mod divisor`, with the sign of the divisor."""

    inner: Affine
    divisor: Value


@dataclass(frozen=True, slots=True)
class Opaque:
    """An expression that is not affine; its integer operands are in normal form."""

    expr: Expr


Atom = Variable | Quotient | Remainder | Opaque


@dataclass(frozen=True, slots=True)
class Affine:
    """`constant + sum of coefficient * atom`, no coefficient zero."""

    constant: Value
    terms: tuple[tuple[Atom, Value], ...] = ()

    def __add__(self, other: Affine) -> Affine:
        sums: dict[Atom, Value] = dict(self.terms)
        for atom, c in other.terms:
            sums[atom] = sums[atom] + c if atom in sums else c
        return Affine(self.constant + other.constant, tuple((a, c) for a, c in sums.items() if constant_value(c) != 0))

    def scale(self, factor: Value) -> Affine:
        """This form times a constant."""
        if constant_value(factor) == 0:
            return Affine(0)
        return Affine(self.constant * factor, tuple((a, c * factor) for a, c in self.terms))

    def __sub__(self, other: Affine) -> Affine:
        return self + other.scale(-1)

    def join_remainders(self) -> Affine:
        """This form with each `d * (e / d) + e % d` replaced by `e`."""
        factors: dict[Atom, Value] = dict(self.terms)
        for atom, factor in self.terms:
            if isinstance(atom, Remainder):
                quotient = Quotient(atom.inner, atom.divisor)
                if factors.get(quotient) == atom.divisor * factor:
                    rest = Affine(self.constant, tuple(t for t in self.terms if t[0] not in (atom, quotient)))
                    return (rest + atom.inner.scale(factor)).join_remainders()
        return self

    def shift(self, by: Value) -> Affine:
        """This form plus a constant."""
        return Affine(self.constant + by, self.terms)

    def __str__(self) -> str:
        text = ""
        for atom, c in (*self.terms, (None, self.constant)):
            n = constant_value(c)
            if n == 0:
                continue
            factor = str(abs(n)) if n is not None else f"({c})"
            negative = n is not None and n < 0
            if atom is None:
                term = factor.strip("()") if not text else factor
            else:
                term = _atom_text(atom) if factor == "1" else f"{factor}*{_atom_text(atom)}"
            text += ("-" if negative else "") if not text else (" - " if negative else " + ")
            text += term
        return text or "0"


def _atom_text(atom: Atom) -> str:
    match atom:
        case Variable(name=name):
            return name
        case Quotient(inner=inner, divisor=d):
            return f"({inner})/{d}"
        case Remainder(inner=inner, divisor=d):
            return f"({inner})%{d}"
    return "(...)"


def to_affine(e: Expr, sizes: Mapping[str, Value]) -> Affine:
    """Convert an integer expression to an affine form; `sizes` gives each `Size` its value, a number or a formula."""
    match e:
        case Const(value=value):
            return Affine(int(value))
        case Size(name=name):
            return Affine(sizes[name])
        case Index(name=name):
            return Affine(0, ((Variable(name), 1),))
        case Unary(op="-", operand=x):
            return to_affine(x, sizes).scale(-1)
        case Binary(op="+", left=a, right=b):
            return to_affine(a, sizes) + to_affine(b, sizes)
        case Binary(op="-", left=a, right=b):
            return to_affine(a, sizes) - to_affine(b, sizes)
        case Binary(op="*", left=a, right=b):
            return _multiply_affine(e, to_affine(a, sizes), to_affine(b, sizes), sizes)
        case Binary(op="/" | "%", left=a, right=b):
            return _divide_affine(e, to_affine(a, sizes), to_affine(b, sizes), sizes)
        case Binary(op="min" | "max" as op, left=a, right=b):
            return _make_affine_extremum(e, op, to_affine(a, sizes), to_affine(b, sizes), sizes)
    return _make_opaque(e, sizes)


def _multiply_affine(e: Expr, a: Affine, b: Affine, sizes: Mapping[str, Value]) -> Affine:
    if not b.terms:
        return a.scale(b.constant)
    return b.scale(a.constant) if not a.terms else _make_opaque(e, sizes)


def _make_affine_extremum(e: Expr, op: str, a: Affine, b: Affine, sizes: Mapping[str, Value]) -> Affine:
    if a.terms or b.terms:
        return _make_opaque(e, sizes)
    return Affine((min_of if op == "min" else max_of)(a.constant, b.constant))


def _divide_affine(e: Binary, a: Affine, b: Affine, sizes: Mapping[str, Value]) -> Affine:
    divisor = b.constant
    if b.terms or constant_value(divisor) == 0:
        return _make_opaque(e, sizes)
    if not a.terms:
        return Affine(a.constant // divisor if e.op == "/" else a.constant % divisor)
    d = constant_value(divisor)
    if d is None:
        return Affine(0, (((Quotient if e.op == "/" else Remainder)(a, divisor), 1),))
    if d < 0 and e.op == "/":
        a, d = a.scale(-1), -d
    whole, rest = _split_by_divisor(a, d)
    if e.op == "/":
        return whole if not rest.terms and constant_value(rest.constant) == 0 else whole + _make_quotient(rest, d)
    return Affine(rest.constant % d) if not rest.terms else Affine(0, ((Remainder(rest, d), 1),))


def _split_by_divisor(a: Affine, d: int) -> tuple[Affine, Affine]:
    """Return `whole, rest` with `a = d * whole + rest`; `whole` has all terms that `d` divides."""
    whole = [(atom, c // d) for atom, c in a.terms if isinstance(c, int) and c % d == 0]
    rest = [(atom, c) for atom, c in a.terms if not (isinstance(c, int) and c % d == 0)]
    constant = a.constant // d if isinstance(a.constant, int) else 0
    return Affine(constant, tuple(whole)), Affine(a.constant - constant * d, tuple(rest))


def _make_quotient(a: Affine, d: int) -> Affine:
    if not a.terms:
        return Affine(a.constant // d)
    return Affine(0, ((Quotient(a, d), 1),))


def _make_opaque(e: Expr, sizes: Mapping[str, Value]) -> Affine:
    """`e` as an opaque atom. If all sizes are numbers, operands are normalized, so that equal atoms compare equal."""
    if all(isinstance(v, int) for v in sizes.values()):
        e = with_operands(e, [normalize_subscript(x, sizes) for x in operands_of(e)])
    return Affine(0, ((Opaque(e), 1),))


# --- back to expressions -------------------------------------------------------------------------------------------


def normalize_subscript(e: Expr, sizes: Mapping[str, Value]) -> Expr:
    """Replace the sizes in a subscript by numbers, and normalize its int64 parts."""
    if isinstance(e, Size):
        return Const(_int(sizes[e.name]), e.dtype)
    if e.dtype == INT64 and isinstance(e, Binary | Unary):
        return affine_to_expression(to_affine(e, sizes).join_remainders())
    return with_operands(e, [normalize_subscript(x, sizes) for x in operands_of(e)])


def substitute_sizes(e: Expr, sizes: Mapping[str, Value]) -> Expr:
    """Replace the sizes in a value by numbers. Subscripts are normalized; other arithmetic is not, as it may wrap."""
    if isinstance(e, Size):
        return Const(wrap_integer(_int(sizes[e.name]), e.dtype), e.dtype)
    step = normalize_subscript if isinstance(e, Access) else substitute_sizes
    return with_operands(e, [step(x, sizes) for x in operands_of(e)])


def affine_to_expression(a: Affine) -> Expr:
    """Convert an affine form with only numbers to an int64 expression: atoms in order, then the constant."""
    out: Expr | None = None
    for atom, c in a.terms:
        out = _plus(out, _atom_expression(atom), _int(c))
    constant = _int(a.constant)
    if out is None:
        return Const(constant, INT64)
    if constant == 0:
        return out
    return Binary("+" if constant > 0 else "-", out, Const(abs(constant), INT64), INT64)


def _plus(sum: Expr | None, atom: Expr, c: int) -> Expr:
    term = atom if abs(c) == 1 else Binary("*", atom, Const(abs(c) if sum is not None else c, INT64), INT64)
    if sum is None:
        return Unary("-", term, INT64) if c == -1 else term
    return Binary("+" if c > 0 else "-", sum, term, INT64)


def _atom_expression(atom: Atom) -> Expr:
    match atom:
        case Variable(name=name):
            return Index(name, INT64)
        case Quotient(inner=inner, divisor=d):
            return Binary("/", affine_to_expression(inner), Const(_int(d), INT64), INT64)
        case Remainder(inner=inner, divisor=d):
            return Binary("%", affine_to_expression(inner), Const(_int(d), INT64), INT64)
        case Opaque(expr=e):
            return e


def _int(x: Value) -> int:
    n = constant_value(x)
    if n is None:
        raise InternalError(f"a formula where a number is needed: {x}")
    return n


# --- what an affine form depends on --------------------------------------------------------------------------------


def affine_variables(a: Affine) -> Iterator[str]:
    """The index variables that occur in an affine form, in order, with repetitions."""
    for atom, _ in a.terms:
        match atom:
            case Variable(name=name):
                yield name
            case Quotient(inner=inner) | Remainder(inner=inner):
                yield from affine_variables(inner)
            case Opaque(expr=e):
                yield from (x.name for x in walk_expr(e) if isinstance(x, Index))


def reads_tensors(e: Expr) -> bool:
    """Whether the value of `e` depends on data."""
    return any(isinstance(x, Access) for x in walk_expr(e))


# --- intervals -----------------------------------------------------------------------------------------------------

Interval = tuple[int, int]
"""The least and the greatest value, both included."""


def expr_interval(e: Expr, box: Mapping[str, Interval]) -> Interval:
    """An interval that contains every value of the integer expression `e`, without sizes, for indices in `box`."""
    match e:
        case Const(value=value):
            return int(value), int(value)
        case Index(name=name):
            return box[name]
        case Access(dtype=dtype):
            return dtype_interval(dtype)
        case Cast(operand=x, dtype=dtype):
            return _cast_interval(x, dtype, box)
        case Select(then=a, otherwise=b):
            return _hull(expr_interval(a, box), expr_interval(b, box))
        case Binary(op="+" | "-" | "*" | "/" | "%", dtype=dtype) | Unary(op="-", dtype=dtype) if dtype.is_integer:
            return _clip_interval(affine_interval(to_affine_cached(e), box), dtype)
        case Binary(op="min", left=a, right=b):
            (l0, h0), (l1, h1) = expr_interval(a, box), expr_interval(b, box)
            return min(l0, l1), min(h0, h1)
        case Binary(op="max", left=a, right=b):
            (l0, h0), (l1, h1) = expr_interval(a, box), expr_interval(b, box)
            return max(l0, l1), max(h0, h1)
    return dtype_interval(e.dtype)


def to_affine_cached(e: Expr) -> Affine:
    """The affine form of an expression without sizes, cached."""
    return to_affine(e, {})


def affine_interval(a: Affine, box: Mapping[str, Interval]) -> Interval:
    """An interval that contains every value of an affine form; exact when its atoms are distinct variables."""
    low = high = _int(a.constant)
    for atom, coefficient in a.terms:
        c = _int(coefficient)
        x, y = _atom_interval(atom, box)
        low, high = low + min(c * x, c * y), high + max(c * x, c * y)
    return low, high


def _atom_interval(atom: Atom, box: Mapping[str, Interval]) -> Interval:
    match atom:
        case Variable(name=name):
            return box[name]
        case Quotient(inner=inner, divisor=divisor):
            low, high = affine_interval(inner, box)
            ends = (low // _int(divisor), high // _int(divisor))
            return min(ends), max(ends)
        case Remainder(inner=inner, divisor=divisor):
            low, high = affine_interval(inner, box)
            d = _int(divisor)
            if low // d == high // d:
                return min(low % d, high % d), max(low % d, high % d)
            return (0, d - 1) if d > 0 else (d + 1, 0)
        case Opaque(expr=e):
            return _opaque_interval(e, box)


def _opaque_interval(e: Expr, box: Mapping[str, Interval]) -> Interval:
    match e:
        case Binary(op="*", left=a, right=b):
            (l0, h0), (l1, h1) = expr_interval(a, box), expr_interval(b, box)
            corners = (l0 * l1, l0 * h1, h0 * l1, h0 * h1)
            return min(corners), max(corners)
        case Binary(op="%", left=a, right=b):
            low, high = expr_interval(b, box)
            top = max(abs(low), abs(high))
            return (0, max(0, high - 1)) if low >= 0 else (-top, top)
        case Binary(op="/", left=a, right=b):
            low, high = expr_interval(a, box)
            top = max(abs(low), abs(high))
            return (0, max(0, high)) if low >= 0 and expr_interval(b, box)[0] >= 0 else (-top, top)
        case Unary() | Binary(op="+" | "-"):
            return dtype_interval(e.dtype)
    return expr_interval(e, box)


def _cast_interval(x: Expr, dtype: DType, box: Mapping[str, Interval]) -> Interval:
    if not dtype.is_integer or not (x.dtype.is_integer or x.dtype.is_bool):
        return dtype_interval(dtype)
    return _clip_interval(expr_interval(x, box), dtype)


def _clip_interval(i: Interval, dtype: DType) -> Interval:
    """`i` if `dtype` can represent it; else the range of `dtype`, because the value may wrap."""
    low, high = dtype_interval(dtype)
    return i if low <= i[0] and i[1] <= high else (low, high)


def _hull(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), max(a[1], b[1])


def dtype_interval(dtype: DType) -> Interval:
    """The least and greatest value of an integer type or bool."""
    if dtype.is_bool:
        return 0, 1
    if dtype.kind is Kind.UNSIGNED:
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1
