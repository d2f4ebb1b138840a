"""Hardware constraints on operands of TMA copies and `wgmma`; each check returns the reason for a refusal, or None."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..core.dtypes import FLOAT32
from ..core.memory_layout import contiguous_strides
from .atoms import ATOMS, WARPGROUP
from .intrinsics import IN_CLUSTER, TMA_LOADS, TMA_MULTICASTS, TMA_RANKS, TMA_STORES, Intrinsic
from .matrix_descriptor import matrix_placement, row_bytes_of, swizzle_of
from .nodes import Buffer, Invoke, Launch, Space, TensorMap

MOST_CLUSTER = 8
"""The largest cluster, in blocks, that every device supports."""
_MOST = 256
"""The largest extent of a TMA box along a dimension, in elements."""
_UNIT = 16
"""Strides of the tensor and rows of a box are multiples of this many bytes."""
_MOST_EXTENT, _MOST_STRIDE = 2**31, 2**40
"""The largest extent of a dimension in elements (coordinates are int32), and an exclusive limit of strides in bytes."""


def tensor_map_fault(m: TensorMap, buffers: Sequence[Buffer]) -> str | None:
    """Why the hardware does not support the tensor map `m`, or None."""
    size = m.buffer.type.dtype.size
    row, strides = m.box[-1] * size, m.strides
    if m.buffer not in buffers:
        return f"{m.buffer.name} is no argument or temporary"
    if len(m.box) != len(m.shape) or len(m.box) not in TMA_RANKS:
        return f"its box has {len(m.box)} dimensions"
    if not all(1 <= n <= _MOST for n in m.box):
        return f"the box {m.box} has sides beyond {_MOST}"
    if row % _UNIT:
        return f"the box {m.box} has rows of {row} bytes, no multiple of {_UNIT}"
    if m.rounds and m.buffer.type.dtype != FLOAT32:
        return f"{m.buffer.type.dtype.name} is not rounded to tf32"
    if m.swizzle not in (0, 32, 64, 128):
        return f"there is no swizzle of {m.swizzle} bytes"
    if m.swizzle and row > m.swizzle:
        return "its rows are longer than its swizzle"
    if m.buffer.dynamic or strides[-1] != 1 or any(s * size % _UNIT for s in strides[:-1]):
        return f"the strides of {m.buffer.name} are no multiples of {_UNIT} bytes"
    if max(m.shape) > _MOST_EXTENT or max(strides) * size >= _MOST_STRIDE:
        return f"the dimensions {m.shape} of {m.buffer.name} are too large for a tensor map"
    if sum((n - 1) * s for n, s in zip(m.shape, strides, strict=True)) >= m.buffer.span or min(strides) < 1:
        return f"its dimensions are not in {m.buffer.name}"
    return None


def box_in_memory(m: TensorMap, memory: Buffer) -> tuple[int, ...] | None:
    """The extents of the box of `m` in the last dimensions of `memory`, as it is or with its rows in one dimension.

    None if these dimensions cannot hold it.
    """
    sides = tuple(n for n in m.box[:-1] if n > 1)
    for box in ((*sides, m.box[-1]), (prod(sides), m.box[-1])):
        parts, strides = memory.shape[-len(box) :], memory.strides[-len(box) :]
        fits = len(parts) == len(box) and box[1:] == parts[1:] and box[0] <= parts[0]
        if fits and strides == contiguous_strides(box):
            return box
    return None


def box_fault(s: Invoke, mapped: int, maps: Sequence[TensorMap]) -> str | None:
    """Why a TMA copy `s` does not match its tensor map: its buffers, rank, box or swizzle. None if it does.

    mapped: the operand in the tensor; the other one is in shared memory.
    """
    (tensor, _), (memory, _), number = s.operands[mapped], s.operands[1 - mapped], s.attributes[0]
    if not 0 <= number < len(maps):
        return f"there is no tensor map {number}"
    m = maps[number]
    if m.buffer != tensor:
        return f"the tensor map {m.name} is of {m.buffer.name}, not of {tensor.name}"
    if (TMA_LOADS | TMA_MULTICASTS | TMA_STORES)[s.name] != len(m.box):
        return f"{s.name} of a box of {len(m.box)} dimensions"
    if memory.space is not Space.SHARED or memory.type != tensor.type:
        return f"{s.name} takes {tensor.type} in shared memory, not {memory.name}"
    if len(s.operands[mapped][1]) != len(m.box):
        return f"{s.name} begins at {len(s.operands[mapped][1])} coordinates"
    box = box_in_memory(m, memory)
    if box is None:
        return f"{memory.name}{list(memory.shape)} holds no box {m.box}"
    wanted = swizzle_of(m.swizzle, tensor.type.dtype.size) if m.swizzle else None
    if memory.swizzle != wanted or (m.swizzle and box[-1] * tensor.type.dtype.size != m.swizzle):
        return f"{memory.name} is not swizzled as the tensor map {m.name}"
    return None


def cluster_size_fault(launch: Launch) -> str | None:
    """Why the hardware does not support the clusters of `launch`, or None."""
    if not 1 <= launch.cluster <= MOST_CLUSTER:
        return f"a cluster of {launch.cluster} blocks"
    if launch.grid[0] % launch.cluster:
        return f"{launch.grid[0]} blocks along x, in clusters of {launch.cluster}"
    if launch.cluster > 1 and prod(launch.block) % WARPGROUP:
        return f"{prod(launch.block)} threads in each block of a cluster, no whole warpgroups"
    return None


def in_cluster_fault(s: Invoke, cluster: int) -> str | None:
    """Why `s`, if it involves several blocks of a cluster, cannot run in clusters of this size, or None."""
    if s.name not in IN_CLUSTER:
        return None
    if cluster == 1:
        return f"{s.name} in a kernel without clusters"
    if s.name in TMA_MULTICASTS and not 0 < s.attributes[1] < 1 << cluster:
        return f"{s.name} to the blocks {s.attributes[1]:b} of {cluster}"
    return None


def described_fault(s: Invoke, number: int, known: Intrinsic) -> str | None:
    """Why no `wgmma` descriptor can address the matrix at operand `number`, or None."""
    memory, operand = s.operands[number][0], ATOMS[known.atom].operands[number]
    size = memory.type.dtype.size
    held = operand.dtype.bits == 8 * size and operand.dtype.is_float == memory.type.dtype.is_float
    if memory.space is not Space.SHARED or not held:
        return f"{s.name} takes no {memory.type} in {memory.space.value}"
    found = matrix_placement(memory, across=number in known.across)
    if isinstance(found, str):
        return f"no descriptor leads to {memory.name}: {found}"
    rows, columns, width = operand.rows, operand.columns, row_bytes_of(memory) // size
    if number in known.across:
        parts = memory.shape[-3] if len(memory.shape) > 2 else 1
        fits = columns <= memory.shape[-2] and rows <= width * (parts if rows > width else 1)
    else:
        fits = rows <= memory.shape[-2] and columns <= width
    return None if fits else f"{memory.name}{list(memory.shape)} holds no {rows} x {columns}"
