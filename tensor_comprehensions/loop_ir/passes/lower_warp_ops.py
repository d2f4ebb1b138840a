"""Lower shuffles and asynchronous copies for devices without them, to shared memory, barriers and plain copies."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...machine import WARP_THREADS
from .. import build
from ..intrinsics import (
    BARRIER,
    COMMIT_ASYNC,
    COPY_ASYNC,
    COPY_ASYNC_ZERO,
    SHUFFLE_DOWN,
    SHUFFLE_XOR,
    WAIT_ASYNC,
    WARP_BARRIER,
)
from ..nodes import THREAD, Buffer, Expr, Invoke, Kernel, Launch, Load, Space, Stmt, Store, Type
from ..rewrite import map_stmt, walk_stmts


def emulate_shuffles(kernel: Kernel) -> Kernel:
    """`kernel` with shuffles as exchanges through shared memory, and asynchronous copies as plain ones.

    Raises CannotLower for a shuffle with a mask that is not a power of two.
    """
    if kernel.launch is None:
        return kernel
    launch = kernel.launch
    dtypes = dict.fromkeys(
        s.operands[0][0].type.dtype for s in walk_stmts(kernel.body) if isinstance(s, Invoke) and s.name in _SHUFFLES
    )
    buffers = {
        t: Buffer(internal_name("exchange", t.name), Type(t), (prod(launch.block),), (1,), Space.SHARED) for t in dtypes
    }

    def on_stmt(s: Stmt) -> Stmt:
        if isinstance(s, Invoke):
            if s.name in _SHUFFLES:
                return _lower_shuffle(s, buffers[s.operands[0][0].type.dtype], launch)
            if s.name in _COPIES:
                return _lower_copy(s)
            if s.name in (COMMIT_ASYNC, WAIT_ASYNC):
                return build.NOTHING
            return Invoke(BARRIER, (), origin=s.origin) if s.name == WARP_BARRIER else s
        return map_stmt(s, lambda e: e, on_stmt)

    return replace(kernel, body=build.allocate(list(buffers.values()), on_stmt(kernel.body)))


def scalarize_async_copies(kernel: Kernel) -> Kernel:
    """`kernel` with asynchronous copies split into copies of one element, or plain ones if elements have below 4 bytes.

    For arguments that may be unaligned: copies of several elements need aligned addresses.
    """

    def on_stmt(s: Stmt) -> Stmt:
        if not isinstance(s, Invoke) or s.name not in _COPIES:
            return map_stmt(s, lambda e: e, on_stmt)
        size = s.operands[0][0].type.dtype.size
        if s.attributes[0] == size:
            return s
        parts = _lower_copy(s)
        return map_stmt(parts, lambda e: e, lambda c: _start_copy(c, size, s)) if size >= _LEAST_BYTES else parts

    return replace(kernel, body=on_stmt(kernel.body))


_LEAST_BYTES = 4


def _start_copy(s: Stmt, size: int, whole: Invoke) -> Stmt:
    assert isinstance(s, Store)
    assert isinstance(s.value, Load)
    return Invoke(
        whole.name, ((s.buffer, s.indices), (s.value.buffer, s.value.indices)), (size,), whole.values, whole.origin
    )


_SHUFFLES = (SHUFFLE_XOR, SHUFFLE_DOWN)
_COPIES = (COPY_ASYNC, COPY_ASYNC_ZERO)


def _lower_shuffle(s: Invoke, exchange: Buffer, launch: Launch) -> Stmt:
    (target, to), (source, where) = s.operands
    offset, width = s.attributes
    step = 1
    own: Expr = build.const(0)
    for name, extent in zip(THREAD, launch.block, strict=True):
        own = build.add(own, build.mul(build.var(name), step)) if extent > 1 else own
        step *= extent
    lane = build.mod(own, WARP_THREADS)
    if s.name == SHUFFLE_DOWN:
        other = build.select(build.lt(build.add(build.mod(lane, width), offset), width), build.add(own, offset), own)
    elif offset & (offset - 1):
        raise CannotLower(f"a shuffle by the mask {offset} has no spelling without warps")
    elif offset >= width:
        other = own
    else:
        even = build.eq(build.mod(build.div(lane, offset), 2), 0)
        other = build.select(even, build.add(own, offset), build.sub(own, offset))
    barrier = Invoke(BARRIER, (), origin=s.origin)
    put = Store(exchange, (own,), Load(source, where), origin=s.origin)
    return build.block(put, barrier, Store(target, to, Load(exchange, (other,)), origin=s.origin), barrier)


def _lower_copy(s: Invoke) -> Stmt:
    (target, to), (source, where) = s.operands
    count = s.attributes[0] // target.type.dtype.size
    inside = s.values[0] if s.values else None
    return build.block(
        *[
            Store(
                target,
                (*to[:-1], build.add(to[-1], n)),
                Load(source, (*where[:-1], build.add(where[-1], n)), inside),
                origin=s.origin,
            )
            for n in range(count)
        ]
    )
