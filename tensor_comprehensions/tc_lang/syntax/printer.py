"""Print syntax trees as text that parses back to equal trees."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import BoundFunction
from . import tree as s

_LEVELS = (("||",), ("&&",), ("<", "<=", ">", ">=", "==", "!="), ("+", "-"), ("*", "/", "%"))
_PRECEDENCE = {op: level for level, ops in enumerate(_LEVELS, start=1) for op in ops}
_UNARY = len(_LEVELS) + 1


def to_text(tree: s.Program | s.Def | s.Statement | s.TupleCall | s.Expression) -> str:
    """The text of a tree: a def with one statement per line, an expression with the parentheses it needs."""
    match tree:
        case s.Program(defs=defs):
            return "\n\n".join(to_text(d) for d in defs)
        case s.Def():
            return "\n".join(_def_lines(tree))
        case s.Statement():
            return _print_statement(tree)
        case s.TupleCall(targets=targets, callee=callee, arguments=arguments):
            return f"({', '.join(t.name for t in targets)}) = {callee}({_print_expression_list(arguments)})"
    return _print_expression(tree, 0)


def _def_lines(d: s.Def) -> Iterator[str]:
    parameters = ", ".join(_print_declaration(p) for p in d.parameters)
    returns = ", ".join(_print_declaration(r) for r in d.returns)
    yield f"def {d.name}({parameters}) -> ({returns}) {{"
    yield from (f"    {to_text(statement)}" for statement in d.body)
    yield "}"


def _print_declaration(d: s.Declaration) -> str:
    stored = "" if d.format is None else f": {d.format.word}"
    if d.format is not None and d.format.numbers:
        stored += f"({','.join(map(str, d.format.numbers))})"
    if d.type is None:
        return d.name + stored
    dims = d.type.dimensions
    extents = "" if dims is None else f"({', '.join(str(x.size) for x in dims)})"
    return f"{d.type.dtype}{extents} {d.name}{stored}"


def _print_statement(x: s.Statement) -> str:
    target = x.target if x.subscripts is None else f"{x.target}({_print_expression_list(x.subscripts)})"
    where = f" where {', '.join(_print_clause(c) for c in x.clauses)}" if x.clauses else ""
    return f"{target} {x.operator} {_print_expression(x.value, 0)}{where}"


def _print_clause(c: s.Clause) -> str:
    match c:
        case s.Range(index=index, lower=lower, upper=upper):
            return f"{index} in {_print_expression(lower, 1)}:{_print_expression(upper, 0)}"
        case s.Let(name=name, value=value):
            return f"{name} = {_print_expression(value, 0)}"
        case s.Exists(access=access):
            return f"exists {_print_expression(access, 0)}"


def _print_expression_list(xs: tuple[s.Expression, ...]) -> str:
    return ", ".join(_print_expression(x, 0) for x in xs)


def _print_expression(e: s.Expression, least: int) -> str:
    """The text of `e`, in parentheses if it binds less tightly than level `least`."""
    match e:
        case s.Number(value=value):
            return "1e999" if value == float("inf") else str(value)
        case s.Name(name=name):
            return name
        case s.Apply(name=name, arguments=arguments):
            return f"{name}({_print_expression_list(arguments)})"
        case s.Extent(tensor=tensor, dimension=dimension):
            return f"{tensor}.{dimension}"
        case s.Cast(dtype=dtype, operand=operand):
            return f"{dtype}({_print_expression(operand, 0)})"
        case s.Unary(op=op, operand=operand):
            return _parenthesize(f"{op}{_print_expression(operand, _UNARY)}", _UNARY, least)
        case s.Binary(op=op, left=left, right=right):
            level = _PRECEDENCE[op]
            return _parenthesize(
                f"{_print_expression(left, level)} {op} {_print_expression(right, level + 1)}", level, least
            )
        case s.Conditional(condition=condition, then=then, otherwise=otherwise):
            text = (
                f"{_print_expression(condition, 1)} ? {_print_expression(then, 0)} : {_print_expression(otherwise, 0)}"
            )
            return _parenthesize(text, 0, least)


def _parenthesize(text: str, level: int, least: int) -> str:
    return text if level >= least else f"({text})"


def format_ranges(bound: BoundFunction) -> str:
    """A text with the shape of each tensor and, for each statement, the ranges of its indices."""
    lines = [f"{t.role.value:<10} {t.dtype}({','.join(map(str, t.shape))}) {t.name}" for t in bound.tensors]
    for x in bound.statements:
        loops = ", ".join(f"{i.name} in {i.lower}:{i.upper}" for i in x.indices)
        reduced = (
            f", reduces {', '.join(i.name for i in x.reduction_indices)} by {x.reduction}"
            if x.reduction_indices
            else ""
        )
        lines.append(f"{x.name:<10} writes {x.target}{f' for {loops}' if loops else ''}{reduced}")
    return "\n".join(lines)
