"""Checked expressions and formulas as syntax trees, the inverse of `check`."""

from __future__ import annotations

import math

from ...core.dtypes import BOOL, FLOAT32, INT32, INT64
from ...core.errors import InternalError
from ..affine import Affine, Variable
from ..ir import Access, Binary, Call, Cast, Const, Expr, Index, Select, Size, Unary
from ..size_polynomial import SizeName, SizeOperation, SizePolynomial, Value, constant_value
from ..syntax import tree as s

ZERO = Const(0, INT64)


def expr_to_syntax(e: Expr, index: bool = False) -> s.Expression:
    """The syntax tree of `e`; `index`: as a subscript, where integers are widened implicitly."""
    match e:
        case Const():
            return _typed_literal(e, index)
        case Size(name=name) | Index(name=name):
            return s.Name(name)
        case Access(tensor=name, subscripts=()):
            return s.Name(name)
        case Access(tensor=name, subscripts=subscripts):
            return s.Apply(name, tuple(expr_to_syntax(x, True) for x in subscripts))
        case Unary(op=op, operand=x):
            return s.Unary(op, expr_to_syntax(x, index))
        case Binary(op=op, left=a, right=b):
            if (argument := sigmoid_argument(e)) is not None:
                return s.Apply("sigmoid", (expr_to_syntax(argument),))
            left, right = _operand_to_syntax(a, b, index), _operand_to_syntax(b, a, index)
            return s.Apply(op, (left, right)) if op in ("min", "max") else s.Binary(op, left, right)
        case Select(condition=c, then=a, otherwise=b):
            return s.Conditional(
                expr_to_syntax(c, index), _literal_to_syntax(a, b, index), _literal_to_syntax(b, a, index)
            )
        case Cast(operand=x, dtype=dtype):
            widened = index and dtype == INT64 and x.dtype.is_integer
            return expr_to_syntax(x, index) if widened else s.Cast(dtype, expr_to_syntax(x))
        case Call(function=name, arguments=arguments):
            return s.Apply(name, tuple(expr_to_syntax(x, index) for x in arguments))
    raise InternalError(f"not an expression: {e!r}")


def sigmoid_argument(e: Expr) -> Expr | None:
    """`x` if `e` is the expansion of the builtin `sigmoid(x)`, else None."""
    match e:
        case Binary(
            op="/",
            left=Const(value=1.0),
            right=Binary(
                op="+", left=Const(value=1.0), right=Call(function="exp", arguments=(Unary(op="-", operand=x),))
            ),
        ):
            return x
    return None


def _operand_to_syntax(e: Expr, other: Expr, index: bool) -> s.Expression:
    """An operand of a binary operator, without a cast that the type of the other operand implies."""
    match e:
        case Cast(operand=x, dtype=dtype) if (
            dtype.is_float and dtype.bits >= 32 and x.dtype.is_integer and not isinstance(x, Const)
        ):
            if isinstance(other, Access | Binary | Call | Select | Unary):
                return expr_to_syntax(x, index)
    return _literal_to_syntax(e, other, index)


def _literal_to_syntax(e: Expr, other: Expr, index: bool) -> s.Expression:
    """An operand; a literal is untyped if the other operand determines its type."""
    if isinstance(e, Const) and not isinstance(other, Const) and not e.dtype.is_bool:
        return _number_to_syntax(e.value)
    return expr_to_syntax(e, index)


def _typed_literal(e: Const, index: bool) -> s.Expression:
    if e.dtype in (FLOAT32, INT32) or (index and e.dtype.is_integer):
        return _number_to_syntax(e.value)
    return s.Cast(e.dtype, s.Number(int(e.value)) if e.dtype == BOOL else _number_to_syntax(e.value))


def _number_to_syntax(value: int | float | bool) -> s.Expression:
    if isinstance(value, float) and not math.isfinite(value):
        name = s.Name("nan" if math.isnan(value) else "inf")
        return s.Unary("-", name) if value == -math.inf else name
    negative = math.copysign(1.0, value) < 0
    return s.Unary("-", s.Number(-value)) if negative else s.Number(value)


# --- sums ------------------------------------------------------------------------------------------------------------


def polynomial_to_expr(x: Value) -> Expr:
    """A number or a formula in sizes as an int64 expression."""
    if isinstance(x, int):
        return Const(x, INT64)
    terms = []
    for monomial, coefficient in x.terms:
        product: Expr | None = None
        for atom in monomial:
            factor = _of_atom(atom)
            product = factor if product is None else Binary("*", product, factor, INT64)
        terms.append((coefficient, product))
    return _make_linear_combination(terms)


def _of_atom(atom: SizeName | SizeOperation) -> Expr:
    match atom:
        case SizeName(name=name):
            return Size(name, INT64)
        case SizeOperation(op=op, left=a, right=b):
            return Binary(op, polynomial_to_expr(a), polynomial_to_expr(b), INT64)


def affine_to_expr(a: Affine) -> Expr:
    """A sum of index variables with a constant as an int64 expression."""
    terms: list[tuple[int, Expr | None]] = []
    for atom, c in a.terms:
        assert isinstance(atom, Variable)
        n, variable = constant_value(c), Index(atom.name, INT64)
        terms.append((n, variable) if n is not None else (1, Binary("*", polynomial_to_expr(c), variable, INT64)))
    constant = a.constant
    if isinstance(constant, SizePolynomial):
        for monomial, coefficient in constant.terms:
            terms.append((coefficient, polynomial_to_expr(SizePolynomial(((monomial, 1),))) if monomial else None))
    elif constant:
        terms.append((constant, None))
    return _make_linear_combination(terms)


def _make_linear_combination(terms: list[tuple[int, Expr | None]]) -> Expr:
    """The sum of products of a number and an expression (None: the number alone), positive terms first."""
    out: Expr | None = None
    for coefficient, e in sorted((t for t in terms if t[0]), key=lambda t: (t[1] is None, t[0] < 0)):
        size = abs(coefficient)
        term: Expr = Const(size, INT64) if e is None else e if size == 1 else Binary("*", Const(size, INT64), e, INT64)
        if out is None:
            out = term if coefficient > 0 else Unary("-", term, INT64)
        else:
            out = Binary("+" if coefficient > 0 else "-", out, term, INT64)
    return ZERO if out is None else out
