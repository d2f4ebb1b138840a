"""The syntax tree: the structure of the text, before checking.

Comparison ignores spans: two texts that differ only in formatting and comments have equal trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...core.dtypes import DType
from ...core.errors import Span

_NOWHERE = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Number:
    """A literal: a float if it is written with `.`, `e` or `E`, else an int."""

    value: int | float
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Name:
    """A bare identifier."""

    name: str
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Apply:
    """`name(arguments...)`: a tensor access, a builtin or a call of a def."""

    name: str
    arguments: tuple[Expression, ...]
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Extent:
    """`tensor.dimension`: the size of a tensor's dimension."""

    tensor: str
    dimension: int
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Unary:
    """`-x` or `!x`."""

    op: str
    operand: Expression
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right`."""

    op: str
    left: Expression
    right: Expression
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Conditional:
    """`condition ? then : otherwise`."""

    condition: Expression
    then: Expression
    otherwise: Expression
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Cast:
    """`dtype(operand)`."""

    dtype: DType
    operand: Expression
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


Expression = Number | Name | Apply | Extent | Unary | Binary | Conditional | Cast


@dataclass(frozen=True, slots=True)
class Dimension:
    """A declared dimension: a size name or a number."""

    size: str | int
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Type:
    """A declared type; `dimensions` is None if only the scalar type was written."""

    dtype: DType
    dimensions: tuple[Dimension, ...] | None
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class FormatName:
    """`: word(numbers)` after a declared name: the storage format of the tensor."""

    word: str
    numbers: tuple[int, ...] = ()
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A parameter or a return of a def; `format` is None if the def leaves it open."""

    name: str
    type: Type | None
    format: FormatName | None = None
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Range:
    """`where index in lower:upper`."""

    index: str
    lower: Expression
    upper: Expression
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Let:
    """`where name = value`."""

    name: str
    value: Expression
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Exists:
    """`where exists access`."""

    access: Expression
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


Clause = Range | Let | Exists


@dataclass(frozen=True, slots=True)
class Statement:
    """`target(subscripts) operator value where clauses`; `subscripts` is None for a bare target."""

    target: str
    subscripts: tuple[Expression, ...] | None
    operator: str
    value: Expression
    clauses: tuple[Clause, ...]
    target_span: Span = field(default=_NOWHERE, compare=False, repr=False)
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TupleCall:
    """`(targets) = callee(arguments)`."""

    targets: tuple[Name, ...]
    callee: str
    arguments: tuple[Expression, ...]
    callee_span: Span = field(default=_NOWHERE, compare=False, repr=False)
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Def:
    """One def of a program."""

    name: str
    parameters: tuple[Declaration, ...]
    returns: tuple[Declaration, ...]
    body: tuple[Statement | TupleCall, ...]
    name_span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Program:
    """The defs of one text, in order."""

    defs: tuple[Def, ...]


def child_expressions(e: Expression) -> tuple[Expression, ...]:
    """The expressions directly below `e`, left to right."""
    match e:
        case Apply(arguments=arguments):
            return arguments
        case Unary(operand=x) | Cast(operand=x):
            return (x,)
        case Binary(left=a, right=b):
            return (a, b)
        case Conditional(condition=c, then=a, otherwise=b):
            return (c, a, b)
    return ()


def clause_expressions(clause: Clause) -> tuple[Expression, ...]:
    """The expressions of a `where` clause, left to right."""
    match clause:
        case Range(lower=a, upper=b):
            return (a, b)
        case Let(value=value):
            return (value,)
        case Exists(access=access):
            return (access,)


def statement_expressions(s: Statement | TupleCall) -> Iterator[Expression]:
    """The outermost expressions of a statement, in the order of the text."""
    if isinstance(s, TupleCall):
        yield from s.arguments
        return
    yield from s.subscripts or ()
    yield s.value
    for clause in s.clauses:
        yield from clause_expressions(clause)
