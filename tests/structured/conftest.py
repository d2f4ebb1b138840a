"""Structured ops from a short notation, and a run of what they lower to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32, DType
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.intervals import Interval, index_interval
from tensor_comprehensions.loop_ir.nodes import Buffer, Expr, Kernel, Load, Module, Stmt, Var
from tensor_comprehensions.structured.op import Iterator, IteratorKind, StructuredOp, loads_in, variable_names

Arrays = dict[str, np.ndarray[Any, Any]]


class Ops:
    """Makes ops, runs loop programs and computes what should come out."""

    @staticmethod
    def access(text: str, sizes: Mapping[str, int], dtype: DType) -> Load:
        """`A:i,2*h+kh` as a load of a compact buffer that is just large enough."""
        name, subscripts = text.strip().split(":")
        indices = tuple(_subscript(part) for part in subscripts.split(","))
        ranges = {v: Interval(0, extent - 1) for v, extent in sizes.items()}
        shape = tuple((index_interval(i, ranges).high or 0) + 1 for i in indices)
        return Load(build.buffer(name, dtype, shape), indices)

    @classmethod
    def op(
        cls, text: str, sizes: Mapping[str, int], dtype: DType = FLOAT32, storage: DType | None = None, **extra: Any
    ) -> StructuredOp:
        """`C:i,j = A:i,k x B:k,j` with the given extents; iterators absent from the output are summed."""
        output, factors = text.split("=")
        c, a, b = (cls.access(t, sizes, storage or dtype) for t in (output, *factors.split(" x ")))
        free = [n for i in c.indices for n in variable_names(i)]
        kinds = {n: IteratorKind.PARALLEL if n in free else IteratorKind.REDUCTION for n in sizes}
        iterators = tuple(Iterator(n, extent, kinds[n]) for n, extent in sizes.items())
        return StructuredOp("c", iterators, c, build.cast(a, dtype), build.cast(b, dtype), **extra)

    @staticmethod
    def module(op: StructuredOp, body: Stmt) -> Module:
        values = (op.output, op.left, op.right, op.initial, op.epilogue)
        buffers: dict[str, Buffer] = {}
        for e in values:
            for access in loads_in(e) if e is not None else ():
                buffers.setdefault(access.buffer.name, access.buffer)
        return Module("m", tuple(buffers.values()), (), (Kernel("k", body),), (), (op.output.buffer.name,))

    @classmethod
    def run(cls, op: StructuredOp, body: Stmt, seed: int = 0) -> Arrays:
        """The arrays before (`name`) and the output after (`"result"`) running `body` on small whole numbers."""
        module = cls.module(op, body)
        rng = np.random.default_rng(seed)
        arrays = {b.name: rng.integers(-3, 4, b.shape).astype(b.type.dtype.name) for b in module.arguments}
        before = {name: array.copy() for name, array in arrays.items()}
        interpret(module, arrays)
        return before | {"result": arrays[op.output.buffer.name]}


def _subscript(text: str) -> Expr:
    total: Expr | None = None
    for term in text.split("+"):
        factor, _, name = term.strip().rpartition("*")
        value = build.mul(Var(name), int(factor or 1))
        total = value if total is None else build.add(total, value)
    assert total is not None
    return total


@pytest.fixture(scope="session")
def ops() -> Ops:
    return Ops()
