"""Versions of sparse results that later statements read: operands with their own levels and the content so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..core.dtypes import INT32, INT64
from ..tc_lang.ir import Access, Function, Index, Role, Statement, Symbol
from .call_plan import Version
from .shared_sparsity import accesses_of, representative
from .sparse_problem import SparseProblem, rename_reads


def name_versions(
    problem: SparseProblem, copied: Collection[tuple[str, int]] = ()
) -> tuple[SparseProblem, tuple[Version, ...]]:
    """The problem with reads of sparse results that have their own levels replaced by reads of versions.

    Args:
        copied: pairs of a tensor that shares the pattern of an operand and the index of a statement that must also
            read a version of it.
    """
    problem = _copy_old_values(problem)
    function, shared = problem.function, dict(problem.shared)
    own = {t.name for t in function.tensors if t.is_sparse and t.role is Role.OUTPUT and t.name not in shared}
    made: dict[tuple[str, int], Version] = {}
    statements = []
    for number, s in enumerate(function.statements):
        names: dict[str, str] = {}
        known = own | {t for t, n in copied if n == number and t in shared}
        if s.target in shared and _changes_what_it_reads(s, function, shared):
            known |= {s.target}
        for source in dict.fromkeys(a.tensor for a in accesses_of(s) if a.tensor in known):
            definitions = sum(x.target == source for x in function.statements[:number])
            version = made.setdefault((source, definitions), Version(f"{source}~{definitions}", source, number))
            names[source] = version.name
        statements.append(_with_places_of_target(rename_reads(s, names), function, shared) if names else s)
    versions = tuple(made.values())
    if not versions:
        return problem, ()
    widest = INT64 if any(t == INT64 for _, t in problem.index_types) else INT32
    types = dict(problem.index_types)
    new = replace(
        problem,
        function=replace(function, statements=tuple(statements), tensors=_with_versions(function, versions)),
        index_types=(*problem.index_types, *((v.name, types.get(shared.get(v.source, ""), widest)) for v in versions)),
        aliases=(*problem.aliases, *((v.name, v.source) for v in versions)),
    )
    return new, versions


def _copy_old_values(problem: SparseProblem) -> SparseProblem:
    """Insert copies so that no statement reads elements of its dense target that it may have changed."""
    function = problem.function
    statements: list[Statement] = []
    copies: list[Symbol] = []
    for s in function.statements:
        target = function.tensor(s.target)
        if not target.is_sparse and _reads_changed(s, function):
            copy = Symbol(f"{s.target}~{len(statements)}", target.dtype, target.rank, Role.TEMPORARY)
            names = tuple(f"{s.target}.{d}" for d in range(target.rank))
            at = tuple(Index(n, INT64) for n in names)
            value = Access(s.target, at, target.dtype)
            statements.append(Statement(copy.name, copy.name, at, None, False, value, names, target.rank))
            copies.append(copy)
            s = rename_reads(s, {s.target: copy.name})
        statements.append(s)
    if not copies:
        return problem
    changed = replace(function, statements=tuple(statements), tensors=(*function.tensors, *copies))
    return replace(problem, function=changed)


def _reads_changed(s: Statement, function: Function) -> bool:
    """Whether a statement reads its target other than by reading each element just before storing it."""
    own = [a for a in accesses_of(s) if a.tensor == s.target]
    if not own:
        return False
    is_pointwise = s.reduction is None and all(a.subscripts == s.subscripts for a in own)
    return not is_pointwise or bool(s.exists) or any(function.tensor(a.tensor).is_sparse for a in accesses_of(s))


def _changes_what_it_reads(s: Statement, function: Function, shared: Mapping[str, str]) -> bool:
    """As `_reads_changed`, for a target that shares the pattern of an operand, whose elements may be zeroed first."""
    accesses, stored = accesses_of(s), _target_representative(s, function, shared)
    own = [a for a in accesses if a.tensor == s.target]
    sparse = [a for a in accesses if function.tensor(a.tensor).is_sparse]
    is_whole = not s.ranges and all(
        representative(a, function, shared) == stored and (a.tensor != s.target or a.subscripts == s.subscripts)
        for a in sparse
    )
    return bool(own) and not (s.reduction is None and is_whole)


def _with_places_of_target(s: Statement, function: Function, shared: Mapping[str, str]) -> Statement:
    """The statement with an `exists` of the operand whose pattern its target shares, unless an access implies it."""
    if s.target not in shared:
        return s
    stored = _target_representative(s, function, shared)
    if any(representative(a, function, shared) == stored for a in accesses_of(s)):
        return s
    return replace(s, exists=(*s.exists, stored))


def _target_representative(s: Statement, function: Function, shared: Mapping[str, str]) -> Access:
    """The access of the operand whose pattern the target has."""
    own = Access(s.target, s.subscripts, function.tensor(s.target).dtype)
    return representative(own, function, shared)


def _with_versions(function: Function, versions: tuple[Version, ...]) -> tuple[Symbol, ...]:
    sources = (function.tensor(v.source) for v in versions)
    new = (replace(t, name=v.name, role=Role.INPUT) for v, t in zip(versions, sources, strict=True))
    return (*function.tensors, *new)
