"""Resolve names and types in the expressions of one statement: `syntax.Expression` -> `ir.Expr`.

An expression is checked in one of two modes: as a value, or (`index=True`) as a subscript or a bound, where all
integers are widened to int64 and int scalar parameters become part of the signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite

from ...core.dtypes import INT32, INT64, DType
from ...core.errors import CheckError, Span
from ..builtins import CONSTANTS, builtin_arity, builtin_names, is_builtin
from ..ir import Access, Cast, Const, Index, Role, Size, walk_expr
from ..syntax import tree as s
from ..syntax.foreign_syntax_hints import suggest_function
from ..unlocated_error import UnlocatedTypeError
from . import type_rules as t
from .type_rules import TypedExpr

MAX_SHORT_NAME = 2
"""Maximum characters of an unknown name for which the only fitting tensor is suggested though it is not similar."""


@dataclass(slots=True)
class NameScope:
    """The meaning of the names of a def, in the def itself or where a call of it is inlined.

    tensors: by name, the tensor's name in the function that is being built. sizes: by name, a size name of that
    function or a number. values: scalar parameters of an inlined def, with their expressions and scope in the caller.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, str | int] = field(default_factory=dict)
    values: dict[str, tuple[s.Expression, NameScope]] = field(default_factory=dict)


@dataclass(slots=True)
class TensorInfo:
    """A tensor of the function that is being built.

    rank: -1 until its first definition. dtype: None until it is inferred. typed: whether its type is declared.
    """

    name: str
    rank: int
    role: Role
    dtype: DType | None
    dimensions: tuple[str | int, ...] | None
    span: Span
    typed: bool = False
    format: s.FormatName | None = None


@dataclass(slots=True)
class CheckContext:
    """The shared context of a function's statements: its tensors, its specialized scalars, the defs of the program."""

    source: str
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    specialized: dict[str, None] = field(default_factory=dict)
    defs: tuple[str, ...] = ()

    def error(self, message: str, span: Span, **sides: str) -> CheckError:
        return CheckError(message, source=self.source, span=span, **sides)


@dataclass(slots=True)
class ExpressionChecker:
    """Checks the expressions of one statement, and records which indices and tensors they use.

    defined: the tensors with a definition before this statement. target: the tensor that the statement writes.
    declared: the indices with an explicit range. lets: the lets of the statement.
    indices: each index variable with the span of its first occurrence, in order of appearance.
    undecided: tensors whose type is not known yet. reads_target: whether the statement reads its target.
    """

    world: CheckContext
    scope: NameScope
    defined: frozenset[str]
    target: str
    declared: frozenset[str] = frozenset()
    lets: Mapping[str, s.Expression] = field(default_factory=dict)
    indices: dict[str, Span] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)
    reads_target: bool = False
    _open: list[str] = field(default_factory=list)
    _work: int = 0
    _depth: int = 0

    def value(self, e: s.Expression) -> TypedExpr:
        """Check `e` as a value."""
        return self._check(e, False)

    def subscript(self, e: s.Expression, what: str) -> TypedExpr:
        """Check `e` as an int64 subscript or bound; error messages call it `what`."""
        x = self._check(e, True)
        if not x.type.is_integer:
            raise self.world.error(
                f"{what} must be an integer",
                e.span,
                expected="an integer",
                found=str(x.type),
                suggestion="call the index otherwise" if _is_constant(x) else "cast it: int32(...)",
            )
        return t.convert(x, INT64)

    def _check(self, e: s.Expression, index: bool) -> TypedExpr:
        self._work += 1
        self._depth += 1
        if self._work > t.MAX_NODES or self._depth > t.MAX_DEPTH:
            raise self.world.error(
                "this expression is too large once its lets are expanded",
                e.span,
                expected=f"at most {t.MAX_NODES} nodes, nested at most {t.MAX_DEPTH} levels deep",
                suggestion="store parts of it in temporaries",
            )
        try:
            return self._dispatch(e, index)
        except UnlocatedTypeError as m:
            raise self.world.error(
                m.message, e.span, expected=m.expected, found=m.found, suggestion=m.suggestion
            ) from None
        finally:
            self._depth -= 1

    def _dispatch(self, e: s.Expression, index: bool) -> TypedExpr:
        match e:
            case s.Number(value=value):
                return t.literal_type(value, index=index)
            case s.Name():
                return self._name(e, index)
            case s.Extent():
                return self._extent(e, index)
            case s.Apply():
                return self._apply(e, index)
            case s.Unary(op="-", operand=s.Number(value=value)):
                return t.literal_type(-value, index=index)
            case s.Unary(op=op, operand=operand):
                x = self._check(operand, index)
                return t.typed_negate(x, index=index) if op == "-" else t.typed_not(x)
            case s.Binary(op=op, left=left, right=right):
                return t.typed_binary(op, self._check(left, index), self._check(right, index), index=index)
            case s.Conditional(condition=condition, then=then, otherwise=otherwise):
                c = self._check(condition, index)
                return t.typed_select(c, self._check(then, index), self._check(otherwise, index))
            case s.Cast(dtype=dtype, operand=operand):
                return self._cast(dtype, self._check(operand, index), index)

    def _cast(self, dtype: DType, x: TypedExpr, index: bool) -> TypedExpr:
        if index and not x.weak and x.type.is_integer and dtype in (INT32, INT64):
            if not any(isinstance(e, Access) for e in walk_expr(x.expr)):
                return x  # sizes and index values are int32 already
            if isinstance(x.expr, Cast) and x.expr.operand.dtype.bits < dtype.bits:
                return x
        out = t.explicit_cast(x, dtype)
        return t.convert(out, INT64) if index and out.type.is_integer else out

    # --- names -----------------------------------------------------------------------------------------------------

    def _name(self, e: s.Name, index: bool) -> TypedExpr:
        name = e.name
        if name in self.declared:
            return self._index(e, index)
        if name in self.lets:
            return self._let(e, index)
        if name in self.scope.values:
            return self._argument(name, index)
        size = self.scope.sizes.get(name)
        if self._is_tensor(name) and not (size is not None and self._rank(name)):
            if index and self._rank(name):
                raise self._named_like_tensor(e)
            return self._access(name, (), e.span, index)
        if size is not None:
            return self._size(size, index)
        if name in CONSTANTS:
            return t.named_constant(name)
        return self._index(e, index)

    def _index(self, e: s.Name, index: bool) -> TypedExpr:
        self.indices.setdefault(e.name, e.span)
        dtype = INT64 if index else INT32
        return TypedExpr(Index(e.name, dtype), dtype)

    def _let(self, e: s.Name, index: bool) -> TypedExpr:
        if e.name in self._open:
            raise self.world.error(f"the let '{e.name}' refers to itself", e.span)
        self._open.append(e.name)
        x = self._check(self.lets[e.name], index)
        self._open.pop()
        return x

    def _argument(self, name: str, index: bool) -> TypedExpr:
        """Check the expression that a call passes for a scalar parameter of an inlined def, in the caller's scope."""
        e, scope = self.scope.values[name]
        mine, self.scope = (self.scope, self.lets, self.declared), scope
        self.lets, self.declared = {}, frozenset()
        seen = dict(self.indices)
        x = self._check(e, index)
        new = [i for i in self.indices if i not in seen]
        self.scope, self.lets, self.declared = mine
        if new:
            raise self.world.error(f"'{new[0]}' is unknown in the argument of a call", self.indices[new[0]])
        return x

    def _size(self, size: str | int, index: bool) -> TypedExpr:
        dtype = INT64 if index else INT32
        return TypedExpr(Const(size, dtype) if isinstance(size, int) else Size(size, dtype), dtype)

    def _extent(self, e: s.Extent, index: bool) -> TypedExpr:
        if not self._is_tensor(e.tensor):
            raise self._unknown_name_error(e.tensor, e.span)
        tensor = self.world.tensors[self.scope.tensors[e.tensor]]
        if e.dimension >= tensor.rank:
            raise self.world.error(
                f"'{e.tensor}' has no dimension {e.dimension}",
                e.span,
                expected=f"a dimension below {tensor.rank}",
                found=str(e.dimension),
            )
        return self._size(extent_name(tensor, e.dimension), index)

    # --- applications ----------------------------------------------------------------------------------------------

    def _apply(self, e: s.Apply, index: bool) -> TypedExpr:
        if self._is_tensor(e.name):
            return self._access(e.name, e.arguments, e.span, index)
        if e.name in self.scope.values:
            raise self.world.error(f"'{e.name}' is a scalar and takes no subscripts", e.span)
        if e.name in self.scope.sizes:
            raise self.world.error(f"'{e.name}' is a size, not a tensor", e.span, found=f"{e.name}(...)")
        if not is_builtin(e.name):
            raise self._unknown_name_error(e.name, e.span, len(e.arguments))
        least, most = builtin_arity(e.name)
        n = len(e.arguments)
        if n < least or (most is not None and n > most):
            raise self.world.error(
                f"'{e.name}' takes {least if most == least else f'{least} or more'} argument{'s' * (least != 1)}",
                e.span,
                expected=str(least) if most == least else f"{least} or more",
                found=str(n),
            )
        return t.typed_builtin(e.name, [self._check(a, index) for a in e.arguments], index=index)

    def _access(self, name: str, subscripts: tuple[s.Expression, ...], span: Span, index: bool) -> TypedExpr:
        tensor = self.world.tensors[self.scope.tensors[name]]
        self._check_defined(name, tensor, span)
        if len(subscripts) != tensor.rank:
            raise self.world.error(
                f"'{name}' has {tensor.rank} dimension{'s' * (tensor.rank != 1)}",
                span,
                expected=f"{tensor.rank} subscript{'s' * (tensor.rank != 1)}",
                found=str(len(subscripts)),
                suggestion="" if subscripts else "a statement says what each element is, as in y(i) = x(i)",
            )
        if index and tensor.rank == 0 and tensor.role is Role.INPUT and tensor.dtype and tensor.dtype.is_integer:
            self.world.specialized.setdefault(tensor.name)
            return TypedExpr(Size(tensor.name, INT64), INT64)
        if tensor.name in self.world.specialized and tensor.dtype:
            return TypedExpr(Size(tensor.name, tensor.dtype), tensor.dtype)
        checked = tuple(self.subscript(e, f"subscript {d} of '{name}'") for d, e in enumerate(subscripts))
        if tensor.dtype is None:
            self.undecided.add(tensor.name)
            return t.literal_type(0, index=index)
        return _load_operand(
            Access(tensor.name, tuple(x.expr for x in checked), tensor.dtype, span=span), checked, index
        )

    def _check_defined(self, name: str, tensor: TensorInfo, span: Span) -> None:
        if tensor.name == self.target:
            self.reads_target = True
        elif tensor.role is not Role.INPUT and tensor.name not in self.defined:
            way = f"to read its initial value, define it first: {name}(...) = {name}(...)" if tensor.typed else ""
            raise self.world.error(f"'{name}' is read before it is defined", span, suggestion=way)

    def _is_tensor(self, name: str) -> bool:
        """Whether `name` is a tensor here. A temporary is one from its first definition on."""
        actual = self.scope.tensors.get(name)
        if actual is None:
            return False
        known = self.world.tensors[actual]
        return known.role is not Role.TEMPORARY or actual in self.defined or actual == self.target

    def _rank(self, name: str) -> int:
        return self.world.tensors[self.scope.tensors[name]].rank

    def _named_like_tensor(self, e: s.Name) -> CheckError:
        rank = self._rank(e.name)
        return self.world.error(
            f"'{e.name}' is a tensor, and no index can have its name",
            e.span,
            expected="an index, or an element of a tensor of integers",
            found=f"a tensor of {rank} dimension{'s' * (rank != 1)}",
            suggestion=f"rename the index, or give '{e.name}' its subscript{'s' * (rank != 1)}",
        )

    def _unknown_name_error(self, name: str, span: Span, rank: int | None = None) -> CheckError:
        """The error for an unknown name; `rank`: the number of its subscripts."""
        if name in self.world.defs:
            return self.world.error(
                f"'{name}' is a def, and a call of a def is a statement of its own",
                span,
                expected=f"`x = {name}(...)` with bare names",
            )
        tensors = [n for n in self.scope.tensors if self._is_tensor(n)]
        fitting = [n for n in tensors if self._rank(n) == rank and self.scope.tensors[n] != self.target]
        close = get_close_matches(name, fitting, n=1) or get_close_matches(name, tensors, n=1)
        close = close or get_close_matches(name, list(builtin_names()), n=1)
        if not close and len(fitting) == 1 and len(name) <= MAX_SHORT_NAME:
            close = fitting
        written = suggest_function(name)
        dimensions = f"a tensor of {rank} dimension{'s' * (rank != 1)}"
        return self.world.error(
            f"'{name}' is neither a tensor nor a builtin",
            span,
            expected=f"{dimensions}: {', '.join(fitting[:8])}" if fitting and not written else "",
            found=f"'{name}'",
            suggestion=written or (f"did you mean '{close[0]}'?" if close else ""),
        )


def _is_constant(x: TypedExpr) -> bool:
    """Whether `x` is the constant `inf` or `nan`, whose name a program may also use as an index."""
    return isinstance(x.expr, Const) and x.expr.dtype.is_float and not isfinite(x.expr.value)


def _load_operand(access: Access, subscripts: tuple[TypedExpr, ...], index: bool) -> TypedExpr:
    """A read as an operand: half floats are widened to float32, integers in subscripts to int64."""
    dtype = access.dtype
    if index and dtype.is_integer:
        return t.make_typed(access if dtype == INT64 else Cast(access, INT64), INT64, *subscripts)
    widened = dtype.accumulator
    return t.make_typed(access if widened == dtype else Cast(access, widened), dtype, *subscripts)


def extent_name(tensor: TensorInfo, dimension: int) -> str | int:
    """The extent of a dimension: a size name, a number, or the name `t.d` of an extent that is not declared."""
    if tensor.role is Role.INPUT and tensor.dimensions is not None:
        return tensor.dimensions[dimension]
    return f"{tensor.name}.{dimension}"
