"""GPU kernels for any number of rows, run by the emulator and the interpreter for sizes that they were not made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensor_comprehensions.api import Op
from tensor_comprehensions.compiler.gpu_range_passes import CompiledGpuRangeKernel
from tensor_comprehensions.dispatch.call_steps import normalize_arguments, shapes_of, sizes_of
from tensor_comprehensions.dispatch.cuda.gpu_kernels import GpuKernel
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.tc_lang.ir import Role
from tests.helpers.row_kernels import require_close


def compile_range_kernel(
    op: Op, arguments: Sequence[Any], initial: Mapping[str, Any], target: str = "cuda:sm_90", **further: Any
) -> GpuKernel | None:
    """The kernel of an operator for calls like this one; None if it is for exactly these sizes."""
    kernel: Any = op.compile(*arguments, target=target, **further, **initial)
    return kernel if isinstance(kernel.compiled, CompiledGpuRangeKernel) else None


def check_emulator(op: Op, kernel: GpuKernel, arguments: Sequence[Any], initial: Mapping[str, Any]) -> None:
    """Check that the emulated CUDA text gives the results of the reference evaluator, without a fault."""
    require_close(kernel.emulate(*arguments, **initial), op.reference(*arguments, **initial), op, arguments)


def check_interpreter(
    op: Op, compiled: CompiledGpuRangeKernel, arguments: Sequence[Any], initial: Mapping[str, Any]
) -> None:
    """Check that the interpreted loop program gives the results of the reference evaluator. Every access is checked."""
    module: Module = compiled.rerun_until("simplify")
    given = normalize_arguments(op._kernels.call_signature, arguments, initial)
    sizes = sizes_of(op._kernels.call_signature, shapes_of(op.function, given))
    expected = op.reference(*arguments, **initial)
    outputs = tuple(map(torch.as_tensor, expected if isinstance(expected, tuple) else (expected,)))
    inputs = [np.array(x.numpy(), order="C") for x in given.inputs]
    started = dict(zip([t.name for t in op.function.inouts], given.initial, strict=True))
    results = [
        np.array((started[name] if name in started else torch.zeros_like(x)).numpy(), order="C")
        for name, x in zip(op.function.returns, outputs, strict=True)
    ]
    memories = [*inputs, *results]
    strides = [[s // x.itemsize for s in x.strides] for x in memories]
    values = compiled.parameter_values(sizes, strides)
    arrays = {
        b.name: memories[n].reshape(b.bind_parameters(values).shape)
        for n, b in zip(compiled.argument_places(), module.arguments, strict=True)
    }
    assert interpret(module, arrays, values) == []
    assert all(t.role is not Role.TEMPORARY for t in compiled.bound.tensors[: len(inputs)])
    require_close(tuple(map(torch.from_numpy, results)), outputs, op, arguments)
