"""Run a loop program compiled and interpreted, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tensor_comprehensions.codegen.llvm.llvm_printer import emit_llvm
from tensor_comprehensions.core.dtypes import BFLOAT16, BOOL, DType
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.interpret.ops import round_to, storage_dtype
from tensor_comprehensions.loop_ir.nodes import Buffer, Invoke, Kernel, Module, Space, Stmt, Store
from tensor_comprehensions.loop_ir.rewrite import walk_stmt_exprs, walk_stmts
from tensor_comprehensions.runtime.cpu import host_symbols, object_code
from tensor_comprehensions.target import CpuTarget


def module(*statements: Stmt, sites: int = 0) -> Module:
    """One kernel per statement; the global buffers they use are the arguments, in order of appearance."""
    buffers: dict[str, Buffer] = {}
    written: dict[str, None] = {}
    for s in statements:
        for e in [*walk_stmt_exprs(s), *walk_stmts(s)]:
            mentioned = [b for b, _ in e.operands] if isinstance(e, Invoke) else [getattr(e, "buffer", None)]
            for b in mentioned:
                if isinstance(b, Buffer) and b.space is Space.GLOBAL:
                    buffers.setdefault(b.name, b)
        written |= {s.buffer.name: None for s in walk_stmts(s) if isinstance(s, Store)}
    kernels = tuple(Kernel(f"k{i}", s) for i, s in enumerate(statements))
    names = tuple(n for n in written if n in buffers)
    return Module("test", tuple(buffers.values()), (), kernels, (), names)


def random_array(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    r = np.random.default_rng(seed)
    if dtype == BOOL:
        return r.integers(0, 2, shape).astype(bool)
    if dtype.is_integer:
        low, high = (-20, 20) if dtype.is_signed else (0, 40)
        return r.integers(low, high, shape).astype(dtype.name)
    return np.asarray(round_to(r.uniform(-4, 4, shape), dtype)).reshape(shape)


def compile_module(m: Module, target: CpuTarget) -> object_code.Executable:
    return object_code.assemble_and_load(emit_llvm(m, target, host_symbols.vector_functions()), target)


def assembly(m: Module, target: CpuTarget) -> str:
    return object_code.host_assembly(emit_llvm(m, target, host_symbols.vector_functions()), target)


def run(
    m: Module, arrays: Mapping[str, np.ndarray], target: CpuTarget
) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
    """The arguments after a run on copies of `arrays`, laid out as the buffers say; and the status.

    It is compiled in any case, and interpreted where the code cannot run.
    """
    executable = compile_module(m, target)
    if not target.runs_here():
        arguments = {name: array.copy() for name, array in arrays.items()}
        failures = interpret(m, arguments)
        return arguments, _status(failures)
    memory = {b.name: _lay_out(b, arrays[b.name]) for b in m.arguments}
    temporaries = [np.zeros(b.span * b.type.dtype.size, np.uint8) for b in m.temporaries]
    addresses = [memory[b.name].ctypes.data for b in m.arguments] + [t.ctypes.data for t in temporaries]
    status = executable(addresses)
    results = {b.name: _widen(memory[b.name], b.type.dtype) for b in m.arguments}
    return {b.name: _view(results[b.name], b).copy() for b in m.arguments}, status


def compare(
    m: Module, arrays: Mapping[str, np.ndarray], target: CpuTarget, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """The compiled run gives what the interpreter gives."""
    expected = {name: array.copy() for name, array in arrays.items()}
    failures = interpret(m, expected)
    got, status = run(m, arrays, target)
    assert status == _status(failures)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=rtol, atol=atol, err_msg=name)


def _status(failures: list[tuple[int, int]]) -> tuple[int, int]:
    return (failures[0][0] + 1, failures[0][1]) if failures else (0, 0)


def _view(flat: np.ndarray, b: Buffer) -> np.ndarray:
    if math.prod(b.shape) == 0:
        return np.zeros(b.shape, flat.dtype)
    return np.lib.stride_tricks.as_strided(flat, b.shape, [s * flat.itemsize for s in b.strides])


def _lay_out(b: Buffer, array: np.ndarray) -> np.ndarray:
    flat = np.zeros(max(1, b.span), array.dtype)
    _view(flat, b)[...] = array
    if b.type.dtype == BFLOAT16:
        return (flat.view(np.uint32) >> 16).astype(np.uint16)
    return flat


def _widen(flat: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype == BFLOAT16:
        return (flat.astype(np.uint32) << 16).view(storage_dtype(dtype))
    return flat
