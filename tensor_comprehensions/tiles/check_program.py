"""Proofs of decompositions, by running them on tags instead of numbers.

A body of a move must put the tag of every element where the spec says, and nothing anywhere else. A body of a product
must meet every (m, n, k) once, with one k in both factors. Both hold for the sizes of the program, and are checked at
the first and at the last numbers of blocks and loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import InternalError
from ..layouts.layout import flatten_tuple
from ..loop_ir import build
from ..loop_ir import nodes as ir
from ..loop_ir.atoms import ATOMS, MATMUL, WARP, Atom
from ..loop_ir.intrinsics import COPY_ASYNC, COPY_ASYNC_ZERO
from . import specs
from .shared_accesses import evaluate_index
from .tile_views import MemoryView, Operand, RegisterFragment, enumerate_tv

Tags = np.ndarray[Any, Any]
UNTOUCHED = -1
_PRIVATE = (ir.Space.REGISTER, ir.Space.SCRATCH)
_HIGH = 32
"""Bits below the second tag of a register that holds two."""
_LOW = (1 << _HIGH) - 1
_QUARTER = 16
"""Bits of a tag of a register that holds four."""
_LEAST = (1 << _QUARTER) - 1


@dataclass(slots=True)
class TagMachine:
    """The threads of a block in step, with tags in memory and in registers; products are kept for the check."""

    threads: int
    values: dict[str, Any]
    memory: dict[str, Tags] = field(default_factory=dict)
    products: list[tuple[Atom, list[Tags]]] = field(default_factory=list)

    def tags(self, buffer: ir.Buffer) -> Tags:
        """The tags of a buffer, of every thread where each has its own."""
        if buffer.name not in self.memory:
            sizes = (self.threads, buffer.span) if buffer.space in _PRIVATE else (buffer.span,)
            self.memory[buffer.name] = np.full(sizes, UNTOUCHED, np.int64)
        return self.memory[buffer.name]

    def run(self, s: ir.Stmt, active: Tags) -> None:
        """Execute a statement in the threads that are active."""
        match s:
            case ir.Block(body):
                for one in body:
                    self.run(one, active)
            case ir.If(condition, then, otherwise):
                holds = np.broadcast_to(evaluate_index(condition, self.values), active.shape)
                self.run(then, active & holds)
                if otherwise is not None:
                    self.run(otherwise, active & ~holds)
            case ir.Store(buffer, indices, value):
                self._write(buffer, self._places(buffer, indices), self._tag(value), active)
            case ir.Invoke(name) if name in (COPY_ASYNC, COPY_ASYNC_ZERO):
                self._copy(s, active)
            case ir.Invoke(name) if name in ATOMS:
                self._atom(s, ATOMS[name])
            case _:
                raise InternalError(f"no tags are known of {type(s).__name__}")

    def _places(self, buffer: ir.Buffer, indices: Sequence[ir.Expr]) -> Tags:
        """The offset of each thread (rows) and lane of a vector (columns)."""
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
        found = held[rows, inside] if buffer.space in _PRIVATE else held[inside]
        return np.where(inside == places, found, UNTOUCHED)

    def _write(self, buffer: ir.Buffer, places: Tags, tags: Tags, active: Tags) -> None:
        held, tags = self.tags(buffer), np.broadcast_to(tags, places.shape)
        at = places[active]
        if at.size and (at.min() < 0 or at.max() >= held.shape[-1]):
            raise InternalError(f"a thread writes beyond {buffer.name}")
        if buffer.space in _PRIVATE:
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
                pair: Tags = self._tag(low) | self._tag(high) << _HIGH
                return pair
            case ir.Call(name, (word,)) if name.startswith(("low_", "high_")):
                half: Tags = self._tag(word) >> (_HIGH if name.startswith("high_") else 0) & _LOW
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

    def _atom(self, s: ir.Invoke, atom: Atom) -> None:
        if atom.kind == MATMUL:
            views = zip(s.operands, atom.operands, strict=True)
            self.products.append((atom, [self._fragment(view, o.values, 32 // o.dtype.bits) for view, o in views]))
            return
        (to, there), (source, here) = s.operands
        out, into = (o.layout for o in atom.operands)
        assert out is not None
        assert into is not None
        rows, lanes = enumerate_tv(into), enumerate_tv(out)
        pack = 2 // source.type.dtype.size  # elements of 16 bits
        row = build.ramp(here[-1], 1, rows.shape[1] * pack)
        pointed = self._read(source, self._places(source, (*here[:-1], row)))
        if pack == 2:
            pointed = _pack_bytes(pointed)
        first = int(self._places(to, there)[0, 0])
        for warp in range(0, self.threads, WARP):
            held = np.zeros(rows.max() + 1, np.int64)
            held[rows[::-1]] = pointed[warp : warp + WARP][::-1]
            mine = held[lanes]
            pairs = mine[:, 0::2] | mine[:, 1::2] << _HIGH
            if pack == 2 and (pairs >> 63).any():
                raise InternalError(f"the tile {source.name} has too many elements to be checked")
            self.tags(to)[warp : warp + WARP, first : first + pairs.shape[1]] = pairs

    def _fragment(self, view: tuple[ir.Buffer, tuple[ir.Expr, ...]], count: int, pack: int) -> Tags:
        """The tags of `count` values of each thread from a register on, each of which holds `pack`."""
        buffer, where = view
        first, held = int(self._places(buffer, where)[0, 0]), self.tags(buffer)
        if buffer.type.dtype.name != "uint32":
            sums: Tags = held[:, first : first + count].copy()
            return sums
        if pack == 4:
            words = held[:, first : first + count // 4]
            parts = [words >> (_QUARTER * n) & _LEAST for n in range(4)]
            return np.stack(parts, axis=2).reshape(self.threads, count)
        words = held[:, first : first + count // 2]
        return np.stack([words & _LOW, words >> _HIGH], axis=2).reshape(self.threads, count)


def _pack_bytes(tags: Tags) -> Tags:
    """Two tags of bytes as one of 16 bits."""
    two: Tags = tags[:, 0::2] | tags[:, 1::2] << _QUARTER
    return two


def check_program(program: specs.Program) -> int:
    """Prove the moves and products of a decomposed program; give how many bodies were checked.

    Raises:
        InternalError: a body does something else than its spec; with the element.
    """
    count = 0
    for last in (False, True):
        block = program.blocks - 1 if last else 0
        values: dict[str, Any] = {ir.BLOCK[0]: block, ir.THREAD[0]: np.arange(program.threads)}
        for name, e in program.names:
            values[name] = evaluate_index(e, values)
        for spec, inner in _specs(program.body, values, last=last):
            if isinstance(spec, specs.Move):
                _check_move(spec, TagMachine(program.threads, inner))
                count += 1
            elif isinstance(spec, specs.MatMul):
                _check_product(spec, TagMachine(program.threads, inner))
                count += 1
    return count


def _specs(
    body: Sequence[specs.Node], values: dict[str, Any], *, last: bool
) -> Iterator[tuple[specs.Spec, dict[str, Any]]]:
    for node in body:
        match node:
            case specs.Loop(var, stop, inner):
                yield from _specs(inner, {**values, var: stop - 1 if last else 0}, last=last)
            case specs.When(condition, inner):
                if evaluate_index(condition, values):
                    yield from _specs(inner, values, last=last)
            case specs.Spec():
                yield node, values


def _run(spec: specs.Spec, machine: TagMachine) -> None:
    active = np.ones(machine.threads, bool)
    for node in spec.body:
        if isinstance(node, specs.Leaf):
            machine.run(node.statement, active)
        elif isinstance(node, specs.Spec) and not isinstance(node, specs.Init):
            _run(node, machine)


def _check_move(spec: specs.Move, machine: TagMachine) -> None:
    (to,), (source,) = spec.outputs, spec.inputs
    sizes, text = _sizes(to, source), f"{to} <- Move({source})"
    groups = [x.group for x in (to, source) if isinstance(x, RegisterFragment) and x.group is not None]
    firsts = range(0, machine.threads, groups[0] if groups else machine.threads)
    wanted = [_place_tags(source, sizes, machine, first) for first in firsts]
    _run(spec, machine)
    count = 0
    for first, tags in zip(firsts, wanted, strict=True):
        if isinstance(to, RegisterFragment):
            rows, columns = to.row_and_column()
            mine = slice(first, first + firsts.step)
            got = _register_tags(to, machine)[mine]
            expected = np.tile(tags[rows, columns], (got.shape[0] // rows.shape[0], 1))
            if not np.array_equal(got, expected):
                thread, value = (int(n) for n in np.argwhere(got != expected)[0])
                raise InternalError(f"{text}: thread {first + thread}, value {value} holds another element")
            continue
        places, inside = _memory_places(to, sizes, machine.values, first)
        got = np.where(inside, machine.tags(to.buffer)[np.where(inside, places, 0)], tags)
        if not np.array_equal(got, tags):
            row, column = (int(n) for n in np.argwhere(got != tags)[0])
            raise InternalError(f"{text}: row {row}, column {column} holds another element")
        count += int(inside.sum())
    if isinstance(to, MemoryView) and (machine.tags(to.buffer) != UNTOUCHED).sum() != count:
        raise InternalError(f"{text}: it writes beyond its tile")


def _check_product(spec: specs.MatMul, machine: TagMachine) -> None:
    (total,), (a, b) = spec.outputs, spec.inputs
    assert isinstance(total, RegisterFragment)
    text = f"{total} <- MatMul({a}, {b})"
    depth = _matrix_sizes(a)[1]
    for x in (a, b):
        _place_tags(x, _matrix_sizes(x), machine)
    _place_tags(total, total.padded, machine)
    _run(spec, machine)
    met = np.zeros((*total.padded, depth), np.int64)
    for atom, tags in machine.products:
        for warp in range(0, machine.threads, WARP):
            sums, left, right = (
                _matrix(t[warp : warp + WARP] - 1, o.layout, o.rows, o.columns)
                for t, o in zip(tags, atom.operands, strict=True)
            )
            heights = (total.padded[0], _matrix_sizes(a)[0], _matrix_sizes(b)[0])
            (rows, columns), (m, k), (n, other) = (
                (x % height, x // height) for x, height in zip((sums, left, right), heights, strict=True)
            )
            if (rows != m[:, :1]).any() or (columns != n[:, 0][None, :]).any() or (m != m[:, :1]).any():
                raise InternalError(f"{text}: an instruction multiplies rows of other sums")
            if (k != k[:1]).any() or (other != k[0][None, :]).any():
                raise InternalError(f"{text}: an instruction multiplies elements of different k")
            np.add.at(met, (rows[:, :, None], columns[:, :, None], k[0][None, None, :]), 1)
    if (met != 1).any():
        m_, n_, k_ = (int(x) for x in np.argwhere(met != 1)[0])
        raise InternalError(f"{text}: (m, n, k) = ({m_}, {n_}, {k_}) is met {met[m_, n_, k_]} times")


def _matrix(tags: Tags, layout: Any, rows: int, columns: int) -> Tags:
    """Tags by lane and value as the matrix of an instruction."""
    flat = np.zeros(rows * columns, np.int64)
    flat[enumerate_tv(layout)] = tags
    matrix: Tags = flat.reshape(columns, rows).T
    return matrix


def _matrix_sizes(x: Operand) -> tuple[int, int]:
    if isinstance(x, RegisterFragment):
        return x.padded
    sizes = [int(np.prod(flatten_tuple(n))) for n in x.shape]
    rows, columns = [1, 1, *sizes][-2:]
    return rows, columns


def _sizes(to: Operand, source: Operand) -> tuple[int, int]:
    return _matrix_sizes(source) if isinstance(source, RegisterFragment) else _matrix_sizes(to)


def _place_tags(x: Operand, sizes: tuple[int, int], machine: TagMachine, thread: int = 0) -> Tags:
    """Put the tag `1 + row + column * rows` at every element; give the tags by row and column, 0 where none is.

    thread: whose part of memory it is, where groups of threads have one each.
    """
    rows, columns = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")
    tags = 1 + rows + columns * sizes[0]
    if isinstance(x, RegisterFragment):
        elements = np.tile(1 + x.elements, (machine.threads // x.elements.shape[0], 1))
        held = machine.tags(x.buffer)
        held[:, list(x.registers)] = UNTOUCHED
        for v in range(x.values):
            shift = _HIGH * (v % x.per_register)
            held[:, x.registers[v]] = np.where(held[:, x.registers[v]] == UNTOUCHED, 0, held[:, x.registers[v]]) | (
                elements[:, v] << shift
            )
        return tags
    places, inside = _memory_places(x, sizes, machine.values, thread)
    held = machine.tags(x.buffer)
    held[places[inside]] = tags[inside]
    return np.where(inside, held[np.where(inside, places, 0)], 0)  # elements of one place have one tag


def _memory_places(x: MemoryView, sizes: tuple[int, int], values: Mapping[str, Any], thread: int) -> tuple[Tags, Tags]:
    """The offset of every row and column, and whether that is an element."""
    one = x.matrix(*sizes).tensor[build.var("%row"), build.var("%column")]
    rows, columns = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")
    known = {**values, ir.THREAD[0]: thread, "%row": rows, "%column": columns}
    places = np.broadcast_to(evaluate_index(one.offset, known), sizes)
    inside = True if one.predicate is None else evaluate_index(one.predicate, known)
    return places, np.broadcast_to(inside, sizes)


def _register_tags(x: RegisterFragment, machine: TagMachine) -> Tags:
    held = machine.tags(x.buffer)
    columns = [held[:, x.registers[v]] >> (_HIGH * (v % x.per_register)) for v in range(x.values)]
    found = np.stack(columns, axis=1)
    return found & _LOW if x.per_register > 1 else found
