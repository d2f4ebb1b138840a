"""Insert conversions of operands that no loop order can traverse in their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..core.errors import CannotLower
from ..tc_lang.formats import Format
from ..tc_lang.ir import Access, Expr, Function, Role, Statement, Symbol, map_operands
from .absent_operands import reads
from .call_plan import Conversion, Version
from .graph import Nest, build_nest
from .order import choose_order, is_walkable_in_order, reordered_format
from .sparse_problem import SparseProblem
from .versions import name_versions


def insert_conversions(
    original: SparseProblem, copied: frozenset[tuple[str, int]] = frozenset()
) -> tuple[SparseProblem, tuple[Conversion, ...], tuple[Version, ...]]:
    """The problem with converted operands and with versions of results that later statements read, and lists of both.

    Args:
        copied: see `name_versions`.

    Raises:
        CannotLower: an operand that may not be converted needs a conversion.
    """
    problem, versions = name_versions(original, copied)
    made: dict[tuple[str, Format], Conversion] = {}
    function = problem.function
    for number in range(len(function.statements)):
        nest = build_nest(replace(problem, function=function, aliases=_extend_aliases(problem, made)), number)
        target = function.tensor(nest.statement.target)
        owns = target.is_sparse and target.name not in dict(problem.shared)
        late = problem.for_gpu and not owns
        order = choose_order(nest, target.format if owns else None, problem.options, free_first=late)
        if _combines_out_of_order(nest, order):
            return insert_conversions(_with_own_places(original, target.name, order), copied)
        wrong = {
            a: _reorder_levels(a, nest, order, late)
            for a, p in nest.paths.items()
            if not is_walkable_in_order(p, order, late)
        }
        if not wrong:
            continue
        if any(_is_target_pattern(a, nest) for a in wrong):
            return insert_conversions(_with_own_places(original, target.name, order), copied)
        stuck = {(a.tensor, number) for a in _reads_of(nest, wrong) if a.tensor in dict(problem.shared)}
        if stuck:
            return insert_conversions(original, copied | stuck)
        names: dict[Access, str] = {}
        for a, format in wrong.items():
            name = f"{a.tensor}'{len(made)}"
            names[a] = made.setdefault((a.tensor, format), Conversion(name, a.tensor, format)).name
        statements = list(function.statements)
        statements[number] = _with_operands(statements[number], names)
        function = replace(function, statements=tuple(statements))
        function = _with_symbols(function, tuple(made.values()))
    types = tuple((c.name, problem.index_type(c.source)) for c in made.values())
    converted = replace(
        problem,
        function=function,
        index_types=(*problem.index_types, *types),
        aliases=_extend_aliases(problem, made),
    )
    return converted, tuple(made.values()), versions


def _extend_aliases(
    problem: SparseProblem, made: Mapping[tuple[str, Format], Conversion]
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    """The aliases of the problem, and conversions of aliases."""
    originals = dict(problem.aliases)
    return (*problem.aliases, *((c.name, originals[c.source]) for c in made.values() if c.source in originals))


def _combines_out_of_order(nest: Nest, order: tuple[str, ...]) -> bool:
    """Whether elements of a target with a shared pattern are updated repeatedly, in another order than they are stored.

    Sums are allowed, because they start from the zeros in memory; other reductions need their own identity.
    """
    free = [n for n, name in enumerate(order) if nest.loops[name].is_free]
    shares = nest.statement.target in dict(nest.shared)
    return shares and nest.statement.reduction not in (None, "+") and free != list(range(len(free)))


def _reads_of(nest: Nest, wrong: Mapping[Access, Format]) -> list[Access]:
    """The accesses of the statement that use the paths in `wrong`."""
    accesses = (*nest.term.exists, *reads(nest.term.value))
    return [a for a in accesses if nest.term.pattern_access(a) in wrong]


def _is_target_pattern(a: Access, nest: Nest) -> bool:
    """Whether the target of the statement has the sparsity pattern of `a`."""
    return a == nest.own


def _with_own_places(problem: SparseProblem, target: str, order: tuple[str, ...]) -> SparseProblem:
    """The problem with `target` no longer sharing a pattern: a result gets its own levels, a temporary becomes dense.

    Raises CannotLower if a temporary would then be read where it is not 0 but must be.
    """
    function = problem.function
    _check_elements_read(function, target, dict(problem.shared)[target], order)
    tensors = (
        replace(t, format=None) if t.name == target and t.role is Role.TEMPORARY else t for t in function.tensors
    )
    shared = tuple(x for x in problem.shared if x[0] != target)
    return replace(problem, function=replace(function, tensors=tuple(tensors)), shared=shared)


def _check_elements_read(function: Function, target: str, source: str, order: tuple[str, ...]) -> None:
    """Reject a dense temporary that is read at elements `source` does not store, where it would not be zero."""
    begun = {s.reduction for s in function.statements if s.target == target and s.initialize} - {"+"}
    if not begun or function.tensor(target).role is not Role.TEMPORARY:
        return
    for s in function.statements:
        stored = {e.subscripts for e in s.exists if e.tensor in (source, target)}
        if any(a.tensor == target and a.subscripts not in stored for a in reads(s.value)):
            raise CannotLower(
                f"'{target}' cannot be made in the order {', '.join(order)}, in which '{source}' is not stored, since "
                f"it is read where '{source}' has no element: choose another order, or read it "
                f"`where exists {source}(...)`"
            )


def _reorder_levels(a: Access, nest: Nest, order: tuple[str, ...], enters_late: bool) -> Format:
    """The format of an operand with its levels in the order of the loops and the same stored elements."""
    found = reordered_format(nest.paths[a], order, enters_late)
    if found is None:
        raise CannotLower(f"'{a.tensor}' would have to be stored in another order")
    return found


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
