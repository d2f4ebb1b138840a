"""Kernels for any number of rows, compared with the reference evaluator for sizes that they were not made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensor_comprehensions.api import Op
from tensor_comprehensions.compiler.compiled_kernel import CompiledRangeKernel
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.tc_lang.ir import Role


def range_kernels(op: Op) -> list[CompiledRangeKernel]:
    """The kernels for any number of rows that calls of an operator have used."""
    return [k for k in op._kernels.loaded_kernels() if isinstance(k, CompiledRangeKernel)]


def fits_kernel(op: Op, kernel: CompiledRangeKernel, arguments: Sequence[Any]) -> bool:
    """Have arguments the sizes that are part of a kernel?"""
    given = dict(zip((p.name for p in op.function.parameters), arguments, strict=True))
    inputs = (t for t in kernel.bound.tensors if t.role is Role.INPUT)
    return all(
        n == given_n or d in kernel.dynamic_dimensions(t.name)
        for t in inputs
        for d, (n, given_n) in enumerate(zip(t.shape, np.shape(given[t.name]), strict=True))
    )


def check_machine_code(op: Op, arguments: Sequence[Any], initial: Mapping[str, Any]) -> None:
    """Does a call give what the reference evaluator does?"""
    expected = op.reference(*arguments, **initial)
    for _ in range(2):  # the second call takes the short way
        require_close(op(*arguments, **initial), expected, op, arguments)


def require_close(found: Any, expected: Any, op: Op, arguments: Sequence[Any]) -> None:
    """Are results, one or several, the same but for rounding?"""
    pairs = zip(_results(found), _results(expected), strict=True)
    for mine, right in pairs:
        tolerance = 4e-3 if right.dtype in (torch.float16, torch.bfloat16) else 1e-4
        assert (mine.shape, mine.dtype) == (right.shape, right.dtype), op
        scale = max(1.0, float(right.double().nan_to_num(0, 0, 0).abs().max())) if right.numel() else 1.0
        same = torch.allclose(mine.double(), right.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        assert same, (op, [getattr(x, "shape", x) for x in arguments])


def _results(x: Any) -> list[Tensor]:
    return [torch.as_tensor(r) for r in (x if isinstance(x, tuple) else (x,))]


def check_interpreter(
    op: Op, kernel: CompiledRangeKernel, arguments: Sequence[Any], initial: Mapping[str, Any]
) -> None:
    """Check that the interpreted loop program gives the results of the reference evaluator. Every access is checked."""
    module, bound = _join(kernel), kernel.bound
    expected = dict(zip(bound.returns, _results(op.reference(*arguments, **initial)), strict=True))
    given = dict(zip((p.name for p in op.function.parameters), arguments, strict=True))
    values: dict[str, np.ndarray[Any, Any]] = {}
    sizes = [0] * module.arguments[-1].shape[0]
    for n, t in enumerate(t for t in bound.tensors if t.role is not Role.TEMPORARY):
        buffer = module.arguments[n]
        if t.role is Role.INPUT:
            array = np.array(torch.as_tensor(given[t.name]).numpy(), order="C")
        else:
            array = np.array(torch.as_tensor(initial.get(t.name, torch.zeros_like(expected[t.name]))).numpy())
        for d, number in kernel.sized_dimensions(t.name).items():
            sizes[number] = array.shape[d]
        array = array.reshape(_merge_rows(kernel, t.name, array.shape) if buffer.dynamic else buffer.shape)
        values[buffer.name] = np.array(array, order="C")
    values[module.arguments[-1].name] = np.array(sizes, np.int64)
    assert interpret(module, values) == []
    places = {t.name: module.arguments[n].name for n, t in enumerate(bound.tensors) if t.role is not Role.TEMPORARY}
    found = tuple(torch.from_numpy(values[places[r]]).reshape(expected[r].shape) for r in bound.returns)
    require_close(found, tuple(expected.values()), op, arguments)


@lru_cache(maxsize=4)
def _join(kernel: CompiledRangeKernel) -> Module:
    """The loop program of a kernel, made once for several calls."""
    module: Module = kernel.rerun_until("join")
    return module


def _merge_rows(kernel: CompiledRangeKernel, tensor: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor with one dimension for each axis."""
    found = list(shape)
    for rows in sorted(kernel.axes, key=lambda rows: -(rows.place(tensor) or 0)):
        place = rows.place(tensor)
        if place is not None:
            found[place : place + rows.depth] = [int(np.prod(shape[place : place + rows.depth]))]
    return tuple(found)
