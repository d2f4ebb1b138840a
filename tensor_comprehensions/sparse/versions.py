"""Sparse results that later statements read: their present content is an operand of these, with levels of its own."""

from __future__ import annotations

from dataclasses import replace

from ..core.dtypes import INT32, INT64
from ..tc_lang.ir import Access, Function, Index, Role, Statement, Symbol, walk_expr
from .call_plan import Version
from .sparse_problem import SparseProblem, rename_reads


def name_versions(problem: SparseProblem) -> tuple[SparseProblem, tuple[Version, ...]]:
    """The problem in which statements read versions of sparse results that have levels of their own."""
    problem = _copy_old_values(problem)
    function, shared = problem.function, dict(problem.shared)
    own = {t.name for t in function.tensors if t.is_sparse and t.role is Role.OUTPUT and t.name not in shared}
    made: dict[tuple[str, int], Version] = {}
    statements = []
    for number, s in enumerate(function.statements):
        names: dict[str, str] = {}
        for source in dict.fromkeys(a.tensor for a in _collect_reads(s) if a.tensor in own):
            definitions = sum(x.target == source for x in function.statements[:number])
            version = made.setdefault((source, definitions), Version(f"{source}~{definitions}", source, number))
            names[source] = version.name
        statements.append(rename_reads(s, names) if names else s)
    versions = tuple(made.values())
    if not versions:
        return problem, ()
    index = INT64 if any(t == INT64 for _, t in problem.index_types) else INT32
    new = replace(
        problem,
        function=replace(function, statements=tuple(statements), tensors=_with_versions(function, versions)),
        index_types=(*problem.index_types, *((v.name, index) for v in versions)),
        aliases=(*problem.aliases, *((v.name, v.source) for v in versions)),
    )
    return new, versions


def _copy_old_values(problem: SparseProblem) -> SparseProblem:
    """The problem in which no statement reads elements of its dense target that it may have changed."""
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
    """Whether a statement reads its target, and not just each element before it stores that one, and only that."""
    own = [a for a in _collect_reads(s) if a.tensor == s.target]
    if not own:
        return False
    is_pointwise = s.reduction is None and all(a.subscripts == s.subscripts for a in own)
    return not is_pointwise or bool(s.exists) or any(function.tensor(a.tensor).is_sparse for a in _collect_reads(s))


def _collect_reads(s: Statement) -> list[Access]:
    return [a for e in (s.value, *s.exists) for a in walk_expr(e) if isinstance(a, Access)]


def _with_versions(function: Function, versions: tuple[Version, ...]) -> tuple[Symbol, ...]:
    sources = (function.tensor(v.source) for v in versions)
    new = (replace(t, name=v.name, role=Role.INPUT) for v, t in zip(versions, sources, strict=True))
    return (*function.tensors, *new)
