"""Find temporaries and results that share the sparsity pattern of an operand, so that they need no levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..tc_lang.binding.ranges import infer_ranges, symbolic_ranges
from ..tc_lang.formats import LEVELS, Format
from ..tc_lang.ir import Access, Function, Role, Statement, Symbol, walk_expr
from ..tc_lang.reference.sparse_evaluator import SharedPlaces
from ..tc_lang.shared_pattern import SharedPattern, find_dims
from ..tc_lang.size_polynomial import constant_value
from .absent_operands import term_of
from .sparse_problem import KernelRequest, SparseProblem


def shared_patterns(function: Function) -> dict[str, str]:
    """Map temporaries and sparse results to the operand whose sparsity pattern each of them shares."""
    return {name: pattern.source for name, pattern in find_shared_patterns(function).items()}


def find_shared_patterns(function: Function) -> dict[str, SharedPattern]:
    """The temporaries and sparse results that share the sparsity pattern of an operand, each with that pattern.

    A temporary may store zeros, so it can share the pattern of any operand that its terms require. A result must have
    exactly the pattern of the operand.
    """
    sources: dict[str, SharedPattern] = {}
    ranges = symbolic_ranges(function).tensors
    symbols = {t.name: t for t in function.tensors}
    for name in dict.fromkeys(s.target for s in function.statements):
        symbol = symbols[name]
        if symbol.role is Role.TEMPORARY or (symbol.role is Role.OUTPUT and symbol.is_sparse):
            statements = [s for s in function.statements if s.target == name]
            found = [_operand_sharing_pattern(s, symbol, symbols, sources) for s in statements]
            candidates = {f[0] for f in found if f is not None}
            if None in found or len(candidates) != 1:
                continue
            (pattern,) = candidates
            extents = [ranges[name][d] for d in pattern.dims]
            is_whole = any(f is not None and f[1] for f in found) and extents == list(ranges[pattern.source])
            if symbol.role is Role.TEMPORARY and not _holds_zeros(statements, found, symbol):
                continue
            if is_whole or (symbol.role is Role.TEMPORARY and not _places_matter(function, name)):
                sources[name] = pattern
    return sources


def _holds_zeros(
    statements: Sequence[Statement], found: Sequence[tuple[SharedPattern, bool] | None], temporary: Symbol
) -> bool:
    """Whether a temporary is 0 at stored elements that no instance writes; identities of other reductions are not 0.

    With dense dimensions it may become a dense tensor again, so it must be 0 wherever the operand stores nothing.
    """
    voids = (term_of(s.value, s.exists, s.reduction, temporary.dtype).void for s in statements if s.initialize)
    pairs = ((s, f) for s, f in zip(statements, found, strict=True) if s.initialize)
    whole = (f is not None and f[1] and len(f[0].dims) == len(s.subscripts) for s, f in pairs)
    return all(void == 0 or all_of_them for void, all_of_them in zip(voids, whole, strict=True))


def shared_places(function: Function, sizes: Mapping[str, int]) -> dict[str, SharedPlaces]:
    """The temporaries and results that share a pattern, for given values of all sizes and specialized scalars."""
    bounds = infer_ranges(function, sizes).tensors
    return {
        name: SharedPlaces(x.source, tuple(slice(*map(constant_value, bounds[name][d])) for d in x.dims), x.dims)
        for name, x in find_shared_patterns(function).items()
    }


def _places_matter(function: Function, temporary: str) -> bool:
    """Whether the sparsity patterns of other tensors depend on that of a temporary, so that it may not store zeros."""
    readers = [s for s in function.statements if any(temporary == a.tensor for a in accesses_of(s))]
    targets = [function.tensor(s.target) for s in readers]
    exists = any(a.tensor == temporary for s in readers for a in s.exists)
    return exists or any(t.is_sparse or t.role is Role.TEMPORARY for t in targets if t.name != temporary)


def accesses_of(s: Statement) -> list[Access]:
    """The accesses in the value and in the `exists` clauses of a statement."""
    return [a for e in (s.value, *s.exists) for a in walk_expr(e) if isinstance(a, Access)]


def _operand_sharing_pattern(
    s: Statement, target: Symbol, symbols: Mapping[str, Symbol], known: Mapping[str, SharedPattern]
) -> tuple[SharedPattern, bool] | None:
    """The pattern within which a statement writes, and whether it writes all of it; None if there is none."""
    term = term_of(s.value, s.exists, s.reduction, target.dtype)
    sparse = {n for n, t in symbols.items() if (t.is_sparse and t.role is Role.INPUT) or n in known}
    occurrences = {a: _stored_access(a, known, symbols) for a in term.occurrences(sparse)}
    for stored in sorted(dict.fromkeys(occurrences.values()), key=lambda x: -len(x.subscripts)):
        dims = find_dims(stored, s.subscripts)
        if dims is None or (len(dims) < len(s.subscripts) and not _may_have_dense_dims(target, symbols[stored.tensor])):
            continue
        same = [a for a, x in occurrences.items() if x == stored]
        if term.drop_absent(same) is not None or not _is_unique(symbols[stored.tensor]):
            continue
        others = [a for a in occurrences if a not in same]
        demanded = bool(s.exists) and all(a in same for a in s.exists)
        whole = not s.ranges and (demanded or term.drop_absent(others) is not None)
        if target.role is Role.TEMPORARY or symbols[stored.tensor].format == target.format:
            return SharedPattern(stored.tensor, dims), whole
    return None


def _may_have_dense_dims(target: Symbol, source: Symbol) -> bool:
    """Whether a tensor may have a row of values at each stored element of an operand."""
    return target.role is Role.TEMPORARY and source.format is not None and not source.format.blocks


def _stored_access(a: Access, known: Mapping[str, SharedPattern], symbols: Mapping[str, Symbol]) -> Access:
    """The access of the operand whose pattern the tensor of `a` shares, or `a`."""
    pattern = known.get(a.tensor)
    return a if pattern is None else pattern.access(a.subscripts, symbols[pattern.source])


def _is_unique(symbol: Symbol) -> bool:
    return symbol.format is not None and symbol.format.is_unique


def with_shared_formats(function: Function, sources: Mapping[str, SharedPattern]) -> Function:
    """`function` with the formats of operands for temporaries that share their patterns."""
    formats = {t.name: t.format for t in function.tensors}

    def share(t: Symbol) -> Symbol:
        pattern = sources.get(t.name)
        source = None if pattern is None else formats[pattern.source]
        return t if pattern is None or source is None else replace(t, format=_extend_format(source, pattern, t.rank))

    return replace(function, tensors=tuple(map(share, function.tensors)))


def _extend_format(source: Format, pattern: SharedPattern, rank: int) -> Format:
    """The format of an operand, with the other dimensions of a tensor of `rank` as a dense tail."""
    if len(pattern.dims) == rank:
        return source
    dense = tuple(d for d in range(rank) if d not in pattern.dims)
    order = tuple(pattern.dims[d] for d in source.order)
    return Format((*source.levels, *(LEVELS["d"] for _ in dense)), (*order, *dense))


def list_dense_dims(function: Function, tensor: str, source: str) -> tuple[int, ...]:
    """The dimensions of `tensor` that `source`, whose pattern it shares, lacks: the last ones in memory."""
    own, other = function.tensor(tensor).format, function.tensor(source).format
    return () if own is None or other is None else own.order[len(other.order) :]


def make_cpu_problem(request: KernelRequest) -> SparseProblem:
    """The input of the lowering for a CPU kernel."""
    shared = find_shared_patterns(request.function)
    return SparseProblem(
        with_shared_formats(request.function, shared), request.index_types, request.fixed,
        tuple((name, x.source) for name, x in shared.items()), request.threads, request.refills, request.options,
        wide=request.wide,
    )  # fmt: skip


def representative(a: Access, function: Function, sources: Mapping[str, str]) -> Access:
    """The access of the operand whose pattern the tensor of `a` shares, or `a`."""
    if a.tensor not in sources:
        return a
    own, source = function.tensor(a.tensor).format, function.tensor(sources[a.tensor])
    assert own is not None
    assert source.format is not None
    at = dict(zip(source.format.order, own.order, strict=False))
    subscripts = a.subscripts if source.format.blocks else tuple(a.subscripts[at[d]] for d in range(source.rank))
    return Access(source.name, subscripts, source.dtype)
