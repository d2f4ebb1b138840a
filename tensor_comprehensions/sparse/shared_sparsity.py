"""Temporaries and results that have the stored places of an operand: their values lie beside its levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..tc_lang.binding.ranges import infer_ranges, symbolic_ranges
from ..tc_lang.ir import Access, Function, Role, Statement, Symbol, walk_expr
from ..tc_lang.reference.sparse_evaluator import SharedPlaces
from ..tc_lang.size_polynomial import constant_value
from .absent_operands import term_of
from .sparse_problem import KernelRequest, SparseProblem


def shared_patterns(function: Function) -> dict[str, str]:
    """The temporaries and sparse results with the operand whose stored places each of them has.

    A temporary may store zeros, so that it shares the places of an operand that is required. A result has exactly the
    places of one.
    """
    sources: dict[str, str] = {}
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
            (source,) = candidates
            is_whole = any(f is not None and f[1] for f in found) and ranges[name] == ranges[source]
            if symbol.role is Role.TEMPORARY and not _holds_zeros(statements, found, symbol):
                continue
            if is_whole or (symbol.role is Role.TEMPORARY and not _places_matter(function, name)):
                sources[name] = source
    return sources


def _holds_zeros(statements: Sequence[Statement], found: Sequence[tuple[str, bool] | None], temporary: Symbol) -> bool:
    """Whether a temporary is 0 at places to which no instance comes: identities of products and others are not."""
    voids = (term_of(s.value, s.exists, s.reduction, temporary.dtype).void for s in statements if s.initialize)
    whole = (f is not None and f[1] for s, f in zip(statements, found, strict=True) if s.initialize)
    return all(void == 0 or all_of_them for void, all_of_them in zip(voids, whole, strict=True))


def shared_places(function: Function, sizes: Mapping[str, int]) -> dict[str, SharedPlaces]:
    """The temporaries and results that share places, for numbers of all sizes and specialized scalars."""
    bounds = infer_ranges(function, sizes).tensors
    return {
        name: SharedPlaces(source, tuple(slice(*(constant_value(x) for x in range)) for range in bounds[name]))
        for name, source in shared_patterns(function).items()
    }


def _places_matter(function: Function, temporary: str) -> bool:
    """Whether the stored places of other tensors depend on those of a temporary, so that zeros are not enough."""
    readers = [s for s in function.statements if any(temporary == a.tensor for a in _collect_reads(s))]
    targets = [function.tensor(s.target) for s in readers]
    exists = any(a.tensor == temporary for s in readers for a in s.exists)
    return exists or any(t.is_sparse or t.role is Role.TEMPORARY for t in targets if t.name != temporary)


def _collect_reads(s: Statement) -> list[Access]:
    return [a for e in (s.value, *s.exists) for a in walk_expr(e) if isinstance(a, Access)]


def _operand_sharing_pattern(
    s: Statement, target: Symbol, symbols: Mapping[str, Symbol], known: Mapping[str, str]
) -> tuple[str, bool] | None:
    """The operand among whose places one statement writes, and whether it writes all of them."""
    term = term_of(s.value, s.exists, s.reduction, target.dtype)
    sparse = {n for n, t in symbols.items() if (t.is_sparse and t.role is Role.INPUT) or n in known}
    occurrences = term.occurrences(sparse)
    for a in occurrences:
        source = known.get(a.tensor, a.tensor)
        if a.subscripts != s.subscripts or len(set(a.subscripts)) < len(a.subscripts):
            continue
        same = [b for b in occurrences if b.subscripts == a.subscripts and known.get(b.tensor, b.tensor) == source]
        if term.drop_absent(same) is not None or not _is_unique(symbols[source]):
            continue
        others = [b for b in occurrences if b not in same]
        demanded = bool(s.exists) and all(b in same for b in s.exists)
        whole = not s.ranges and (demanded or term.drop_absent(others) is not None)
        if target.role is Role.TEMPORARY or symbols[source].format == target.format:
            return source, whole
    return None


def _is_unique(symbol: Symbol) -> bool:
    return symbol.format is not None and symbol.format.is_unique


def with_shared_formats(function: Function, sources: Mapping[str, str]) -> Function:
    """`function`, in which temporaries have the formats of the operands whose places they share."""
    formats = {t.name: t.format for t in function.tensors}
    tensors = tuple(replace(t, format=formats[sources[t.name]]) if t.name in sources else t for t in function.tensors)
    return replace(function, tensors=tensors)


def make_cpu_problem(request: KernelRequest) -> SparseProblem:
    """The input of the lowering for a kernel of CPUs."""
    shared = shared_patterns(request.function)
    return SparseProblem(
        with_shared_formats(request.function, shared), request.index_types, request.fixed, tuple(shared.items()),
        request.parallel, request.refills, request.options,
    )  # fmt: skip


def representative(a: Access, sources: Mapping[str, str]) -> Access:
    """The access of the operand that stands where `a` does."""
    return replace(a, tensor=sources[a.tensor]) if a.tensor in sources else a
