"""Integer expressions of the language as affine forms of index variables, if they are affine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...core.internal_names import SEPARATOR
from ...lower_expr import is_lossless_widening
from ...tc_lang import ir as tc


@dataclass(frozen=True, slots=True)
class IslAffine:
    """`constant + sum(coefficient * index)`; terms are sorted by name, without zero coefficients."""

    terms: tuple[tuple[str, int], ...]
    constant: int

    def coefficient(self, index: str) -> int:
        return dict(self.terms).get(index, 0)

    @property
    def single(self) -> str | None:
        """The index `i` of a form `i + constant`, else None."""
        return self.terms[0][0] if len(self.terms) == 1 and self.terms[0][1] == 1 else None

    def isl(self) -> str:
        """The form in isl's notation, with indices named by `isl_name`."""
        parts = [f"{c}*{isl_name(name)}" for name, c in self.terms]
        return " + ".join([*parts, str(self.constant)])


def isl_name(index: str) -> str:
    """The name of an index in isl's notation; it cannot clash with keywords."""
    return f"i_{isl_spelling(index)}"


def isl_tensor(tensor: str) -> str:
    """The tuple name of a tensor's elements in isl's notation."""
    return f"T_{isl_spelling(tensor)}"


def isl_parameter(variable: str) -> str:
    """The name of the parameter of isl's sets that stands for an int64 variable of the loop program."""
    return f"n_{isl_spelling(variable)}"


def variable_of(parameter: str) -> str | None:
    """The variable that a parameter of isl's sets stands for; None if it stands for something else."""
    if not parameter.startswith("n_"):
        return None
    return re.sub("__|_d", lambda x: {"__": "_", "_d": SEPARATOR}[x[0]], parameter[2:])


def isl_upper(i: tc.BoundIndex) -> str:
    """The exclusive upper bound of an index in isl's notation."""
    if not i.variable:
        return str(i.upper)
    return isl_parameter(i.variable) + (f" + {i.lower}" if i.lower else "")


def isl_extent(t: tc.Tensor, dimension: int) -> str:
    """The extent of a dimension in isl's notation."""
    variable = t.extent_variable(dimension)
    return str(t.shape[dimension]) if variable is None else isl_parameter(variable)


def isl_parameters(variables: Iterable[str]) -> str:
    """The prefix of a set or relation in isl's notation that declares the parameters for `variables`."""
    names = ", ".join(map(isl_parameter, dict.fromkeys(v for v in variables if v)))
    return f"[{names}] -> " if names else ""


def isl_spelling(name: str) -> str:
    """An injective encoding of `name` in characters that isl accepts."""
    return name.replace("_", "__").replace(SEPARATOR, "_d")


def readable_isl(text: str) -> str:
    """`text` in isl's notation with the encoding of index names undone, for display."""
    names = {"__": "_", "_d": "_"}
    return re.sub(r"\bi_(?:__|_d|[^\W_])+", lambda n: "i_" + re.sub("__|_d", lambda x: names[x[0]], n[0][2:]), text)


def to_isl_affine(e: tc.Expr) -> IslAffine | None:
    """`e` as an affine form, or None if it is not one (floor division, products, casts that may wrap, data)."""
    match e:
        case tc.Const(value):
            return IslAffine((), int(value))
        case tc.Index(name):
            return IslAffine(((name, 1),), 0)
        case tc.Cast(operand, dtype) if is_lossless_widening(operand.dtype, dtype):
            return to_isl_affine(operand)
        case tc.Unary("-", operand):
            return _scale(to_isl_affine(operand), -1)
        case tc.Binary("+", left, right):
            return _add_affine(to_isl_affine(left), to_isl_affine(right))
        case tc.Binary("-", left, right):
            return _add_affine(to_isl_affine(left), _scale(to_isl_affine(right), -1))
        case tc.Binary("*", left, right):
            a, b = to_isl_affine(left), to_isl_affine(right)
            if a is not None and not a.terms:
                return _scale(b, a.constant)
            return _scale(a, b.constant) if b is not None and not b.terms else None
        case _:
            return None


def quasi_affine(e: tc.Expr) -> str | None:
    """`e` in isl's notation, or None; besides affine forms it may use floor division and remainder by constants."""
    form = to_isl_affine(e)
    if form is not None:
        return form.isl()
    match e:
        case tc.Cast(operand, dtype) if is_lossless_widening(operand.dtype, dtype):
            return quasi_affine(operand)
        case tc.Binary("/" | "%" as op, left, tc.Const(value)) if int(value) > 0:
            inner = quasi_affine(left)
            if inner is None:
                return None
            return f"floor(({inner})/{int(value)})" if op == "/" else f"(({inner}) mod {int(value)})"
        case tc.Binary("+" | "-" as op, left, right):
            a, b = quasi_affine(left), quasi_affine(right)
            return None if a is None or b is None else f"({a}) {op} ({b})"
        case _:
            return None


def _add_affine(a: IslAffine | None, b: IslAffine | None) -> IslAffine | None:
    if a is None or b is None:
        return None
    terms: dict[str, int] = dict(a.terms)
    for name, c in b.terms:
        terms[name] = terms.get(name, 0) + c
    return _make_isl_affine(terms, a.constant + b.constant)


def _scale(a: IslAffine | None, factor: int) -> IslAffine | None:
    return None if a is None else _make_isl_affine({n: c * factor for n, c in a.terms}, a.constant * factor)


def _make_isl_affine(terms: Mapping[str, int], constant: int) -> IslAffine:
    return IslAffine(tuple(sorted((n, c) for n, c in terms.items() if c)), constant)
