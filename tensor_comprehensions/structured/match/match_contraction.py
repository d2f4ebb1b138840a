"""Find structured ops in a program: a contraction and the pointwise statements around it.

A cluster is a run of statements on one tensor T: definitions that initialize it, one update `T(..) += a * b`, and
pointwise statements that update T or compute another tensor from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.buffer_view import BufferView
from ...loop_ir.linear_forms import subtract
from ...loop_ir.nodes import Buffer, Expr, Load, Type, Var
from ...lower_expr import LoweringScope, lower_access, lower_expr
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundIndex, BoundStatement, Inequality, Role, Tensor, map_operands, walk_expr
from ..op import ACCUMULATOR, HalfSpace, Iterator, IteratorKind, StructuredOp
from ..planners.select import why_not_microkernel
from .drop_unit_dims import drop_unit_dims
from .product_matching import convert_exactly, replace_element_reads, split_product


@dataclass(frozen=True, slots=True)
class MatchedContraction:
    """Consecutive statements that are one structured op.

    Attributes:
        statements: the members in order, with the same names of free indices.
        update: the position in `statements` of the contraction.
        output: the element that the last member defines.
        left, right: the factors, of the accumulator's type.
        initial: the initial value of the sum, of the accumulator's type; None is zero.
        epilogue: the stored value, over `tc.Index(ACCUMULATOR, accumulator type)`; None stores the sum.
    """

    statements: tuple[BoundStatement, ...]
    update: int
    output: tc.Access
    left: tc.Expr
    right: tc.Expr
    initial: tc.Expr | None
    epilogue: tc.Expr | None

    @property
    def free(self) -> tuple[BoundIndex, ...]:
        return self.statements[self.update].free

    @property
    def reduction_indices(self) -> tuple[BoundIndex, ...]:
        return self.statements[self.update].reduction_indices

    def without_epilogue(self) -> MatchedContraction:
        """The sum alone, of the accumulator's type, as an element of the tensor that the contraction updates."""
        update = self.statements[self.update]
        sums = tc.Access(update.target, update.subscripts, self.left.dtype)
        return replace(self, statements=self.statements[: self.update + 1], output=sums, epilogue=None)

    def op(
        self,
        name: str,
        buffers: Mapping[str, Buffer | BufferView[int]],
        tiles: Mapping[str, tuple[Expr, int]] | None = None,
    ) -> StructuredOp:
        """The cluster as a structured op whose iterators are named `name.index`.

        tiles: for free indices that surrounding loops tile, the first value (an int64 scalar) and the extent.
        """
        tiles = tiles or {}
        iterators: list[Iterator] = []
        values: dict[str, Expr] = {ACCUMULATOR: Var(ACCUMULATOR, Type(self.left.dtype))}
        for kind, indices in ((IteratorKind.PARALLEL, self.free), (IteratorKind.REDUCTION, self.reduction_indices)):
            for i in indices:
                origin, extent = tiles.get(i.name, (build.const(i.lower), i.extent))
                iterators.append(Iterator(internal_name(name, i.name), extent, kind))
                values[i.name] = build.add(Var(internal_name(name, i.name)), origin)
        scope = LoweringScope(values, buffers)
        buffer, where = lower_access(self.output.tensor, self.output.subscripts, scope)
        return StructuredOp(
            name=name,
            iterators=tuple(iterators),
            output=Load(buffer, where),
            left=lower_expr(self.left, scope),
            right=lower_expr(self.right, scope),
            initial=None if self.initial is None else lower_expr(self.initial, scope),
            epilogue=None if self.epilogue is None else lower_expr(self.epilogue, scope),
            elements=tuple(_half_space(g, name, values) for g in self.statements[self.update].elements),
            terms=tuple(_half_space(g, name, values) for g in self.statements[self.update].terms),
        )


def _half_space(g: Inequality, name: str, values: Mapping[str, Expr]) -> HalfSpace:
    """An inequality over indices as a half space over the op's iterators; the origins of tiles are in `rest`."""
    rest: Expr = build.const(g.constant)
    for index, c in g.terms:
        rest = build.add(rest, build.mul(subtract(values[index], Var(internal_name(name, index))), c))
    return HalfSpace(tuple((internal_name(name, index), c) for index, c in g.terms), rest)


def match_contraction(
    statements: Sequence[BoundStatement], start: int, tensors: Mapping[str, Tensor], *, in_place: bool = False,
    finish_checked: bool = True,
) -> MatchedContraction | None:  # fmt: skip
    """The longest cluster that begins with `statements[start]`, or None.

    `statements` is the whole program, because later statements decide which tensors are still needed.

    Args:
        in_place: allow the output to be the tensor that the initial values come from. The same thread reads an element
            before it writes it.
        finish_checked: allow statements with checked subscripts in the epilogue.
    """
    at = start
    while at < len(statements) and _is_initial_definition(statements[at], statements[start].target):
        at += 1
    if at == len(statements) or statements[at].target != statements[start].target:
        return None
    update = statements[at]
    if not _is_sum_update(update) or (update.initialize and at > start):
        return None
    pair = split_product(update)
    if pair is None or any(
        not _same_points(s, update) or _defines_other_elements(s, update) for s in statements[start:at]
    ):
        return None
    cluster = _make_base_contraction(statements[start : at + 1], tensors, pair.left, pair.right, pair.scale)
    for following in range(at + 1, len(statements)):
        longer = None
        if finish_checked or not statements[following].checks:
            longer = _extend_cluster(cluster, statements, following, tensors, in_place=in_place)
        if longer is None:
            break
        cluster = longer
    return cluster


def why_unprofitable(
    cluster: MatchedContraction, buffers: Mapping[str, Buffer], target: CpuTarget, *, asked: bool = False
) -> str | None:
    """Why a micro-kernel for the cluster would be slow on `target`; None if it is fast, or the user `asked` for it."""
    op = cluster.op("c", buffers)
    if any(i.extent == 0 for i in op.iterators):
        return "an empty range"
    return None if asked else why_not_microkernel(drop_unit_dims(op), target)


# --- the parts ---------------------------------------------------------------------------------------------------


def _plain_subscripts(s: BoundStatement) -> tuple[str, ...] | None:
    """The names of the target's subscripts if they are the distinct free indices, in any order."""
    names = tuple(e.name for e in s.subscripts if isinstance(e, tc.Index))
    if len(names) != len(s.subscripts) or len(set(names)) != len(names):
        return None
    return names if set(names) == {i.name for i in s.free} else None


def _is_pointwise(s: BoundStatement) -> bool:
    return not s.reduction_indices and not s.reads_own_target and _plain_subscripts(s) is not None


def _is_initial_definition(s: BoundStatement, target: str) -> bool:
    return s.target == target and s.reduction is None and _is_pointwise(s)


def _is_sum_update(s: BoundStatement) -> bool:
    own = (e for e in walk_expr(s.value) if isinstance(e, tc.Access) and e.tensor == s.target)
    return (
        s.reduction == "+"
        and bool(s.reduction_indices)
        and not s.reads_own_target
        and _plain_subscripts(s) is not None
        and not any(own)
    )


def _same_points(s: BoundStatement, update: BoundStatement) -> bool:
    """Whether `s` and `update` write the same range of each dimension."""
    return _list_subscript_ranges(s) == _list_subscript_ranges(update)


def _defines_other_elements(s: BoundStatement, update: BoundStatement) -> bool:
    """Whether the masks of `s` and `update` differ, so that they define different elements."""
    return set(_rename_indices(s, update).elements) != set(update.elements)


def _list_subscript_ranges(s: BoundStatement) -> tuple[tuple[int, int], ...]:
    found = {i.name: (i.lower, i.upper) for i in s.free}
    return tuple(found[n] for n in _plain_subscripts(s) or ())


def _rename_indices(s: BoundStatement, update: BoundStatement) -> BoundStatement:
    """`s` with its indices renamed to those that `update` has in the same dimension of the target."""
    names = dict(zip(_plain_subscripts(s) or (), _plain_subscripts(update) or (), strict=True))

    def rename(e: tc.Expr) -> tc.Expr:
        if isinstance(e, tc.Index):
            return replace(e, name=names.get(e.name, e.name))
        return map_operands(e, rename)

    order = {i.name: position for position, i in enumerate(update.free)}
    indices = sorted((replace(i, name=names[i.name]) for i in s.indices), key=lambda i: order[i.name])
    return replace(
        s,
        subscripts=tuple(map(rename, s.subscripts)),
        value=rename(s.value),
        indices=tuple(indices),
        elements=tuple(g.rename_indices({name: names.get(name, name) for name, _ in g.terms}) for g in s.elements),
        checks=tuple(
            replace(c, subscript=rename(c.subscript), guard=None if c.guard is None else rename(c.guard))
            for c in s.checks
        ),
    )


def _make_base_contraction(
    members: Sequence[BoundStatement],
    tensors: Mapping[str, Tensor],
    left: tc.Expr,
    right: tc.Expr,
    scale: tc.Expr | None,
) -> MatchedContraction:
    """The cluster of the definitions and the update, without an epilogue from later statements."""
    *definitions, update = members
    renamed = tuple(_rename_indices(s, update) for s in definitions)
    output = tc.Access(update.target, update.subscripts, tensors[update.target].dtype)
    dtype = update.value.dtype
    initial: tc.Expr | None = None if update.initialize else convert_exactly(output, dtype)
    for s in renamed:
        before = output if initial is None else convert_exactly(initial, output.dtype)
        initial = convert_exactly(convert_exactly(replace_element_reads(s.value, output, before), output.dtype), dtype)
    if isinstance(initial, tc.Const) and initial.value == 0:
        initial = None
    epilogue: tc.Expr | None = None
    if scale is not None:
        total: tc.Expr = tc.Binary("*", scale, tc.Index(ACCUMULATOR, dtype), dtype)
        epilogue = total if initial is None else tc.Binary("+", initial, total, dtype)
        initial = None
    return MatchedContraction((*renamed, update), len(renamed), output, left, right, initial, epilogue)


def _extend_cluster(
    cluster: MatchedContraction, statements: Sequence[BoundStatement], at: int, tensors: Mapping[str, Tensor], *,
    in_place: bool,
) -> MatchedContraction | None:  # fmt: skip
    """`cluster` with `statements[at]` in its epilogue; None if that statement cannot join."""
    s, update = statements[at], cluster.statements[cluster.update]
    if not _is_pointwise(s) or not _same_points(s, update):
        return None
    s = _rename_indices(s, update)
    if set(s.elements) != set(update.elements):
        return None
    current = cluster.output
    output = replace(current, tensor=s.target, subscripts=s.subscripts, dtype=tensors[s.target].dtype)
    if s.target != current.tensor and not _may_replace_output(
        cluster, s, statements[at + 1 :], tensors, in_place=in_place
    ):
        return None
    value = _make_stored_value(s, output)
    if not any(e == current for e in walk_expr(value)) or _reads_elsewhere(value, current):
        return None
    if _reads_elsewhere(value, output):
        return None
    dtype = cluster.left.dtype
    done = cluster.epilogue if cluster.epilogue is not None else tc.Index(ACCUMULATOR, dtype)
    value = replace_element_reads(value, current, convert_exactly(done, current.dtype))
    return replace(cluster, statements=(*cluster.statements, s), output=output, epilogue=value)


def _make_stored_value(s: BoundStatement, output: tc.Access) -> tc.Expr:
    """The value that a pointwise statement stores; for an update it contains the old element."""
    if s.reduction is None or s.initialize:
        return s.value
    return tc.Binary(s.reduction, convert_exactly(output, s.value.dtype), s.value, s.value.dtype)


def _may_replace_output(
    cluster: MatchedContraction, s: BoundStatement, later: Sequence[BoundStatement], tensors: Mapping[str, Tensor], *,
    in_place: bool,
) -> bool:  # fmt: skip
    """Whether the target of `s` may replace the cluster's output, because no other statement reads that."""
    old = cluster.output.tensor
    if tensors[old].role is not Role.TEMPORARY or any(_uses_tensor(x, old) for x in later):
        return False
    element = tc.Access(s.target, s.subscripts, tensors[s.target].dtype)
    return not any(
        _uses_tensor(x, s.target)
        and not (in_place and n < cluster.update and x.target != s.target and not _reads_elsewhere(x.value, element))
        for n, x in enumerate(cluster.statements)
    )


def _uses_tensor(s: BoundStatement, tensor: str) -> bool:
    if s.target == tensor:
        return True
    roots = (s.value, *s.subscripts, *(c.subscript for c in s.checks), *(c.guard for c in s.checks if c.guard))
    return any(isinstance(e, tc.Access) and e.tensor == tensor for root in roots for e in walk_expr(root))


def _reads_elsewhere(value: tc.Expr, element: tc.Access) -> bool:
    """Whether `value` reads the tensor of `element` at another element."""
    reads = (e for e in walk_expr(value) if isinstance(e, tc.Access) and e.tensor == element.tensor)
    return any(e.subscripts != element.subscripts for e in reads)
