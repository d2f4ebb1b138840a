"""An interpreter of statements that moves tags instead of values, to verify decompositions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ...core.errors import InternalError
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import ATOMS, MATMUL, WARP, WARPGROUP, Atom
from ...loop_ir.instructions import TF32_BITS
from ...loop_ir.intrinsics import (
    BARRIER_PART,
    BULK_COMMIT,
    BULK_WAIT,
    COPY_ASYNC,
    COPY_ASYNC_ZERO,
    FENCE_ASYNC,
    INTRINSICS,
    TMA_LOADS,
    TMA_MULTICASTS,
    TMA_STORES,
    WGMMA_COMMIT,
    WGMMA_FENCE,
)
from ..builder.tile_views import enumerate_tv
from ..lower.warpgroup_products import WARPGROUP_INDEX
from .shared_accesses import evaluate_index

Tags = np.ndarray[Any, Any]
UNTOUCHED = -1
PRIVATE = (ir.Space.REGISTER, ir.Space.SCRATCH)
HIGH = 32
"""The bit position of the second tag in a register that holds two."""
LOW = (1 << HIGH) - 1
_QUARTER = 16
"""The bits of each tag in a register that holds four."""
_LEAST = (1 << _QUARTER) - 1
ORDERING = (BARRIER_PART, BULK_COMMIT, BULK_WAIT, FENCE_ASYNC, WGMMA_COMMIT, WGMMA_FENCE)
"""Intrinsics that move no data."""
_LOADS = (*TMA_LOADS, *TMA_MULTICASTS)


@dataclass(frozen=True, slots=True)
class TagProduct:
    """The tags of the operands of a product instruction, as matrices. more: whether it adds to the sums."""

    sums: Tags
    left: Tags
    right: Tags
    more: bool


@dataclass(slots=True)
class TagMachine:
    """Threads of a block, executed in lockstep, with tags in memory and registers.

    Attributes:
        first, threads: the first thread, and the number of threads.
        values: the values of variables, in each thread. maps: the tensor maps of the program.
        memory: the tags in each buffer, by name. products: the executed products, for the check.
    """

    first: int
    threads: int
    values: dict[str, Any]
    maps: tuple[ir.TensorMap, ...] = ()
    memory: dict[str, Tags] = field(default_factory=dict)
    products: list[TagProduct] = field(default_factory=list)

    @staticmethod
    def of(threads: tuple[int, int], values: Mapping[str, Any], maps: tuple[ir.TensorMap, ...] = ()) -> TagMachine:
        """The machine of `threads`, given as (first, count)."""
        numbers = threads[0] + np.arange(threads[1])
        known = {**values, ir.THREAD[0]: numbers, WARPGROUP_INDEX: numbers // WARPGROUP}
        return TagMachine(*threads, known, maps)

    def tags(self, buffer: ir.Buffer) -> Tags:
        """The tags in a buffer, with a row per thread if it is private."""
        if buffer.name not in self.memory:
            sizes = (self.threads, buffer.span) if buffer.space in PRIVATE else (buffer.span,)
            self.memory[buffer.name] = np.full(sizes, UNTOUCHED, np.int64)
        return self.memory[buffer.name]

    def run(self, s: ir.Stmt, active: Tags) -> None:
        """Execute a statement in the `active` threads."""
        match s:
            case ir.Block(body):
                for one in body:
                    self.run(one, active)
            case ir.If(condition, then, otherwise):
                holds = np.broadcast_to(evaluate_index(condition, self.values), active.shape)
                self.run(then, active & holds)
                if otherwise is not None:
                    self.run(otherwise, active & ~holds)
            case ir.Allocate(_, body):
                self.run(body, active)
            case ir.Store(buffer, indices, value):
                self._write(buffer, self._places(buffer, indices), self._tag(value), active)
            case ir.Invoke(name) if name in (COPY_ASYNC, COPY_ASYNC_ZERO):
                self._copy(s, active)
            case ir.Invoke(name) if name in _LOADS or name in TMA_STORES:
                for thread in np.flatnonzero(active)[: 1 if name in _LOADS else None]:
                    self._box(s, int(thread))
            case ir.Invoke(name) if name in ORDERING:
                pass
            case ir.Invoke(name) if name in INTRINSICS and INTRINSICS[name].atom:
                self._atom(s, ATOMS[INTRINSICS[name].atom])
            case _:
                raise InternalError(f"no tags are known of {type(s).__name__}")

    def _places(self, buffer: ir.Buffer, indices: Sequence[ir.Expr]) -> Tags:
        """The offset of an element for each thread (rows) and vector lane (columns)."""
        total = np.zeros((self.threads, 1), np.int64)
        for index, stride in zip(indices, buffer.strides, strict=True):
            base, step, lanes = (index.base, index.stride, index.lanes) if isinstance(index, ir.Ramp) else (index, 0, 1)
            first = np.broadcast_to(evaluate_index(base, self.values), (self.threads,))
            total = total + (first[:, None] + step * np.arange(lanes)) * stride
        return total

    def _read(self, buffer: ir.Buffer, places: Tags) -> Tags:
        held = self.tags(buffer)
        inside = np.clip(places, 0, held.shape[-1] - 1)
        rows = np.arange(self.threads)[:, None]
        found = held[rows, inside] if buffer.space in PRIVATE else held[inside]
        return np.where(inside == places, found, UNTOUCHED)

    def _write(self, buffer: ir.Buffer, places: Tags, tags: Tags, active: Tags) -> None:
        held, tags = self.tags(buffer), np.broadcast_to(tags, places.shape)
        at = places[active]
        if at.size and (at.min() < 0 or at.max() >= held.shape[-1]):
            raise InternalError(f"a thread writes beyond {buffer.name}")
        if buffer.space in PRIVATE:
            held[np.flatnonzero(active)[:, None], at] = tags[active]
        else:
            held[at] = tags[active]

    def _tag(self, e: ir.Expr) -> Tags:
        match e:
            case ir.Load(buffer, indices, mask):
                found = self._read(buffer, self._places(buffer, indices))
                if mask is None:
                    return found
                holds = np.broadcast_to(evaluate_index(mask, self.values), (self.threads,))
                return np.where(holds[:, None], found, 0)
            case ir.Cast(operand):
                return self._tag(operand)
            case ir.Const():
                return np.zeros((1, 1), np.int64)
            case ir.Call(name, (low, high)) if name.startswith("pair_"):
                pair: Tags = self._tag(low) | self._tag(high) << HIGH
                return pair
            case ir.Call(name, (word,)) if name == TF32_BITS:
                return self._tag(word)
            case ir.Call(name, (word,)) if name.startswith(("low_", "high_")):
                half: Tags = self._tag(word) >> (HIGH if name.startswith("high_") else 0) & LOW
                return half
        raise InternalError(f"no tags are known of {type(e).__name__}")

    def _copy(self, s: ir.Invoke, active: Tags) -> None:
        (to, there), (source, here) = s.operands
        count = s.attributes[0] // source.type.dtype.size
        vector = [(*at[:-1], build.ramp(at[-1], 1, count)) for at in (there, here)]
        tags = self._read(source, self._places(source, vector[1]))
        if s.values:
            holds = np.broadcast_to(evaluate_index(s.values[0], self.values), active.shape)
            tags = np.where(holds[:, None], tags, 0)
        self._write(to, self._places(to, vector[0]), tags, active)

    def _box(self, s: ir.Invoke, thread: int) -> None:
        """Copy a box from a tensor, with zeros for out-of-bounds elements, or to it."""
        loads = s.name in _LOADS
        (memory, there), (tensor, here) = s.operands[:2] if loads else s.operands[1::-1]
        m = self.maps[s.attributes[0]]
        box = m.box
        at = [int(np.broadcast_to(evaluate_index(i, self.values), (self.threads,))[thread]) for i in here]
        sides = [first + np.arange(n) for first, n in zip(at, box, strict=True)]
        places = np.meshgrid(*sides, indexing="ij")
        inside = np.logical_and.reduce([(p >= 0) & (p < n) for p, n in zip(places, m.shape, strict=True)])
        offsets = np.where(inside, sum(p * n for p, n in zip(places, m.strides, strict=True)), 0)
        matrix = (prod(box[:-1]), box[-1])
        own = self._matrix_places(memory, there, thread, matrix, across=False)
        source, target = self.tags(tensor), self.tags(memory)
        if loads:
            target[own] = np.where(inside, source[offsets], 0).reshape(matrix)
        else:
            source[offsets[inside]] = target[own].reshape(box)[inside]

    def _matrix_places(
        self, b: ir.Buffer, where: Sequence[ir.Expr], thread: int, sizes: tuple[int, int], *, across: bool
    ) -> Tags:
        """The offsets of a matrix in the last two dimensions; across: its rows extend along the last one."""
        first = int(self._places(b, where)[thread, 0])
        row, column = b.strides[-2:] if not across else b.strides[:-3:-1]
        found: Tags = first + row * np.arange(sizes[0])[:, None] + column * np.arange(sizes[1])
        if found.max() >= b.span:
            raise InternalError(f"an instruction reads beyond {b.name}")
        return found

    def _atom(self, s: ir.Invoke, atom: Atom) -> None:
        if atom.kind == MATMUL:
            self._multiply(s, atom)
            return
        (to, there), (source, here) = s.operands
        into, out = (o.layout for o in (atom.operands if to.space is ir.Space.SHARED else atom.operands[::-1]))
        assert out is not None
        assert into is not None
        rows, lanes = enumerate_tv(into), enumerate_tv(out)
        memory, at = (to, there) if to.space is ir.Space.SHARED else (source, here)
        size = memory.type.dtype.size
        pointed = self._places(memory, (*at[:-1], build.ramp(at[-1], 1, 2 * rows.shape[1] // size)))
        for warp in range(0, self.threads, WARP):
            mine = slice(warp, warp + WARP)
            held = np.zeros(rows.max() + 1, np.int64)
            if to.space is ir.Space.SHARED:
                first = int(self._places(source, here)[warp, 0])
                words = self.tags(source)[mine, first : first + lanes.shape[1] // 2]
                held[lanes] = np.stack([words & LOW, words >> HIGH], axis=2).reshape(lanes.shape)
                self.tags(to)[pointed[mine]] = held[rows]
                continue
            first = int(self._places(to, there)[warp, 0])
            found = self._read(source, pointed)[mine]
            held[rows[::-1]] = _to_halfwords(found, size)[::-1]
            pairs = held[lanes][:, 0::2] | held[lanes][:, 1::2] << HIGH
            if size == 1 and (pairs >> 63).any():
                raise InternalError(f"the tile {source.name} has too many elements to be checked")
            self.tags(to)[mine, first : first + pairs.shape[1]] = pairs

    def _multiply(self, s: ir.Invoke, atom: Atom) -> None:
        known = INTRINSICS[s.name]
        more = not s.values or bool(evaluate_index(s.values[0], self.values))
        held = {
            n: self._fragment(view, o.values, 32 // o.dtype.bits)
            for n, (view, o) in enumerate(zip(s.operands, atom.operands, strict=True)) if n not in known.described
        }  # fmt: skip
        for first in range(0, self.threads, atom.group):
            found = []
            for n, ((buffer, where), o) in enumerate(zip(s.operands, atom.operands, strict=True)):
                if n in held:
                    found.append(matrix_of(held[n][first : first + atom.group], o.layout, o.rows, o.columns))
                    continue
                sizes = (o.rows, o.columns)
                places = self._matrix_places(buffer, where, first, sizes, across=n in known.across)
                found.append(self.tags(buffer)[places])
            self.products.append(TagProduct(found[0], found[1], found[2], more))

    def _fragment(self, view: tuple[ir.Buffer, tuple[ir.Expr, ...]], count: int, pack: int) -> Tags:
        """The tags of `count` values of each thread, from a register on; each register holds `pack` values."""
        buffer, where = view
        first, held = int(self._places(buffer, where)[0, 0]), self.tags(buffer)
        if buffer.type.dtype.name != "uint32" or pack == 1:
            sums: Tags = held[:, first : first + count].copy()
            return sums
        if pack == 4:
            words = held[:, first : first + count // 4]
            parts = [words >> (_QUARTER * n) & _LEAST for n in range(4)]
            return np.stack(parts, axis=2).reshape(self.threads, count)
        words = held[:, first : first + count // 2]
        return np.stack([words & LOW, words >> HIGH], axis=2).reshape(self.threads, count)


def _to_halfwords(tags: Tags, size: int) -> Tags:
    """Convert tags of elements of `size` bytes to units of 16 bits: pack two bytes, or add a zero to 32 bits."""
    if size == 1:
        two: Tags = tags[:, 0::2] | tags[:, 1::2] << _QUARTER
        return two
    return tags if size == 2 else np.stack([tags, np.zeros_like(tags)], axis=2).reshape(len(tags), -1)


def matrix_of(tags: Tags, layout: Any, rows: int, columns: int) -> Tags:
    """The matrix of an instruction, from tags by lane and value."""
    flat = np.zeros(rows * columns, np.int64)
    flat[enumerate_tv(layout)] = tags
    matrix: Tags = flat.reshape(columns, rows).T
    return matrix
