"""Verify decompositions by running them on tags, i.e. element numbers, instead of values.

The body of a move must put the tag of every element at its specified location, and no tag anywhere else. The body of a
product must multiply every (m, n, k) exactly once, with the same k in both factors. This is checked for the sizes of
the program, in the first and last blocks, at the first and last loop iterations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import InternalError
from ...layouts.layout import flatten_tuple
from ...loop_ir import build
from ...loop_ir import nodes as ir
from .. import specs
from ..builder.tile_views import MemoryView, Operand, RegisterFragment
from ..lower.roles import is_group_product
from ..lower.warpgroup_products import thread_range
from .shared_accesses import evaluate_index
from .tag_machine import HIGH, LOW, UNTOUCHED, TagMachine, Tags


def check_program(program: specs.Program) -> int:
    """Verify the moves and products of a decomposed program, and return the number of checked bodies.

    Raises:
        InternalError: a body does not implement its spec; the message names an element.
    """
    count = 0
    for last in (False, True):
        block = program.blocks - program.cluster if last else 0
        walks = [_walk_block(program, block + n, last=last) for n in range(program.cluster)]
        for specs_of_blocks in zip(*walks, strict=True):  # all blocks of a cluster reach the same specs
            spec = specs_of_blocks[0][0]
            threads = thread_range(spec.threads) or (0, program.threads)
            machines = [TagMachine.of(threads, inner, program.maps) for _, inner in specs_of_blocks]
            if isinstance(spec, specs.Move):
                _check_move(spec, machines[0], machines[1:] if spec.blocks > 1 else ())
            elif isinstance(spec, specs.MatMul):
                _check_product(spec, machines[0])
            count += isinstance(spec, specs.Move | specs.MatMul)
    return count


def _walk_block(program: specs.Program, block: int, *, last: bool) -> Iterator[tuple[specs.Spec, dict[str, Any]]]:
    values: dict[str, Any] = {ir.BLOCK[0]: block, ir.THREAD[0]: np.arange(program.threads)}
    for name, e in program.names:
        values[name] = evaluate_index(e, values)
    return _walk_specs(program.body, values, last=last)


def _walk_specs(
    body: Sequence[specs.Node], values: dict[str, Any], *, last: bool
) -> Iterator[tuple[specs.Spec, dict[str, Any]]]:
    for node in body:
        match node:
            case specs.Loop(var, stop, inner):
                end = int(stop if isinstance(stop, int) else evaluate_index(stop, values))
                if end > 0:
                    yield from _walk_specs(inner, {**values, var: end - 1 if last else 0}, last=last)
            case specs.Let(names, inner):
                known = dict(values)
                for name, e in names:
                    known[name] = evaluate_index(e, known)
                yield from _walk_specs(inner, known, last=last)
            case specs.Role(body=inner) | specs.One(body=inner):
                yield from _walk_specs(inner, values, last=last)
            case specs.When(condition, inner):
                if np.any(evaluate_index(condition, values)):  # may hold for only some warpgroups of a role
                    yield from _walk_specs(inner, values, last=last)
            case specs.Spec():
                yield node, values
                yield from _walk_specs(node.body, values, last=last)


def _run_spec(spec: specs.Spec, machine: TagMachine) -> None:
    _run_nodes(spec.body, machine)


def _run_nodes(nodes: Sequence[specs.Node], machine: TagMachine) -> None:
    """Execute leaves, including those in loops and branches of user-written bodies."""
    for node in nodes:
        match node:
            case specs.Leaf(statement=statement):
                machine.run(statement, np.ones(machine.threads, bool))
            case specs.Loop(var, stop, body):
                count = stop if isinstance(stop, int) else int(evaluate_index(stop, machine.values))
                for n in range(count):
                    machine.values[var] = n
                    _run_nodes(body, machine)
            case specs.When(condition, body):
                if evaluate_index(condition, machine.values):
                    _run_nodes(body, machine)
            case specs.Spec() if not isinstance(node, specs.Init):
                _run_nodes(node.body, machine)


def _check_move(spec: specs.Move, machine: TagMachine, others: Sequence[TagMachine] = ()) -> None:
    """Check that the body copies the input. others: the other blocks of a multicast, which copy the rest."""
    (to,), (source,) = spec.outputs, spec.inputs
    sizes, text = _find_move_sizes(to, source), f"{to} <- Move({source})"
    groups = [x.group for x in (to, source) if isinstance(x, RegisterFragment) and x.group is not None]
    firsts = range(0, machine.threads, groups[0] if groups else machine.threads)
    wanted = [_place_tags(source, sizes, machine, machine.first + first) for first in firsts]
    for one in (machine, *others):
        one.memory = machine.memory
        _run_spec(spec, one)
    count = 0
    for first, tags in zip(firsts, wanted, strict=True):
        if isinstance(to, RegisterFragment):
            rows, columns = to.row_and_column()
            mine = slice(first, first + firsts.step)
            got = _register_tags(to, machine)[mine]
            expected = np.tile(tags[rows, columns], (got.shape[0] // rows.shape[0], 1))
            if not np.array_equal(got, expected):
                thread, value = (int(n) for n in np.argwhere(got != expected)[0])
                thread += machine.first + first
                raise InternalError(f"{text}: thread {thread}, value {value} holds another element")
            continue
        places, inside = _memory_places(to, sizes, machine.values, machine.first + first)
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
    _run_spec(spec, machine)
    met = np.zeros((*total.padded, depth), np.int64)
    begun: set[int] = set()
    heights = (total.padded[0], _matrix_sizes(a)[0], _matrix_sizes(b)[0])
    for product in machine.products:
        tags = (product.sums - 1, product.left - 1, product.right - 1)
        (rows, columns), (m, k), (n, other) = ((x % h, x // h) for x, h in zip(tags, heights, strict=True))
        if (rows != m[:, :1]).any() or (columns != n[:, 0][None, :]).any() or (m != m[:, :1]).any():
            raise InternalError(f"{text}: an instruction multiplies rows of other sums")
        if (k != k[:1]).any() or (other != k[0][None, :]).any():
            raise InternalError(f"{text}: an instruction multiplies elements of different k")
        anew = spec.first and is_group_product(spec) and int(tags[0][0, 0]) not in begun
        if product.more is anew:
            raise InternalError(f"{text}: sums begin anew at another product than the first, or not at all")
        begun.add(int(tags[0][0, 0]))
        np.add.at(met, (rows[:, :, None], columns[:, :, None], k[0][None, None, :]), 1)
    if (met != 1).any():
        m_, n_, k_ = (int(x) for x in np.argwhere(met != 1)[0])
        raise InternalError(f"{text}: (m, n, k) = ({m_}, {n_}, {k_}) is met {met[m_, n_, k_]} times")


def _matrix_sizes(x: Operand) -> tuple[int, int]:
    if isinstance(x, RegisterFragment):
        return x.padded
    sizes = [int(np.prod(flatten_tuple(n))) for n in x.shape]
    rows, columns = [1, 1, *sizes][-2:]
    return rows, columns


def _find_move_sizes(to: Operand, source: Operand) -> tuple[int, int]:
    return _matrix_sizes(source) if isinstance(source, RegisterFragment) else _matrix_sizes(to)


def _place_tags(x: Operand, sizes: tuple[int, int], machine: TagMachine, thread: int = 0) -> Tags:
    """Put the tag `1 + row + column * rows` at every element; return the tags by row and column, 0 for padding.

    thread: the thread whose part of memory is meant, if the location depends on the thread.
    """
    rows, columns = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")
    tags = 1 + rows + columns * sizes[0]
    if isinstance(x, RegisterFragment):
        elements = np.tile(1 + x.elements, (machine.threads // x.elements.shape[0], 1))
        held = machine.tags(x.buffer)
        held[:, list(x.registers)] = UNTOUCHED
        for v in range(x.values):
            shift = HIGH * (v % x.per_register)
            held[:, x.registers[v]] = np.where(held[:, x.registers[v]] == UNTOUCHED, 0, held[:, x.registers[v]]) | (
                elements[:, v] << shift
            )
        return tags
    places, inside = _memory_places(x, sizes, machine.values, thread)
    held = machine.tags(x.buffer)
    held[places[inside]] = tags[inside]
    return np.where(inside, held[np.where(inside, places, 0)], 0)  # read back: broadcast elements share a tag


def _memory_places(x: MemoryView, sizes: tuple[int, int], values: Mapping[str, Any], thread: int) -> tuple[Tags, Tags]:
    """The offset of every (row, column), and whether an element exists there."""
    one = x.matrix(*sizes).tensor[build.var("%row"), build.var("%column")]
    rows, columns = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")
    known = {**values, ir.THREAD[0]: thread, "%row": rows, "%column": columns}
    places = np.broadcast_to(evaluate_index(one.offset, known), sizes)
    inside = True if one.predicate is None else evaluate_index(one.predicate, known)
    return places, np.broadcast_to(inside, sizes)


def _register_tags(x: RegisterFragment, machine: TagMachine) -> Tags:
    held = machine.tags(x.buffer)
    columns = [held[:, x.registers[v]] >> (HIGH * (v % x.per_register)) for v in range(x.values)]
    found = np.stack(columns, axis=1)
    return found & LOW if x.per_register > 1 else found
