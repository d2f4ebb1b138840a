"""Collect the statements of a def in order, with calls of other defs inlined, and the tensors that they declare.

Inlining does not rewrite syntax: a call contributes the statements of the called def with a separate `NameScope`. A
call with a result that is also an argument uses fresh temporaries, so that nothing is overwritten too early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.dtypes import ALIASES, DTYPES, DType
from ...core.errors import CheckError, Span
from ..builtins import is_builtin
from ..ir import Role
from ..syntax import tree as s
from .expression_checker import CheckContext, NameScope, TensorInfo, extent_name

MAX_STATEMENTS = 2000


@dataclass(frozen=True, slots=True)
class InlinedStatement:
    """A statement to check: its syntax tree, the scope of its names, its target, and the tensors defined before it."""

    tree: s.Statement
    scope: NameScope
    target: str
    defined: frozenset[str]


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a call requires of a tensor that it passes: a type, and pairs of sizes (names or numbers) that are equal."""

    tensor: str
    dtype: DType
    sizes: tuple[tuple[str | int, str | int], ...]
    span: Span


@dataclass(slots=True)
class InlinedBody:
    """The statements of a def with calls inlined; `collect` fills it."""

    world: CheckContext
    program: Mapping[str, s.Def]
    items: list[InlinedStatement] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)
    defined: dict[str, None] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    outer: NameScope = field(default_factory=NameScope)

    def collect(self, d: s.Def) -> NameScope:
        """Declare the tensors of the outermost def and collect all statements."""
        scope = self.outer
        for p in d.parameters:
            self._declare_parameter(p, scope)
        for r in d.returns:
            self._declare_return(r, scope, d)
        self._check_names(scope, d)
        self.taken = {*scope.sizes, *scope.tensors, *_collect_target_names(d)}
        self._statements(d, scope, (d.name,))
        return scope

    # --- declarations ----------------------------------------------------------------------------------------------

    def _declare_parameter(self, p: s.Declaration, scope: NameScope) -> None:
        if p.type is None:
            raise self.world.error(
                f"the parameter '{p.name}' has no type", p.span, expected=f"float(N) {p.name}, int32 {p.name}, ..."
            )
        if p.name in scope.tensors:
            raise self.world.error(f"two parameters are called '{p.name}'", p.span)
        dims = tuple(d.size for d in p.type.dimensions or ())
        for size in dims:
            if isinstance(size, str):
                scope.sizes.setdefault(size, size)
        self._declare(TensorInfo(p.name, len(dims), Role.INPUT, p.type.dtype, dims, p.span, format=p.format), scope)

    def _declare_return(self, r: s.Declaration, scope: NameScope, d: s.Def) -> None:
        if r.name in scope.tensors:
            inputs = {p.name for p in d.parameters}
            what = "is also a parameter" if r.name in inputs else "is returned twice"
            raise self.world.error(f"'{r.name}' {what}", r.span)
        dims = None
        dtype = None
        if r.type is not None:
            dtype = r.type.dtype
            dims = None if r.type.dimensions is None else tuple(x.size for x in r.type.dimensions)
        for size in dims or ():
            if isinstance(size, str):
                scope.sizes.setdefault(size, size)
        rank = -1 if dims is None else len(dims)
        self._declare(TensorInfo(r.name, rank, Role.OUTPUT, dtype, dims, r.span, dtype is not None, r.format), scope)

    def _declare(self, tensor: TensorInfo, scope: NameScope) -> None:
        scope.tensors[tensor.name] = tensor.name
        self.world.tensors[tensor.name] = tensor

    def _check_names(self, scope: NameScope, d: s.Def) -> None:
        """Check that names of tensors are not those of sizes, except where they cannot be confused, or of types.

        The paper's `sconv2d` has a tensor and a size of the same name. With a type, `half(i)` would be ambiguous.
        """
        for x in (*d.parameters, *d.returns):
            self._check_no_type(x.name, x.span)
            dims = [dim.size for dim in x.type.dimensions or ()] if x.type is not None else []
            distinct = x in d.parameters and dims and x.name not in dims
            if x.name in scope.sizes and not distinct:
                raise self.world.error(
                    f"'{x.name}' is both a tensor and a size", x.span, suggestion="rename one of them"
                )

    def _check_no_type(self, name: str, span: Span) -> None:
        if name in DTYPES or name in ALIASES:
            raise self.world.error(f"'{name}' is the name of a type", span, suggestion="call the tensor otherwise")

    # --- statements ------------------------------------------------------------------------------------------------

    def _statements(self, d: s.Def, scope: NameScope, stack: tuple[str, ...]) -> None:
        for tree in d.body:
            call = self._as_call(tree, scope)
            if call is not None:
                self._inline(call, scope, stack)
            elif isinstance(tree, s.Statement):
                self._statement(tree, scope)

    def _as_call(self, tree: s.Statement | s.TupleCall, scope: NameScope) -> s.TupleCall | None:
        """`tree` as a call, or None if it is none. If `f` is a def, `c = f(x)` is short for `(c) = f(x)`."""
        if isinstance(tree, s.TupleCall):
            return tree
        e = tree.value
        if not isinstance(e, s.Apply) or e.name not in self.program or e.name in scope.tensors:
            return None
        if tree.subscripts is not None or tree.operator != "=" or tree.clauses:
            return None
        return s.TupleCall((s.Name(tree.target, tree.target_span),), e.name, e.arguments, e.span, tree.span)

    def _statement(self, tree: s.Statement, scope: NameScope) -> None:
        if len(self.items) >= MAX_STATEMENTS:
            raise self.world.error(f"more than {MAX_STATEMENTS} statements once calls are inlined", tree.span)
        rank = len(tree.subscripts or ())
        target = self._define(tree.target, rank, tree.target_span, scope)
        self.items.append(InlinedStatement(tree, scope, target, frozenset(self.defined)))
        self.defined.setdefault(target)

    def _define(self, name: str, rank: int, span: Span, scope: NameScope) -> str:
        """The tensor that a definition of `name` writes, declared as a temporary if it is new."""
        actual = scope.tensors.get(name)
        if actual is None:
            if name in scope.sizes:
                raise self.world.error(f"'{name}' is a size and cannot be written", span)
            self._check_no_type(name, span)
            if is_builtin(name):
                raise self.world.error(
                    f"'{name}' is a builtin; only a parameter or a return may take its name",
                    span,
                    suggestion=f"call the temporary '{name}_'",
                )
            taken = name in self.world.tensors or (name in self.taken and scope is not self.outer)
            actual = scope.tensors[name] = self._fresh_name(name) if taken else name
            self.world.tensors[actual] = TensorInfo(actual, rank, Role.TEMPORARY, None, None, span)
            return actual
        tensor = self.world.tensors[actual]
        if tensor.role is Role.INPUT or (name in scope.values):
            raise self.world.error(
                f"'{name}' is an input and cannot be written", span, suggestion="write to a tensor of another name"
            )
        if tensor.rank < 0:
            tensor.rank = rank
        if tensor.rank != rank:
            raise self._rank_error(name, tensor, rank, span)
        return actual

    def _rank_error(self, name: str, tensor: TensorInfo, rank: int, span: Span) -> CheckError:
        declared = tensor.dimensions is not None
        return self.world.error(
            f"'{name}' {'is declared' if declared else 'has an earlier definition'} with another rank",
            span,
            expected=f"{tensor.rank} subscript{'s' * (tensor.rank != 1)}",
            found=str(rank),
        )

    def _fresh_name(self, name: str) -> str:
        n = 1
        while f"{name}_{n}" in self.taken or f"{name}_{n}" in self.world.tensors:
            n += 1
        self.taken.add(f"{name}_{n}")
        return f"{name}_{n}"

    # --- calls -----------------------------------------------------------------------------------------------------

    def _inline(self, call: s.TupleCall, scope: NameScope, stack: tuple[str, ...]) -> None:
        callee = self.program[call.callee]
        if call.callee in stack:
            chain = " -> ".join((*stack, call.callee))
            raise self.world.error("a def calls itself", call.callee_span, found=chain)
        self._check_arity(call, callee)
        inner = NameScope()
        for p, e in zip(callee.parameters, call.arguments, strict=True):
            self._bind_argument(p, e, scope, inner)
        aliased = any(t.name in _collect_names(call.arguments) for t in call.targets)
        for target, r in zip(call.targets, callee.returns, strict=True):
            result = self._new_temporary(r.name, target.span) if aliased else self._result(target, scope)
            inner.tensors[r.name] = result
            if r.type is not None and self.world.tensors[result].dtype is None:
                self.world.tensors[result].dtype = r.type.dtype
                self.world.tensors[result].typed = True
        self._statements(callee, inner, (*stack, call.callee))
        for target, r in zip(call.targets, callee.returns, strict=True):
            self._finish(call, target, r, scope, inner)

    def _check_arity(self, call: s.TupleCall, callee: s.Def) -> None:
        for what, wanted, found in (
            ("takes {} argument(s)", len(callee.parameters), len(call.arguments)),
            ("returns {} tensor(s)", len(callee.returns), len(call.targets)),
        ):
            if wanted != found:
                raise self.world.error(
                    f"'{call.callee}' {what.format(wanted)}", call.callee_span, expected=str(wanted), found=str(found)
                )
        names = [t.name for t in call.targets]
        for target in call.targets:
            if names.count(target.name) > 1:
                raise self.world.error(f"one call writes '{target.name}' twice", target.span)

    def _bind_argument(self, p: s.Declaration, e: s.Expression, scope: NameScope, inner: NameScope) -> None:
        """Bind parameter `p` of an inlined def to the expression that the call passes."""
        if p.type is None:
            raise self.world.error(f"the parameter '{p.name}' has no type", p.span)
        dims = tuple(d.size for d in p.type.dimensions or ())
        actual = scope.tensors.get(e.name) if isinstance(e, s.Name) else None
        if actual is None:
            if dims:
                message = f"the called def takes a tensor as '{p.name}', so a call passes the bare name of one"
                raise self.world.error(message, e.span, expected="a tensor's name")
            inner.values[p.name] = (s.Cast(p.type.dtype, e, e.span), scope)
            return
        tensor = self.world.tensors[actual]
        if tensor.role is not Role.INPUT and actual not in self.defined:
            raise self.world.error(f"'{tensor.name}' is read before it is defined", e.span)
        if tensor.rank != len(dims):
            raise self.world.error(
                f"the called def takes a tensor of {len(dims)} dimension(s) as '{p.name}'",
                e.span,
                expected=str(len(dims)),
                found=str(tensor.rank),
            )
        inner.tensors[p.name] = actual
        self._adopt_format(tensor, p, e.span)
        self._require(tensor, p.type, inner, e.span)

    def _adopt_format(self, tensor: TensorInfo, p: s.Declaration, span: Span) -> None:
        """Give the caller's tensor the format that the called def requires. Raises CheckError if it has another."""
        if p.format is None:
            return
        if tensor.role is Role.TEMPORARY:
            message = f"the called def takes '{p.name}' as {p.format.word}, and a temporary has no format"
            raise self.world.error(message, span, suggestion="pass a parameter or a return")
        if tensor.format is None:
            tensor.format = p.format
        elif (tensor.format.word, tensor.format.numbers) != (p.format.word, p.format.numbers):
            raise self.world.error(
                f"the called def takes '{p.name}' in another format",
                span, expected=p.format.word, found=tensor.format.word,
            )  # fmt: skip

    def _require(self, tensor: TensorInfo, type: s.Type, inner: NameScope, span: Span) -> None:
        """Record that a tensor of the caller must match its declaration in the called def, and bind the def's sizes."""
        equal: list[tuple[str | int, str | int]] = []
        for d, dim in enumerate(type.dimensions or ()):
            actual = extent_name(tensor, d)
            wanted = inner.sizes.setdefault(dim.size, actual) if isinstance(dim.size, str) else dim.size
            if wanted != actual:
                equal.append((actual, wanted))
        self.requirements.append(Requirement(tensor.name, type.dtype, tuple(equal), span))

    def _result(self, target: s.Name, scope: NameScope) -> str:
        """The tensor of the caller that receives a result of a call."""
        if target.name not in scope.tensors:
            return self._define(target.name, -1, target.span, scope)
        actual = scope.tensors[target.name]
        if self.world.tensors[actual].role is Role.INPUT:
            raise self.world.error(f"'{target.name}' is an input and cannot be written", target.span)
        return actual

    def _new_temporary(self, name: str, span: Span) -> str:
        actual = self._fresh_name(name)
        self.world.tensors[actual] = TensorInfo(actual, -1, Role.TEMPORARY, None, None, span)
        return actual

    def _finish(self, call: s.TupleCall, target: s.Name, r: s.Declaration, scope: NameScope, inner: NameScope) -> None:
        """Check a result against its declaration in the called def, and copy it to its target if necessary."""
        tensor = self.world.tensors[inner.tensors[r.name]]
        if tensor.name not in self.defined:
            raise self.world.error(f"the called def never defines '{r.name}'", r.span)
        if r.type is not None:
            self._require(tensor, r.type, inner, call.callee_span)
        if scope.tensors.get(target.name) == tensor.name:
            return
        indices = tuple(s.Name(f"i{d}", call.span) for d in range(tensor.rank))
        value = s.Apply("result", indices, call.span) if indices else s.Name("result", call.span)
        destination = self._result(target, scope)
        tree = s.Statement("target", indices, "=", value, (), target.span, call.span)
        self._statement(tree, NameScope({"target": destination, "result": tensor.name}))


def _collect_target_names(d: s.Def) -> set[str]:
    """The names that the statements of a def write."""
    names: set[str] = set()
    for statement in d.body:
        names |= {statement.target} if isinstance(statement, s.Statement) else {t.name for t in statement.targets}
    return names


def _collect_names(expressions: Sequence[s.Expression]) -> set[str]:
    """The names that occur in expressions."""
    found: set[str] = set()
    for e in expressions:
        match e:
            case s.Name(name=name) | s.Apply(name=name) | s.Extent(tensor=name):
                found.add(name)
        found |= _collect_names(s.child_expressions(e))
    return found
