"""Double buffering: the next tile loads into shared memory while threads compute with the current one.

A loop over tiles that copies, waits and computes is changed to start the copies of the next iteration into the other
half of each buffer. One barrier per iteration remains: after it, the tile has arrived, and all threads have finished
the previous one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ....loop_ir import build, linear_forms
from ....loop_ir.intrinsics import BARRIER, COMMIT_ASYNC, COPY_ASYNC, WAIT_ASYNC
from ....loop_ir.nodes import Block, Buffer, Expr, If, Invoke, Load, Loop, LoopKind, Ramp, Space, Stmt, Store, Var
from ....loop_ir.rewrite import map_expr, map_stmt, substitute_stmt, walk_expr, walk_stmts
from ....machine import GPU_ASYNC_COPY_BYTES
from ..promote.promote_shared import shared_bytes_of


@dataclass(frozen=True, slots=True)
class LoopStage:
    """The parts of a loop body: the statements that fill `buffers`, and those that use them."""

    fill: tuple[Stmt, ...]
    use: tuple[Stmt, ...]
    buffers: tuple[Buffer, ...]


def double_buffer(
    body: Stmt, buffers: Sequence[Buffer], room: int, parameters: Collection[str] = ()
) -> tuple[Stmt, tuple[Buffer, ...]]:
    """`body` with its loops over staged tiles pipelined, and `buffers` with those of the tiles doubled.

    room: the remaining bytes of shared memory. parameters: the variables that a call gives; loops up to them may run
    not at all. Nothing changes if several loops fill one buffer.
    """
    doubled: dict[str, Buffer] = {}
    again = False

    def on_stmt(s: Stmt) -> Stmt:
        nonlocal again, room
        stage = _match_loop_stage(s) if isinstance(s, Loop) else None
        if not isinstance(s, Loop) or stage is None:
            return map_stmt(s, lambda e: e, on_stmt)
        again |= any(b.name in doubled for b in stage.buffers)
        more = sum(shared_bytes_of(_double_extent(b)) - shared_bytes_of(b) for b in stage.buffers)
        if again or more > room:
            return s
        room -= more
        doubled.update({b.name: _double_extent(b) for b in stage.buffers})
        pipelined = _pipeline_loop(s, stage, doubled)
        if any(isinstance(e, Var) and e.name in parameters for e in walk_expr(s.stop)):
            return build.when(build.lt(s.start, s.stop), pipelined)
        return pipelined

    new = on_stmt(body)
    if again or not doubled:
        return body, tuple(buffers)
    return new, tuple(doubled.get(b.name, b) for b in buffers)


def _match_loop_stage(loop: Loop) -> LoopStage | None:
    """The parts of a loop body of the form: barrier, copies from global to shared memory, barrier, rest; else None."""
    trips = linear_forms.difference(loop.stop, loop.start)
    if (
        loop.kind is not LoopKind.SERIAL
        or not isinstance(loop.body, Block)
        or (trips is not None and trips <= loop.step)
    ):
        return None
    parts = loop.body.body
    barriers = [k for k, s in enumerate(parts) if isinstance(s, Invoke) and s.name == BARRIER]
    if len(barriers) < 2 or barriers[0] != 0:
        return None
    fill, use = parts[1 : barriers[1]], parts[barriers[1] + 1 :]
    stores = [s for f in fill for s in walk_stmts(f) if isinstance(s, Store)]
    written = {s.buffer.name for s in stores}
    sound = all(_is_copy(s) for s in stores) and not any(isinstance(s, Invoke) for f in fill for s in walk_stmts(f))
    if not stores or not sound or any(_is_store_to(s, written) for u in use for s in walk_stmts(u)):
        return None
    sources = {s.value.buffer.name for s in stores if isinstance(s.value, Load)}
    if any(isinstance(s, Store) and s.buffer.name in sources for u in use for s in walk_stmts(u)):
        return None
    return LoopStage(fill, use, tuple({s.buffer.name: s.buffer for s in stores}.values()))


def _is_copy(s: Store) -> bool:
    plain = s.op is None and s.mask is None and isinstance(s.value, Load) and s.value.mask is None
    return plain and s.buffer.space is Space.SHARED and s.value.buffer.space is Space.GLOBAL  # type: ignore[union-attr]


def _is_store_to(s: Stmt, names: Iterable[str]) -> bool:
    """Whether `s` is a store to a buffer in `names`."""
    return isinstance(s, Store) and s.buffer.name in names


def _double_extent(b: Buffer) -> Buffer:
    half = b.shape[0] * b.strides[0] if b.shape else 1
    half += -half % (16 // b.type.dtype.size)  # vectors stay aligned
    return replace(b, shape=(2, *b.shape), strides=(half, *b.strides))


def _pipeline_loop(loop: Loop, stage: LoopStage, doubled: dict[str, Buffer]) -> Stmt:
    here = build.var(loop.var)
    after = build.add(here, loop.step)
    turn = build.div(build.sub(here, loop.start), loop.step)

    def fill_half(position: Expr, half: Expr) -> list[Stmt]:
        copies = [substitute_stmt(f, {loop.var: position}) for f in stage.fill]
        return [*(_start_async_copy(_in_half(c, doubled, half)) for c in copies), Invoke(COMMIT_ASYNC, ())]

    ahead = build.when(build.lt(after, loop.stop), build.block(*fill_half(after, build.mod(build.add(turn, 1), 2))))
    uses = [_in_half(u, doubled, build.mod(turn, 2)) for u in stage.use]
    body = build.block(Invoke(WAIT_ASYNC, (), (0,)), Invoke(BARRIER, ()), ahead, *uses)
    first = build.block(Invoke(BARRIER, ()), *fill_half(loop.start, build.const(0)))
    return build.block(first, replace(loop, body=body))


def _in_half(s: Stmt, doubled: dict[str, Buffer], half: Expr) -> Stmt:
    """`s` with every access to the doubled buffers redirected to the half `half`."""

    def on_expr(e: Expr) -> Expr:
        e = map_expr(e, on_expr)
        new = doubled.get(e.buffer.name) if isinstance(e, Load) else None
        return e if new is None or not isinstance(e, Load) else Load(new, (half, *e.indices), e.mask)

    def on_stmt(c: Stmt) -> Stmt:
        c = map_stmt(c, on_expr, on_stmt)
        if isinstance(c, Store) and c.buffer.name in doubled:
            return replace(c, buffer=doubled[c.buffer.name], indices=(half, *c.indices))
        return c

    return on_stmt(s)


def _start_async_copy(s: Stmt) -> Stmt:
    """`s` with copies of 4, 8 or 16 bytes at once made asynchronous."""
    match s:
        case Store(buffer, indices, Load(source, places)):
            last = indices[-1]
            lanes = last.lanes if isinstance(last, Ramp) else 1
            size = lanes * buffer.type.dtype.size
            if size not in GPU_ASYNC_COPY_BYTES:
                return s
            views = ((buffer, _first_element(indices)), (source, _first_element(places)))
            return Invoke(COPY_ASYNC, views, (size,))
        case Loop() | If() | Block():
            return map_stmt(s, lambda e: e, _start_async_copy)
    return s


def _first_element(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
    last = indices[-1]
    return (*indices[:-1], last.base) if isinstance(last, Ramp) else indices
