"""The derivatives of an expression with respect to the tensor elements that it reads.

Conventions at the points where a function has no derivative:
- `min` and `max` of two expressions split the gradient equally at a tie, as torch does;
- `fmin` and `fmax` give it to the first operand, as torch 2.13 does (2.15 splits it);
- at a tie with a constant, as in `relu`, it is 0: the gradient of `relu` at 0 is 0;
- `abs` has the gradient 0 at 0, and rounding functions, `logb` among them, have the gradient 0 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice

from ...core.dtypes import BOOL, DType
from ..ir import Access, Binary, Call, Cast, Const, Expr, Select, Unary, operands_of, walk_expr, with_operands
from ..semantics.to_syntax import sigmoid_argument

MOST = 5000
"""Maximum nodes of the derivative by one access."""

CHAIN = 64
"""Maximum terms of a sum in one chain of additions."""

Guards = tuple[Expr, ...]
"""Conditions that must all hold for a derivative to apply."""


class NoDerivative(Exception):
    """A function has no derivative that the language can express."""


@dataclass(slots=True)
class Derivatives:
    """The derivatives of one expression with respect to its reads: access -> guards -> gradient.

    root: the whole expression. result: the element that stores its value, if any.
    """

    root: Expr
    result: Access | None
    parts: dict[Access, dict[Guards, list[Expr]]] = field(default_factory=dict)

    def add(self, access: Access, guards: Guards, value: Expr) -> None:
        self.parts.setdefault(access, {}).setdefault(guards, []).append(value)


def derivatives_of(e: Expr, seed: Expr, result: Access | None = None) -> dict[Access, Expr]:
    """Map each access in `e` to the derivative of `e` with respect to it, times `seed`.

    `seed` has the type in which `e` computes; each derivative has the accumulator type of its tensor. Derivatives that
    need the value of `e` read `result`, if given. Raises NoDerivative.
    """
    out = Derivatives(e, result)
    _pull_expr(e, seed, (), out)
    found = {}
    for access, parts in out.parts.items():
        total = sum_terms([guard_expr(guards, sum_terms(values)) for guards, values in parts.items()])
        if sum(1 for _ in islice(walk_expr(total), MOST)) == MOST:
            raise NoDerivative("the derivative of this expression is too large")
        found[access] = total if result is None else replace_expr(total, e, result)
    return found


def list_chosen_elements(e: Expr, guards: Guards = ()) -> dict[Access, list[Guards]]:
    """The floating-point elements that nested selects may choose, each with the alternative conditions for it."""
    match strip_casts(e):
        case Access() as element if element.dtype.is_float:
            return {element: [guards]}
        case Select(condition=c, then=a, otherwise=b):
            found = list_chosen_elements(a, (*guards, c))
            for element, ways in list_chosen_elements(b, (*guards, Unary("!", c, BOOL))).items():
                found.setdefault(element, []).extend(ways)
            return found
    return {}


def strip_casts(e: Expr) -> Expr:
    """The operand of all outer casts."""
    return strip_casts(e.operand) if isinstance(e, Cast) else e


def replace_expr(x: Expr, old: Expr, new: Expr) -> Expr:
    """`x` with every `old` replaced by `new`."""
    return new if x == old else with_operands(x, [replace_expr(y, old, new) for y in operands_of(x)])


def guard_expr(guards: Guards, value: Expr) -> Expr:
    """`value` where all guards hold, else 0."""
    if not guards:
        return value
    if isinstance(value, Select) and _is_constant_value(value.otherwise, 0.0):
        return guard_expr((*guards, value.condition), value.then)
    condition = guards[0]
    for g in guards[1:]:
        condition = Binary("&&", condition, g, BOOL)
    return Select(condition, value, Const(0.0, value.dtype), value.dtype)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def constant_like(value: float, like: Expr) -> Const:
    return Const(value, like.dtype)


def _is_constant_value(e: Expr, value: float) -> bool:
    return isinstance(e, Const) and e.value == value


def plus(a: Expr, b: Expr) -> Expr:
    if isinstance(b, Unary) and b.op == "-":
        return Binary("-", a, b.operand, a.dtype)
    return Binary("+", a, b, a.dtype)


def sum_terms(terms: Sequence[Expr]) -> Expr:
    """The sum of `terms`, as a tree if there are many, because a long chain would nest too deep."""
    while len(terms) > CHAIN:
        terms = [sum_terms(terms[k : k + CHAIN]) for k in range(0, len(terms), CHAIN)]
    return reduce(plus, terms)


def minus(a: Expr, b: Expr) -> Expr:
    return Binary("-", a, b, a.dtype)


def times(a: Expr, b: Expr) -> Expr:
    if _is_constant_value(a, 1.0):
        return b
    if _is_constant_value(b, 1.0):
        return a
    if isinstance(a, Unary) and a.op == "-":
        return negate_expr(times(a.operand, b))
    return Binary("*", a, b, a.dtype)


def divide_exprs(a: Expr, b: Expr) -> Expr:
    if isinstance(a, Unary) and a.op == "-":
        return negate_expr(divide_exprs(a.operand, b))
    return a if _is_constant_value(b, 1.0) else Binary("/", a, b, a.dtype)


def negate_expr(a: Expr) -> Expr:
    if isinstance(a, Unary) and a.op == "-":
        return a.operand
    return Unary("-", a, a.dtype)


def call_function(name: str, *xs: Expr) -> Expr:
    return Call(name, xs, xs[0].dtype)


def compare_exprs(op: str, a: Expr, b: Expr) -> Expr:
    return Binary(op, a, b, BOOL)


def convert_expr(e: Expr, to: DType) -> Expr:
    return e if e.dtype == to else Cast(e, to)


# --- the chain rule ---------------------------------------------------------------------------------------------------


def _pull_expr(e: Expr, seed: Expr, guards: Guards, out: Derivatives) -> None:
    if not e.dtype.is_float or not any(isinstance(x, Access) for x in walk_expr(e)):
        return
    if (x := sigmoid_argument(e)) is not None:
        _pull_expr(x, times(seed, times(e, minus(constant_like(1.0, e), e))), guards, out)
        return
    match e:
        case Access():
            out.add(e, guards, seed)
        case Unary(operand=x):
            _pull_expr(x, negate_expr(seed), guards, out)
        case Cast(operand=x):
            _pull_expr(x, convert_expr(seed, x.dtype.accumulator), guards, out)
        case Binary():
            _pull_binary(e, seed, guards, out)
        case Select(condition=c, then=a, otherwise=b):
            _pull_expr(a, seed, (*guards, c), out)
            _pull_expr(b, seed, (*guards, Unary("!", c, BOOL)), out)
        case Call(function=name, arguments=(x,)):
            if name in _FLAT:
                return
            if name not in _UNARY:
                raise NoDerivative(f"'{name}' has no derivative among the builtins")
            _pull_expr(x, _UNARY[name](seed, x, e), guards, out)
        case Call():
            _pull_call(e, seed, guards, out)


def _pull_binary(e: Binary, seed: Expr, guards: Guards, out: Derivatives) -> None:
    a, b = e.left, e.right
    match e.op:
        case "+":
            _pull_expr(a, seed, guards, out)
            _pull_expr(b, seed, guards, out)
        case "-":
            _pull_expr(a, seed, guards, out)
            _pull_expr(b, negate_expr(seed), guards, out)
        case "*":
            _pull_expr(a, times(seed, b), guards, out)
            _pull_expr(b, times(seed, a), guards, out)
        case "/":
            _pull_expr(a, divide_exprs(seed, b), guards, out)
            _pull_expr(b, negate_expr(divide_exprs(times(seed, e), b)), guards, out)
        case "min" | "max":
            _pull_extremum(e.op, e, seed, guards, out)


def _pull_extremum(name: str, e: Binary | Call, seed: Expr, guards: Guards, out: Derivatives) -> None:
    better, worse = (">", "<") if name.endswith("max") else ("<", ">")
    a, b = operands_of(e)
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Const):  # then comparing the result with `y` also tells which operand it is
            shown = e if e is out.root and out.result is not None else x
            _pull_expr(x, seed, (*guards, compare_exprs(better, shown, y)), out)
            return
    if name in ("fmin", "fmax"):
        first = Binary("||", compare_exprs(better + "=", a, b), compare_exprs("!=", b, b), BOOL)
        _pull_expr(a, seed, (*guards, first), out)
        _pull_expr(b, seed, (*guards, Unary("!", first, BOOL)), out)
        return
    half = Select(compare_exprs("==", a, b), times(constant_like(0.5, seed), seed), seed, seed.dtype)
    _pull_expr(a, half, (*guards, Unary("!", compare_exprs(worse, a, b), BOOL)), out)
    _pull_expr(b, half, (*guards, Unary("!", compare_exprs(worse, b, a), BOOL)), out)


def _pull_call(e: Call, seed: Expr, guards: Guards, out: Derivatives) -> None:
    a, b, *rest = e.arguments
    match e.function:
        case "fmin" | "fmax":
            _pull_extremum(e.function, e, seed, guards, out)
        case "pow":
            _pull_power(e, seed, guards, out)
        case "atan2":
            square = plus(times(a, a), times(b, b))
            _pull_expr(a, divide_exprs(times(seed, b), square), guards, out)
            _pull_expr(b, negate_expr(divide_exprs(times(seed, a), square)), guards, out)
        case "fmod":
            _pull_expr(a, seed, guards, out)
            _pull_expr(b, negate_expr(times(seed, call_function("trunc", divide_exprs(a, b)))), guards, out)
        case "remainder":
            _pull_expr(a, seed, guards, out)
            _pull_expr(b, negate_expr(times(seed, call_function("rint", divide_exprs(minus(a, e), b)))), guards, out)
        case "hypot":
            _pull_expr(a, times(seed, divide_exprs(a, e)), guards, out)
            _pull_expr(b, times(seed, divide_exprs(b, e)), guards, out)
        case "copysign":
            signed = Select(compare_exprs("==", e, a), seed, negate_expr(seed), seed.dtype)
            _pull_expr(a, signed, (*guards, compare_exprs("!=", a, constant_like(0.0, a))), out)
        case "fdim":
            _pull_expr(a, seed, (*guards, compare_exprs(">", a, b)), out)
            _pull_expr(b, negate_expr(seed), (*guards, compare_exprs(">", a, b)), out)
        case "fma":
            _pull_expr(a, times(seed, b), guards, out)
            _pull_expr(b, times(seed, a), guards, out)
            _pull_expr(rest[0], seed, guards, out)
        case _:
            raise NoDerivative(f"'{e.function}' has no derivative among the builtins")


def _pull_power(e: Call, seed: Expr, guards: Guards, out: Derivatives) -> None:
    x, y = e.arguments
    if isinstance(y, Const):
        p = float(y.value)
        if p != 0.0:
            power = (
                x
                if p == 2.0
                else call_function("pow", x, constant_like(p - 1.0, x))
                if p != 1.0
                else constant_like(1.0, x)
            )
            _pull_expr(x, times(times(seed, constant_like(p, x)), power), guards, out)
        return
    slope = times(times(seed, y), call_function("pow", x, minus(y, constant_like(1.0, y))))
    _pull_expr(x, slope, (*guards, compare_exprs("!=", y, constant_like(0.0, y))), out)
    flat = Binary(
        "&&", compare_exprs("==", x, constant_like(0.0, x)), compare_exprs(">=", y, constant_like(0.0, y)), BOOL
    )
    _pull_expr(y, times(seed, times(e, call_function("log", x))), (*guards, Unary("!", flat, BOOL)), out)


def _one_minus(x: Expr) -> Expr:
    return minus(constant_like(1.0, x), x)


def _one_plus(x: Expr) -> Expr:
    return plus(constant_like(1.0, x), x)


def _square(x: Expr) -> Expr:
    return times(x, x)


def _erf_derivative(factor: float, s: Expr, x: Expr) -> Expr:
    return times(
        times(s, constant_like(factor * 2.0 / math.sqrt(math.pi), x)), call_function("exp", negate_expr(_square(x)))
    )


def _abs_derivative(s: Expr, x: Expr) -> Expr:
    zero = constant_like(0.0, x)
    below = Select(compare_exprs("<", x, zero), negate_expr(s), zero, s.dtype)
    return Select(compare_exprs(">", x, zero), s, below, s.dtype)


_FLAT = ("floor", "ceil", "trunc", "round", "rint", "nearbyint", "logb")
_UNARY: dict[str, Callable[[Expr, Expr, Expr], Expr]] = {
    "exp": lambda s, x, y: times(s, y),
    "exp2": lambda s, x, y: times(times(s, constant_like(math.log(2.0), x)), y),
    "expm1": lambda s, x, y: times(s, call_function("exp", x)),
    "log": lambda s, x, y: divide_exprs(s, x),
    "log2": lambda s, x, y: divide_exprs(s, times(constant_like(math.log(2.0), x), x)),
    "log10": lambda s, x, y: divide_exprs(s, times(constant_like(math.log(10.0), x), x)),
    "log1p": lambda s, x, y: divide_exprs(s, _one_plus(x)),
    "sqrt": lambda s, x, y: divide_exprs(s, times(constant_like(2.0, x), y)),
    "rsqrt": lambda s, x, y: times(times(s, constant_like(-0.5, x)), times(y, _square(y))),
    "cbrt": lambda s, x, y: divide_exprs(s, times(constant_like(3.0, x), _square(y))),
    "sin": lambda s, x, y: times(s, call_function("cos", x)),
    "cos": lambda s, x, y: negate_expr(times(s, call_function("sin", x))),
    "tan": lambda s, x, y: times(s, _one_plus(_square(y))),
    "asin": lambda s, x, y: divide_exprs(s, call_function("sqrt", _one_minus(_square(x)))),
    "acos": lambda s, x, y: negate_expr(divide_exprs(s, call_function("sqrt", _one_minus(_square(x))))),
    "atan": lambda s, x, y: divide_exprs(s, _one_plus(_square(x))),
    "sinh": lambda s, x, y: times(s, call_function("cosh", x)),
    "cosh": lambda s, x, y: times(s, call_function("sinh", x)),
    "tanh": lambda s, x, y: times(s, _one_minus(_square(y))),
    "asinh": lambda s, x, y: divide_exprs(s, call_function("sqrt", _one_plus(_square(x)))),
    "acosh": lambda s, x, y: divide_exprs(s, call_function("sqrt", minus(_square(x), constant_like(1.0, x)))),
    "atanh": lambda s, x, y: divide_exprs(s, _one_minus(_square(x))),
    "erf": lambda s, x, y: _erf_derivative(1.0, s, x),
    "erfc": lambda s, x, y: _erf_derivative(-1.0, s, x),
    "fabs": lambda s, x, y: _abs_derivative(s, x),
    "tf32": lambda s, x, y: s,  # rounding, like a cast
}
