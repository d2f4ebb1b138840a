"""Sectors of global memory that a warp touches.

This counts the first warp of the first block, in the first iteration of every loop around an access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..loop_ir import nodes as ir
from ..loop_ir.interpret.ops import binary_function
from ..loop_ir.intrinsics import COPY_ASYNC, COPY_ASYNC_ZERO
from ..loop_ir.rewrite import stmt_expressions, substatements, walk_expr

SECTOR, WARP = 32, 32
"""Bytes of a sector, the unit of global memory traffic; threads of a warp."""
_Lanes = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SectorCount:
    """The traffic of a warp in one access to global memory.

    Attributes:
        kind: "reads" or "writes".
        buffer: the name of the buffer.
        threads: how many threads take part.
        bytes: the distinct bytes that they access.
        sectors: how many sectors of `SECTOR` bytes are moved.
        least: how many sectors so many bytes need.
    """

    kind: str
    buffer: str
    threads: int
    bytes: int
    sectors: int

    @property
    def least(self) -> int:
        return -(-self.bytes // SECTOR)


def count_sectors(kernel: ir.Kernel) -> tuple[tuple[SectorCount, int], ...]:
    """The accesses of a kernel, which has a launch, to global memory, and how often each occurs in its text.

    Accesses with addresses that depend on data, and copies of boxes (TMA), are left out.
    """
    assert kernel.launch is not None
    threads = np.arange(min(WARP, prod(kernel.launch.block)))
    x, y, _ = kernel.launch.block
    here = {"thread.x": threads % x, "thread.y": threads // x % y, "thread.z": threads // (x * y)}
    found: dict[SectorCount, int] = {}
    for count in _count_statement_sectors(
        kernel.body, {name: here.get(name, 0 * threads) for name, _ in kernel.launch.ranges()}
    ):
        found[count] = found.get(count, 0) + 1
    return tuple(found.items())


def _count_statement_sectors(s: ir.Stmt, values: Mapping[str, _Lanes]) -> Iterator[SectorCount]:
    """The accesses in `s`. values: the known values of variables, for each thread that reaches `s`."""
    for e in stmt_expressions(s):
        loads = (x for x in walk_expr(e) if isinstance(x, ir.Load))
        yield from _count_access_sectors("reads", ((x.buffer, x.indices, 0) for x in loads), values)
    match s:
        case ir.Store(buffer, indices, value):
            yield from _count_access_sectors(
                "writes", [(buffer, indices, buffer.type.dtype.size * value.type.lanes)], values
            )
        case ir.Invoke(name, operands, attributes) if name in (COPY_ASYNC, COPY_ASYNC_ZERO):
            yield from _count_access_sectors("reads", [(*operands[1], attributes[0])], values)
        case ir.Let(name, value):
            values = _bind_variable(values, name, _evaluate_per_thread(value, values))
        case ir.Loop(var, start):
            values = _bind_variable(values, var, _evaluate_per_thread(start, values))
        case ir.If(condition, then, otherwise):
            taken = _evaluate_per_thread(condition, values)
            for branch, here in ((then, taken), (otherwise, None if taken is None else ~taken.astype(bool))):
                if branch is not None and (here is None or here.any()):
                    yield from _count_statement_sectors(branch, _select_threads(values, here))
            return
    for c in substatements(s):
        yield from _count_statement_sectors(c, values)


def _bind_variable(values: Mapping[str, _Lanes], name: str, value: _Lanes | None) -> Mapping[str, _Lanes]:
    others = {n: v for n, v in values.items() if n != name}
    return others if value is None else {**others, name: value}


def _select_threads(values: Mapping[str, _Lanes], taken: _Lanes | None) -> Mapping[str, _Lanes]:
    return values if taken is None else {name: value[taken.astype(bool)] for name, value in values.items()}


def _count_access_sectors(
    kind: str, places: Iterable[tuple[ir.Buffer, tuple[ir.Expr, ...], int]], values: Mapping[str, _Lanes]
) -> Iterator[SectorCount]:
    for buffer, indices, size in places:
        if buffer.space is not ir.Space.GLOBAL:
            continue
        size = size or buffer.type.dtype.size * max((i.type.lanes for i in indices), default=1)
        where = [_evaluate_per_thread(i, values) for i in indices]
        if any(place is None for place in where):
            continue
        zero = 0 * values["thread.x"]
        flat = sum((p * s for p, s in zip(where, buffer.strides, strict=True) if p is not None), zero)
        touched = (flat * buffer.type.dtype.size)[:, None] + np.arange(size)
        unique = np.unique(touched)
        yield SectorCount(kind, buffer.name, len(flat), unique.size, np.unique(unique // SECTOR).size)


def _evaluate_per_thread(e: ir.Expr, values: Mapping[str, _Lanes]) -> _Lanes | None:
    """The value of an integer or bool expression for each thread; for a vector, of its first lane; None if unknown."""
    match e:
        case ir.Const(constant):
            return np.full_like(values["thread.x"], int(constant))
        case ir.Var(name):
            return values.get(name)
        case ir.Ramp(operand) | ir.Broadcast(operand):
            return _evaluate_per_thread(operand, values)
        case ir.Cast(operand, dtype):
            return _evaluate_per_thread(operand, values) if not dtype.is_float else None
        case ir.Unary(op, operand):
            value = _evaluate_per_thread(operand, values)
            return None if value is None else -value if op == "neg" else 1 - value
        case ir.Binary(op, left, right):
            a, b = _evaluate_per_thread(left, values), _evaluate_per_thread(right, values)
            if a is None or b is None or (op in ("div", "mod") and not b.all()):
                return None
            return np.asarray(binary_function(op, left.type.dtype)(a, b), np.int64)
        case ir.Select(condition, then, otherwise):
            c, a, b = (_evaluate_per_thread(x, values) for x in (condition, then, otherwise))
            return None if c is None or a is None or b is None else np.where(c, a, b)
    return None
