"""`Function` + sizes -> `BoundFunction`: all sizes are numbers; each access is proved, guarded, checked or rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from ...core.dtypes import BOOL, INT64, DType, wrap_integer
from ...core.errors import ArgumentError, RangeError, Span
from ...core.memory_layout import contiguous_strides
from ..affine import Interval, dtype_interval, normalize_subscript, substitute_sizes, to_affine
from ..ir import (
    Access,
    Binary,
    BoundFunction,
    BoundIndex,
    BoundsCheck,
    BoundStatement,
    Const,
    Expr,
    Function,
    Index,
    Role,
    Select,
    Statement,
    Tensor,
    Unary,
    operands_of,
    walk_expr,
    with_operands,
)
from ..size_polynomial import constant_value
from .bounds_proof import Guards, Verdict, is_injective, prove_in_bounds
from .ranges import Bounds, Ranges, infer_ranges, is_updatable_in_part

MAX_BYTES = 1 << 62


def bind(
    function: Function,
    sizes: Mapping[str, int],
    scalars: Mapping[str, int] | None = None,
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> BoundFunction:
    """Bind a function to a number for every size.

    Args:
        sizes: the value of each of `function.sizes`.
        scalars: the value of each of `function.scalars`.
        strides: strides of inputs and in/out tensors, in elements; a tensor that is not listed is contiguous.

    Raises RangeError if an index has no range, a range has a negative extent, definitions of a tensor disagree or
    an access leaves its tensor; ArgumentError if a size is missing or negative.
    """
    known = _bind_sizes(function, sizes, scalars or {})
    ranges = infer_ranges(function, known)
    env = {name: constant_value(x) or 0 for name, x in ranges.sizes.items()}
    _check_constraints(function, env)
    tensors = tuple(_bind_tensor(function, t.name, ranges, strides or {}) for t in function.tensors)
    binder = _Binder(function, env, {t.name: t for t in tensors}, ranges)
    statements = tuple(b for n, s in enumerate(function.statements) for b in binder.statement(s, ranges.statements[n]))
    starts = tuple(binder.starts(name) for name in function.returns)
    return BoundFunction(function.name, tensors, statements, function.returns, starts)


def _bind_sizes(function: Function, sizes: Mapping[str, int], scalars: Mapping[str, int]) -> dict[str, int]:
    known: dict[str, int] = {}
    for kind, names, values in (("size", function.sizes, sizes), ("scalar", function.scalars, scalars)):
        for name in names:
            value = values.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentError(
                    f"'{function.name}' needs a value of the {kind} '{name}'", expected="an int", found=repr(value)
                )
            if kind == "size" and value < 0:
                raise ArgumentError(f"the size '{name}' is negative", expected="0 or more", found=str(value))
            known[name] = value if kind == "size" else wrap_integer(value, function.tensor(name).dtype)
    return known


def _check_constraints(function: Function, env: Mapping[str, int]) -> None:
    for c in function.constraints:
        left, right = (constant_value(to_affine(e, env).constant) for e in (c.left, c.right))
        if left != right:
            raise RangeError(c.message, source=function.source, span=c.span, expected=str(right), found=str(left))


def _bind_tensor(function: Function, name: str, ranges: Ranges, strides: Mapping[str, tuple[int, ...]]) -> Tensor:
    symbol = function.tensor(name)
    shape = tuple(constant_value(x) or 0 for x in ranges.shape(name))
    if prod(max(1, x) for x in shape) * symbol.dtype.size > MAX_BYTES:
        raise RangeError(
            f"'{name}' has more bytes than a machine can address",
            source=function.source,
            span=symbol.span,
            found=f"shape {shape}",
        )
    given = strides.get(name) if symbol.role in (Role.INPUT, Role.INOUT) else None
    if given is not None and len(given) != len(shape):
        raise ArgumentError(f"the strides of '{name}' have another rank", expected=str(len(shape)), found=str(given))
    return Tensor(
        name, symbol.dtype, shape, tuple(given) if given is not None else contiguous_strides(shape), symbol.role
    )


def neutral_element(reduction: str, dtype: DType) -> int | float | bool:
    """The neutral element of a reduction."""
    if reduction in ("+", "*"):
        return (0.0 if reduction == "+" else 1.0) if dtype.is_float else int(reduction == "*")
    if dtype.is_float:
        return float("inf") if reduction == "min" else float("-inf")
    low, high = dtype_interval(dtype)
    extreme = high if reduction == "min" else low
    return bool(extreme) if dtype.is_bool else extreme


@dataclass(slots=True)
class _Binder:
    function: Function
    env: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    ranges: Ranges
    written: set[str] = field(default_factory=set)

    def starts(self, tensor: str) -> tuple[int, ...]:
        """The smallest index of each dimension of a tensor."""
        return tuple(constant_value(lower) or 0 for lower, _ in self.ranges.tensors[tensor])

    def statement(self, s: Statement, ranges: Mapping[str, Bounds]) -> Iterator[BoundStatement]:
        """The bound form of a statement. An initializing scatter becomes two: the initialization and the reduction."""
        indices = tuple(
            BoundIndex(i, constant_value(ranges[i][0]) or 0, constant_value(ranges[i][1]) or 0) for i in s.indices
        )
        box = {i.name: (i.lower, i.upper - 1) for i in indices}
        empty = any(i.extent == 0 for i in indices)
        subscripts = tuple(normalize_subscript(e, self.env) for e in self._relative(s.target, s.subscripts))
        value = substitute_sizes(self._shift_accesses(s.value), self.env)
        self._check_magnitude(s, indices, (*subscripts, *_index_computations(value)))
        prover = _Prover(self, s.span, box, empty)
        subscripts = tuple(prover.visit(e, ()) for e in subscripts)
        value = prover.visit(value, ())
        self._check_agreement(s, indices)
        prover.target(s, subscripts)
        if not empty:
            self._check_writes_once(s, subscripts, {i.name: box[i.name] for i in indices[: s.num_free]})
        self.written.add(s.target)
        bound = BoundStatement(
            s.name, s.target, subscripts, s.reduction, s.initialize, value, indices, s.num_free,
            checks=tuple(prover.checks), exists=self._exists(s), span=s.span,
        )  # fmt: skip
        bound = replace(bound, reads_own_target=_needs_target_copy(bound))
        if s.reduction is not None and s.initialize and not are_offset_indices(subscripts):
            yield self._make_initialization(bound, s)
            bound = replace(bound, initialize=False)
        yield bound

    def _exists(self, s: Statement) -> tuple[Access, ...]:
        """The bound accesses of `s.exists`; none if every tensor is dense, since then all elements exist."""
        if not self.function.is_sparse:
            return ()
        found = (substitute_sizes(self._shift_accesses(e), self.env) for e in s.exists)
        return tuple(e for e in found if isinstance(e, Access))

    # --- subscripts relative to storage ----------------------------------------------------------------------------

    def _shift_accesses(self, e: Expr) -> Expr:
        """`e` with the subscripts of all accesses relative to the start of the tensor's storage."""
        if isinstance(e, Access):
            return replace(e, subscripts=self._relative(e.tensor, e.subscripts))
        return with_operands(e, [self._shift_accesses(x) for x in operands_of(e)])

    def _relative(self, tensor: str, subscripts: tuple[Expr, ...]) -> tuple[Expr, ...]:
        shifted = (self._shift_accesses(e) for e in subscripts)
        return tuple(
            Binary("-", e, Const(start, INT64), INT64) if start else e
            for e, start in zip(shifted, self.starts(tensor), strict=True)
        )

    def _check_magnitude(self, s: Statement, indices: tuple[BoundIndex, ...], expressions: tuple[Expr, ...]) -> None:
        """Check that no computation with 64 bits can overflow. Raises RangeError."""
        numbers = [x for i in indices for x in (i.lower, i.upper)]
        numbers += [
            int(x.value) for e in expressions for x in walk_expr(e) if isinstance(x, Const) and x.dtype == INT64
        ]
        if any(abs(x) > MAX_BYTES for x in numbers):
            raise RangeError(
                "a range or a subscript of this statement is too large for int64",
                source=self.function.source,
                span=s.span,
            )

    # --- what the left side must satisfy ---------------------------------------------------------------------------

    def _check_agreement(self, s: Statement, indices: tuple[BoundIndex, ...]) -> None:
        """Check that all definitions of a tensor give plain indices in the same dimension the same range.

        In/out tensors that may be updated in part are exempt.
        """
        if is_updatable_in_part(self.function.tensor(s.target)):
            return
        by_name = {i.name: i for i in indices}
        for d, (e, bounds) in enumerate(zip(s.subscripts, self.ranges.tensors[s.target], strict=True)):
            if not isinstance(e, Index):
                continue
            mine = by_name[e.name]
            lower, upper = (constant_value(x) for x in bounds)
            if (mine.lower, mine.upper) != (lower, upper):
                raise RangeError(
                    f"two definitions of '{s.target}' give dimension {d} different ranges",
                    source=self.function.source,
                    span=s.span,
                    expected=f"[{lower}, {upper}), as an earlier definition has",
                    found=f"[{mine.lower}, {mine.upper}) of '{mine.name}'",
                )

    def _check_writes_once(self, s: Statement, subscripts: tuple[Expr, ...], box: Mapping[str, Interval]) -> None:
        """Check that `=` writes no element twice and that the first definition leaves none undefined."""
        if are_offset_indices(subscripts) or s.reduction is not None:
            return
        if not is_injective(subscripts, box):
            raise RangeError(
                f"'=' writes some elements of '{s.target}' twice",
                source=self.function.source,
                span=s.span,
                expected="different elements for different indices, or a reduction operator",
            )
        tensor = self.tensors[s.target]
        points = prod(high - low + 1 for low, high in box.values())
        if s.target not in self.written and tensor.role is not Role.INOUT and points < tensor.size:
            raise RangeError(
                f"the first definition of '{s.target}' leaves elements undefined",
                source=self.function.source,
                span=s.span,
                expected=f"all {tensor.size} elements",
                found=f"{points} of them",
                suggestion=f"define the whole of '{s.target}' before",
            )

    def _make_initialization(self, b: BoundStatement, s: Statement) -> BoundStatement:
        """The statement that initializes a whole tensor before a reduction that may skip some elements."""
        if any(isinstance(x, Access) and x.tensor == b.target for e in (b.value, *b.subscripts) for x in walk_expr(e)):
            raise RangeError(
                f"this statement initializes '{b.target}' and reads it",
                source=self.function.source,
                span=s.span,
                suggestion="initialize it in a statement of its own",
            )
        assert b.reduction is not None
        tensor = self.tensors[b.target]
        indices = tuple(BoundIndex(f"i{d}", 0, extent) for d, extent in enumerate(tensor.shape))
        value = Const(neutral_element(b.reduction, tensor.dtype), tensor.dtype)
        subscripts = tuple(Index(i.name, INT64) for i in indices)
        return BoundStatement(
            f"{b.name}_init", b.target, subscripts, None, False, value, indices, len(indices), span=b.span
        )


def _index_computations(e: Expr) -> Iterator[Expr]:
    """The subscripts in a value and its arithmetic on indices, whose size can be bounded, unlike other integers."""
    if isinstance(e, Access):
        yield from e.subscripts
    elif not isinstance(e, Select) and any(isinstance(x, Index) for x in _walk_outside_accesses(e)):
        yield e
    else:
        for x in operands_of(e):
            yield from _index_computations(x)


def _walk_outside_accesses(e: Expr) -> Iterator[Expr]:
    """Yield `e` and its subexpressions, without the subscripts of accesses."""
    yield e
    if not isinstance(e, Access):
        for x in operands_of(e):
            yield from _walk_outside_accesses(x)


@dataclass(slots=True)
class _Prover:
    """Proves the accesses of one statement in bounds, and collects the checks that remain for run time."""

    binder: _Binder
    span: Span | None
    box: Mapping[str, Interval]
    empty: bool
    checks: list[BoundsCheck] = field(default_factory=list)

    def visit(self, e: Expr, guards: Guards) -> Expr:
        """`e` with those accesses marked as guarded that may be in bounds only under `guards`."""
        match e:
            case Access():
                return self._access(e, guards)
            case Select(condition=condition, then=then, otherwise=otherwise):
                c = self.visit(condition, guards)
                a = self.visit(then, (*guards, (c, True)))
                return with_operands(e, [c, a, self.visit(otherwise, (*guards, (c, False)))])
            case Binary(op="&&" | "||" as op, left=left, right=right):
                a = self.visit(left, guards)
                b = self.visit(right, (*guards, (a, op == "&&")))
                if not _has_guarded(b):
                    return with_operands(e, [a, b])
                if op == "&&":
                    return Select(a, b, Const(False, BOOL), BOOL)
                return Select(a, Const(True, BOOL), b, BOOL)
        return with_operands(e, [self.visit(x, guards) for x in operands_of(e)])

    def _access(self, e: Access, guards: Guards) -> Expr:
        subscripts = tuple(self.visit(x, guards) for x in e.subscripts)
        guarded = False
        for d, x in enumerate(subscripts):
            guarded |= self._decide(e.tensor, d, x, guards, e.span)
        e_ = with_operands(e, subscripts)
        return replace(e_, guarded=True) if guarded and isinstance(e_, Access) else e_

    def target(self, s: Statement, subscripts: tuple[Expr, ...]) -> None:
        """Prove the subscripts of the target, or add checks; bare indices are in bounds by construction."""
        for d, x in enumerate(subscripts):
            if not isinstance(s.subscripts[d], Index):
                self._decide(s.target, d, x, (), s.span)

    def _decide(self, tensor: str, d: int, subscript: Expr, guards: Guards, span: Span | None) -> bool:
        """Prove a subscript in bounds, or add a run-time check. Return whether the access needs its guards.

        Raises RangeError if it is out of bounds.
        """
        extent = self.binder.tensors[tensor].shape[d]
        if self.empty:
            return False
        finding = prove_in_bounds(subscript, extent, guards, self.box)
        start = self.binder.starts(tensor)[d]
        match finding.verdict:
            case Verdict.SAFE:
                return False
            case Verdict.UNKNOWN:
                self.checks.append(BoundsCheck(tensor, d, subscript, extent, _and_guards(guards), start))
            case Verdict.VIOLATED:
                raise RangeError(
                    f"dimension {d} of '{tensor}' is accessed out of bounds",
                    source=self.binder.function.source,
                    span=span or self.span,
                    expected=f"{start} <= subscript < {start + extent}",
                    found=f"a subscript of {finding.witness + start}",
                    suggestion="restrict the index with `where`, or guard the access with `condition ? ... : ...`",
                )
        return bool(guards)


def are_offset_indices(subscripts: tuple[Expr, ...]) -> bool:
    """Whether the subscripts are distinct index variables, each with an optional constant offset."""
    names = [next((x.name for x in walk_expr(e) if isinstance(x, Index)), None) for e in subscripts if _is_offset(e)]
    return len(names) == len(subscripts) == len(set(names))


def _is_offset(e: Expr) -> bool:
    match e:
        case Index() | Binary(op="+" | "-", left=Index(), right=Const()):
            return True
    return False


def _has_guarded(e: Expr) -> bool:
    return any(isinstance(x, Access) and x.guarded for x in walk_expr(e))


def _and_guards(guards: Guards) -> Expr | None:
    """The conjunction of all guards, in which earlier guards protect the reads of later ones."""
    out: Expr | None = None
    for condition, holds in guards:
        c = condition if holds else Unary("!", condition, BOOL)
        if out is None:
            out = c
        elif _has_guarded(c):
            out = Select(out, c, Const(False, BOOL), BOOL)
        else:
            out = Binary("&&", out, c, BOOL)
    return out


def _needs_target_copy(b: BoundStatement) -> bool:
    """Whether the statement reads its target other than by reading each element just before writing it."""
    reads = [
        x for e in (b.value, *b.subscripts) for x in walk_expr(e) if isinstance(x, Access) and x.tensor == b.target
    ]
    if not reads:
        return False
    pointwise = all(x.subscripts == b.subscripts for x in reads)
    return (
        not pointwise
        or bool(b.reduction_indices)
        or (b.reduction is not None and (b.initialize or not are_offset_indices(b.subscripts)))
    )
