"""Kernels for any processor, on any: run where their code can be, and else interpreted as loop programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.compiler.compiled_kernel import CompiledCpuKernel
from tensor_comprehensions.compiler.cpu_passes import with_original_names
from tensor_comprehensions.dispatch.call_steps import launch_error, normalize_arguments
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.interpret.ops import storage_dtype
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget

SSE2 = CpuTarget("cpu", "x86-64", "", 128, 16, (32768, 1048576))
TARGETS = (AVX512, AVX2, SSE2)
"""One for each width of vectors."""


def run(kernel: tc.Kernel, *tensors: Any, out: torch.Tensor | None = None, **initial: torch.Tensor) -> Any:
    """What a call of `kernel` gives. Its machine code was made in any case."""
    if kernel.compiled.target.runs_here():
        return kernel(*tensors, **initial) if out is None else kernel(*tensors, out=out, **initial)
    function = kernel.function
    given = normalize_arguments(kernel._kernels.call_signature, tensors, initial)
    inputs = dict(zip([p.name for p in function.parameters], given.inputs, strict=True))
    inputs |= dict(zip([p.name for p in function.inouts], given.initial, strict=True))
    results = interpret_compiled(kernel.compiled, inputs)
    if out is not None:
        return out.copy_(results[0])
    return results[0] if len(results) == 1 else results


def interpret_compiled(compiled: CompiledCpuKernel, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of the loop program that is compiled. Raises RangeError as a call does."""
    module: Module = with_original_names(compiled.rerun_until("simplify_again"), compiled.bound)
    arrays, failures = interpret_module(module, inputs)
    if failures:
        site, value = failures[0]
        raise launch_error(compiled.bound.name, compiled.sites, site + 1, value)
    returns = [compiled.bound.tensor(name) for name in compiled.bound.returns]
    return tuple(torch.from_numpy(arrays[t.name]).reshape(t.shape).to(getattr(torch, t.dtype.name)) for t in returns)


def interpret_module(
    module: Module, inputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, np.ndarray[Any, Any]], list[tuple[int, int]]]:
    """Run `module` by the interpreter: all its arguments afterwards, and the check that failed.

    With the interpreter's checks: no race, no element out of bounds, no read of what nothing wrote.
    """
    arrays = {}
    for b in module.arguments:
        kind = storage_dtype(b.type.dtype)
        x = inputs.get(b.name)
        if x is None:
            arrays[b.name] = np.ones(b.shape, kind)
        else:
            wide = x.float() if x.dtype is torch.bfloat16 else x
            arrays[b.name] = np.array(wide.numpy(), kind, order="C").reshape(b.shape)
    return arrays, interpret(module, arrays)
