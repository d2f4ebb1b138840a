"""A def in SSA form: steps that each define a new version of a tensor.

Versions of `T` are called `T@0`, `T@1`, ...; inputs keep their names. Reductions are normalized: the operand of a
product, minimum or maximum is an element of a tensor, and only `+=` continues an earlier version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...core.dtypes import INT64, DType
from ...core.errors import CheckError
from ..binding.ranges import Bounds, Ranges, is_updatable_in_part
from ..ir import (
    Access,
    Binary,
    Cast,
    Const,
    Expr,
    Function,
    Index,
    Role,
    Select,
    Size,
    Statement,
    Unary,
    operands_of,
    walk_expr,
    with_operands,
)
from ..semantics.to_syntax import polynomial_to_expr
from ..size_polynomial import Value


@dataclass(frozen=True, slots=True)
class SsaTensor:
    """A tensor with one definition.

    tensor: the name of the tensor in the def, or a new one. bounds: the bounds of each dimension.
    """

    tensor: str
    dtype: DType
    bounds: tuple[Bounds, ...]


@dataclass(frozen=True)
class SsaStatement:
    """`target(subscripts) op value` for all indices; `target` is a version.

    op: `=`, `+=`, or a reduction with `!`.
    before: the version that the step continues: for `+=`, or for an `=` that leaves some elements unchanged.
    ranges: the ranges of the indices, those on the left first. exists: accesses of tensors that must store the element.
    """

    target: str
    subscripts: tuple[Expr, ...]
    op: str
    value: Expr
    left: tuple[str, ...]
    ranges: Mapping[str, Bounds]
    before: str | None = None
    exists: tuple[Access, ...] = ()
    source: Statement | None = None

    @cached_property
    def reads(self) -> frozenset[str]:
        """The versions that the step needs."""
        expressions = (self.value, *self.subscripts, *self.exists)
        read = frozenset(x.tensor for e in expressions for x in walk_expr(e) if isinstance(x, Access))
        return read if self.before is None else read | {self.before}


@dataclass(slots=True)
class SsaProgram:
    """The steps of a def. last: the final version of each tensor."""

    function: Function
    ranges: Ranges
    steps: list[SsaStatement] = field(default_factory=list)
    versions: dict[str, SsaTensor] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Function, ranges: Ranges) -> SsaProgram:
        """Convert a function to SSA form. Raises CheckError for statements that cannot be converted."""
        out = cls(function, ranges)
        for t in function.tensors:
            if t.role is Role.INPUT:
                out.versions[t.name] = SsaTensor(t.name, t.dtype, ranges.tensors[t.name])
                out.last[t.name] = t.name
            elif t.role is Role.INOUT:
                out.new_version(t.name, t.dtype, ranges.tensors[t.name])
        for n, s in enumerate(function.statements):
            out._add_statement_steps(s, dict(ranges.statements[n]))
        return out

    def new_version(self, tensor: str, dtype: DType, bounds: tuple[Bounds, ...]) -> str:
        """Add the next version of a tensor and return its name."""
        n = self._count[tensor] = self._count.get(tensor, -1) + 1
        name = f"{tensor}@{n}"
        self.versions[name] = SsaTensor(tensor, dtype, bounds)
        self.last[tensor] = name
        return name

    def zero(self, version: str) -> Const:
        dtype = self.versions[version].dtype
        return Const(0.0 if dtype.is_float else 0, dtype)

    def constant(self, target: str, value: Expr, source: Statement | None = None) -> SsaStatement:
        """The step that sets every element of a version to `value`."""
        bounds = self.versions[target].bounds
        indices = tuple(f"i{d}" for d in range(len(bounds)))
        ranges = dict(zip(indices, bounds, strict=True))
        return SsaStatement(target, tuple(map(_make_index_expr, indices)), "=", value, indices, ranges, source=source)

    # --- one statement -----------------------------------------------------------------------------------------------

    def _add_statement_steps(self, s: Statement, ranges: dict[str, Bounds]) -> None:
        whole = self.ranges.tensors[s.target]
        subscripts = tuple(
            as_partial_write_subscript(self._read_current_versions(e), ranges, range_extent(b))
            if is_updatable_in_part(self.function.tensor(s.target))
            else self._read_current_versions(e)
            for e, b in zip(s.subscripts, whole, strict=True)
        )
        value = self._read_current_versions(s.value)
        exists = tuple(e for x in s.exists if isinstance(e := self._read_current_versions(x), Access))
        step = SsaStatement("", subscripts, "=", value, s.indices[: s.num_free], ranges, exists=exists, source=s)
        plain = are_bare_indices(subscripts)
        before = self.last.get(s.target)
        if s.reduction is None:
            self._add(s.target, replace(step, before=None if plain else before))
        elif s.reduction == "+":
            if s.initialize and not plain:
                symbol = self.function.tensor(s.target)
                before = self.new_version(s.target, symbol.dtype, self.ranges.tensors[s.target])
                self.steps.append(self.constant(before, self.zero(before), s))
            first = s.initialize and plain
            self._add(s.target, replace(step, op="+=!" if first else "+=", before=None if first else before))
        elif not plain:
            raise no_gradient_error(self.function, s, f"'{s.reduction}' reduces into a place that is not a plain index")
        else:
            self._extremum(s, step, before)

    def _extremum(self, s: Statement, step: SsaStatement, before: str | None) -> None:
        """Add a product, minimum or maximum; one that continues an earlier value is split in two."""
        assert s.reduction is not None
        op = s.reduction if s.reduction in ("min", "max") else "*"
        goes_on = not s.initialize and before is not None
        value = step.value
        if goes_on and len(s.indices) == s.num_free:
            assert before is not None
            self._add(s.target, replace(step, value=self._combine_with_old(s, op, before, step, value)))
            return
        dtype = self.function.tensor(s.target).dtype
        used = [i for i in step.ranges if any(isinstance(x, Index) and x.name == i for x in walk_expr(value))]
        if op != "*":  # a minimum over an index that no operand depends on is a minimum over the other indices
            exists = tuple(a for a in step.exists if self._may_be_sparse_version(a.tensor))
            needed = {*used, *step.left, *(x.name for a in exists for x in walk_expr(a) if isinstance(x, Index))}
            step = replace(step, ranges={i: b for i, b in step.ranges.items() if i in needed}, exists=exists)
        if dtype.is_float and not (_is_element(value) or (op != "*" and _is_choice(value))):
            subscripts = tuple(map(_make_index_expr, used))
            name = self.new_version(f"{s.target}_term", value.dtype, tuple(step.ranges[i] for i in used))
            ranges = {i: step.ranges[i] for i in used}
            exists = tuple(a for a in step.exists if self._may_be_sparse_version(a.tensor) and uses_only(a, used))
            self.steps.append(SsaStatement(name, subscripts, "=", value, tuple(used), ranges, exists=exists, source=s))
            value = Access(name, subscripts, value.dtype)
        reduced = replace(step, op=f"{op}=!", value=value)
        if not goes_on and (op == "*" or not dtype.is_float or _is_input_element(value)):
            self._add(s.target, reduced)
            return
        # To find which of several computed terms is the extremum, compare them with their own extremum, not with an
        # output: another kernel has computed the output, and its last bit may differ.
        partial = self.new_version(f"{s.target}_part", value.dtype, self.ranges.tensors[s.target])
        self.steps.append(replace(reduced, target=partial))
        whole: Expr = Access(partial, step.subscripts, value.dtype)
        if goes_on:
            assert before is not None
            whole = self._combine_with_old(s, op, before, step, whole)
        elif dtype != value.dtype:
            whole = Cast(whole, dtype)
        ranges = {i: step.ranges[i] for i in step.left}
        self._add(s.target, replace(step, value=whole, ranges=ranges, exists=()))

    def _may_be_sparse_version(self, version: str) -> bool:
        """Whether a version may store only some elements, so that `exists` on it has an effect."""
        if not self.function.is_sparse:
            return False
        symbol = next((t for t in self.function.tensors if t.name == version.partition("@")[0]), None)
        return symbol is not None and (symbol.is_sparse or symbol.role is Role.TEMPORARY)

    def _combine_with_old(self, s: Statement, op: str, before: str, step: SsaStatement, value: Expr) -> Expr:
        """`before op value`, in the type of the target."""
        dtype = self.function.tensor(s.target).dtype
        old: Expr = Access(before, step.subscripts, dtype)
        old = old if dtype == value.dtype else Cast(old, value.dtype)
        new: Expr = Binary(op, old, value, value.dtype)
        return new if dtype == value.dtype else Cast(new, dtype)

    def _add(self, tensor: str, step: SsaStatement) -> None:
        name = self.new_version(tensor, self.function.tensor(tensor).dtype, self.ranges.tensors[tensor])
        self.steps.append(replace(step, target=name))

    def _read_current_versions(self, e: Expr) -> Expr:
        """`e` with reads of the current versions, and with only the sizes of the signature."""
        if isinstance(e, Size) and "." in e.name:
            return _with_dtype(polynomial_to_expr(self.ranges.sizes[e.name]), e.dtype)
        e = with_operands(e, [self._read_current_versions(x) for x in operands_of(e)])
        return replace(e, tensor=self.last[e.tensor]) if isinstance(e, Access) else e


def no_gradient_error(function: Function, s: Statement | None, reason: str) -> CheckError:
    """The error that a def cannot be differentiated, located at the statement `s` that causes it."""
    return CheckError(
        f"'{function.name}' cannot be differentiated: {reason}",
        source=function.source if s is not None else None,
        span=s.span if s is not None else None,
        suggestion="give its gradient yourself: tc.define(source, backward={...})",
    )


def are_bare_indices(subscripts: tuple[Expr, ...]) -> bool:
    """Whether subscripts are distinct bare index variables."""
    names = [e.name for e in subscripts if isinstance(e, Index)]
    return len(names) == len(subscripts) == len(set(names))


def is_restricted_by_exists(step: SsaStatement, function: Function) -> bool:
    """Whether a step may apply only to those points of its ranges where an element is stored."""
    return bool(step.exists) and function.is_sparse


def uses_only(e: Expr, indices: Sequence[str]) -> bool:
    """Whether all indices in `e` are among `indices`."""
    return all(x.name in indices for x in walk_expr(e) if isinstance(x, Index))


def range_extent(bounds: Bounds) -> Value:
    return bounds[1] - bounds[0]


def as_partial_write_subscript(e: Expr, ranges: Mapping[str, Bounds], size: Value) -> Expr:
    """A subscript on the left. An index with a partial range gets `+ 0`: a bare index means the whole dimension."""
    if isinstance(e, Index) and ranges[e.name] != (0, size):
        return Binary("+", e, Const(0, INT64), INT64)
    return e


def _make_index_expr(name: str) -> Expr:
    return Index(name, INT64)


def _is_element(e: Expr) -> bool:
    match e:
        case Access() | Cast(operand=Access()):
            return True
    return False


def _is_choice(e: Expr) -> bool:
    """Whether `e` is a select among elements and constants, which does no arithmetic that could round."""
    if not isinstance(e, Select):
        return False
    return all(_is_constant(x) or _is_element(x) or _is_choice(x) for x in (e.then, e.otherwise))


def _is_constant(e: Expr) -> bool:
    return isinstance(e, Const) or (isinstance(e, Unary | Cast) and _is_constant(e.operand))


def _is_input_element(element: Expr) -> bool:
    """Whether this is an element of an input, or a select among such elements and constants."""
    while isinstance(element, Cast):
        element = element.operand
    if _is_choice(element):
        return not any(isinstance(x, Access) and "@" in x.tensor for x in walk_expr(element))
    return isinstance(element, Access) and "@" not in element.tensor


def _with_dtype(e: Expr, dtype: DType) -> Expr:
    """An int64 expression over sizes, converted to another integer type."""
    e = with_operands(e, [_with_dtype(x, dtype) for x in operands_of(e)])
    return replace(e, dtype=dtype)
