"""Operands that no order of loops can walk as they are stored, and the formats in which it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..core.errors import CannotLower
from ..tc_lang.formats import LEVELS, Format
from ..tc_lang.ir import Access, Expr, Function, Index, Role, Statement, Symbol, map_operands
from .graph import Nest, build_nest
from .order import choose_order, is_convertible, walks
from .share import representative
from .sparse_problem import SparseProblem


@dataclass(frozen=True, slots=True)
class Conversion:
    """An operand that the caller converts before the kernels run."""

    name: str
    source: str
    format: Format


def insert_conversions(problem: SparseProblem) -> tuple[SparseProblem, tuple[Conversion, ...]]:
    """The problem with operands of other formats in place of those that cannot be walked.

    Raises:
        CannotLower: an operand would have to be converted that has no other order.
    """
    made: dict[tuple[str, Format], Conversion] = {}
    function = problem.function
    for number in range(len(function.statements)):
        nest = build_nest(replace(problem, function=function), number)
        target = function.tensor(nest.statement.target)
        owns = target.is_sparse and target.name not in dict(problem.shared)
        order = choose_order(nest, target.format if owns else None, problem.options)
        wrong = {a: _reordered(a, nest, order) for a, p in nest.paths.items() if not walks(p, order)}
        if not wrong:
            continue
        if any(_gives_places(a, nest) for a in wrong):
            return insert_conversions(_with_own_places(problem, target.name))
        names: dict[Access, str] = {}
        for a, format in wrong.items():
            name = f"{a.tensor}'{len(made)}"
            names[a] = made.setdefault((a.tensor, format), Conversion(name, a.tensor, format)).name
        statements = list(function.statements)
        statements[number] = _with_operands(statements[number], names)
        function = replace(function, statements=tuple(statements))
        function = _with_symbols(function, tuple(made.values()))
    types = [*problem.index_types]
    types += [(c.name, problem.index_type(c.source)) for c in made.values()]
    return replace(problem, function=function, index_types=tuple(types)), tuple(made.values())


def _gives_places(a: Access, nest: Nest) -> bool:
    """Whether the target of a statement has its values beside the places of an operand."""
    s, shared = nest.statement, dict(nest.shared)
    return s.target in shared and (representative(a, shared).tensor, a.subscripts) == (shared[s.target], s.subscripts)


def _with_own_places(problem: SparseProblem, target: str) -> SparseProblem:
    """The problem with a result that has levels of its own, or a dense temporary."""
    function = problem.function
    tensors = (
        replace(t, format=None) if t.name == target and t.role is Role.TEMPORARY else t for t in function.tensors
    )
    shared = tuple(x for x in problem.shared if x[0] != target)
    return replace(problem, function=replace(function, tensors=tuple(tensors)), shared=shared)


def _reordered(a: Access, nest: Nest, order: tuple[str, ...]) -> Format:
    """The format of an operand with its levels in the order of the loops. It stores the same elements.

    Levels of the dense tail stay with their dimensions: one that came last would store all coordinates of another one.
    """
    path = nest.paths[a]
    if not is_convertible(path):
        raise CannotLower(f"'{a.tensor}' would have to be stored in another order")
    if a.tensor in dict(nest.shared):
        raise CannotLower(f"the temporary '{a.tensor}' is read in another order than it is stored")
    format = path.format
    dims = sorted(range(format.rank), key=lambda d: order.index(_index(a.subscripts[d])))
    tail = format.order[format.depth :]
    upper = iter(format.levels[: format.depth])
    return Format(tuple(LEVELS["d"] if d in tail else next(upper) for d in dims), tuple(dims))


def _index(e: Expr) -> str:
    assert isinstance(e, Index)
    return e.name


def _with_operands(s: Statement, names: Mapping[Access, str]) -> Statement:
    def visit(e: Expr) -> Expr:
        if isinstance(e, Access) and e in names:
            return replace(e, tensor=names[e])
        return map_operands(e, visit)

    exists = tuple(replace(a, tensor=names[a]) if a in names else a for a in s.exists)
    return replace(s, value=visit(s.value), exists=exists)


def _with_symbols(function: Function, conversions: tuple[Conversion, ...]) -> Function:
    known = {t.name for t in function.tensors}
    new = [
        Symbol(c.name, source.dtype, source.rank, Role.INPUT, source.extents, format=c.format)
        for c in conversions
        if c.name not in known
        for source in (function.tensor(c.source),)
    ]
    return replace(function, tensors=(*function.tensors, *new))
