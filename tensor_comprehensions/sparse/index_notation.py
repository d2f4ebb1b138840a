"""Translate index notation, such as `y(i) = b(i) - A(i,j)*x(j)` with implied sums, to the statements of a def.

The terms are the operands of the outermost `+` and `-`. Each term is summed over the indices that it has and the left
side lacks. So `y = b - A*x` becomes `y(i) = b(i)` and `y(i) += -(A(i,j)*x(j))`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..core.errors import ParseError
from ..tc_lang.builtins import is_builtin
from ..tc_lang.semantics.infer_signature import def_of_statements, names
from ..tc_lang.syntax import tree as s
from ..tc_lang.syntax.parse import parse_program
from ..tc_lang.syntax.printer import to_text


def notation_to_def(name: str, text: str, types: Mapping[str, str]) -> str:
    """The text of a def called `name` that computes the equations of `text`, in index notation, in order.

    Args:
        types: the scalar types of parameters that are not `float`, by name.

    Raises:
        ParseError: the text is not index notation.
        CheckError: a type is unknown, or is given for a name that is not a parameter.
    """
    source = f"def {name}() -> (_) {{ {text} }}"
    equations = [_check_equation(x, source) for x in parse_program(source).defs[0].body]
    statements = [to_text(x) for equation in equations for x in _make_statements(equation, types)]
    order = [x for equation in equations for x in names(equation)]
    return def_of_statements(name, "\n    ".join(statements), types, order)


def _check_equation(equation: s.Statement | s.TupleCall, source: str) -> s.Statement:
    """Return `equation` as a statement. Raises ParseError if it is not an equation in index notation."""
    if isinstance(equation, s.TupleCall):
        raise ParseError("index notation has no calls of defs", source=source, span=equation.span)
    if equation.operator != "=":
        raise ParseError(
            "index notation is an equation, in which sums are implied",
            source=source, span=equation.target_span, expected="=", found=equation.operator,
            suggestion="write `=`, or give the statement to tc.from_expression",
        )  # fmt: skip
    if equation.clauses and len(list(_list_sum_terms(equation.value))) > 1:
        raise ParseError(
            "`where` stands behind several terms",
            source=source, span=equation.span, expected="one term",
            suggestion="write a statement for each term, and give them to tc.from_expression",
        )  # fmt: skip
    return equation


@dataclass(frozen=True, slots=True)
class _Term:
    value: s.Expression
    is_negative: bool

    @property
    def signed(self) -> s.Expression:
        return s.Unary("-", self.value) if self.is_negative else self.value


def _list_sum_terms(e: s.Expression, is_negative: bool = False) -> Iterator[_Term]:
    """The terms of a sum, in the order of the text. Parentheses around sums make no difference."""
    match e:
        case s.Binary(op="+" | "-" as op, left=left, right=right):
            yield from _list_sum_terms(left, is_negative)
            yield from _list_sum_terms(right, is_negative != (op == "-"))
        case s.Unary(op="-", operand=x):
            yield from _list_sum_terms(x, not is_negative)
        case _:
            yield _Term(e, is_negative)


def _make_statements(equation: s.Statement, parameters: Collection[str]) -> Iterator[s.Statement]:
    """One statement for all terms that are not summed, then a reduction for each other term."""
    named = {*parameters, *(c.name for c in equation.clauses if isinstance(c, s.Let))}
    free = set(_collect_index_names(equation.subscripts or (), named))
    terms = list(_list_sum_terms(equation.value))
    domain = [x for clause in equation.clauses for x in s.clause_expressions(clause)]
    is_sum = [
        not free.issuperset(x for e in (t.value, *domain) for x in _collect_subscript_indices(e, named)) for t in terms
    ]
    plain = [t for t, summed in zip(terms, is_sum, strict=True) if not summed]
    if plain:
        yield replace(equation, value=_add_signed_terms(plain))
    operator = "+=" if plain else "+=!"
    for t, summed in zip(terms, is_sum, strict=True):
        if summed:
            yield replace(equation, operator=operator, value=t.signed)
            operator = "+="


def _add_signed_terms(terms: list[_Term]) -> s.Expression:
    total = terms[0].signed
    for t in terms[1:]:
        total = s.Binary("-" if t.is_negative else "+", total, t.value)
    return total


def _collect_subscript_indices(e: s.Expression, named: Collection[str]) -> Iterator[str]:
    """The indices in the subscripts of `e`."""
    below = s.child_expressions(e)
    if isinstance(e, s.Apply) and not is_builtin(e.name):
        yield from _collect_index_names(below, named)
    else:
        for x in below:
            yield from _collect_subscript_indices(x, named)


def _collect_index_names(subscripts: Iterable[s.Expression], named: Collection[str]) -> Iterator[str]:
    """The indices in subscripts: all names but the `named`, which are parameters or values."""
    for e in subscripts:
        if isinstance(e, s.Name):
            if e.name not in named:
                yield e.name
        elif isinstance(e, s.Apply):
            yield from _collect_subscript_indices(e, named)
        else:
            yield from _collect_index_names(s.child_expressions(e), named)
