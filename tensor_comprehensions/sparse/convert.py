"""Insert conversions of operands that no loop order can traverse in their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..core.errors import CannotLower
from ..tc_lang.formats import Format, parse_format
from ..tc_lang.ir import Access, Expr, Function, Role, Statement, Symbol, map_operands
from .absent_operands import reads
from .call_plan import Conversion, Version
from .graph import MixedBlocks, Nest, build_nest
from .order import choose_order, is_walkable_in_order, reordered_format
from .shared_sparsity import accesses_of, representative
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
        current = replace(problem, function=function, aliases=_extend_aliases(problem, made))
        blocked = _list_unfit_blocked_accesses(current, number)
        if blocked:
            s, shared = function.statements[number], dict(problem.shared)
            if s.target in shared and _find_stored_target(s, current) in blocked:
                return insert_conversions(_with_own_places(original, s.target, s.indices), copied)
            shares = (a for a in accesses_of(s) if a.tensor in shared)
            if stuck := {(a.tensor, number) for a in shares if _find_stored(a, current) in blocked}:
                return insert_conversions(original, copied | stuck)
            unblocked = {a: _without_blocks(function.tensor(a.tensor)) for a in blocked}
            function = _convert_operands(function, number, unblocked, made)
            current = replace(problem, function=function, aliases=_extend_aliases(problem, made))
        nest = build_nest(current, number)
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
        function = _convert_operands(function, number, wrong, made)
    used = {a.tensor for s in function.statements for a in accesses_of(s)}
    unused = {c.name for c in made.values()} - used  # they are converted further
    made = {key: c for key, c in made.items() if c.name in used}
    function = replace(function, tensors=tuple(t for t in function.tensors if t.name not in unused))
    types = tuple((c.name, problem.index_type(c.source)) for c in made.values())
    converted = replace(
        problem,
        function=function,
        index_types=(*problem.index_types, *types),
        aliases=_extend_aliases(problem, made),
    )
    return converted, tuple(made.values()), versions


def _list_unfit_blocked_accesses(problem: SparseProblem, number: int) -> list[Access]:
    """The blocked operands of a statement, if their blocks do not fit its other operands, its subscripts or ranges.

    Raises:
        CannotLower: they do not fit, and the options rule conversions out.
    """
    try:
        build_nest(problem, number)
    except MixedBlocks as refusal:
        stored = (_find_stored(a, problem) for a in accesses_of(problem.function.statements[number]))
        found = [a for a in stored if (f := problem.function.tensor(a.tensor).format) is not None and f.blocks]
        if not found:
            raise
        names = ", ".join(dict.fromkeys(a.tensor for a in found))
        if not problem.options.convert:
            raise CannotLower(f"{refusal}: {names} would have to be converted, which the options rule out") from None
        return list(dict.fromkeys(found))
    return []


def _find_stored(a: Access, problem: SparseProblem) -> Access:
    """The access of the operand whose pattern the tensor of `a` shares, or `a`."""
    return representative(a, problem.function, dict(problem.shared))


def _find_stored_target(s: Statement, problem: SparseProblem) -> Access:
    """The access of the operand whose pattern the target has."""
    return _find_stored(Access(s.target, s.subscripts, problem.function.tensor(s.target).dtype), problem)


def _without_blocks(symbol: Symbol) -> Format:
    """The format that stores the elements of a blocked tensor one by one, rows or columns first."""
    assert symbol.format is not None
    return parse_format("csr" if str(symbol.format).startswith("bsr") else "csc", (), symbol.rank)


def _convert_operands(
    function: Function, number: int, formats: Mapping[Access, Format], made: dict[tuple[str, Format], Conversion]
) -> Function:
    """The def in which a statement reads operands in other formats. Adds the conversions to `made`."""
    names: dict[Access, str] = {}
    sources = {c.name: c.source for c in made.values()}
    for a, format in formats.items():
        source = sources.get(a.tensor, a.tensor)  # a converted operand is converted from the original instead
        name = f"{source}'{len(made)}"
        names[a] = made.setdefault((source, format), Conversion(name, source, format)).name
    statements = list(function.statements)
    statements[number] = _with_operands(statements[number], names)
    return _with_symbols(replace(function, statements=tuple(statements)), tuple(made.values()))


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
