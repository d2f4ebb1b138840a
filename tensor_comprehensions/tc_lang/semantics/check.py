"""`syntax.Def` -> `Function`: every name resolved, every type decided, every cast explicit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...core.dtypes import INT32, INT64, DType, promote_dtypes
from ...core.errors import CheckError, Span
from ..binding.ranges import symbolic_ranges
from ..formats import Format, parse_format
from ..ir import (
    Access,
    Cast,
    Const,
    ExplicitRange,
    Expr,
    Function,
    Index,
    Role,
    Size,
    SizeConstraint,
    Statement,
    Symbol,
    walk_expr,
)
from ..syntax import tree as s
from ..syntax.foreign_syntax_hints import suggest_name
from ..syntax.parse import parse_program, text_of
from ..transforms.canonical import canonical_text_of_def
from ..unlocated_error import UnlocatedTypeError
from . import type_rules as t
from .expression_checker import CheckContext, ExpressionChecker, TensorInfo
from .inline import InlinedBody, InlinedStatement
from .sparse_rules import check_sparse_accesses
from .type_rules import TypedExpr

REDUCTIONS = {"=": None, "+=": "+", "*=": "*", "min=": "min", "max=": "max"}


def compile_source(source: str | bytes) -> tuple[Function, ...]:
    """The checked defs of a TC program, in program order.

    Raises ParseError, CheckError or RangeError at the position of the first mistake, and no other exception.
    """
    text = text_of(source)
    program = parse_program(text)
    defs: dict[str, s.Def] = {}
    for d in program.defs:
        if d.name in defs:
            raise CheckError(f"two defs are called '{d.name}'", source=text, span=d.name_span)
        defs[d.name] = d
    functions = tuple(_check_def(d, defs, text) for d in program.defs)
    for function in functions:
        symbolic_ranges(function)
    return functions


def _check_def(d: s.Def, defs: Mapping[str, s.Def], source: str) -> Function:
    world = CheckContext(source, defs=tuple(defs))
    body = InlinedBody(world, defs)
    scope = body.collect(d)
    _check_defined(d, body)
    _decide_types(body)
    _check_return_sizes(d, world)
    statements = tuple(_check_statement(n, item, world) for n, item in enumerate(body.items))
    constraints = tuple(_make_size_constraints(body))
    function = Function(
        d.name,
        tuple(_make_symbols(d, world)),
        statements,
        tuple(r.name for r in d.returns),
        tuple(scope.sizes),
        tuple(world.specialized),
        constraints,
        source,
        canonical_text_of_def(d, defs),
    )
    check_sparse_accesses(function)
    return function


def _check_defined(d: s.Def, body: InlinedBody) -> None:
    if not d.returns:
        raise body.world.error("the def returns nothing", d.name_span, expected="at least one return")
    for r in d.returns:
        if r.name not in body.defined:
            raise body.world.error(f"the return '{r.name}' is never defined", r.span)


def _check_return_sizes(d: s.Def, world: CheckContext) -> None:
    """Check that sizes that no parameter has occur only in in/out returns, whose initial values determine them."""
    bound = {dim.size for p in d.parameters if p.type is not None for dim in p.type.dimensions or ()}
    for r in d.returns:
        known = world.tensors[r.name]
        for dim in (r.type.dimensions or ()) if r.type is not None else ():
            if isinstance(dim.size, int) or dim.size in bound:
                continue
            if known.role is not Role.INOUT:
                message = f"'{dim.size}' is not a size of any parameter"
                raise world.error(message, dim.span, expected="a size of a parameter, or a number")


# --- types of tensors ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parts:
    """The checked expressions of a statement."""

    checker: ExpressionChecker
    subscripts: tuple[TypedExpr, ...]
    value: TypedExpr
    indices: tuple[str, ...]
    left: int
    ranges: tuple[ExplicitRange, ...]
    exists: tuple[Access, ...]


def _decide_types(body: InlinedBody) -> None:
    """Infer the type of every tensor from its definitions, and find the scalars that are specialized.

    A pass over all statements may leave types open if a tensor is first defined by a literal. Passes repeat until
    nothing changes; then the first open tensor becomes int32, and so on.
    """
    world = body.world
    while True:
        before = (_list_tensor_types(world), tuple(world.specialized))
        for item in body.items:
            _infer_type(item, world)
        if (_list_tensor_types(world), tuple(world.specialized)) != before:
            continue
        undecided = next((i.target for i in body.items if world.tensors[i.target].dtype is None), None)
        if undecided is None:
            return
        world.tensors[undecided].dtype = INT32


def _list_tensor_types(world: CheckContext) -> tuple[DType | None, ...]:
    return tuple(x.dtype for x in world.tensors.values())


def _infer_type(item: InlinedStatement, world: CheckContext) -> None:
    target = world.tensors[item.target]
    parts = _check_expressions(item, world)
    first = item.target not in item.defined
    if first and (parts.checker.reads_target or item.tree.operator in ("+=", "*=", "min=", "max=")):
        _make_inout(target, item, world)
    if target.dtype is None and not parts.value.weak and not parts.checker.undecided - {item.target}:
        target.dtype = parts.value.type


def _make_inout(target: TensorInfo, item: InlinedStatement, world: CheckContext) -> None:
    if target.role is Role.TEMPORARY:
        how = f"'{item.tree.operator}!'" if item.tree.operator != "=" else "a definition before it"
        raise world.error(
            f"the temporary '{target.name}' has no value before this statement",
            item.tree.target_span,
            expected=how,
            suggestion="initialize it, or return it: a returned tensor can be passed in by the caller",
        )
    target.role = Role.INOUT


def _make_symbols(d: s.Def, world: CheckContext) -> Iterator[Symbol]:
    order = [p.name for p in d.parameters] + [r.name for r in d.returns]
    order += [name for name, x in world.tensors.items() if x.role is Role.TEMPORARY]
    for name in order:
        x = world.tensors[name]
        assert x.dtype is not None
        extents = None if x.dimensions is None else tuple(_make_size_expr(size) for size in x.dimensions)
        yield Symbol(
            name,
            x.dtype,
            max(0, x.rank),
            x.role,
            extents,
            name in world.specialized,
            _parse_tensor_format(x, world),
            x.span,
        )


def _parse_tensor_format(x: TensorInfo, world: CheckContext) -> Format | None:
    """The format that a declaration names, or None."""
    if x.format is None:
        return None
    try:
        return parse_format(x.format.word, x.format.numbers, max(0, x.rank))
    except UnlocatedTypeError as m:
        raise world.error(
            m.message, x.format.span, expected=m.expected, found=m.found, suggestion=m.suggestion
        ) from None


def _make_size_expr(size: str | int) -> Expr:
    return Const(size, INT64) if isinstance(size, int) else Size(size, INT64)


def _make_size_constraints(body: InlinedBody) -> Iterator[SizeConstraint]:
    for r in body.requirements:
        actual = body.world.tensors[r.tensor].dtype
        if actual != r.dtype:
            raise body.world.error(
                f"the called def takes or returns {r.dtype} here", r.span, expected=str(r.dtype), found=str(actual)
            )
        for left, right in r.sizes:
            message = f"the called def needs sizes {left} and {right} to be equal"
            yield SizeConstraint(_make_size_expr(left), _make_size_expr(right), message, r.span)


# --- statements ----------------------------------------------------------------------------------------------------


def _check_expressions(item: InlinedStatement, world: CheckContext) -> _Parts:
    """Check the expressions of a statement, target first, since that determines the order of its indices."""
    tree = item.tree
    ranges = [c for c in tree.clauses if isinstance(c, s.Range)]
    lets = [c for c in tree.clauses if isinstance(c, s.Let)]
    _check_clauses(item, world, [*ranges, *lets])
    checker = ExpressionChecker(
        world,
        item.scope,
        item.defined,
        item.target,
        frozenset(c.index for c in ranges),
        {c.name: c.value for c in lets},
    )
    subscripts = tuple(
        checker.subscript(e, f"subscript {d} of '{tree.target}'") for d, e in enumerate(tree.subscripts or ())
    )
    _check_target(item, world, subscripts)
    left = len(checker.indices)
    checker.reads_target = any(x.tensor == item.target for x in _collect_accesses(subscripts))
    value = checker.value(tree.value)
    exists = tuple(_check_exists_clause(c, checker, world) for c in tree.clauses if isinstance(c, s.Exists))
    used = dict(checker.indices)
    given = tuple(_check_range(c, item, world, checker.lets) for c in ranges)
    _check_indices(item, world, used, left, checker)
    return _Parts(checker, subscripts, value, tuple(used), left, given, exists)


def _collect_accesses(xs: Iterable[TypedExpr]) -> Iterator[Access]:
    for x in xs:
        yield from (e for e in walk_expr(x.expr) if isinstance(e, Access))


def _check_clauses(item: InlinedStatement, world: CheckContext, named: Sequence[s.Range | s.Let]) -> None:
    """Reject names of ranges and lets that already mean something else."""
    seen: set[str] = set()
    for c in named:
        name = c.index if isinstance(c, s.Range) else c.name
        where = Span(c.span.start, c.span.start + len(name))
        if name in seen:
            raise world.error(f"'{name}' has two `where` clauses", where)
        seen.add(name)
        if name in item.scope.sizes:
            raise world.error(f"'{name}' is already a size", where, suggestion="use another name")
        actual = item.scope.tensors.get(name)
        if actual is not None and (actual in item.defined or world.tensors[actual].role is not Role.TEMPORARY):
            raise world.error(f"'{name}' is already a tensor", where, suggestion="use another name")


def _check_target(item: InlinedStatement, world: CheckContext, subscripts: Sequence[TypedExpr]) -> None:
    """Check that `=` writes every element once: no repeated index, no data-dependent subscript."""
    if item.tree.operator != "=":
        return
    plain = [x.expr.name for x in subscripts if isinstance(x.expr, Index)]
    for name in plain:
        if plain.count(name) > 1:
            raise world.error(
                f"the index '{name}' appears twice on the left",
                item.tree.target_span,
                expected="distinct index variables",
                suggestion="assign the diagonal with a condition: `i == j ? ... : ...`",
            )
    if any(_collect_accesses(subscripts)):
        raise world.error(
            "a subscript on the left that depends on data needs a reduction operator",
            item.tree.target_span,
            expected="+=, *=, min= or max=",
            found="=",
        )


def _check_range(
    c: s.Range, item: InlinedStatement, world: CheckContext, lets: Mapping[str, s.Expression]
) -> ExplicitRange:
    checker = ExpressionChecker(world, item.scope, item.defined, "", lets=lets)
    bounds = []
    for e in (c.lower, c.upper):
        bound = checker.subscript(e, f"a bound of '{c.index}'")
        if checker.indices or any(_collect_accesses([bound])):
            raise world.error(
                f"a bound of '{c.index}' may only use sizes and int scalar parameters",
                e.span,
                suggestion="take the whole range and guard the value with `condition ? ... : ...`",
            )
        bounds.append(bound.expr)
    return ExplicitRange(c.index, bounds[0], bounds[1], c.span)


def _check_exists_clause(c: s.Exists, checker: ExpressionChecker, world: CheckContext) -> Access:
    x = checker.value(c.access).expr
    access = x.operand if isinstance(x, Cast) else x
    if not isinstance(access, Access):
        raise world.error("'exists' takes a tensor access", c.span, expected="exists T(...)")
    return access


def _check_indices(
    item: InlinedStatement, world: CheckContext, used: Mapping[str, Span], left: int, checker: ExpressionChecker
) -> None:
    """Check that every index is on the left or reduced, and that every range is for an index that is used."""
    reduced = list(used)[left:]
    if reduced and item.tree.operator == "=":
        name = reduced[0]
        raise world.error(
            f"the index '{name}' is on the right but not on the left, and '=' does not reduce",
            used[name],
            expected="a reduction operator: +=!, *=!, min=!, max=!",
            found="=",
            suggestion=suggest_name(name),
        )
    for c in item.tree.clauses:
        if isinstance(c, s.Range) and c.index not in checker.indices:
            span = Span(c.span.start, c.span.start + len(c.index))
            raise world.error(f"the index '{c.index}' is given a range but not used", span)


def _check_statement(n: int, item: InlinedStatement, world: CheckContext) -> Statement:
    """The final form of a statement, every type known."""
    tree = item.tree
    parts = _check_expressions(item, world)
    target = world.tensors[item.target]
    operator = tree.operator.rstrip("!")
    reduction = REDUCTIONS[operator]
    try:
        value = _stored_value(parts.value, target, reduction)
    except UnlocatedTypeError as m:
        raise world.error(
            m.message, tree.value.span, expected=m.expected, found=m.found, suggestion=m.suggestion
        ) from None
    return Statement(
        f"S{n}",
        item.target,
        tuple(x.expr for x in parts.subscripts),
        reduction,
        tree.operator.endswith("!"),
        value,
        parts.indices,
        parts.left,
        parts.ranges,
        parts.exists,
        tree.span,
    )


def _stored_value(x: TypedExpr, target: TensorInfo, reduction: str | None) -> Expr:
    """The value in the type of the target for `=`, or in its accumulator type for a reduction."""
    to = target.dtype
    assert to is not None
    if not x.weak and promote_dtypes(to, x.type) != to:
        raise UnlocatedTypeError(
            f"'{target.name}' is {to}, and this value is {x.type}",
            expected=str(to),
            found=str(x.type),
            suggestion=f"cast it: {to}(...)",
        )
    if not x.weak and x.type != to and not target.typed:
        raise UnlocatedTypeError(
            f"'{target.name}' is {to} by another definition, and this value is {x.type}",
            expected=str(to),
            found=str(x.type),
            suggestion=f"cast it: {to}(...)",
        )
    if reduction is None:
        return t.rounded_to(x, to)
    if to.is_bool and reduction in ("+", "*"):
        raise UnlocatedTypeError(
            f"'{reduction}=' does not take bool", expected="numbers", found="bool", suggestion="int32(...)"
        )
    return t.convert(x, to).expr
