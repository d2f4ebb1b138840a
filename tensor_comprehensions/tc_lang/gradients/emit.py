"""Emit the text of a gradient: choose names, recompute values that it needs, and drop redundant clauses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...core.dtypes import BOOL, DType
from ...core.errors import CheckError, InternalError, TCError
from ..binding.ranges import Bounds, Ranges, infer_ranges, infer_statement
from ..builtins import CONSTANTS, is_builtin
from ..formats import Format
from ..ir import (
    INDEX_TYPE,
    Access,
    Binary,
    Const,
    Expr,
    Function,
    Index,
    Role,
    Select,
    operands_of,
    walk_expr,
    with_operands,
)
from ..semantics.check import compile_source
from ..semantics.to_syntax import expr_to_syntax, polynomial_to_expr
from ..size_polynomial import SizeName, SizePolynomial, Value, constant_value
from ..syntax import tree as s
from ..syntax.printer import to_text
from .gradient import Gradient, Key
from .saved_tensors import choose_saved_tensors
from .ssa import SsaProgram, SsaStatement, range_extent

MOST = 100
"""Maximum statements of a gradient whose redundant ranges are dropped: finding them takes too long for more."""


@dataclass(frozen=True)
class GradStatement:
    """A statement of a gradient. Its target is a gradient, counted from 0; it reads gradients and versions."""

    target: str
    subscripts: tuple[Expr, ...]
    op: str
    value: Expr
    ranges: Mapping[str, Bounds]
    exists: tuple[Access, ...] = ()

    @cached_property
    def reads(self) -> frozenset[str]:
        """The tensors that the statement reads."""
        expressions = (self.value, *self.subscripts, *self.exists)
        return frozenset(x.tensor for e in expressions for x in walk_expr(e) if isinstance(x, Access))


def write_gradient(
    steps: SsaProgram,
    written: Sequence[GradStatement],
    targets: Mapping[Key, str],
    keep: bool,
    patterns: Collection[str],
) -> Gradient:
    """The gradient with the statements `written`.

    targets: for each requested input or initial value, the tensor that ends up with its gradient.
    keep: whether the gradient may take temporaries of the def as inputs.
    patterns: the versions that store only some elements.
    """
    writer = _Writer(steps, patterns)
    declared = writer.parameters(written, keep)
    gives = tuple(writer.gradient_name(key, name) for key, name in targets.items())
    statements = [*writer.recompute_steps(written), *written]
    takes = writer.needed_parameters(declared, statements)
    body = tuple(writer.statement(w) for w in statements)
    parameters = tuple(writer.declarations[key] for key in takes)
    formats = [_format_name(steps.function.tensor(key[1]).format) for key in targets]
    returns = tuple(s.Declaration(name, None, format) for name, format in zip(gives, formats, strict=True))
    d = s.Def(f"{steps.function.name}_backward", parameters, returns, body)
    text, function = _drop_implied_ranges(d)
    return Gradient(text, function, takes, tuple(targets))


@dataclass(slots=True)
class _Writer:
    """Builds the syntax tree of a gradient.

    names: the name in the text of every version and gradient. shifted: those that are passed, so that their subscripts
    count from 0.
    """

    steps: SsaProgram
    patterns: Collection[str]
    names: dict[str, str] = field(default_factory=dict)
    shifted: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    declarations: dict[Key, s.Declaration] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    # --- parameters --------------------------------------------------------------------------------------------------

    def parameters(self, written: Sequence[GradStatement], keep: bool) -> tuple[Key, ...]:
        """Declare the possible parameters of the gradient: inputs, initial values, saved results, output gradients."""
        function = self.steps.function
        self.used = {name for w in written for name in w.reads}
        self.taken = {*function.sizes, *function.scalars}
        for t in function.tensors:
            if t.role is Role.INPUT:
                self._declare(("input", t.name), t.name, t.name, t.dtype)
        for t in function.inouts:
            self._declare(("initial", t.name), f"{t.name}@0", f"{t.name}_0", t.dtype)
        outputs, kept = choose_saved_tensors(self.steps, self.used, keep)
        for r in function.returns:
            if self.steps.last[r] in outputs:
                self._declare(("output", r), self.steps.last[r], r, function.tensor(r).dtype)
        for name in kept:
            self._declare(("temporary", name), self.steps.last[name], name, function.tensor(name).dtype)
        for r in function.returns:
            if function.tensor(r).dtype.is_float:
                self.names[f"d {r}"] = self.steps.last[r]  # only for the bounds
                self._declare(("gradient", r), f"d {r}", f"d_{r}", function.tensor(r).dtype)
        return tuple(self.declarations)

    def needed_parameters(self, declared: Sequence[Key], statements: Sequence[GradStatement]) -> tuple[Key, ...]:
        """The parameters that are read or that determine a size."""
        read = {self.names[name] for w in statements for name in w.reads if name in self.names}
        scalars = {p.name for p in self.steps.function.parameters if p.is_compile_time}
        takes = list(declared)
        for key in declared:
            mine = self.declarations[key]
            others = {size for k in takes if k != key for size in _collect_size_names(self.declarations[k])}
            if mine.name not in read | scalars and key[0] != "gradient" and _collect_size_names(mine) <= others:
                takes.remove(key)
        return tuple(takes)

    def _declare(self, key: Key, tensor: str, name: str, dtype: DType) -> None:
        kind = key[0]
        version = tensor if kind in ("input", "initial") else self.steps.last[key[1]]
        name = self._fresh_name(name, input=kind == "input")
        self.names[tensor] = name
        if kind != "gradient":
            self.shifted.add(tensor)
        dims = [
            self._dimension(range_extent(b), f"{name}_{d}") for d, b in enumerate(self.steps.versions[version].bounds)
        ]
        type_ = s.Type(dtype, tuple(s.Dimension(x) for x in dims) if dims else None)
        format = None if kind == "temporary" else self.steps.function.tensor(key[1]).format
        self.declarations[key] = s.Declaration(name, type_, _format_name(format))

    def _dimension(self, x: Value, otherwise: str) -> str | int:
        """An extent as a size name or a number; a new size name if it is neither."""
        n = constant_value(x)
        if n is not None:
            return n
        if isinstance(x, SizePolynomial) and len(x.terms) == 1 and x.terms[0][1] == 1:
            monomial = x.terms[0][0]
            if (
                len(monomial) == 1
                and isinstance(monomial[0], SizeName)
                and monomial[0].name in self.steps.function.sizes
            ):
                return monomial[0].name
        return self._fresh_name(otherwise)

    def _fresh_name(self, name: str, input: bool = False) -> str:
        """`name`, or a similar name that is not taken."""
        base, n = (f"{name}_" if is_builtin(name) or name in CONSTANTS else name), 0
        candidate = base
        while candidate in self.taken and not (input and n == 0 and candidate == name):
            n += 1
            candidate = f"{base}_{n}"
        self.taken.add(candidate)
        return candidate

    def gradient_name(self, key: Key, tensor: str) -> str:
        """Name the gradient of an input or an initial value, which ends up in `tensor`."""
        kind, name = key
        self.names[tensor] = self._fresh_name(f"d_{name}" if kind == "input" else f"d_{name}_0")
        return self.names[tensor]

    # --- recomputed values -------------------------------------------------------------------------------------------

    def recompute_steps(self, written: Sequence[GradStatement]) -> list[GradStatement]:
        """Statements that recompute the values that `written` reads and that are not passed. Names their versions."""
        needed = {name for name in self.used if name in self.steps.versions} - self.shifted
        kept: list[SsaStatement] = []
        for step in reversed(self.steps.steps):
            if step.target in needed:
                step = replace(step, exists=self._useful_exists(step))
                kept.append(step)
                needed |= step.reads - self.shifted
        return [w for step in reversed(kept) for w in self._recompute_step(step)]

    def _useful_exists(self, step: SsaStatement) -> tuple[Access, ...]:
        """The `exists` clauses of tensors that store only some elements, and those that mention an index first."""
        found = {x.name for e in (step.value, *step.subscripts) for x in walk_expr(e) if isinstance(x, Index)}
        out = []
        for e in step.exists:
            names = {x.name for x in walk_expr(e) if isinstance(x, Index) and x.name in step.ranges}
            if names - found or e.tensor in self.patterns:
                out.append(e)
                found |= names
        return tuple(out)

    def _recompute_step(self, step: SsaStatement) -> list[GradStatement]:
        """A step as statements; it overwrites an earlier version if that is no longer needed."""
        version = self.steps.versions[step.target]
        earlier = [v for v, x in self.steps.versions.items() if x.tensor == version.tensor and v in self.names]
        earlier = [v for v in earlier if v not in self.shifted and v != step.target]
        before = step.before
        reusable = earlier and earlier[-1] not in self.used and (before is None or before == earlier[-1])
        copies = []
        if reusable:
            self.names[step.target] = self.names[earlier[-1]]
        else:
            self.names[step.target] = self._fresh_name(version.tensor)
            if before is not None:
                box = {f"i{d}": b for d, b in enumerate(version.bounds)}
                subscripts = tuple(Index(name, polynomial_to_expr(0).dtype) for name in box)
                old = Access(before, subscripts, version.dtype)
                copies.append(GradStatement(step.target, subscripts, "=", old, box))
        mine = GradStatement(step.target, step.subscripts, step.op, step.value, step.ranges, step.exists)
        return [*copies, mine]

    # --- statements --------------------------------------------------------------------------------------------------

    def statement(self, w: GradStatement) -> s.Statement:
        """The statement as a syntax tree with an explicit range for each index."""
        renamed = self._index_names(w)
        target = self._name_of(w.target)
        subscripts = tuple(expr_to_syntax(self._rename_expr(e, renamed), True) for e in w.subscripts)
        value = expr_to_syntax(self._rename_expr(_mention_indices(w), renamed))
        ranges = [s.Range(renamed[i], self._bound(b[0]), self._bound(b[1])) for i, b in w.ranges.items()]
        exists = [s.Exists(expr_to_syntax(self._rename_expr(e, renamed))) for e in w.exists]
        return s.Statement(target, subscripts or None, w.op, value, (*ranges, *exists))

    def _name_of(self, tensor: str) -> str:
        if tensor not in self.names:
            self.names[tensor] = self._fresh_name(self._proposal(tensor))
        return self.names[tensor]

    def _proposal(self, tensor: str) -> str:
        kind, _, version = tensor.partition(" ")
        if not version:
            return self.steps.versions[tensor].tensor
        return f"{kind.rstrip('0123456789')}_{version.partition('@')[0]}"

    def _bound(self, x: Value) -> s.Expression:
        return expr_to_syntax(polynomial_to_expr(x), True)

    def _index_names(self, w: GradStatement) -> dict[str, str]:
        names: dict[str, str] = {}
        others = [x.name for e in w.exists for x in walk_expr(e) if isinstance(x, Index)]
        for i in dict.fromkeys((*w.ranges, *others)):
            name, n = i.replace("'", ""), 0
            base = name
            while name in names.values() or name in self.taken or name in CONSTANTS:
                n += 1
                name = f"{base}{n}"
            names[i] = name
        return names

    def _rename_expr(self, e: Expr, renamed: Mapping[str, str]) -> Expr:
        """`e` with tensors and indices renamed to the names in the text."""
        if isinstance(e, Index):
            return replace(e, name=renamed[e.name])
        e = with_operands(e, [self._rename_expr(x, renamed) for x in operands_of(e)])
        if not isinstance(e, Access):
            return e
        if e.tensor in self.shifted:
            starts = [lower for lower, _ in self.steps.versions[e.tensor].bounds]
            shifted = tuple(_shift_subscript(x, b) for x, b in zip(e.subscripts, starts, strict=True))
            e = replace(e, subscripts=shifted)
        return replace(e, tensor=self._name_of(e.tensor))


def _mention_indices(w: GradStatement) -> Expr:
    """The value of `w`, with a condition that is always true for each index that simplification has removed.

    Such an index still counts the terms of a sum, but the language rejects a range for an index that does not occur.
    """
    parts = (w.value, *w.subscripts, *w.exists)
    mentioned = {x.name for e in parts for x in walk_expr(e) if isinstance(x, Index)}
    value = w.value
    for name, (lower, _) in w.ranges.items():
        if name not in mentioned:
            inside = Binary(">=", Index(name, INDEX_TYPE), polynomial_to_expr(lower), BOOL)
            value = Select(inside, value, Const(0.0 if value.dtype.is_float else 0, value.dtype), value.dtype)
    return value


def _format_name(format: Format | None) -> s.FormatName | None:
    """A format as in a declaration; None if there is none."""
    if format is None:
        return None
    word, _, numbers = str(format).partition("(")
    return s.FormatName(word, tuple(int(n) for n in numbers.removesuffix(")").split(",") if n))


def _collect_size_names(d: s.Declaration) -> set[str]:
    """The size names in a declaration."""
    dims = (d.type.dimensions if d.type is not None else None) or ()
    return {x.size for x in dims if isinstance(x.size, str)}


def _shift_subscript(e: Expr, start: Value) -> Expr:
    if constant_value(start) == 0:
        return e
    return Binary("-", e, polynomial_to_expr(start), polynomial_to_expr(0).dtype)


# --- clauses ---------------------------------------------------------------------------------------------------------


def _drop_implied_ranges(d: s.Def) -> tuple[str, Function]:
    """The text of a def without the ranges that range inference finds anyway, and the checked def."""
    whole = function = _check_gradient(to_text(d))
    sizes = {name: SizePolynomial.name(name) for name in (*function.sizes, *function.scalars)}
    wanted = infer_ranges(function, sizes)
    for n in range(len(function.statements) if len(function.statements) <= MOST else 0):
        for clause in function.statements[n].ranges:
            fewer = tuple(r for r in function.statements[n].ranges if r.index != clause.index)
            attempt = _with_ranges(function, n, fewer)
            if _has_same_ranges(attempt, n, wanted, sizes):
                function = attempt
    if function is whole:
        return to_text(d), whole
    body = tuple(
        replace(x, clauses=_kept_clauses(x, {r.index for r in function.statements[n].ranges}))
        for n, x in enumerate(d.body)
        if isinstance(x, s.Statement)
    )
    text = to_text(replace(d, body=body))
    return text, _check_gradient(text)


def _has_same_ranges(attempt: Function, n: int, wanted: Ranges, sizes: Mapping[str, Value]) -> bool:
    """Whether a def has the wanted ranges although its n-th statement has lost a clause.

    Earlier statements of the same target are checked, too, because they may take ranges from that one.
    """
    target = attempt.statements[n].target
    affected = (k for k in range(n, -1, -1) if attempt.statements[k].target == target)
    try:
        return all(infer_statement(attempt, sizes, wanted, k) == wanted.statements[k] for k in affected)
    except TCError:
        return False


def _with_ranges(function: Function, n: int, ranges: tuple[object, ...]) -> Function:
    statements = list(function.statements)
    statements[n] = replace(statements[n], ranges=ranges)  # type: ignore[arg-type]
    return replace(function, statements=tuple(statements))


def _kept_clauses(x: s.Statement, indices: set[str]) -> tuple[s.Clause, ...]:
    return tuple(c for c in x.clauses if not isinstance(c, s.Range) or c.index in indices)


def _check_gradient(text: str) -> Function:
    try:
        return compile_source(text)[-1]
    except TCError as error:
        if "too large" in error.message or "deep" in error.message:
            raise CheckError(
                "this def cannot be differentiated: its gradient is too large",
                suggestion="give its gradient yourself: tc.define(source, backward={...})",
            ) from error
        raise InternalError(f"the derived gradient is not a valid program: {error}\n{text}") from error
