"""Find the stores of a loop that are reductions, and make vector accumulators for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...core.dtypes import DType
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from .. import build
from ..bounds import BoundsContext, runs_at_least_once
from ..names import Names
from ..nodes import Allocate, Block, Buffer, Cast, Const, Expr, Let, Load, Loop, LoopKind, Space, Stmt, Store, Type
from ..rewrite import allocated_buffers, mentions, stmt_expressions, walk_expr, walk_stmts


@dataclass(frozen=True, slots=True)
class Reduction:
    """Updates of one element: `buffer[indices] op= ...` by each of `stores`."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    op: str
    stores: tuple[Store, ...]

    @property
    def dtype(self) -> DType:
        """The type in which the reduction runs."""
        return self.buffer.type.dtype.accumulator

    @property
    def neutral(self) -> Const:
        return build.neutral(self.op, self.dtype)

    def registers(self, names: Names, lanes: int, copies: int) -> Buffer:
        """`copies` vector registers for partial results."""
        name = names.fresh(internal_name(self.buffer.name, "lanes"))
        return Buffer(name, Type(self.dtype, lanes), (copies,), (1,), Space.REGISTER)


@dataclass(frozen=True, slots=True, eq=False)
class VectorAccumulator:
    """A reduction and the vector registers, one per interleaved copy, that hold its partial results."""

    reduction: Reduction
    buffer: Buffer

    @property
    def buffer_name(self) -> str:
        """The buffer that is reduced into."""
        return self.reduction.buffer.name

    def initialize(self) -> Stmt:
        e, origin = build.broadcast(self.reduction.neutral, self.buffer.type.lanes), self.reduction.stores[0].origin
        copies = range(self.buffer.shape[0])
        return build.block(*[Store(self.buffer, (build.const(c),), e, origin=origin) for c in copies])

    def finish(self) -> Stmt:
        """Combine the registers pairwise, then the lanes, and update the element once."""
        r = self.reduction
        parts: list[Expr] = [Load(self.buffer, (build.const(c),)) for c in range(self.buffer.shape[0])]
        combine = build.combiner(r.op, r.dtype)
        while len(parts) > 1:
            pairs = [build.binary(combine, a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
            parts = pairs + parts[len(pairs) * 2 :]
        total = build.reduce_lanes(build.lanes_combiner(r.op, r.dtype), parts[0])
        return Store(r.buffer, r.indices, build.cast(total, r.buffer.type.dtype), r.op, origin=r.stores[0].origin)


def in_accumulator_type(value: Expr, dtype: DType) -> Expr:
    """`value` converted to the accumulator type `dtype`; a cast from it to a storage type is dropped."""
    if isinstance(value, Cast) and value.operand.type.dtype == dtype:
        return value.operand
    return build.cast(value, dtype)


def find_reductions(name: str, body: Stmt) -> list[Reduction]:
    """The reductions in `body` over the loop variable `name`, in order of appearance.

    Raises:
        CannotLower: a reduced element changes inside the loop, or is also accessed in another way.
    """
    scope = _Scope.of(body)
    varying = scope.varying_names(name)
    found: list[Reduction] = []
    for s in walk_stmts(body):
        if not isinstance(s, Store) or s.op is None or s.buffer.name in scope.allocated:
            continue
        if any(mentions(i, varying) or _has_load_from(i, scope.allocated) for i in s.indices):
            continue
        if any(mentions(i, scope.bound) for i in s.indices):
            raise CannotLower(f"{s.buffer.name} is reduced over {name} at an element that changes inside the loop")
        _add_store_to_reductions(found, s)
    for r in found:
        _require_untouched(r, found, body)
    return found


def _add_store_to_reductions(found: list[Reduction], s: Store) -> None:
    assert s.op is not None
    for n, r in enumerate(found):
        if r.buffer.name == s.buffer.name and r.op == s.op and r.indices == s.indices:
            found[n] = Reduction(r.buffer, r.indices, r.op, (*r.stores, s))
            return
    found.append(Reduction(s.buffer, s.indices, s.op, (s,)))


def _require_untouched(r: Reduction, found: list[Reduction], body: Stmt) -> None:
    """Refuse if `body` accesses the reduced buffer other than by reductions with the same operator."""
    name = r.buffer.name
    known = {id(s) for other in found if other.op == r.op for s in other.stores}
    for s in walk_stmts(body):
        if isinstance(s, Store) and s.buffer.name == name and id(s) not in known:
            raise CannotLower(f"{name} is both reduced and stored in a vector loop")
        for e in stmt_expressions(s):
            if any(isinstance(x, Load) and x.buffer.name == name for x in walk_expr(e)):
                raise CannotLower(f"{name} is both reduced and read in a vector loop")


def _has_load_from(e: Expr, names: set[str]) -> bool:
    return any(isinstance(x, Load) and x.buffer.name in names for x in walk_expr(e))


@dataclass(frozen=True, slots=True)
class _Scope:
    """The bindings in a loop body. bound: names of loops and lets. allocated: names of buffers."""

    bound: set[str]
    lets: tuple[Let, ...]
    allocated: set[str]

    @staticmethod
    def of(body: Stmt) -> _Scope:
        inside = list(walk_stmts(body))
        bound = {s.var for s in inside if isinstance(s, Loop)} | {s.name for s in inside if isinstance(s, Let)}
        lets = tuple(s for s in inside if isinstance(s, Let))
        return _Scope(bound, lets, {b.name for b in allocated_buffers(body)})

    def varying_names(self, name: str) -> set[str]:
        """`name` and the lets whose values depend on it, or on buffers allocated in the body."""
        names = {name}
        for let in self.lets:
            if mentions(let.value, names) or _has_load_from(let.value, self.allocated):
                names.add(let.name)
        return names


def unconditional_stores(s: Stmt, scope: BoundsContext) -> Iterator[Store]:
    """The stores that every execution of `s` runs: those under no condition and in no loop that may be empty."""
    match s:
        case Store():
            yield s
        case Block(body):
            for c in body:
                yield from unconditional_stores(c, scope)
        case Let(name, value, body):
            yield from unconditional_stores(body, scope.in_let(name, value))
        case Allocate(_, body):
            yield from unconditional_stores(body, scope)
        case Loop(kind=LoopKind.SERIAL | LoopKind.UNROLLED) if runs_at_least_once(s, scope):
            yield from unconditional_stores(s.body, scope.in_loop(s))
