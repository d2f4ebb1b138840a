"""Simplify the statements of a derived gradient.

Sums that are always zero are dropped. Factors that are invariant in a sum move after it. Several additions to a tensor
are merged, and values that a single statement reads are inlined. Products that an output stores are read from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial

from ...core.dtypes import INT64
from ..binding.ranges import Bounds
from ..ir import Access, Call, Cast, Expr, Index, Select, operands_of, walk_expr, with_operands
from ..size_polynomial import Value
from .adjoint_access import range_guards, substitute_indices, uses_index
from .derivatives import plus
from .emit import GradStatement
from .factorize import (
    FactorProduct,
    NamedProduct,
    is_batched_product,
    product_to_expr,
    to_product,
    with_named_products,
)
from .index_masks import restrict_sums_to_masks, reuse_masked_values
from .ssa import SsaProgram, are_bare_indices, is_restricted_by_exists
from .zero_sums import drop_zero_statements

MOST = 200
"""Maximum nodes of an expression that is inlined."""


def simplify_gradient(
    steps: SsaProgram, written: Sequence[GradStatement], targets: AbstractSet[str], sizes: Mapping[str, Value]
) -> list[GradStatement]:
    """Simplify the statements of a gradient so that they compute less. targets: the tensors that must be computed."""
    statements = live_statements(drop_zero_statements(steps, live_statements(written, targets), sizes), targets)
    statements = _reuse_partial_sums([x for n, w in enumerate(statements) for x in _factor_sum(w, n)])
    statements = _StatementFuser(statements, targets, sizes).run()
    names = _find_stored_products(steps, {name for w in statements for name in w.reads})
    statements = [_rewrite_product(w, names, steps, sizes) for w in statements]
    statements = restrict_sums_to_masks(reuse_masked_values(statements, steps), sizes)
    return _move_unread_sums_last(live_statements(statements, targets))


def live_statements(written: Sequence[GradStatement], targets: AbstractSet[str]) -> list[GradStatement]:
    """The statements that the tensors in `targets` depend on."""
    needed, kept = set(targets), list[GradStatement]()
    for w in reversed(written):
        if w.target in needed:
            kept.append(w)
            needed |= w.reads
    return kept[::-1]


def _move_unread_sums_last(written: Sequence[GradStatement]) -> list[GradStatement]:
    """Move sums that no statement reads to the end, batched products first, and conversions of sums after these.

    Between other statements, they would prevent fusion.
    """
    readers: dict[str, list[GradStatement]] = {}
    for w in written:
        for name in w.reads:
            readers.setdefault(name, []).append(w)
    writers = [w.target for w in written]

    def is_result(w: GradStatement) -> bool:
        return w.target not in readers and writers.count(w.target) == 1

    def is_converted(w: GradStatement) -> bool:
        after = readers.get(w.target, ())
        return bool(after) and all(isinstance(r.value, Cast) and r.op == "=" and is_result(r) for r in after)

    sums = [w for w in written if w.op == "+=!" and writers.count(w.target) == 1]
    last = [w for w in sums if is_result(w) or is_converted(w)]
    last = [*filter(_multiplies_batches, last), *(w for w in last if not _multiplies_batches(w))]
    conversions = [r for w in last for r in readers.get(w.target, ())]
    return [*(w for w in written if w not in last and w not in conversions), *last, *conversions]


def _multiplies_batches(w: GradStatement) -> bool:
    return is_batched_product(w.value, [e.name for e in w.subscripts if isinstance(e, Index)])


# --- factors of sums -------------------------------------------------------------------------------------------------


def _factor_sum(w: GradStatement, n: int) -> list[GradStatement]:
    """Split `t(n) +=! x(n,d) / s(n)` into a sum and a quotient, if some operand has an element for each point."""
    left = [e.name for e in w.subscripts if isinstance(e, Index)]
    rest = [i for i in w.ranges if i not in left]
    if not rest or w.op not in ("+=!", "+=") or not are_bare_indices(w.subscripts) or w.exists:
        return [w]
    if not _reads_element_per_point(w):
        return _nest_sums(w, n, left, rest)
    still, moving = to_product(w.value).split(lambda x: not any(uses_index(i, x) for i in rest))
    if not (still.over or still.under) or not (moving.over or moving.under):
        return [w]
    name = f"sum{n} {w.target.partition(' ')[2]}"
    total = Access(name, tuple(Index(i, INT64) for i in left), w.value.dtype)
    value = product_to_expr(replace(still, over=(*still.over, total)), w.value.dtype)
    sum_ = GradStatement(name, w.subscripts, "+=!", product_to_expr(moving, w.value.dtype), w.ranges, w.exists)
    op = "=" if w.op == "+=!" else "+="
    return [sum_, GradStatement(w.target, w.subscripts, op, value, {i: w.ranges[i] for i in left})]


def _nest_sums(w: GradStatement, n: int, left: Sequence[str], rest: Sequence[str]) -> list[GradStatement]:
    """If only two factors of a sum depend on an index, sum their product over it first, in a separate statement.

    In `s(i) +=! p(i,j) * a(i,k) * b(j,k)` the inner sum is over k. It must have no more elements than another tensor
    that is read or written.
    """
    p = to_product(w.value)
    for e in rest:
        pair, others = p.split(partial(uses_index, e))
        if pair.under or len(pair.over) != 2 or not all(isinstance(x, Access) for x in pair.over):
            continue
        inner = [i for i in w.ranges if i != e and uses_index(i, *pair.over)]
        factors = [*others.over, *others.under]
        like = [set(left), *({i for i in w.ranges if uses_index(i, x)} for x in factors if isinstance(x, Access))]
        if not any(uses_index(i, x) for i in w.ranges for x in factors) or not any(
            set(inner) <= names for names in like
        ):
            continue
        name = f"part{n} {w.target.partition(' ')[2]}"
        subscripts = tuple(Index(i, INT64) for i in inner)
        part = Access(name, subscripts, w.value.dtype)
        value = product_to_expr(FactorProduct(pair.coefficient, (part, *others.over), others.under), w.value.dtype)
        ranges = {i: b for i, b in w.ranges.items() if i != e}
        op = "=" if w.op == "+=!" and len(rest) == 1 else w.op
        pair_sum = product_to_expr(replace(pair, coefficient=1.0), w.value.dtype)
        first = GradStatement(name, subscripts, "+=!", pair_sum, {**{i: w.ranges[i] for i in inner}, e: w.ranges[e]})
        return [first, *_factor_sum(GradStatement(w.target, w.subscripts, op, value, ranges), n)]
    return [w]


def _reuse_partial_sums(statements: Sequence[GradStatement]) -> list[GradStatement]:
    """Eliminate partial sums that an earlier statement has computed from tensors that have not changed since."""
    out: list[GradStatement] = []
    same: dict[str, str] = {}
    for w in statements:
        w = replace(w, value=_with_names(w.value, same))
        twin = None
        for earlier in reversed(out):
            if earlier.target in w.reads:
                break
            if earlier.target.startswith("part") and replace(earlier, target=w.target) == w:
                twin = earlier
                break
        if twin is not None and w.target.startswith("part"):
            same[w.target] = twin.target
        else:
            out.append(w)
    return out


def _with_names(e: Expr, names: Mapping[str, str]) -> Expr:
    """`e` with tensors renamed."""
    e = with_operands(e, [_with_names(x, names) for x in operands_of(e)])
    return replace(e, tensor=names[e.tensor]) if isinstance(e, Access) and e.tensor in names else e


def _reads_element_per_point(w: GradStatement) -> bool:
    """Whether some operand has an element for each point; otherwise the sum is a contraction of smaller tensors."""
    accesses = (x for x in walk_expr(w.value) if isinstance(x, Access))
    return any(all(uses_index(i, *x.subscripts) for i in w.ranges) for x in accesses)


# --- fusion of statements --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _StatementFuser:
    """Inlines pointwise definitions into their readers and merges additions.

    waiting: pointwise definitions that no statement has read yet, in order.
    """

    statements: Sequence[GradStatement]
    targets: AbstractSet[str]
    sizes: Mapping[str, Value]
    waiting: dict[str, GradStatement] = field(default_factory=dict)
    out: list[GradStatement] = field(default_factory=list)

    def run(self) -> list[GradStatement]:
        for n, w in enumerate(self.statements):
            for name in [t for t in self.waiting if t in w.reads]:
                definition = self.waiting.pop(name)
                if self._belongs(n, definition, w):
                    w = replace(w, value=self._inline_definition(w.value, definition))
                else:
                    self.out.append(definition)
            for name in [t for t, d in self.waiting.items() if w.target in d.reads]:
                self.out.append(self.waiting.pop(name))
            self._take(w)
        return [*self.out, *self.waiting.values()]

    def _take(self, w: GradStatement) -> None:
        before = self.waiting.pop(w.target, None)
        pointwise = are_bare_indices(w.subscripts) and len(w.ranges) == len(w.subscripts)
        if pointwise and w.op == "=" and before is None:
            self.waiting[w.target] = w
        elif (
            before is not None
            and pointwise
            and w.op == "+="
            and (joined := self._join_statements(before, w)) is not None
        ):
            self.waiting[w.target] = joined
        else:
            self.out += [w] if before is None else [before, w]

    def _join_statements(self, before: GradStatement, w: GradStatement) -> GradStatement | None:
        """Merge an addition to a tensor into its definition `before`; None if that is impossible."""
        names = [e.name for e in w.subscripts if isinstance(e, Index)]
        if [w.ranges[i] for i in names] != list(_list_subscript_bounds(before)) or not _is_small(before.value, w.value):
            return None
        same = dict(zip(names, before.subscripts, strict=True))
        if {substitute_indices(a, same, self.sizes) for a in w.exists} != set(before.exists):
            return None
        return replace(before, value=plus(before.value, substitute_indices(w.value, same, self.sizes)))

    def _belongs(self, n: int, definition: GradStatement, w: GradStatement) -> bool:
        """Whether to inline `definition` into `w`, the n-th statement."""
        name = definition.target
        read_elsewhere = any(name in x.reads for m, x in enumerate(self.statements) if m != n)
        if name in self.targets or read_elsewhere or any(x.target == name for x in self.statements[n:]):
            return False
        if any(x.tensor == name for e in w.subscripts for x in walk_expr(e) if isinstance(x, Access)):
            return False
        if not _is_small(definition.value, w.value):
            return False
        reads = {x for x in walk_expr(w.value) if isinstance(x, Access) and x.tensor == name}
        if len(reads) != 1 or len(w.ranges) > len(w.subscripts):
            return False
        (read,) = reads
        names = (x.name for x in definition.subscripts if isinstance(x, Index))
        here = dict(zip(names, read.subscripts, strict=True))
        if not {substitute_indices(a, here, self.sizes) for a in definition.exists} <= set(w.exists):
            return False
        arithmetic = not any(isinstance(x, Call | Select) for x in walk_expr(definition.value))
        return len(definition.ranges) == len(w.ranges) or arithmetic

    def _inline_definition(self, e: Expr, definition: GradStatement) -> Expr:
        """`e` with reads of the target of `definition` replaced by its value."""
        if isinstance(e, Access) and e.tensor == definition.target:
            names = (x.name for x in definition.subscripts if isinstance(x, Index))
            return substitute_indices(definition.value, dict(zip(names, e.subscripts, strict=True)), self.sizes)
        return with_operands(e, [self._inline_definition(x, definition) for x in operands_of(e)])


def _list_subscript_bounds(w: GradStatement) -> tuple[Bounds, ...]:
    return tuple(w.ranges[e.name] for e in w.subscripts if isinstance(e, Index))


def _is_small(*expressions: Expr) -> bool:
    return sum(1 for e in expressions for _ in walk_expr(e)) <= MOST


# --- expressions -----------------------------------------------------------------------------------------------------


def _find_stored_products(steps: SsaProgram, used: AbstractSet[str]) -> list[NamedProduct]:
    """The products that are stored in outputs of the def or in the versions `used`."""
    found = []
    outputs = {steps.last[r] for r in steps.function.returns}
    for step in steps.steps:
        if step.target not in outputs | used:
            continue
        if step.op != "=" or step.before is not None or not are_bare_indices(step.subscripts):
            continue
        dtype = steps.versions[step.target].dtype
        if is_restricted_by_exists(step, steps.function):
            continue
        value = to_product(step.value) if dtype.is_float and dtype == step.value.dtype else FactorProduct(0.0)
        if value.coefficient and len(value.over) + len(value.under) > 1:
            found.append(NamedProduct(Access(step.target, step.subscripts, dtype), value))
    return found


def _rewrite_product(
    w: GradStatement, names: Sequence[NamedProduct], steps: SsaProgram, sizes: Mapping[str, Value]
) -> GradStatement:
    """`w` with its value rewritten as a product, unless it is a contraction of smaller tensors."""
    if not w.value.dtype.is_float or (len(w.ranges) > len(w.subscripts) and not _reads_element_per_point(w)):
        return w

    def exists(x: Access) -> bool:
        pairs = zip(x.subscripts, steps.versions[x.tensor].bounds, strict=True)
        return not any(range_guards(e, bounds, w.ranges, sizes) for e, bounds in pairs)

    inner = list(w.ranges)[-1] if w.ranges else None
    return replace(
        w, value=product_to_expr(with_named_products(to_product(w.value, inner), names, exists), w.value.dtype, inner)
    )
