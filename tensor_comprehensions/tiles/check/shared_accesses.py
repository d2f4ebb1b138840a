"""Count the bank conflicts of a module's accesses to shared memory, and choose the swizzles with the fewest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...layouts import Swizzle
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import ATOMS, ROW_BYTES
from ...loop_ir.intrinsics import COPY_ASYNC, COPY_ASYNC_ZERO, is_asynchronous
from ...loop_ir.rewrite import allocated_buffers, map_expr, map_stmt, stmt_expressions, walk_expr
from ...loop_ir.shared_memory_banks import count_bank_conflict_turns
from ...loop_ir.swizzled_buffer import swizzle_fault
from ..swizzles import candidates
from ..tensors import DataTensor

_OPERATORS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.floor_divide, "mod": np.mod, "min": np.minimum,
    "max": np.maximum, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip


Offsets = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SharedAccesses:
    """The distinct accesses to a buffer with the same width and number of threads.

    Attributes:
        offsets: the offset, in elements, of each access (rows) and thread (columns).
        width: the bytes that a thread accesses.
    """

    offsets: Offsets
    width: int


_Found = dict[str, dict[tuple[int, bytes], Offsets]]
"""For each shared buffer, the offsets of its accesses, keyed by width and by the offsets' bytes to drop duplicates."""


def swizzled_module(module: ir.Module) -> ir.Module:
    """The module with each shared buffer swizzled so that bank conflicts are minimal, or not at all if none helps."""
    (kernel,) = module.kernels
    found: dict[str, ir.Buffer] = {}
    accesses = shared_accesses(kernel)
    for buffer in allocated_buffers(kernel.body):
        if buffer.space is not ir.Space.SHARED or buffer.swizzle is not None:
            continue
        if (best := _choose_swizzle(buffer, accesses.get(buffer.name, []))) is not None:
            found[buffer.name] = replace(buffer, swizzle=best)
    if not found:
        return module
    return replace(module, kernels=(replace(kernel, body=with_buffers(kernel.body, found)),))


def bank_turns(module: ir.Module) -> int:
    """The extra cycles that bank conflicts cost over all accesses to shared memory, with loop variables set to 0."""
    (kernel,) = module.kernels
    buffers = {b.name: b for b in allocated_buffers(kernel.body)}
    return sum(
        _count_conflict_turns(accesses, buffers[name], buffers[name].swizzle)
        for name, accesses in shared_accesses(kernel).items()
    )


def shared_accesses(kernel: ir.Kernel) -> dict[str, list[SharedAccesses]]:
    """The accesses of the threads of a block to each shared buffer, by its name."""
    assert kernel.launch is not None
    threads = np.arange(kernel.launch.block[0])
    found: _Found = {}
    _collect_shared_accesses(kernel.body, {ir.THREAD[0]: threads}, found)
    return {name: _stack_accesses(accesses) for name, accesses in found.items()}


def _stack_accesses(accesses: Mapping[tuple[int, bytes], Offsets]) -> list[SharedAccesses]:
    alike: dict[tuple[int, int], list[Offsets]] = {}
    for (width, _), offsets in accesses.items():
        alike.setdefault((width, len(offsets)), []).append(offsets)
    return [SharedAccesses(np.stack(rows), width) for (width, _), rows in alike.items()]


def _choose_swizzle(buffer: ir.Buffer, accesses: list[SharedAccesses]) -> tuple[int, int, int] | None:
    if len(buffer.shape) < 2 or not accesses:
        return None
    tile = DataTensor.make_addressed_tensor(buffer.shape[-2:], buffer.type.dtype, ir.Space.SHARED)
    best, fewest = None, _count_conflict_turns(accesses, buffer, None)
    for swizzle in _fitting_swizzles(buffer, tile):
        if not fewest:
            break
        turns = _count_conflict_turns(accesses, buffer, swizzle)
        if turns < fewest:
            best, fewest = swizzle, turns
    return best


def _fitting_swizzles(buffer: ir.Buffer, tile: DataTensor) -> Iterator[tuple[int, int, int]]:
    for s in candidates(tile):
        swizzle = (s.bits, s.base, s.shift)
        if swizzle_fault(replace(buffer, swizzle=swizzle)) is None:
            yield swizzle


def _count_conflict_turns(
    accesses: list[SharedAccesses], buffer: ir.Buffer, swizzle: tuple[int, int, int] | None
) -> int:
    size, place = buffer.type.dtype.size, Swizzle(*swizzle or (0, 0, 0))
    return sum(count_bank_conflict_turns(size * place(a.offsets), a.width) for a in accesses)


def _collect_shared_accesses(s: ir.Stmt, values: Mapping[str, Any], found: _Found) -> None:
    match s:
        case ir.Let(name, value, body):
            _collect_shared_accesses(body, {**values, name: evaluate_index(value, values)}, found)
            return
        case ir.Loop(var, _, _, body):
            _collect_shared_accesses(body, {**values, var: 0}, found)
            return
        case ir.Block(body):
            for one in body:
                _collect_shared_accesses(one, values, found)
            return
        case ir.Allocate(_, body):
            _collect_shared_accesses(body, values, found)
            return
        case ir.If(condition, then, otherwise):
            active = np.broadcast_to(evaluate_index(condition, values), values[ir.THREAD[0]].shape)
            if not active.any():
                active = ~active  # the condition depends on loops or blocks, whose variables are 0 here
            inner = {
                k: v[active] if isinstance(v, np.ndarray) and v.shape == active.shape else v for k, v in values.items()
            }
            _collect_shared_accesses(then, inner, found)
            if otherwise is not None:
                _collect_shared_accesses(otherwise, values, found)
            return
        case ir.Invoke(name, operands):
            if is_asynchronous(s):
                return  # TMA copies and warpgroup products have no conflicts
            width = s.attributes[0] if name in (COPY_ASYNC, COPY_ASYNC_ZERO) else ROW_BYTES if name in ATOMS else 4
            for buffer, where in operands:
                _record_shared_access(buffer, where, width, values, found)
        case ir.Store(buffer, indices):
            _record_shared_access(buffer, indices, 0, values, found)
    for e in stmt_expressions(s):
        for part in walk_expr(e):
            if isinstance(part, ir.Load):
                _record_shared_access(part.buffer, part.indices, 0, values, found)


def _record_shared_access(
    buffer: ir.Buffer, where: tuple[ir.Expr, ...], width: int, values: Mapping[str, Any], found: _Found
) -> None:
    if buffer.space is not ir.Space.SHARED:
        return
    lanes = max([i.type.lanes for i in where], default=1)
    threads = values[ir.THREAD[0]].shape
    total = np.zeros(threads, np.int64)
    for index, stride in zip(where, buffer.strides, strict=True):
        first = index.base if isinstance(index, ir.Ramp) else index
        total = total + np.asarray(evaluate_index(first, values)) * stride
    width = width or lanes * buffer.type.dtype.size
    found.setdefault(buffer.name, {}).setdefault((width, total.tobytes()), total)


def evaluate_index(e: ir.Expr, values: Mapping[str, Any]) -> Any:
    """The value of an index in every thread; unknown variables and expressions are 0."""
    match e:
        case ir.Const(value):
            return value
        case ir.Var(name):
            return values.get(name, 0)
        case ir.Binary(op, left, right):
            return _OPERATORS[op](evaluate_index(left, values), evaluate_index(right, values))
        case ir.Unary("neg", operand):
            return -evaluate_index(operand, values)
        case ir.Unary("not", operand):
            return np.logical_not(evaluate_index(operand, values))
        case ir.Select(condition, then, otherwise):
            parts = (evaluate_index(x, values) for x in (condition, then, otherwise))
            return np.where(*parts)
        case ir.Call("broadcast_warp", (number,)):
            return evaluate_index(number, values)
    return 0


def with_buffers(s: ir.Stmt, found: Mapping[str, ir.Buffer]) -> ir.Stmt:
    """`s` with the buffers in `found` substituted by name."""

    def on_expr(e: ir.Expr) -> ir.Expr:
        if type(e) is ir.Const or type(e) is ir.Var:
            return e
        e = map_expr(e, on_expr)
        return replace(e, buffer=found[e.buffer.name]) if isinstance(e, ir.Load) and e.buffer.name in found else e

    def on_stmt(s: ir.Stmt) -> ir.Stmt:
        s = map_stmt(s, on_expr, on_stmt)
        match s:
            case ir.Allocate(buffers):
                return replace(s, buffers=tuple(found.get(b.name, b) for b in buffers))
            case ir.Store(buffer) if buffer.name in found:
                return replace(s, buffer=found[buffer.name])
            case ir.Invoke(_, operands):
                return replace(s, operands=tuple((found.get(b.name, b), where) for b, where in operands))
        return s

    return on_stmt(s)
