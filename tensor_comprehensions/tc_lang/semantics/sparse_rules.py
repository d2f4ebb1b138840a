"""The rules for sparse tensors in a def, and defs with formats that their text does not declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.checked_fields import describe_value
from ...core.errors import ArgumentError, CheckError
from ..formats import Format
from ..ir import Access, Const, Function, Index, Role, Statement, Symbol, walk_expr


def with_formats(function: Function, formats: Mapping[str, Format]) -> Function:
    """`function` with `formats` for tensors whose format its text leaves open or declares the same.

    Raises:
        ArgumentError: a name is not a parameter or result, or the text declares another format for it.
        CheckError: a sparse tensor is used in a way that only dense tensors allow.
    """
    for name, format in formats.items():
        _check_override(function, name, format)
    if not formats:
        return function
    tensors = tuple(replace(t, format=formats.get(t.name, t.format)) for t in function.tensors)
    changed = replace(function, tensors=tensors)
    check_sparse_accesses(changed)
    return changed


def check_formats(functions: Sequence[Function], formats: Mapping[str, str]) -> None:
    """Check that `formats` is a mapping from names of parameters or results of some def. Raises ArgumentError."""
    if not isinstance(formats, Mapping):
        raise ArgumentError("formats are given by name", expected='{"A": "csr"}', found=describe_value(formats))
    names = list(dict.fromkeys(t.name for f in functions for t in f.tensors if t.role is not Role.TEMPORARY))
    for name in formats:
        if name not in names:
            raise ArgumentError(
                f"a format is given to '{name}', which is not a tensor of the defs", expected=", ".join(names)
            )


def _check_override(function: Function, name: str, format: Format) -> None:
    known = {t.name: t for t in function.tensors if t.role is not Role.TEMPORARY}
    if name not in known:
        raise ArgumentError(
            f"a format is given to '{name}', which is not a tensor of '{function.name}'", expected=", ".join(known)
        )
    declared = known[name].format
    if declared is not None and declared != format:
        raise ArgumentError(
            f"'{name}' of '{function.name}' is declared with another format", expected=str(declared), found=str(format)
        )


def check_sparse_accesses(function: Function) -> None:
    """Check that sparse tensors have subscripts that iteration can follow, and are not in/out.

    Raises:
        CheckError: at the first violation.
    """
    sparse = {t.name: t for t in function.tensors if t.is_sparse}
    if not sparse:
        return
    for t in sparse.values():
        if t.role is Role.INOUT:
            raise CheckError(
                f"'{t.name}' is both sparse and in/out",
                source=function.source, span=t.span, expected="a dense in/out tensor, or a definition with = or +=!",
            )  # fmt: skip
    for s in function.statements:
        _check_statement(function, s, sparse)


def _check_statement(function: Function, s: Statement, sparse: Mapping[str, Symbol]) -> None:
    reads = [e for root in (*s.subscripts, s.value, *s.exists) for e in walk_expr(root) if isinstance(e, Access)]
    for access in reads:
        inside = [e for x in access.subscripts for e in walk_expr(x) if isinstance(e, Access) and e.tensor in sparse]
        if inside:
            raise CheckError(
                f"the sparse tensor '{inside[0].tensor}' cannot be a subscript",
                source=function.source, span=access.span, suggestion="pass the indices as a dense tensor",
            )  # fmt: skip
        if access.tensor in sparse and not all(isinstance(x, Index | Const) for x in access.subscripts):
            raise CheckError(
                f"a subscript of the sparse tensor '{access.tensor}' is neither an index nor a number",
                source=function.source, span=access.span, expected=f"{access.tensor}(i, ...) with bare indices",
                suggestion="name the index on the left after the stored place: y(i-1) = a(i)",
            )  # fmt: skip
    if s.target in sparse and not all(isinstance(x, Index) for x in s.subscripts):
        raise CheckError(
            f"a subscript of the sparse result '{s.target}' is not an index",
            source=function.source, span=s.span, expected=f"{s.target}(i, ...) with bare indices",
        )  # fmt: skip
    if s.target in sparse and len(set(s.subscripts)) < len(s.subscripts):
        raise CheckError(f"an index comes twice in the sparse result '{s.target}'", source=function.source, span=s.span)


def is_dense_contraction(function: Function, s: Statement) -> bool:
    """Whether a statement is the only definition of its target, and a sum over dense tensors of several matrices."""
    names = (s.target, *collect_read_tensors(s))
    alone = sum(other.target == s.target for other in function.statements) == 1
    is_sum = s.reduction == "+" and s.initialize and s.num_free < len(s.indices)
    plain = not s.exists and not any(function.tensor(n).is_sparse for n in names)
    return alone and is_sum and plain and len({n for n in names if function.tensor(n).rank > 1}) > 2


def collect_read_tensors(s: Statement) -> list[str]:
    """The tensors that a statement reads, in order, once per access."""
    exprs = (s.value, *s.subscripts, *s.exists, *(e for r in s.ranges for e in (r.lower, r.upper)))
    return [a.tensor for e in exprs for a in walk_expr(e) if isinstance(a, Access)]


def pattern_depends_on_values(function: Function) -> bool:
    """Whether a sparse result depends on dense tensors alone, so that it stores their nonzero elements."""
    for s in function.statements:
        reads = [a for e in (s.value, *s.exists) for a in walk_expr(e) if isinstance(a, Access)]
        is_sparse = s.target in function.returns and function.tensor(s.target).is_sparse
        if is_sparse and not any(function.tensor(a.tensor).is_sparse for a in reads):
            return True
    return False
