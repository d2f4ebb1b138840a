"""The output of the language: checked functions, and functions bound to sizes.

A `Function` is symbolic in its sizes. `Function.bind` (see `bind.py`) gives a `BoundFunction`, in which every
size, range and specialized scalar is a number, every subscript is already relative to the start of its
tensor's storage, calls and lets are inlined, casts are explicit, and every expression carries its type.
Lowerings take `BoundFunction`s and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

from ..core.dtypes import INT64, DType
from ..core.errors import InternalError, Span
from .formats import Format


@dataclass(frozen=True, slots=True)
class Const:
    """A literal. Its value is exact: an int, a bool or a Python float."""

    value: int | float | bool
    dtype: DType


@dataclass(frozen=True, slots=True)
class Size:
    """The extent that a size name of the def's signature stands for. Absent from bound functions."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Index:
    """The value of an index variable of the statement."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Access:
    """A read of one element: `tensor(subscripts...)`; no subscripts for a 0-D tensor or scalar parameter.

    guarded: the subscript may be in bounds only where the conditions of the enclosing `Select`s hold, so the element
    must not be touched elsewhere. `bind` sets it unless it can prove the access safe.
    """

    tensor: str
    subscripts: tuple[Expr, ...]
    dtype: DType
    guarded: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Unary:
    """`-x` or `!x`."""

    op: str
    operand: Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right` with op one of `+ - * / % < <= > >= == != && || min max`.

    Both operands have one type (casts are explicit). `/` and `%` on integers are floor division and its
    remainder. `min` and `max` propagate NaN as torch's do; the C functions `fmin` and `fmax` are `Call`s.
    """

    op: str
    left: Expr
    right: Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class Select:
    """`condition ? then : otherwise`; only the chosen side may touch memory."""

    condition: Expr
    then: Expr
    otherwise: Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class Cast:
    """Conversion to `dtype`: a float truncates to an integer and saturates (NaN gives 0), integers wrap."""

    operand: Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class Call:
    """A function of `math_functions.FUNCTIONS` by its canonical name; arguments and result share `dtype`."""

    function: str
    arguments: tuple[Expr, ...]
    dtype: DType


Expr = Const | Size | Index | Access | Unary | Binary | Select | Cast | Call


def operands_of(e: Expr) -> tuple[Expr, ...]:
    """The operands of `e`, left to right."""
    match e:
        case Const() | Size() | Index():
            return ()
        case Access(subscripts=subscripts):
            return subscripts
        case Unary(operand=x) | Cast(operand=x):
            return (x,)
        case Binary(left=a, right=b):
            return (a, b)
        case Select(condition=c, then=a, otherwise=b):
            return (c, a, b)
        case Call(arguments=arguments):
            return arguments
    raise InternalError(f"not an expression: {e!r}")


def with_operands(e: Expr, parts: Sequence[Expr]) -> Expr:
    """`e` with the operands `parts`; `e` itself if they are the same objects."""
    if all(a is b for a, b in zip(operands_of(e), parts, strict=True)):
        return e
    parts = tuple(parts)
    match e:
        case Access():
            return replace(e, subscripts=parts)
        case Unary() | Cast():
            return replace(e, operand=parts[0])
        case Binary():
            return replace(e, left=parts[0], right=parts[1])
        case Select():
            return replace(e, condition=parts[0], then=parts[1], otherwise=parts[2])
        case Call():
            return replace(e, arguments=parts)
    raise InternalError(f"an expression without operands: {e!r}")


def map_operands(e: Expr, f: Callable[[Expr], Expr]) -> Expr:
    """`e` with `f` applied to its operands."""
    return with_operands(e, tuple(map(f, operands_of(e))))


def walk_expr(e: Expr) -> Iterator[Expr]:
    """Yield `e` and all its subexpressions in preorder."""
    yield e
    for child in operands_of(e):
        yield from walk_expr(child)


class Role(Enum):
    """Who owns a tensor's memory and who may write it."""

    INPUT = "input"
    OUTPUT = "output"
    INOUT = "in/out"
    TEMPORARY = "temporary"


# --- symbolic: sizes are names -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Symbol:
    """A tensor of a symbolic function.

    extents: the declared extents (`Size`s and `Const`s), None if undeclared.
    is_compile_time: an int scalar parameter whose value is part of the kernel: it is read as `Size(name)`, never
    through an `Access`.
    format: its storage format, if the def or the caller gives one. None: dense, or the format of the operand.
    """

    name: str
    dtype: DType
    rank: int
    role: Role
    extents: tuple[Expr, ...] | None = None
    is_compile_time: bool = False
    format: Format | None = None
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def is_sparse(self) -> bool:
        """Whether only some elements are stored."""
        return self.format is not None and not self.format.is_dense


@dataclass(frozen=True, slots=True)
class ExplicitRange:
    """`where index in lower:upper`; the bounds read only sizes and specialized scalars."""

    index: str
    lower: Expr
    upper: Expr
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Statement:
    """`target(subscripts) op= value`, as in `BoundStatement` but with symbolic sizes and ranges still to be inferred.

    Subscripts are int64 expressions, here counted from index 0 of the tensor (not of its storage).
    exists: accesses that take part in range inference; where they are of sparse tensors, the element must be stored.
    """

    name: str
    target: str
    subscripts: tuple[Expr, ...]
    reduction: str | None
    initialize: bool
    value: Expr
    indices: tuple[str, ...]
    num_free: int
    ranges: tuple[ExplicitRange, ...] = ()
    exists: tuple[Access, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SizeConstraint:
    """Two sizes that an inlined call requires to be equal."""

    left: Expr
    right: Expr
    message: str
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Function:
    """A checked def: calls and lets are inlined, types are decided, sizes are symbolic.

    tensors: parameters in order, then returns in order, then temporaries.
    sizes: the size names of the signature, in order of appearance. Expressions may also contain `Size("t.d")`, the
    extent of dimension `d` of tensor `t`, known once the ranges of `t` are.
    scalars: the specialized scalar parameters; each is also a 0-D tensor among `tensors` and a `Size` in expressions.
    canonical: a text that is the same for all defs that differ only in names, comments and formatting.
    """

    name: str
    tensors: tuple[Symbol, ...]
    statements: tuple[Statement, ...]
    returns: tuple[str, ...]
    sizes: tuple[str, ...]
    scalars: tuple[str, ...]
    constraints: tuple[SizeConstraint, ...] = ()
    source: str = field(default="", compare=False, repr=False)
    canonical: str = field(default="", compare=False, repr=False)

    def tensor(self, name: str) -> Symbol:
        return next(t for t in self.tensors if t.name == name)

    @property
    def is_sparse(self) -> bool:
        """Whether one of the tensors is sparse."""
        return any(t.is_sparse for t in self.tensors)

    @property
    def parameters(self) -> tuple[Symbol, ...]:
        """The parameters, which a call passes by position, in order."""
        return tuple(t for t in self.tensors if t.role is Role.INPUT)

    @property
    def results(self) -> tuple[Symbol, ...]:
        """The tensors that a call returns, in order."""
        return tuple(self.tensor(name) for name in self.returns)

    @property
    def inouts(self) -> tuple[Symbol, ...]:
        """The in/out outputs, whose initial values a call passes by name."""
        return tuple(t for t in self.tensors if t.role is Role.INOUT)


# --- bound: every size is a number --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a bound function: `strides` in elements; 0-D tensors are scalars.

    extent_variables, stride_variables: for each dimension the int64 variable that holds its extent or its stride where
    only a call tells it, or None; () if all are None. The number is then only typical.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    role: Role
    extent_variables: tuple[str | None, ...] = field(default=(), repr=False)  # keys of the cache are texts
    stride_variables: tuple[str | None, ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def extent_variable(self, dimension: int) -> str | None:
        """The variable that holds the extent of a dimension, or None if it is a number."""
        return self.extent_variables[dimension] if self.extent_variables else None


@dataclass(frozen=True, slots=True)
class BoundIndex:
    """An index variable with its half-open range of values.

    variable: the int64 variable that holds the number of its values where only a call tells it, else empty. `upper` is
    then only typical.
    """

    name: str
    lower: int
    upper: int
    variable: str = field(default="", repr=False)

    @property
    def extent(self) -> int:
        return max(0, self.upper - self.lower)


@dataclass(frozen=True, slots=True)
class Inequality:
    """`sum of coefficient * index + constant >= 0`; terms are sorted by name, and no coefficient is zero."""

    terms: tuple[tuple[str, int], ...]
    constant: int

    def __str__(self) -> str:
        """Text such as `j <= i + 3`, with the negative terms on the left."""

        def side(sign: int, constant: int) -> str:
            parts = [name if abs(c) == 1 else f"{abs(c)}*{name}" for name, c in self.terms if c * sign > 0]
            return " + ".join([*parts, *([str(constant)] if constant > 0 or not parts else [])])

        return f"{side(-1, max(0, -self.constant))} <= {side(1, max(0, self.constant))}"

    def rename_indices(self, names: Mapping[str, str]) -> Inequality:
        """The same inequality over other indices; `names` maps each index to its new name."""
        return Inequality(tuple(sorted((names[name], c) for name, c in self.terms)), self.constant)


@dataclass(frozen=True, slots=True)
class BoundsCheck:
    """A run-time check: where `guard` holds (always when None), `0 <= subscript < extent` must hold.

    The error names `tensor`, `dimension` and the value of `subscript + origin` (`origin` is the smallest index
    of that dimension, which `bind` has already subtracted from `subscript`).
    """

    tensor: str
    dimension: int
    subscript: Expr
    extent: int
    guard: Expr | None = None
    origin: int = 0


@dataclass(frozen=True, slots=True)
class BoundStatement:
    """`target(subscripts) op= value` for all values of `indices`: the target's in order, then the reduced ones.

    reduction: None for `=`, else one of `+ * min max`, combined in `value.dtype` (the accumulator type of the
    target's), rounded once when the reduction of an element is complete.
    initialize: the element starts at the neutral element (the `!` forms).
    reads_own_target: the right side reads the target at points other than the written one, so it must be evaluated
    completely before anything is written.
    checks: the conditions to verify before the statement reads memory.
    exists: accesses of sparse tensors. The statement runs only where they store an element.
    elements, terms: restrictions that only `restrict_domains` makes. `elements` are conditions on free indices;
    elements that violate them need no value. Terms that violate `terms` are not added. An element without terms has
    the initial value of the reduction.
    """

    name: str
    target: str
    subscripts: tuple[Expr, ...]
    reduction: str | None
    initialize: bool
    value: Expr
    indices: tuple[BoundIndex, ...]
    num_free: int
    reads_own_target: bool = False
    checks: tuple[BoundsCheck, ...] = ()
    exists: tuple[Access, ...] = ()
    elements: tuple[Inequality, ...] = ()
    terms: tuple[Inequality, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def free(self) -> tuple[BoundIndex, ...]:
        """The indices that appear on the left."""
        return self.indices[: self.num_free]

    @property
    def reduction_indices(self) -> tuple[BoundIndex, ...]:
        """The indices that appear on the right only."""
        return self.indices[self.num_free :]

    @property
    def domain(self) -> tuple[Inequality, ...]:
        """The conditions, besides the ranges of the indices, that hold wherever the value is computed."""
        return tuple(dict.fromkeys((*self.elements, *self.terms)))


@dataclass(frozen=True, slots=True)
class BoundFunction:
    """A def with every size known: the input of a lowering.

    tensors: parameters in order, then returns in order, then temporaries.
    starts: for each returned tensor the smallest index of each dimension (stored at offset 0).
    """

    name: str
    tensors: tuple[Tensor, ...]
    statements: tuple[BoundStatement, ...]
    returns: tuple[str, ...]
    starts: tuple[tuple[int, ...], ...] = ()

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)


INDEX_TYPE = INT64
