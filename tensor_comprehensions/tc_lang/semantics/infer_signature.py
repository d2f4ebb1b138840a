"""Make a def from bare statements: its parameters are the names that are read and never written.

The tensor of the last statement is returned. A dimension that some access subscripts by a bare index is named after
the index, so that dimensions with the same index must agree in size, as in `einsum`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count

from ...core.checked_fields import describe_value, suggest_word
from ...core.dtypes import ALIASES, DTYPES
from ...core.errors import CheckError, ParseError
from ..builtins import CONSTANTS, is_builtin
from ..syntax import tree as s
from ..syntax.parse import parse_program, text_of

DEFAULT = "float"


def def_of_statements(name: str, statements: str, types: Mapping[str, str], order: Iterable[str] = ()) -> str:
    """The text of a def called `name` with `statements` as its body.

    Args:
        types: the scalar types of parameters that are not `float`, by name.
        order: the order of the parameters, instead of that of the text.

    Raises:
        ParseError: the statements are not in the grammar.
        CheckError: a type is unknown, or given to a name that is not a parameter.
    """
    statements = text_of(statements)
    body = [_check_statement(part) for part in parse_program(f"def {name}() -> (_) {{ {statements} }}").defs[0].body]
    if not body:
        raise ParseError("there is no statement")
    written = {part.target for part in body}
    reads: dict[str, list[tuple[s.Expression, ...]]] = {}
    for access in chain.from_iterable(map(_collect_accesses, body)):
        if access.name not in written:
            reads.setdefault(access.name, []).append(access.arguments)
    scalars = [n for part in body for n in _find_scalar_names(part, types) if n not in written and n not in reads]
    named = (*order, *chain.from_iterable(map(names, body)))
    parameters = dict.fromkeys(x for x in named if x in reads or x in scalars)
    _check_types(types, tuple(parameters))
    dimensions = _print_tensor_sizes(reads, {*written, *chain.from_iterable(map(names, body))})
    declared = (f"{types.get(n, DEFAULT)}{dimensions.get(n, '')} {n}" for n in parameters)
    return f"def {name}({', '.join(declared)}) -> ({body[-1].target}) {{\n    {statements.strip()}\n}}\n"


def _check_statement(part: s.Statement | s.TupleCall) -> s.Statement:
    if isinstance(part, s.TupleCall):
        raise ParseError("statements without a def can call no defs", suggestion="write a whole program for `define`")
    return part


def _walk_expressions(roots: Iterable[s.Expression]) -> Iterator[s.Expression]:
    for e in roots:
        yield e
        yield from _walk_expressions(s.child_expressions(e))


def _collect_accesses(part: s.Statement) -> Iterator[s.Apply]:
    return (
        e for e in _walk_expressions(s.statement_expressions(part)) if isinstance(e, s.Apply) and not is_builtin(e.name)
    )


def names(part: s.Statement) -> Iterator[str]:
    """All names in a statement except builtins and constants, in the order of the text, with repetitions."""
    for e in _walk_expressions(s.statement_expressions(part)):
        if isinstance(e, s.Apply | s.Name) and not is_builtin(e.name) and e.name not in CONSTANTS:
            yield e.name


def _find_scalar_names(part: s.Statement, types: Mapping[str, str]) -> Iterator[str]:
    """Names that occur in no subscript and that no clause defines, and names with a type."""
    subscripts = [*(part.subscripts or ()), *chain.from_iterable(a.arguments for a in _collect_accesses(part))]
    bound = {e.name for e in _walk_expressions(subscripts) if isinstance(e, s.Name)}
    bound |= {c.index if isinstance(c, s.Range) else c.name for c in part.clauses if not isinstance(c, s.Exists)}
    return (n for n in names(part) if n in types or n not in bound)


def _print_tensor_sizes(reads: Mapping[str, Sequence[tuple[s.Expression, ...]]], taken: set[str]) -> dict[str, str]:
    """The parenthesized sizes of each tensor, as text."""
    of_index: dict[str, str] = {}
    used = set(taken)

    def size(tensor: str, d: int) -> str:
        index = next((e.name for r in reads[tensor] for e in r[d : d + 1] if isinstance(e, s.Name)), None)
        if index is None:
            return _fresh_name(f"{tensor.upper()}{d}", used)
        if index not in of_index:
            of_index[index] = _fresh_name(index.upper(), used)
        return of_index[index]

    return {t: f"({', '.join(size(t, d) for d in range(len(accesses[0])))})" for t, accesses in reads.items()}


def _fresh_name(wanted: str, used: set[str]) -> str:
    name = next(n for n in chain((wanted,), (f"{wanted}_{k}" for k in count())) if n not in used)
    used.add(name)
    return name


def _check_types(types: Mapping[str, str], parameters: Sequence[str]) -> None:
    for name, dtype in types.items():
        if name not in parameters:
            known = ", ".join(parameters) or "the statements have no parameters"
            raise CheckError(f"'{name}' has a type but is not a parameter", expected=known)
        if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in ALIASES):
            known = ", ".join((*DTYPES, *ALIASES))
            suggestion = suggest_word(dtype, (*DTYPES, *ALIASES))
            raise CheckError(f"{describe_value(dtype)} is not a type", expected=known, suggestion=suggestion)
