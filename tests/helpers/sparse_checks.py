"""A sparse call three ways: by the reference evaluator, by machine code, and by the checked interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensor_comprehensions.compiler import sparse_passes
from tensor_comprehensions.compiler.compiled_sparse_kernel import CompiledSparseKernel
from tensor_comprehensions.dispatch.sparse import sparse_kernels, sparse_run
from tensor_comprehensions.dispatch.sparse.sparse_run import SparseCall, StoredCounts
from tensor_comprehensions.dispatch.sparse.sparse_tensor import SparseTensor
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.interpret.ops import storage_dtype
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.sparse.shared_sparsity import shared_places
from tensor_comprehensions.tc_lang.binding.bind import bind
from tensor_comprehensions.tc_lang.formats import Format
from tensor_comprehensions.tc_lang.ir import Function
from tensor_comprehensions.tc_lang.reference.sparse_evaluator import StoredTensor, evaluate_sparse

Array = np.ndarray[Any, Any]


@contextmanager
def remembered_passes() -> Iterator[None]:
    """The passes run once for machine code and interpreter; a compiled kernel forgets what they gave."""
    known: dict[int, tuple[Module, Module]] = {}
    original = sparse_passes.run_sparse_passes

    def run(module: Module) -> Module:
        if id(module) not in known:
            known[id(module)] = module, original(module)
        return known[id(module)][1]

    sparse_passes.run_sparse_passes = run
    try:
        yield
    finally:
        sparse_passes.run_sparse_passes = original


@contextmanager
def filled_memory() -> Iterator[None]:
    """New memory holds NaN and the largest integers: what reads it before it is written gives another result."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# --- reference ---------------------------------------------------------------------------------------------------


def reference(function: Function, values: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, StoredTensor]:
    """What `function`, which has the formats of its operands, returns; `values` by name."""
    operands = {name: to_stored(x) for name, x in values.items()}
    returned = {t.name: t.format for t in function.tensors if t.name in function.returns}
    sparse = {name: f for name, f in returned.items() if f is not None and not f.is_dense}
    known = {n: v for n, v in sizes.items() if n in function.sizes}
    return evaluate_sparse(bind(function, known, {}), operands, sparse, shared_places(function, known))


def to_stored(x: Any) -> StoredTensor:
    """A tensor as arrays; of a sparse one with the places that its parts name."""
    if not isinstance(x, SparseTensor):
        return StoredTensor(x.detach().numpy())
    places = np.zeros(x.shape, bool)
    places[tuple(x.coordinates().numpy())] = True
    return StoredTensor(x.to_dense().detach().numpy(), places)


def complete_blocks(places: Array, format: Format) -> Array:
    """`places` with whole blocks and dense tails where one of their elements is stored."""
    done = places
    if format.blocks:
        (a, b), (n, m) = format.blocks, places.shape
        blocks = places.reshape(n // a, a, m // b, b).any((1, 3))
        return np.repeat(np.repeat(blocks, a, 0), b, 1)
    for level in range(format.depth, format.rank):
        done = np.broadcast_to(done.any(format.order[level], keepdims=True), done.shape)
    return np.array(done)


def check_result(name: str, found: Any, expected: StoredTensor, format: Format | None, tolerance: float) -> None:
    """A result has the values, and a sparse one the stored places, of the reference."""
    wanted = expected.values
    if format is None or format.is_dense:
        values = found
    else:
        assert isinstance(found, SparseTensor), name
        found.check()
        assert found.format == format
        values, places = found.to_dense(), np.zeros(found.shape, bool)
        places[tuple(found.coordinates().numpy())] = True
        stored = np.zeros(found.shape, bool) if expected.places is None else expected.places
        np.testing.assert_array_equal(places, complete_blocks(stored, format), err_msg=f"stored places of {name}")
        wanted = np.where(stored, wanted, np.zeros((), wanted.dtype))
    array = values.numpy()
    assert array.dtype == wanted.dtype, name
    np.testing.assert_allclose(array, wanted, rtol=tolerance, atol=tolerance, err_msg=name)


def same(a: Any, b: Any) -> bool:
    """Whether two results have the same format and the same bits, with NaN as one value."""
    if isinstance(a, SparseTensor):
        pairs = [*zip(arrays_of(a), arrays_of(b), strict=True)]
        return a.format == b.format and a.shape == b.shape and all(_equal(x, y) for x, y in pairs)
    return _equal(a, b)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy(), equal_nan=a.dtype.is_floating_point)


def arrays_of(x: SparseTensor) -> list[Tensor]:
    """All pos and crd, then the values."""
    levels = [a for level in x.levels if level is not None for a in level if a is not None]
    return [*levels, x.values]


# --- interpreter -------------------------------------------------------------------------------------------------


@dataclass
class _Interpreted:
    """In the place of the machine code of a phase."""

    module: Module
    run: InterpretedRun

    def __call__(self, addresses: Sequence[int]) -> tuple[int, int]:
        memory = self.run.memory()
        arrays = {}
        for b, address in zip(self.module.arguments, addresses, strict=True):
            kind = storage_dtype(b.type.dtype)
            found = memory.get(address)
            arrays[b.name] = np.zeros(0, kind) if found is None else found.view(kind)
        failures = interpret(self.module, arrays)
        assert not failures
        return 0, 0


class InterpretedRun(sparse_run.SparseRun):
    """A run of a kernel whose phases are interpreted: any access outside of an array is an InternalError."""

    def __init__(
        self,
        kernel: CompiledSparseKernel,
        call: SparseCall,
        sizes: Mapping[str, int],
        counts: StoredCounts | None = None,
    ) -> None:
        phases = [_Interpreted(m, self) for m in kernel.phases]
        super().__init__(SimpleNamespace(plan=kernel.plan, executables=phases), call, sizes, counts)  # type: ignore[arg-type]

    def memory(self) -> dict[int, Array]:
        """All arrays of the run, by where they begin."""
        found: list[Array] = [self.size_array, self.totals]
        tensors = [*self.values.values(), *self.rows.values(), *(x for xs in self.arrays.values() for x in xs)]
        tensors += [x for t in self.sparse.values() for x in arrays_of(t)]
        found += [t.detach().reshape(-1).numpy() for t in tensors if t.is_contiguous()]
        return {a.ctypes.data: a for a in sorted(found, key=len)}


def interpret_def(
    kernels: sparse_kernels.SparseKernels, values: Sequence[object], initial: Mapping[str, object]
) -> dict[str, Tensor | SparseTensor]:
    """What the def returns by the interpreter, with the same allocation and the same checks as a call."""
    return InterpretedRun(*kernels._kernel_for(kernels.accept(values, initial))).results()
