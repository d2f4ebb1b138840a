"""Move independent statements out of the way between a sum and the pointwise statements that finish it.

A contraction can finish its sums in registers only if the statements that do so follow it directly. For example,
`scale(o) = rsqrt(variance(o))` between a convolution and `y(o,i) = scale(o) * sum(o,i)` moves in front of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ir import Access, BoundFunction, BoundStatement, walk_expr


def join_epilogues(function: BoundFunction) -> BoundFunction:
    """`function` with the pointwise statements that finish a sum behind it if only independent statements separate
    them."""
    statements = function.statements
    for n in range(len(statements)):
        statements = _join_epilogue(statements, n)
    return function if statements == function.statements else replace(function, statements=statements)


def _join_epilogue(statements: tuple[BoundStatement, ...], n: int) -> tuple[BoundStatement, ...]:
    """`statements` with those that finish the sum at `n` behind it."""
    if statements[n].reduction != "+" or not statements[n].reduction_indices:
        return statements
    first = n
    while first and statements[first - 1].target == statements[n].target:
        first -= 1
    joined, moved, waiting = list(statements[first : n + 1]), list[BoundStatement](), list[BoundStatement]()
    for s in statements[n + 1 :]:
        if s.reduction_indices or s.checks or s.reads_own_target:
            break
        if joined[-1].target in _read_tensors(s):
            moved += waiting
            waiting.clear()
            joined.append(s)
        elif _may_precede(s, joined) and not _read_tensors(s) & {x.target for x in statements[:n]}:
            waiting.append(s)  # one that reads an earlier sum stays: moved, it would separate sums that share a loop
        else:
            break
    if not moved:
        return statements
    rest = [s for s in statements[n + 1 :] if all(s is not x for x in (*joined, *moved))]
    return (*statements[:first], *moved, *joined, *rest)


def _may_precede(s: BoundStatement, joined: Sequence[BoundStatement]) -> bool:
    """Whether `s`, which follows `joined`, may run before them."""
    return not any(_depends(s, j) for j in joined)


def _depends(a: BoundStatement, b: BoundStatement) -> bool:
    """Whether the order of `a` and `b` matters."""
    return a.target == b.target or a.target in _read_tensors(b) or b.target in _read_tensors(a)


def _read_tensors(s: BoundStatement) -> frozenset[str]:
    """The tensors that a statement reads, in its value, subscripts and checks."""
    return frozenset(_walk_reads(s))


def _walk_reads(s: BoundStatement) -> Iterator[str]:
    guards = (c.guard for c in s.checks if c.guard is not None)
    for root in (s.value, *s.subscripts, *(c.subscript for c in s.checks), *guards, *s.exists):
        yield from (e.tensor for e in walk_expr(root) if isinstance(e, Access))
