"""Promotion to registers: what a block reads along the wrong dimension is copied into vectors along the right one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..loop_ir import affine
from ..loop_ir.nodes import Buffer, Expr, Load, Space, Store, Var
from ..loop_ir.rewrite import mentions, walk_expr
from ..target import Target
from .locality import INTERLEAVED

# Lanes beyond these need more registers for a square block than there are.
LARGEST_SIDE = 16


def promotable(stores: Sequence[Store], row: str, lane: str) -> tuple[Load, ...]:
    """The reads of scalar `stores` that are contiguous along `row` but far apart along `lane`; () where none may move.

    They may move to before the stores because those write other buffers. The stores must be contiguous along `lane`.
    """
    memory = [s for s in stores if s.buffer.space is not Space.REGISTER]
    if any(_step(s.buffer, s.indices, lane) != 1 or s.mask is not None for s in memory):
        return ()
    written = {s.buffer.name for s in stores}
    found = (e for s in stores for e in _loads(s) if e.buffer.name not in written and e.mask is None)
    return tuple(dict.fromkeys(e for e in found if _is_turned(e, row, lane)))


def side(stores: Sequence[Store], reads: Sequence[Load], extents: Sequence[int], target: Target) -> int:
    """Rows and columns of the square blocks in which `reads` are transposed for `stores`."""
    bits = max(b.type.dtype.bits for b in (*(s.buffer for s in stores), *(r.buffer for r in reads)))
    most = min(LARGEST_SIDE, target.lanes(max(bits, 8)))
    return max(2, min(most, 1 << (min(extents) - 1).bit_length()))


def _loads(s: Store) -> Iterator[Load]:
    for root in (s.value, *s.indices):
        yield from (e for e in walk_expr(root) if isinstance(e, Load))


def _is_turned(e: Load, row: str, lane: str) -> bool:
    along = _step(e.buffer, e.indices, lane)
    return along is not None and abs(along) > INTERLEAVED and _step(e.buffer, e.indices, row) == 1


def _step(buffer: Buffer, indices: tuple[Expr, ...], name: str) -> int | None:
    """Elements between `buffer[indices]` at consecutive values of the variable `name`; None where that varies."""
    total = 0
    for index, stride in zip(indices, buffer.strides, strict=True):
        for atom, c in affine.linear(index)[0].items():
            if isinstance(atom, Var) and atom.name == name:
                total += c * stride
            elif mentions(atom, {name}):
                return None
    return total
