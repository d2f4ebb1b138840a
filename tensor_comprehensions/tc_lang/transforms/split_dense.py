"""Split a def with sparse tensors into runs of dense contractions and the statements between them.

Each part is a separate def. A tensor that one part makes for a later one is a result of the first and an input of the
second. Dense contractions then get the kernels of dense defs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ...core.dtypes import INT64
from ..binding.ranges import Ranges, symbolic_ranges
from ..ir import Const, Expr, Function, Role, Size, Statement, Symbol, walk_expr
from ..semantics.sparse_rules import collect_read_tensors, is_dense_contraction
from ..size_polynomial import SizeName, Value


@dataclass(frozen=True, slots=True)
class DefPart:
    """Some statements of a def, as a def. is_dense: none of its tensors is sparse."""

    function: Function
    is_dense: bool


def split_dense_contractions(function: Function, patterned: Collection[str] = ()) -> tuple[DefPart, ...]:
    """Split a def into parts, in order; () if it has no dense contractions or cannot be split.

    Parts whose results nothing reads are omitted.

    Args:
        patterned: temporaries with the sparsity pattern of an operand, which must stay within one part.
    """
    ranges = symbolic_ranges(function)
    runs = list(_group_statements(function))
    if not any(is_dense for _, is_dense in runs) or function.constraints or function.inouts:
        return ()
    parts: list[DefPart] = []
    for number, (statements, is_dense) in enumerate(runs):
        part = _make_part_function(function, number, statements, ranges)
        if part is None or any(t.name in patterned or _is_made_sparse(t, function) for t in part.parameters):
            return ()
        if part.returns:
            parts.append(DefPart(part, is_dense))
    return tuple(parts) if any(p.is_dense for p in parts) else ()


def _is_made_sparse(t: Symbol, function: Function) -> bool:
    return t.is_sparse and function.tensor(t.name).role is not Role.INPUT


def _group_statements(function: Function) -> Iterator[tuple[list[Statement], bool]]:
    """Group the statements into maximal runs, each with whether it consists of dense contractions."""
    dense = [is_dense_contraction(function, s) for s in function.statements]
    run: list[Statement] = []
    for n, s in enumerate(function.statements):
        if run and dense[n] is not dense[n - 1]:
            yield run, dense[n - 1]
            run = []
        run.append(s)
    if run:
        yield run, dense[-1]


def _make_part_function(
    function: Function, number: int, statements: Sequence[Statement], ranges: Ranges
) -> Function | None:
    """A def of some statements, with tensors made before them as inputs; None if its sizes would not be known."""
    made = list(dict.fromkeys(s.target for s in statements))
    inside = {id(s) for s in statements}
    others = [s for s in function.statements if id(s) not in inside]
    if any(s.target in made for s in others):
        return None
    used = {n for s in statements for n in collect_read_tensors(s)}
    after = {n for s in others for n in collect_read_tensors(s)}
    inputs: list[Symbol] = []
    for t in function.tensors:
        if (t.name in used and t.name not in made) or t.is_compile_time:
            taken = t if t.role is Role.INPUT else _as_input(t, ranges.shape(t.name), ranges)
            if taken is None:
                return None
            inputs.append(taken)
    returned = [n for n in made if n in after or n in function.returns]
    results = [replace(function.tensor(n), role=Role.OUTPUT) for n in returned]
    temporaries = [function.tensor(n) for n in made if n not in returned]
    sizes = {e.name for t in inputs for e in t.extents or () if isinstance(e, Size)}
    part = replace(
        function,
        name=f"{function.name}_{number}",
        tensors=(*inputs, *results, *temporaries),
        statements=tuple(statements),
        returns=tuple(returned),
        sizes=tuple(n for n in function.sizes if n in sizes),
        canonical=f"{function.canonical}\nstatements of part {number}",
    )
    return part if _has_known_sizes(part) and _has_same_sizes(part, ranges) else None


def _as_input(t: Symbol, shape: Sequence[Value], ranges: Ranges) -> Symbol | None:
    """A tensor that an earlier part makes, as an input; None if its shape cannot be declared."""
    extents = [_make_extent_expr(x) for x in shape]
    if None in extents or any(lower != 0 for lower, _ in ranges.tensors[t.name]):
        return None
    return replace(t, role=Role.INPUT, extents=tuple(e for e in extents if e is not None))


def _make_extent_expr(x: Value) -> Expr | None:
    if isinstance(x, int):
        return Const(x, INT64)
    match x.terms:
        case (((SizeName(name=name),), 1),) if "." not in name:
            return Size(name, INT64)
    return None if x.value is None else Const(x.value, INT64)


def _has_known_sizes(part: Function) -> bool:
    """Whether the inputs of a part determine all sizes that it uses."""
    known = {*part.sizes, *part.scalars}
    exprs = [
        e for s in part.statements for e in (s.value, *s.subscripts, *(b for r in s.ranges for b in (r.lower, r.upper)))
    ]
    exprs += [e for t in part.tensors for e in t.extents or ()]
    return all(x.name in known for e in exprs for x in walk_expr(e) if isinstance(x, Size))


def _has_same_sizes(part: Function, ranges: Ranges) -> bool:
    """Whether all tensors of a part have the same shapes as in the whole def."""
    mine = symbolic_ranges(part)
    return all(mine.tensors[t.name] == ranges.tensors[t.name] for t in part.tensors if not t.is_compile_time)
