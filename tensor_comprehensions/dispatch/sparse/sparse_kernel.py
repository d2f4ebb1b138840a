"""A sparse kernel that users can inspect and call, and the reference evaluator for sparse operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...compiler.compiled_sparse_kernel import CompiledSparseKernel
from ...core.error_boundary import only_tc_errors
from ...sparse.shared_sparsity import shared_places
from ...tc_lang.binding.bind import bind
from ...tc_lang.ir import Function
from ...tc_lang.reference.numpy_expression import Array
from ...tc_lang.reference.sparse_evaluator import StoredTensor, evaluate_sparse
from ..arguments import TORCH_TYPES
from ..compiled_callable import CompiledCallable
from ..signatures import format_signature
from . import pack
from .sparse_tensor import SparseTensor

if TYPE_CHECKING:
    from ...explain.kernel_report import Report
    from .sparse_run import SparseCall


class SparseKernel(CompiledCallable[CompiledSparseKernel]):
    """A kernel of an operator for operands in given formats and of any sizes. Call it like the operator.

    Attributes:
        compiled: the compiled kernel with its texts and metadata.
        compile_seconds: the seconds that compilation took.
        resources: phases of a call, and bytes of machine code.
    """

    def __init__(self, call: Callable[..., Any], compiled: CompiledSparseKernel, dense: Sequence[str] = ()) -> None:
        """dense: the tensors that calls compute with dense kernels instead of this kernel."""
        self._call, self.compiled, self._dense = call, compiled, dense

    def __repr__(self) -> str:
        name = format_signature(self.compiled.plan.problem.function)
        return f"<sparse kernel of {name}, compiled in {self.compile_seconds * 1e3:.0f} ms>"

    @only_tc_errors
    def __call__(self, /, *tensors: Any, **initial: Any) -> Any:
        return self._call(*tensors, **initial)

    @only_tc_errors
    def explain(self) -> Report:
        """Explain the kernel's code: `print` the report for the short form, `save("x.html")` it for the page."""
        from ...explain.sparse import explain_sparse_kernel

        return explain_sparse_kernel(self.compiled)

    @only_tc_errors
    def source(self, kind: str = "schedule") -> str:
        """The kernel as text of a kind: "tc", "schedule", "loops", "c", "llvm" or "asm"."""
        text = self.compiled.source(kind)
        if kind != "schedule" or not self._dense:
            return text
        return f"{text}\ncalls compute {', '.join(self._dense)} by dense kernels, in place of these loops"


def without_gradients(values: Sequence[object]) -> list[object]:
    """`values` with tensors that require gradients detached."""
    return [x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in values]


def evaluate(function: Function, call: SparseCall, sizes: Mapping[str, int]) -> dict[str, Tensor | SparseTensor]:
    """The results of the reference evaluator, which computes with dense tensors, by name and in their formats."""
    scalars = {name: sizes[name] for name in function.scalars}
    bound = bind(function, {n: v for n, v in sizes.items() if n not in scalars}, scalars)
    operands = {name: StoredTensor(_to_array(x)) for name, x in call.dense.items()}
    operands |= {name: _to_stored(t) for name, t in call.sparse.items()}
    returned = {name: function.tensor(name).format for name in function.returns}
    sparse = {name: f for name, f in returned.items() if f is not None and not f.is_dense}
    found = evaluate_sparse(bound, operands, sparse, shared_places(function, sizes))
    types = {t.index_dtype for t in call.sparse.values()}
    index = torch.int64 if torch.int64 in types else torch.int32
    results: dict[str, Tensor | SparseTensor] = {}
    for name, stored in found.items():
        symbol = function.tensor(name)
        values = torch.from_numpy(np.array(stored.values, order="C")).to(TORCH_TYPES[symbol.dtype])
        if symbol.format is None or stored.places is None or name not in sparse:
            results[name] = values
            continue
        where = torch.from_numpy(np.stack(np.nonzero(stored.places)))
        results[name] = pack.from_coordinates(where, values[tuple(where)], values.shape, symbol.format, index)
    return results


def _to_array(x: Tensor) -> Array:
    x = x.detach()
    return np.asarray((x.float() if x.dtype is torch.bfloat16 else x).numpy())


def _to_stored(t: SparseTensor) -> StoredTensor:
    if t.format.is_dense:
        return StoredTensor(_to_array(t.to_dense()))
    places = np.zeros(t.shape, bool)
    places[tuple(t.coordinates().numpy())] = True
    return StoredTensor(_to_array(t.to_dense()), places)
